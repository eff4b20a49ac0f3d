"""Attention by blocks: the forward kernel, one for grad_q, one for grad_k and grad_v.

    out = softmax(scores) v            lse: the natural logarithm of the sum of exponentials
    p = exp(s - lse)      dp = grad_out v^T      delta = rowsum(grad_out * out)
    ds = p * (dp - delta) * f'(q k^T)            f: see tiles.scalars
    grad_q = scale * ds k      grad_k = scale * ds^T q      grad_v = p^T grad_out

Tiling:   forward, a program owns BLOCK_M queries of one head and walks the keys that they may see,
          BLOCK_N at a time; blocks outside causal, window and document ranges are never touched,
          and only those on a boundary are masked. The longest rows start first, so that the last
          programs to run are short. grad_q is walked alike. For grad_k and grad_v a program owns
          BLOCK_N keys of one KV head and walks the queries that see them, BLOCK_M at a time, of all
          query heads of its group, one after the other: sums in a fixed order. There scores are
          formed transposed, [keys, queries]: p and ds enter their products as they are.
Bytes:    what a program owns, its results, lse and delta once; the other side once per block of
          queries, or of keys, from L2.
Numerics: products and sums in fp32; the running maximum and exp2 work on scores in units of log 2.
          Probabilities and ds are rounded to the inputs' dtype before they meet v, grad_out, k and
          q. A row that sees nothing gives zeros, and lse = +inf, for which backward finds every
          probability to be 0. No atomics: two runs agree bit for bit. The price is that both
          backward kernels form the scores, seven products of matrices in place of five.
Source:   online softmax: Milakov, Gimelshein 2018; tiling: Dao et al. 2022; recomputation from lse,
          and delta: Dao 2023 (FlashAttention-2).

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch
from xtrain.ops.sdpa.decomposition import Options
from xtrain.ops.sdpa.tiles import (
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
    sdpa_bwd_kv_block_sizes,
    sdpa_bwd_q_block_sizes,
    sdpa_fwd_block_sizes,
    sees,
    sees_keys,
    steps,
    store_tile,
    tiled,
)


@triton.jit
def _sdpa_fwd_kernel(
    q_source, k_source, v_source, out_ptr, lse_ptr, ids_ptr, ranges_ptr,
    q_b_stride, q_n_stride, q_t_stride,
    k_b_stride, k_n_stride, k_t_stride,
    v_b_stride, v_n_stride, v_t_stride,
    out_b_stride, out_n_stride, out_t_stride,
    ids_b_stride, ids_t_stride,
    n_heads, n_groups, T, S, window, inner, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
    bounds = (low, full_low, full_high, high)  # the middle of three parts needs no mask
    BEFORE: tl.constexpr = WINDOW or DOCUMENTS
    BEHIND: tl.constexpr = CAUSAL or DOCUMENTS or not EVEN
    for part in tl.static_range(3):
        if part == 1 or (part == 0 and BEFORE) or (part == 2 and BEHIND):
            for start in tl.range(bounds[part], bounds[part + 1], BLOCK_N):
                k = load_tile(
                    k_source, k_offset, k_t_stride, b, kv_head, start, S,
                    BLOCK_N, HEAD_DIM, BLOCK_H, TMA, part != 1,
                )  # fmt: skip
                products = tl.dot(q, k.T, input_precision=PRECISION)
                x = score(products, inner, SOFTCAP, NEGATE, PRECISION)
                if part != 1:
                    visible = sees_keys(
                        i, start, own_ids, ids_ptr, ids_t_stride, T, S, window,
                        CAUSAL, WINDOW, DOCUMENTS, BLOCK_N,
                    )  # fmt: skip
                    x = tl.where(visible, x, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(x, 1) * factor)
                shift = new_max
                if part != 1:
                    # -inf before the row's first visible key, and -inf - -inf is no number
                    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                p = tl.exp2(x * factor - shift[:, None])
                correction = tl.exp2(row_max - shift)
                row_sum = row_sum * correction + tl.sum(p, 1)
                total = total * correction[:, None]
                v = load_tile(
                    v_source, v_offset, v_t_stride, b, kv_head, start, S,
                    BLOCK_N, HEAD_DIM_V, BLOCK_HV, TMA, part != 1,
                )  # fmt: skip
                total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
                row_max = new_max

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
        _sdpa_fwd_kernel, (triton.cdiv(T, blocks.own) * B * N,),
        tiled(q, blocks.own, tma), tiled(k, blocks.step, tma), tiled(v, blocks.step, tma), out,
        lse, *documents, *(s for x in (q, k, v, out) for s in x.stride()[:3]), *document_strides,
        N, N // M, T, S, *scalars(options),
        **constants(options, q, v, tma, blocks, S), BLOCK_M=blocks.own, BLOCK_N=blocks.step,
    )  # fmt: skip


@triton.jit
def _sdpa_bwd_q_kernel(
    grad_out_source, q_source, k_source, v_source, out_ptr, lse_ptr, grad_q_ptr, delta_ptr,
    ids_ptr, ranges_ptr,
    grad_out_b_stride, grad_out_n_stride, grad_out_t_stride,
    q_b_stride, q_n_stride, q_t_stride,
    k_b_stride, k_n_stride, k_t_stride,
    v_b_stride, v_n_stride, v_t_stride,
    out_b_stride, out_n_stride, out_t_stride,
    grad_q_b_stride, grad_q_n_stride, grad_q_t_stride,
    ids_b_stride, ids_t_stride,
    n_heads, n_groups, T, S, scale, window, inner, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
    bounds = (low, full_low, full_high, high)
    BEFORE: tl.constexpr = WINDOW or DOCUMENTS
    BEHIND: tl.constexpr = CAUSAL or DOCUMENTS or not EVEN
    for part in tl.static_range(3):
        if part == 1 or (part == 0 and BEFORE) or (part == 2 and BEHIND):
            for start in tl.range(bounds[part], bounds[part + 1], BLOCK_N):
                k = load_tile(
                    k_source, k_offset, k_t_stride, b, kv_head, start, S,
                    BLOCK_N, HEAD_DIM, BLOCK_H, TMA, part != 1,
                )  # fmt: skip
                products = tl.dot(q, k.T, input_precision=PRECISION)
                x = score(products, inner, SOFTCAP, NEGATE, PRECISION)
                p = tl.exp2(x * factor - lse[:, None])
                if part != 1:
                    visible = sees_keys(
                        i, start, own_ids, ids_ptr, ids_t_stride, T, S, window,
                        CAUSAL, WINDOW, DOCUMENTS, BLOCK_N,
                    )  # fmt: skip
                    p = tl.where(visible, p, 0.0)
                v = load_tile(
                    v_source, v_offset, v_t_stride, b, kv_head, start, S,
                    BLOCK_N, HEAD_DIM_V, BLOCK_HV, TMA, part != 1,
                )  # fmt: skip
                grad_p = tl.dot(grad_out, v.T, input_precision=PRECISION)
                grad_x = p * (grad_p - delta[:, None])
                if SOFTCAP:
                    grad_x = grad_x * (1.0 - x * x)
                grad_q = tl.dot(grad_x.to(k.dtype), k, grad_q, input_precision=PRECISION)
    store_tile(
        grad_q_ptr, b64 * grad_q_b_stride + head64 * grad_q_n_stride, grad_q_t_stride, first, T,
        grad_q * scale, BLOCK_M, HEAD_DIM, BLOCK_H,
    )  # fmt: skip


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
        _sdpa_bwd_q_kernel, (triton.cdiv(T, blocks.own) * B * N,),
        *(tiled(x, blocks.own, tma) for x in (grad_out, q)),
        *(tiled(x, blocks.step, tma) for x in (k, v)), out, lse, grad_q, delta, *documents,
        *(s for x in (grad_out, q, k, v, out, grad_q) for s in x.stride()[:3]), *document_strides,
        N, N // M, T, S, options.scale, *scalars(options),
        **constants(options, q, v, tma, blocks, S), BLOCK_M=blocks.own, BLOCK_N=blocks.step,
    )  # fmt: skip
    return delta


@triton.jit
def _sdpa_bwd_kv_kernel(
    grad_out_source, q_source, k_source, v_source, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    ids_ptr, ranges_ptr,
    grad_out_b_stride, grad_out_n_stride, grad_out_t_stride,
    q_b_stride, q_n_stride, q_t_stride,
    k_b_stride, k_n_stride, k_t_stride,
    v_b_stride, v_n_stride, v_t_stride,
    grad_k_b_stride, grad_k_n_stride, grad_k_t_stride,
    grad_v_b_stride, grad_v_n_stride, grad_v_t_stride,
    ids_b_stride, ids_t_stride,
    n_kv_heads, n_groups, T, S, scale, window, inner, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, NEGATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
    bounds = (low, full_low, full_high, high)
    BEFORE: tl.constexpr = CAUSAL or DOCUMENTS
    BEHIND: tl.constexpr = WINDOW or DOCUMENTS or not EVEN
    grad_k = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_HV], tl.float32)
    for g in range(n_groups):
        head = kv_head * n_groups + g
        head64 = head.to(tl.int64)
        q_offset = b64 * q_b_stride + head64 * q_n_stride
        grad_out_offset = b64 * grad_out_b_stride + head64 * grad_out_n_stride
        rows = (b64 * (n_kv_heads * n_groups) + head64) * T
        lse_rows, delta_rows = lse_ptr + rows, delta_ptr + rows
        for part in tl.static_range(3):
            if part == 1 or (part == 0 and BEFORE) or (part == 2 and BEHIND):
                for start in tl.range(bounds[part], bounds[part + 1], BLOCK_M):
                    i = start + tl.arange(0, BLOCK_M)
                    q = load_tile(
                        q_source, q_offset, q_t_stride, b, head, start, T,
                        BLOCK_M, HEAD_DIM, BLOCK_H, TMA, part != 1,
                    )  # fmt: skip
                    # Past the end lse = inf: p is 0.
                    lse = tl.load(lse_rows + i, mask=i < T, other=float("inf"))
                    lse *= 1.4426950408889634
                    products = tl.dot(k, q.T, input_precision=PRECISION)
                    x = score(products, inner, SOFTCAP, NEGATE, PRECISION)
                    p = tl.exp2(x * factor - lse[None, :])
                    if part != 1:
                        query_ids = 0
                        if DOCUMENTS:
                            ids = ids_ptr + i.to(tl.int64) * ids_t_stride
                            query_ids = tl.load(ids, mask=i < T, other=0)[None, :]
                        visible = sees(
                            i[None, :], j[:, None], query_ids, own_ids[:, None], T, S, window,
                            CAUSAL, WINDOW, DOCUMENTS,
                        )  # fmt: skip
                        p = tl.where(visible, p, 0.0)
                    grad_out = load_tile(
                        grad_out_source, grad_out_offset, grad_out_t_stride, b, head, start, T,
                        BLOCK_M, HEAD_DIM_V, BLOCK_HV, TMA, part != 1,
                    )  # fmt: skip
                    p_cast = p.to(grad_out.dtype)
                    grad_v = tl.dot(p_cast, grad_out, grad_v, input_precision=PRECISION)
                    delta = tl.load(delta_rows + i, mask=i < T, other=0.0)
                    grad_p = tl.dot(v, grad_out.T, input_precision=PRECISION)
                    grad_x = p * (grad_p - delta[None, :])
                    if SOFTCAP:
                        grad_x = grad_x * (1.0 - x * x)
                    grad_k = tl.dot(grad_x.to(q.dtype), q, grad_k, input_precision=PRECISION)
    store_tile(
        grad_k_ptr, b64 * grad_k_b_stride + kv_head64 * grad_k_n_stride, grad_k_t_stride, first, S,
        grad_k * scale, BLOCK_N, HEAD_DIM, BLOCK_H,
    )  # fmt: skip
    store_tile(
        grad_v_ptr, b64 * grad_v_b_stride + kv_head64 * grad_v_n_stride, grad_v_t_stride, first, S,
        grad_v, BLOCK_N, HEAD_DIM_V, BLOCK_HV,
    )  # fmt: skip


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
        _sdpa_bwd_kv_kernel, (triton.cdiv(S, blocks.own) * B * M,),
        *(tiled(x, blocks.step, tma) for x in (grad_out, q)),
        *(tiled(x, blocks.own, tma) for x in (k, v)), lse, delta, grad_k, grad_v, *documents,
        *(s for x in (grad_out, q, k, v, grad_k, grad_v) for s in x.stride()[:3]),
        *document_strides, M, N // M, T, S, options.scale, *scalars(options),
        **constants(options, q, v, tma, blocks, T), BLOCK_M=blocks.step, BLOCK_N=blocks.own,
    )  # fmt: skip


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
