"""What kernels share that hold whole rows in registers: tiles, their sizes, sums over all rows.

A tile is BLOCK_ROWS whole rows, each row NUM_CHUNKS * CHUNK columns: a length that is no power of
two (768 = 3 * 256) wastes no lanes. Forward kernels take one tile per program. Backward kernels run
a fixed number of programs that walk all tiles, so that each keeps its share of a sum over all rows
in registers from its first row to its last; the shares are then added in an order that shape and
GPU decide, without atomics.
"""

# Triton's tuples grow chunk by chunk, which the types of Python's do not foresee.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch
from xtrain.ops.shared.casts import widened
from xtrain.ops.shared.layout import row_strides
from xtrain.ops.shared.random_words import GAMMA, random_words


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
def row_starts(
    rows, N_COLS: tl.constexpr, n_middle, n_inner, outer_stride, middle_stride, inner_stride
):
    """Return where rows start: one behind the other where n_inner is None, else at the distances of
    layout.row_strides, which promises that row numbers fit in 32 bits.
    """
    if n_inner is None:
        starts = rows * N_COLS
    else:
        row = rows.to(tl.int32)
        outer = row // n_inner
        inner = row - outer * n_inner
        row = outer
        outer = row // n_middle
        middle = row - outer * n_middle
        starts = outer.to(tl.int64) * outer_stride + middle.to(tl.int64) * middle_stride
        starts += inner.to(tl.int64) * inner_stride
    return starts


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
    starts=None,
):
    """Return the chunks of the rows as they lie in memory, one behind the other where no `starts`
    say where; 0 past the edges.
    """
    if starts is None:
        first = rows * N_COLS
    else:
        first = starts
    tile = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        cols = chunk_cols(chunk, CHUNK, VEC)
        mask = tile_mask(rows, cols, n_rows, N_COLS, EVEN)
        at = tl.max_contiguous(first[:, None] + cols[None, :], [1, VEC])
        tile = tile + (tl.load(ptr + at, mask=mask, other=0.0),)
    return tile


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
def added(a, b):
    """Return the sums of two tiles, in fp32."""
    tile = ()
    for chunk in tl.static_range(len(a)):
        tile = tile + (widened(a[chunk]) + widened(b[chunk]),)
    return tile


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

    Short rows are one chunk, of 16 at least: casts.py takes no tile of a single element. Longer
    ones take the largest power of two that leaves few lanes idle (one for six at work), and
    otherwise the one that idles least, in at most eight chunks.
    """
    whole = max(triton.next_power_of_2(n_cols), 16)
    best = (whole, 1)
    for chunk in (whole >> shift for shift in range(1, 4)):
        if chunk < 128 or (best[0] * best[1] - n_cols) * 6 <= n_cols:
            break
        num_chunks = triton.cdiv(n_cols, chunk)
        if chunk * num_chunks < best[0] * best[1]:
            best = (chunk, num_chunks)
    return best


def row_block_sizes(
    n_cols: int, itemsize: int, *, elements: int, num_warps: int | None = None
) -> dict[str, Any]:
    """Return the tile for rows of n_cols columns, of which a thread takes about `elements`.

    Args:     itemsize: of the widest tensor: a thread takes VEC neighbours, up to 16 bytes of it.
              num_warps: default: enough for 16 elements a thread, from 4 to 16.
    """
    chunk, num_chunks = row_tile(n_cols)
    padded = chunk * num_chunks
    num_warps = num_warps or min(max(previous_power_of_2(padded // 512), 4), 16)
    block_rows = previous_power_of_2(num_warps * 32 * elements // padded)
    # fewer warps where the lanes of a chunk would not last for all of them
    num_warps = min(num_warps, max(block_rows * chunk // (32 * min(chunk, 4)), 1))
    vec = min(16 // itemsize, chunk, max(block_rows * chunk // (num_warps * 32), 1))
    return dict(
        CHUNK=chunk,
        NUM_CHUNKS=num_chunks,
        VEC=vec,
        BLOCK_ROWS=block_rows,
        num_warps=num_warps,
    )


def forward_block_sizes(n_cols: int, dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return the tile of a forward kernel for rows in tensors of dtypes.

    At most three 16-byte accesses of a thread to each tensor, all in flight at once; few enough
    registers for 32 warps and more on a multiprocessor, which hide the rest of the latency.
    """
    itemsize = max(dtype.itemsize for dtype in dtypes)
    return row_block_sizes(n_cols, itemsize, elements=3 * 16 // itemsize)


def backward_block_sizes(
    n_cols: int, dtypes: Iterable[torch.dtype], loaded: Iterable[torch.dtype]
) -> dict[str, Any]:
    """Return tile, warps, stages and programs per multiprocessor of a backward kernel.

    Each program walks many tiles, and what keeps the memory busy is how much it has asked for ahead
    of time: the tiles of the next stages arrive in shared memory by themselves. Three of them for
    long rows, two for rows around 1024; none for short rows, of which a thread holds several. At
    most 72 KiB, which every GPU grants a program, and 226 KiB for all programs of a multiprocessor.
    Up to 20 elements and their sums fit in 128 registers of a thread, more take 168; as many
    programs as a multiprocessor then has room for, but one where three tiles of as many rows of
    4096 are on their way to it. On one H200, bf16,
    dropout_add_rms_norm: 70 us for rows of 768 with two stages ahead, 82 with one; 353 us for rows
    of 4096 with one program, 365 with two.

    Args:     dtypes: of all tensors; loaded: of those that are read.
    """
    itemsize = max(dtype.itemsize for dtype in dtypes)
    padded = math.prod(row_tile(n_cols))
    num_warps = None if padded <= 1024 else 8 if padded <= 4096 else 16
    elements = 3 * 16 // itemsize if padded <= 1024 else 1  # long rows: one to a tile
    sizes = row_block_sizes(n_cols, itemsize, elements=elements, num_warps=num_warps)
    lanes = 32 * sizes["num_warps"]
    registers = 128 if sizes["BLOCK_ROWS"] * padded <= 20 * lanes else 168
    tile_bytes = padded * sizes["BLOCK_ROWS"] * sum(dtype.itemsize for dtype in loaded)
    ahead = 3 if padded > 1024 else 2 if padded > 256 else 0
    per_sm = 65536 // (registers * lanes)
    of_all = (226 << 10) // (per_sm * tile_bytes)  # stages that all programs have room for
    stages = 1 + min(ahead, (72 << 10) // tile_bytes, max(of_all - 1, 0))
    if padded > 2048 and stages == 4 and tile_bytes > 16 << 10:
        per_sm = 1
    return sizes | dict(NUM_STAGES=stages, per_sm=per_sm, maxnreg=registers)


def previous_power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n, or 1."""
    return 1 << max(n.bit_length() - 1, 0)


def is_even(n_rows: int, n_cols: int, tile: dict[str, Any]) -> bool:
    """Return whether no tile reaches past the last row or column."""
    whole_rows = n_rows % tile["BLOCK_ROWS"] == 0
    return whole_rows and n_cols == tile["CHUNK"] * tile["NUM_CHUNKS"]


def row_distances(*tensors: Tensor) -> list[int | None]:
    """Return n_middle, n_inner and each tensor's three strides, as row_starts takes them.

    None where all are contiguous: such a launch compiles to code that knows no strides.
    """
    if all(x.is_contiguous() for x in tensors):
        return [None] * (2 + 3 * len(tensors))
    rows = row_strides(*tensors)
    assert rows is not None
    sizes, strides = rows
    return [*sizes, *(stride for of_tensor in strides for stride in of_tensor)]


def num_programs(n_rows: int, tile: dict[str, Any], device: torch.device) -> int:
    """Take per_sm out of tile, and return how many programs share the rows."""
    per_sm = tile.pop("per_sm")
    num_sms = 3  # under the interpreter
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(per_sm * num_sms, triton.cdiv(n_rows, tile["BLOCK_ROWS"]))


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of fp32 rows in a fixed order, rounded once to dtype."""
    n_partials, n_cols = partial.shape
    out = torch.empty(n_cols, dtype=dtype, device=partial.device)
    # narrow strips for many programs, and all rows at once: what a load costs is its latency
    block_cols, block_rows = 16, min(triton.next_power_of_2(n_partials), 1024)
    launch(
        _sum_partials_kernel,
        (triton.cdiv(n_cols, block_cols),),
        partial,
        out,
        n_partials,
        n_cols,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols,
        num_warps=8 if block_rows >= 128 else 4,
    )
    return out


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's name of a float dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]
