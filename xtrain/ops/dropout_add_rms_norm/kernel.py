"""Dropout of a branch, the residual sum and the next RMS norm in one pass, forward and backward.

Tiling:   whole rows in registers, as in shared/rows.py: one tile per program forward, a
          fixed number of programs walking all tiles backward. Rows of x and residual may lie at up
          to three distances each; those of all other tensors lie one behind the other.
Bytes:    forward x, residual read, h, y written; backward grad_h, grad_y, h read, grad_x,
          grad_residual written. Where y has up to three users, their gradients are read one by one
          and summed here in fp32: their sum is never written. Seed and offset (16) are read by
          pointer; no mask is kept.
Random:   key and counter as in shared/random_words.py; element (row, col) has the flat
          index row * D + col, so that the mask is that of `dropout` whatever the tile.
Numerics: the dropped-out branch is rounded to x's dtype before it is added, and h to its own before
          it is normalised, as op by op. A launch on fp32 forbids fused multiply-adds, which would
          skip the first of these roundings.
"""

# Triton's tuples grow chunk by chunk, which the types of Python's do not foresee.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch.launching import launch
from xtrain.ops.rms_norm.kernel import norm_gradients, norm_slopes, weighted
from xtrain.ops.shared.casts import rounded, widened
from xtrain.ops.shared.random_words import GAMMA, dropped_out, random_words
from xtrain.ops.shared.rows import (
    added,
    backward_block_sizes,
    chunk_cols,
    forward_block_sizes,
    is_even,
    load_tile,
    load_weight,
    num_programs,
    row_distances,
    row_starts,
    store_chunk,
    store_partials,
    sum_partials,
    triton_dtype,
)


@triton.jit
def chunk_words(
    seed,
    offset,
    rows,
    chunk: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
    N_COLS: tl.constexpr,
):
    """Return the random words of one chunk of the rows.

    index * GAMMA = (offset + row * D) * GAMMA + col * GAMMA: a multiplication per row, not element.
    """
    cols = chunk_cols(chunk, CHUNK, VEC)
    row_counter = (offset + (rows * N_COLS).to(tl.uint64)) * GAMMA
    return random_words(seed, row_counter[:, None], cols[None, :], VEC)


@triton.jit
def _dropout_add_rms_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    h_ptr,
    y_ptr,
    seed_ptr,
    offset_ptr,
    n_middle,
    n_inner,
    x_outer_stride,
    x_middle_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_middle_stride,
    residual_inner_stride,
    n_rows,
    eps,
    last_dropped,
    scale,
    DROPS: tl.constexpr,
    N_COLS: tl.constexpr,
    LLAMA: tl.constexpr,
    Y_DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    H_DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    starts = row_starts(
        rows, N_COLS, n_middle, n_inner, x_outer_stride, x_middle_stride, x_inner_stride
    )
    x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
    starts = row_starts(
        rows, N_COLS, n_middle, n_inner, residual_outer_stride, residual_middle_stride,
        residual_inner_stride,
    )  # fmt: skip
    residual = load_tile(residual_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
    weight = load_weight(weight_ptr, BLOCK_ROWS, N_COLS, CHUNK, NUM_CHUNKS, VEC)
    if DROPS:
        seed = tl.load(seed_ptr).to(tl.uint64)
        offset = tl.load(offset_ptr).to(tl.uint64)
    squares = tl.zeros([BLOCK_ROWS, CHUNK], tl.float32)
    sums = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        branch = widened(x[chunk])
        if DROPS:
            words = chunk_words(seed, offset, rows, chunk, CHUNK, VEC, N_COLS)
            branch = dropped_out(branch, words, last_dropped, scale)
            branch = rounded(branch, x_ptr.dtype.element_ty)
        h = rounded(widened(residual[chunk]) + branch, H_DTYPE)
        store_chunk(h_ptr, h, rows, chunk, n_rows, N_COLS, VEC, EVEN)
        squares += h * h
        sums = sums + (h,)
    rstd = tl.rsqrt(tl.sum(squares, 1) / N_COLS + eps)
    for chunk in tl.static_range(NUM_CHUNKS):
        y = weighted(sums[chunk], rstd, weight[chunk], LLAMA, H_DTYPE, Y_DTYPE)
        store_chunk(y_ptr, y, rows, chunk, n_rows, N_COLS, VEC, EVEN)


@triton.jit
def _dropout_add_rms_norm_bwd_kernel(
    grad_h_ptr,
    grad_y_ptr,
    grad_y1_ptr,
    grad_y2_ptr,
    h_ptr,
    weight_ptr,
    seed_ptr,
    offset_ptr,
    grad_x_ptr,
    grad_residual_ptr,
    partial_ptr,
    n_rows,
    eps,
    last_dropped,
    scale,
    DROPS: tl.constexpr,
    HAS_GRAD_H: tl.constexpr,
    HAS_GRAD_X: tl.constexpr,
    NUM_GRAD_Y: tl.constexpr,
    N_COLS: tl.constexpr,
    LLAMA: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    H_DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    if DROPS:
        seed = tl.load(seed_ptr).to(tl.uint64)
        offset = tl.load(offset_ptr).to(tl.uint64)
    weight = load_weight(weight_ptr, 1, N_COLS, CHUNK, NUM_CHUNKS, VEC)
    grad_weight = ()
    for _chunk in tl.static_range(NUM_CHUNKS):
        grad_weight = grad_weight + (tl.zeros([BLOCK_ROWS, CHUNK], tl.float32),)
    n_tiles = tl.cdiv(n_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        h = load_tile(h_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        grad_y = load_tile(grad_y_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        if NUM_GRAD_Y > 1:
            more = load_tile(grad_y1_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
            grad_y = added(grad_y, more)
        if NUM_GRAD_Y > 2:
            more = load_tile(grad_y2_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
            grad_y = added(grad_y, more)
        if HAS_GRAD_H:
            grad_h = load_tile(grad_h_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        rstd, slope = norm_slopes(h, grad_y, weight, rows, n_rows, eps, N_COLS, LLAMA)
        sums = ()
        for chunk in tl.static_range(NUM_CHUNKS):
            grad, share = norm_gradients(
                h[chunk], grad_y[chunk], weight[chunk], rstd, slope, LLAMA, H_DTYPE
            )
            sums = sums + (grad_weight[chunk] + share,)
            if HAS_GRAD_H:
                grad += widened(grad_h[chunk])
            store_chunk(grad_residual_ptr, grad, rows, chunk, n_rows, N_COLS, VEC, EVEN)
            if DROPS:
                words = chunk_words(seed, offset, rows, chunk, CHUNK, VEC, N_COLS)
                grad = dropped_out(grad, words, last_dropped, scale)
            if HAS_GRAD_X:
                store_chunk(grad_x_ptr, grad, rows, chunk, n_rows, N_COLS, VEC, EVEN)
        grad_weight = sums
    store_partials(partial_ptr, grad_weight, N_COLS)


def dropout_add_rms_norm_block_sizes(
    n_cols: int,
    dtypes: Iterable[torch.dtype],
    loaded: Iterable[torch.dtype] = (),
    *,
    backward: bool,
) -> dict[str, Any]:
    """Return the sizes of the forward or backward kernel: those of rows in general, see there.

    Args:     dtypes: of all tensors of the branch's shape; loaded: of those that backward reads.
    """
    if backward:
        return backward_block_sizes(n_cols, dtypes, loaded)
    return forward_block_sizes(n_cols, dtypes)


def dropout_add_rms_norm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    threshold: int,
    scale: float,
    seed: Tensor,
    offset: Tensor,
    eps: float,
    llama: bool,
    norm_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launch on x and residual as layout.in_rows gives them, and contiguous weight.

    Return (h, y), contiguous; threshold 0 drops nothing.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    h_dtype = torch.promote_types(x.dtype, residual.dtype)
    h = torch.empty(x.shape, dtype=h_dtype, device=x.device)
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device)
    dtypes = (x.dtype, residual.dtype, h_dtype, y_dtype)
    tile = dropout_add_rms_norm_block_sizes(n_cols, dtypes, backward=False)
    launch(
        _dropout_add_rms_norm_fwd_kernel,
        (triton.cdiv(n_rows, tile["BLOCK_ROWS"]),),
        x,
        residual,
        weight,
        h,
        y,
        seed,
        offset,
        *row_distances(x, residual),
        n_rows,
        eps,
        max((threshold << 8) - 1, 0),
        scale,
        DROPS=threshold > 0,
        N_COLS=n_cols,
        LLAMA=llama,
        Y_DTYPE=triton_dtype(norm_dtype),
        EVEN=is_even(n_rows, n_cols, tile),
        enable_fp_fusion=x.dtype != torch.float32,
        **tile,
    )
    return h, y


def dropout_add_rms_norm_bwd(
    grad_h: Tensor | None,
    grad_y: list[Tensor],
    h: Tensor,
    weight: Tensor,
    threshold: int,
    scale: float,
    seed: Tensor,
    offset: Tensor,
    eps: float,
    llama: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch on contiguous tensors, one to three in grad_y, whose sum it takes.

    Return (grad_x, grad_residual, grad_weight); grad_x has no elements where grad_residual is both.
    """
    n_cols = h.shape[-1]
    n_rows = h.numel() // n_cols
    loaded = [t.dtype for t in (h, *grad_y, *([] if grad_h is None else [grad_h]))]
    dtypes = [*loaded, x_dtype, residual_dtype]
    tile = dropout_add_rms_norm_block_sizes(n_cols, dtypes, loaded, backward=True)
    programs = num_programs(n_rows, tile, h.device)
    of_x = (0,) if threshold == 0 and x_dtype == residual_dtype else h.shape
    grad_x = torch.empty(of_x, dtype=x_dtype, device=h.device)
    grad_residual = torch.empty(h.shape, dtype=residual_dtype, device=h.device)
    partial = torch.empty(programs, n_cols, dtype=torch.float32, device=h.device)
    launch(
        _dropout_add_rms_norm_bwd_kernel,
        (programs,),
        h if grad_h is None else grad_h,
        *(grad_y[i if i < len(grad_y) else 0] for i in range(3)),
        h,
        weight,
        seed,
        offset,
        grad_x,
        grad_residual,
        partial,
        n_rows,
        eps,
        max((threshold << 8) - 1, 0),
        scale,
        DROPS=threshold > 0,
        HAS_GRAD_H=grad_h is not None,
        HAS_GRAD_X=grad_x.numel() > 0,
        NUM_GRAD_Y=len(grad_y),
        N_COLS=n_cols,
        LLAMA=llama,
        EVEN=is_even(n_rows, n_cols, tile),
        **tile,
    )
    return grad_x, grad_residual, sum_partials(partial, weight.dtype)
