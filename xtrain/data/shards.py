"""Token shards: .bin files that hold ids instead of text.

raw           uint16 ids from the first byte to the last, as nanoGPT's prepare scripts write them
with header   256 int32: magic, version, number of ids, zeros; then the ids. Magic 20240520 version
              1: uint16 (llm.c's GPT-2 files, modded-nanogpt's); 20240801 version 7: uint32 (llm.c's
              Llama 3 files)

Everything is little-endian. Source of the layouts: karpathy/llm.c dev/data/data_common.py (MIT).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xtrain.data.errors import DataError, open_binary

_HEADER_INTS = 256
_HEADER_BYTES = 4 * _HEADER_INTS
# magic -> (version, dtype of the ids)
_FORMATS: dict[int, tuple[int, str]] = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_SCAN_TOKENS = 1 << 21


@dataclass(frozen=True)
class Shard:
    """Where the ids of one .bin lie, and of what type they are."""

    path: str
    dtype: np.dtype
    offset: int  # bytes before the first id
    num_tokens: int


def open_shard(path: str) -> Shard:
    """Read the header, if there is one, and check it against the size of the file.

    Raises:   DataError for an empty or truncated file, a wrong magic number or version.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(_HEADER_BYTES)[: size // 4 * 4], dtype="<i4")
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    magic = int(header[0]) if header.size else 0
    if magic in _FORMATS:
        return _with_header(path, header, size)
    # 253 zeros in a row after three numbers: a header, but not one of ours. Ids do not look so.
    if header.size == _HEADER_INTS and magic != 0 and not header[3:].any():
        known = ", ".join(f"{m} version {v}" for m, (v, _) in _FORMATS.items())
        raise DataError(f"{path}: wrong magic number {magic} for a token shard (known: {known})")
    if size % 2:
        raise DataError(
            f"{path}: {size} bytes is no whole number of uint16 ids; truncated, or no token shard"
        )
    return Shard(path, np.dtype("<u2"), 0, size // 2)


def _with_header(path: str, header: npt.NDArray[np.int32], size: int) -> Shard:
    if header.size < _HEADER_INTS:
        raise DataError(f"{path}: truncated, {size} bytes for a header of {_HEADER_BYTES}")
    magic, version, count = (int(value) for value in header[:3])
    known_version, dtype_name = _FORMATS[magic]
    if version != known_version:
        raise DataError(
            f"{path}: version {version} of magic number {magic} is not known"
            f" (version {known_version} is)"
        )
    dtype = np.dtype(dtype_name)
    expected = _HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != expected:
        state = "truncated" if size < expected else "damaged"
        raise DataError(
            f"{path}: {state}, the header says {count} ids ({expected} bytes),"
            f" the file has {size} bytes"
        )
    if count == 0:
        raise DataError(f"{path} is empty (its header says 0 ids)")
    return Shard(path, dtype, _HEADER_BYTES, count)


def read_ids(shard: Shard) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Yield the ids of a shard block by block."""
    with open_binary(shard.path) as file:
        file.seek(shard.offset)
        left = shard.num_tokens
        while left:
            ids = np.fromfile(file, dtype=shard.dtype, count=min(left, _SCAN_TOKENS))
            if not ids.size:
                raise DataError(f"{shard.path}: ended {left} ids early; did it change just now?")
            left -= ids.size
            yield ids


def check_range(shard: Shard, vocab_size: int, owner: str, advance: Callable[[int], None]) -> None:
    """Raise a DataError naming the first id of a shard that is not below vocab_size.

    Args:     owner: whose vocabulary it is, for the message.
              advance: told the bytes read since the last call, for a progress bar.
    """
    # A vocabulary that the ids' type cannot spell is not the one that the shard was made with.
    if vocab_size - 1 > np.iinfo(shard.dtype).max:
        bits = 8 * shard.dtype.itemsize
        raise DataError(
            f"{shard.path} stores {bits}-bit ids (at most {1 << bits} tokens), but {owner} has a"
            f" vocabulary of {vocab_size}: it cannot have made this shard"
        )
    start = 0
    for ids in read_ids(shard):
        try:
            check_ids(ids, vocab_size, owner, shard.path, start)
        except DataError as error:
            hint = "name the shard's own tokenizer.json, or ids:N for N bare ids"
            raise DataError(f"{error}; {hint}") from None
        start += ids.size
        advance(ids.nbytes)


def check_ids(ids: npt.NDArray, vocab_size: int, owner: str, where: str, start: int = 0) -> None:
    """Raise a DataError naming the first of ids that is not below vocab_size and its position."""
    if ids.size and int(ids.max()) >= vocab_size:
        index = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"{where}: id {int(ids[index])} at position {start + index} is outside {owner}'s"
            f" vocabulary of {vocab_size} (ids 0 to {vocab_size - 1})"
        )
