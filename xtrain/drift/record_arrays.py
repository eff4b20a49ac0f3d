"""Do the arrays of a record belong to its JSON files, and say the same where both say something?

`check_arrays` compares names, dtypes and shapes: what a reader takes for granted. `check_contents`
compares numbers that are there twice: the readable logits, margins and tokens with the logits, and
whole tensors with their hashes. Whoever edits one of the two is found out; docs/drift.md says what
is there once only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.record_fields import damaged
from xtrain.drift.storage import TensorFile
from xtrain.drift.values import DTYPES, NUM_SAMPLES, STATISTICS, hash_bits, same_nan

if TYPE_CHECKING:
    from xtrain.drift.record_folder import Case, Step

MAX_DIMS = 8
# of the arrays with a row per op or block: dtype, and columns
COLUMNS = {
    "hash": ("U8", 16),
    "whole": ("U8", 16),
    "shape": ("I64", MAX_DIMS),
    "whole_shape": ("I64", MAX_DIMS),
    "statistics": ("F64", len(STATISTICS)),
    "samples": ("F64", NUM_SAMPLES),
}
NUM_NAN = STATISTICS.index("num_nan")


def check_arrays(case: Case) -> None:
    """Raise DriftError, naming the tensor, unless the files of a prompt hold what its steps need.

    No number is read but the shapes of whole tensors.
    """
    arrays, values = case.arrays, case.values
    names: set[str] = set()
    num_logits: int | None = None
    for step in case.steps:
        for kind in ("ops", "blocks"):
            for name, (dtype, width) in COLUMNS.items():
                names.add(full := f"{step.prefix}/{kind}/{name}")
                _check(arrays, full, dtype, (len(step.keys(kind)), width))
        for number, key in enumerate(step.keys("blocks")):
            names.add(full := f"{step.prefix}/rows/{number:04d}")
            _check(arrays, full, key.dtype, (None, None))
        if case.record.contents["version"] > 1:
            names |= _check_small(step, arrays)
        names.add(full := f"{step.prefix}/logits")
        _check(arrays, full, None, (len(step.tokens), num_logits))
        num_logits = arrays.entries[full].shape[1]
        if num_logits < len(step.info["top_ids"][0]):
            raise damaged(arrays.path, f"the tensor {full} has fewer logits than top_ids")
    _nothing_else(arrays, names)
    if values is not None:
        _nothing_else(values, {name for step in case.steps for name in _check_values(step, values)})


def _check_small(step: Step, arrays: TensorFile) -> set[str]:
    """Check the small results of a step against their shapes, and return the names."""
    rows_name, bits_name = f"{step.prefix}/small/rows", f"{step.prefix}/small/bits"
    _check(arrays, rows_name, "I64", (None,))
    _check(arrays, bits_name, "U8", (None,))
    rows, keys, shapes = arrays[rows_name], step.keys(), step.columns().shape
    if (np.diff(rows, prepend=-1) <= 0).any() or (rows >= len(keys)).any():
        raise damaged(arrays.path, f"the tensor {rows_name} names no ops in their order")
    size = sum(
        math.prod(int(n) for n in shapes[row] if n >= 0)
        * np.dtype(DTYPES[keys[row].dtype][0]).itemsize
        for row in rows
    )
    if size != arrays.entries[bits_name].shape[0]:
        raise damaged(arrays.path, f"the tensor {bits_name} has not the {size} bytes of its shapes")
    return {rows_name, bits_name}


def _check_values(step: Step, values: TensorFile) -> list[str]:
    """Check the whole tensors of a step and return their names."""
    names, shapes = [], step.columns().shape
    for index, key in enumerate(step.keys()):
        names.append(f"{step.prefix}/{index:05d}")
        shape = tuple(int(n) for n in shapes[index] if n >= 0)
        _check(values, names[-1], key.dtype, shape if len(shape) < MAX_DIMS else None)
    return names


def _check(
    file: TensorFile, name: str, dtype: str | None, shape: tuple[int | None, ...] | None
) -> None:
    """Raise DriftError unless a file has a tensor of that form; None: whatever it is."""
    entry = file.entries.get(name)
    if entry is None:
        raise damaged(file.path, f"the tensor {name} is missing")
    fits = dtype in (None, entry.dtype)
    if shape is not None:
        fits &= len(shape) == len(entry.shape)
        fits &= all(n in (None, m) for n, m in zip(shape, entry.shape, strict=False))
    if not fits:
        raise damaged(file.path, f"the tensor {name} is {entry.dtype} {list(entry.shape)}")


def _nothing_else(file: TensorFile, names: set[str]) -> None:
    if extra := file.keys() - names:
        raise damaged(file.path, f"no step has a tensor {min(extra)[:40]!r}")


def check_contents(case: Case) -> None:
    """Raise DriftError, naming the step, where two places of a record say different things."""
    decode = case.record.run["decode"]
    path = case.record.path / f"case_{case.number:04d}.json"
    for step in case.steps:
        where = f"steps[{step.number}]"
        logits = step.logits_float64()
        ids = np.array(step.info["top_ids"], np.int64)
        if ids.max() >= logits.shape[1]:
            raise damaged(path, f"{where}.top_ids has {ids.max()}, of {logits.shape[1]} logits")
        shown = np.array(step.info["top_logits"], np.float64)
        if not _same(shown, np.take_along_axis(logits, ids, axis=1)):
            raise damaged(path, f"{where}.top_logits are not those of case_{case.number:04d}")
        if not _same(np.array(step.info["margin"], np.float64), _margins(logits)):
            raise damaged(path, f"{where}.margin is not that of its logits")
        if decode in (None, "greedy") and step.tokens != logits.argmax(axis=1).tolist():
            raise damaged(path, f"{where}.tokens are not the largest of its logits")
        if case.values is not None:
            for index in range(len(step.keys())):
                _check_hash(step, index, case.values, f"{step.prefix}/{index:05d}")
        for index in step.small:
            _check_hash(step, index, case.arrays, f"{step.prefix}/small/bits, row {index},")


def _margins(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest minus the second largest of each position; NaN counts as the largest."""
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf)
    top = np.partition(np.where(np.isnan(logits), np.inf, logits), -2, axis=1)[:, -2:]
    nan = np.isnan(logits).any(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(nan, np.nan, top[:, 1] - top[:, 0])


def _check_hash(step: Step, index: int, file: TensorFile, name: str) -> None:
    columns, value = step.columns(), step.value(index)
    assert value is not None
    bits, dtype = value[0].reshape(-1), value[1]
    if columns.statistics[index, NUM_NAN]:
        bits = same_nan(bits, dtype)
    if hash_bits(bits) != columns.hash[index].tobytes():
        raise damaged(file.path, f"the tensor {name} has not the hash that it was given")


def _same(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    return a.shape == b.shape and bool(((a == b) | np.isnan(a) & np.isnan(b)).all())
