"""Seeded dropout, forward and backward.

Tiling:  the tensor is flat; a program owns BLOCK * NUM_BLOCKS consecutive elements and walks them
         block by block, so that lane * GAMMA is formed once and each key costs two additions
         instead of a 64-bit multiplication.
Bytes:   n * itemsize read and as many written; seed and offset (16) are read by pointer.
Random:  key and counter as in splitmix64.py beside this file; the keep decision of element i does
         not depend on BLOCK, NUM_BLOCKS or the grid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.triton.splitmix64 import GAMMA, random_bits24


@triton.jit
def _dropout_fwd_kernel(
    x_ptr,
    out_ptr,
    seed_ptr,
    offset_ptr,
    n_elements,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    seed = tl.load(seed_ptr).to(tl.uint64)
    offset = tl.load(offset_ptr).to(tl.uint64)
    lane = tl.arange(0, BLOCK)
    lane_key = lane.to(tl.uint64) * GAMMA
    first = tl.program_id(0).to(tl.int64) * (BLOCK * NUM_BLOCKS)
    for block in tl.static_range(NUM_BLOCKS):
        start = first + block * BLOCK
        inside = start + lane < n_elements
        x = tl.load(x_ptr + start + lane, mask=inside, other=0.0).to(COMPUTE_DTYPE)
        key = seed ^ (lane_key + (offset + start.to(tl.uint64)) * GAMMA)
        keep = random_bits24(key) >= THRESHOLD
        out = tl.where(keep, x * SCALE, 0.0)
        tl.store(out_ptr + start + lane, out.to(out_ptr.dtype.element_ty), mask=inside)


def dropout_block_sizes(n_elements: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK, NUM_BLOCKS, num_warps) for a flat tensor.

    A thread moves 16 bytes per access, the widest there is, so BLOCK = threads * 16 / itemsize.
    Four blocks per program pay for lane * GAMMA; small tensors take one, to fill more SMs.
    """
    num_warps = 4
    block = num_warps * 32 * max(16 // itemsize, 1)
    num_blocks = 4 if n_elements >= 1 << 20 else 1
    return block, num_blocks, num_warps


def dropout_fwd(x: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor) -> Tensor:
    """Launch on contiguous x; keep where the 24 random bits are >= threshold, times scale."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # empty_like would keep odd strides
    n_elements = x.numel()
    block, num_blocks, num_warps = dropout_block_sizes(n_elements, x.element_size())
    _dropout_fwd_kernel[(triton.cdiv(n_elements, block * num_blocks),)](
        x,
        out,
        seed,
        offset,
        n_elements,
        THRESHOLD=threshold,
        SCALE=scale,
        COMPUTE_DTYPE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK=block,
        NUM_BLOCKS=num_blocks,
        num_warps=num_warps,
    )
    return out


def dropout_bwd(
    grad_out: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor
) -> Tensor:
    """Launch on contiguous grad_out: dropout is linear and diagonal, so the kernel is the same."""
    return dropout_fwd(grad_out, threshold, scale, seed, offset)
