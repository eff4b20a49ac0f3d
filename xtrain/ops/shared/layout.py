"""Memory layouts that results must have exactly, since their fakes promise them.

What each op's GPU kernels read in place, the last dim being dense; what lies otherwise is copied
first. On a CPU, and where inductor sees through an op, there is no such copy.

    sdpa                    q, k, v, grad_out: any strides of B, N, T, so parts of a projection's
                            row; cuDNN takes grad_out in the strides of its result
    rope, rope_qk           x: any strides of B, N, T; cos and sin: of one set of strides
    rms_norm                x, grad_out: rows at up to three distances, so the heads of a packed
                            projection, or any order of B, N, T
    dropout                 x, grad_out: the same, rows of up to 8192 elements
    dropout_add_rms_norm    x, residual: the same; h and gradients contiguous
    swiglu, geglu           rows at one distance: halves of a wider row; packed too
    cross_entropy           logits: contiguous, or a sample's rows at one distance: logits[:, :-1]
    linear_cross_entropy    hidden, weight: rows or columns at one distance

sdpa, rope and rms_norm give results and gradients in the order of the tensor that they belong to,
the others contiguous ones.
"""

from __future__ import annotations

import math
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
    rows = row_strides(x)
    return rows[1][0][0] if rows is not None and rows[0] == (1, 1) else None


def row_strides(*tensors: Tensor) -> tuple[tuple[int, int], list[tuple[int, ...]]] | None:
    """Return sizes (n_middle, n_inner) and each tensor's three distances between its rows.

    The last dim is one row. Row r of each of these tensors of one shape starts behind as many
    elements as the distances times (r // n_inner // n_middle, r // n_inner % n_middle, r % n_inner)
    add up to: so lie the heads of a packed projection, in any order of B, N and T. A size is 1, and
    its distance 0, where fewer say it all. None where three do not, or where the elements of a row
    are not neighbours.
    """
    shape = tensors[0].shape
    if shape[-1] > 1 and any(x.stride(-1) != 1 for x in tensors):
        return None
    dims: list[tuple[int, list[int]]] = []  # from the outermost; what lies at one distance, joined
    for size, *strides in zip(shape[:-1], *(x.stride()[:-1] for x in tensors), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == [size * stride for stride in strides]:
            size *= dims.pop()[0]
        dims.append((size, strides))
    if len(dims) > 3 or math.prod(shape[:-1]) >= 1 << 31:  # kernels divide 32-bit row numbers
        return None
    absent = 1, [0] * len(tensors)
    dims = dims or [absent]
    dims[1:1] = [absent] * (3 - len(dims))
    outer, middle, inner = dims
    return (middle[0], inner[0]), list(zip(outer[1], middle[1], inner[1], strict=True))


def in_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one shape, those copied whose rows `row_strides` finds no distances for."""
    if all(x.is_contiguous() for x in tensors) or row_strides(*tensors) is not None:
        return list(tensors)
    alone = [x if row_strides(x) is not None else x.contiguous() for x in tensors]
    return alone if row_strides(*alone) is not None else [x.contiguous() for x in alone]


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dims of x (..., D) from the outermost in memory to the innermost; D is last.

    Projections give [B, T, N, H], or [T, B, N, H], seen as [B, N, T, H]; each may be a part of a
    wider row that holds queries, keys and values. A dense result in that order is merged back to
    [B, T, N * H], and gradients in that order are put back into one row, without a transpose.
    A dim of size 1, or one that was expanded, has no place in memory; it keeps its own.
    """

    def further_out(a: int, b: int) -> int:  # symbolic strides are sorted by comparisons alone
        if torch_compat.holds(x.stride(a) < x.stride(b)):
            return 1
        return -1 if torch_compat.holds(x.stride(b) < x.stride(a)) else 0

    if all(type(s) is int for s in (*x.shape, *x.stride())) and x.is_contiguous():
        return tuple(range(x.dim()))  # at once, for eager calls
    leading = range(x.dim() - 1)
    placed = [
        d
        for d in leading
        if not (torch_compat.holds(x.shape[d] == 1) or torch_compat.holds(x.stride(d) == 0))
    ]
    by_stride = iter(sorted(placed, key=cmp_to_key(further_out)))
    return *(next(by_stride) if d in placed else d for d in leading), x.dim() - 1


def empty_in(
    order: tuple[int, ...], shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return memory for this shape whose dims lie in this order, as `dense` would give it."""
    memory = torch.empty([shape[d] for d in order], dtype=dtype or like.dtype, device=like.device)
    return memory.permute(inverse(order))
