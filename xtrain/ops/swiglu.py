"""The gated activation of SwiGLU feed-forward layers.

    y         = gate * s * up                        s = sigmoid(gate)
    grad_gate = grad_y * up * s * (1 + gate * (1 - s))
    grad_up   = grad_y * gate * s

Arithmetic is in c (fp64 when an input is fp64, else fp32) and each result is rounded once: silu is
not rounded before the product. Backward reads gate and up, as forward did, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import registry
from xtrain.ops.dropout import compute_dtype
from xtrain.ops.layout import contiguous


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up by the formula above; differentiable."""
    check_inputs(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    c = compute_dtype(dtype)
    return (gate.to(c) * torch.sigmoid(gate.to(c)) * up.to(c)).to(dtype)


def swiglu_decomposition(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up as inductor fuses it."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    c = compute_dtype(dtype)
    return (F.silu(gate.contiguous().to(c)) * up.contiguous().to(c)).to(dtype)


def swiglu_backward_decomposition(
    grad_out: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (grad_gate, grad_up) by the formulas above."""
    c = compute_dtype(torch.promote_types(gate.dtype, up.dtype))
    g, dy = gate.contiguous().to(c), grad_out.contiguous().to(c)
    grad_gate = torch.ops.aten.silu_backward(dy * up.contiguous().to(c), g)
    return grad_gate.to(gate.dtype), (dy * F.silu(g)).to(up.dtype)


def check_inputs(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError for inputs that do not go together."""
    if gate.shape != up.shape:
        message = f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}"
    elif not (gate.dtype.is_floating_point and up.dtype.is_floating_point):
        message = f"gate and up must hold floats, got {gate.dtype} and {up.dtype}"
    elif gate.device != up.device:
        message = f"up is on {up.device} and gate on {gate.device}: move one to the other"
    else:
        return
    raise torch_compat.argument_error(f"swiglu: {message}")


def supports(gate: Tensor, up: Tensor) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return "swiglu has no Triton kernel yet; the decomposition runs"


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    check_inputs(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty(gate.shape, dtype=dtype, device=gate.device)


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    check_inputs(gate, up)
    return swiglu_decomposition(contiguous(gate), contiguous(up))


def _backward_eager(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward_decomposition(contiguous(grad_out), contiguous(gate), contiguous(up))


def _backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
        torch.empty(up.shape, dtype=up.dtype, device=up.device),
    )


FORWARD = registry.define_op(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    fake=_fake,
    decomposition=swiglu_decomposition,
    cpu=_eager,
    cuda=_eager,
)
BACKWARD = registry.define_op(
    "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    fake=_backward_fake,
    decomposition=swiglu_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_eager,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return BACKWARD(grad_out, *ctx.saved_tensors)


registry.define_autograd(FORWARD, _backward, _setup_context)
registry.forbid_second_derivative(BACKWARD)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, where silu(a) = a * sigmoid(a).

    Shapes:   gate and up of one shape, any strides; result like them, contiguous, never an alias.
    Grad:     for both; saves gate and up, sigmoid is computed again.
    Numerics: fp32 (fp64 when an input is), rounded once to the dtype that gate and up promote to.
    Raises:   ValueError if shapes or devices differ or an input holds no floats.
    Source:   Shazeer 2020 (GLU Variants Improve Transformer).
    """
    return FORWARD(gate, up)


OP = registry.Op(
    name="swiglu",
    public=swiglu,
    reference=swiglu_reference,
    forward=FORWARD,
    backward=BACKWARD,
    decomposition=swiglu_decomposition,
    backward_decomposition=swiglu_backward_decomposition,
    supports=supports,
)
