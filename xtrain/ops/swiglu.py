"""The gated activation of SwiGLU feed-forward layers.

    y         = gate * s * up                        s = sigmoid(gate)
    grad_gate = grad_y * up * s * (1 + gate * (1 - s))
    grad_up   = grad_y * gate * s

Arithmetic is in c (fp64 when an input is fp64, else fp32) and each result is rounded once: silu is
not rounded before the product. Backward reads gate and up, as forward did, and nothing else.

The packed op takes gate and up as the halves of one tensor, as a fused projection gives them, and
returns their gradients as the halves of one tensor: nothing is left to concatenate.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from xtrain import torch_compat
from xtrain.ops import registry
from xtrain.ops.dropout import compute_dtype
from xtrain.ops.layout import contiguous, row_stride

ORDERS = ("gate_up", "up_gate")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up by the formula above; differentiable."""
    check_inputs(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    c = compute_dtype(dtype)
    return (gate.to(c) * torch.sigmoid(gate.to(c)) * up.to(c)).to(dtype)


def swiglu_packed_reference(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """Return silu(gate) * up of the halves by the formula above; differentiable."""
    return swiglu_reference(*halves(gate_up, order))


def halves(gate_up: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Return (gate, up), views of the two halves of the last dim."""
    check_packed(gate_up, order)
    F = gate_up.shape[-1] // 2
    first, second = gate_up[..., :F], gate_up[..., F:]
    return (first, second) if order == "gate_up" else (second, first)


def swiglu_decomposition(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up as inductor fuses it."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    c = compute_dtype(dtype)
    return (silu(gate.contiguous().to(c)) * up.contiguous().to(c)).to(dtype)


def swiglu_backward_decomposition(
    grad_out: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (grad_gate, grad_up) by the formulas above."""
    c = compute_dtype(torch.promote_types(gate.dtype, up.dtype))
    g, dy = gate.contiguous().to(c), grad_out.contiguous().to(c)
    grad_gate = torch.ops.aten.silu_backward(dy * up.contiguous().to(c), g)
    return grad_gate.to(gate.dtype), (dy * silu(g)).to(up.dtype)


def swiglu_packed_decomposition(gate_up: Tensor, order: str) -> Tensor:
    """Return silu(gate) * up of the halves, as inductor fuses it."""
    return swiglu_decomposition(*halves(gate_up, order))


def swiglu_packed_backward_decomposition(grad_out: Tensor, gate_up: Tensor, order: str) -> Tensor:
    """Return grad_gate and grad_up by the formulas above, packed as gate_up is."""
    grads = swiglu_backward_decomposition(grad_out, *halves(gate_up, order))
    return torch.cat(grads if order == "gate_up" else grads[::-1], dim=-1)


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


def check_packed(gate_up: Tensor, order: str) -> None:
    """Raise ValueError for an input that has no two halves of floats."""
    if order not in ORDERS:
        message = f'order must be "gate_up" or "up_gate", got {order!r}'
    elif gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        message = f"gate_up must be [..., 2 F], got {tuple(gate_up.shape)}"
    elif not gate_up.dtype.is_floating_point:
        message = f"gate_up must hold floats, got {gate_up.dtype}"
    else:
        return
    raise torch_compat.argument_error(f"swiglu_packed: {message}")


def supports(gate: Tensor, up: Tensor) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    for name, x in (("gate", gate), ("up", up)):
        if x.dtype not in KERNEL_DTYPES:
            return f"{name} is {x.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def supports_packed(gate_up: Tensor, *, order: str = "gate_up") -> str | None:
    """Return why the Triton kernel cannot take this input, or None when it can."""
    if gate_up.dtype not in KERNEL_DTYPES:
        return f"gate_up is {gate_up.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def prefers_kernel(gate: Tensor, up: Tensor) -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    It is as fast as what inductor makes of the decomposition, which can join its neighbours.
    """
    return False


def prefers_kernel_packed(gate_up: Tensor, *, order: str = "gate_up") -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    On GPUs: inductor's concatenation of the two gradients reads everything twice.
    """
    return gate_up.device.type == "cuda" and gate_up.dtype in KERNEL_DTYPES


def _rows(x: Tensor) -> Tensor:
    """Return x, or a copy where a kernel could not walk its rows."""
    return x if row_stride(x) is not None else x.contiguous()


def _kernel(launcher: str) -> Callable[..., Any]:
    return getattr(import_module("xtrain.ops.triton.swiglu"), launcher)


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    check_inputs(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty(gate.shape, dtype=dtype, device=gate.device)


def _eager(gate: Tensor, up: Tensor) -> Tensor:
    check_inputs(gate, up)
    return swiglu_decomposition(contiguous(gate), contiguous(up))


def _cuda(gate: Tensor, up: Tensor) -> Tensor:
    check_inputs(gate, up)
    if gate.numel() == 0 or supports(gate, up) is not None:
        return _eager(gate, up)
    return _kernel("swiglu_fwd")(_rows(gate), _rows(up))


def _backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
        torch.empty(up.shape, dtype=up.dtype, device=up.device),
    )


def _backward_eager(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward_decomposition(contiguous(grad_out), contiguous(gate), contiguous(up))


def _backward_cuda(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if gate.numel() == 0 or supports(gate, up) is not None:
        return _backward_eager(grad_out, gate, up)
    return _kernel("swiglu_bwd")(_rows(grad_out), _rows(gate), _rows(up))


def _packed_fake(gate_up: Tensor, order: str) -> Tensor:
    check_packed(gate_up, order)
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


def _packed_eager(gate_up: Tensor, order: str) -> Tensor:
    return _eager(*halves(gate_up, order))


def _packed_cuda(gate_up: Tensor, order: str) -> Tensor:
    return _cuda(*halves(gate_up, order))


def _packed_backward_fake(grad_out: Tensor, gate_up: Tensor, order: str) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


def _packed_backward_eager(grad_out: Tensor, gate_up: Tensor, order: str) -> Tensor:
    return contiguous(swiglu_packed_backward_decomposition(grad_out, gate_up, order))


def _packed_backward_cuda(grad_out: Tensor, gate_up: Tensor, order: str) -> Tensor:
    if gate_up.numel() == 0 or supports_packed(gate_up) is not None:
        return _packed_backward_eager(grad_out, gate_up, order)
    launch = _kernel("swiglu_packed_bwd")
    return launch(_rows(grad_out), _rows(gate_up), gate_first=order == "gate_up")


FORWARD = registry.define_op(
    "swiglu(Tensor gate, Tensor up, bool opaque=False) -> Tensor",
    fake=_fake,
    decomposition=swiglu_decomposition,
    cpu=_eager,
    cuda=_cuda,
)
BACKWARD = registry.define_op(
    "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool opaque=False) "
    "-> (Tensor, Tensor)",
    fake=_backward_fake,
    decomposition=swiglu_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_cuda,
)
FORWARD_PACKED = registry.define_op(
    "swiglu_packed(Tensor gate_up, str order, bool opaque=False) -> Tensor",
    fake=_packed_fake,
    decomposition=swiglu_packed_decomposition,
    cpu=_packed_eager,
    cuda=_packed_cuda,
)
BACKWARD_PACKED = registry.define_op(
    "swiglu_packed_backward(Tensor grad_out, Tensor gate_up, str order, bool opaque=False) "
    "-> Tensor",
    fake=_packed_backward_fake,
    decomposition=swiglu_packed_backward_decomposition,
    cpu=_packed_backward_eager,
    cuda=_packed_backward_cuda,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.opaque = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *BACKWARD(grad_out, *ctx.saved_tensors, ctx.opaque), None


def _setup_context_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.order, ctx.opaque = inputs
    ctx.save_for_backward(gate_up)


def _backward_packed(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return BACKWARD_PACKED(grad_out, *ctx.saved_tensors, ctx.order, ctx.opaque), None, None


registry.define_autograd(FORWARD, _backward, _setup_context)
registry.forbid_second_derivative(BACKWARD)
registry.define_autograd(FORWARD_PACKED, _backward_packed, _setup_context_packed)
registry.forbid_second_derivative(BACKWARD_PACKED)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, where silu(a) = a * sigmoid(a).

    Shapes:   gate and up of one shape, any strides; result like them, contiguous, never an alias.
    Grad:     for both; saves gate and up, sigmoid is computed again.
    Numerics: fp32 (fp64 when an input is), rounded once to the dtype that gate and up promote to.
    Raises:   ValueError if shapes or devices differ or an input holds no floats.
    Source:   Shazeer 2020 (GLU Variants Improve Transformer).
    """
    return FORWARD(gate, up, registry.opaque(prefers_kernel, gate, up))


def swiglu_packed(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """Return silu(gate) * up, where gate and up are the halves of gate_up's last dim.

    Shapes:   gate_up [..., 2 F], any strides; result [..., F], contiguous, never an alias.
    Args:     order: "gate_up", gate first, or "up_gate".
    Grad:     one tensor like gate_up, contiguous; saves gate_up, sigmoid is computed again.
    Numerics: as `swiglu`, bit for bit.
    Raises:   ValueError if the last dim is odd, order is unknown, or gate_up holds no floats.
    Source:   as `swiglu`.
    """
    opaque = registry.opaque(prefers_kernel_packed, gate_up, order=order)
    return FORWARD_PACKED(gate_up, order, opaque)


OP = registry.Op(
    name="swiglu",
    public=swiglu,
    reference=swiglu_reference,
    forward=FORWARD,
    backward=BACKWARD,
    decomposition=swiglu_decomposition,
    backward_decomposition=swiglu_backward_decomposition,
    supports=supports,
    prefers_kernel=prefers_kernel,
)
OP_PACKED = registry.Op(
    name="swiglu_packed",
    public=swiglu_packed,
    reference=swiglu_packed_reference,
    forward=FORWARD_PACKED,
    backward=BACKWARD_PACKED,
    decomposition=swiglu_packed_decomposition,
    backward_decomposition=swiglu_packed_backward_decomposition,
    supports=supports_packed,
    prefers_kernel=prefers_kernel_packed,
)
