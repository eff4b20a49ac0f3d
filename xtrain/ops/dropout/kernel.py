"""Seeded dropout, forward and backward.

Tiling:  the tensor is flat; a program owns BLOCK * NUM_BLOCKS consecutive elements, loads all its
         blocks, and walks them: the index times GAMMA is formed once, and each key costs additions.
Bytes:   n * itemsize read and as many written; seed and offset (16) are read by pointer.
Random:  key and counter as in shared/random_words.py; the keep decision of element i does
         not depend on BLOCK, NUM_BLOCKS or the grid.
Strided: rows at up to three distances take a kernel of their own, in tiles of whole rows as in
         shared/rows.py; the result is contiguous, and element (row, col) of it draws from
         row * D + col.
Cost:    25.8 instructions an element (sm_90, bf16, as nvdisasm shows them), where copying would
         take 0.3. 14.4 of them run at 64 lanes a clock and are the limit: 6.5 LOP3, 4 SHF, 2.3
         IADD3, ISETP, half an F2FP; the others multiply: 7 IMAD, IMAD.WIDE, IMAD.HI, FMUL, half an
         IMAD.U32. At 132 multiprocessors and 1.755 GHz the first make 131 us for [32768, 4096], of
         which the memory alone takes 126.
"""

# Triton's tuples grow chunk by chunk, which the types of Python's do not foresee.
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch
from xtrain.ops.shared.casts import widened
from xtrain.ops.shared.random_words import GAMMA, dropped_out, random_words
from xtrain.ops.shared.rows import (
    chunk_words,
    forward_block_sizes,
    is_even,
    load_tile,
    row_distances,
    row_starts,
    store_chunk,
)


@triton.jit
def _dropout_fwd_kernel(
    x_ptr, out_ptr, seed_ptr, offset_ptr,
    n_elements, last_dropped, scale,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * NUM_BLOCKS)
    xs = ()  # all loads before the first store, behind which the compiler would have to keep them
    for block in tl.static_range(NUM_BLOCKS):
        at = first + block * BLOCK + lane
        if EVEN:
            xs = xs + (tl.load(x_ptr + at),)
        else:
            xs = xs + (tl.load(x_ptr + at, mask=at < n_elements, other=0.0),)
    seed = tl.load(seed_ptr).to(tl.uint64)
    offset = tl.load(offset_ptr).to(tl.uint64)
    start = (offset + first.to(tl.uint64)) * GAMMA
    for block in tl.static_range(NUM_BLOCKS):
        words = random_words(seed, start, block * BLOCK + lane, VEC)
        out = dropped_out(widened(xs[block]), words, last_dropped, scale)
        out = out.to(out_ptr.dtype.element_ty)
        at = first + block * BLOCK + lane
        if EVEN:
            tl.store(out_ptr + at, out)
        else:
            tl.store(out_ptr + at, out, mask=at < n_elements)


@triton.jit
def _dropout_rows_fwd_kernel(
    x_ptr, out_ptr, seed_ptr, offset_ptr,
    n_middle, n_inner,
    x_outer_stride, x_middle_stride, x_inner_stride,
    n_rows, last_dropped, scale,
    N_COLS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, VEC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    starts = row_starts(
        rows, N_COLS, n_middle, n_inner, x_outer_stride, x_middle_stride, x_inner_stride
    )
    x = load_tile(x_ptr, rows, n_rows, N_COLS, CHUNK, NUM_CHUNKS, VEC, EVEN, starts)
    seed = tl.load(seed_ptr).to(tl.uint64)
    offset = tl.load(offset_ptr).to(tl.uint64)
    for chunk in tl.static_range(NUM_CHUNKS):
        words = chunk_words(seed, offset, rows, chunk, CHUNK, VEC, N_COLS)
        out = dropped_out(widened(x[chunk]), words, last_dropped, scale)
        store_chunk(out_ptr, out, rows, chunk, n_rows, N_COLS, VEC, EVEN)


def dropout_block_sizes(n_elements: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK, NUM_BLOCKS, num_warps) for a flat tensor.

    A thread moves 16 bytes per access, the widest there is, so BLOCK = threads * 16 / itemsize.
    Several blocks per program share its start, and the compiler loads early what it can hold: bf16
    [32768, 4096] took 156 us on an H200 with eight, the best of one to eight. Smaller tensors take
    fewer, to fill all multiprocessors, and to leave none idle in the last round.
    """
    num_warps = 4
    block = num_warps * 32 * max(16 // itemsize, 1)
    num_blocks = 8 if n_elements >= 1 << 26 else 4 if n_elements >= 1 << 20 else 1
    return block, num_blocks, num_warps


def dropout_fwd(x: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor) -> Tensor:
    """Keep where the 24 random bits are >= threshold > 0, times scale; the result is contiguous.

    Launch on contiguous x, or on x as layout.in_rows gives it with rows of up to MAX_COLS.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # empty_like would keep odd strides
    if not x.is_contiguous():
        return _of_rows(x, out, threshold, scale, seed, offset)
    n_elements = x.numel()
    block, num_blocks, num_warps = dropout_block_sizes(n_elements, x.element_size())
    launch(
        _dropout_fwd_kernel, (triton.cdiv(n_elements, block * num_blocks),),
        x, out, seed, offset, n_elements, (threshold << 8) - 1, scale,
        BLOCK=block, NUM_BLOCKS=num_blocks, VEC=max(16 // x.element_size(), 1),
        EVEN=n_elements % (block * num_blocks) == 0, num_warps=num_warps,
    )  # fmt: skip
    return out


def _of_rows(
    x: Tensor, out: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor
) -> Tensor:
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile = forward_block_sizes(n_cols, (x.dtype,))
    launch(
        _dropout_rows_fwd_kernel, (triton.cdiv(n_rows, tile["BLOCK_ROWS"]),),
        x, out, seed, offset, *row_distances(x), n_rows, (threshold << 8) - 1, scale,
        N_COLS=n_cols, EVEN=is_even(n_rows, n_cols, tile), **tile,
    )  # fmt: skip
    return out
