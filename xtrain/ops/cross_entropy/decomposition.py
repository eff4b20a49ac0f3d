"""How cross-entropy is computed: what inductor fuses, and what eager runs a few rows at a time.

The formula is in op.py, whose op these functions decompose. w is 0 for a token that does
not count, so that both directions need no other test for it.

Letters: V vocabulary; "..." the tokens, of any number of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from xtrain.ops.core import compute_dtype

# Eager kernels form fp32 copies of this many logits at a time: 4 MiB, which a core's cache holds on
# the CPU; 256 MiB on a GPU, enough to fill it.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


def weights_in_loss(
    targets: Tensor, token_weights: Tensor | None, ignore_index: int, c: torch.dtype
) -> Tensor:
    """Return w in c, 0 for tokens that do not count, whatever their own weight."""
    counts = targets != ignore_index
    if token_weights is None:
        return counts.to(c)
    return torch.where(counts, token_weights.to(c), 0.0)


def token_losses(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return (l [...], lse [...]) in c; l is 0 where the token does not count."""
    x = logits.to(compute_dtype(logits.dtype))
    counts = targets != ignore_index
    lse = torch.logsumexp(x, dim=-1)
    safe = torch.where(counts, targets, 0).long()
    picked = x.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    losses = lse - (1.0 - label_smoothing) * picked
    if label_smoothing != 0.0:
        losses = losses - (label_smoothing / logits.shape[-1]) * x.sum(-1)
    if z_loss != 0.0:
        losses = losses + z_loss * lse * lse
    return torch.where(counts, losses, 0.0), lse


def factor_of_losses(weights: Tensor, reduction: str) -> Tensor:
    """Return what sum(w_i * l_i) is multiplied by: 1 / sum(w_i) for a mean, else 1; [] in c."""
    if reduction != "mean":
        return torch.ones((), dtype=weights.dtype, device=weights.device)
    total = weights.sum()
    return torch.where(total == 0, 0.0, 1.0 / torch.where(total == 0, 1.0, total))


def reduce_losses(losses: Tensor, weights: Tensor, factor: Tensor, reduction: str) -> Tensor:
    """Return the loss; the gradient of l_i is factor * w_i times that of the result."""
    # where, not a product alone: a weight of 0 must silence an infinite loss
    weighted = torch.where(weights == 0, 0.0, weights * losses)
    return weighted if reduction == "none" else weighted.sum() * factor


def grad_logits(
    logits: Tensor,
    targets: Tensor,
    grad_losses: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return d loss / d logits in logits' dtype, given that of each l_i; exact zeros where 0."""
    x = logits.to(lse.dtype)
    V = logits.shape[-1]
    probabilities = torch.exp(x - lse.unsqueeze(-1))
    if z_loss != 0.0:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * lse).unsqueeze(-1)
    # A comparison instead of a scatter: inductor fuses it, and ignore_index matches no column.
    hit = torch.arange(V, device=logits.device) == targets.unsqueeze(-1)
    grad = probabilities - hit.to(x.dtype) * (1.0 - label_smoothing)
    if label_smoothing != 0.0:
        grad = grad - label_smoothing / V
    silent = ((targets == ignore_index) | (grad_losses == 0)).unsqueeze(-1)
    return torch.where(silent, 0.0, grad_losses.unsqueeze(-1) * grad).to(logits.dtype)


# --- Decompositions ------------------------------------------------------------------------------


def cross_entropy_decomposition(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, lse [...], factor []) in c."""
    weights = weights_in_loss(targets, token_weights, ignore_index, compute_dtype(logits.dtype))
    losses, lse = token_losses(logits, targets, ignore_index, label_smoothing, z_loss)
    factor = factor_of_losses(weights, reduction)
    return reduce_losses(losses, weights, factor, reduction), lse, factor


def cross_entropy_backward_decomposition(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return grad_logits in logits' dtype; grad_loss is [] or, for reduction none, [...]."""
    weights = weights_in_loss(targets, token_weights, ignore_index, lse.dtype)
    grad_losses = grad_loss.to(lse.dtype) * factor * weights
    return grad_logits(logits, targets, grad_losses, lse, ignore_index, label_smoothing, z_loss)


# --- Eager: the same, a few rows at a time, in operations that pass over memory seldom -----------


def row_blocks(logits: Tensor, *per_token: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same tokens of each tensor, CHUNK_ELEMENTS of the logits at a time.

    Views, where the tensors are contiguous or logits is not: results may be written through them.
    """
    V = logits.shape[-1]
    step = max(1, CHUNK_ELEMENTS.get(logits.device.type, 1 << 26) // V)
    if logits.is_contiguous():
        last = logits.dim() - 2
        parts = [tuple(t.flatten(0, last) for t in (logits, *per_token))]
    else:  # e.g. logits[:, :-1], shifted without a copy
        indices = product(*map(range, logits.shape[:-2]))
        parts = [tuple(t[index] for t in (logits, *per_token)) for index in indices]
    for part in parts:
        for start in range(0, part[0].shape[0], step):
            yield tuple(t[start : start + step] for t in part)


def cross_entropy_eager(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what cross_entropy_decomposition returns."""
    c = compute_dtype(logits.dtype)
    losses = torch.empty(targets.shape, dtype=c, device=logits.device)
    lse = torch.empty_like(losses)
    blocks = row_blocks(logits, targets, losses, lse)
    for x, target_rows, loss_rows, lse_rows in blocks:
        token_losses_into(
            loss_rows, lse_rows, x, target_rows, ignore_index, label_smoothing, z_loss
        )
    weights = weights_in_loss(targets, token_weights, ignore_index, c)
    factor = factor_of_losses(weights, reduction)
    return reduce_losses(losses, weights, factor, reduction), lse, factor


def cross_entropy_backward_eager(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return what cross_entropy_backward_decomposition returns."""
    weights = weights_in_loss(targets, token_weights, ignore_index, lse.dtype)
    grad_losses = grad_loss.to(lse.dtype) * factor * weights
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for x, target_rows, grad_loss_rows, lse_rows, out in row_blocks(
        logits, targets, grad_losses, lse, grad
    ):
        grad_logits_into(
            out, x, target_rows, grad_loss_rows, lse_rows, ignore_index, label_smoothing, z_loss
        )
    return grad


def token_losses_into(
    losses: Tensor,
    lse: Tensor,
    x: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write l and lse of rows [n, V] in c. log_softmax is one pass where logsumexp takes three."""
    log_probabilities = torch.log_softmax(x, dim=-1, dtype=lse.dtype)
    # lse = x_ij - log p_ij for any j; at the largest the subtraction rounds least
    torch.sub(x.amax(-1), log_probabilities.amax(-1), out=lse)
    counts = targets != ignore_index
    safe = torch.where(counts, targets, 0).long().unsqueeze(-1)
    # log p = x - lse: the smoothed sum over x is one over log p, since its weights add up to 1
    result = log_probabilities.gather(-1, safe).squeeze(-1) * -(1.0 - label_smoothing)
    if label_smoothing != 0.0:
        result -= label_smoothing * log_probabilities.mean(-1)
    if z_loss != 0.0:
        result += z_loss * lse * lse
    losses.copy_(result.masked_fill_(~counts, 0.0))


def grad_logits_into(
    grad: Tensor,
    x: Tensor,
    targets: Tensor,
    grad_losses: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the gradient of rows [n, V], formed in c in the memory of one softmax."""
    result = torch.softmax(x, dim=-1, dtype=lse.dtype)
    result *= (grad_losses * (1.0 + 2.0 * z_loss * lse)).unsqueeze(-1)
    if label_smoothing != 0.0:
        result -= (grad_losses * (label_smoothing / x.shape[-1])).unsqueeze(-1)
    counts = targets != ignore_index
    safe = torch.where(counts, targets, 0).long().unsqueeze(-1)
    result.scatter_add_(-1, safe, (grad_losses * -(1.0 - label_smoothing)).unsqueeze(-1))
    silent = ~counts | (grad_losses == 0)
    if x.device.type != "cpu":
        result.masked_fill_(silent.unsqueeze(-1), 0.0)
    elif silent.any():  # 0 * NaN is NaN; on the CPU a look is cheaper than a pass
        result.index_fill_(0, silent.nonzero().squeeze(-1), 0.0)
    grad.copy_(result)
