"""Tensors as NumPy sees them: hashes, statistics and distances that no instruction set can change.

Everything is a function of the logical (row-major) bits alone. Sums run in fp64 in NumPy's fixed
pairwise order; minimum and maximum have no order. torch is not imported: bf16 arrives as its 16
bits and is widened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

# name in safetensors -> (NumPy dtype of its bits, torch's name)
DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("u1", "float8_e4m3fn"),
    "F8_E5M2": ("u1", "float8_e5m2"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("u1", "uint8"),
    "BOOL": ("?", "bool"),
}
OF_TORCH = {torch_name: name for name, (_, torch_name) in DTYPES.items()}
# floats: exponent and mantissa bits
FLOATS = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7)}
# the floats that a weight of a dtype is rounded to, to be compared with a model that was cast
ROUNDED_TO = {
    "F64": ("F32", "BF16", "F16"),
    "F32": ("BF16", "F16"),
    "BF16": ("F16",),
    "F16": ("BF16",),
}

NUM_SAMPLES = 16  # elements of a tensor that are kept as they are
STATISTICS = ("min", "max", "mean", "rms", "num_nan", "num_inf")
CHUNK = 1 << 16  # elements of one fp64 temporary: stays in the second-level cache


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What is kept of a tensor."""

    hash: bytes  # xxh3_128 of the bits, every NaN made the same
    statistics: NDArray[np.float64]  # as STATISTICS; NaN and infinities are counted, then left out
    samples: NDArray[np.float64]  # NUM_SAMPLES evenly spaced elements; NaN where there are fewer


def fingerprint(bits: NDArray, dtype: str) -> Fingerprint:
    """Return the fingerprint of a contiguous array of bits of a dtype of DTYPES."""
    flat = bits.reshape(-1)
    statistics, strange = _statistics(flat, dtype)
    if strange:
        flat = same_nan(flat, dtype)
    return Fingerprint(hash_bits(flat), statistics, samples_of(flat, dtype))


def hash_bits(bits: NDArray) -> bytes:
    """Return 16 bytes that differ when a bit does (xxh3_128, not cryptographic)."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)


def widen(bits: NDArray, dtype: str) -> NDArray:
    """Return numbers that NumPy can compute with; bf16 and fp8 as fp32, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _FP8[dtype][bits]
    return bits


def to_float64(bits: NDArray, dtype: str) -> NDArray[np.float64]:
    """Return numbers as fp64, exactly."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return widen(bits, dtype).astype(np.float64)


def narrow(values: NDArray, dtype: str) -> NDArray[np.float64]:
    """Return values rounded to a float dtype, ties to even, as fp64."""
    if dtype == "BF16":
        bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (
            (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        ) << 16
        return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(DTYPES[dtype][0]).astype(np.float64)


def same_nan(flat: NDArray, dtype: str) -> NDArray:
    """Return a copy in which every NaN has the same bits: its payload and sign carry no number."""
    if dtype not in FLOATS:
        return flat
    values = widen(flat, dtype)
    result = flat.copy()
    exponent, mantissa = FLOATS[dtype]
    quiet = ((1 << (exponent + 1)) - 1) << (mantissa - 1)
    result.view(f"<u{flat.itemsize}")[np.isnan(values)] = quiet
    return result


def _statistics(flat: NDArray, dtype: str) -> tuple[NDArray[np.float64], bool]:
    """Return STATISTICS of flat, and whether something in it is not finite."""
    if flat.size == 0:
        return np.array([np.nan, np.nan, np.nan, np.nan, 0.0, 0.0]), False
    with np.errstate(all="ignore"):
        result, finite = _finite_statistics(flat, dtype)
        if finite:
            return result, False
        values = widen(flat, dtype)
        num_nan, num_inf = np.isnan(values).sum(), np.isinf(values).sum()
        kept = values[np.isfinite(values)]
        if kept.size:
            result, _ = _finite_statistics(kept, "F64")
        else:
            result[:4] = np.nan
    result[4:] = num_nan, num_inf
    return result, bool(num_nan or num_inf)


def _finite_statistics(flat: NDArray, dtype: str) -> tuple[NDArray[np.float64], bool]:
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    for start in range(0, flat.size, CHUNK):
        chunk = widen(flat[start : start + CHUNK], dtype)
        low, high = min(low, chunk.min()), max(high, chunk.max())
        wide = chunk.astype(np.float64)
        total += float(np.add.reduce(wide))
        squares += float(np.add.reduce(np.multiply(wide, wide, out=wide)))
    size = flat.size
    values = np.array([low, high, total / size, np.sqrt(squares / size), 0.0, 0.0])
    # A NaN or an infinity reaches the sum of squares; huge fp64 numbers may overflow it as well.
    return values, bool(np.isfinite(squares))


def samples_of(flat: NDArray, dtype: str) -> NDArray[np.float64]:
    """Return NUM_SAMPLES evenly spaced elements, first and last among them."""
    result = np.full(NUM_SAMPLES, np.nan)
    if flat.size:
        index = _sample_index(flat.size)
        with np.errstate(invalid="ignore"):
            result[: index.size] = widen(flat[index], dtype)
    return result


@lru_cache(maxsize=1024)
def _sample_index(size: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, size - 1, NUM_SAMPLES).astype(np.int64))


# --- Distances between two tensors ---------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far two tensors of one shape are apart; computed in fp64."""

    max_abs: float  # inf when something that is not finite differs
    max_ulps: float  # of the coarser dtype, at the larger of the two numbers and the rms of all
    num_different: int
    exact: bool = True  # False: a lower bound near it, from samples; 0: no figure can be given


def distance(a: NDArray, dtype_a: str, b: NDArray, dtype_b: str) -> Distance:
    """Return the distance of two arrays of bits; NaN in the same place is no difference."""
    worst, ulps, count = 0.0, 0.0, 0
    a, b = a.reshape(-1), b.reshape(-1)
    coarser = coarser_dtype(dtype_a, dtype_b)
    rms = max(rms_of(a, dtype_a), rms_of(b, dtype_b))
    for start in range(0, a.size, CHUNK):
        x = to_float64(a[start : start + CHUNK], dtype_a)
        y = to_float64(b[start : start + CHUNK], dtype_b)
        delta = absolute_difference(x, y)
        count += int(np.count_nonzero(delta))
        worst = max(worst, float(delta.max()))
        ulps = max(ulps, max_ulps(delta, x, y, coarser, rms))
    return Distance(worst, ulps, count)


def rms_of(bits: NDArray, dtype: str) -> float:
    """Return the root mean square of the finite numbers, 0 where there are none."""
    return float(np.nan_to_num(_statistics(bits.reshape(-1), dtype)[0][STATISTICS.index("rms")]))


def absolute_difference(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |x - y|: 0 for equal infinities or NaN in both places, inf for those in one."""
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(x - y)
    strange = np.isnan(delta)
    if strange.any():
        delta[strange] = np.where(np.isnan(x) & np.isnan(y) | (x == y), 0.0, np.inf)[strange]
    return delta


def max_ulps(
    delta: NDArray[np.float64],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    dtype: str,
    rms: float | NDArray[np.float64] = 0.0,
) -> float:
    """Return the largest delta in units of the last place of the largest of |x|, |y| and rms.

    Beside numbers of a usual size a rounding error of theirs is many last places of one near zero.
    """
    if dtype not in FLOATS or not delta.size or not delta.any():
        return 0.0
    if np.isinf(delta).any():
        return float("inf")
    exponent_bits, mantissa = FLOATS[dtype]
    smallest = 2 - (1 << (exponent_bits - 1))  # exponent of the smallest normal number
    size = np.maximum(np.abs(np.nan_to_num(x)), np.abs(np.nan_to_num(y)))
    exponent = np.maximum(np.frexp(np.maximum(size, rms))[1] - 1, smallest)
    with np.errstate(over="ignore"):
        return float(np.max(np.ldexp(delta, mantissa - exponent)))


def coarser_dtype(a: str, b: str) -> str:
    """Return the dtype with fewer mantissa bits: differences are counted in its last place."""
    return min((a, b), key=lambda name: FLOATS.get(name, (0, 99))[1])


def _fp8_table(exponent_bits: int, mantissa_bits: int, finite_only: bool) -> NDArray[np.float32]:
    table = np.empty(256, np.float32)
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    for code in range(256):
        exponent = (code >> mantissa_bits) & top
        mantissa = code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = (
            (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        )
        if exponent == top and finite_only and mantissa == (1 << mantissa_bits) - 1:
            value = np.nan
        elif exponent == top and not finite_only:
            value = np.nan if mantissa else np.inf
        table[code] = -value if code & 0x80 else value
    return table


_FP8 = {"F8_E4M3": _fp8_table(4, 3, True), "F8_E5M2": _fp8_table(5, 2, False)}
