"""The format of a record: what its files hold, checked field by field, read by NumPy alone.

    A.drift/
        manifest.json               format, version, size and hash of every file below; written last
        record.json                 environment, model and weights, run settings, prompts, tables
        case_0000.json              one prompt: per step the chosen tokens, margins, top-k logits
        case_0000.safetensors       per step: hashes, shapes, statistics, samples, logits, rows
        values_0000.safetensors     per step and op the whole tensor, with --tensors

Each is declared once, and writer, reader and checks follow: a key of a JSON file in the tables
below, a setting in settings.Run, what is kept of every op and block as a field of Columns.

The manifest finds what was damaged by chance. A file that was edited together with its manifest
passes there, and is refused by the name of its field or tensor instead of failing somewhere in a
comparison. What a record says twice xtrain.drift.comparison.differences holds together.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain import files
from xtrain.drift.recording.tensors import (
    DTYPES,
    NUM_SAMPLES,
    STATISTICS,
    Fingerprint,
    TensorFile,
    file_hash,
    to_float64,
)
from xtrain.drift.settings import DriftError, Run
from xtrain.files import Form, is_count, is_object, is_text, listed, one_of, optional
from xtrain.settings import fits

FORMAT = "xtrain.drift"
VERSION = 2  # raised when an older reader could not read a newer record
READABLE = (1, 2)  # 1 has no operands and keeps no small result whole
# what an operand is that no op of the forward has computed; the next weight is one less
INPUT, UNKNOWN, FIRST_WEIGHT = -1, -2, -3
MAX_DIMS = 8
# what its files are called; others in its folder are none of it
OURS = re.compile(r"record\.json|case_\d+\.(json|safetensors)|values_\d+\.safetensors")


def damaged(path: Path, what: str) -> DriftError:
    """Return the error for a file of a record."""
    return DriftError(f"{path} is damaged: {what}; record again")


def read_json(path: Path) -> Any:
    """Return what a file holds. Raises: DriftError, naming the file, for one that is no JSON."""
    try:
        return files.json_file(path)
    except OSError as error:
        raise DriftError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None


def check_fields(value: Any, table: Mapping[str, Form], path: Path, prefix: str = "") -> None:
    """Raise DriftError, naming the field, unless value has the form of a table."""
    try:
        files.check_fields(value, table, prefix)
    except ValueError as error:
        raise damaged(path, str(error)) from None


# --- the JSON files ------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or the text for one that JSON has not."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**1000 or value in ("nan", "inf", "-inf")


def is_hash(value: Any) -> bool:
    """Return whether a value is one xxh3_128 or several, in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{32})+", value) is not None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 64  # whatever a model may take


def _is_rounded(value: Any) -> bool:
    return is_object(value) and set(value) <= set(DTYPES) and all(map(is_hash, value.values()))


def _is_key(value: Any) -> bool:
    """A row of a table of ops: path, op, dtype; and what it computes from."""
    if not isinstance(value, list) or len(value) not in (3, 5):
        return False
    fits = listed(is_text, 3)(value[:3]) and value[2] in DTYPES
    origins = listed(lambda origin: type(origin) is int and abs(origin) < 1 << 31)
    return fits and (len(value) == 3 or origins(value[3]) and is_text(value[4]))


WEIGHT: dict[str, Form] = {
    "name": is_text,
    "shape": listed(is_count),
    "dtype": one_of(DTYPES),
    "xxh3_128": is_hash,
    "rounded?": _is_rounded,  # older records lack it
    "samples": listed(is_number, NUM_SAMPLES),
}
RUN: dict[str, Form] = {
    item.name + "?" * item.metadata.get("later", False): fits(Run, item) for item in fields(Run)
}
RECORD: dict[str, Form] = {
    "format": one_of([FORMAT]),
    "version": lambda value: type(value) is int and value in READABLE,
    "environment": is_object,
    "model": {
        "kind": is_text,
        "blocks": listed(is_text),
        "weights": [WEIGHT],
        "checkpoint?": is_hash,  # of a folder that was cast
    },
    "run": RUN,
    "observer_effect": optional(is_object),
    "prompts": [
        {"tokens": optional(listed(_is_id)), "text": optional(is_text), "xxh3_128?": is_hash}
    ],
    "tables": lambda value: listed(listed(_is_key))(value) and bool(value),
}
EFFECT: dict[str, Form] = {"differs": lambda value: isinstance(value, bool), "max_abs": is_number}
CASE: dict[str, Form] = {
    "text": optional(is_text),
    "steps": [
        {
            "length": is_count,
            "tokens": lambda value: listed(_is_id)(value) and bool(value),
            "margin": listed(is_number),
            "top_ids": listed(listed(is_count)),
            "top_logits": listed(listed(is_number)),
            "text_end?": optional(is_count),
            "ops_table": is_count,
            "blocks_table": is_count,
        }
    ],
}


def _check_record(contents: Any, path: Path) -> None:
    """Raise DriftError, naming the field, unless record.json has its form."""
    check_fields(contents, RECORD, path)
    names = [weight["name"] for weight in contents["model"]["weights"]]
    if len(set(names)) < len(names):
        raise damaged(path, "model.weights has a name twice")
    if (effect := contents["observer_effect"]) is not None:
        check_fields(effect, EFFECT, path, "observer_effect.")
    if not contents["prompts"]:
        raise damaged(path, "prompts is []")
    for number, prompt in enumerate(contents["prompts"]):
        if contents["run"]["decode"] is not None and not prompt["tokens"]:
            raise damaged(path, f"prompts[{number}].tokens is {prompt['tokens']}")


def _check_formulas(contents: Mapping[str, Any], path: Path) -> None:
    """Raise DriftError unless ops compute from ops before them, and from weights that there are."""
    last = FIRST_WEIGHT - len(contents["model"]["weights"])
    for number, table in enumerate(contents["tables"]):
        for row, (*_, operands, _) in enumerate(key for key in table if len(key) > 3):
            if any(not last < origin < row for origin in operands):
                raise damaged(path, f"tables[{number}][{row}] computes from {operands}"[:80])


def _check_case(contents: Any, path: Path, record: Mapping[str, Any], number: int) -> None:
    """Raise DriftError, naming the field, unless case_NNNN.json fits record.json."""
    check_fields(contents, CASE, path)
    run, steps = record["run"], contents["steps"]
    expected = 1 if run["decode"] is None else run["num_tokens"]
    if len(steps) != expected:
        raise damaged(path, f"steps are {len(steps)}, not {expected}")
    for index, step in enumerate(steps):
        where = f"steps[{index}]."
        for name in ("ops_table", "blocks_table"):
            if step[name] >= len(record["tables"]):
                raise damaged(path, f"{where}{name} is {step[name]}")
        length = len(record["prompts"][number]["tokens"] or [None]) + index
        several = run["decode"] is not None and len(step["tokens"]) != 1
        if several or step["length"] != length:
            raise damaged(path, f"{where}length is not {length}, or several tokens are chosen")
        if (end := step.get("text_end") or 0) > len(contents["text"] or ""):
            raise damaged(path, f"{where}text_end is {end}")
        _check_positions(step, run["top_k"], path, where)


def _check_positions(step: Mapping[str, Any], top_k: int, path: Path, where: str) -> None:
    """Every position has its margin, and as many candidates as the others."""
    size, count = len(step["tokens"]), len((step["top_ids"] or [[]])[0])
    if len(step["margin"]) != size:
        raise damaged(path, f"{where}margin has {len(step['margin'])} numbers, not {size}")
    for name in ("top_ids", "top_logits"):
        rows = step[name]
        if len(rows) != size or not 0 < count <= top_k or any(len(row) != count for row in rows):
            raise damaged(path, f"{where}{name} has not {top_k} or fewer for each of {size} tokens")


# --- ops and blocks ------------------------------------------------------------------------------


class OpKey(NamedTuple):
    """What an op is called."""

    path: str  # of the module that calls it; "" is the model itself
    op: str  # "aten.mm"; of several results the later ones are "aten.native_layer_norm.1"
    dtype: str  # as in safetensors


class Formula(NamedTuple):
    """What an op computes from."""

    operands: tuple[int, ...]  # rows of the table, or INPUT, UNKNOWN, FIRST_WEIGHT and below
    arguments: str  # the other numbers of the formula: "other=0.5"


def _formulas(table: list[Any]) -> tuple[Formula, ...] | None:
    """Return those of a table of ops; version 1 has none, nor has a table of blocks."""
    known = all(len(key) > 3 for key in table)
    return tuple(Formula(tuple(key[3]), key[4]) for key in table) if known else None


class Result(NamedTuple):
    """The result of an op or a block, while it is there to be looked at."""

    bits: NDArray  # this prompt's part
    mark: Fingerprint  # of the part
    whole_hash: bytes  # of the tensor with all rows of the batch
    whole_shape: tuple[int, ...]


def column(dtype: str, width: int, of: Callable[[Result], Any], *, later: bool = False) -> Any:
    """Return a field of Columns.

    of:    gives the `width` numbers of a result.
    later: records of this version from before it lack it, and have None there.
    """
    return field(metadata={"dtype": dtype, "width": width, "of": of, "later": later})


@dataclass(frozen=True, eq=False)
class Columns:
    """What is kept of every op or block: an array per property, a row per result in graph order.

    A column is a field here, no more: it is written, checked and read by what it says of itself.
    """

    hash: NDArray[np.uint8] = column("U8", 16, lambda r: np.frombuffer(r.mark.hash, np.uint8))
    whole: NDArray[np.uint8] = column("U8", 16, lambda r: np.frombuffer(r.whole_hash, np.uint8))
    shape: NDArray[np.int64] = column("I64", MAX_DIMS, lambda r: _eight(r.bits.shape))
    whole_shape: NDArray[np.int64] = column("I64", MAX_DIMS, lambda r: _eight(r.whole_shape))
    statistics: NDArray[np.float64] = column("F64", len(STATISTICS), lambda r: r.mark.statistics)
    samples: NDArray[np.float64] = column("F64", NUM_SAMPLES, lambda r: r.mark.samples)

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]]) -> Columns:
        """Return the columns of some rows."""
        found = {}
        for number, item in enumerate(fields(cls)):
            dtype, width = DTYPES[item.metadata["dtype"]][0], item.metadata["width"]
            found[item.name] = np.array([row[number] for row in rows], dtype).reshape(-1, width)
        return cls(**found)


def _eight(shape: tuple[int, ...]) -> list[int]:
    return [*shape, *[-1] * MAX_DIMS][:MAX_DIMS]  # -1 where there is no dimension


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
        arrays, prefix = self.case.arrays, f"{self.prefix}/{kind}"
        found: Any = {item.name: arrays.get(f"{prefix}/{item.name}") for item in fields(Columns)}
        return Columns(**found)

    def logits(self) -> tuple[NDArray, str]:
        """Return (bits [positions, V], dtype)."""
        return self._array("logits")

    def logits_float64(self) -> NDArray[np.float64]:
        """Return the logits [positions, V], exactly."""
        return to_float64(*self.logits())

    def rows(self, block: int) -> tuple[NDArray, str]:
        """Return (bits [positions, D], dtype) of a block's output where the logits were taken."""
        return self._array(f"rows/{block:04d}")

    def _array(self, name: str) -> tuple[NDArray, str]:
        arrays, full = self.case.arrays, f"{self.prefix}/{name}"
        return arrays[full], arrays.dtype(full)

    def value(self, index: int) -> tuple[NDArray, str] | None:
        """Return (bits, dtype) of an op's whole result, None where it was not kept."""
        name = f"{self.prefix}/{index:05d}"
        if (values := self.case.values) is None:
            return self.small.get(index)
        return (values[name], values.dtype(name)) if name in values else None

    @cached_property
    def small(self) -> dict[int, tuple[NDArray, str]]:
        """(bits, dtype) of the small results that were kept whole, by row."""
        arrays, found, at = self.case.arrays, {}, 0
        if f"{self.prefix}/small/rows" not in arrays:
            return {}  # a record of version 1
        bits, shapes, keys = arrays[f"{self.prefix}/small/bits"], self.columns().shape, self.keys()
        for row in arrays[f"{self.prefix}/small/rows"].tolist():
            shape, dtype = shape_of(shapes[row]), DTYPES[keys[row].dtype][0]
            end = at + math.prod(shape) * np.dtype(dtype).itemsize
            found[row] = bits[at:end].copy().view(dtype).reshape(shape), keys[row].dtype
            at = end
        return found


def shape_of(row: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the shape that a row of the columns `shape` and `whole_shape` means."""
    return tuple(int(n) for n in row if n >= 0)


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt and what followed it."""

    record: Record
    number: int

    def path(self, kind: str) -> Path:
        """Return one of its files: "case.json", "case.safetensors" or "values.safetensors"."""
        stem, _, ending = kind.partition(".")
        return self.record.path / f"{stem}_{self.number:04d}.{ending}"

    @cached_property
    def _contents(self) -> dict[str, Any]:
        contents = read_json(self.path("case.json"))
        _check_case(contents, self.path("case.json"), self.record.contents, self.number)
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
        return TensorFile(self.path("case.safetensors"))

    @cached_property
    def values(self) -> TensorFile | None:
        """Whole tensors, None without --tensors."""
        path = self.path("values.safetensors")
        return TensorFile(path) if path.name in self.record.files else None


class Record:
    """A record on disk, opened; every byte is checked against the manifest first.

    Raises: DriftError saying what is missing, damaged or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self.files = _manifest_files(self.path)
        except OSError as error:
            raise DriftError(f"cannot read {error.filename or path}: {error.strerror}") from None
        self.contents = read_json(self.path / "record.json")
        _check_record(self.contents, self.path / "record.json")
        self.environment: dict[str, Any] = self.contents["environment"]
        self.model: dict[str, Any] = self.contents["model"]
        self.run: dict[str, Any] = {**asdict(Run()), **self.contents["run"]}
        tables = self.contents["tables"]
        self.tables = [tuple(OpKey(*key[:3]) for key in table) for table in tables]
        self.formulas = [_formulas(table) for table in tables]
        self.cases = [Case(self, i) for i in range(len(self.contents["prompts"]))]
        if (effect := self.contents["observer_effect"]) is not None:
            effect["max_abs"] = float(effect["max_abs"])  # "inf" in the file
        _check_names(self)
        for case in self.cases:
            _check_arrays(case)
        _check_formulas(self.contents, self.path / "record.json")

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

    @property
    def weights(self) -> dict[str, dict[str, Any]]:
        """What is known of each weight, by its name."""
        return {weight["name"]: weight for weight in self.model["weights"]}

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r}, {len(self.cases)} prompts)"

    def steps(self) -> Iterator[Step]:
        """Yield every forward, prompt by prompt."""
        for case in self.cases:
            yield from case.steps


# --- do the files belong together? ---------------------------------------------------------------


def _manifest_files(path: Path) -> dict[str, Any]:
    """Return the manifest's files after comparing every one of them."""
    if not path.is_dir():
        raise DriftError(f"there is no record {path}; `xtrain.drift record --out` makes one")
    if not (path / "manifest.json").is_file():
        raise DriftError(f"{path} is no complete record: manifest.json is missing")
    manifest = read_json(path / "manifest.json")
    if not is_object(manifest) or manifest.get("format") != FORMAT:
        raise DriftError(f"{path} is no record: manifest.json is not of format {FORMAT}")
    if manifest.get("version") not in READABLE:
        raise DriftError(
            f"{path} has schema version {repr(manifest.get('version'))[:40]}, this xtrain reads "
            f"{min(READABLE)} to {VERSION}; record again, or compare with the xtrain that wrote it"
        )
    files = manifest.get("files")
    try:
        for name, expected in files.items():
            if OURS.fullmatch(name) is None:
                raise damaged(path / "manifest.json", f"no record has a file {name[:40]!r}")
            _check_file(path, name, expected["bytes"], expected["xxh3_128"])
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(path / "manifest.json", str(error)) from None
    return files


def _check_file(path: Path, name: str, size: Any, digest: Any) -> None:
    file = path / name
    if not file.is_file():
        raise DriftError(f"{path} is damaged: {name} is missing; record again")
    if (found := file.stat().st_size) != size:
        raise DriftError(f"{file} has {found} bytes, not {str(size)[:40]}; record again")
    if file_hash(file) != digest:
        raise DriftError(f"{file} was changed after it was written; record again")


def _check_names(record: Record) -> None:
    """Raise DriftError unless the record's files are those that its prompts need, no other."""
    kinds = ["case.json", "case.safetensors"]
    kinds += ["values.safetensors"] if record.run["tensors"] else []
    needed = {"record.json"} | {case.path(kind).name for case in record.cases for kind in kinds}
    if missing := needed - record.files.keys():
        raise damaged(record.path, f"{min(missing)} is not in manifest.json")
    there = {path.name for path in record.path.iterdir() if OURS.fullmatch(path.name)}
    if extra := there - needed:
        raise damaged(record.path, f"record.json needs no {min(extra)}")


Expected = dict[str, tuple[str | None, tuple[int | None, ...] | None]]  # None: whatever it is


def _check_arrays(case: Case) -> None:
    """Raise DriftError, naming the tensor, unless the files of a prompt hold what its steps need.

    No number is read but the shapes of whole tensors.
    """
    arrays, expected = case.arrays, Expected()
    for step in case.steps:
        expected |= _arrays_of(step)
    _check_tensors(arrays, expected)
    vocab_size = case.steps[0].logits()[0].shape[1]
    for step in case.steps:
        name, top_ids = f"{step.prefix}/logits", step.info["top_ids"][0]
        if arrays.entries[name].shape[1] != vocab_size:
            raise _other_form(arrays, name)
        if vocab_size < len(top_ids):
            raise damaged(arrays.path, f"the tensor {name} has fewer logits than top_ids")
        if case.record.contents["version"] > 1:
            _check_small(step, arrays)
    if (values := case.values) is not None:
        expected = Expected()
        for step in case.steps:
            shapes = map(shape_of, step.columns().shape)
            for index, (key, shape) in enumerate(zip(step.keys(), shapes, strict=True)):
                known = shape if len(shape) < MAX_DIMS else None
                expected[f"{step.prefix}/{index:05d}"] = key.dtype, known
        _check_tensors(values, expected)


def _arrays_of(step: Step) -> Expected:
    """Return the tensors that a step has in case_NNNN.safetensors."""
    arrays, prefix, found = step.case.arrays, step.prefix, Expected()
    for kind in ("ops", "blocks"):
        for item in fields(Columns):
            name, form = f"{prefix}/{kind}/{item.name}", item.metadata
            if not form["later"] or name in arrays:
                found[name] = form["dtype"], (len(step.keys(kind)), form["width"])
    for number, key in enumerate(step.keys("blocks")):
        found[f"{prefix}/rows/{number:04d}"] = key.dtype, (None, None)
    if step.record.contents["version"] > 1:
        found[f"{prefix}/small/rows"] = "I64", (None,)
        found[f"{prefix}/small/bits"] = "U8", (None,)
    found[f"{prefix}/logits"] = None, (len(step.tokens), None)
    return found


def _check_tensors(file: TensorFile, expected: Expected) -> None:
    """Raise DriftError unless a file has tensors of these forms, and no other."""
    for name, (dtype, shape) in expected.items():
        entry = file.entries.get(name)
        if entry is None:
            raise damaged(file.path, f"the tensor {name} is missing")
        fits = dtype in (None, entry.dtype)
        if shape is not None:
            fits &= len(shape) == len(entry.shape)
            fits &= all(n in (None, m) for n, m in zip(shape, entry.shape, strict=False))
        if not fits:
            raise _other_form(file, name)
    if extra := file.keys() - expected.keys():
        raise damaged(file.path, f"no step has a tensor {min(extra)[:40]!r}")


def _other_form(file: TensorFile, name: str) -> DriftError:
    entry = file.entries[name]
    return damaged(file.path, f"the tensor {name} is {entry.dtype} {list(entry.shape)}")


def _check_small(step: Step, arrays: TensorFile) -> None:
    """Raise DriftError unless the small results of a step are those of their shapes."""
    rows_name, bits_name = f"{step.prefix}/small/rows", f"{step.prefix}/small/bits"
    rows, keys, shapes = arrays[rows_name], step.keys(), step.columns().shape
    if (np.diff(rows, prepend=-1) <= 0).any() or (rows >= len(keys)).any():
        raise damaged(arrays.path, f"the tensor {rows_name} names no ops in their order")
    size = sum(
        math.prod(shape_of(shapes[row])) * np.dtype(DTYPES[keys[row].dtype][0]).itemsize
        for row in rows
    )
    if size != arrays.entries[bits_name].shape[0]:
        raise damaged(arrays.path, f"the tensor {bits_name} has not the {size} bytes of its shapes")
