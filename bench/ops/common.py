"""What the benchmarks of single ops share: the record of one, and the check of what they compute.

A file bench_<family>.py holds BENCHES: a `Bench` for each op of the family.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EAGER, INDUCTOR, LIGER = "eager", "inductor", "Liger"
SEE_THROUGH = "inductor, xtrain"  # inductor fuses the op's decomposition
OURS = "xtrain"  # what the op runs by itself: its kernel
BEST_OTHER = "the fastest other"  # with which a target may compare
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
NEVER_SLOWER = 1.02  # in units of the other's time
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


Builder = Callable[[Case], Callable[..., Any]]  # -> function(*args); raises NotThere


@dataclass(frozen=True)
class Provider:
    """One way of computing an op; `of` builds it for a case."""

    build: Builder
    own_mask: bool = False  # draws from torch's generator: held to its own mask
    mutates: bool = False  # writes into inputs or incoming gradients
    on_gpu: bool = False  # has no CPU form
    error_factor: float = PEER_ERROR_FACTOR

    def of(self, case: Case, device: torch.device) -> Callable[..., Any]:
        """Return the function that takes a case's inputs; raises NotThere."""
        if self.on_gpu and device.type != "cuda":
            raise NotThere("needs a GPU")
        return self.build(case)


@dataclass(frozen=True)
class Target:
    """A figure that the project set itself: time of `of` over time of `against`, or memory."""

    claim: str
    at_most: float
    against: str = ""  # a provider, COPY, BEST_OTHER, or "" for a limit on peak memory in GiB
    of: str = OURS
    mode: str = "both"
    cases: tuple[str, ...] = ()  # names of cases; () means all

    @classmethod
    def near_copy(cls, percent: int, *cases: str, mode: str = "both") -> Target:
        """Return the target of an op that moves memory and does no more."""
        claim = f"at least {percent}% of copy's bandwidth"
        return cls(claim, 100 / percent, COPY, mode=mode, cases=cases)

    @classmethod
    def never_slower(cls) -> list[Target]:
        """Return the targets that every pointwise op and norm has at every size."""
        return [cls("never slower", NEVER_SLOWER, other) for other in (INDUCTOR, LIGER)]


@dataclass
class Bench:
    """The benchmark of one op.

    cases:          by device type; the first is the one of --quick.
    make_inputs:    arguments of a call and gradients of its outputs, drawn.
    plain:          plain PyTorch in the case's dtype, whose error is the yardstick.
    num_bytes:      that must move at least, by case and mode; None: not limited by memory.
    num_flops:      of the products alone; None: not limited by arithmetic.
    truth:          outputs and gradients in fp64; by default of `plain` on fp64 inputs.
    supports:       why a row of ours runs the op's decomposition, None where it is the kernel.
    form:           what else is to be said of such a row, else "".
    part:           of an input or result, what is held to the truth; it depends on no other part.
    check_own_mask: what is wrong with a provider that draws masks of its own, or None.
    versus:         providers that an op's rows are compared with.
    """

    op: str
    question: str
    cases: dict[str, list[Case]]
    make_inputs: Callable[[Case, torch.device], Inputs]
    plain: Builder
    providers: dict[str, Provider]
    targets: list[Target]
    num_bytes: Callable[[Case, str], int | None] = lambda case, mode: None
    num_flops: Callable[[Case, str], int | None] = lambda case, mode: None
    modes: tuple[str, ...] = ("forward", "both")
    truth: Callable[[Case, Inputs], list[Tensor]] | None = None
    supports: Callable[[Case, Inputs], str | None] = lambda case, inputs: None
    form: Callable[[Case, Inputs], str] = lambda case, inputs: ""
    part: Callable[[Case, Tensor], Tensor] = lambda case, tensor: tensor
    check_own_mask: Callable[[Case, Callable[..., Any], Inputs], str | None] | None = None
    versus: tuple[str, ...] = (INDUCTOR, LIGER)


# --- builders -------------------------------------------------------------------------------------


def compiled_provider(function: Builder, **flags: Any) -> Provider:
    """Compile what `function` gives for a case, with the case's sizes as constants."""
    return Provider(lambda case: torch.compile(function(case), dynamic=False), **flags)


def usual_providers(
    own: Builder,
    seen_through: Builder | None,
    ours: Builder,
    ligers: Builder | None = None,
    *,
    own_mask: bool = False,
    mutates: bool = False,
) -> dict[str, Provider]:
    """Return torch's way eager and compiled, the op seen through and its kernel, and Liger's.

    Args:     own_mask: what torch and Liger draw is theirs.
              mutates: Liger's backward writes over its inputs.
    """
    found = {
        EAGER: Provider(own, own_mask=own_mask),
        INDUCTOR: compiled_provider(own, own_mask=own_mask),
    }
    if seen_through is not None:
        found[SEE_THROUGH] = compiled_provider(seen_through, error_factor=OUR_ERROR_FACTOR)
    found[OURS] = Provider(ours, error_factor=OUR_ERROR_FACTOR)
    if ligers is not None:
        found[LIGER] = Provider(ligers, own_mask=own_mask, mutates=mutates)
    return found


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
        plain, part = bench.plain(case), inputs.map(lambda t: bench.part(case, t))
        truth = bench.truth(case, part) if bench.truth else truth_by(plain, part)
        return cls(truth, errors_of(forward_and_backward(plain, part), truth))

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


def keep_rate_problem(kept: Tensor, p: float) -> str | None:
    """Say so if a mask's rate is further from 1 - p than five standard deviations."""
    rate = float(kept.double().mean())
    bound = 5 * math.sqrt(p * (1 - p) / kept.numel())
    return None if abs(rate - (1 - p)) <= bound else f"keeps {rate:.5f} instead of {1 - p:.5f}"
