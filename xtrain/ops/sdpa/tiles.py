"""What the forward and backward kernels of sdpa share: tiles, visibility, score function.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xtrain.ops.launch import launch
from xtrain.ops.sdpa.decomposition import Options

LOG2_E = 1.4426950408889634
# Offsets inside a tile are 32-bit: at most 256 rows of this stride stay below 2^31.
LONGEST_ROW_STRIDE = 1 << 22


@dataclass(frozen=True)
class Blocks:
    """How one kernel is cut: rows it owns, rows per loop step, and what it is launched with."""

    own: int
    step: int
    num_warps: int
    num_stages: int


# Each product is three of TF32, whose parts fill the registers: 32 rows, the loop not unrolled into
# stages. From 64 rows on sm_90 would take wgmma, and with 8 warps on 64 rows of fp32 Triton 3.6
# gives wrong values there.
FP32_BLOCKS = Blocks(32, 32, 4, 1)


def sdpa_fwd_block_sizes(width: int, itemsize: int, arch: int) -> Blocks:
    """Return the tiles of the forward kernel for a head block of `width` elements.

    Args:  width: the wider of the two head blocks; arch: 90 for sm_90.

    Softmax leaves the tensor cores idle unless another program fills them: up to head dim 64 tiles
    are small enough for three programs on an SM (H200, B8 H16 S2048 D64: 334 TFLOP/s, with 128 rows
    298). Wider heads take 128 rows and eight warps, so that k and v are read half as often.
    """
    if itemsize == 4:
        return FP32_BLOCKS
    if width <= 64:
        return Blocks(64, 64, 4, 3)
    if arch in (90, 100):
        return Blocks(128, 64, 8, 3) if width <= 128 else Blocks(128, 64, 8, 2)
    # Tensor cores that read registers (sm_8x, sm_12x), and 99 KiB of shared memory on the least.
    return Blocks(64, 64, 4, 2) if width <= 128 else Blocks(64, 32, 4, 2)


def sdpa_bwd_q_block_sizes(width: int, itemsize: int, arch: int) -> Blocks:
    """Return the tiles of the kernel of grad_q; arguments as for forward.

    As in forward: small tiles for several programs on an SM up to head dim 64 (446 TFLOP/s, with
    128 rows 421), then 128 rows. Beyond 128, q, grad_out and their tiles of k and v fill the shared
    memory at 64 rows. The other architectures take what spills least.
    """
    if itemsize == 4:
        return FP32_BLOCKS
    if arch == 90:
        if width <= 64:
            return Blocks(64, 64, 4, 3)
        return Blocks(128, 64, 8, 3) if width <= 128 else Blocks(64, 64, 4, 2)
    if arch == 100:
        return Blocks(64, 64, 4, 2) if width <= 128 else Blocks(64, 32, 4, 2)
    if width <= 64:
        return Blocks(64, 64, 4, 2)
    return Blocks(64, 32, 4, 2) if width <= 128 else Blocks(64, 32, 4, 1)


def sdpa_bwd_kv_block_sizes(width: int, itemsize: int, arch: int) -> Blocks:
    """Return the tiles of the kernel of grad_k and grad_v; arguments as for forward.

    Two results of [BLOCK_N, head block] stay in registers. Up to head dim 64 narrow tiles of scores
    leave room for them in four warps (348 TFLOP/s, with 64 queries and eight warps 280); wider
    heads take eight warps. The other architectures take what spills least.
    """
    if itemsize == 4:
        return FP32_BLOCKS if width <= 64 else Blocks(32, 16, 4, 1)
    if arch == 90:
        if width <= 64:
            return Blocks(128, 32, 4, 3)
        return Blocks(128, 64, 8, 3) if width <= 128 else Blocks(64, 64, 8, 2)
    if arch == 100:
        if width <= 64:
            return Blocks(64, 64, 4, 2)
        return Blocks(64, 32, 8, 2) if width <= 128 else Blocks(64, 32, 8, 1)
    if width <= 64:
        return Blocks(64, 32, 4, 2)
    return Blocks(64, 32, 8, 2) if width <= 128 else Blocks(32, 32, 4, 1)


def constants(
    options: Options, q: Tensor, v: Tensor, tma: bool, blocks: Blocks, walked: int
) -> dict[str, Any]:
    """Return what all three kernels are compiled for; walked: the length that is cut into steps."""
    return {
        "CAUSAL": options.causal,
        "WINDOW": options.window is not None,
        "SOFTCAP": options.softcap is not None,
        "NEGATE": options.softcap is None and options.scale < 0,
        "HEAD_DIM": q.shape[-1],
        "HEAD_DIM_V": v.shape[-1],
        "BLOCK_H": head_block(q.shape[-1]),
        "BLOCK_HV": head_block(v.shape[-1]),
        # TF32 alone would keep 10 of 23 bits; three products of the parts keep about 21.
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "TMA": tma,
        "DOCUMENTS": options.documents is not None,
        "EVEN": walked % blocks.step == 0,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def scalars(options: Options) -> tuple[int, float, float]:
    """Return (window, inner, factor): scores in units of log 2 are factor * f(q k^T).

    f(x) = x or -x without a cap, tanh(inner * x) with one: so factor is positive, the largest
    score is factor times the largest f, and scaling costs no operation of its own.
    """
    window = 0 if options.window is None else options.window
    if options.softcap is None:
        return window, 0.0, abs(options.scale) * LOG2_E
    return window, options.scale / options.softcap, options.softcap * LOG2_E


def of_documents(options: Options, block: int) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """Return what kernels take for a document mask: (numbers, their ranges) and the strides."""
    if options.documents is None:
        return (None, None), (0, 0)
    documents = options.documents
    return (documents, document_ranges(documents, block)), documents.stride()


def block_arguments(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return (wider head block, bytes per element, family): what block sizes depend on.

    The family of sm_86 is 80: tensor cores are those of the family, and the tiles for it fit the
    smallest shared memory of its members.
    """
    family = 10 * torch.cuda.get_device_capability()[0]
    return max(head_block(q.shape[-1]), head_block(v.shape[-1])), q.element_size(), family


def head_block(head_dim: int) -> int:
    """Return the tile width for a head dim: a power of two, at least 16 for the tensor cores."""
    return max(16, triton.next_power_of_2(head_dim))


def dense_rows(x: Tensor) -> Tensor:
    """Return x with rows of adjacent elements, at strides that 32-bit tile offsets can hold."""
    return x if x.stride(-1) == 1 and abs(x.stride(-2)) <= LONGEST_ROW_STRIDE else x.contiguous()


def wants_tma(dtype: torch.dtype, arch: int) -> bool:
    """Return whether tiles are better fetched by the GPU's copy engine than by threads.

    It exists since sm_90 and spares the address registers: 138 in place of 178 in the forward
    kernel at head dim 128. fp32 tiles pass through registers anyway, to be split for tf32x3; so do
    all on sm_120, whose tensor cores read registers.
    """
    return 90 <= arch < 120 and dtype.itemsize == 2


def can_use_tma(*tensors: Tensor) -> bool:
    """Return whether to fetch tiles of these [B, heads, length, H] tensors by the copy engine.

    It takes bases and strides at multiples of 16 bytes.
    """
    x = tensors[0]
    if not x.is_cuda or not wants_tma(x.dtype, 10 * torch.cuda.get_device_capability()[0]):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        for x in tensors
    )


def tiled(x: Tensor, rows: int, tma: bool) -> Any:
    """Return what a kernel takes for x: a descriptor of [rows, head block] tiles, or x itself."""
    if not tma:
        return x
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), [1, 1, rows, head_block(x.shape[-1])]
    )


@triton.jit
def load_tile(
    source, offset, stride, b, head, start, n_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + ROWS) of one head, as [ROWS, BLOCK]; zeros outside.

    offset: of (b, head) from source, 64-bit. EDGE: rows at and past n_rows may be asked for.
    """
    if TMA:
        tile = source.load([b, head, start, 0]).reshape(ROWS, BLOCK)
    else:
        rows = tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BLOCK)[None, :]
        first = source + offset + tl.cast(start, tl.int64) * stride
        pointers = first + (rows * stride + cols)
        if EDGE and WIDTH < BLOCK:
            tile = tl.load(pointers, mask=(rows < n_rows - start) & (cols < WIDTH), other=0.0)
        elif EDGE:
            tile = tl.load(pointers, mask=rows < n_rows - start, other=0.0)
        elif WIDTH < BLOCK:
            tile = tl.load(pointers, mask=cols < WIDTH, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    pointer,
    offset,
    stride,
    start,
    n_rows,
    tile,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the part of `tile` that lies inside [n_rows, WIDTH]."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    pointers = pointer + offset + tl.cast(start, tl.int64) * stride + (rows * stride + cols)
    inside = (rows < n_rows - start) & (cols < WIDTH)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh by exp2: 1e-7 from the truth; PRECISE: that relative to tanh near 0 too."""
    y = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    if PRECISE:
        # 1 - 2 / (e + 1) cancels there. (tanh(x) / x - 1) / x^2, a least-squares fit in x^2 on
        # |x| < 0.6: 1.3 ulp.
        z = x * x
        p = -0.005893945303373657 * z + 0.0207946177102048
        p = (p * z - 0.05378329300035288) * z + 0.133319152988153
        p = p * z - 0.3333329751012865
        y = tl.where(z < 0.36, x + x * z * p, y)
    return y


@triton.jit
def score(products, inner, SOFTCAP: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr):
    """f of `scalars`."""
    if SOFTCAP:
        products = tanh(products * inner, PRECISION != "tf32")
    elif NEGATE:
        products = -products
    return products


@triton.jit
def sees(
    i, j, ids_i, ids_j, T, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Whether query i sees key j; i, j and the documents' ids broadcast against each other."""
    visible = j < S
    if CAUSAL:
        visible = visible & (j <= i + (S - T))
    if WINDOW:
        visible = visible & (j > i + (S - T) - window)
    if DOCUMENTS:
        visible = visible & (ids_i == ids_j)
    return visible


@triton.jit
def sees_keys(
    i, start, own_ids,
    ids_ptr,
    ids_t_stride,
    T, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whether queries i, of documents own_ids, see keys from start on: [queries, BLOCK_N]."""
    j = start + tl.arange(0, BLOCK_N)
    key_ids = 0
    if DOCUMENTS:
        key_ids = tl.load(ids_ptr + j.to(tl.int64) * ids_t_stride, mask=j < S, other=0)[None, :]
    return sees(
        i[:, None], j[None, :], own_ids[:, None], key_ids, T, S, window,
        CAUSAL, WINDOW, DOCUMENTS,
    )  # fmt: skip


@triton.jit
def steps(low, full_low, full_high, high, STEP: tl.constexpr):
    """Round to steps: [low, full_low) and [full_high, high) need a mask, what is between does not.

    All results but the last are multiples of STEP, in ascending order.
    """
    low = tl.maximum(low, 0) // STEP * STEP
    high = tl.maximum(high, low)
    full_low = tl.minimum(tl.cdiv(tl.maximum(full_low, low), STEP), tl.cdiv(high, STEP)) * STEP
    full_high = tl.maximum(tl.maximum(tl.minimum(full_high, high), 0) // STEP * STEP, full_low)
    return low, full_low, full_high, high


@triton.jit
def _document_ranges_kernel(
    ids_ptr, ids_b_stride, ids_t_stride, ranges_ptr, T, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    n_blocks = tl.cdiv(T, BLOCK)
    b = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    ids_ptr += b.to(tl.int64) * ids_b_stride
    own = block * BLOCK + tl.arange(0, BLOCK)
    # Past the end: a repetition of the last id.
    own_ids = tl.load(ids_ptr + tl.minimum(own, T - 1).to(tl.int64) * ids_t_stride)
    smallest = tl.min(own_ids, 0)
    largest = tl.max(own_ids, 0)
    first = T
    last = 0
    count = 0
    for start in range(0, T, CHUNK):
        j = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + j.to(tl.int64) * ids_t_stride, mask=j < T, other=0)
        match = (j < T) & (ids >= smallest) & (ids <= largest)
        first = tl.minimum(first, tl.min(tl.where(match, j, T), 0))
        last = tl.maximum(last, tl.max(tl.where(match, j + 1, 0), 0))
        count += tl.sum(match.to(tl.int32), 0)
    # One document without gaps: between first and last every pair may see each other.
    dense = (smallest == largest) & (count == last - first)
    ranges_ptr += tl.program_id(0).to(tl.int64) * 3
    tl.store(ranges_ptr, first)
    tl.store(ranges_ptr + 1, last)
    tl.store(ranges_ptr + 2, dense.to(tl.int32))


def document_ranges(documents: Tensor, block: int) -> Tensor:
    """Return int32 [B, blocks, 3]: for rows of each block, (first, last + 1, dense).

    Outside [first, last] no id equals one of the block's rows; dense: inside, all are equal.
    """
    B, T = documents.shape
    n_blocks = triton.cdiv(T, block)
    ranges = torch.empty(B, n_blocks, 3, dtype=torch.int32, device=documents.device)
    launch(
        _document_ranges_kernel,
        (B * n_blocks,),
        documents,
        *documents.stride(),
        ranges,
        T,
        BLOCK=block,
        CHUNK=1024,
    )
    return ranges


@triton.jit
def narrow(ranges_ptr, low, full_low, full_high, high):
    """Narrow a range of rows to what the documents of one block allow."""
    first = tl.load(ranges_ptr)
    last = tl.load(ranges_ptr + 1)
    dense = tl.load(ranges_ptr + 2)
    full_low = tl.maximum(full_low, first)
    full_high = tl.where(dense != 0, tl.minimum(full_high, last), 0)
    return tl.maximum(low, first), full_low, full_high, tl.minimum(high, last)


@triton.jit
def keys_of_queries(
    first, i,
    ids_ptr,
    ids_t_stride,
    ranges_ptr,
    T, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(documents of queries i, and the keys that they may see, as `steps` rounds them).

    i: [first, first + BLOCK_M); ids_ptr of their batch row, ranges_ptr of their block.
    """
    low = 0
    high = S
    full_low = 0
    full_high = S
    if CAUSAL:
        high = tl.minimum(S, first + BLOCK_M + S - T)
        full_high = tl.minimum(S, first + 1 + S - T)
    if WINDOW:
        low = first + 1 + S - T - window
        full_low = first + BLOCK_M + S - T - window
    own_ids = i
    if DOCUMENTS:
        own_ids = tl.load(ids_ptr + i.to(tl.int64) * ids_t_stride, mask=i < T, other=0)
        low, full_low, full_high, high = narrow(ranges_ptr, low, full_low, full_high, high)
    low, full_low, full_high, high = steps(low, full_low, full_high, high, BLOCK_N)
    return own_ids, low, full_low, full_high, high
