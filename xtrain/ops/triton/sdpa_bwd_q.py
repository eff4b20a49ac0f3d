"""Attention backward, first kernel: grad_q, and delta for the second.

    p = exp(s - lse)      dp = grad_out v^T      delta = rowsum(grad_out * out)
    ds = p * (dp - delta) * f'(q k^T)            f: see sdpa_tiles.Options.scalars
    grad_q = scale * ds k

Tiling:   a program owns BLOCK_M queries of one head and walks their keys, as forward does.
Bytes:    q, out, grad_out, lse, grad_q and delta once; k and v once per block of queries, from L2.
Numerics: products and sums in fp32; ds is rounded to the inputs' dtype before it meets k. No
          atomics, here or in the second kernel: two runs agree bit for bit. The price is that both
          form the scores, seven products of matrices in place of five.
Source:   Dao 2023 (FlashAttention-2): recomputation from lse, and delta.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.triton.launching import launch
from xtrain.ops.triton.sdpa_tiles import (
    FP32_BLOCKS,
    Blocks,
    Options,
    can_use_tma,
    dense_rows,
    document_ranges,
    keys_of_queries,
    load_tile,
    score,
    sees_keys,
    store_tile,
    tiled,
)


@triton.jit
def _add_grad_q(
    grad_q,
    q,
    grad_out,
    lse,
    delta,
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
    """Add what keys [low, high) contribute to grad_q / scale; lse in units of log 2."""
    for start in tl.range(low, high, BLOCK_N):
        k = load_tile(
            k_source, k_offset, k_t_stride, b, kv_head, start, S,
            BLOCK_N, HEAD_DIM, BLOCK_H, TMA, MASKED,
        )  # fmt: skip
        x = score(tl.dot(q, k.T, input_precision=PRECISION), inner, SOFTCAP, NEGATE, PRECISION)
        p = tl.exp2(x * factor - lse[:, None])
        if MASKED:
            visible = sees_keys(
                i, start, own_ids, ids_ptr, ids_t_stride, T, S, window,
                CAUSAL, WINDOW, DOCUMENTS, BLOCK_N,
            )  # fmt: skip
            p = tl.where(visible, p, 0.0)
        v = load_tile(
            v_source, v_offset, v_t_stride, b, kv_head, start, S,
            BLOCK_N, HEAD_DIM_V, BLOCK_HV, TMA, MASKED,
        )  # fmt: skip
        grad_p = tl.dot(grad_out, v.T, input_precision=PRECISION)
        grad_x = p * (grad_p - delta[:, None])
        if SOFTCAP:
            grad_x = grad_x * (1.0 - x * x)
        grad_q = tl.dot(grad_x.to(k.dtype), k, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit
def _sdpa_bwd_q_kernel(
    grad_out_source,
    q_source,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
    grad_q_ptr,
    delta_ptr,
    ids_ptr,
    ranges_ptr,
    grad_out_b_stride,
    grad_out_n_stride,
    grad_out_t_stride,
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
    grad_q_b_stride,
    grad_q_n_stride,
    grad_q_t_stride,
    ids_b_stride,
    ids_t_stride,
    n_heads,
    n_groups,
    T,
    S,
    scale,
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
    head64 = head.to(tl.int64)
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
        q_source, b64 * q_b_stride + head64 * q_n_stride, q_t_stride, b, head, first, T,
        BLOCK_M, HEAD_DIM, BLOCK_H, TMA, True,
    )  # fmt: skip
    grad_out = load_tile(
        grad_out_source, b64 * grad_out_b_stride + head64 * grad_out_n_stride, grad_out_t_stride,
        b, head, first, T, BLOCK_M, HEAD_DIM_V, BLOCK_HV, TMA, True,
    )  # fmt: skip
    out = load_tile(
        out_ptr, b64 * out_b_stride + head64 * out_n_stride, out_t_stride, b, head, first, T,
        BLOCK_M, HEAD_DIM_V, BLOCK_HV, False, True,
    )  # fmt: skip
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    row = b_head.to(tl.int64) * T + i
    tl.store(delta_ptr + row, delta, mask=i < T)
    lse = tl.load(lse_ptr + row, mask=i < T, other=float("inf")) * 1.4426950408889634
    k_offset = b64 * k_b_stride + kv_head.to(tl.int64) * k_n_stride
    v_offset = b64 * v_b_stride + kv_head.to(tl.int64) * v_n_stride
    grad_q = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    if WINDOW or DOCUMENTS:
        grad_q = _add_grad_q(
            grad_q, q, grad_out, lse, delta, k_source, v_source, k_offset, v_offset, k_t_stride,
            v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, low, full_low,
            T, S, window, inner, factor, True, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
        )  # fmt: skip
    grad_q = _add_grad_q(
        grad_q, q, grad_out, lse, delta, k_source, v_source, k_offset, v_offset, k_t_stride,
        v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, full_low, full_high,
        T, S, window, inner, factor, False, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
        HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    if CAUSAL or DOCUMENTS or not EVEN:
        grad_q = _add_grad_q(
            grad_q, q, grad_out, lse, delta, k_source, v_source, k_offset, v_offset, k_t_stride,
            v_t_stride, b, kv_head, ids_ptr, ids_t_stride, own_ids, i, full_high, high,
            T, S, window, inner, factor, True, CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE,
            HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV, BLOCK_N, PRECISION, TMA,
        )  # fmt: skip
    store_tile(
        grad_q_ptr, b64 * grad_q_b_stride + head64 * grad_q_n_stride, grad_q_t_stride, first, T,
        grad_q * scale, BLOCK_M, HEAD_DIM, BLOCK_H,
    )  # fmt: skip


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


def sdpa_bwd_q(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: Options,
    grad_q: Tensor,
    *,
    blocks: Blocks,
    tma: bool | None = None,
) -> Tensor:
    """Write grad_q (dense rows, any other strides) and return delta; no size may be 0."""
    grad_out, q, k, v, out = map(dense_rows, (grad_out, q, k, v, out))
    (B, N, T, _), (M, S) = q.shape, k.shape[1:3]
    tma = can_use_tma(grad_out, q, k, v) if tma is None else tma
    delta = torch.empty_like(lse)
    launch(
        _sdpa_bwd_q_kernel,
        (triton.cdiv(T, blocks.own) * B * N,),
        tiled(grad_out, blocks.own, tma),
        tiled(q, blocks.own, tma),
        tiled(k, blocks.step, tma),
        tiled(v, blocks.step, tma),
        out,
        lse,
        grad_q,
        delta,
        documents,
        None if documents is None else document_ranges(documents, blocks.own),
        *(s for x in (grad_out, q, k, v, out, grad_q) for s in x.stride()[:3]),
        *((0, 0) if documents is None else documents.stride()),
        N,
        N // M,
        T,
        S,
        options.scale,
        *options.scalars(),
        **options.constants(q, v, tma),
        DOCUMENTS=documents is not None,
        EVEN=S % blocks.step == 0,
        BLOCK_M=blocks.own,
        BLOCK_N=blocks.step,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return delta
