"""Tensors as NumPy sees them: hashes and statistics that no instruction set can change, and files.

Everything is a function of the logical (row-major) bits alone. Sums run in fp64 in NumPy's fixed
pairwise order; minimum and maximum have no order. torch is not imported: bf16 arrives as its 16
bits and is widened here.

safetensors files are written as a stream. The format puts the header first, and its length is not
known before the last tensor: the data go to a file beside it and are copied behind the header at
the end. Memory stays that of one tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xtrain import files
from xtrain.drift.settings import DriftError

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
RMS, NUM_NAN = STATISTICS.index("rms"), STATISTICS.index("num_nan")
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


def rms_of(bits: NDArray, dtype: str) -> float:
    """Return the root mean square of the finite numbers, 0 where there are none."""
    return float(np.nan_to_num(_statistics(bits.reshape(-1), dtype)[0][RMS]))


def coarser_dtype(a: str, b: str) -> str:
    """Return the dtype with fewer mantissa bits: differences are counted in its last place."""
    return min((a, b), key=lambda name: FLOATS.get(name, (0, 99))[1])


def _fp8_table(exponent_bits: int, mantissa_bits: int, finite_only: bool) -> NDArray[np.float32]:
    """Return the numbers of all codes; finite_only: NaN is the largest code, there is no inf."""
    codes, top, ones = np.arange(256), (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
    exponent, mantissa = codes >> mantissa_bits & top, codes & ones
    whole = np.where(exponent > 0, mantissa + ones + 1, mantissa)
    table = np.ldexp(whole, np.maximum(exponent, 1) - (top >> 1) - mantissa_bits)
    if finite_only:
        table[(exponent == top) & (mantissa == ones)] = np.nan
    else:
        table[exponent == top] = np.where(mantissa[exponent == top], np.nan, np.inf)
    return np.where(codes & 0x80, -table, table).astype(np.float32)


_FP8 = {"F8_E4M3": _fp8_table(4, 3, True), "F8_E5M2": _fp8_table(5, 2, False)}


def json_number(value: float) -> float | str:
    """Return a number as JSON holds it: text for what is not finite."""
    return float(value) if math.isfinite(value) else str(float(value))


# --- safetensors files ---------------------------------------------------------------------------

MAX_HEADER = 100_000_000  # bytes; the format's own limit
COPY = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a DriftError that names the file."""
    try:
        yield
    except OSError as error:
        raise DriftError(f"cannot write {path}: {error.strerror or error}") from None


class TensorWriter:
    """Appends tensors to one file; `close` makes it complete."""

    def __init__(self, path: Path):
        self.path = path
        self.data_path = path.with_name(f".{path.name}.data")
        with writing(path):
            self.data = self.data_path.open("wb")
        self.entries: dict[str, dict[str, Any]] = {}
        self.position = 0

    def add(self, name: str, bits: NDArray, dtype: str) -> None:
        """Write a tensor under a name not used before."""
        if name in self.entries:
            raise ValueError(f"{name} is in {self.path} already")
        bits = np.asarray(bits, DTYPES[dtype][0], order="C")
        with writing(self.path):  # not tofile: of a signal in it NumPy makes a TypeError
            self.data.write(bits.reshape(-1).view(np.uint8).data)
        end = self.position + bits.nbytes
        offsets = [self.position, end]
        self.entries[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": offsets}
        self.position = end

    def close(self) -> None:
        """Write header and data to the final file."""
        header = json.dumps(self.entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with writing(self.path):
            self.data.close()
            with self.path.open("wb") as file, self.data_path.open("rb") as data:
                file.write(len(header).to_bytes(8, "little") + header)
                shutil.copyfileobj(data, file, COPY)
            self.data_path.unlink()


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile(Mapping[str, NDArray]):
    """The tensors of a file by name, as arrays of bits mapped from it.

    Raises: DriftError, naming the file, for one that is no whole safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.entries, self.offset = self._header()
            self._bytes = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DriftError(f"{path} is no whole safetensors file: {reason}") from None

    def dtype(self, name: str) -> str:
        """Return the dtype's name in the format (F32, BF16, ...)."""
        return self.entries[name].dtype

    def _header(self) -> tuple[dict[str, Entry], int]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_HEADER):
                raise ValueError("its header ends beyond it")
            header = files.json_value(file.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(name, entry) for name, entry in header.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                raise ValueError(f"tensor {name[:40]} does not follow the one before")
            end = entry.end
        if end != size - 8 - length:
            raise ValueError(f"its tensors have {end} bytes of {size - 8 - length}")
        return entries, 8 + length

    def __getitem__(self, name: str) -> NDArray:
        entry = self.entries[name]
        piece = self._bytes[self.offset + entry.start : self.offset + entry.end]
        return piece.view(np.ndarray).view(DTYPES[entry.dtype][0]).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _entry(name: str, entry: Any) -> Entry:
    """Return what the header says of a tensor. Raises: ValueError, KeyError or TypeError."""
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end)):
        raise ValueError(f"tensor {name[:40]} has a size that is none")
    found = Entry(entry["dtype"], tuple(shape), start, end)
    expected = math.prod(shape) * np.dtype(DTYPES[found.dtype][0]).itemsize
    if end - start != expected:
        raise ValueError(f"tensor {name[:40]} has {end - start} bytes, not {expected}")
    return found


def file_hash(path: Path) -> str:
    """Return the xxh3_128 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON through a file beside it, so that a kill leaves the old one or the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    with writing(path):
        temp.write_text(text, encoding="utf-8")
        os.replace(temp, path)
