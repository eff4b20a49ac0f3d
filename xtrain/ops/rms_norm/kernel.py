"""Root mean square norm in both cast orders, alone or behind a sum with a branch dropped out.

Tiling:   whole rows in registers, as in shared/rows.py: one tile per program forward, a
          fixed number of programs walking all tiles backward. Rows of x, residual and, of a norm
          alone, grad_y may lie at up to three distances (a projection's heads); those of all other
          tensors lie one behind the other.
Bytes:    each tensor of x's shape once; the weight, and the weight gradient's partials
          (programs * D * 4), stay in the L2. Where y has up to three users, their gradients are
          read one by one and summed here in fp32: their sum is never written. Seed and offset (16)
          are read by pointer; no mask is kept.
Random:   key and counter as in shared/random_words.py; element (row, col) has the flat
          index row * D + col, so that the mask is that of `dropout` whatever the tile.
Numerics: fp32 up to the rounding that the cast order asks for; the dropped-out branch is rounded to
          x's dtype before it is added, and h to its own before it is normalised, as op by op: the
          sum's launch on fp32 forbids fused multiply-adds, which would skip the first of these
          roundings. 1 / rms is computed again in the backward, so nothing is saved. The weight
          gradient is summed in fp32: by rows within a program, then over programs, in an order that
          shape and GPU decide (no atomics).

What a kernel is given None for is not there: a residual, the random numbers, a gradient.
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

from xtrain.ops.launch import launch
from xtrain.ops.shared.casts import rounded, widened
from xtrain.ops.shared.random_words import dropped_out
from xtrain.ops.shared.rows import (
    added,
    backward_block_sizes,
    chunk_words,
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

Random = tuple[int, float, Tensor, Tensor]  # threshold > 0, scale, seed, offset


@triton.jit
def weighted(x, rstd, weight, LLAMA: tl.constexpr, X_DTYPE: tl.constexpr, Y_DTYPE: tl.constexpr):
    """Return the norm's output for one chunk, rounded to Y_DTYPE where the formula rounds."""
    normalised = widened(x) * rstd[:, None]
    if LLAMA:
        return (rounded(normalised, X_DTYPE) * widened(weight)).to(Y_DTYPE)
    return (normalised * (1.0 + widened(weight))).to(Y_DTYPE)


@triton.jit
def add_pairs(a, b, c, d):
    """Add two sums at once, so that a row costs one exchange between warps, not two."""
    return a + c, b + d


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, seed_ptr, offset_ptr,
    n_middle, n_inner,
    x_outer_stride, x_middle_stride, x_inner_stride,
    residual_outer_stride, residual_middle_stride, residual_inner_stride,
    n_rows, eps, last_dropped, scale,
    N_COLS: tl.constexpr, LLAMA: tl.constexpr, Y_DTYPE: tl.constexpr, CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, VEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    ADDS: tl.constexpr = residual_ptr is not None
    DROPS: tl.constexpr = seed_ptr is not None
    H_DTYPE: tl.constexpr = (h_ptr if ADDS else x_ptr).dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    starts = row_starts(
        rows, N_COLS, n_middle, n_inner, x_outer_stride, x_middle_stride, x_inner_stride
    )
    x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
    if ADDS:
        starts = row_starts(
            rows, N_COLS, n_middle, n_inner, residual_outer_stride, residual_middle_stride,
            residual_inner_stride,
        )  # fmt: skip
        residual = load_tile(
            residual_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts
        )
    weight = load_weight(weight_ptr, BLOCK_ROWS, N_COLS, CHUNK, NUM_CHUNKS, VEC)
    if DROPS:
        seed = tl.load(seed_ptr).to(tl.uint64)
        offset = tl.load(offset_ptr).to(tl.uint64)
    squares = tl.zeros([BLOCK_ROWS, CHUNK], tl.float32)
    sums = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        h = widened(x[chunk])
        if DROPS:
            words = chunk_words(seed, offset, rows, chunk, CHUNK, VEC, N_COLS)
            h = rounded(dropped_out(h, words, last_dropped, scale), x_ptr.dtype.element_ty)
        if ADDS:
            h = rounded(widened(residual[chunk]) + h, H_DTYPE)
            store_chunk(h_ptr, h, rows, chunk, n_rows, N_COLS, VEC, EVEN)
        squares += h * h
        sums = sums + (h if ADDS else x[chunk],)
    rstd = tl.rsqrt(tl.sum(squares, 1) / N_COLS + eps)
    for chunk in tl.static_range(NUM_CHUNKS):
        y = weighted(sums[chunk], rstd, weight[chunk], LLAMA, H_DTYPE, Y_DTYPE)
        store_chunk(y_ptr, y, rows, chunk, n_rows, N_COLS, VEC, EVEN)


@triton.jit
def _rms_norm_bwd_kernel(
    grad_h_ptr, grad_y_ptr, grad_y1_ptr, grad_y2_ptr, h_ptr, weight_ptr, seed_ptr, offset_ptr,
    grad_x_ptr, grad_residual_ptr, partial_ptr,
    n_middle, n_inner,
    grad_y_outer_stride, grad_y_middle_stride, grad_y_inner_stride,
    h_outer_stride, h_middle_stride, h_inner_stride,
    n_rows, eps, last_dropped, scale,
    N_COLS: tl.constexpr, LLAMA: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Of a norm alone h is x, and grad_residual its gradient."""
    DROPS: tl.constexpr = seed_ptr is not None
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
        starts = row_starts(
            rows, N_COLS, n_middle, n_inner, h_outer_stride, h_middle_stride, h_inner_stride
        )
        h = load_tile(h_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
        starts = row_starts(
            rows, N_COLS, n_middle, n_inner, grad_y_outer_stride, grad_y_middle_stride,
            grad_y_inner_stride,
        )  # fmt: skip
        grad_y = load_tile(grad_y_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
        if grad_y1_ptr is not None:
            more = load_tile(grad_y1_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
            grad_y = added(grad_y, more)
        if grad_y2_ptr is not None:
            more = load_tile(grad_y2_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
            grad_y = added(grad_y, more)
        if grad_h_ptr is not None:
            grad_h = load_tile(grad_h_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        rstd, slope = norm_slopes(h, grad_y, weight, rows, n_rows, eps, N_COLS, LLAMA)
        sums = ()
        for chunk in tl.static_range(NUM_CHUNKS):
            grad, share = norm_gradients(
                h[chunk], grad_y[chunk], weight[chunk], rstd, slope, LLAMA, H_DTYPE
            )
            sums = sums + (grad_weight[chunk] + share,)
            if grad_h_ptr is not None:
                grad += widened(grad_h[chunk])
            store_chunk(grad_residual_ptr, grad, rows, chunk, n_rows, N_COLS, VEC, EVEN)
            if DROPS:
                words = chunk_words(seed, offset, rows, chunk, CHUNK, VEC, N_COLS)
                grad = dropped_out(grad, words, last_dropped, scale)
            if grad_x_ptr is not None:
                store_chunk(grad_x_ptr, grad, rows, chunk, n_rows, N_COLS, VEC, EVEN)
        grad_weight = sums
    store_partials(partial_ptr, grad_weight, N_COLS)


@triton.jit
def norm_slopes(x, grad_y, weight, rows, n_rows, eps, N_COLS: tl.constexpr, LLAMA: tl.constexpr):
    """Return (rstd, slope) of each row: grad_x = rstd * grad_y * s - slope * x.

    rstd * (g - x * rstd * mean(g * x * rstd)) with the factors of x drawn together. A row past the
    last has rstd 0: with eps = 0 it would be infinite, and the row's share of the sums NaN.
    """
    squares = tl.zeros(x[0].shape, tl.float32)
    products = tl.zeros(x[0].shape, tl.float32)
    for chunk in tl.static_range(len(x)):
        value = widened(x[chunk])
        squares += value * value
        products += value * scaled_gradient(grad_y[chunk], weight[chunk], LLAMA)
    square, product = tl.reduce((squares, products), 1, add_pairs)
    rstd = tl.where(rows < n_rows, tl.rsqrt(square / N_COLS + eps), 0.0)
    return rstd, rstd * rstd * rstd * (product / N_COLS)


@triton.jit
def scaled_gradient(grad_y, weight, LLAMA: tl.constexpr):
    """Return grad_y times what the forward multiplied by."""
    if LLAMA:
        return widened(grad_y) * widened(weight)
    return widened(grad_y) * (1.0 + widened(weight))


@triton.jit
def norm_gradients(x, grad_y, weight, rstd, slope, LLAMA: tl.constexpr, X_DTYPE: tl.constexpr):
    """Return one chunk's gradient of x, in fp32, and what its rows add to the weight's."""
    value = widened(x)
    normalised = value * rstd[:, None]
    grad = rstd[:, None] * scaled_gradient(grad_y, weight, LLAMA) - slope[:, None] * value
    if LLAMA:
        normalised = rounded(normalised, X_DTYPE)
    return grad, widened(grad_y) * normalised


def norm_backward_block_sizes(
    n_cols: int, dtypes: Iterable[torch.dtype], loaded: Iterable[torch.dtype], *, alone: bool
) -> dict[str, Any]:
    """Return the sizes of the backward kernel: those of rows in general, see there.

    But bf16 rows of 4096 take 32 warps of 64 registers, measured best where three tensors are all
    there is to move: `alone`, and no strides to be held as well.
    """
    sizes = backward_block_sizes(n_cols, dtypes, loaded)
    if alone and n_cols == 4096 and sizes["VEC"] == 8:
        sizes |= dict(num_warps=16, per_sm=2, NUM_STAGES=3, maxnreg=64)
    return sizes


def norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    random: Random | None,
    eps: float,
    llama: bool,
    norm_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    """Launch on x and residual as layout.in_rows gives them, and contiguous weight.

    Return (h, y), contiguous; h is None without a residual. The norm rounds to norm_dtype, y then
    to y_dtype.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    given = (x,) if residual is None else (x, residual)
    h = None
    if residual is not None:
        h_dtype = torch.promote_types(x.dtype, residual.dtype)
        h = torch.empty(x.shape, dtype=h_dtype, device=x.device)
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device)
    tile = forward_block_sizes(n_cols, [t.dtype for t in (*given, h, y) if t is not None])
    launch(
        _rms_norm_fwd_kernel, (triton.cdiv(n_rows, tile["BLOCK_ROWS"]),),
        x, residual, weight, h, y, *_seed_and_offset(random),
        *(row_distances(*given) + [None] * 3)[:8], n_rows, eps, *_last_dropped_and_scale(random),
        N_COLS=n_cols, LLAMA=llama, Y_DTYPE=triton_dtype(norm_dtype),
        EVEN=is_even(n_rows, n_cols, tile),
        enable_fp_fusion=residual is None or x.dtype != torch.float32, **tile,
    )  # fmt: skip
    return h, y


def norm_bwd(
    grad_h: Tensor | None,
    grad_y: list[Tensor],
    h: Tensor,
    weight: Tensor,
    random: Random | None,
    eps: float,
    llama: bool,
    x_dtype: torch.dtype | None,
    residual_dtype: torch.dtype,
    *,
    alone: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Launch on one to three tensors in grad_y, whose sum it takes; all are contiguous.

    Return (grad_x, grad_residual, grad_weight); grad_x is None where x_dtype is.

    Args:     alone: h is the input of a norm, residual_dtype its dtype; it and the one grad_y are
              as layout.in_rows gives them.
    """
    n_cols = h.shape[-1]
    n_rows = h.numel() // n_cols
    distances = row_distances(grad_y[0], h)
    loaded = [t.dtype for t in (h, *grad_y, *([] if grad_h is None else [grad_h]))]
    dtypes = [*loaded, residual_dtype, x_dtype or residual_dtype]
    tile = norm_backward_block_sizes(n_cols, dtypes, loaded, alone=alone and distances[0] is None)
    programs = num_programs(n_rows, tile, h.device)
    grad_x = None if x_dtype is None else torch.empty(h.shape, dtype=x_dtype, device=h.device)
    grad_residual = torch.empty(h.shape, dtype=residual_dtype, device=h.device)
    partial = torch.empty(programs, n_cols, dtype=torch.float32, device=h.device)
    launch(
        _rms_norm_bwd_kernel, (programs,),
        grad_h, *(*grad_y, None, None)[:3], h, weight, *_seed_and_offset(random), grad_x,
        grad_residual, partial, *distances, n_rows, eps, *_last_dropped_and_scale(random),
        N_COLS=n_cols, LLAMA=llama, EVEN=is_even(n_rows, n_cols, tile), **tile,
    )  # fmt: skip
    return grad_x, grad_residual, sum_partials(partial, weight.dtype)


def _seed_and_offset(random: Random | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if random is None else random[2:]


def _last_dropped_and_scale(random: Random | None) -> tuple[int | None, float | None]:
    return (None, None) if random is None else ((random[0] << 8) - 1, random[1])
