"""The step of linear_cross_entropy that is no product: a gradient times the upstream scalar.

The rows of logits are the business of cross_entropy/kernel.py, the products of cuBLAS.

Tiling:   the tensor is flat; a program owns every n_programs-th block of BLOCK elements.
Bytes:    n * (itemsize of x + itemsize of out); nothing at all where out is x and the factor is
          exactly 1, which is why there are no more programs than the GPU runs at once.
Numerics: the product in COMPUTE_DTYPE, rounded once to out's dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch


@triton.jit
def _scale_kernel(
    x_ptr,
    out_ptr,
    factor_ptr,
    n_elements,
    IN_PLACE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(COMPUTE_DTYPE)
    if IN_PLACE:
        if factor == 1.0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, n_elements, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n_elements, other=0.0).to(COMPUTE_DTYPE)
        tl.store(out_ptr + i, (x * factor).to(out_ptr.dtype.element_ty), mask=i < n_elements)


def scale_block_sizes(n_elements: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK, num_programs, num_warps).

    Two 16-byte accesses a thread; eight programs of 256 threads fill each of about 130 SMs.
    """
    num_warps = 8
    block = num_warps * 32 * 2 * max(16 // itemsize, 1)
    return block, min(triton.cdiv(n_elements, block), 8 * 132), num_warps


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write x * factor into out, which is x itself or apart from it; return out.

    Args:     x, out: contiguous, of one shape; factor: one element, read on the device.
    """
    if x.numel() > 0:
        block, num_programs, num_warps = scale_block_sizes(x.numel(), x.element_size())
        launch(
            _scale_kernel, (num_programs,),
            x, out, factor, x.numel(),
            IN_PLACE=out.data_ptr() == x.data_ptr(),
            COMPUTE_DTYPE=tl.float64 if x.dtype == torch.float64 else tl.float32, BLOCK=block,
            num_warps=num_warps,
        )  # fmt: skip
    return out
