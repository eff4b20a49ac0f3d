"""Seeded stateless dropout: the mask is a function of (seed, element index) and nothing else.

    i    = offset + flat row-major index of the element                        64-bit
    h    = splitmix64(seed ^ (i * 0x9E3779B97F4A7C15))                         mod 2^64
    keep = float32(h >> 40) * 2^-24 >= float32(p)
    out  = keep ? x * (1 / (1 - p)) : +0       the product in c, then rounded once to x's dtype

c is fp64 for fp64 inputs, else fp32; the scale is formed in double from the Python p and is 0 when
float32(p) is 1. The gradient applies the same mask and scale to grad_out, so that seed and offset
are all that backward needs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.shared import cpu
from xtrain.ops.shared.layout import in_rows
from xtrain.rng import GAMMA, MUL1, MUL2, to_signed

INT64_MAX = (1 << 63) - 1
INT64_MIN = -(1 << 63)
MAX_COLS = 8192  # of kernels of whole rows: a thread then holds 16 elements of each tensor
KERNEL_DTYPES = core.FLOATS
GAMMA_INT64 = to_signed(GAMMA)
MUL1_INT64 = to_signed(MUL1)
MUL2_INT64 = to_signed(MUL2)


def dropout_reference(x: Tensor, p: float, seed: int | Tensor, offset: int | Tensor = 0) -> Tensor:
    """Return dropout of x by the formula above, step by step; differentiable."""
    check_p(p)
    c = compute_dtype(x.dtype)
    if p == 0:
        return x.clone(memory_format=torch.contiguous_format)
    seed = as_int64_scalar("seed", seed, x.device)
    offset = as_int64_scalar("offset", offset, x.device)
    i = offset + torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    h = splitmix64(counter_key(seed, i))
    u = shift_right(h, 40).to(torch.float32) * 2.0**-24
    keep = u >= float32(p)
    dropped = torch.zeros((), dtype=c, device=x.device)
    return torch.where(keep, x.contiguous().to(c) * scale_of(p), dropped).to(x.dtype)


def check_p(p: float) -> float:
    """Return p, or raise ValueError when it is outside [0, 1] or NaN."""
    if not 0.0 <= p <= 1.0:
        raise torch_compat.argument_error(
            f"dropout: p must be in [0, 1], got {float(p)}: it is the probability of dropping"
        )
    return p


def float32(p: float) -> float:
    """Return p rounded to the nearest fp32 number."""
    return struct.unpack("f", struct.pack("f", p))[0]


def threshold_of(p: float) -> int:
    """Return t in [0, 2^24]: float32(h >> 40) * 2^-24 >= float32(p) exactly when (h >> 40) >= t.

    Both sides times 2^24: h >> 40 < 2^24 is exact in fp32, and so is the product in double.
    """
    return math.ceil(float32(p) * 2.0**24)


def scale_of(p: float) -> float:
    """Return what kept elements are multiplied by: 1 / (1 - p), or 0 where nothing is kept."""
    return 0.0 if float32(p) == 1.0 else 1.0 / (1.0 - p)


def as_int64_scalar(name: str, value: int | Tensor, device: torch.device) -> Tensor:
    """Return value as a 0-d int64 tensor on device; an int is taken mod 2^64."""
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.dim() != 0:
            raise TypeError(
                f"dropout: {name} must be an int or a 0-d int64 tensor, got a tensor of "
                f"{value.dtype} with shape {tuple(value.shape)}"
            )
        if value.device != device:
            raise ValueError(
                f"dropout: {name} is on {value.device} and x on {device}: move {name} to x's device"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, np.integer)):
        raise TypeError(f"dropout: {name} must be an int or a 0-d int64 tensor, got {value!r}")
    if isinstance(value, np.integer):
        value = int(value)
    if not INT64_MIN <= value <= INT64_MAX:
        value = to_signed(value)
    return torch.full((), value, dtype=torch.int64, device=device)


# --- splitmix64 in int64 arithmetic: the answer key for every random kernel ----------------------
#
#   z = key + GAMMA;  z = (z ^ z >> 30) * MUL1;  z = (z ^ z >> 27) * MUL2;  h = z ^ z >> 31
#
# int64 tensors hold the 64 bits: addition and multiplication wrap mod 2^64 whatever the sign; a
# logical right shift is an arithmetic one and a mask that clears the copies of the sign bit.


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of an int64 tensor's 64 bits by 1 to 63 places."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_top_bits(key: Tensor) -> Tensor:
    """Return splitmix64(key) but for its last step, z ^ z >> 31: the top 31 bits are right."""
    z = key + GAMMA_INT64
    z = (z ^ shift_right(z, 30)) * MUL1_INT64
    return (z ^ shift_right(z, 27)) * MUL2_INT64


def splitmix64(key: Tensor) -> Tensor:
    """Return the published SplitMix64 output for each state in an int64 tensor.

    Shapes:   key (...), int64, the bits of an unsigned state; result alike.
    Source:   Steele, Lea, Flood 2014.
    """
    z = mix_top_bits(key)
    return z ^ shift_right(z, 31)


def counter_key(seed: Tensor, index: Tensor) -> Tensor:
    """Return seed ^ (index * GAMMA) mod 2^64: the state element `index` draws its bits from."""
    return seed ^ (index * GAMMA_INT64)


# --- The op --------------------------------------------------------------------------------------


def dropout_decomposition(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """Return dropout in the fewest integer operations per element; what inductor fuses.

    Two identities save work: the last xor-shift of splitmix64 cannot change the top 24 bits, and
    the float comparison is one of integers. Flipping the sign bit turns the unsigned comparison
    into a signed one and spares the shift by 40.
    """
    threshold = threshold_of(p)
    if p == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if threshold == 1 << 24:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    flat = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    index_times_gamma = counter if x.device.type == "cpu" else counter_by_fours
    z = mix_top_bits(seed ^ index_times_gamma(flat, offset))
    keep = (z ^ INT64_MIN) >= (threshold << 40) + INT64_MIN
    scaled = x.contiguous().to(compute_dtype(x.dtype)) * scale_of(p)
    return torch.where(keep, scaled, 0.0).to(x.dtype)


def counter(flat: Tensor, offset: Tensor) -> Tensor:
    """Return (offset + flat) * GAMMA mod 2^64, for inductor's loops on a CPU.

    The mask changes no index, but without it inductor folds arange * constant into a signed index
    expression, whose overflow gives wrong bits in the tails of vectorised C++ loops.
    """
    return ((flat & INT64_MAX) + offset) * GAMMA_INT64


def counter_by_fours(flat: Tensor, offset: Tensor) -> Tensor:
    """Return the same bits in the form that costs a GPU least.

    A thread holds four neighbours or more, and their first index is a multiple of four: they share
    one 64-bit multiplication and add constants, a sixth of dropout's instructions less.
    """
    return ((flat & (INT64_MAX - 3)) + offset) * GAMMA_INT64 + (flat & 3) * GAMMA_INT64


def _fake(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    _check_inputs(x, p)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def dropout_on_cpu(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """Return dropout by the compiled helper where there is one: what eager runs on a CPU."""
    _check_inputs(x, p)
    if p == 0:
        return x.clone(memory_format=torch.contiguous_format)
    out = cpu.dropout(x, threshold_of(p), scale_of(p), seed, offset)
    return dropout_decomposition(x, p, seed, offset) if out is None else out


def _cuda(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    _check_inputs(x, p)
    if p == 0 or x.numel() == 0 or supports(x, p, seed, offset) is not None:
        return dropout_decomposition(x, p, seed, offset)
    launch = import_module("xtrain.ops.dropout.kernel").dropout_fwd
    in_place = x.dim() > 0 and x.shape[-1] <= MAX_COLS
    (x,) = in_rows(x) if in_place else (x.contiguous(),)
    return launch(x, threshold_of(p), scale_of(p), seed, offset)


def _check_inputs(x: Tensor, p: float) -> None:
    check_p(p)
    if not x.dtype.is_floating_point:
        raise torch_compat.argument_error(
            f"dropout: x must be a tensor of floats, got {x.dtype}: the scale is 1 / (1 - p)"
        )


def supports(x: Tensor, p: float, seed: int | Tensor, offset: int | Tensor = 0) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return core.kernel_refuses(KERNEL_DTYPES, x=x)


# Dropout is linear and its matrix diagonal: the transpose is the same map. The backward is an op of
# its own all the same, so that a graph shows which is which.
FORWARD, BACKWARD = (
    core.define_op(
        schema,
        fake=_fake,
        decomposition=dropout_decomposition,
        cpu=dropout_on_cpu,
        cuda=_cuda,
    )
    for schema in (
        "dropout(Tensor x, float p, Tensor seed, Tensor offset) -> Tensor",
        "dropout_backward(Tensor grad_out, float p, Tensor seed, Tensor offset) -> Tensor",
    )
)
core.define_derivative(FORWARD, BACKWARD, transposes=True)
core.define_masked_vmap(FORWARD, num_tensors=1, seed=2)


def check_mapped(name: str, *values: Any) -> None:
    """Raise inside a vmap where nothing that the mask depends on has a row of its own."""
    if not torch.compiler.is_compiling() and torch_compat.is_mapped_in_part(*values):
        raise RuntimeError(
            f"{name} under vmap: neither x nor seed nor offset is mapped over, so every row would "
            "get one mask; map over one of them, or call it outside of the vmap"
        )


def dropout(x: Tensor, p: float, seed: int | Tensor, offset: int | Tensor = 0) -> Tensor:
    """Zero each element of x with probability p and scale the rest by 1 / (1 - p).

    Shapes:   x (..., D), any strides; seed (), int64, on x.device; result like x, contiguous, never
              an alias.
    Args:     p: in [0, 1]; constant, a new value recompiles.
              seed: one per site and step, from rng.site_seed; an int is taken mod 2^64; inside
              graphs a tensor, so that a new step does not recompile.
              offset: flat index of x's first element in the whole batch's tensor.
    Random:   keep decision = f(seed, offset + flat index) only; block size, strides, device,
              compilation do not enter. Under vmap the flat index counts over all rows.
    Grad:     the same mask and scale on grad_out; saves seed and offset, not the mask.
    Numerics: mask exact; product in fp32 (fp64 for fp64), rounded once. p = 0 gives a bitwise copy,
              p = 1 zeros; a dropped NaN or infinity gives +0.
    Raises:   ValueError if p is outside [0, 1] or NaN, or x holds no floats; TypeError if seed or
              offset is neither int nor a 0-d int64 tensor; RuntimeError under a vmap with
              randomness="same" or over none of x, seed, offset; NotImplementedError in forward-mode
              differentiation.
    Source:   Srivastava et al. 2014 (dropout); Steele, Lea, Flood 2014 (SplitMix).
    """
    seed = as_int64_scalar("seed", seed, x.device)
    offset = as_int64_scalar("offset", offset, x.device)
    check_mapped("dropout", x, seed, offset)
    return FORWARD(x, p, seed, offset)


def dropout_mask(
    shape: int | Sequence[int],
    p: float,
    seed: int | Tensor,
    offset: int | Tensor = 0,
    *,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Return the keep mask of `dropout` for a tensor of this shape: bool, True = kept.

    Shapes:   result `shape`, bool, contiguous, on device.
    Args:     p, seed, offset: as for `dropout`.
              device: default: that of seed or offset if one is a tensor, else torch's default.
    Random:   the same decisions as `dropout`, bit for bit.
    Raises:   as `dropout`.
    """
    if device is None:
        device = next((t.device for t in (seed, offset) if isinstance(t, Tensor)), None)
    # A kept 1 becomes 1 / (1 - p) >= 1, a dropped one 0.
    return dropout(torch.ones(shape, dtype=torch.float32, device=device), p, seed, offset) != 0


OP = core.Op(dropout, dropout_reference, FORWARD, BACKWARD, supports)
