"""act(gate) * up, forward and backward, for tensors whose rows lie at any one distance.

Tiling:   a program owns a tile of BLOCK_ROWS x BLOCK_COLS elements. Each tensor has a row stride of
          its own, so that gate and up may be halves of one packed projection, and the two gradients
          halves of one packed gradient; where all are contiguous they are taken as one long row.
Bytes:    forward reads 2 and writes 1 element per element of the result, backward reads 3 and
          writes 2; nothing is read twice.
Numerics: the activation is formed again in backward, in c; every result is rounded once. The tanh
          of GELU's approximation is a sigmoid, (1 + tanh(a)) / 2 = sigmoid(2 a): Triton has no tanh
          of its own, and nearly equal numbers are nowhere subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from xtrain.ops.launch import launch
from xtrain.ops.shared.layout import row_stride


@triton.jit
def _tile(n_rows, n_cols, n_col_blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return this program's row numbers, its first column, its columns from there, and the mask."""
    program = tl.program_id(0)
    row_block = program // n_col_blocks
    first_col = (program % n_col_blocks).to(tl.int64) * BLOCK_COLS
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    inside = (rows < n_rows)[:, None] & (first_col + cols < n_cols)[None, :]
    return rows.to(tl.int64)[:, None], first_col, cols[None, :], inside


@triton.jit
def _normal_distribution(x, power):
    """Return P(X <= x) = (1 + erf(x / sqrt(2))) / 2 of a standard normal X; power = exp(-x^2 / 2).

    In fp32 the tail P(-|x|) is power times a polynomial in 1 / (1 + 0.34 |x|), the form of
    Abramowitz and Stegun (7.1.26) with coefficients fitted to this use: off by at most 1.2e-8,
    and by 1.2e-5 of itself, where 1 + erf cancels. An erf would take 5 instructions more forward
    and 12 backward, and a GPU that moves bf16 has no time for them.
    """
    if x.dtype == tl.float64:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    t = 1.0 / (1.0 + 0.34 * tl.abs(x))
    p = t * 0.04393524370902175 - 0.1965943908632201
    p = t * p + 0.25705374231055633
    p = t * p - 0.024270480827412524
    p = t * p + 0.15339269817167844
    p = t * p + 0.13053303043487555
    p = t * p + 0.13595015897379017
    tail = power * (t * p)
    return tl.where(x >= 0.0, 1.0 - tail, tail)


@triton.jit
def _value_and_slope(gate, ACTIVATION: tl.constexpr):
    """Return act(gate) and act'(gate), in gate's dtype; what is not used costs nothing."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu_tanh":
        # sigmoid(a) for a = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), from exp(-|a|) <= 1: nothing
        # overflows, and 1 - sigmoid, which a' multiplies by up to 35, is no difference
        square = gate * gate
        power = tl.exp(-tl.abs(gate * (1.5957691216057308 + 0.07135481627260025 * square)))
        larger = 1.0 / (1.0 + power)
        share = tl.where(gate >= 0.0, larger, power * larger)
        inner = 1.5957691216057308 + 0.21406444881780074 * square
        slope = share + gate * (power * larger * larger) * inner
    else:
        power = tl.exp(-0.5 * gate * gate)
        share = _normal_distribution(gate, power)
        slope = share + gate * power * 0.3989422804014327  # 1 / sqrt(2 pi)
    return gate * share, slope


@triton.jit
def _gated_fwd_kernel(
    gate_ptr, up_ptr, out_ptr,
    gate_row_stride, up_row_stride, out_row_stride,
    n_rows, n_cols, n_col_blocks,
    ACTIVATION: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, first, cols, inside = _tile(n_rows, n_cols, n_col_blocks, BLOCK_ROWS, BLOCK_COLS)
    gate = tl.load(gate_ptr + first + (rows * gate_row_stride + cols), mask=inside, other=0.0)
    up = tl.load(up_ptr + first + (rows * up_row_stride + cols), mask=inside, other=0.0)
    value, _ = _value_and_slope(gate.to(COMPUTE_DTYPE), ACTIVATION)
    out = value * up.to(COMPUTE_DTYPE)
    out_ptrs = out_ptr + first + (rows * out_row_stride + cols)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_bwd_kernel(
    grad_out_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr,
    grad_out_row_stride, gate_row_stride, up_row_stride, grad_gate_row_stride,
    grad_up_row_stride,
    n_rows, n_cols, n_col_blocks,
    ACTIVATION: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, first, cols, inside = _tile(n_rows, n_cols, n_col_blocks, BLOCK_ROWS, BLOCK_COLS)
    dy_ptrs = grad_out_ptr + first + (rows * grad_out_row_stride + cols)
    dy = tl.load(dy_ptrs, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + first + (rows * gate_row_stride + cols), mask=inside, other=0.0)
    up = tl.load(up_ptr + first + (rows * up_row_stride + cols), mask=inside, other=0.0)
    dy, gate, up = dy.to(COMPUTE_DTYPE), gate.to(COMPUTE_DTYPE), up.to(COMPUTE_DTYPE)
    value, slope = _value_and_slope(gate, ACTIVATION)
    grad_gate = dy * up * slope
    grad_up = dy * value
    grad_gate_ptrs = grad_gate_ptr + first + (rows * grad_gate_row_stride + cols)
    tl.store(grad_gate_ptrs, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    grad_up_ptrs = grad_up_ptr + first + (rows * grad_up_row_stride + cols)
    tl.store(grad_up_ptrs, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


def gated_block_sizes(n_rows: int, n_cols: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK_ROWS, BLOCK_COLS, num_warps).

    A thread moves 16 bytes per access, the widest there is: a tile is threads * 16 / itemsize
    elements. Columns are cut by the widest power of two, down to 256, that leaves at most 1/16 of
    the lanes idle, and a tile takes as many rows as then fit. On one H200, bf16 [16384, 5632]: silu
    takes 128 us forward and 216 backward, packed or not, where copying as many bytes takes 130 and
    217; two or four accesses a thread change nothing, half an access (8 warps) costs 143 us
    forward. gelu by tanh takes 132 us forward and 218 backward, by erf 146 and 214: there the
    instructions are what limits the forward.
    """
    num_warps = 4
    tile = num_warps * 32 * max(16 // itemsize, 1)
    if n_rows == 1:
        return 1, tile, num_warps
    block_cols = min(triton.next_power_of_2(n_cols), tile)
    while block_cols > 256 and -n_cols % block_cols > n_cols // 16:
        block_cols //= 2
    return tile // block_cols, block_cols, num_warps


def gated_fwd(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Launch on gate and up of one shape, each with a row stride (layout.row_stride)."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    _launch(_gated_fwd_kernel, (gate, up, out), activation)
    return out


def gated_bwd(grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Launch on three tensors of one shape, each with a row stride; the results are contiguous."""
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _launch(_gated_bwd_kernel, (grad_out, gate, up, grad_gate, grad_up), activation)
    return grad_gate, grad_up


def gated_packed_bwd(
    grad_out: Tensor, gate_up: Tensor, activation: str, *, gate_first: bool
) -> Tensor:
    """Launch on grad_out [..., F] and gate_up [..., 2 F]; both gradients go into one tensor."""
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    (gate, up), (grad_gate, grad_up) = (t.chunk(2, dim=-1) for t in (gate_up, grad))
    if not gate_first:
        gate, up, grad_gate, grad_up = up, gate, grad_up, grad_gate
    _launch(_gated_bwd_kernel, (grad_out, gate, up, grad_gate, grad_up), activation)
    return grad


def _launch(kernel: triton.JITFunction, tensors: Sequence[Tensor], activation: str) -> None:
    """Launch on non-empty tensors of one shape, which are the kernel's pointers in its order."""
    out = tensors[-1]
    if all(t.is_contiguous() for t in tensors):
        n_rows, n_cols, strides = 1, out.numel(), [0] * len(tensors)
    else:
        n_cols = out.shape[-1]
        n_rows = out.numel() // n_cols
        strides = [row_stride(t) or 0 for t in tensors]
    itemsize = min(t.element_size() for t in tensors)
    block_rows, block_cols, num_warps = gated_block_sizes(n_rows, n_cols, itemsize)
    n_col_blocks = triton.cdiv(n_cols, block_cols)
    launch(
        kernel, (triton.cdiv(n_rows, block_rows) * n_col_blocks,),
        *tensors, *strides, n_rows, n_cols, n_col_blocks,
        ACTIVATION=activation,
        COMPUTE_DTYPE=tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=num_warps,
    )  # fmt: skip
