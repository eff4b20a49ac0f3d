"""Root mean square norm, in the two cast orders that models use.

    r    = 1 / sqrt(mean(x^2) + eps)              over the last dim
    llama:  y = (x * r rounded to x's dtype) * weight
    gemma:  y = x * r * (1 + weight)              rounded once, to x's dtype

Arithmetic is in c: fp64 when x or weight is fp64, else fp32. With n = x * r, rounded as y saw it,
s = weight or 1 + weight, and g = grad_y * s:

    grad_x      = r * (g - x * r * mean(g * x * r))
    grad_weight = sum over rows of grad_y * n     accumulated in c, rounded once

Backward reads x and weight and recomputes r: both are there anyway, so nothing else is saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import registry
from xtrain.ops.dropout import compute_dtype
from xtrain.ops.layout import contiguous

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


def rms_norm_decomposition(x: Tensor, weight: Tensor, eps: float, cast: str) -> Tensor:
    """Return the norm as inductor fuses it: one reduction, one pass."""
    x = x.contiguous()
    c = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    normalised = x.to(c) * _rstd(x.to(c), eps)
    if cast == "llama":
        return normalised.to(x.dtype) * weight
    return (normalised * (1.0 + weight.to(c))).to(x.dtype)


def rms_norm_backward_decomposition(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    """Return (grad_x, grad_weight) by the formulas above."""
    x, grad_out = x.contiguous(), grad_out.contiguous()
    c = compute_dtype(torch.promote_types(x.dtype, weight.dtype))
    rstd = _rstd(x.to(c), eps)
    normalised, g = x.to(c) * rstd, grad_out.to(c)
    rounded = normalised.to(x.dtype).to(c) if cast == "llama" else normalised
    grad_weight = (g * rounded).sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else g * rounded
    g = g * (weight.to(c) if cast == "llama" else 1.0 + weight.to(c))
    grad_x = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


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
    return "rms_norm has no Triton kernel yet; the decomposition runs"


def _out_dtype(x: Tensor, weight: Tensor, cast: str) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if cast == "llama" else x.dtype


def _fake(x: Tensor, weight: Tensor, eps: float, cast: str) -> Tensor:
    check_inputs(x, weight, eps, cast)
    return torch.empty(x.shape, dtype=_out_dtype(x, weight, cast), device=x.device)


def _eager(x: Tensor, weight: Tensor, eps: float, cast: str) -> Tensor:
    check_inputs(x, weight, eps, cast)
    return rms_norm_decomposition(contiguous(x), weight, eps, cast)


def _backward_eager(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    dense = contiguous(grad_out), contiguous(x), contiguous(weight)
    return rms_norm_backward_decomposition(*dense, eps, cast)


def _backward_fake(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, cast: str
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
    )


FORWARD = registry.define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, str cast) -> Tensor",
    fake=_fake,
    decomposition=rms_norm_decomposition,
    cpu=_eager,
    cuda=_eager,
)
BACKWARD = registry.define_op(
    "rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, float eps, str cast) "
    "-> (Tensor, Tensor)",
    fake=_backward_fake,
    decomposition=rms_norm_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_eager,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.cast = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *BACKWARD(grad_out, x, weight, ctx.eps, ctx.cast), None, None


registry.define_autograd(FORWARD, _backward, _setup_context)
registry.forbid_second_derivative(BACKWARD)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, cast: str = "llama") -> Tensor:
    """Divide each row of x by its root mean square and multiply it by weight.

    Shapes:   x (..., D), any strides; weight (D); result like x, contiguous, never an alias.
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
    return FORWARD(x, weight, eps, cast)


OP = registry.Op(
    name="rms_norm",
    public=rms_norm,
    reference=rms_norm_reference,
    forward=FORWARD,
    backward=BACKWARD,
    decomposition=rms_norm_decomposition,
    backward_decomposition=rms_norm_backward_decomposition,
    supports=supports,
)
