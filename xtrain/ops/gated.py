"""What the gated activations of feed-forward layers share: SwiGLU (swiglu.py), GeGLU (geglu.py).

    y         = act(gate) * up
    grad_gate = grad_y * up * act'(gate)
    grad_up   = grad_y * act(gate)

Arithmetic is in c (fp64 when an input is fp64, else fp32) and each result is rounded once: the
activation is not rounded before the product. Backward reads gate and up, as forward did, and
nothing else.

The packed op takes gate and up as the halves of one tensor, as a fused projection gives them, and
returns their gradients as the halves of one tensor: nothing is left to concatenate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import registry
from xtrain.ops.dropout import compute_dtype
from xtrain.ops.layout import contiguous, row_stride

ORDERS = ("gate_up", "up_gate")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(eq=False)
class Gated:
    """The ops of one activation, apart and packed, forward and backward; made once per name.

    Args:     name: the ops are xtrain::<name>, <name>_backward, <name>_packed, ...
              value: (g, *options) -> act(g), where g is in c.
              derivative: (grad, g, *options) -> grad * act'(g).
              activation: *options -> what the kernels call it.
              options: the schema's arguments for `options`, "" or ", str approximate".
              check_options: *options -> what is wrong with them, or None.
    """

    name: str
    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    activation: Callable[..., str]
    options: str = ""
    check_options: Callable[..., str | None] = lambda *options: None
    forward: torch._ops.OpOverload = field(init=False)
    backward: torch._ops.OpOverload = field(init=False)
    forward_packed: torch._ops.OpOverload = field(init=False)
    backward_packed: torch._ops.OpOverload = field(init=False)

    def __post_init__(self) -> None:
        self.forward, self.backward = self._define_apart()
        self.forward_packed, self.backward_packed = self._define_packed()
        _define_autograd(self.forward, self.backward, num_tensors=2)
        _define_autograd(self.forward_packed, self.backward_packed, num_tensors=1)

    def _define_apart(self) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
        arguments = f"Tensor gate, Tensor up{self.options}, bool opaque=False"
        forward = registry.define_op(
            f"{self.name}({arguments}) -> Tensor",
            fake=self._fake,
            decomposition=self.decomposition,
            cpu=self._eager,
            cuda=self._cuda,
            replayed=True,
        )
        backward = registry.define_op(
            f"{self.name}_backward(Tensor grad_out, {arguments}) -> (Tensor, Tensor)",
            fake=_backward_fake,
            decomposition=self.backward_decomposition,
            cpu=self._backward_eager,
            cuda=self._backward_cuda,
            replayed=True,
        )
        return forward, backward

    def _define_packed(self) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
        arguments = f"Tensor gate_up, str order{self.options}, bool opaque=False"
        forward = registry.define_op(
            f"{self.name}_packed({arguments}) -> Tensor",
            fake=self._packed_fake,
            decomposition=self.packed_decomposition,
            cpu=self._packed_eager,
            cuda=self._packed_cuda,
            replayed=True,
        )
        backward = registry.define_op(
            f"{self.name}_packed_backward(Tensor grad_out, {arguments}) -> Tensor",
            fake=_packed_backward_fake,
            decomposition=self.packed_backward_decomposition,
            cpu=self._packed_backward_eager,
            cuda=self._packed_backward_cuda,
            replayed=True,
        )
        return forward, backward

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


def _define_autograd(
    forward: torch._ops.OpOverload, backward_op: torch._ops.OpOverload, *, num_tensors: int
) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.constants = inputs[num_tensors:]
        ctx.save_for_backward(*inputs[:num_tensors])

    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grads = backward_op(grad_out, *ctx.saved_tensors, *ctx.constants)
        grads = (grads,) if isinstance(grads, Tensor) else grads
        return *grads, *(None for _ in ctx.constants)

    registry.define_autograd(forward, backward, setup_context)
    registry.forbid_second_derivative(backward_op)


def halves(gate_up: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Return (gate, up), views of the two halves of the last dim."""
    F = gate_up.shape[-1] // 2
    first, second = gate_up[..., :F], gate_up[..., F:]
    return (first, second) if order == "gate_up" else (second, first)


def supports(gate: Tensor, up: Tensor, **options: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    for name, x in (("gate", gate), ("up", up)):
        if x.dtype not in KERNEL_DTYPES:
            return f"{name} is {x.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def supports_packed(gate_up: Tensor, **options: Any) -> str | None:
    """Return why the Triton kernel cannot take this input, or None when it can."""
    if gate_up.dtype not in KERNEL_DTYPES:
        return f"gate_up is {gate_up.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def prefers_kernel(gate: Tensor, up: Tensor, **options: Any) -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    It is as fast as what inductor makes of the decomposition, which can join its neighbours.
    """
    return False


def prefers_kernel_packed(gate_up: Tensor, **options: Any) -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    On GPUs: inductor's concatenation of the two gradients reads everything twice.
    """
    return gate_up.device.type == "cuda" and gate_up.dtype in KERNEL_DTYPES


def _rows(x: Tensor) -> Tensor:
    """Return x, or a copy where a kernel could not walk its rows."""
    return x if row_stride(x) is not None else x.contiguous()


def _kernel(launcher: str) -> Callable[..., Any]:
    return getattr(import_module("xtrain.ops.triton.gated"), launcher)


def _backward_fake(
    grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
        torch.empty(up.shape, dtype=up.dtype, device=up.device),
    )


def _packed_backward_fake(grad_out: Tensor, gate_up: Tensor, *constants: Any) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
