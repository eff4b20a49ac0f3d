"""The folder of a record: written as a stream, complete or absent; read by NumPy alone.

    A.drift/
        manifest.json               format, version, size and hash of every file below; written last
        record.json                 environment, model and weights, run settings, prompts, tables
        case_0000.json              one prompt: per step the chosen tokens, margins, top-k logits
        case_0000.safetensors       per step: hashes, shapes, statistics, samples, logits, rows
        values_0000.safetensors     per step and op the whole tensor, with --tensors

docs/drift.md describes every field.
"""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.errors import DriftError
from xtrain.drift.record_arrays import COLUMNS, MAX_DIMS, check_arrays, check_contents
from xtrain.drift.record_fields import (
    FORMAT,
    READABLE,
    VERSION,
    check_case,
    check_formulas,
    check_record,
    damaged,
    read_json,
)
from xtrain.drift.storage import TensorFile, TensorWriter, file_hash, write_json, writing
from xtrain.drift.temporary import TemporaryFolder
from xtrain.drift.values import DTYPES, to_float64

SMALL = 4096  # numbers of a result that is kept whole
ROOM = 4 << 20  # bytes of such results in all steps of a prompt
NOTHING = np.empty(0, np.uint8)
# what a file of a record is called; others in its folder are none of it
OURS = re.compile(r"record\.json|case_\d+\.(json|safetensors)|values_\d+\.safetensors")


class OpKey(NamedTuple):
    """What an op is called."""

    path: str  # of the module that calls it; "" is the model itself
    op: str  # "aten.mm"; of several results the later ones are "aten.native_layer_norm.1"
    dtype: str  # as in safetensors


class Formula(NamedTuple):
    """What an op computes from."""

    operands: tuple[int, ...]  # rows of the table, or INPUT, UNKNOWN, FIRST_WEIGHT and below
    arguments: str  # the other numbers of the formula: "other=0.5"


Table = tuple[tuple[OpKey, ...], tuple[Formula, ...] | None]  # None: of blocks, or not recorded


@dataclass(frozen=True, eq=False)
class Columns:
    """One array per property, a row per op or per block, in graph order."""

    hash: NDArray[np.uint8]  # [n, 16]
    whole: NDArray[np.uint8]  # [n, 16], of the tensor with all rows of the batch
    shape: NDArray[np.int64]  # [n, MAX_DIMS], -1 where there is no dimension; of this prompt's part
    whole_shape: NDArray[np.int64]
    statistics: NDArray[np.float64]  # [n, len(STATISTICS)]
    samples: NDArray[np.float64]  # [n, NUM_SAMPLES]


class RecordWriter:
    """Writes into a folder beside `path`, which takes that name when everything is there."""

    def __init__(self, path: Path, *, overwrite: bool = False):
        self.path = path
        check_free(path, overwrite=overwrite)
        self.tables: dict[Table, int] = {}
        with writing(path):
            self.folder = TemporaryFolder(path)
        self.temp = self.folder.path

    def table(self, table: Table) -> int:
        """Return the number of a list of ops; equal lists are kept once."""
        return self.tables.setdefault(table, len(self.tables))

    def close(self, contents: dict[str, Any]) -> None:
        """Write record.json and the manifest, and give the folder its name."""
        tables = [
            [
                [*key, *formula]
                for key, formula in zip(keys, formulas or [()] * len(keys), strict=True)
            ]
            for keys, formulas in self.tables
        ]
        record = {"format": FORMAT, "version": VERSION, **contents, "tables": tables}
        write_json(self.temp / "record.json", record)
        files = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}
            for path in sorted(self.temp.iterdir())
        }
        manifest = {"format": FORMAT, "version": VERSION, "files": files}
        write_json(self.temp / "manifest.json", manifest)
        with writing(self.path):
            old = self.temp.with_name(f"{self.temp.name}-old")
            if self.path.exists():
                os.rename(self.path, old)  # to remove it first would take a moment with neither
            os.rename(self.temp, self.path)
            shutil.rmtree(old, ignore_errors=True)
        self.folder.release()

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.temp, ignore_errors=True)
        self.folder.release()


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise DriftError if a record may not be written to path."""
    if not path.exists():
        return
    if not overwrite:
        raise DriftError(f"{path} exists; choose another name, or --overwrite a record")
    # A checkpoint has a manifest.json too.
    if not (path / "record.json").is_file() or not (path / "manifest.json").is_file():
        raise DriftError(f"{path} exists; it is no record and stays")
    others = [p.name for p in sorted(path.iterdir()) if not _is_ours(p.name)]
    if others:
        raise DriftError(
            f"{path} holds {others[0]!r}, which is no part of a record and would be lost; move it "
            "elsewhere, or choose another name"
        )


def _is_ours(name: str) -> bool:
    return name == "manifest.json" or OURS.fullmatch(name) is not None


class CaseWriter:
    """The files of one prompt; the arrays of a step go to the disk with the step."""

    def __init__(self, writer: RecordWriter, number: int, *, values: bool):
        self.writer = writer
        self.name = f"case_{number:04d}"
        self.arrays = TensorWriter(writer.temp / f"{self.name}.safetensors")
        self.values = None
        if values:
            self.values = TensorWriter(writer.temp / f"values_{number:04d}.safetensors")
        self.steps: list[dict[str, Any]] = []
        self.room = ROOM
        self.small: list[tuple[int, NDArray]] = []  # of the step under way: row, bits

    def add_value(self, index: int, bits: NDArray, dtype: str) -> None:
        """Keep the whole tensor of an op of the step under way, if it is small or all are kept."""
        if self.values is not None:
            self.values.add(f"step_{len(self.steps):04d}/{index:05d}", bits, dtype)
        elif bits.size <= SMALL and bits.ndim <= MAX_DIMS and bits.nbytes <= self.room:
            self.room -= bits.nbytes
            self.small.append((index, bits.reshape(-1).view(np.uint8).copy()))

    def add_rows(self, block: int, bits: NDArray, dtype: str) -> None:
        """Keep the rows of a block's output, in the step under way."""
        self.arrays.add(f"step_{len(self.steps):04d}/rows/{block:04d}", bits, dtype)

    def add_step(
        self,
        step: dict[str, Any],
        columns: dict[str, tuple[Table, Columns]],
        logits: tuple[NDArray, str],
    ) -> None:
        """Write one forward: "ops" and "blocks" in columns, logits [positions, V]."""
        prefix = f"step_{len(self.steps):04d}"
        for kind, (table, values) in columns.items():
            step[f"{kind}_table"] = self.writer.table(table)
            for name, (dtype, _) in COLUMNS.items():
                self.arrays.add(f"{prefix}/{kind}/{name}", getattr(values, name), dtype)
        rows, bits = [row for row, _ in self.small], [bits for _, bits in self.small]
        self.arrays.add(f"{prefix}/small/rows", np.array(rows, np.int64), "I64")
        self.arrays.add(f"{prefix}/small/bits", np.concatenate([*bits, NOTHING]), "U8")
        self.small = []
        self.arrays.add(f"{prefix}/logits", *logits)
        self.steps.append(step)

    def close(self, text: str | None) -> None:
        """Finish the prompt."""
        self.arrays.close()
        if self.values is not None:
            self.values.close()
        contents = {"text": text, "steps": self.steps}
        write_json(self.writer.temp / f"{self.name}.json", contents)


@dataclass(frozen=True, eq=False)
class Step:
    """One forward of one prompt, read lazily."""

    record: Record
    case: Case
    number: int
    info: dict[str, Any]

    @property
    def prefix(self) -> str:
        """What the names of its arrays start with."""
        return f"step_{self.number:04d}"

    @property
    def tokens(self) -> list[int]:
        """The chosen token of each recorded position."""
        return self.info["tokens"]

    def keys(self, kind: str = "ops") -> tuple[OpKey, ...]:
        """Return the ops, or the "blocks", in graph order."""
        return self.record.tables[self.info[f"{kind}_table"]]

    def formulas(self) -> tuple[Formula, ...] | None:
        """Return what the ops compute from, None for a record of version 1."""
        return self.record.formulas[self.info["ops_table"]]

    def columns(self, kind: str = "ops") -> Columns:
        """Return what is known of them, row by row."""
        arrays = self.case.arrays
        return Columns(**{name: arrays[f"{self.prefix}/{kind}/{name}"] for name in COLUMNS})

    def logits(self) -> tuple[NDArray, str]:
        """Return (bits [positions, V], dtype)."""
        name = f"{self.prefix}/logits"
        return self.case.arrays[name], self.case.arrays.dtype(name)

    def logits_float64(self) -> NDArray[np.float64]:
        """Return the logits [positions, V], exactly."""
        return to_float64(*self.logits())

    def rows(self, block: int) -> tuple[NDArray, str]:
        """Return (bits [positions, D], dtype) of a block's output where the logits were taken."""
        name = f"{self.prefix}/rows/{block:04d}"
        return self.case.arrays[name], self.case.arrays.dtype(name)

    def value(self, index: int) -> tuple[NDArray, str] | None:
        """Return (bits, dtype) of an op's whole result, None where it was not kept."""
        name = f"{self.prefix}/{index:05d}"
        values = self.case.values
        if values is not None:
            return (values[name], values.dtype(name)) if name in values else None
        return self.small.get(index)

    @cached_property
    def small(self) -> dict[int, tuple[NDArray, str]]:
        """(bits, dtype) of the small results that were kept whole, by row."""
        arrays, found, at = self.case.arrays, {}, 0
        if f"{self.prefix}/small/rows" not in arrays:
            return {}  # a record of version 1
        bits, shapes, keys = arrays[f"{self.prefix}/small/bits"], self.columns().shape, self.keys()
        for row in arrays[f"{self.prefix}/small/rows"].tolist():
            shape = tuple(int(n) for n in shapes[row] if n >= 0)
            dtype = DTYPES[keys[row].dtype][0]
            end = at + math.prod(shape) * np.dtype(dtype).itemsize
            found[row] = bits[at:end].copy().view(dtype).reshape(shape), keys[row].dtype
            at = end
        return found


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt and what followed it."""

    record: Record
    number: int

    @cached_property
    def _contents(self) -> dict[str, Any]:
        path = self.record.path / f"case_{self.number:04d}.json"
        contents = read_json(path)
        check_case(contents, path, self.record.contents, self.number)
        return contents

    @property
    def prompt(self) -> dict[str, Any]:
        """{"tokens": ids, "text": text or None}."""
        return self.record.contents["prompts"][self.number]

    @property
    def text(self) -> str | None:
        """What was generated, None where no tokenizer is known."""
        return self._contents["text"]

    @cached_property
    def steps(self) -> list[Step]:
        """The forwards in order."""
        infos = self._contents["steps"]
        return [Step(self.record, self, number, info) for number, info in enumerate(infos)]

    @cached_property
    def arrays(self) -> TensorFile:
        """Arrays of all steps."""
        return TensorFile(self.record.path / f"case_{self.number:04d}.safetensors")

    @cached_property
    def values(self) -> TensorFile | None:
        """Whole tensors, None without --tensors."""
        path = self.record.path / f"values_{self.number:04d}.safetensors"
        return TensorFile(path) if path.name in self.record.files else None


class Record:
    """A record on disk, opened; every byte is checked against the manifest first.

    Raises: DriftError saying what is missing, damaged or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self.files = _check(self.path)
        except OSError as error:
            raise DriftError(f"cannot read {error.filename or path}: {error.strerror}") from None
        self.contents = read_json(self.path / "record.json")
        check_record(self.contents, self.path / "record.json")
        self.environment: dict[str, Any] = self.contents["environment"]
        self.model: dict[str, Any] = self.contents["model"]
        self.run: dict[str, Any] = self.contents["run"]
        tables = self.contents["tables"]
        self.tables = [tuple(OpKey(*key[:3]) for key in table) for table in tables]
        self.formulas = [
            tuple(Formula(tuple(key[3]), key[4]) for key in table)
            if all(len(key) > 3 for key in table)
            else None
            for table in tables
        ]
        self.cases = [Case(self, i) for i in range(len(self.contents["prompts"]))]
        self._verified = False
        effect = self.contents["observer_effect"]
        if effect is not None:
            effect["max_abs"] = float(effect["max_abs"])  # "inf" in the file
        _check_names(self)
        for case in self.cases:
            check_arrays(case)
        check_formulas(self.contents, self.path / "record.json")

    def verify(self) -> None:
        """Compare, once, what the record says twice: all of its numbers are read.

        Raises: DriftError naming the first place that contradicts another.
        """
        if not self._verified:
            for case in self.cases:
                check_contents(case)
            self._verified = True

    def renamed(self, weight: Callable[[str], str], module: Callable[[str], str]) -> Record:
        """Return a view of the record in which weights and modules have other names."""
        view = copy.copy(self)
        view.model = {
            **self.model,
            "weights": [{**w, "name": weight(w["name"])} for w in self.model["weights"]],
            "blocks": [module(path) for path in self.model["blocks"]],
        }
        view.tables = [
            tuple(key._replace(path=module(key.path)) for key in table) for table in self.tables
        ]
        view.cases = [Case(view, case.number) for case in self.cases]
        return view

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r}, {len(self.cases)} prompts)"

    def steps(self) -> Iterator[Step]:
        """Yield every forward, prompt by prompt."""
        for case in self.cases:
            yield from case.steps


def temporary_record_path() -> tuple[Path, tempfile.TemporaryDirectory]:
    """Return a path for a record that lives as long as the second value."""
    folder = tempfile.TemporaryDirectory(prefix="xtrain-drift-")
    return Path(folder.name) / "record.drift", folder


def keep_alive(record: Record, folder: tempfile.TemporaryDirectory) -> None:
    """Delete a temporary folder when its record is collected."""
    weakref.finalize(record, folder.cleanup)


def _check(path: Path) -> dict[str, Any]:
    """Return the manifest's files after comparing every one of them."""
    if not path.is_dir():
        raise DriftError(f"there is no record {path}; `xtrain.drift record --out` makes one")
    if not (path / "manifest.json").is_file():
        raise DriftError(f"{path} is no complete record: manifest.json is missing")
    manifest = read_json(path / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DriftError(f"{path} is no record: manifest.json is not of format {FORMAT}")
    if manifest.get("version") not in READABLE:
        raise DriftError(
            f"{path} has schema version {repr(manifest.get('version'))[:40]}, this xtrain reads "
            f"{min(READABLE)} to {VERSION}; record again, or compare with the xtrain that wrote it"
        )
    files = manifest.get("files")
    try:
        for name, expected in files.items():  # type: ignore[union-attr]
            if OURS.fullmatch(name) is None:
                raise damaged(path / "manifest.json", f"no record has a file {name[:40]!r}")
            _check_file(path, name, expected["bytes"], expected["xxh3_128"])
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(path / "manifest.json", str(error)) from None
    return files  # type: ignore[return-value]


def _check_file(path: Path, name: str, size: Any, digest: Any) -> None:
    file = path / name
    if not file.is_file():
        raise DriftError(f"{path} is damaged: {name} is missing; record again")
    found = file.stat().st_size
    if found != size:
        raise DriftError(f"{file} has {found} bytes, not {str(size)[:40]}; record again")
    if file_hash(file) != digest:
        raise DriftError(f"{file} was changed after it was written; record again")


def _check_names(record: Record) -> None:
    """Raise DriftError unless the record's files are those that its prompts need, no other."""
    needed = {"record.json"}
    for number in range(len(record.cases)):
        needed |= {f"case_{number:04d}.json", f"case_{number:04d}.safetensors"}
        if record.run["tensors"]:
            needed.add(f"values_{number:04d}.safetensors")
    if missing := needed - record.files.keys():
        raise damaged(record.path, f"{min(missing)} is not in manifest.json")
    there = {path.name for path in record.path.iterdir() if OURS.fullmatch(path.name)}
    if extra := there - needed:
        raise damaged(record.path, f"record.json needs no {min(extra)}")
