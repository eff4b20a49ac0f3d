"""Cross-entropy of rows of logits: the loss, and the gradient in the logits' own memory.

Tiling:   a program owns one row and walks it in tiles of TILE_ROWS x VECTOR logits, a vector being
          the 16 bytes that a thread loads at once: first for the log-sum-exp, then for the
          gradient, which finds the row in L1 or L2. Each vector's place in the tile keeps a maximum
          and a sum of its own, rescaled once a vector: threads meet once a row, and a logit costs
          one exponential in each walk. Only the last tile is masked.
Bytes:    n_rows * n_cols * itemsize read from memory, and as many written where a gradient is
          wanted; the second read comes from a cache (100 KB a row of 50304 bf16 logits).
Numerics: all in COMPUTE_DTYPE (fp32, fp64 for fp64); exponentials are powers of 2, whose argument
          is one multiply-add. x = softcap * tanh(logits / softcap) is formed there, never rounded.
          A row of scale 0 is not read: its loss and gradient are exact zeros, whatever it holds.
In place: grad_ptr may be logits_ptr. A thread writes only what it alone has read before, but for
          the target's logit: all read it first, and its gradient is written last, both with a
          barrier between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.cross_entropy.op import Options
from xtrain.ops.launch import launch

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every logit times LOG2_E but -inf: a place that has seen no logit adds nothing.
LOWEST = tl.constexpr(-1.0e38)


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(x / SOFTCAP); the power overflows to infinity, where the limit is right."""
    if SOFTCAP is not None:
        x = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E / SOFTCAP))))
    return x


@triton.jit
def _add_tile(x, shift, total):
    """Take a tile [TILE_ROWS, VECTOR] into each place's sum of 2^(x * LOG2_E - shift).

    The shift is the largest x * LOG2_E so far, rounded. Sums are rescaled by differences of shifts,
    not of logits: so the rounding of a shift cancels in shift + log2(total), however it is fused.
    """
    new_shift = tl.maximum(shift, tl.max(x, axis=1) * LOG2_E)
    total *= tl.exp2(shift - new_shift)
    total += tl.sum(tl.exp2(x * LOG2_E - new_shift[:, None]), axis=1)
    return new_shift, total


@triton.jit
def _grad(x, scale, z_scale, shift, share, SOFTCAP: tl.constexpr):
    """The gradient of a logit, given it capped and that of its loss; not for the target."""
    grad = z_scale * tl.exp2(x * LOG2_E - shift) - scale * share
    if SOFTCAP is not None:
        grad *= 1.0 - (x * (1.0 / SOFTCAP)) * (x * (1.0 / SOFTCAP))
    return grad


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr, grad_ptr, targets_ptr, scale_ptr, losses_ptr, lse_ptr,
    logits_row_stride, grad_row_stride,
    n_cols, n_readable_cols, ignore_index,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr, WRITE_GRAD: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    TILE_ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """n_readable_cols >= n_cols columns may be read and written: whole vectors up to the edge."""
    TILE: tl.constexpr = TILE_ROWS * VECTOR
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_row_stride
    grad_ptr += row * grad_row_stride
    place = tl.arange(0, TILE_ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    last = n_cols // TILE * TILE  # where the tile begins that needs a mask
    inside = last + place < n_cols
    readable = last + place < n_readable_cols
    target = tl.load(targets_ptr + row)
    scale = tl.load(scale_ptr + row).to(COMPUTE_DTYPE)
    if (target == ignore_index) | (scale == 0):
        if not HAS_LSE:
            tl.store(losses_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if WRITE_GRAD:
            zeros = tl.zeros([TILE_ROWS, VECTOR], grad_ptr.dtype.element_ty)
            for start in range(0, last, TILE):
                tl.store(grad_ptr + start + place, zeros)
            tl.store(grad_ptr + last + place, zeros, mask=readable)
        return
    # a target that is no class makes the loss NaN, instead of a read from anywhere
    is_class = (target >= 0) & (target < n_cols)
    x_target = tl.load(logits_ptr + target, mask=is_class, other=float("nan"))
    x_target = _capped(x_target.to(COMPUTE_DTYPE), SOFTCAP)
    # in COMPUTE_DTYPE: a constant over an integer would be fp32, also for fp64 logits
    share = LABEL_SMOOTHING / (tl.zeros([], COMPUTE_DTYPE) + n_cols)
    if HAS_LSE:
        lse = tl.load(lse_ptr + row)
    else:
        shifts = tl.full([TILE_ROWS], LOWEST, COMPUTE_DTYPE)
        total = tl.zeros([TILE_ROWS], COMPUTE_DTYPE)
        plain_sum = tl.zeros([TILE_ROWS], COMPUTE_DTYPE)
        for start in range(0, last, TILE):
            x = _capped(tl.load(logits_ptr + start + place).to(COMPUTE_DTYPE), SOFTCAP)
            shifts, total = _add_tile(x, shifts, total)
            if LABEL_SMOOTHING != 0.0:
                plain_sum += tl.sum(x, axis=1)
        x = tl.load(logits_ptr + last + place, mask=readable, other=0.0).to(COMPUTE_DTYPE)
        x = _capped(x, SOFTCAP)
        shifts, total = _add_tile(tl.where(inside, x, float("-inf")), shifts, total)
        shift = tl.max(shifts, axis=0)
        log_total = tl.log(tl.sum(total * tl.exp2(shifts - shift), axis=0))
        lse = shift * LN_2 + log_total
        # not lse - x_target: what cancels comes first
        loss = log_total - (x_target * LOG2_E - shift) * LN_2
        if LABEL_SMOOTHING != 0.0:
            plain_sum += tl.sum(tl.where(inside, x, 0.0), axis=1)
            loss += LABEL_SMOOTHING * x_target - share * tl.sum(plain_sum, axis=0)
        if Z_LOSS != 0.0:
            loss += Z_LOSS * lse * lse
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
    if WRITE_GRAD:
        z_scale = scale
        if Z_LOSS != 0.0:
            z_scale *= 1.0 + 2.0 * Z_LOSS * lse
        shift = lse * LOG2_E
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        tl.debug_barrier()  # all have read the target's logit
        x = tl.load(logits_ptr + last + place, mask=readable, other=0.0).to(COMPUTE_DTYPE)
        grad = _grad(_capped(x, SOFTCAP), scale, z_scale, shift, share, SOFTCAP)
        tl.store(grad_ptr + last + place, grad.to(dtype), mask=readable)
        for done in range(0, last, TILE):  # backwards: what was read last is in the caches first
            start = last - TILE - done
            x = _capped(tl.load(logits_ptr + start + place).to(COMPUTE_DTYPE), SOFTCAP)
            grad = _grad(x, scale, z_scale, shift, share, SOFTCAP)
            tl.store(grad_ptr + start + place, grad.to(dtype), eviction_policy="evict_first")
        tl.debug_barrier()  # what was written at the target lacks its own term
        grad = _grad(x_target, scale, z_scale, shift, share + (1.0 - LABEL_SMOOTHING), SOFTCAP)
        tl.store(grad_ptr + target, grad.to(dtype), mask=is_class)


def cross_entropy_block_sizes(n_cols: int, itemsize: int) -> tuple[int, int, int]:
    """Return (TILE_ROWS, VECTOR, num_warps) for rows of n_cols logits.

    Few wide programs rather than many narrow ones, so that the rows in flight on all SMs stay in
    the caches until their second walk; what they write is marked to leave the caches first. 16
    warps, two vectors a thread and tile, of rows past 128 KiB four: as much in flight as 32 warps
    of half as many, in fewer tiles. Short rows take fewer warps, and fp64 half the vectors: its
    values take twice the registers. Measured on an H200 at 50304 and 128256 bf16 logits, against 8
    and 32 warps and half and twice the vectors.
    """
    vector = max(16 // itemsize, 1)
    num_warps = 16
    while num_warps > 1 and (num_warps // 2) * 32 * vector >= n_cols:
        num_warps //= 2
    vectors = 4 if n_cols * itemsize > 128 << 10 else 2
    if num_warps < 16 or itemsize == 8:
        vectors = 1
    return num_warps * 32 * vectors, vector, num_warps


def cross_entropy_rows(
    logits: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    options: Options,
    *,
    padded: bool = False,
) -> None:
    """Write losses and lse, or read lse where losses is None; write grad unless it is None.

    Args:     logits, grad: [n, V], rows of any stride; grad may be logits.
              targets, scale, losses, lse: [n], contiguous; the gradient of l_i is scale_i, and a
              row of scale 0 counts for nothing.
              padded: the rows of both go on to the next multiple of 16 columns, of any content.
    """
    n_rows, n_cols = logits.shape
    if n_rows == 0:
        return
    tile_rows, vector, num_warps = cross_entropy_block_sizes(n_cols, logits.element_size())
    out = logits if grad is None else grad
    launch(
        _cross_entropy_rows_kernel, (n_rows,),
        logits, out, targets, scale, lse if losses is None else losses, lse, logits.stride(0),
        out.stride(0), n_cols, triton.cdiv(n_cols, 16) * 16 if padded else n_cols,
        options.ignore_index,
        LABEL_SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
        HAS_LSE=losses is None, WRITE_GRAD=grad is not None,
        COMPUTE_DTYPE=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        TILE_ROWS=tile_rows, VECTOR=vector, num_warps=num_warps,
    )  # fmt: skip
