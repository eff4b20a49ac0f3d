"""Attention from its definition, for the tests of its kernels: in fp64, and plainly in a dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _visible(T: int, S: int, causal: bool, window: int | None, documents: Tensor | None, device):
    """[.., T, S]: query i sees key j iff i + S - T - window < j <= i + S - T, in one document."""
    last = torch.arange(T, device=device)[:, None] + (S - T)
    j = torch.arange(S, device=device)[None, :]
    sees = torch.ones(T, S, dtype=torch.bool, device=device)
    if causal or window is not None:
        sees = j <= last
    if window is not None:
        sees = sees & (last - j < window)
    if documents is not None:
        sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
    return sees


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
) -> list[Tensor]:
    """Return (out, grad_q, grad_k, grad_v) by the ops of plain PyTorch, in the inputs' dtype."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, dim=1) for t in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sees = _visible(*scores.shape[-2:], causal, window, documents, q.device)
    empty = ~sees.any(-1, keepdim=True)
    scores = scores.masked_fill(~sees, -math.inf).masked_fill(empty, 0.0)
    out = torch.softmax(scores, -1).masked_fill(empty, 0.0) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def attention(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, **options) -> list[Tensor]:
    """Return (out, grad_q, grad_k, grad_v) in fp64."""
    return plain_attention(*(t.double() for t in (q, k, v, grad_out)), **options)
