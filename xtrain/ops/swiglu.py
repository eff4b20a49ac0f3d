"""The gated activation of SwiGLU feed-forward layers.

    y         = gate * s * up                        s = sigmoid(gate)
    grad_gate = grad_y * up * s * (1 + gate * (1 - s))
    grad_up   = grad_y * gate * s

How dtypes, roundings, saved tensors and packed operands are handled is gated.py's to say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from xtrain.ops import gated, registry
from xtrain.ops.dropout import compute_dtype


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up by the formula above; differentiable."""
    SWIGLU.check(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    c = compute_dtype(dtype)
    return (gate.to(c) * torch.sigmoid(gate.to(c)) * up.to(c)).to(dtype)


def swiglu_packed_reference(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """Return silu(gate) * up of the halves by the formula above; differentiable."""
    SWIGLU.check_packed(gate_up, order)
    return swiglu_reference(*gated.halves(gate_up, order))


SWIGLU = gated.Gated(
    "swiglu",
    value=silu,
    derivative=torch.ops.aten.silu_backward,
    activation=lambda: "silu",
)
FORWARD, FORWARD_PACKED = SWIGLU.forward, SWIGLU.forward_packed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, where silu(a) = a * sigmoid(a).

    Shapes:   gate and up of one shape, any strides; result like them, contiguous, never an alias.
    Grad:     for both; saves gate and up, sigmoid is computed again.
    Numerics: fp32 (fp64 when an input is), rounded once to the dtype that gate and up promote to.
    Raises:   ValueError if shapes or devices differ or an input holds no floats.
    Source:   Shazeer 2020 (GLU Variants Improve Transformer).
    """
    return FORWARD(gate, up, registry.opaque(gated.prefers_kernel, gate, up))


def swiglu_packed(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """Return silu(gate) * up, where gate and up are the halves of gate_up's last dim.

    Shapes:   gate_up [..., 2 F], any strides; result [..., F], contiguous, never an alias.
    Args:     order: "gate_up", gate first, or "up_gate".
    Grad:     one tensor like gate_up, contiguous; saves gate_up, sigmoid is computed again.
    Numerics: as `swiglu`, bit for bit.
    Raises:   ValueError if the last dim is odd, order is unknown, or gate_up holds no floats.
    Source:   as `swiglu`.
    """
    opaque = registry.opaque(gated.prefers_kernel_packed, gate_up)
    return FORWARD_PACKED(gate_up, order, opaque)


OP = registry.Op(
    name="swiglu",
    public=swiglu,
    reference=swiglu_reference,
    forward=FORWARD,
    backward=SWIGLU.backward,
    decomposition=SWIGLU.decomposition,
    backward_decomposition=SWIGLU.backward_decomposition,
    supports=gated.supports,
    prefers_kernel=gated.prefers_kernel,
)
OP_PACKED = registry.Op(
    name="swiglu_packed",
    public=swiglu_packed,
    reference=swiglu_packed_reference,
    forward=FORWARD_PACKED,
    backward=SWIGLU.backward_packed,
    decomposition=SWIGLU.packed_decomposition,
    backward_decomposition=SWIGLU.packed_backward_decomposition,
    supports=gated.supports_packed,
    prefers_kernel=gated.prefers_kernel_packed,
)
