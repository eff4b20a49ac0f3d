"""Root mean square norm, forward and backward, in both cast orders.

Tiling:   whole rows in registers, as in shared/rows.py: one tile per program forward, a
          fixed number of programs walking all tiles backward.
          Rows of x and grad_y may lie at up to three distances (a projection's heads); those of
          the results lie one behind the other.
Bytes:    forward x read, y written; backward grad_y and x read, grad_x written; the weight, and the
          weight gradient's partials (programs * D * 4), stay in the L2.
Numerics: fp32 up to the rounding that the cast order asks for; 1 / rms is computed again in the
          backward, so nothing is saved. The weight gradient is summed in fp32: by rows within a
          program, then over programs, in an order that shape and GPU decide (no atomics).
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
from xtrain.ops.shared.casts import rounded, widened
from xtrain.ops.shared.rows import (
    backward_block_sizes,
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
    x_ptr,
    weight_ptr,
    y_ptr,
    n_middle,
    n_inner,
    x_outer_stride,
    x_middle_stride,
    x_inner_stride,
    n_rows,
    eps,
    N_COLS: tl.constexpr,
    LLAMA: tl.constexpr,
    Y_DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    starts = row_starts(
        rows, N_COLS, n_middle, n_inner, x_outer_stride, x_middle_stride, x_inner_stride
    )
    x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
    weight = load_weight(weight_ptr, BLOCK_ROWS, N_COLS, CHUNK, NUM_CHUNKS, VEC)
    squares = tl.zeros([BLOCK_ROWS, CHUNK], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        value = widened(x[chunk])
        squares += value * value
    rstd = tl.rsqrt(tl.sum(squares, 1) / N_COLS + eps)
    for chunk in tl.static_range(NUM_CHUNKS):
        y = weighted(x[chunk], rstd, weight[chunk], LLAMA, x_ptr.dtype.element_ty, Y_DTYPE)
        store_chunk(y_ptr, y, rows, chunk, n_rows, N_COLS, VEC, EVEN)


@triton.jit
def _rms_norm_bwd_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    grad_x_ptr,
    partial_ptr,
    n_middle,
    n_inner,
    grad_y_outer_stride,
    grad_y_middle_stride,
    grad_y_inner_stride,
    x_outer_stride,
    x_middle_stride,
    x_inner_stride,
    n_rows,
    eps,
    N_COLS: tl.constexpr,
    LLAMA: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    weight = load_weight(weight_ptr, 1, N_COLS, CHUNK, NUM_CHUNKS, VEC)
    grad_weight = ()
    for _chunk in tl.static_range(NUM_CHUNKS):
        grad_weight = grad_weight + (tl.zeros([BLOCK_ROWS, CHUNK], tl.float32),)
    n_tiles = tl.cdiv(n_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        starts = row_starts(
            rows, N_COLS, n_middle, n_inner, x_outer_stride, x_middle_stride, x_inner_stride
        )
        x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
        starts = row_starts(
            rows, N_COLS, n_middle, n_inner, grad_y_outer_stride, grad_y_middle_stride,
            grad_y_inner_stride,
        )  # fmt: skip
        grad_y = load_tile(grad_y_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
        rstd, slope = norm_slopes(x, grad_y, weight, rows, n_rows, eps, N_COLS, LLAMA)
        sums = ()
        for chunk in tl.static_range(NUM_CHUNKS):
            grad, share = norm_gradients(
                x[chunk], grad_y[chunk], weight[chunk], rstd, slope, LLAMA, X_DTYPE
            )
            store_chunk(grad_x_ptr, grad, rows, chunk, n_rows, N_COLS, VEC, EVEN)
            sums = sums + (grad_weight[chunk] + share,)
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


def rms_norm_block_sizes(
    n_cols: int, dtypes: Iterable[torch.dtype], strided: bool = False, *, backward: bool
) -> dict[str, Any]:
    """Return the sizes of the forward or backward kernel for x and y (or its gradient) of dtypes.

    As for rows in general; but bf16 rows of 4096 take 32 warps of 64 registers backward, measured
    best where three tensors are all there is to move, unless strides are to be held as well.
    """
    dtypes = tuple(dtypes)
    if not backward:
        return forward_block_sizes(n_cols, dtypes)
    sizes = backward_block_sizes(n_cols, dtypes, dtypes)
    if n_cols == 4096 and sizes["VEC"] == 8 and not strided:
        sizes |= dict(num_warps=16, per_sm=2, NUM_STAGES=3, maxnreg=64)
    return sizes


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, llama: bool, norm_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Launch on x as layout.in_rows gives it, and contiguous weight; the result is contiguous.

    The norm rounds to norm_dtype, the result to dtype.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    tile = rms_norm_block_sizes(n_cols, (x.dtype, dtype), backward=False)
    launch(
        _rms_norm_fwd_kernel,
        (triton.cdiv(n_rows, tile["BLOCK_ROWS"]),),
        x,
        weight,
        y,
        *row_distances(x),
        n_rows,
        eps,
        N_COLS=n_cols,
        LLAMA=llama,
        Y_DTYPE=triton_dtype(norm_dtype),
        EVEN=is_even(n_rows, n_cols, tile),
        **tile,
    )
    return y


def rms_norm_bwd(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, llama: bool
) -> tuple[Tensor, Tensor]:
    """Launch on grad_y and x as layout.in_rows gives them; return (grad_x, grad_weight)."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    distances = row_distances(grad_y, x)
    strided = distances[0] is not None
    tile = rms_norm_block_sizes(n_cols, (x.dtype, grad_y.dtype), strided, backward=True)
    programs = num_programs(n_rows, tile, x.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, n_cols, dtype=torch.float32, device=x.device)
    launch(
        _rms_norm_bwd_kernel,
        (programs,),
        grad_y,
        x,
        weight,
        grad_x,
        partial,
        *distances,
        n_rows,
        eps,
        N_COLS=n_cols,
        LLAMA=llama,
        EVEN=is_even(n_rows, n_cols, tile),
        **tile,
    )
    return grad_x, sum_partials(partial, weight.dtype)
