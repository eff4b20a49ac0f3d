"""Cross-entropy of rows of logits: the loss, and the gradient in the logits' own memory.

Tiling:   a program owns one row and walks it in blocks: once for the log-sum-exp, where each lane
          keeps a running maximum and sum of its own so that threads meet once a row, and once for
          the gradient, which finds the row in L1 or L2.
Bytes:    n_rows * n_cols * itemsize read from memory, and as many written where a gradient is
          wanted; the second read comes from a cache (100 KB a row of 50304 bf16 logits).
Numerics: all in COMPUTE_DTYPE (fp32, fp64 for fp64); x = softcap * tanh(logits / softcap) is formed
          there and never rounded. A row of scale 0 is not read: its loss and gradient are exact
          zeros, whatever it holds.
In place: grad_ptr may be logits_ptr. Then the threads of a row must all have read their part, and
          the target's logit, before one writes: the reductions between the two walks see to that,
          and where lse is given, each thread writes what it alone has read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Below every finite logit, so that logits of -inf need no test: exp(-|x - LOWEST|) is 0.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(x / SOFTCAP); exp overflows to infinity, where 1 - 2 / inf is the limit."""
    return SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / SOFTCAP))))


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr,
    grad_ptr,
    targets_ptr,
    scale_ptr,
    losses_ptr,
    lse_ptr,
    logits_row_stride,
    grad_row_stride,
    n_cols,
    n_readable_cols,
    ignore_index,
    LABEL_SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """n_readable_cols >= n_cols columns may be read and written: whole vectors up to the edge."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_row_stride
    grad_ptr += row * grad_row_stride
    lane = tl.arange(0, BLOCK)
    # in COMPUTE_DTYPE: a constant over an integer would be fp32, also for fp64 logits
    smoothed = LABEL_SMOOTHING / (tl.zeros([], COMPUTE_DTYPE) + n_cols)
    target = tl.load(targets_ptr + row)
    scale = tl.load(scale_ptr + row).to(COMPUTE_DTYPE)
    if (target == ignore_index) | (scale == 0):
        if not HAS_LSE:
            tl.store(losses_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if WRITE_GRAD:
            zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
            for start in range(0, n_readable_cols, BLOCK):
                tl.store(grad_ptr + start + lane, zeros, mask=start + lane < n_readable_cols)
        return
    if HAS_LSE:
        lse = tl.load(lse_ptr + row)
    else:
        # a target that is no class makes the loss NaN, instead of a read from anywhere
        is_class = (target >= 0) & (target < n_cols)
        x_target = tl.load(logits_ptr + target, mask=is_class, other=float("nan"))
        x_target = x_target.to(COMPUTE_DTYPE)
        if SOFTCAP is not None:
            x_target = _capped(x_target, SOFTCAP)
        top = tl.full([BLOCK], LOWEST, COMPUTE_DTYPE)
        total = tl.zeros([BLOCK], COMPUTE_DTYPE)
        plain_sum = tl.zeros([BLOCK], COMPUTE_DTYPE)
        for start in range(0, n_cols, BLOCK):
            cols = start + lane
            x = tl.load(logits_ptr + cols, mask=cols < n_readable_cols, other=0.0)
            x = x.to(COMPUTE_DTYPE)
            if SOFTCAP is not None:
                x = _capped(x, SOFTCAP)
            if LABEL_SMOOTHING != 0.0:
                plain_sum += tl.where(cols < n_cols, x, 0.0)
            x = tl.where(cols < n_cols, x, float("-inf"))
            # of exp(top - new) and exp(x - new) one is 1: the other is all there is to compute
            rest = tl.exp(-tl.abs(x - top))
            grows = x > top
            total = tl.where(grows, total * rest + 1.0, total + rest)
            top = tl.where(grows, x, top)
        row_top = tl.max(top, axis=0)
        # equal infinities: their difference is no number, their share is 1
        total *= tl.where(top == row_top, 1.0, tl.exp(top - row_top))
        lse = row_top + tl.log(tl.sum(total, axis=0))
        loss = lse - (1.0 - LABEL_SMOOTHING) * x_target
        if LABEL_SMOOTHING != 0.0:
            loss -= smoothed * tl.sum(plain_sum, axis=0)
        if Z_LOSS != 0.0:
            loss += Z_LOSS * lse * lse
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
    if WRITE_GRAD:
        of_probability = scale
        if Z_LOSS != 0.0:
            of_probability *= 1.0 + 2.0 * Z_LOSS * lse
        of_target = scale * (1.0 - LABEL_SMOOTHING)
        for start in range(0, n_cols, BLOCK):
            cols = start + lane
            x = tl.load(logits_ptr + cols, mask=cols < n_readable_cols, other=0.0)
            x = x.to(COMPUTE_DTYPE)
            if SOFTCAP is not None:
                x = _capped(x, SOFTCAP)
            grad = of_probability * tl.exp(x - lse)
            if LABEL_SMOOTHING != 0.0:
                grad -= scale * smoothed
            grad = tl.where(cols == target, grad - of_target, grad)
            if SOFTCAP is not None:
                grad *= 1.0 - (x * (1.0 / SOFTCAP)) * (x * (1.0 / SOFTCAP))
            grad = grad.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, grad, mask=cols < n_readable_cols)


def cross_entropy_block_sizes(n_cols: int, itemsize: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for rows of n_cols logits.

    A thread loads 16 bytes twice a block: with a thousand threads on an SM that is the 32 KB in
    flight that hide a memory's latency. Few wide programs rather than many narrow ones, so that the
    rows in flight on all SMs stay in L2 for the second walk. Short rows take fewer warps.
    """
    lanes = 32 * 2 * max(16 // itemsize, 1)
    num_warps = 16
    while num_warps > 1 and (num_warps // 2) * lanes >= n_cols:
        num_warps //= 2
    return num_warps * lanes, num_warps


def cross_entropy_rows(
    logits: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    padded: bool = False,
) -> None:
    """Write losses and lse, or read lse where losses is None; write grad unless it is None.

    Args:     logits, grad: [n, V], rows of any stride; grad may be logits.
              targets, scale, losses, lse: [n], contiguous; the gradient of l_i is scale_i, and a
              row of scale 0 counts for nothing.
              padded: the rows' memory goes on to the next multiple of 16 columns.
    """
    n_rows, n_cols = logits.shape
    if n_rows == 0:
        return
    block, num_warps = cross_entropy_block_sizes(n_cols, logits.element_size())
    out = logits if grad is None else grad
    _cross_entropy_rows_kernel[(n_rows,)](
        logits,
        out,
        targets,
        scale,
        lse if losses is None else losses,
        lse,
        logits.stride(0),
        out.stride(0),
        n_cols,
        triton.cdiv(n_cols, 16) * 16 if padded else n_cols,
        ignore_index,
        LABEL_SMOOTHING=label_smoothing,
        Z_LOSS=z_loss,
        SOFTCAP=softcap,
        HAS_LSE=losses is None,
        WRITE_GRAD=grad is not None,
        COMPUTE_DTYPE=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=num_warps,
    )
