"""Memory layouts that results must have exactly, since their fakes promise them.

What each op's GPU kernels read in place, the last dim being dense; what lies otherwise is copied
first. On a CPU, and where inductor sees through an op, there is no such copy.

    sdpa                    q, k, v, grad_out: any strides of B, N, T, so parts of a projection's
                            row; cuDNN takes grad_out in the strides of its result
    rope, rope_qk           x: any strides of B, N, T; cos and sin: of one set of strides
    swiglu, geglu           rows at one distance: halves of a wider row; packed too
    cross_entropy           logits: contiguous, or a sample's rows at one distance: logits[:, :-1]
    linear_cross_entropy    hidden, weight: rows or columns at one distance
    rms_norm, dropout, dropout_add_rms_norm    contiguous

sdpa and rope give results and gradients in the order of the tensor that they belong to, the others
contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

import torch
from torch import Tensor

from xtrain import torch_compat


def contiguous(x: Tensor) -> Tensor:
    """Return x.contiguous() in exactly the strides of torch.empty(x.shape)."""
    return dense(x, tuple(range(x.dim())))


def dense(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return x in the strides of memory whose dims lie in this order; a copy if they lie otherwise.

    A dim of size 0 or 1 may have any stride in a dense tensor, and elementwise ops hand it on: it
    gets the stride that empty memory has. For eager kernels: on symbolic sizes the comparison would
    become a guard.

    Args:  order: the dims of x from the outermost in memory to the innermost.
    """
    strides, step = [0] * x.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(x.shape[d], 1)
    if x.stride() == tuple(strides):
        return x
    packed = x.permute(order).contiguous().permute(inverse(order))
    return packed if packed.stride() == tuple(strides) else packed.as_strided(x.shape, strides)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`."""
    return tuple(order.index(d) for d in range(len(order)))


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


def heads_order(x: Tensor) -> tuple[int, ...]:
    """Return the dims of x [B, N, T, H] from the outermost in memory to the innermost; H is last.

    Projections give [B, T, N, H], or [T, B, N, H], seen as [B, N, T, H]; each may be a part of a
    wider row that holds queries, keys and values. A dense result in that order is merged back to
    [B, T, N * H], and gradients in that order are put back into one row, without a transpose.
    A dim of size 1 has no place in memory; it keeps its own.
    """

    def further_out(a: int, b: int) -> int:  # symbolic strides are sorted by comparisons alone
        if torch_compat.holds(x.stride(a) < x.stride(b)):
            return 1
        return -1 if torch_compat.holds(x.stride(b) < x.stride(a)) else 0

    long = [d for d in range(3) if not torch_compat.holds(x.shape[d] == 1)]
    by_stride = iter(sorted(long, key=cmp_to_key(further_out)))
    return *(next(by_stride) if d in long else d for d in range(3)), 3


def empty_in(order: tuple[int, ...], shape: Sequence[int], like: Tensor) -> Tensor:
    """Return memory for this shape whose dims lie in this order, as `dense` would give it."""
    memory = torch.empty([shape[d] for d in order], dtype=like.dtype, device=like.device)
    return memory.permute(inverse(order))
