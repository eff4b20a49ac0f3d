"""Attention forward: out = softmax(scores) v by blocks of keys, and lse, its natural logarithm.

Tiling:   a program owns BLOCK_M queries of one head and walks the keys that they may see, BLOCK_N
          at a time; blocks outside causal, window and document ranges are never touched, and only
          those on a boundary are masked. The longest rows start first, so that the last programs
          to run are short.
Bytes:    q, out and lse once; k and v once per block of queries, from L2.
Numerics: products and sums in fp32; the running maximum and exp2 work on scores in units of log 2.
          Probabilities are rounded to v's dtype before they meet v. A row that sees nothing gives
          zeros, and lse = +inf, for which backward finds every probability to be 0.
Source:   online softmax: Milakov, Gimelshein 2018; tiling: Dao et al. 2022.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch.launching import launch
from xtrain.ops.sdpa.decomposition import Options
from xtrain.ops.sdpa.tiles import (
    FP32_BLOCKS,
    Blocks,
    block_arguments,
    can_use_tma,
    constants,
    dense_rows,
    keys_of_queries,
    load_tile,
    of_documents,
    scalars,
    score,
    sees_keys,
    store_tile,
    tiled,
)


@triton.jit
def _attend(
    total,
    row_sum,
    row_max,
    q,
    k_source,
    v_source,
    k_offset,
    v_offset,
    k_t_stride,
    v_t_stride,
    b,
    kv_head,
    ids_ptr,
    ids_t_stride,
    own_ids,
    i,
    low,
    high,
    T,
    S,
    window,
    inner,
    factor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add keys [low, high) to the running (total, row_sum, row_max) of a block of queries."""
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(
            k_source, k_offset, k_t_stride, b, kv_head, start, S,
            BLOCK_N, HEAD_DIM, BLOCK_H, TMA, MASKED,
        )  # fmt: skip
        x = score(tl.dot(q, k.T, input_precision=PRECISION), inner, SOFTCAP, NEGATE, PRECISION)
        if MASKED:
            visible = sees_keys(
                i, start, own_ids, ids_ptr, ids_t_stride, T, S, window,
                CAUSAL, WINDOW, DOCUMENTS, BLOCK_N,
            )  # fmt: skip
            x = tl.where(visible, x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1) * factor)
        shift = new_max
        if MASKED:
            # Before its first visible key a row's maximum is -inf, and -inf - -inf is no number.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(x * factor - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(p, 1)
        total = total * correction[:, None]
        v = load_tile(
            v_source, v_offset, v_t_stride, b, kv_head, start, S,
            BLOCK_N, HEAD_DIM_V, BLOCK_HV, TMA, MASKED,
        )  # fmt: skip
        total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
        row_max = new_max
    return total, row_sum, row_max


@triton.jit
def _sdpa_fwd_kernel(
    q_source,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
    ids_ptr,
    ranges_ptr,
    q_b_stride,
    q_n_stride,
    q_t_stride,
    k_b_stride,
    k_n_stride,
    k_t_stride,
    v_b_stride,
    v_n_stride,
    v_t_stride,
    out_b_stride,
    out_n_stride,
    out_t_stride,
    ids_b_stride,
    ids_t_stride,
    n_heads,
    n_groups,
    T,
    S,
    window,
    inner,
    factor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_blocks = tl.cdiv(T, BLOCK_M)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    b_head = tl.program_id(0) // n_blocks
    b = b_head // n_heads
    head = b_head % n_heads
    kv_head = head // n_groups
    b64 = b.to(tl.int64)
    first = block * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)

    if DOCUMENTS:
        ids_ptr += b64 * ids_b_stride
        ranges_ptr += (b64 * n_blocks + block) * 3
    own_ids, low, full_low, full_high, high = keys_of_queries(
        first, i, ids_ptr, ids_t_stride, ranges_ptr, T, S, window,
        CAUSAL, WINDOW, DOCUMENTS, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    q = load_tile(
        q_source, b64 * q_b_stride + head.to(tl.int64) * q_n_stride, q_t_stride, b, head, first, T,
        BLOCK_M, HEAD_DIM, BLOCK_H, TMA, True,
    )  # fmt: skip
    k_offset = b64 * k_b_stride + kv_head.to(tl.int64) * k_n_stride
    v_offset = b64 * v_b_stride + kv_head.to(tl.int64) * v_n_stride
    total = tl.zeros([BLOCK_M, BLOCK_HV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOW or DOCUMENTS:
        total, row_sum, row_max = _attend(
            total, row_sum, row_max, q, k_source, v_source, k_offset, v_offset, k_t_stride,
            v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, low, full_low,
            T, S, window, inner, factor, True, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
        )  # fmt: skip
    total, row_sum, row_max = _attend(
        total, row_sum, row_max, q, k_source, v_source, k_offset, v_offset, k_t_stride,
        v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, full_low, full_high,
        T, S, window, inner, factor, False, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
        HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    if CAUSAL or DOCUMENTS or not EVEN:
        total, row_sum, row_max = _attend(
            total, row_sum, row_max, q, k_source, v_source, k_offset, v_offset, k_t_stride,
            v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, full_high, high,
            T, S, window, inner, factor, True, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
        )  # fmt: skip

    sees_any = i >= 0
    if CAUSAL:
        sees_any = i + (S - T) >= 0  # and with a document mask T = S: a row sees itself
    lse = tl.where(sees_any, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("inf"))
    tl.store(lse_ptr + b_head.to(tl.int64) * T + i, lse, mask=i < T)
    out = tl.where(sees_any[:, None], total / row_sum[:, None], 0.0)
    store_tile(
        out_ptr, b64 * out_b_stride + head.to(tl.int64) * out_n_stride, out_t_stride, first, T, out,
        BLOCK_M, HEAD_DIM_V, BLOCK_HV,
    )  # fmt: skip


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


def sdpa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor,
    lse: Tensor,
    *,
    blocks: Blocks | None = None,
    tma: bool | None = None,
) -> None:
    """Write out and lse.

    Shapes:  q (B, N, T, H); k (B, M, S, H); v (B, M, S, HV); documents (B, T), int, or None; out
             (B, N, T, HV), any strides, dense rows; lse (B, N, T), fp32, contiguous. No size is 0.
    """
    blocks = blocks or sdpa_fwd_block_sizes(*block_arguments(q, v))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (B, N, T, _), (M, S) = q.shape, k.shape[1:3]
    tma = can_use_tma(q, k, v) if tma is None else tma
    documents, document_strides = of_documents(options, blocks.own)
    launch(
        _sdpa_fwd_kernel,
        (triton.cdiv(T, blocks.own) * B * N,),
        tiled(q, blocks.own, tma),
        tiled(k, blocks.step, tma),
        tiled(v, blocks.step, tma),
        out,
        lse,
        *documents,
        *(s for x in (q, k, v, out) for s in x.stride()[:3]),
        *document_strides,
        N,
        N // M,
        T,
        S,
        *scalars(options),
        **constants(options, q, v, tma),
        EVEN=S % blocks.step == 0,
        BLOCK_M=blocks.own,
        BLOCK_N=blocks.step,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
