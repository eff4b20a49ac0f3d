"""Rotary position embedding of queries and keys in one launch; backward is the inverse rotation.

Tiling:   the heads of q and k count through: head n < N is q's, else k's n - N. A program owns
          BLOCK_TOKENS tokens of one sample and BLOCK_HEADS heads of each, and loads the tokens'
          rows of cos and sin once.
Bytes:    each element of q and k is read and written once; cos and sin are read once per token and
          program, from the L2 where samples or programs share them.
Numerics: products and sum in c, each rounded there as in torch, and once more to the dtype of x;
          elements from R on are copied bit for bit.

q and k may have any strides but the last, which is 1: views of a packed projection are read in
place. PAIRS = R / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch
from xtrain.ops.shared.layout import empty_in, memory_order


@triton.jit
def _rows(q, k, batch, token, head, n_heads, HAS_K: tl.constexpr):
    """Return pointers to the first elements of these heads of these tokens: q's, then k's.

    q and k are (pointer, batch stride, head stride, token stride).
    """
    rows = q[0] + (batch * q[1] + head * q[2] + token * q[3])
    if HAS_K:
        head -= n_heads
        k_rows = k[0] + (batch * k[1] + head * k[2] + token * k[3])
        rows = tl.where(head < 0, rows, k_rows)
    return rows


@triton.jit
def _rope_fwd_kernel(
    q_ptr, k_ptr, out_q_ptr, out_k_ptr, cos_ptr, sin_ptr,
    q_batch_stride, q_head_stride, q_token_stride,
    k_batch_stride, k_head_stride, k_token_stride,
    out_q_batch_stride, out_q_head_stride, out_q_token_stride,
    out_k_batch_stride, out_k_head_stride, out_k_token_stride,
    table_batch_stride, table_token_stride,
    n_tokens, n_heads, n_all_heads, n_token_blocks, n_head_blocks,
    HAS_K: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first_head = program % n_head_blocks * BLOCK_HEADS
    program = program // n_head_blocks
    batch = (program // n_token_blocks).to(tl.int64)
    token = program % n_token_blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_inside = token < n_tokens
    token = token.to(tl.int64)

    pair = tl.arange(0, BLOCK_PAIRS)
    table = batch * table_batch_stride + (token * table_token_stride)[:, None] + pair[None, :]
    table_inside = token_inside[:, None] & (pair < PAIRS)[None, :]
    cos = tl.load(cos_ptr + table, mask=table_inside, other=0.0).to(COMPUTE_DTYPE)[:, None, :]
    sin = tl.load(sin_ptr + table, mask=table_inside, other=0.0).to(COMPUTE_DTYPE)[:, None, :]
    if INVERSE:
        sin = -sin

    q = (q_ptr, q_batch_stride, q_head_stride, q_token_stride)
    k = (k_ptr, k_batch_stride, k_head_stride, k_token_stride)
    out_q = (out_q_ptr, out_q_batch_stride, out_q_head_stride, out_q_token_stride)
    out_k = (out_k_ptr, out_k_batch_stride, out_k_head_stride, out_k_token_stride)
    token, token_inside = token[:, None, None], token_inside[:, None, None]
    head = (first_head + tl.arange(0, BLOCK_HEADS))[None, :, None].to(tl.int64)
    inside = token_inside & (head < n_all_heads)
    x = _rows(q, k, batch, token, head, n_heads, HAS_K)
    out = _rows(out_q, out_k, batch, token, head, n_heads, HAS_K)

    # everything is loaded before anything is stored
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK_PAIRS)
        turning = inside & (lane < 2 * PAIRS)
        both = tl.load(x + lane, mask=turning, other=0.0)
        left, right = tl.split(both.reshape(BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS, 2))
    else:
        turning = inside & (pair < PAIRS)
        left = tl.load(x + pair, mask=turning, other=0.0)
        right = tl.load(x + (PAIRS + pair), mask=turning, other=0.0)
    if REST > 0:
        passing = tl.arange(0, BLOCK_REST)
        rest = tl.load(x + (2 * PAIRS + passing), mask=inside & (passing < REST), other=0.0)

    a, b = left.to(COMPUTE_DTYPE), right.to(COMPUTE_DTYPE)
    left, right = (a * cos - b * sin).to(left.dtype), (b * cos + a * sin).to(left.dtype)
    if INTERLEAVED:
        tl.store(out + lane, tl.interleave(left, right), mask=turning)
    else:
        tl.store(out + pair, left, mask=turning)
        tl.store(out + (PAIRS + pair), right, mask=turning)
    if REST > 0:
        tl.store(out + (2 * PAIRS + passing), rest, mask=inside & (passing < REST))


def rope_block_sizes(n_all_heads: int, head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK_TOKENS, BLOCK_HEADS, num_warps).

    A thread moves 16 bytes per access, the widest there is, one in each half of a head: a program
    has threads * 32 bytes of x. Of heads it takes up to 16: more share a row of cos and sin, but
    leave more lanes idle where their number is no power of two. On one H200, bf16, 40 heads of 128:
    83 us; with 8 heads of 2 tokens 87, as tables of no fewer elements than there are threads go
    through shared memory; with 8 warps 99, as accesses are of 8 bytes then.
    """
    num_warps = 4
    rows = max(num_warps * 32 * 32 // (itemsize * triton.next_power_of_2(head_dim)), 1)
    block_heads = min(rows, 16, triton.next_power_of_2(n_all_heads))
    return rows // block_heads, block_heads, num_warps


def rope_rows(
    inputs: list[Tensor], cos: Tensor, sin: Tensor, layout: str, *, inverse: bool
) -> list[Tensor]:
    """Launch on [x [B, N, T, H]], or [q, k [B, M, T, H]] of one dtype; none is empty.

    Args:     cos, sin: of one set of strides, dense rows; inverse: every angle is negated.
    """
    outs = [empty_in(memory_order(x), x.shape, x) for x in inputs]
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    B, N, T, H = inputs[0].shape
    n_all_heads = sum(x.shape[1] for x in inputs)
    pairs = cos.shape[-1]
    block_tokens, block_heads, num_warps = rope_block_sizes(n_all_heads, H, outs[0].element_size())
    n_token_blocks = triton.cdiv(T, block_tokens)
    n_head_blocks = triton.cdiv(n_all_heads, block_heads)
    q_and_k = [*rows, *rows][:2]  # the kernel looks at no k where there is none
    out_q_and_k = [*outs, *outs][:2]
    launch(
        _rope_fwd_kernel, (B * n_token_blocks * n_head_blocks,),
        *q_and_k, *out_q_and_k, cos, sin,
        *(stride for x in (*q_and_k, *out_q_and_k) for stride in _row_strides(x)),
        cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2),
        T, N, n_all_heads, n_token_blocks, n_head_blocks,
        HAS_K=len(inputs) == 2, PAIRS=pairs, REST=H - 2 * pairs,
        INTERLEAVED=layout == "interleaved", INVERSE=inverse,
        COMPUTE_DTYPE=tl.float64 if outs[0].dtype == torch.float64 else tl.float32,
        BLOCK_TOKENS=block_tokens, BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=triton.next_power_of_2(pairs),
        BLOCK_REST=triton.next_power_of_2(max(H - 2 * pairs, 1)),
        num_warps=num_warps,
        # which product would be fused into the sum depends on the strides
        enable_fp_fusion=False,
    )  # fmt: skip
    return outs


def _row_strides(x: Tensor) -> list[int]:
    """Return the strides of [B, N, T]; 0 for dims of one element, whose strides may be anything.

    Triton compiles for whether 16 divides each stride, which 16-byte accesses need.
    """
    return [0 if x.shape[d] == 1 else x.stride(d) for d in range(3)]
