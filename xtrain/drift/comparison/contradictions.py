"""What two places say that cannot both be true: whoever edited one of them is found out.

A record holds some things twice (the readable logits, margins and tokens, and the logits; whole
tensors, and their hashes), and two records of equal bits must agree in all that follows from them.
docs/drift.md says what is there once only.
"""

from __future__ import annotations

from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.errors import DriftError
from xtrain.drift.recording.format import Record, Step, damaged
from xtrain.drift.recording.tensors import (
    NUM_NAN,
    RMS,
    STATISTICS,
    TensorFile,
    hash_bits,
    same_nan,
)

_verified: WeakSet[Record] = WeakSet()


def contradiction(what: str) -> DriftError:
    """Return the error for two records of which one was edited."""
    return DriftError(
        f"the records contradict each other: {what}; one of them was edited, record again"
    )


def contradiction_of(step: Step, kind: str, row: int, what: str) -> DriftError:
    """Return the error for an op or block of equal bits of which something else is not equal."""
    key = step.keys(kind)[row]
    return contradiction(
        f"{key.path or 'model'}: {key.op} of prompt {step.case.number}, step {step.number} has "
        f"equal bits and other {what}"
    )


def check_rows(pairs: NDArray[np.int64], a: Step, b: Step, kind: str) -> None:
    """Raise DriftError where bits are equal and statistics or samples of them are not.

    Both are functions of the bits, but for the last places of sums.
    """
    (i, j), left, right = pairs.T, a.columns(kind), b.columns(kind)
    keys_a, keys_b = a.keys(kind), b.keys(kind)
    same = (left.shape[i] == right.shape[j]).all(axis=1) & (left.hash[i] == right.hash[j]).all(
        axis=1
    )
    same &= np.array([keys_a[x].dtype == keys_b[y].dtype for x, y in zip(i, j, strict=True)], bool)
    x, y = left.statistics[i], right.statistics[j]
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(x - y) <= 1e-9 * np.abs(x[:, RMS : RMS + 1])
    sums = np.isin(np.arange(x.shape[1]), (STATISTICS.index("mean"), RMS))
    samples = _alike(left.samples[i], right.samples[j])
    for what, alike in (("statistics", _alike(x, y) | close & sums), ("samples", samples)):
        for row in np.flatnonzero(same & ~alike.all(axis=1))[:1]:
            raise contradiction_of(a, kind, int(i[row]), what)


def verify(record: Record) -> None:
    """Compare, once, what a record says twice: all of its numbers are read.

    Raises: DriftError naming the first place that contradicts another.
    """
    if record not in _verified:
        for step in record.steps():
            _verify(step)
        _verified.add(record)


def _verify(step: Step) -> None:
    """Raise DriftError, naming the step, where two places of a record say different things."""
    case, where = step.case, f"steps[{step.number}]"
    path, logits = case.path("case.json"), step.logits_float64()
    ids = np.array(step.info["top_ids"], np.int64)
    if ids.max() >= logits.shape[1]:
        raise damaged(path, f"{where}.top_ids has {ids.max()}, of {logits.shape[1]} logits")
    shown = np.array(step.info["top_logits"], np.float64)
    if not _same(shown, np.take_along_axis(logits, ids, axis=1)):
        raise damaged(path, f"{where}.top_logits are not those of case_{case.number:04d}")
    if not _same(np.array(step.info["margin"], np.float64), _margins(logits)):
        raise damaged(path, f"{where}.margin is not that of its logits")
    greedy = case.record.run["decode"] in (None, "greedy")
    if greedy and step.tokens != logits.argmax(axis=1).tolist():
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
    return a.shape == b.shape and bool(_alike(a, b).all())


def _alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (a == b) | np.isnan(a) & np.isnan(b)
