"""xtrain.ops.swiglu and swiglu_packed against silu(gate) * up and Liger.

Packed is what one projection to 2F gives: the gradient is one tensor again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    COPY,
    EAGER,
    INDUCTOR,
    LIGER,
    OUR_ERROR_FACTOR,
    OURS,
    SEE_THROUGH,
    Case,
    Inputs,
    Provider,
    Target,
    compiled_provider,
    decomposed,
    liger,
    never_slower,
    our_op,
    truth_by,
)

OP, PACKED = "swiglu", "swiglu_packed"
QUESTION = "Is SwiGLU at the memory limit, its operands apart or packed?"
MODES = ("forward", "both")


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


def plain(case: Case) -> Callable[..., Tensor]:
    return of_operands(lambda gate, up: F.silu(gate) * up)


def seen_through(case: Case) -> Callable[..., Tensor]:
    if case.options["packed"]:
        forward = our_op(PACKED).forward
        return lambda gate_up: forward(gate_up, "gate_up")
    return our_op(OP).forward


def ours(case: Case) -> Callable[..., Tensor]:
    return our_op(PACKED if case.options["packed"] else OP).public


def ligers(case: Case) -> Callable[..., Tensor]:
    return of_operands(liger("swiglu", "LigerSiLUMulFunction").apply)


PROVIDERS = {
    EAGER: Provider(plain),
    INDUCTOR: compiled_provider(plain),
    SEE_THROUGH: compiled_provider(seen_through, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(ours, error_factor=OUR_ERROR_FACTOR),
    LIGER: Provider(ligers, mutates=True),  # its backward writes over gate and up
}
TARGETS = [
    Target("at least 92% of copy's bandwidth", 1 / 0.92, COPY, cases=(name, f"{name}, packed"))
    for name in ("1b", "124m", "8b")
] + never_slower()


def num_bytes(case: Case, mode: str) -> int:
    """gate and up in, y out; then those and dy in, both gradients out."""
    return {"forward": 3, "both": 8}[mode] * case.numel * case.dtype.itemsize


def num_flops(case: Case, mode: str) -> None:
    return None


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    return truth_by(plain(case), inputs)


def form(case: Case, inputs: Inputs) -> str:
    return decomposed(our_op(PACKED if case.options["packed"] else OP).supports(*inputs.args))
