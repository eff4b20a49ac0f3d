"""Root mean square norm, forward and backward, in both cast orders; and what row kernels share.

Tiling:   a tile is BLOCK_ROWS whole rows, each row NUM_CHUNKS * CHUNK columns held in registers: a
          length that is no power of two (768 = 3 * 256) wastes no lanes. Forward: one tile per
          program. Backward: a fixed number of programs walks all tiles, so that each keeps its
          share of the weight gradient in registers from the first row to the last.
Bytes:    forward x read, y written; backward grad_y and x read, grad_x written; the weight, and the
          weight gradient's partials (programs * D * 4), stay in the L2.
Numerics: fp32 up to the rounding that the cast order asks for; 1 / rms is computed again in the
          backward, so nothing is saved. The weight gradient is summed in fp32: by rows within a
          program, then over programs, in an order that the shape alone decides (no atomics).
"""

# Triton's tuples grow chunk by chunk, which the types of Python's do not foresee.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.triton.casts import rounded, widened


@triton.jit
def tile_mask(rows, cols, n_rows, N_COLS: tl.constexpr, EVEN: tl.constexpr):
    """Return which elements of the tile exist; a constant where all of them always do."""
    if EVEN:
        mask = tl.full([rows.shape[0], cols.shape[0]], True, tl.int1)
    else:
        mask = (rows < n_rows)[:, None] & (cols < N_COLS)[None, :]
    return mask


@triton.jit
def chunk_cols(chunk: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr):
    """Return the chunk's column numbers.

    A thread takes VEC neighbours: as many as make 16 bytes of the widest tensor. Left to itself
    Triton would give narrow and wide tensors different layouts, and change between them through
    shared memory.
    """
    return tl.max_contiguous(chunk * CHUNK + tl.arange(0, CHUNK), VEC)


@triton.jit
def load_tile(
    ptr,
    rows,
    n_rows,
    N_COLS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return the chunks of a row-major matrix's rows as they lie in memory; 0 past the edges."""
    tile = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = chunk_cols(chunk, CHUNK, VEC)
        mask = tile_mask(rows, cols, n_rows, N_COLS, EVEN)
        at = tl.max_contiguous((rows * N_COLS)[:, None] + cols[None, :], [1, VEC])
        tile = tile + (tl.load(ptr + at, mask=mask, other=0.0),)
    return tile


@triton.jit
def store_chunk(
    ptr,
    value,
    rows,
    chunk: tl.constexpr,
    n_rows,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Round value to ptr's dtype and write it as chunk number `chunk` of the rows."""
    CHUNK: tl.constexpr = value.shape[1]
    cols = chunk_cols(chunk, CHUNK, VEC)
    mask = tile_mask(rows, cols, n_rows, N_COLS, EVEN)
    at = tl.max_contiguous((rows * N_COLS)[:, None] + cols[None, :], [1, VEC])
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_weight(
    ptr,
    ROWS: tl.constexpr,
    N_COLS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return the weight's chunks, each [ROWS, CHUNK], in its own dtype.

    With the tile's ROWS every thread loads what it needs where it needs it; with 1 the row goes
    through shared memory and costs each thread fewer registers.
    """
    weight = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = chunk_cols(chunk, CHUNK, VEC)[None, :] + tl.zeros([ROWS, 1], tl.int32)
        cols = tl.max_contiguous(cols, [1, VEC])
        if CHUNK * NUM_CHUNKS == N_COLS:
            weight = weight + (tl.load(ptr + cols),)
        else:
            weight = weight + (tl.load(ptr + cols, mask=cols < N_COLS, other=0.0),)
    return weight


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
    x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
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
    first, n_tiles = tl.program_id(0).to(tl.int64), tl.cdiv(n_rows, BLOCK_ROWS)
    for tile in tl.range(first, n_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        grad_y = load_tile(grad_y_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN)
        rstd, slope = norm_slopes(x, grad_y, weight, eps, N_COLS, LLAMA)
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
def norm_slopes(x, grad_y, weight, eps, N_COLS: tl.constexpr, LLAMA: tl.constexpr):
    """Return (rstd, slope) of each row: grad_x = rstd * grad_y * s - slope * x.

    rstd * (g - x * rstd * mean(g * x * rstd)) with the factors of x drawn together.
    """
    squares = tl.zeros(x[0].shape, tl.float32)
    products = tl.zeros(x[0].shape, tl.float32)
    for chunk in tl.static_range(len(x)):
        value = widened(x[chunk])
        squares += value * value
        products += value * scaled_gradient(grad_y[chunk], weight[chunk], LLAMA)
    square, product = tl.reduce((squares, products), 1, add_pairs)
    rstd = tl.rsqrt(square / N_COLS + eps)
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


@triton.jit
def store_partials(partial_ptr, sums, N_COLS: tl.constexpr):
    """Write this program's row of the partial weight gradients."""
    CHUNK: tl.constexpr = sums[0].shape[1]
    for chunk in tl.static_range(len(sums)):
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        at = tl.program_id(0).to(tl.int64) * N_COLS + cols
        tl.store(partial_ptr + at, tl.sum(sums[chunk], 0), mask=cols < N_COLS)


@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, n_partials, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, n_partials, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
        at = rows[:, None] * n_cols + cols[None, :]
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    out = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cols, out, mask=cols < n_cols)


def row_tile(n_cols: int) -> tuple[int, int]:
    """Return (CHUNK, NUM_CHUNKS) for rows of n_cols columns.

    The largest power of two that covers the row with at most an eighth of the lanes idle, and
    otherwise the one that idles least, in at most eight chunks.
    """
    best = (0, 0)
    least = 0
    for exponent in range(triton.next_power_of_2(n_cols).bit_length() - 1, -1, -1):
        chunk = 1 << exponent
        num_chunks = triton.cdiv(n_cols, chunk)
        if num_chunks > 8:
            break
        idle = chunk * num_chunks - n_cols
        if best == (0, 0) or idle < least:
            best, least = (chunk, num_chunks), idle
        if idle * 8 <= n_cols:
            break
    return best


def row_block_sizes(n_cols: int, *dtypes: torch.dtype) -> dict[str, Any]:
    """Return the tile and the number of warps for rows of n_cols columns in tensors of dtypes."""
    chunk, num_chunks = row_tile(n_cols)
    padded = chunk * num_chunks
    num_warps = min(max(padded // 512, 4), 16)
    block_rows = max(1, num_warps * 32 * 8 // triton.next_power_of_2(padded))
    vec = 16 // max(dtype.itemsize for dtype in dtypes)
    return dict(
        CHUNK=chunk, NUM_CHUNKS=num_chunks, VEC=vec, BLOCK_ROWS=block_rows, num_warps=num_warps
    )


def forward_block_sizes(n_cols: int, *dtypes: torch.dtype) -> dict[str, Any]:
    """Return tile and warps of the forward kernel."""
    return row_block_sizes(n_cols, *dtypes)


def backward_block_sizes(n_cols: int, *dtypes: torch.dtype) -> dict[str, Any]:
    """Return tile, warps, stages and programs per multiprocessor of the backward kernel."""
    return row_block_sizes(n_cols, *dtypes) | dict(NUM_STAGES=1, per_sm=2)


def is_even(n_rows: int, n_cols: int, tile: dict[str, Any]) -> bool:
    """Return whether no tile reaches past the last row or column."""
    whole_rows = n_rows % tile["BLOCK_ROWS"] == 0
    return whole_rows and n_cols == tile["CHUNK"] * tile["NUM_CHUNKS"]


def num_programs(device: torch.device, per_sm: int) -> int:
    """Return per_sm programs for each multiprocessor of device."""
    if device.type != "cuda":  # the interpreter
        return 3
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of fp32 rows in a fixed order, rounded once to dtype."""
    n_partials, n_cols = partial.shape
    out = torch.empty(n_cols, dtype=dtype, device=partial.device)
    _sum_partials_kernel[(triton.cdiv(n_cols, 32),)](
        partial, out, n_partials, n_cols, BLOCK_ROWS=64, BLOCK_COLS=32, num_warps=4
    )
    return out


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a float dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, llama: bool, norm_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Launch on contiguous x and weight; the norm rounds to norm_dtype, the result to dtype."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    tile = forward_block_sizes(n_cols, x.dtype, dtype)
    _rms_norm_fwd_kernel[(triton.cdiv(n_rows, tile["BLOCK_ROWS"]),)](
        x,
        weight,
        y,
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
    """Launch on contiguous tensors; return (grad_x, grad_weight)."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile = backward_block_sizes(n_cols, x.dtype, grad_y.dtype)
    programs = min(
        num_programs(x.device, tile.pop("per_sm")), triton.cdiv(n_rows, tile["BLOCK_ROWS"])
    )
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, n_cols, dtype=torch.float32, device=x.device)
    _rms_norm_bwd_kernel[(programs,)](
        grad_y,
        x,
        weight,
        grad_x,
        partial,
        n_rows,
        eps,
        N_COLS=n_cols,
        LLAMA=llama,
        EVEN=is_even(n_rows, n_cols, tile),
        **tile,
    )
    return grad_x, sum_partials(partial, weight.dtype)
