"""The gated activations of feed-forward layers: SwiGLU, and GeGLU by erf or by tanh.

    y         = gate * P * up                        act(gate) = gate * P
    grad_gate = grad_y * up * (P + gate * P')        grad_up   = grad_y * gate * P

    swiglu            P = sigmoid(gate)
    geglu, "none"     P = (1 + erf(gate / sqrt(2))) / 2, the normal distribution
    geglu, "tanh"     P = (1 + tanh(k * (gate + 0.044715 gate^3))) / 2,  k = sqrt(2 / pi)

Arithmetic is in c (fp64 when an input is fp64, else fp32) and each result is rounded once: the
activation is not rounded before the product. Backward reads gate and up, as forward did, and
nothing else.

The packed op takes gate and up as the halves of one tensor, as a fused projection gives them, and
returns their gradients as the halves of one tensor: nothing is left to concatenate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.shared.layout import contiguous, row_stride

ORDERS = ("gate_up", "up_gate")
APPROXIMATIONS = ("none", "tanh")
KERNEL_DTYPES = (*core.FLOATS, torch.float64)


@dataclass(eq=False)
class Gated:
    """The ops of one activation, apart and packed, forward and backward; made once per name.

    Args:     name: the ops are xtrain::<name>, <name>_backward, <name>_packed, ...
              share: (g, *options) -> P by the formula above, where g is in c.
              value: (g, *options) -> act(g) by torch's own operator.
              derivative: (grad, g, *options) -> grad * act'(g).
              activation: *options -> what the kernels call it.
              options: the schema's arguments for `options`, "" or ", str approximate".
              check_options: *options -> what is wrong with them, or None.
              with_defaults: **options -> all of them, in the schema's order.
    """

    name: str
    share: Callable[..., Tensor]
    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    activation: Callable[..., str]
    options: str = ""
    check_options: Callable[..., str | None] = lambda *options: None
    with_defaults: Callable[..., tuple[Any, ...]] = lambda: ()
    forward: torch._ops.OpOverload = field(init=False)
    backward: torch._ops.OpOverload = field(init=False)
    forward_packed: torch._ops.OpOverload = field(init=False)
    backward_packed: torch._ops.OpOverload = field(init=False)

    def __post_init__(self) -> None:
        tensors = "Tensor gate, Tensor up", "Tensor gate_up, str order"
        apart, packed = (f"{names}{self.options}, bool opaque=False" for names in tensors)
        self.forward = core.define_op(
            f"{self.name}({apart}) -> Tensor",
            fake=self._fake,
            decomposition=self.decomposition,
            cpu=self._eager,
            cuda=self._cuda,
        )
        self.backward = core.define_op(
            f"{self.name}_backward(Tensor grad_out, {apart}) -> (Tensor, Tensor)",
            fake=_backward_fake,
            decomposition=self.backward_decomposition,
            cpu=self._backward_eager,
            cuda=self._backward_cuda,
        )
        self.forward_packed = core.define_op(
            f"{self.name}_packed({packed}) -> Tensor",
            fake=self._packed_fake,
            decomposition=self.packed_decomposition,
            cpu=self._packed_eager,
            cuda=self._packed_cuda,
        )
        self.backward_packed = core.define_op(
            f"{self.name}_packed_backward(Tensor grad_out, {packed}) -> Tensor",
            fake=lambda grad_out, gate_up, *constants: torch.empty(
                gate_up.shape, dtype=gate_up.dtype, device=gate_up.device
            ),
            decomposition=self.packed_backward_decomposition,
            cpu=self._packed_backward_eager,
            cuda=self._packed_backward_cuda,
        )
        core.define_derivative(self.forward, self.backward)
        core.define_derivative(self.forward_packed, self.backward_packed)

    def rows(
        self, public: Callable[..., Tensor], packed: Callable[..., Tensor], **apart: Any
    ) -> tuple[core.Op, core.Op]:
        """Return the rows of `OPS`; apart: what else the first says."""
        ops = self.forward, self.backward
        packed_ops = self.forward_packed, self.backward_packed
        return (
            core.Op(public, self.reference, *ops, supports, **apart),
            core.Op(
                packed, self.reference_packed, *packed_ops, supports_packed, prefers_kernel_packed
            ),
        )

    # --- the formula ----------------------------------------------------------------------------

    def reference(self, gate: Tensor, up: Tensor, **options: Any) -> Tensor:
        """Return gate * P * up by the formulas above; differentiable."""
        values = self.with_defaults(**options)
        self.check(gate, up, *values)
        dtype = torch.promote_types(gate.dtype, up.dtype)
        g = gate.to(compute_dtype(dtype))
        return (g * self.share(g, *values) * up.to(g.dtype)).to(dtype)

    def reference_packed(
        self, gate_up: Tensor, *, order: str = "gate_up", **options: Any
    ) -> Tensor:
        """Return the same of the halves; differentiable."""
        self.check_packed(gate_up, order, *self.with_defaults(**options))
        return self.reference(*halves(gate_up, order), **options)

    # --- checks ---------------------------------------------------------------------------------

    def check(self, gate: Tensor, up: Tensor, *options: Any) -> None:
        """Raise ValueError for inputs that do not go together."""
        if (message := self.check_options(*options)) is not None:
            pass
        elif gate.shape != up.shape:
            shapes = f"{tuple(gate.shape)} and {tuple(up.shape)}"
            message = f"gate and up must have one shape, got {shapes}"
        elif not (gate.dtype.is_floating_point and up.dtype.is_floating_point):
            message = f"gate and up must hold floats, got {gate.dtype} and {up.dtype}"
        elif gate.device != up.device:
            message = f"up is on {up.device} and gate on {gate.device}: move one to the other"
        else:
            return
        raise torch_compat.argument_error(f"{self.name}: {message}")

    def check_packed(self, gate_up: Tensor, order: str, *options: Any) -> None:
        """Raise ValueError for an input that has no two halves of floats."""
        if (message := self.check_options(*options)) is not None:
            pass
        elif order not in ORDERS:
            message = f'order must be "gate_up" or "up_gate", got {order!r}'
        elif gate_up.dim() == 0 or gate_up.shape[-1] % 2:
            message = f"gate_up must be [..., 2 F], got {tuple(gate_up.shape)}"
        elif not gate_up.dtype.is_floating_point:
            message = f"gate_up must hold floats, got {gate_up.dtype}"
        else:
            return
        raise torch_compat.argument_error(f"{self.name}_packed: {message}")

    # --- gate and up apart ----------------------------------------------------------------------

    def decomposition(self, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        """Return act(gate) * up as inductor fuses it."""
        dtype = torch.promote_types(gate.dtype, up.dtype)
        c = compute_dtype(dtype)
        g, u = gate.contiguous().to(c), up.contiguous().to(c)
        return (self.value(g, *options) * u).to(dtype)

    def backward_decomposition(
        self, grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (grad_gate, grad_up) by the formulas above."""
        c = compute_dtype(torch.promote_types(gate.dtype, up.dtype))
        g, dy = gate.contiguous().to(c), grad_out.contiguous().to(c)
        grad_gate = self.derivative(dy * up.contiguous().to(c), g, *options)
        return grad_gate.to(gate.dtype), (dy * self.value(g, *options)).to(up.dtype)

    def _fake(self, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        self.check(gate, up, *options)
        dtype = torch.promote_types(gate.dtype, up.dtype)
        return torch.empty(gate.shape, dtype=dtype, device=gate.device)

    def _eager(self, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        self.check(gate, up, *options)
        return self.decomposition(contiguous(gate), contiguous(up), *options)

    def _cuda(self, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        self.check(gate, up, *options)
        if gate.numel() == 0 or supports(gate, up) is not None:
            return self._eager(gate, up, *options)
        return _kernel("gated_fwd")(_rows(gate), _rows(up), self.activation(*options))

    def _backward_eager(
        self, grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        dense = (contiguous(t) for t in (grad_out, gate, up))
        return self.backward_decomposition(*dense, *options)

    def _backward_cuda(
        self, grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        if gate.numel() == 0 or supports(gate, up) is not None:
            return self._backward_eager(grad_out, gate, up, *options)
        rows = (_rows(t) for t in (grad_out, gate, up))
        return _kernel("gated_bwd")(*rows, self.activation(*options))

    # --- packed ---------------------------------------------------------------------------------

    def packed_decomposition(self, gate_up: Tensor, order: str, *options: Any) -> Tensor:
        """Return act(gate) * up of the halves, as inductor fuses it."""
        return self.decomposition(*halves(gate_up, order), *options)

    def packed_backward_decomposition(
        self, grad_out: Tensor, gate_up: Tensor, order: str, *options: Any
    ) -> Tensor:
        """Return grad_gate and grad_up by the formulas above, packed as gate_up is."""
        grads = self.backward_decomposition(grad_out, *halves(gate_up, order), *options)
        return torch.cat(grads if order == "gate_up" else grads[::-1], dim=-1)

    def _packed_fake(self, gate_up: Tensor, order: str, *options: Any) -> Tensor:
        self.check_packed(gate_up, order, *options)
        shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)

    def _packed_eager(self, gate_up: Tensor, order: str, *options: Any) -> Tensor:
        self.check_packed(gate_up, order, *options)
        return self._eager(*halves(gate_up, order), *options)

    def _packed_cuda(self, gate_up: Tensor, order: str, *options: Any) -> Tensor:
        self.check_packed(gate_up, order, *options)
        return self._cuda(*halves(gate_up, order), *options)

    def _packed_backward_eager(
        self, grad_out: Tensor, gate_up: Tensor, order: str, *options: Any
    ) -> Tensor:
        return contiguous(self.packed_backward_decomposition(grad_out, gate_up, order, *options))

    def _packed_backward_cuda(
        self, grad_out: Tensor, gate_up: Tensor, order: str, *options: Any
    ) -> Tensor:
        if gate_up.numel() == 0 or supports_packed(gate_up) is not None:
            return self._packed_backward_eager(grad_out, gate_up, order, *options)
        launch, activation = _kernel("gated_packed_bwd"), self.activation(*options)
        return launch(_rows(grad_out), _rows(gate_up), activation, gate_first=order == "gate_up")


def halves(gate_up: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Return (gate, up), views of the two halves of the last dim."""
    F = gate_up.shape[-1] // 2
    first, second = gate_up[..., :F], gate_up[..., F:]
    return (first, second) if order == "gate_up" else (second, first)


def supports(gate: Tensor, up: Tensor, **options: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return core.kernel_refuses(KERNEL_DTYPES, gate=gate, up=up)


def supports_packed(gate_up: Tensor, **options: Any) -> str | None:
    """Return why the Triton kernel cannot take this input, or None when it can."""
    return core.kernel_refuses(KERNEL_DTYPES, gate_up=gate_up)


def prefers_kernel_packed(gate_up: Tensor, **options: Any) -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    On GPUs: inductor's concatenation of the two gradients reads everything twice.
    """
    return gate_up.device.type == "cuda" and gate_up.dtype in KERNEL_DTYPES


def _rows(x: Tensor) -> Tensor:
    """Return x, or a copy where a kernel could not walk its rows."""
    return x if row_stride(x) is not None else x.contiguous()


def _kernel(launcher: str) -> Callable[..., Any]:
    return getattr(import_module("xtrain.ops.gated.kernel"), launcher)


def _backward_fake(
    grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
        torch.empty(up.shape, dtype=up.dtype, device=up.device),
    )


# --- SwiGLU --------------------------------------------------------------------------------------

SWIGLU = Gated(
    "swiglu",
    share=torch.sigmoid,
    value=silu,
    derivative=torch.ops.aten.silu_backward,
    activation=lambda: "silu",
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, where silu(a) = a * sigmoid(a).

    Shapes:   gate and up of one shape, any strides; result like them, contiguous, never an alias.
    Grad:     for both; saves gate and up, sigmoid is computed again.
    Numerics: fp32 (fp64 when an input is), rounded once to the dtype that gate and up promote to.
    Raises:   ValueError if shapes or devices differ or an input holds no floats.
    Source:   Shazeer 2020 (GLU Variants Improve Transformer).
    """
    # inductor's code is as fast as the kernel, and can join its neighbours
    return SWIGLU.forward(gate, up, False)


def swiglu_packed(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """Return silu(gate) * up, where gate and up are the halves of gate_up's last dim.

    Shapes:   gate_up [..., 2 F], any strides; result [..., F], contiguous, never an alias.
    Args:     order: "gate_up", gate first, or "up_gate".
    Grad:     one tensor like gate_up, contiguous; saves gate_up, sigmoid is computed again.
    Numerics: as `swiglu`, bit for bit.
    Raises:   ValueError if the last dim is odd, order is unknown, or gate_up holds no floats.
    Source:   as `swiglu`.
    """
    opaque = core.opaque(prefers_kernel_packed, gate_up)
    return SWIGLU.forward_packed(gate_up, order, opaque)


# --- GeGLU ---------------------------------------------------------------------------------------


def _gelu_share(g: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return (1 + torch.erf(g / math.sqrt(2))) / 2
    return (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2


def _check_approximate(approximate: str) -> str | None:
    if approximate in APPROXIMATIONS:
        return None
    return f'approximate must be "none" or "tanh", got {approximate!r}'


def _with_approximate(approximate: str = "none") -> tuple[str]:
    return (approximate,)


GEGLU = Gated(
    "geglu",
    share=_gelu_share,
    value=lambda g, approximate: gelu(g, approximate=approximate),
    derivative=lambda grad, g, approximate: torch.ops.aten.gelu_backward(
        grad, g, approximate=approximate
    ),
    activation={"none": "gelu", "tanh": "gelu_tanh"}.__getitem__,
    options=", str approximate",
    check_options=_check_approximate,
    with_defaults=_with_approximate,
)


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Return gelu(gate) * up, where gelu(a) = a * P(X <= a) for a standard normal X.

    Shapes:   gate and up of one shape, any strides; result like them, contiguous, never an alias.
    Args:     approximate: "none", by erf, or "tanh", as in torch.nn.functional.gelu.
    Grad:     for both; saves gate and up, the activation is computed again.
    Numerics: fp32 (fp64 when an input is), rounded once to the dtype that gate and up promote to.
    Raises:   ValueError if shapes or devices differ, an input holds no floats, or approximate is
              unknown.
    Source:   Shazeer 2020 (GLU Variants Improve Transformer); Hendrycks, Gimpel 2016 (GELU).
    """
    opaque = core.opaque(prefers_kernel_geglu, gate, up, approximate=approximate)
    return GEGLU.forward(gate, up, approximate, opaque)


def geglu_packed(gate_up: Tensor, *, order: str = "gate_up", approximate: str = "none") -> Tensor:
    """Return gelu(gate) * up, where gate and up are the halves of gate_up's last dim.

    Shapes:   gate_up [..., 2 F], any strides; result [..., F], contiguous, never an alias.
    Args:     order: "gate_up", gate first, or "up_gate".
              approximate: as in `geglu`.
    Grad:     one tensor like gate_up, contiguous; saves gate_up, the activation is computed again.
    Numerics: as `geglu`, bit for bit.
    Raises:   ValueError if the last dim is odd, order or approximate is unknown, or gate_up holds
              no floats.
    Source:   as `geglu`.
    """
    opaque = core.opaque(prefers_kernel_packed, gate_up)
    return GEGLU.forward_packed(gate_up, order, approximate, opaque)


def prefers_kernel_geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> bool:
    """Return whether, under inductor, the kernel is the faster form: on GPUs, where erf is asked.

    By erf it takes 0.96 of the time that inductor's code does, by tanh 1.01.
    """
    takes = gate.dtype in KERNEL_DTYPES and up.dtype in KERNEL_DTYPES
    return approximate == "none" and gate.device.type == "cuda" and takes


OPS = (
    *SWIGLU.rows(swiglu, swiglu_packed),
    *GEGLU.rows(geglu, geglu_packed, prefers_kernel=prefers_kernel_geglu),
)
