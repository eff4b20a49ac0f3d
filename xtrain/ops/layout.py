"""Memory layouts that results must have exactly, since their fakes promise them."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous(x: Tensor) -> Tensor:
    """Return x.contiguous() in exactly the strides of torch.empty(x.shape).

    A dim of size 0 or 1 may have any stride in a contiguous tensor, and elementwise ops hand it on.
    For eager kernels: on symbolic sizes the comparison would become a guard.
    """
    strides: list[int] = []
    step = 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    dense = x.contiguous()
    return dense if dense.stride() == tuple(strides) else dense.as_strided(x.shape, strides)


def row_stride(x: Tensor) -> int | None:
    """Return the distance in elements between x's rows, its last dim being one row.

    None where the rows lie at no single distance, or the elements of a row are not neighbours; 0
    where there is one row. For kernels that read views of a wider tensor in place.
    """
    if x.dim() == 0:
        return 0
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    outer = [(size, x.stride(d)) for d, size in enumerate(x.shape[:-1]) if size != 1]
    for (_, stride), (inner_size, inner_stride) in zip(outer, outer[1:], strict=False):
        if stride != inner_size * inner_stride:
            return None
    return outer[-1][1] if outer else 0


def token_major(x: Tensor) -> bool:
    """Whether the heads of a token of x [B, N, T, H] lie closer than the tokens of a head.

    Projections give [B, T, N, H], seen as [B, N, T, H]. Keeping that order spares the copy when
    attention's result, in the layout of q, is merged back to [B, T, N * H].
    """
    return x.stride(1) < x.stride(2)


def empty_heads(x: Tensor) -> Tensor:
    """Return a dense tensor like x [B, N, T, H], in x's order of heads and tokens."""
    B, N, T, H = x.shape
    if token_major(x):
        return torch.empty((B, T, N, H), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((B, N, T, H), dtype=x.dtype, device=x.device)
