"""Cross-entropy over a vocabulary, with label smoothing, z-loss and token weights.

    lse_i = log(sum_j exp(x_ij))
    l_i   = lse_i - (1 - s) * x_i,t(i) - s / V * sum_j x_ij + z * lse_i^2
    loss  = sum_i(w_i * l_i) / sum_i(w_i)     mean, over the tokens that count; 0 when that is 0
    dx_ij = g_i * ((1 + 2 z lse_i) * exp(x_ij - lse_i) - (1 - s) * [j = t(i)] - s / V)

s is label_smoothing, z is z_loss, w the token weights (1 unless given); a token counts when its
target is not ignore_index. All in c: fp64 for fp64 logits, else fp32. Backward keeps the logits,
which the caller holds anyway, and lse. w is 0 for a token that does not count, so that both
directions need no other test for it.

Letters: V vocabulary; "..." the tokens, of any number of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtrain.ops import core
from xtrain.ops.core import compute_dtype

REDUCTIONS = ("mean", "sum", "none")
KERNEL_DTYPES = (*core.FLOATS, torch.float64)
# Eager kernels form fp32 copies of this many logits at a time: 4 MiB, which a core's cache holds on
# the CPU; 256 MiB on a GPU, enough to fill it.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


class Options(NamedTuple):
    """What the loss of a token depends on besides its logits and its target."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None  # linear_cross_entropy's alone
    reduction: str = "mean"

    def capped(self, x: Tensor) -> Tensor:
        """Return softcap * tanh(x / softcap), or x where there is no cap."""
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

    def cap_derivative(self, y: Tensor) -> Tensor | float:
        """Return the derivative of `capped`, given its result."""
        return 1.0 if self.softcap is None else 1.0 - (y / self.softcap) ** 2

    def counts(self, targets: Tensor) -> Tensor:
        """Return which tokens count."""
        return targets != self.ignore_index

    def classes(self, targets: Tensor) -> Tensor:
        """Return [..., 1], int64: each token's target, a class for those that do not count too."""
        return torch.where(self.counts(targets), targets, 0).long().unsqueeze(-1)


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """Return the loss by log_softmax in c; differentiable. options: the fields of `Options`."""
    option = Options(**options)
    c = compute_dtype(logits.dtype)
    x = option.capped(logits.to(c))
    log_probabilities = torch.log_softmax(x, dim=-1)
    picked = log_probabilities.gather(-1, option.classes(targets)).squeeze(-1)
    smoothing = option.label_smoothing
    losses = -(1.0 - smoothing) * picked - smoothing * log_probabilities.mean(-1)
    losses = losses + option.z_loss * torch.logsumexp(x, dim=-1) ** 2
    weights = torch.ones_like(picked) if token_weights is None else token_weights.to(c)
    weights = torch.where(option.counts(targets), weights, 0.0)
    weighted = torch.where(weights == 0, 0.0, weights * losses)
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    total = weights.sum()
    return torch.where(total == 0, 0.0, weighted.sum() / torch.where(total == 0, 1.0, total))


def weights_in_loss(
    targets: Tensor, token_weights: Tensor | None, options: Options, c: torch.dtype
) -> Tensor:
    """Return w in c, 0 for tokens that do not count, whatever their own weight."""
    counts = options.counts(targets)
    if token_weights is None:
        return counts.to(c)
    return torch.where(counts, token_weights.to(c), 0.0)


def token_losses(logits: Tensor, targets: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (l [...], lse [...]) in c; l is 0 where the token does not count."""
    _, label_smoothing, z_loss, *_ = options
    x = logits.to(compute_dtype(logits.dtype))
    lse = torch.logsumexp(x, dim=-1)
    picked = x.gather(-1, options.classes(targets)).squeeze(-1)
    losses = lse - (1.0 - label_smoothing) * picked
    if label_smoothing != 0.0:
        losses = losses - (label_smoothing / logits.shape[-1]) * x.sum(-1)
    if z_loss != 0.0:
        losses = losses + z_loss * lse * lse
    return torch.where(options.counts(targets), losses, 0.0), lse


def factor_of_losses(weights: Tensor, options: Options) -> Tensor:
    """Return what sum(w_i * l_i) is multiplied by: 1 / sum(w_i) for a mean, else 1; [] in c."""
    if options.reduction != "mean":
        return torch.ones((), dtype=weights.dtype, device=weights.device)
    total = weights.sum()
    return torch.where(total == 0, 0.0, 1.0 / torch.where(total == 0, 1.0, total))


def reduce_losses(losses: Tensor, weights: Tensor, factor: Tensor, options: Options) -> Tensor:
    """Return the loss; the gradient of l_i is factor * w_i times that of the result."""
    # where, not a product alone: a weight of 0 must silence an infinite loss
    weighted = torch.where(weights == 0, 0.0, weights * losses)
    return weighted if options.reduction == "none" else weighted.sum() * factor


def grad_logits(
    logits: Tensor, targets: Tensor, grad_losses: Tensor, lse: Tensor, options: Options
) -> Tensor:
    """Return d loss / d logits in logits' dtype, given that of each l_i; exact zeros where 0."""
    _, label_smoothing, z_loss, *_ = options
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
    silent = silent_rows(targets, grad_losses, options)
    return torch.where(silent, 0.0, grad_losses.unsqueeze(-1) * grad).to(logits.dtype)


def silent_rows(targets: Tensor, grad_losses: Tensor, options: Options) -> Tensor:
    """Return [..., 1]: True for tokens whose logits get no gradient, whatever they hold."""
    return ((targets == options.ignore_index) | (grad_losses == 0)).unsqueeze(-1)


def cross_entropy_decomposition(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, lse [...], factor []) in c."""
    weights = weights_in_loss(targets, token_weights, options, compute_dtype(logits.dtype))
    losses, lse = token_losses(logits, targets, options)
    factor = factor_of_losses(weights, options)
    return reduce_losses(losses, weights, factor, options), lse, factor


def cross_entropy_backward_decomposition(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    options: Options,
) -> Tensor:
    """Return grad_logits in logits' dtype; grad_loss is [] or, for reduction none, [...]."""
    weights = weights_in_loss(targets, token_weights, options, lse.dtype)
    grad_losses = grad_loss.to(lse.dtype) * factor * weights
    return grad_logits(logits, targets, grad_losses, lse, options)


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


def rows_by_torch(
    x: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    options: Options,
) -> None:
    """Do what cross_entropy_rows of kernel.py does, but of rows of scale 0 losses and lse."""
    if losses is not None:
        token_losses_into(losses, lse, x, targets, options)
    if grad is not None:
        grad_logits_into(grad, x, targets, scale, lse, options)


def rows_by_kernel(
    x: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    options: Options,
    *,
    padded: bool = False,
) -> None:
    """Launch cross_entropy_rows of kernel.py, imported here first."""
    launch = import_module("xtrain.ops.cross_entropy.kernel").cross_entropy_rows
    scale = scale.contiguous()
    launch(x, grad, targets.contiguous(), scale, losses, lse, options, padded=padded)


def token_losses_into(
    losses: Tensor, lse: Tensor, x: Tensor, targets: Tensor, options: Options
) -> None:
    """Write l and lse of rows [n, V] in c. log_softmax is one pass where logsumexp takes three."""
    _, label_smoothing, z_loss, *_ = options
    log_probabilities = torch.log_softmax(x, dim=-1, dtype=lse.dtype)
    # lse = x_ij - log p_ij for any j; at the largest the subtraction rounds least
    torch.sub(x.amax(-1), log_probabilities.amax(-1), out=lse)
    # log p = x - lse: the smoothed sum over x is one over log p, since its weights add up to 1
    picked = log_probabilities.gather(-1, options.classes(targets)).squeeze(-1)
    result = picked * -(1.0 - label_smoothing)
    if label_smoothing != 0.0:
        result -= label_smoothing * log_probabilities.mean(-1)
    if z_loss != 0.0:
        result += z_loss * lse * lse
    losses.copy_(result.masked_fill_(~options.counts(targets), 0.0))


def grad_logits_into(
    grad: Tensor,
    x: Tensor,
    targets: Tensor,
    grad_losses: Tensor,
    lse: Tensor,
    options: Options,
) -> None:
    """Write the gradient of rows [n, V], formed in c in the memory of one softmax."""
    _, label_smoothing, z_loss, *_ = options
    result = torch.softmax(x, dim=-1, dtype=lse.dtype)
    result *= (grad_losses * (1.0 + 2.0 * z_loss * lse)).unsqueeze(-1)
    if label_smoothing != 0.0:
        result -= (grad_losses * (label_smoothing / x.shape[-1])).unsqueeze(-1)
    of_target = (grad_losses * -(1.0 - label_smoothing)).unsqueeze(-1)
    result.scatter_add_(-1, options.classes(targets), of_target)
    silent = silent_rows(targets, grad_losses, options)
    if x.device.type != "cpu":
        result.masked_fill_(silent, 0.0)
    elif silent.any():  # 0 * NaN is NaN; on the CPU a look is cheaper than a pass
        result.index_fill_(0, silent.nonzero()[:, 0], 0.0)
    grad.copy_(result)


# --- The op --------------------------------------------------------------------------------------


def check_range(name: str, targets: Tensor, options: Options, V: int) -> None:
    """Raise for a target that is no class; on a GPU the look would stall, and gather asserts."""
    wrong = ((targets < 0) | (targets >= V)) & options.counts(targets)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: target {int(targets[where])} at {where} is outside [0, {V}) and is "
            f"not ignore_index ({options.ignore_index})"
        )


def _row_function(logits: Tensor) -> Callable[..., None]:
    on_gpu = logits.device.type == "cuda" and supports(logits) is None
    return rows_by_kernel if on_gpu else rows_by_torch


def _forward(
    logits: Tensor, targets: Tensor, token_weights: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.device.type == "cpu":
        check_range("cross_entropy", targets, options, logits.shape[-1])
    weights = weights_in_loss(targets, token_weights, options, compute_dtype(logits.dtype))
    losses = torch.empty(targets.shape, dtype=weights.dtype, device=logits.device)
    lse = torch.empty_like(losses)
    step = _row_function(logits)
    for x, *rows in row_blocks(logits, targets, weights, losses, lse):
        step(x, None, *rows, options)
    factor = factor_of_losses(weights, options)
    return reduce_losses(losses, weights, factor, options), lse, factor


def _backward(
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    options: Options,
) -> Tensor:
    weights = weights_in_loss(targets, token_weights, options, lse.dtype)
    scale = grad_loss.to(lse.dtype) * factor * weights
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    step = _row_function(logits)
    for x, *rows, lse_rows in row_blocks(logits, grad, targets, scale, lse):
        step(x, *rows, None, lse_rows, options)
    return grad


def _fake(
    logits: Tensor, targets: Tensor, token_weights: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    c, device = compute_dtype(logits.dtype), logits.device
    loss = torch.empty(targets.shape if options.reduction == "none" else (), dtype=c, device=device)
    lse = torch.empty(targets.shape, dtype=c, device=device)
    return loss, lse, torch.empty((), dtype=c, device=device)


def _backward_fake(grad_loss: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


FORWARD = core.define_op(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? token_weights, int ignore_index, "
    "float label_smoothing, float z_loss, str reduction) -> (Tensor, Tensor, Tensor)",
    records=(Options,),
    fake=_fake,
    decomposition=cross_entropy_decomposition,
    cpu=_forward,
    cuda=_forward,
)
BACKWARD = core.define_op(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor targets, "
    "Tensor? token_weights, Tensor lse, Tensor factor, int ignore_index, float label_smoothing, "
    "float z_loss) -> Tensor",
    records=(Options,),
    fake=_backward_fake,
    decomposition=cross_entropy_backward_decomposition,
    cpu=_backward,
    cuda=_backward,
)


core.define_derivative(FORWARD, BACKWARD, outputs=("loss", "lse", "factor"))


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy of logits against targets that are already shifted.

    Shapes:   logits (..., V), any strides, never modified; targets (...), integers; result () or,
              for reduction "none", (...).
    Args:     ignore_index: targets of this value count for nothing.
              label_smoothing: in [0, 1], as in torch: spread over all V classes.
              z_loss: adds z_loss * lse^2 per token, lse the log-sum-exp of its logits.
              token_weights: (...), floats, a weight per token; constants.
              reduction: "mean" = sum(w l) / sum(w), 0 when that is 0 | "sum" | "none" = w l.
    Grad:     of logits, in their dtype, formed in c; saves logits and lse.
    Numerics: fp32 (fp64 for fp64), which is also the result's dtype.
    Raises:   ValueError for shapes, dtypes or options that do not fit, and, eagerly on the CPU, for
              a target outside [0, V), with its position.
    Source:   label smoothing: Szegedy et al. 2016; z-loss: PaLM, Chowdhery et al. 2022.
    """
    options = Options(ignore_index, label_smoothing, z_loss, None, reduction)
    check_inputs(logits, targets, token_weights, options)
    rest = (*options[:3], reduction)
    if logits.dim() > 1:
        return FORWARD(logits, targets, token_weights, *rest)[0]
    weights = None if token_weights is None else token_weights.unsqueeze(0)
    loss = FORWARD(logits.unsqueeze(0), targets.unsqueeze(0), weights, *rest)[0]
    return loss.squeeze(0) if reduction == "none" else loss


def check_inputs(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
) -> None:
    """Raise ValueError, with the values, for what `cross_entropy` cannot compute."""
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits must be targets' shape and a last dimension of classes, got "
            f"{tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if not logits.dtype.is_floating_point:
        raise ValueError(f"cross_entropy: logits must be floats, got {logits.dtype}")
    check_options("cross_entropy", targets, token_weights, options)


def check_options(
    name: str,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
) -> None:
    """Raise ValueError, with the values, for options that the op called `name` cannot compute."""
    _, label_smoothing, z_loss, softcap, reduction = options
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise ValueError(f"{name}: targets must be integers, got {targets.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{name}: z_loss must be finite and not negative, got {z_loss}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap must be finite and positive, or None, got {softcap}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if token_weights is None:
        return
    if token_weights.shape != targets.shape or not token_weights.dtype.is_floating_point:
        raise ValueError(
            f"{name}: token_weights must be floats of targets' shape {tuple(targets.shape)},"
            f" got {token_weights.dtype} {tuple(token_weights.shape)}"
        )
    if token_weights.requires_grad:
        raise ValueError(
            f"{name}: token_weights are constants, got one that requires a gradient: detach "
            'it, or weight the losses of reduction="none" outside'
        )


def supports(logits: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    if logits.stride(-1) != 1 and logits.shape[-1] != 1:
        return "the logits of a token are no neighbours in memory"
    return core.kernel_refuses(KERNEL_DTYPES, logits=logits)


OP = core.Op(cross_entropy, cross_entropy_reference, FORWARD, BACKWARD, supports)
