"""Cross-entropy over a vocabulary, with label smoothing, z-loss and token weights.

    lse_i = log(sum_j exp(x_ij))
    l_i   = lse_i - (1 - s) * x_i,t(i) - s / V * sum_j x_ij + z * lse_i^2
    loss  = sum_i(w_i * l_i) / sum_i(w_i)     mean, over the tokens that count; 0 when that is 0
    dx_ij = g_i * ((1 + 2 z lse_i) * exp(x_ij - lse_i) - (1 - s) * [j = t(i)] - s / V)

s is label_smoothing, z is z_loss, w the token weights (1 unless given); a token counts when its
target is not ignore_index. All in c: fp64 for fp64 logits, else fp32. Backward keeps the logits,
which the caller holds anyway, and lse.

Letters: V vocabulary; "..." the tokens, of any number of dimensions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.cross_entropy.decomposition import (
    cross_entropy_backward_decomposition,
    cross_entropy_backward_eager,
    cross_entropy_decomposition,
    cross_entropy_eager,
    factor_of_losses,
    reduce_losses,
    row_blocks,
    weights_in_loss,
)

REDUCTIONS = ("mean", "sum", "none")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss by log_softmax in c; differentiable."""
    c = compute_dtype(logits.dtype)
    counts = targets != ignore_index
    log_probabilities = torch.log_softmax(logits.to(c), dim=-1)
    safe = torch.where(counts, targets, 0).long()
    picked = log_probabilities.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    losses = -(1.0 - label_smoothing) * picked - label_smoothing * log_probabilities.mean(-1)
    losses = losses + z_loss * torch.logsumexp(logits.to(c), dim=-1) ** 2
    weights = torch.ones_like(picked) if token_weights is None else token_weights.to(c)
    weights = torch.where(counts, weights, 0.0)
    weighted = torch.where(weights == 0, 0.0, weights * losses)
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    total = weights.sum()
    return torch.where(total == 0, 0.0, weighted.sum() / torch.where(total == 0, 1.0, total))


def _forward_cpu(logits: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_range("cross_entropy", targets, rest[1], logits.shape[-1])
    return cross_entropy_eager(logits, targets, *rest)


def check_range(name: str, targets: Tensor, ignore_index: int, V: int) -> None:
    """Raise for a target that is no class; on a GPU the look would stall, and gather asserts."""
    wrong = ((targets < 0) | (targets >= V)) & (targets != ignore_index)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: target {int(targets[where])} at {where} is outside [0, {V}) and is "
            f"not ignore_index ({ignore_index})"
        )


def _forward_cuda(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (ignore_index, label_smoothing, z_loss)
    if supports(logits, targets) is not None:
        return cross_entropy_eager(logits, targets, token_weights, *options, reduction)
    weights = weights_in_loss(targets, token_weights, ignore_index, compute_dtype(logits.dtype))
    losses, lse = torch.empty_like(weights), torch.empty_like(weights)
    blocks = row_blocks(logits, targets, weights, losses, lse)
    for x, target_rows, weight_rows, loss_rows, lse_rows in blocks:
        _launch(x, None, target_rows, weight_rows, loss_rows, lse_rows, *options)
    factor = factor_of_losses(weights, reduction)
    return reduce_losses(losses, weights, factor, reduction), lse, factor


def _backward_cuda(
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
    options = (ignore_index, label_smoothing, z_loss)
    if supports(logits, targets) is not None:
        return cross_entropy_backward_eager(
            grad_loss, logits, targets, token_weights, lse, factor, *options
        )
    weights = weights_in_loss(targets, token_weights, ignore_index, lse.dtype)
    scale = grad_loss.to(lse.dtype) * factor * weights
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for x, out, target_rows, scale_rows, lse_rows in row_blocks(logits, grad, targets, scale, lse):
        _launch(x, out, target_rows, scale_rows, None, lse_rows, *options)
    return grad


def _launch(
    x: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    import_module("xtrain.ops.cross_entropy.kernel").cross_entropy_rows(
        x,
        grad,
        targets.contiguous(),
        scale.contiguous(),
        losses,
        lse,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=None,
    )


def _fake(
    logits: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    c, device = compute_dtype(logits.dtype), logits.device
    loss = torch.empty(targets.shape if reduction == "none" else (), dtype=c, device=device)
    lse = torch.empty(targets.shape, dtype=c, device=device)
    return loss, lse, torch.empty((), dtype=c, device=device)


def _backward_fake(grad_loss: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


FORWARD = core.define_op(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? token_weights, int ignore_index, "
    "float label_smoothing, float z_loss, str reduction) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    decomposition=cross_entropy_decomposition,
    cpu=_forward_cpu,
    cuda=_forward_cuda,
)
BACKWARD = core.define_op(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor targets, "
    "Tensor? token_weights, Tensor lse, Tensor factor, int ignore_index, float label_smoothing, "
    "float z_loss) -> Tensor",
    fake=_backward_fake,
    decomposition=cross_entropy_backward_decomposition,
    cpu=cross_entropy_backward_eager,
    cuda=_backward_cuda,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, token_weights, *ctx.options, _ = inputs
    _, lse, factor = output
    ctx.mark_non_differentiable(lse, factor)
    ctx.save_for_backward(logits, targets, token_weights, lse, factor)


def _backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad_logits = BACKWARD(grad_loss, *ctx.saved_tensors, *ctx.options)
    return (grad_logits, *(None,) * 6)


core.define_autograd(FORWARD, _backward, _setup_context)
core.forbid_second_derivative(BACKWARD)


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
    check_inputs(logits, targets, label_smoothing, z_loss, token_weights, reduction)
    options = (ignore_index, label_smoothing, z_loss, reduction)
    if logits.dim() > 1:
        return FORWARD(logits, targets, token_weights, *options)[0]
    weights = None if token_weights is None else token_weights.unsqueeze(0)
    loss = FORWARD(logits.unsqueeze(0), targets.unsqueeze(0), weights, *options)[0]
    return loss.squeeze(0) if reduction == "none" else loss


def check_inputs(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float,
    z_loss: float,
    token_weights: Tensor | None,
    reduction: str,
) -> None:
    """Raise ValueError, with the values, for what `cross_entropy` cannot compute."""
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits must be targets' shape and a last dimension of classes, got "
            f"{tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if not logits.dtype.is_floating_point:
        raise ValueError(f"cross_entropy: logits must be floats, got {logits.dtype}")
    check_options("cross_entropy", targets, label_smoothing, z_loss, token_weights, reduction)


def check_options(
    name: str,
    targets: Tensor,
    label_smoothing: float,
    z_loss: float,
    token_weights: Tensor | None,
    reduction: str,
) -> None:
    """Raise ValueError, with the values, for options that the op called `name` cannot compute."""
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise ValueError(f"{name}: targets must be integers, got {targets.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{name}: z_loss must be finite and not negative, got {z_loss}")
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
    if logits.dtype not in KERNEL_DTYPES:
        return f"logits are {logits.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    if logits.stride(-1) != 1 and logits.shape[-1] != 1:
        return "the logits of a token are no neighbours in memory"
    return None if torch_compat.has_triton() else "triton is not installed"


OP = core.Op(
    public=cross_entropy,
    reference=cross_entropy_reference,
    forward=FORWARD,
    backward=BACKWARD,
    supports=supports,
)
