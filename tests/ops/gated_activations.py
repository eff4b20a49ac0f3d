"""The activations of gated.py, each with its ops, plain PyTorch's spelling and the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import test_geglu
import test_swiglu
from torch import Tensor

from xtrain.ops.gated.op import GEGLU, SWIGLU, Gated, geglu, geglu_packed, swiglu, swiglu_packed


@dataclass(frozen=True)
class Activation:
    """One activation as the tests call it; `options` go behind the tensors of an op's call."""

    ops: Gated
    options: tuple[str, ...]
    apart: Callable[..., Tensor]
    packed: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    truth: Callable[..., list[Tensor]]

    def assert_accurate(self, results: list[Tensor], gate: Tensor, up: Tensor, dy: Tensor) -> None:
        """Hold y, grad_gate and grad_up to twice the error of plain PyTorch."""
        test_swiglu.assert_accurate(results, gate, up, dy, self.plain, self.truth)


def _geglu(approximate: str) -> Activation:
    functions = (geglu, geglu_packed, GEGLU.reference, test_geglu.plain, test_geglu.truth)
    return Activation(
        GEGLU, (approximate,), *(partial(f, approximate=approximate) for f in functions)
    )


_SILU = (swiglu, swiglu_packed, SWIGLU.reference, test_swiglu.plain, test_swiglu.truth)
# By the kernels' names for them.
ACTIVATIONS = {
    "silu": Activation(SWIGLU, (), *_SILU),
    "gelu": _geglu("none"),
    "gelu_tanh": _geglu("tanh"),
}
