"""swiglu and geglu of xtrain.ops, operands apart or packed, against act(gate) * up and Liger.

Packed is what one projection to 2F gives: the gradient is one tensor again. GELU by erf and by
tanh; Liger has the latter alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import Bench, Case, Inputs, NotThere, Target, liger, usual_providers
from xtrain.ops import OPS


def _cases(name: str, rows: int, hidden: int, dtype: torch.dtype) -> list[Case]:
    return [
        Case(name, (rows, hidden), dtype, {"packed": False}),
        Case(f"{name}, packed", (rows, hidden), dtype, {"packed": True}),
    ]


CASES = {
    "cuda": [
        *_cases("1b", 16384, 5632, torch.bfloat16),
        *_cases("124m", 32768, 2048, torch.bfloat16),
        *_cases("8b", 8192, 14336, torch.bfloat16),
    ],
    "cpu": [
        *_cases("odd", 67, 129, torch.bfloat16),
        *_cases("small", 2048, 704, torch.float32),
    ],
}
GEGLU_CASES = {
    device: [
        replace(case, name=f"{case.name}, {label}", options={**case.options, "approximate": value})
        for case in cases
        for label, value in (("tanh", "tanh"), ("erf", "none"))
    ]
    for device, cases in CASES.items()
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    rows, hidden = case.shape

    def draw(width: int) -> Tensor:
        return torch.randn(rows, width, dtype=case.dtype, device=device)

    grad = draw(hidden)
    if case.options["packed"]:
        return Inputs((draw(2 * hidden).requires_grad_(),), (grad,))
    return Inputs((draw(hidden).requires_grad_(), draw(hidden).requires_grad_()), (grad,))


def of_operands(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Let a function of gate and up take one packed tensor as well."""

    def either(*args: Tensor) -> Tensor:
        gate, up = args if len(args) == 2 else args[0].chunk(2, -1)
        return function(gate, up)

    return either


def approximation(case: Case) -> dict[str, str]:
    """How GELU is computed; of SiLU there is nothing to choose."""
    return {k: v for k, v in case.options.items() if k == "approximate"}


def plain(case: Case) -> Callable[..., Tensor]:
    if chosen := approximation(case):
        return of_operands(lambda gate, up: F.gelu(gate, **chosen) * up)
    return of_operands(lambda gate, up: F.silu(gate) * up)


def ligers(case: Case) -> Callable[..., Tensor]:
    chosen = approximation(case)
    if chosen == {"approximate": "none"}:
        raise NotThere("Liger's GELU is the tanh approximation")
    module, name = ("geglu", "GELU") if chosen else ("swiglu", "SiLU")
    return of_operands(liger(module, f"Liger{name}MulFunction").apply)


def num_bytes(case: Case, mode: str) -> int:
    """gate and up in, y out; then those and dy in, both gradients out."""
    return {"forward": 3, "both": 8}[mode] * case.numel * case.dtype.itemsize


def glu(op: str, question: str, cases: dict[str, list[Case]], targets: list[Target]) -> Bench:
    """Return the benchmark of an activation times up."""

    def of(case: Case):
        return OPS[f"{op}_packed" if case.options["packed"] else op]

    def seen_through(case: Case) -> Callable[..., Tensor]:
        order = ("gate_up",) if case.options["packed"] else ()
        return lambda *args: of(case).forward(*args, *order, *approximation(case).values())

    def ours(case: Case) -> Callable[..., Tensor]:
        return lambda *args: of(case).public(*args, **approximation(case))

    return Bench(
        op=op,
        question=question,
        cases=cases,
        make_inputs=make_inputs,
        plain=plain,
        # Liger's backward writes over gate and up
        providers=usual_providers(plain, seen_through, ours, ligers, mutates=True),
        targets=targets + Target.never_slower(),
        num_bytes=num_bytes,
        supports=lambda case, inputs: of(case).supports(*inputs.args),
    )


BENCHES = (
    glu(
        "swiglu",
        "Is SwiGLU at the memory limit, its operands apart or packed?",
        CASES,
        [Target.near_copy(92, name, f"{name}, packed") for name in ("1b", "124m", "8b")],
    ),
    glu(
        "geglu",
        "Is GeGLU at the memory limit, by tanh and by erf, its operands apart or packed?",
        GEGLU_CASES,
        [Target.near_copy(92, case.name) for case in GEGLU_CASES["cuda"]],
    ),
)
