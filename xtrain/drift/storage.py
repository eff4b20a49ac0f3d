"""safetensors files written as a stream and read by NumPy alone, bf16 included.

The format puts the header first, and its length is not known before the last tensor: the data go
to a file beside it and are copied behind the header at the end. Memory stays that of one tensor.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xtrain import files
from xtrain.drift.errors import DriftError
from xtrain.drift.values import DTYPES

MAX_HEADER = 100_000_000  # bytes; the format's own limit
COPY = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a DriftError that names the file."""
    try:
        yield
    except OSError as error:  # NumPy gives no number when the disk fills up in the middle
        raise DriftError(f"cannot write {path}: {error.strerror or error}") from None


class TensorWriter:
    """Appends tensors to one file; `close` makes it complete. Discarded on an exception."""

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
        with writing(self.path):
            bits.tofile(self.data)
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

    def discard(self) -> None:
        """Give up: leave no file."""
        self.data.close()
        self.data_path.unlink(missing_ok=True)


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
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(COPY):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON through a file beside it, so that a kill leaves the old one or the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    with writing(path):
        temp.write_text(text, encoding="utf-8")
        os.replace(temp, path)
