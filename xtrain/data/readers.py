"""What sources hold, streamed, with errors that name the place: documents of text, or token ids.

A document is one text file, one line of a .jsonl, one row of a .parquet or of a dataset. A file is
read in blocks, so a document may arrive in several pieces and memory stays bounded.

A token shard is a .bin file, everything in it little-endian:

raw           uint16 ids from the first byte to the last, as nanoGPT's prepare scripts write them
with header   256 int32: magic, version, number of ids, zeros; then the ids. Magic 20240520 version
              1: uint16 (llm.c's GPT-2 files, modded-nanogpt's); 20240801 version 7: uint32 (llm.c's
              Llama 3 files). Source: karpathy/llm.c dev/data/data_common.py (MIT)
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xtrain.data.errors import DataError, open_binary, os_errors_as_data_errors
from xtrain.data.sources import HF_PREFIX, Source
from xtrain.files import why

_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 1024
ERROR_POLICIES = ("strict", "replace")

Advance = Callable[[int], None]


class Piece(NamedTuple):
    """A run of a document's text, and whether the document ends with it."""

    text: str
    is_last: bool


class Digest(NamedTuple):
    """SHA-256 of a source's content, and its size in bytes (a dataset's: of its text)."""

    sha256: bytes
    num_bytes: int


def read_pieces(source: Source, field: str, errors: str, advance: Advance) -> Iterator[Piece]:
    """Yield the documents of a source, piece by piece.

    Args:     field: the key or column that holds the text (jsonl, parquet, hf).
              errors: "strict" raises on what is not UTF-8, "replace" puts U+FFFD there.
              advance: told the bytes consumed since the last call, for a progress bar.
    Raises:   DataError naming file and byte offset, line or row.
    """
    if source.kind == "text":
        return _read_text(source.path, errors, advance)
    if source.kind == "jsonl":
        return _read_jsonl(source.path, field, errors, advance)
    if source.kind == "parquet":
        return _read_parquet(source.path, field, errors, advance)
    return _read_hf(source, field, errors, advance)


def digest(source: Source, field: str, advance: Advance) -> Digest:
    """Return the hash of a source's content; the text column alone for a dataset of the hub."""
    if source.kind == "hf":
        return _digest_hf(source, field, advance)
    sha256, size = hashlib.sha256(), 0
    with open_binary(source.path) as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            size += len(block)
            advance(len(block))
    return Digest(sha256.digest(), size)


def opened(source: Source) -> Source:
    """Return the source with its dataset loaded, once for all its later readings; files as is."""
    if source.kind != "hf":
        return source
    return replace(source, dataset=_load_hf(source.path))


def stamp(source: Source) -> tuple[int, int] | None:
    """Return (size, mtime in ns) of a file, to notice one that changes while it is read."""
    if source.kind == "hf":
        return None
    with os_errors_as_data_errors(source.path):
        status = os.stat(source.path)
    return status.st_size, status.st_mtime_ns


def _read_text(path: str, errors: str, advance: Advance) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    position = 0
    with open_binary(path) as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            start = position - len(decoder.getstate()[0])  # bytes of a cut sequence wait there
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start + error.start, error) from None
            position += len(block)
            advance(len(block))
            yield Piece(text, not block)
            if not block:
                return


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{where}: not UTF-8 at byte offset {offset} (0x{byte:02x}: {error.reason});"
        ' convert the file, or pass errors="replace" (--errors replace) to read U+FFFD there'
    )


def _read_jsonl(path: str, field: str, errors: str, advance: Advance) -> Iterator[Piece]:
    offset = 0
    with open_binary(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise _not_utf8(where, offset + error.start, error) from None
            offset += len(raw)
            if number == 1:
                line = line.removeprefix("\ufeff")  # a byte order mark, which JSON forbids
            if line.strip():
                yield Piece(_valid(_json_text(line, field, where), where, errors), True)
            advance(len(raw))


def _json_text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({why(error)})") from None
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object but {_json_type(record)}")
    if field not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(
            f"{where}: no field {field!r} (fields here: {names}); choose one with --field"
        )
    if not isinstance(text := record[field], str):
        raise DataError(f"{where}: field {field!r} is not a string but {_json_type(text)}")
    return text


def _json_type(value: object) -> str:
    names: dict[type, str] = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _valid(text: str, where: str, errors: str) -> str:
    """Refuse or replace lone surrogates: JSON can spell them, UTF-8 cannot."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "replace":
            return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        code = ord(text[error.start])
        raise DataError(
            f"{where}: lone surrogate U+{code:04X} at character {error.start}, not valid Unicode;"
            ' pass errors="replace" (--errors replace) to read U+FFFD there'
        ) from None
    return text


def _read_parquet(path: str, field: str, errors: str, advance: Advance) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: reading .parquet needs pyarrow: pip install 'xtrain[parquet]'"
        ) from None
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            table = pyarrow.parquet.ParquetFile(file)
            columns = table.schema_arrow.names
            if field not in columns:
                raise DataError(_no_column(path, field, columns))
            rows, told = 0, 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield Piece(_row_text(text, path, rows, field, errors), True)
                    rows += 1
                share = size * rows // max(table.metadata.num_rows, 1)
                advance(share - told)
                told = share
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not a readable .parquet ({why(error)})") from None


def _no_column(where: str, field: str, columns: list[str]) -> str:
    names = ", ".join(map(repr, columns[:8])) or "none"
    return f"{where}: no column {field!r} (columns: {names}); choose one with --field"


def _row_text(text: object, where: str, row: int, field: str, errors: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{where}: row {row}: {field!r} is not a string but {_json_type(text)}")
    return _valid(text, f"{where}: row {row}", errors)


def _load_hf(spec: str) -> Any:
    """Open hf:NAME[:SPLIT] or hf:NAME:CONFIG:SPLIT: a dataset of the hub or a local folder."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{spec} needs the datasets package: pip install 'xtrain[hf]'") from None
    parts = spec.removeprefix(HF_PREFIX).split(":")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise DataError(f"{spec}: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    name, split = os.path.expanduser(parts[0]), parts[-1] if len(parts) > 1 else "train"
    config = parts[1] if len(parts) == 3 else None
    saved = any(os.path.isfile(os.path.join(name, f)) for f in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            return datasets.load_dataset(name, config, split=split)
        dataset = datasets.load_from_disk(name)
    except Exception as error:  # the package raises its own, the network's and the system's
        raise DataError(f"cannot load {spec}: {why(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(f"{spec}: no split {split!r} (splits: {', '.join(dataset)})")
        return dataset[split]
    if len(parts) > 1 and str(dataset.split) != split:
        raise DataError(f"{spec}: the folder holds the one split {str(dataset.split)!r}")
    return dataset


def _hf_texts(source: Source, field: str) -> Iterator[object]:
    """Yield what each row holds where its text should be."""
    spec, dataset = source.path, source.dataset
    if field not in dataset.column_names:
        raise DataError(_no_column(spec, field, dataset.column_names))
    for batch in dataset.select_columns([field]).iter(batch_size=_BATCH_ROWS):
        yield from batch[field]


def _read_hf(source: Source, field: str, errors: str, advance: Advance) -> Iterator[Piece]:
    for row, value in enumerate(_hf_texts(source, field)):
        text = _row_text(value, source.path, row, field, errors)
        yield Piece(text, True)
        advance(len(text.encode()))


def _digest_hf(source: Source, field: str, advance: Advance) -> Digest:
    sha256, size = hashlib.sha256(), 0
    for row, value in enumerate(_hf_texts(source, field)):
        if not isinstance(value, str):
            _row_text(value, source.path, row, field, "strict")
        data = str(value).encode("utf-8", "surrogatepass")
        sha256.update(len(data).to_bytes(8, "little"))
        sha256.update(data)
        size += len(data)
        advance(len(data))
    return Digest(sha256.digest(), size)


# --- token shards --------------------------------------------------------------------------------

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
