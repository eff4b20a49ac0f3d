"""Root mean square norm, in the two cast orders that models use.

    r    = 1 / sqrt(mean(x^2) + eps)              over the last dim
    llama:  y = (x * r rounded to x's dtype) * weight
    gemma:  y = x * r * (1 + weight)              rounded once, to x's dtype

Arithmetic is in c: fp64 when x or weight is fp64, else fp32. With n = x * r, rounded as y saw it,
s = weight or 1 + weight, and g = grad_y * s:

    grad_x      = r * (g - x * r * mean(g * x * r))
    grad_weight = sum over rows of grad_y * n     accumulated in c, rounded once

Backward reads x and weight and recomputes r: both are there anyway, so nothing else is saved.
The op's out_dtype rounds y once more: a cast that follows the norm costs no kernel of its own.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.dropout.op import KERNEL_DTYPES, MAX_COLS
from xtrain.ops.shared.layout import contiguous, dense, empty_in, in_rows, inverse, memory_order

CASTS = ("llama", "gemma")


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, cast: str = "llama"
) -> Tensor:
    """Return the norm by the formula above; differentiable."""
    check_inputs(x, weight, eps, cast)
    c = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    normalised = x.to(c) / torch.sqrt(x.to(c).square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        return normalised.to(x.dtype) * weight
    return (normalised * (1.0 + weight.to(c))).to(x.dtype)


def rms_norm_decomposition(
    x: Tensor, weight: Tensor, eps: float, cast: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the norm as inductor fuses it: one reduction, one pass."""
    order = memory_order(x)
    x = x.permute(order).contiguous()
    c = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    normalised = x.to(c) * _rstd(x.to(c), eps)
    if cast == "llama":
        out = normalised.to(x.dtype) * weight
    else:
        out = (normalised * (1.0 + weight.to(c))).to(x.dtype)
    return (out if out_dtype is None else out.to(out_dtype)).permute(inverse(order))


def rms_norm_backward_decomposition(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    """Return (grad_x, grad_weight) by the formulas above."""
    order = memory_order(x)
    rows = grad_out.permute(order), x.permute(order)
    grad_x, grad_weight = gradients(*rows, weight, eps, cast)
    return grad_x.to(x.dtype).permute(inverse(order)), grad_weight.to(weight.dtype)


def gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    """Return (grad_x, grad_weight) in c, before their last rounding."""
    x, grad_out = x.contiguous(), grad_out.contiguous()
    c = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    rstd = _rstd(x.to(c), eps)
    normalised, g = x.to(c) * rstd, grad_out.to(c)
    rounded = normalised.to(x.dtype).to(c) if cast == "llama" else normalised
    grad_weight = (g * rounded).sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else g * rounded
    g = g * (weight.to(c) if cast == "llama" else 1.0 + weight.to(c))
    return rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True)), grad_weight


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def check_inputs(x: Tensor, weight: Tensor, eps: float, cast: str) -> None:
    """Raise ValueError for inputs that have no norm."""
    if cast not in CASTS:
        message = f'cast must be "llama" or "gemma", got {cast!r}'
    elif not (0.0 <= eps < math.inf):
        message = f"eps must be finite and not negative, got {eps}"
    elif not (x.dtype.is_floating_point and weight.dtype.is_floating_point):
        message = f"x and weight must hold floats, got {x.dtype} and {weight.dtype}"
    elif x.dim() == 0 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        message = (
            f"weight must be as long as x's last dim, got weight {tuple(weight.shape)} "
            f"for x {tuple(x.shape)}"
        )
    elif x.device != weight.device:
        message = f"weight is on {weight.device} and x on {x.device}: move one to the other"
    else:
        return
    raise torch_compat.argument_error(f"rms_norm: {message}")


def supports(x: Tensor, weight: Tensor, eps: float = 1e-6, *, cast: str = "llama") -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return row_kernel_refuses(x=x, weight=weight)


def row_kernel_refuses(**tensors: Tensor) -> str | None:
    """Return why kernels that hold whole rows in registers cannot take these tensors, or None."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > MAX_COLS:
            return f"{name} has {tensor.shape[-1]} columns; the kernel takes up to {MAX_COLS}"
    return core.kernel_refuses(KERNEL_DTYPES, **tensors)


def prefers_kernel(x: Tensor, weight: Tensor, eps: float = 1e-6, *, cast: str = "llama") -> bool:
    """Return whether, under inductor, the kernel is the faster form."""
    return prefers_row_kernel(x, weight)


def prefers_row_kernel(x: Tensor, *others: Tensor) -> bool:
    """Return whether kernels that hold whole rows in registers beat inductor for x's rows.

    On a GPU, from the rows of query and key norms on: forward and backward took 0.51 to 0.63 of the
    time of the fused decomposition from 64 to 4096 columns (bench/results/ops_h200_2026-11.md).
    What little inductor could fuse with it does not make up for that.
    """
    dtypes = all(tensor.dtype in KERNEL_DTYPES for tensor in (x, *others))
    return x.is_cuda and dtypes and 64 <= x.shape[-1] <= MAX_COLS


def norm_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype, cast: str) -> torch.dtype:
    """Return the dtype that the norm of x rounds to."""
    return torch.promote_types(x_dtype, weight_dtype) if cast == "llama" else x_dtype


def _fake(
    x: Tensor, weight: Tensor, eps: float, cast: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    check_inputs(x, weight, eps, cast)
    dtype = out_dtype or norm_dtype(x.dtype, weight.dtype, cast)
    return empty_in(memory_order(x), x.shape, x, dtype)


def _eager(
    x: Tensor, weight: Tensor, eps: float, cast: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    check_inputs(x, weight, eps, cast)
    return rms_norm_decomposition(dense(x, memory_order(x)), weight, eps, cast, out_dtype)


def _cuda(
    x: Tensor, weight: Tensor, eps: float, cast: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    check_inputs(x, weight, eps, cast)
    rounds_to = norm_dtype(x.dtype, weight.dtype, cast)
    dtype = out_dtype or rounds_to
    if x.numel() == 0 or dtype not in KERNEL_DTYPES or supports(x, weight) is not None:
        return _eager(x, weight, eps, cast, out_dtype)
    launch = import_module("xtrain.ops.rms_norm.kernel").norm_fwd
    order = memory_order(x)
    (x,) = in_rows(x.permute(order))
    _, y = launch(x, None, weight.contiguous(), None, eps, cast == "llama", rounds_to, dtype)
    return y.permute(inverse(order))


def _backward_fake(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    return (
        empty_in(memory_order(x), x.shape, x),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
    )


def _backward_eager(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    rows = dense(grad_out, memory_order(x)), dense(x, memory_order(x))
    return rms_norm_backward_decomposition(*rows, contiguous(weight), eps, cast)


def _backward_cuda(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0 or row_kernel_refuses(grad_out=grad_out, x=x, weight=weight) is not None:
        return _backward_eager(grad_out, x, weight, eps, cast)
    launch = import_module("xtrain.ops.rms_norm.kernel").norm_bwd
    order = memory_order(x)
    grad_out, x = in_rows(grad_out.permute(order), x.permute(order))
    rest = weight.contiguous(), None, eps, cast == "llama", None, x.dtype
    _, grad_x, grad_weight = launch(None, [grad_out], x, *rest, alone=True)
    return grad_x.permute(inverse(order)), grad_weight


FORWARD = core.define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, str cast, ScalarType? out_dtype=None, "
    "bool opaque=False) -> Tensor",
    fake=_fake,
    decomposition=rms_norm_decomposition,
    cpu=_eager,
    cuda=_cuda,
)
BACKWARD = core.define_op(
    "rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps, str cast, "
    "bool opaque=False) -> (Tensor, Tensor)",
    fake=_backward_fake,
    decomposition=rms_norm_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_cuda,
)


core.define_derivative(FORWARD, BACKWARD)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, cast: str = "llama") -> Tensor:
    """Divide each row of x by its root mean square and multiply it by weight.

    Shapes:   x (..., D), any strides; weight (D); result like x, dense, its dims in memory in x's
              order (D the innermost), never an alias.
    Args:     eps: added to the mean square; a constant.
              cast: "llama" rounds x / rms to x's dtype, then multiplies by weight; "gemma"
              multiplies by 1 + weight in fp32, then rounds.
    Grad:     for x and weight; saves x and weight, the row's 1 / rms is computed again.
    Numerics: fp32 (fp64 when x or weight is) up to the cast; "llama" gives the dtype that x and
              weight promote to, "gemma" that of x. grad_weight is summed over rows in fp32.
    Raises:   ValueError if weight is not (D), eps negative or not finite, cast unknown, or an input
              holds no floats.
    Source:   Zhang, Sennrich 2019 (RMSNorm).
    """
    opaque = core.opaque(prefers_kernel, x, weight, eps, cast=cast)
    return FORWARD(x, weight, eps, cast, None, opaque)


OP = core.Op(rms_norm, rms_norm_reference, FORWARD, BACKWARD, supports, prefers_kernel)
