"""Attention backward, two kernels: grad_q, and delta for the second; then grad_k and grad_v.

    p = exp(s - lse)      dp = grad_out v^T      delta = rowsum(grad_out * out)
    ds = p * (dp - delta) * f'(q k^T)            f: see tiles.scalars
    grad_q = scale * ds k      grad_k = scale * ds^T q      grad_v = p^T grad_out

Tiling:   in the first a program owns BLOCK_M queries of one head and walks their keys, as forward
          does. In the second it owns BLOCK_N keys of one KV head and walks the queries that see
          them, BLOCK_M at a time, of all query heads of its group, one after the other: sums in a
          fixed order. There scores are formed transposed, [keys, queries]: p and ds enter their
          products as they are.
Bytes:    what a program owns, its gradients, lse and delta once; the other side once per block of
          queries, or of keys, from L2.
Numerics: products and sums in fp32; p and ds are rounded to the inputs' dtype before they meet
          grad_out, k and q. No atomics in either kernel: two runs agree bit for bit. The price is
          that both form the scores, seven products of matrices in place of five.
Source:   Dao 2023 (FlashAttention-2): recomputation from lse, and delta.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

import torch
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
    narrow,
    of_documents,
    scalars,
    score,
    sees,
    sees_keys,
    steps,
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
    options: Options,
    out: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    *,
    blocks: Blocks | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Write grad_q (dense rows, any other strides) and return delta; no size may be 0."""
    blocks = blocks or sdpa_bwd_q_block_sizes(*block_arguments(q, v))
    grad_out, q, k, v, out = map(dense_rows, (grad_out, q, k, v, out))
    (B, N, T, _), (M, S) = q.shape, k.shape[1:3]
    tma = can_use_tma(grad_out, q, k, v) if tma is None else tma
    delta = torch.empty_like(lse)
    documents, document_strides = of_documents(options, blocks.own)
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
        *documents,
        *(s for x in (grad_out, q, k, v, out, grad_q) for s in x.stride()[:3]),
        *document_strides,
        N,
        N // M,
        T,
        S,
        options.scale,
        *scalars(options),
        **constants(options, q, v, tma),
        EVEN=S % blocks.step == 0,
        BLOCK_M=blocks.own,
        BLOCK_N=blocks.step,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )
    return delta


@triton.jit
def _add_grad_kv(
    grad_k,
    grad_v,
    k,
    v,
    q_source,
    grad_out_source,
    q_offset,
    grad_out_offset,
    q_t_stride,
    grad_out_t_stride,
    b,
    head,
    lse_ptr,
    delta_ptr,
    ids_ptr,
    ids_t_stride,
    own_ids,
    j,
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
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add what queries [low, high) of one head contribute to grad_k / scale and grad_v."""
    for start in tl.range(low, high, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = load_tile(
            q_source, q_offset, q_t_stride, b, head, start, T,
            BLOCK_M, HEAD_DIM, BLOCK_H, TMA, MASKED,
        )  # fmt: skip
        # Past the end lse = inf: p is 0.
        lse = tl.load(lse_ptr + i, mask=i < T, other=float("inf")) * 1.4426950408889634
        x = score(tl.dot(k, q.T, input_precision=PRECISION), inner, SOFTCAP, NEGATE, PRECISION)
        p = tl.exp2(x * factor - lse[None, :])
        if MASKED:
            query_ids = 0
            if DOCUMENTS:
                query_ids = tl.load(ids_ptr + i.to(tl.int64) * ids_t_stride, mask=i < T, other=0)
                query_ids = query_ids[None, :]
            visible = sees(
                i[None, :], j[:, None], query_ids, own_ids[:, None], T, S, window,
                CAUSAL, WINDOW, DOCUMENTS,
            )  # fmt: skip
            p = tl.where(visible, p, 0.0)
        grad_out = load_tile(
            grad_out_source, grad_out_offset, grad_out_t_stride, b, head, start, T,
            BLOCK_M, HEAD_DIM_V, BLOCK_HV, TMA, MASKED,
        )  # fmt: skip
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
        delta = tl.load(delta_ptr + i, mask=i < T, other=0.0)
        grad_p = tl.dot(v, grad_out.T, input_precision=PRECISION)
        grad_x = p * (grad_p - delta[None, :])
        if SOFTCAP:
            grad_x = grad_x * (1.0 - x * x)
        grad_k = tl.dot(grad_x.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _sdpa_bwd_kv_kernel(
    grad_out_source,
    q_source,
    k_source,
    v_source,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
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
    grad_k_b_stride,
    grad_k_n_stride,
    grad_k_t_stride,
    grad_v_b_stride,
    grad_v_n_stride,
    grad_v_t_stride,
    ids_b_stride,
    ids_t_stride,
    n_kv_heads,
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
    n_blocks = tl.cdiv(S, BLOCK_N)
    block = tl.program_id(0) % n_blocks  # the first keys are seen by most queries
    b_head = tl.program_id(0) // n_blocks
    b = b_head // n_kv_heads
    kv_head = b_head % n_kv_heads
    b64 = b.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)

    low = 0
    high = T
    full_low = 0
    full_high = T
    if CAUSAL:
        low = first - (S - T)
        full_low = first + BLOCK_N - 1 - (S - T)
    if WINDOW:
        high = tl.minimum(T, first + BLOCK_N - 1 - (S - T) + window)
        full_high = tl.minimum(T, first - (S - T) + window)
    own_ids = j
    if DOCUMENTS:
        ids_ptr += b64 * ids_b_stride
        own_ids = tl.load(ids_ptr + j.to(tl.int64) * ids_t_stride, mask=j < S, other=0)
        ranges = ranges_ptr + (b64 * n_blocks + block) * 3
        low, full_low, full_high, high = narrow(ranges, low, full_low, full_high, high)
    low, full_low, full_high, high = steps(low, full_low, full_high, high, BLOCK_M)

    k = load_tile(
        k_source, b64 * k_b_stride + kv_head64 * k_n_stride, k_t_stride, b, kv_head, first, S,
        BLOCK_N, HEAD_DIM, BLOCK_H, TMA, True,
    )  # fmt: skip
    v = load_tile(
        v_source, b64 * v_b_stride + kv_head64 * v_n_stride, v_t_stride, b, kv_head, first, S,
        BLOCK_N, HEAD_DIM_V, BLOCK_HV, TMA, True,
    )  # fmt: skip
    grad_k = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_HV], tl.float32)
    for g in range(n_groups):
        head = kv_head * n_groups + g
        head64 = head.to(tl.int64)
        q_offset = b64 * q_b_stride + head64 * q_n_stride
        grad_out_offset = b64 * grad_out_b_stride + head64 * grad_out_n_stride
        rows = (b64 * (n_kv_heads * n_groups) + head64) * T
        if CAUSAL or DOCUMENTS:
            grad_k, grad_v = _add_grad_kv(
                grad_k, grad_v, k, v, q_source, grad_out_source, q_offset, grad_out_offset,
                q_t_stride, grad_out_t_stride, b, head, lse_ptr + rows, delta_ptr + rows, ids_ptr,
                ids_t_stride, own_ids, j, low, full_low, T, S, window, inner, factor, True, CAUSAL,
                WINDOW, DOCUMENTS, SOFTCAP, NEGATE, HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV,
                BLOCK_M, PRECISION, TMA,
            )  # fmt: skip
        grad_k, grad_v = _add_grad_kv(
            grad_k, grad_v, k, v, q_source, grad_out_source, q_offset, grad_out_offset,
            q_t_stride, grad_out_t_stride, b, head, lse_ptr + rows, delta_ptr + rows, ids_ptr,
            ids_t_stride, own_ids, j, full_low, full_high, T, S, window, inner, factor, False,
            CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE, HEAD_DIM, HEAD_DIM_V, BLOCK_H, BLOCK_HV,
            BLOCK_M, PRECISION, TMA,
        )  # fmt: skip
        if WINDOW or DOCUMENTS or not EVEN:
            grad_k, grad_v = _add_grad_kv(
                grad_k, grad_v, k, v, q_source, grad_out_source, q_offset, grad_out_offset,
                q_t_stride, grad_out_t_stride, b, head, lse_ptr + rows, delta_ptr + rows, ids_ptr,
                ids_t_stride, own_ids, j, full_high, high, T, S, window, inner, factor, True,
                CAUSAL, WINDOW, DOCUMENTS, SOFTCAP, NEGATE, HEAD_DIM, HEAD_DIM_V, BLOCK_H,
                BLOCK_HV, BLOCK_M, PRECISION, TMA,
            )  # fmt: skip
    store_tile(
        grad_k_ptr, b64 * grad_k_b_stride + kv_head64 * grad_k_n_stride, grad_k_t_stride, first, S,
        grad_k * scale, BLOCK_N, HEAD_DIM, BLOCK_H,
    )  # fmt: skip
    store_tile(
        grad_v_ptr, b64 * grad_v_b_stride + kv_head64 * grad_v_n_stride, grad_v_t_stride, first, S,
        grad_v, BLOCK_N, HEAD_DIM_V, BLOCK_HV,
    )  # fmt: skip


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


def sdpa_bwd_kv(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    lse: Tensor,
    delta: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *,
    blocks: Blocks | None = None,
    tma: bool | None = None,
) -> None:
    """Write grad_k and grad_v (dense rows, any other strides); no size may be 0."""
    blocks = blocks or sdpa_bwd_kv_block_sizes(*block_arguments(q, v))
    grad_out, q, k, v = map(dense_rows, (grad_out, q, k, v))
    (B, N, T, _), (M, S) = q.shape, k.shape[1:3]
    tma = can_use_tma(grad_out, q, k, v) if tma is None else tma
    documents, document_strides = of_documents(options, blocks.own)
    launch(
        _sdpa_bwd_kv_kernel,
        (triton.cdiv(S, blocks.own) * B * M,),
        tiled(grad_out, blocks.step, tma),
        tiled(q, blocks.step, tma),
        tiled(k, blocks.own, tma),
        tiled(v, blocks.own, tma),
        lse,
        delta,
        grad_k,
        grad_v,
        *documents,
        *(s for x in (grad_out, q, k, v, grad_k, grad_v) for s in x.stride()[:3]),
        *document_strides,
        M,
        N // M,
        T,
        S,
        options.scale,
        *scalars(options),
        **constants(options, q, v, tma),
        EVEN=T % blocks.step == 0,
        BLOCK_M=blocks.step,
        BLOCK_N=blocks.own,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def sdpa_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write grads = (grad_q, grad_k, grad_v), dense rows; shapes as for `sdpa_fwd`."""
    grad_q, grad_k, grad_v = grads
    lse = lse.contiguous()
    delta = sdpa_bwd_q(grad_out, q, k, v, options, out, lse, grad_q)
    sdpa_bwd_kv(grad_out, q, k, v, options, lse, delta, grad_k, grad_v)
