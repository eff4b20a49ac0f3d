"""The activations of gated/op.py, each with its ops, plain PyTorch's spelling and the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tolerances import assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops.gated.op import (
    GEGLU,
    SWIGLU,
    Gated,
    geglu,
    geglu_packed,
    halves,
    swiglu,
    swiglu_packed,
)

erfc = np.vectorize(math.erfc, otypes=[np.float64])


def sigmoid_and_slope(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and its derivative in NumPy's doubles, as below; where P is small, nothing cancels."""
    P = 1 / (1 + np.exp(-g))
    return P, P * (1 - P)


def normal_and_slope(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return erfc(-g / np.sqrt(2)) / 2, np.exp(-(g**2) / 2) / np.sqrt(2 * np.pi)


def tanh_and_slope(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    k = np.sqrt(2 / np.pi)
    P = 1 / (1 + np.exp(-2 * k * (g + 0.044715 * g**3)))  # (1 + tanh(a)) / 2
    return P, P * (1 - P) * 2 * k * (1 + 3 * 0.044715 * g**2)


@dataclass(frozen=True)
class Activation:
    """One activation as the tests call it; `options` go behind the tensors of an op's call."""

    ops: Gated
    keywords: dict[str, str]
    _apart: Callable[..., Tensor]
    _packed: Callable[..., Tensor]
    _act: Callable[[Tensor], Tensor]
    _share_and_slope: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.keywords.values())

    def apart(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._apart(gate, up, **self.keywords)

    def packed(self, gate_up: Tensor, order: str = "gate_up") -> Tensor:
        return self._packed(gate_up, order=order, **self.keywords)

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.ops.reference(gate, up, **self.keywords)

    def plain(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._act(gate) * up

    def truth(self, gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
        """y, grad_gate and grad_up in NumPy's doubles, derivative written out."""
        g, u, d = (t.detach().double().cpu().numpy() for t in (gate, up, dy))
        with np.errstate(over="ignore"):
            P, slope = self._share_and_slope(g)
        results = g * P * u, d * u * (P + g * slope), d * g * P
        return [torch.from_numpy(np.asarray(r)).to(gate.device) for r in results]

    def assert_accurate(self, results: list[Tensor], gate: Tensor, up: Tensor, dy: Tensor) -> None:
        """Hold y, grad_gate and grad_up to twice the error of plain PyTorch."""
        rounded = with_grads(self.plain, gate, up, dy)
        truth = self.truth(gate, up, dy)
        for result, in_dtype, right in zip(results, rounded, truth, strict=True):
            assert_no_worse_than_plain(result, in_dtype, right)


_GELU = (GEGLU, {"approximate": "none"}, geglu, geglu_packed, F.gelu, normal_and_slope)
_TANH = (
    *(GEGLU, {"approximate": "tanh"}, geglu, geglu_packed),
    *(lambda g: F.gelu(g, approximate="tanh"), tanh_and_slope),
)
# By the kernels' names for them.
ACTIVATIONS = {
    "silu": Activation(SWIGLU, {}, swiglu, swiglu_packed, F.silu, sigmoid_and_slope),
    "gelu": Activation(*_GELU),
    "gelu_tanh": Activation(*_TANH),
}


def draw(shape, dtype, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and grad_out; gates far into both tails among them."""
    gate = torch.randn(shape) * 4
    gate.view(-1)[:3] = torch.tensor([-20.0, 0.0, 20.0])
    return tuple(t.to(device, dtype) for t in (gate, torch.randn(shape), torch.randn(shape)))


def with_grads(function, gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up)
    return [out, *torch.autograd.grad(out, (gate, up), dy)]


def packed_with_grads(gate_up: Tensor, dy: Tensor, order: str, function) -> list[Tensor]:
    """y, grad_gate and grad_up by a packed op, whose one gradient is taken apart."""
    gate_up = gate_up.detach().requires_grad_()
    out = function(gate_up, order=order)
    (grad,) = torch.autograd.grad(out, gate_up, dy)
    assert grad.is_contiguous() and grad.dtype == gate_up.dtype
    return [out, *halves(grad, order)]
