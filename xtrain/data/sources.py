"""From what the user names (files, folders, globs, hf:NAME, or nothing) to a list of sources.

The list depends on names and contents alone: folders are walked in the order of their relative
paths, so two machines with the same files build the same corpus. What a folder or a glob holds
besides data is left out and counted, never skipped in silence; what is named outright must fit.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtrain.data.errors import DataError, open_binary, os_errors_as_data_errors

# Prose, markup and source code. Not here on purpose: .json (one document or a million? as .jsonl
# the answer is in the file), .csv and .tsv (records, not text), anything compressed.
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .html .htm .xml .css .toml .yaml .yml .ini .cfg .sql .sh"
    " .py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .js .mjs .jsx .ts .tsx .java .go .rs .rb .php"
    " .pl .lua .jl .r .swift .kt .scala .hs .ml".split()
)
KINDS = dict.fromkeys(TEXT_SUFFIXES, "text") | {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".bin": "shard",
}
HF_PREFIX = "hf:"
_SNIFF_BYTES = 8192

# Folders of the standard library that hold tests or other people's packages, and what an
# installation generates or adds (config-3.11-x86_64-linux-gnu/, _sysconfigdata_....py).
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_STDLIB_SKIPPED_NAMES = ("config-", "_sysconfigdata", "sitecustomize.py", "usercustomize.py")


@dataclass(frozen=True)
class Source:
    """One file, or one dataset in the form of the Hugging Face hub."""

    kind: str  # "text" | "jsonl" | "parquet" | "shard" | "hf"
    path: str  # for hf, what the user wrote: hf:NAME:SPLIT
    dataset: Any = field(default=None, compare=False, repr=False)  # for hf, once opened


@dataclass
class Listing:
    """The sources in reading order, a label for people, and why other entries were left out."""

    label: str
    sources: list[Source] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    errors: str | None = None  # overrides the caller's policy for text that is not UTF-8

    @property
    def are_shards(self) -> bool:
        """Whether the sources are token shards; a list never mixes them with documents."""
        return bool(self.sources) and self.sources[0].kind == "shard"


def list_sources(data: Sequence[str | os.PathLike[str]] | None) -> Listing:
    """Return the sources that data names; None is the standard library of the running Python.

    Raises:   DataError for a name without a file, an unknown suffix, a folder or glob without
              data, an unreadable folder, or token shards beside documents.
    """
    if data is None:
        return list_stdlib()
    if isinstance(data, str | os.PathLike):
        data = [data]
    names = [os.fspath(item) for item in data]
    if not names:
        raise DataError("no data named: give files, folders, globs or hf:NAME")
    listing = Listing(
        label=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    )
    for name in names:
        found = list(_expand(name, listing.left_out))
        if not found:
            raise DataError(_nothing_found(name))
        listing.sources.extend(found)
    _drop_repeats(listing)
    kinds = {source.kind for source in listing.sources}
    if "shard" in kinds and len(kinds) > 1:
        shard = next(s.path for s in listing.sources if s.kind == "shard")
        other = next(s.path for s in listing.sources if s.kind != "shard")
        raise DataError(
            f"cannot mix token shards with text: {shard} holds token ids, {other} holds text;"
            " name one kind only"
        )
    return listing


def list_stdlib(root: Path | None = None) -> Listing:
    """Return the .py files of the running Python's standard library, tests left out.

    Few are not UTF-8 (none in CPython 3.11 to 3.13), so such bytes are replaced, never an error.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    version = ".".join(map(str, sys.version_info[:3]))
    listing = Listing(label=f"standard library of Python {version}", errors="replace")
    for path in _walk(root, Counter(), _STDLIB_SKIPPED_FOLDERS) if root.is_dir() else ():
        parts = os.path.relpath(path, root).split(os.sep)
        if path.endswith(".py") and not any(p.startswith(_STDLIB_SKIPPED_NAMES) for p in parts):
            listing.sources.append(Source("text", path))
    if not listing.sources:
        raise DataError(f"no Python source below {root} (a zipped or stripped Python?): name data")
    return listing


def _expand(name: str, left_out: Counter[str]) -> Iterator[Source]:
    """Yield the sources of one name, in order."""
    if name.startswith(HF_PREFIX):
        yield Source("hf", name)
        return
    path = os.path.expanduser(name)
    # A file whose own name holds [ or * wins over its reading as a pattern.
    if not os.path.lexists(path) and glob.has_magic(path):
        for match in sorted(set(_matches("", path.split("/")))):
            if os.path.isdir(match):
                yield from _folder(match, left_out)
            elif (source := _classify(match, left_out)) is not None:
                yield source
        return
    with os_errors_as_data_errors(name):
        os.stat(path)
    if os.path.isdir(path):
        yield from _folder(path, left_out)
    elif not os.path.isfile(path):
        raise DataError(f"cannot read {name}: neither a file nor a folder")
    elif not (suffix := _suffix(path)):
        yield Source("text", path)  # named outright, so README or LICENSE is meant
    elif suffix in KINDS:
        yield Source(KINDS[suffix], path)
    else:
        raise DataError(_unknown_suffix(name))


def _matches(folder: str, parts: list[str]) -> Iterator[str]:
    """Yield what a pattern, split at its slashes, matches below folder; unsorted, with repeats.

    As glob.glob does, but `**` follows no links to folders: with two links to a folder above them
    glob would walk 2^40 paths.
    """
    if not parts:
        if folder:
            yield folder
        return
    first, rest = parts[0], parts[1:]
    if not glob.has_magic(first):
        path = os.path.join(folder, first) or "/"  # empty before an absolute pattern's first slash
        if os.path.lexists(path):
            yield from _matches(path, rest)
        return
    if first == "**":
        yield from _matches(folder, rest)
    for name, is_folder, is_link in _entries(folder):
        path = os.path.join(folder, name)
        if name.startswith(".") and not first.startswith("."):
            continue
        if first == "**":
            if is_folder and not is_link:
                yield from _matches(path, parts)
            elif not is_folder and not rest:
                yield path
        elif fnmatch.fnmatchcase(name, first) and (is_folder or not rest):
            yield from _matches(path, rest)


def _entries(folder: str) -> list[tuple[str, bool, bool]]:
    """Return (name, is a folder, is a link) of what a folder holds; none if it cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            return [(entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries]
    except OSError:
        return []


def _folder(root: str, left_out: Counter[str]) -> Iterator[Source]:
    """Yield the data of a folder: its documents or, where there are none, its token shards.

    A stray .bin beside text is a binary like any other, so it is left out there.
    """
    paths = _walk(Path(root), left_out, frozenset({"__pycache__"}))
    found = [s for s in (_classify(path, left_out) for path in paths) if s is not None]
    documents = [source for source in found if source.kind != "shard"]
    if documents:
        left_out["binary"] += len(found) - len(documents)
    yield from documents or found


def _walk(root: Path, left_out: Counter[str], skipped_folders: frozenset[str]) -> list[str]:
    """Return the regular files below root, sorted by relative path; links to folders stay out."""

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    paths = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        hidden = [name for name in subfolders + files if name.startswith(".")]
        left_out["hidden"] += len(hidden)
        subfolders[:] = [
            name for name in subfolders if name not in skipped_folders and name[0] != "."
        ]
        for name in files:
            path = os.path.join(folder, name)
            if name.startswith("."):
                continue
            if os.path.isfile(path):
                paths.append(path)
            else:
                left_out["not a file"] += 1
    return sorted(paths, key=lambda path: os.path.relpath(path, root).split(os.sep))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _classify(path: str, left_out: Counter[str]) -> Source | None:
    """Return the source of a file met in a folder or by a glob, or count why it is none."""
    kind = KINDS.get(_suffix(path))
    if kind is None:
        left_out["not text"] += 1
        return None
    if kind == "text":
        with open_binary(path) as file:
            if b"\0" in file.read(_SNIFF_BYTES):
                left_out["binary"] += 1
                return None
    return Source(kind, path)


def _drop_repeats(listing: Listing) -> None:
    """Keep the first of each file that several names reach."""
    unique: dict[str, Source] = {}
    for source in listing.sources:
        key = source.path if source.kind == "hf" else os.path.realpath(source.path)
        if key in unique:
            listing.left_out["named twice"] += 1
        unique.setdefault(key, source)
    listing.sources[:] = unique.values()


def _unknown_suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1]
    hint = {
        ".json": "one JSON object per line is read as .jsonl",
        ".arrow": f"a folder saved by the datasets package is read as {HF_PREFIX}FOLDER",
    }.get(suffix.lower(), "plain text is read as .txt")
    return (
        f"unknown suffix {suffix!r} of {name}: known are text ({', '.join(sorted(TEXT_SUFFIXES))}),"
        f" .jsonl, .ndjson, .parquet and .bin; {hint}"
    )


def _nothing_found(name: str) -> str:
    if not os.path.isdir(os.path.expanduser(name)):
        return f"the pattern {name} matches no data"
    hint = ""
    if any(Path(os.path.expanduser(name)).rglob("*.arrow")):
        hint = f"; a folder saved by the datasets package is read as {HF_PREFIX}{name}"
    return f"the folder {name} holds no text, .jsonl, .parquet or .bin files{hint}"
