"""Losses written down once more, apart from the code under test: in NumPy, and in plain PyTorch."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
SHAPE, D, V = (3, 5), 6, 11


def numpy_cross_entropy(
    x, targets, *, ignore_index=IGNORE, label_smoothing=0.0, z_loss=0.0, weights=None,
    reduction="mean",
):  # fmt: skip
    """Token by token, from the definition in docs/design.md, in fp64."""
    V = x.shape[-1]
    losses, total = np.zeros(targets.shape), 0.0
    for i in np.ndindex(targets.shape):
        if targets[i] == ignore_index:
            continue
        w = 1.0 if weights is None else weights[i]
        lse = x[i].max() + math.log(np.exp(x[i] - x[i].max()).sum())
        goal = np.full(V, label_smoothing / V)
        goal[targets[i]] += 1.0 - label_smoothing
        losses[i] = w * (-(goal * (x[i] - lse)).sum() + z_loss * lse**2)
        total += w
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / total if total else 0.0


def plain_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
) -> Tensor:
    """What a careful user writes: F.linear in the inputs' dtype, the loss in fp32 or fp64."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = targets.flatten()
    losses = F.cross_entropy(logits, flat, label_smoothing=label_smoothing, reduction="none")
    counts = flat != IGNORE
    if z_loss:
        losses = losses + z_loss * torch.where(counts, logits.logsumexp(-1) ** 2, 0.0)
    weights = counts.to(logits.dtype)
    if token_weights is not None:
        weights = weights * token_weights.flatten().to(logits.dtype)
    losses = losses * weights
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def head_and_targets(
    shape=SHAPE, D=D, V=V, dtype=torch.float64, device="cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of size 3 or so; every fourth token ignored."""
    hidden = torch.randn(*shape, D, dtype=torch.float64)
    weight = 3 / math.sqrt(max(D, 1)) * torch.randn(V, D, dtype=torch.float64)
    targets = torch.randint(0, V, shape)
    targets.view(-1)[1::4] = IGNORE
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, targets.to(device)
