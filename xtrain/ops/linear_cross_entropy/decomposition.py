"""linear_cross_entropy in functional torch operations: the form that inductor can see through.

Public calls keep the op opaque, whose kernels reuse one buffer of logits. Seen through, the tokens
are cut into at most MAX_CHUNKS pieces, each with logits of its own; where their number is a symbol
there is one piece. The backward of a gradient that the forward made is one multiplication, which
inductor fuses with what comes next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtrain.ops.core import compute_dtype
from xtrain.ops.cross_entropy.decomposition import (
    factor_of_losses,
    grad_logits,
    reduce_losses,
    token_losses,
    weights_in_loss,
)
from xtrain.ops.linear_cross_entropy.chunks import (
    Options,
    cap_derivative,
    capped,
    chunk_rows,
    held_dtype,
    silent_rows,
)

MAX_CHUNKS = 16


def forward_decomposition(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    needs_grad_hidden: bool,
    needs_grad_weight: bool,
    weight_grad_accumulation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, lse, factor, grad_hidden, grad_weight) as the op does."""
    c, held = compute_dtype(hidden.dtype), held_dtype(hidden.dtype)
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    weights = weights_in_loss(targets, token_weights, ignore_index, c)
    factor = factor_of_losses(weights, reduction)
    parts = [
        _token_losses(x, t, s, options) for _, x, t, s in _chunks(hidden, weight, targets, weights)
    ]
    losses = _joined([part[0] for part in parts]).view(targets.shape)
    lse = _joined([part[1] for part in parts]).view(targets.shape)
    needs_grad = (needs_grad_hidden, needs_grad_weight)
    if reduction == "none":
        needs_grad = (False, False)
    scale = weights * factor if held == hidden.dtype else weights
    wide = weight_grad_accumulation == "fp32"
    grads = _gradients(hidden, weight, targets, scale, lse, options, needs_grad, wide, held)
    return reduce_losses(losses, weights, factor, reduction), lse, factor, *grads


def backward_decomposition(
    grad_loss: Tensor,
    hidden: Tensor | None,
    weight: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    needs_grad_hidden: bool,
    needs_grad_weight: bool,
    weight_grad_accumulation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) as the op does."""
    if hidden is None or weight is None:
        upstream = upstream_of(grad_loss, factor, dtype)
        grads = zip((grad_hidden, grad_weight), (needs_grad_hidden, needs_grad_weight), strict=True)
        first, second = (
            scaled(grad, upstream, dtype) if wanted else grad.new_empty(0, dtype=dtype)
            for grad, wanted in grads
        )
        return first, second
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    weights = weights_in_loss(targets, token_weights, ignore_index, lse.dtype)
    scale = grad_loss.to(lse.dtype) * factor * weights
    needs_grad = (needs_grad_hidden, needs_grad_weight)
    wide = weight_grad_accumulation == "fp32"
    return _gradients(hidden, weight, targets, scale, lse, options, needs_grad, wide, dtype)


def upstream_of(grad_loss: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what gradients that the forward made for inputs of dtype are multiplied by."""
    upstream = grad_loss.to(factor.dtype)
    return upstream if held_dtype(dtype) == dtype else upstream * factor


def scaled(held: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """Return held * upstream, formed in c and rounded once to dtype."""
    return (held.to(upstream.dtype) * upstream).to(dtype)


Chunk = tuple[Tensor, Tensor, Tensor, Tensor]


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Chunk]:
    """Return (hidden [n, D], logits [n, V], targets [n], scale [n]) of each piece."""
    V, D = weight.shape
    hidden = hidden.flatten(0, -2)
    n = hidden.shape[0]
    step = n
    if isinstance(n, int):
        rows = chunk_rows(V, D, weight.element_size(), weight.device.type, wide=True)
        step = max(rows, -(-n // MAX_CHUNKS))
    starts = range(0, max(n, 1), step) if isinstance(n, int) else (0,)
    pieces = []
    for start in starts:
        h, t, s = (x[start : start + step] for x in (hidden, targets.view(-1), scale.view(-1)))
        pieces.append((h, h @ weight.t(), t, s))
    return pieces


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts one after the other; of one, torch.cat would be a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _token_losses(
    x: Tensor, targets: Tensor, scale: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return (l [n], lse [n]) in c; l is 0 where scale is."""
    y = x.to(scale.dtype)
    y = y if options.softcap is None else capped(y, options.softcap)
    losses, lse = token_losses(
        y, targets, options.ignore_index, options.label_smoothing, options.z_loss
    )
    silent = silent_rows(targets, scale, options.ignore_index).squeeze(-1)
    return torch.where(silent, 0.0, losses), torch.where(silent, 0.0, lse)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    lse: Tensor,
    options: Options,
    needs_grad: tuple[bool, bool],
    wide: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) in dtype, [0] where not wanted."""
    of_hidden, of_weight = [], None
    if any(needs_grad):
        lse_parts = lse.view(-1)
        for h, x, t, s in _chunks(hidden, weight, targets, scale):
            part, lse_parts = lse_parts[: h.shape[0]], lse_parts[h.shape[0] :]
            dx = _grad_logits(x, t, s, part, options)
            if needs_grad[0]:
                of_hidden.append(_product(dx, weight, dtype))
            if needs_grad[1]:
                term = _product(dx.t(), h, scale.dtype if wide else dtype)
                of_weight = term if of_weight is None else of_weight + term
    nothing = hidden.new_empty(0, dtype=dtype)
    return (
        _joined(of_hidden).view(hidden.shape) if of_hidden else nothing,
        nothing.clone() if of_weight is None else of_weight.to(dtype),
    )


def _grad_logits(
    x: Tensor, targets: Tensor, scale: Tensor, lse: Tensor, options: Options
) -> Tensor:
    """Return d loss / d x in x's dtype."""
    y = x.to(lse.dtype)
    y = y if options.softcap is None else capped(y, options.softcap)
    grad = grad_logits(
        y, targets, scale, lse, options.ignore_index, options.label_smoothing, options.z_loss
    )
    if options.softcap is not None:
        grad = grad * cap_derivative(y, options.softcap)
        grad = torch.where(silent_rows(targets, scale, options.ignore_index), 0.0, grad)
    return grad.to(x.dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in dtype, which may be wider than theirs."""
    return a @ b if dtype == a.dtype else a.to(dtype) @ b.to(dtype)
