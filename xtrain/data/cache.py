"""The memory-mapped token cache: files that are complete or absent, each written by one process.

Two processes that need the same file meet at its lock: one writes, the other then reads. Where a
file system has no locks, both write their own temporary file and the later rename wins, with the
same content.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from xtrain.data.errors import DataError
from xtrain.files import json_value, open_locked, remove_stale, whole_file, why

FORMAT_VERSION = 1  # part of every key: raise it when the same content must give other ids
_MAGIC = "xtrain-tokens"
_HEADER_BYTES = 4096
_BLOCK_BYTES = 1 << 22

Ids = npt.NDArray[np.unsignedinteger]
T = TypeVar("T")
_log = logging.getLogger("xtrain.data")


def default_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/xtrain, or ~/.cache/xtrain."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "xtrain"


def made_once(
    path: Path,
    read: Callable[[bool], T | None],
    write: Callable[[BinaryIO], object],
    say: Callable[[str], None],
) -> T:
    """Return what read finds at path; write it first when it is absent or damaged.

    Args:     read: told whether to warn of damage; None where there is nothing usable.
              write: called at most once, with a file that becomes path when it is whole.
              say: told in one line that another process is at work.
    Raises:   DataError when the folder cannot be written; whatever write raises.
    """
    if (found := read(True)) is not None:
        return found
    with _writing(path, say):
        # by whoever held the lock before us; a damaged one has been reported
        if (found := read(False)) is None:
            with whole_file(path) as file:
                write(file)
            found = read(True)
    if found is None:
        raise DataError(f"the cache {path} vanished after it was written; name another folder")
    return found


def cached_tokens(
    folder: Path,
    key: str,
    dtype: np.dtype,
    build: Callable[[], Iterable[Ids]],
    say: Callable[[str], None],
) -> np.memmap:
    """Return the tokens stored under key, read-only and memory-mapped; build them when absent.

    build: yields arrays of dtype that, joined, are the tokens.
    """
    path = folder / f"{key}.tokens"
    return made_once(
        path,
        lambda warn: open_tokens(path, key, dtype, warn=warn),
        lambda file: _write_tokens(file, key, dtype, build()),
        say,
    )


def open_tokens(path: Path, key: str, dtype: np.dtype, *, warn: bool = True) -> np.memmap | None:
    """Map a file of the cache, or return None when it is absent or, with a warning, damaged."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
            checksum = _checksum(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read the token cache {path}: {why(error)}") from error
    meta = _parse_header(header)
    count = meta.get("num_tokens", 0)
    expected = _HEADER_BYTES + count * dtype.itemsize
    if meta.get("key") != key or meta.get("dtype") != dtype.str:
        problem = "its header is not intact"
    elif size != expected:
        problem = f"it has {size} bytes instead of {expected}"
    elif meta.get("tokens_crc32") != checksum:
        problem = "its checksum differs"
    else:
        return np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(count,))
    if warn:
        warn_damaged(path, problem)
    return None


def _checksum(file: BinaryIO) -> int:
    """Return the CRC-32 of the rest of a file, read in blocks: mapped pages would count as ours."""
    checksum = 0
    while block := file.read(_BLOCK_BYTES):
        checksum = zlib.crc32(block, checksum)
    return checksum


def warn_damaged(path: Path, problem: str) -> None:
    """Say that a file of the cache cannot be used and will be replaced."""
    _log.warning("the cache %s is damaged (%s): building it again", path, problem)


def _write_tokens(file: BinaryIO, key: str, dtype: np.dtype, arrays: Iterable[Ids]) -> None:
    file.write(bytes(_HEADER_BYTES))
    count = checksum = 0
    for ids in arrays:
        block = np.ascontiguousarray(ids, dtype=dtype).data
        file.write(block)
        checksum = zlib.crc32(block, checksum)
        count += ids.size
    if count == 0:
        raise DataError("the data are empty: no text in any document")
    file.seek(0)
    meta = {"key": key, "dtype": dtype.str, "num_tokens": count, "tokens_crc32": checksum}
    file.write(_header(meta))


def _header(meta: dict[str, Any]) -> bytes:
    """Return one line of JSON with its own checksum, padded to the header's size."""
    body = json.dumps({"magic": _MAGIC, **meta})
    line = json.dumps({"crc32": zlib.crc32(body.encode()), "meta": body}) + "\n"
    return line.encode().ljust(_HEADER_BYTES)


def _parse_header(header: bytes) -> dict[str, Any]:
    """Return the fields of a header, or none when it is not intact."""
    try:
        line = json_value(header)
        if line["crc32"] != zlib.crc32(line["meta"].encode()):
            return {}
        meta = json_value(line["meta"].encode())
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return meta if meta.get("magic") == _MAGIC else {}


@contextmanager
def _writing(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the right to write path: one process at a time, abandoned temporary files removed.

    Raises:   DataError for what the system refuses, such as a full disk or a read-only folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        lock_path = path.with_name(path.name + ".lock")
        lock = open_locked(lock_path, "ab", lambda: say(f"waiting for another process: {path}"))
        with lock:
            try:
                yield
            finally:
                lock_path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write the cache {path}: {why(error)};"
            " name a writable folder with space as cache_dir (or set XDG_CACHE_HOME)"
        ) from error
