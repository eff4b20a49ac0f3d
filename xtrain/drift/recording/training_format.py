"""The folder of a training run's fingerprints: its files, checked and read without torch.

    runs/NAME/drift/rank_0000/
        start.json              format, environment, configuration, names of the weights
        step_00000000.json      one recorded step, in the order in which things happen:
                                input, weight and optimiser state (before), op
                                (forward, then backward), mask, loss, gradient, weight after

Each file carries its own hash.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import xxhash

from xtrain.drift.recording.record_format import (
    check_fields,
    damaged,
    is_hash,
    is_number,
    read_json,
)
from xtrain.drift.recording.tensors import DTYPES
from xtrain.drift.settings import DriftError
from xtrain.files import Form, is_count, is_object, is_text, listed, one_of

FORMAT, VERSION = "xtrain.drift.training", 1
STEP_FILE = re.compile(r"step_(\d{8,18})\.json")
MAX_WEIGHTS = 1 << 20  # that an op may read


class Row(NamedTuple):
    """One fingerprint of a step; each field with the check that it passes in a file."""

    kind: Annotated[str, is_text]  # input, weight, optimizer, op, mask, loss, gradient (norm)
    path: Annotated[str, is_text]
    op: Annotated[str, is_text]
    dtype: Annotated[str, one_of(DTYPES)]
    shape: Annotated[list[int], listed(is_count)]
    hash: Annotated[str, is_hash]
    statistics: Annotated[list[Any], listed(is_number, 4)]  # min, max, mean, rms


_ROW = [hint.__metadata__[0] for hint in get_type_hints(Row, include_extras=True).values()]


def _is_row(value: Any) -> bool:
    fits = isinstance(value, list) and len(value) == len(_ROW)
    return fits and all(check(item) for check, item in zip(_ROW, value, strict=True))


START: dict[str, Form] = {
    "format": one_of([FORMAT]),
    "version": is_count,
    "rank": is_count,
    "environment": is_object,
    "configuration?": lambda value: is_object(value) and all(map(is_object, value.values())),
    "weights": listed(is_text),
}
STEP: dict[str, Form] = {
    "step": is_count,
    "rank": is_count,
    "loss": is_number,
    "rows": listed(_is_row),
}


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank writes."""
    return folder / f"rank_{rank:04d}"


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step."""
    return folder / f"step_{step:08d}.json"


def checksum(contents: dict[str, Any]) -> str:
    """Return the hash of JSON values, whatever the layout of the file."""
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def find(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of fingerprints that a run's folder, or itself, is; None if neither."""
    for folder in (Path(path), Path(path) / "drift"):
        try:
            if (rank_folder(folder, 0) / "start.json").is_file():
                return folder
        except OSError:  # a name that is too long, a folder that may not be read
            return None
    return None


def ranks(folder: Path) -> list[Path]:
    """Return the folders of all ranks. Raises: DriftError where one is missing."""
    found = sorted(path for path in folder.glob("rank_*") if (path / "start.json").is_file())
    for number, path in enumerate(found):
        if path != rank_folder(folder, number):
            raise damaged(folder, f"{rank_folder(folder, number).name} is missing")
    return found


def steps(folder: Path) -> set[int]:
    """Return the steps that a rank has recorded."""
    names = (STEP_FILE.fullmatch(path.name) for path in folder.iterdir())
    return {int(match[1]) for match in names if match is not None}


def read_start(folder: Path, rank: int) -> dict[str, Any]:
    """Return what start.json holds. Raises: DriftError for another version, or damage."""
    path = folder / "start.json"
    contents = _with_checksum(path)
    check_fields(contents, START, path)
    if contents["version"] != VERSION:
        raise DriftError(
            f"{path} has schema version {contents['version']}, this xtrain reads {VERSION}"
        )
    if contents["rank"] != rank:
        raise damaged(path, f"rank is {contents['rank']}, not {rank}")
    return contents


def read_step(folder: Path, step: int, rank: int) -> dict[str, Any]:
    """Return what the file of a step holds. Raises: DriftError."""
    path = step_file(folder, step)
    contents = _with_checksum(path)
    check_fields(contents, STEP, path)
    if (contents["step"], contents["rank"]) != (step, rank):
        raise damaged(path, f"it is of step {contents['step']}, rank {contents['rank']}")
    contents["rows"] = [Row(*row) for row in contents["rows"]]
    formulas = contents.setdefault("formulas", None)  # of ops; older runs have none
    num_ops = sum(row.kind == "op" for row in contents["rows"])
    if formulas is not None and (not isinstance(formulas, list) or len(formulas) != num_ops):
        raise damaged(path, f"formulas are not those of {num_ops} ops")
    for number, formula in enumerate(formulas or ()):
        fits = isinstance(formula, list) and len(formula) == 2 and is_text(formula[1])
        fits = fits and isinstance(formula[0], list)
        if not fits or not all(type(n) is int and -MAX_WEIGHTS < n < number for n in formula[0]):
            raise damaged(path, f"formulas[{number}] is {str(formula)[:40]}")
    return contents


def _with_checksum(path: Path) -> dict[str, Any]:
    contents = read_json(path)
    if not isinstance(contents, dict) or "xxh3_128" not in contents:
        raise damaged(path, "it has no checksum")
    expected = contents.pop("xxh3_128")
    if checksum(contents) != expected:
        raise DriftError(f"{path} was changed after it was written")
    return contents
