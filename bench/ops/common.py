"""What the benchmarks of single ops share: cases, providers, targets, and the check of outputs.

A file bench_<op>.py holds OP, QUESTION, CASES by device type (the first is the one of --quick),
MODES, PROVIDERS, TARGETS and functions: make_inputs, num_bytes, num_flops, plain, truth (`Bench`);
optional are form (what a row of ours runs), trim (the part of the results that truth speaks of),
plain_results (that part of what `plain` gives) and check_own_mask (for providers that draw masks).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

EAGER, INDUCTOR, LIGER = "eager", "inductor", "Liger"
SEE_THROUGH = "inductor, xtrain"  # inductor fuses the op's decomposition
OURS = "xtrain"  # what the op runs by itself: its kernel
COPY = "copy"  # as many bytes as the floor counts, moved by torch's copy_: what 100% means

# What the error bound adds to a multiple of plain PyTorch's error, relative to the largest value:
# half an ulp in bf16 and fp16, 8 ulp in fp32, whose sums run in another order.
SLACK = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 1e-6,
    torch.float64: 1e-14,
}
OUR_ERROR_FACTOR = 2.0  # the project's bound on error against fp64, in units of plain PyTorch's
PEER_ERROR_FACTOR = 16.0  # a peer may be coarser, not wrong; the table says how coarse


class NotThere(Exception):
    """A provider that cannot run here: not installed, not written yet, or of no use for a case."""


@dataclass(frozen=True)
class Case:
    """One input of an op's benchmark."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return names.get(self.dtype, str(self.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype_name}"


@dataclass
class Inputs:
    """Arguments of one call, which of them want gradients, and the gradients of the outputs."""

    args: tuple[Any, ...]
    grad_outs: tuple[Tensor, ...]

    @property
    def wanted(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor) and a.requires_grad]

    @property
    def tensors(self) -> list[Tensor]:
        return [*(a for a in self.args if isinstance(a, Tensor)), *self.grad_outs]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same with every tensor replaced; leaves stay leaves that want gradients."""

        def renew(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return change(value.detach()).requires_grad_(value.requires_grad)

        return Inputs(tuple(map(renew, self.args)), tuple(map(renew, self.grad_outs)))

    def clone(self) -> Inputs:
        return self.map(torch.clone)

    def double(self) -> Inputs:
        return self.map(lambda t: t.double() if t.is_floating_point() else t)


@dataclass(frozen=True)
class Provider:
    """One way of computing an op."""

    build: Callable[[Case], Callable[..., Any]]  # -> function(*args); raises NotThere
    own_mask: bool = False  # draws from torch's generator: held to its own mask
    mutates: bool = False  # writes into inputs or incoming gradients
    error_factor: float = PEER_ERROR_FACTOR


@dataclass(frozen=True)
class Target:
    """A figure that the project set itself: time of `of` over time of `against`, or memory."""

    claim: str
    at_most: float
    against: str = ""  # a provider, COPY, BEST_OTHER, or "" for a limit on peak memory in GiB
    of: str = OURS
    mode: str = "both"
    cases: tuple[str, ...] = ()  # names of cases; () means all


BEST_OTHER = "the fastest other"
NEVER_SLOWER = 1.02


def never_slower(*cases: str) -> list[Target]:
    """Return the targets that every pointwise op and norm has at every size."""
    return [Target("never slower", NEVER_SLOWER, other, cases=cases) for other in (INDUCTOR, LIGER)]


class Bench(Protocol):
    """What a file bench_<op>.py offers."""

    OP: str
    QUESTION: str
    CASES: dict[str, list[Case]]
    MODES: tuple[str, ...]
    PROVIDERS: dict[str, Provider]
    TARGETS: list[Target]

    def make_inputs(self, case: Case, device: torch.device) -> Inputs: ...

    def num_bytes(self, case: Case, mode: str) -> int | None: ...  # None: not limited by memory

    def num_flops(self, case: Case, mode: str) -> int | None: ...  # None: limited by memory

    def plain(self, case: Case) -> Callable[..., Any]: ...  # plain PyTorch in the case's dtype

    def truth(self, case: Case, inputs: Inputs) -> list[Tensor]: ...  # fp64, outputs and gradients


# --- builders -------------------------------------------------------------------------------------


def plain_provider(function: Callable[[Case], Callable[..., Any]], **flags: Any) -> Provider:
    return Provider(function, **flags)


def compiled_provider(function: Callable[[Case], Callable[..., Any]], **flags: Any) -> Provider:
    """Compile what `function` gives for a case, with the case's sizes as constants."""
    return Provider(lambda case: torch.compile(function(case), dynamic=False), **flags)


def our_op(name: str) -> Any:
    """Return the row of xtrain.ops.OPS, or say that it is not there."""
    from xtrain.ops import OPS

    if name not in OPS:
        raise NotThere(f"xtrain.ops has no {name} yet")
    return OPS[name]


def decomposed(reason: str | None) -> str:
    """Return a row's note from what `supports` said."""
    return "" if reason is None else f"runs the decomposition: {reason}"


def liger(module: str, function: str) -> Any:
    """Return a name of liger_kernel.ops, or say that it is not there."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    except ImportError as error:
        raise NotThere(f"liger-kernel is not installed ({error})") from error


# --- running and checking -------------------------------------------------------------------------


def outputs_of(function: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    outputs = function(*inputs.args)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def forward_and_backward(function: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Return outputs and gradients of one call."""
    outputs = outputs_of(function, inputs)
    grads = torch.autograd.grad(outputs, inputs.wanted, inputs.grad_outs)
    return [*(o.detach() for o in outputs), *grads]


def truth_by(function: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Return outputs and gradients in fp64 of a function that rounds nowhere between."""
    return forward_and_backward(function, inputs.double())


def errors_of(results: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Return the largest absolute error of each tensor."""
    with torch.no_grad():
        return [float((a.double() - b).abs().max()) for a, b in zip(results, truth, strict=True)]


def scales_of(truth: Sequence[Tensor]) -> list[float]:
    return [max(float(t.abs().max()), 1e-30) for t in truth]


@dataclass(frozen=True)
class Yardstick:
    """What results are held to: the truth, and how far plain PyTorch is from it."""

    truth: list[Tensor]
    plain_errors: list[float]

    @classmethod
    def of(cls, bench: Bench, case: Case, inputs: Inputs) -> Yardstick:
        truth = bench.truth(case, inputs)
        if hasattr(bench, "plain_results"):
            results = bench.plain_results(case, inputs)
        else:
            results = trimmed(bench, case, forward_and_backward(bench.plain(case), inputs))
        return cls(truth, errors_of(results, truth))

    def compare(self, results: Sequence[Tensor], factor: float) -> tuple[float, str | None]:
        """Return the worst error in units of what is allowed at factor 1, and what is wrong."""
        worst, problem = 0.0, None
        errors, scales = errors_of(results, self.truth), scales_of(self.truth)
        for i, (result, error, plain, scale) in enumerate(
            zip(results, errors, self.plain_errors, scales, strict=True)
        ):
            slack = SLACK[result.dtype] * scale
            worst = max(worst, error / max(plain, slack)) if math.isfinite(error) else math.inf
            if not error <= factor * plain + slack:
                problem = (
                    f"result {i}: error {error:.3g} against fp64, plain PyTorch's is {plain:.3g}, "
                    f"the largest value {scale:.3g}"
                )
        return worst, problem


def trimmed(bench: Bench, case: Case, results: list[Tensor]) -> list[Tensor]:
    """Return the part of the results that `bench.truth` speaks of."""
    trim = getattr(bench, "trim", None)
    return results if trim is None else trim(case, results)


def size_of(*tensors: tuple[int, torch.dtype]) -> int:
    """Return the bytes of tensors given as (number of elements, dtype)."""
    return sum(n * dtype.itemsize for n, dtype in tensors)


def keep_rate_problem(kept: Tensor, p: float) -> str | None:
    """Say so if a mask's rate is further from 1 - p than five standard deviations."""
    rate = float(kept.double().mean())
    bound = 5 * math.sqrt(p * (1 - p) / kept.numel())
    return None if abs(rate - (1 - p)) <= bound else f"keeps {rate:.5f} instead of {1 - p:.5f}"
