"""Which op of one record is which op of the other: by name and module, in graph order.

Ops that only one side has (fused, decomposed, missing) are no divergence; they are listed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.record_folder import Columns, OpKey
from xtrain.drift.values import FLOATS, STATISTICS, Distance, coarser_dtype, distance, max_ulps

RMS = STATISTICS.index("rms")


class Unmatched(NamedTuple):
    """An op that one of two records lacks, or has in another shape."""

    record: str  # "a" | "b": the one that has it; "both" when the shapes differ
    path: str
    op: str
    times: int  # occurrences in all compared forwards


@dataclass(frozen=True)
class Alignment:
    """Rows of two tables of ops that belong together."""

    pairs: NDArray[np.int64]  # [n, 2]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]


@lru_cache(maxsize=256)
def align(a: tuple[OpKey, ...], b: tuple[OpKey, ...]) -> Alignment:
    """Return the longest common order of (path, op), whatever the dtypes."""
    if a == b:
        rows = np.arange(len(a))
        return Alignment(np.stack([rows, rows], axis=1), (), ())
    names_a, names_b = [key[:2] for key in a], [key[:2] for key in b]
    blocks = SequenceMatcher(None, names_a, names_b, autojunk=False).get_matching_blocks()
    pairs = [(m.a + i, m.b + i) for m in blocks for i in range(m.size)]
    used_a, used_b = {i for i, _ in pairs}, {j for _, j in pairs}
    return Alignment(
        np.array(pairs, np.int64).reshape(-1, 2),
        tuple(i for i in range(len(a)) if i not in used_a),
        tuple(j for j in range(len(b)) if j not in used_b),
    )


@dataclass(frozen=True)
class RowDifferences:
    """Of the aligned rows: which are comparable, and which of those differ."""

    pairs: NDArray[np.int64]  # as in Alignment
    comparable: NDArray[np.bool_]
    different: NDArray[np.bool_]


def differences(
    a: Columns,
    b: Columns,
    keys_a: Sequence[OpKey],
    keys_b: Sequence[OpKey],
    *,
    same_layout: bool = True,
) -> RowDifferences:
    """Compare two forwards row by row.

    same_layout: both have the same batch and padding. Otherwise integers are not compared: counts,
    positions and masks of a whole batch say nothing about one prompt.

    A prompt's part is compared with the other's part; where the leading dimension was mistaken for
    a batch (a table of T rows that all prompts share), the whole tensors are.
    """
    pairs = align(tuple(keys_a), tuple(keys_b)).pairs
    i, j = pairs[:, 0], pairs[:, 1]
    comparable = np.zeros(len(pairs), bool)
    equal = np.zeros(len(pairs), bool)
    for shape_a, hash_a in ((a.shape, a.hash), (a.whole_shape, a.whole)):
        for shape_b, hash_b in ((b.shape, b.hash), (b.whole_shape, b.whole)):
            same_shape = (shape_a[i] == shape_b[j]).all(axis=1)
            equal |= same_shape & (hash_a[i] == hash_b[j]).all(axis=1)
            comparable |= same_shape
    if not same_layout:
        floats = np.array([key.dtype in FLOATS for key in keys_a], bool)
        comparable &= floats[i]
    different = comparable & ~equal
    for row in np.flatnonzero(different):
        if keys_a[i[row]].dtype != keys_b[j[row]].dtype:
            # bits of two dtypes say nothing: what is left are the numbers that were kept
            different[row] = bound(a, b, i[row], j[row], "F64").max_abs > 0
    return RowDifferences(pairs, comparable, different)


def contradictions(
    a: Columns, b: Columns, keys_a: Sequence[OpKey], keys_b: Sequence[OpKey]
) -> list[tuple[int, str]]:
    """Return (row of a, "statistics" | "samples") where bits are equal and what is of them is not.

    Both are functions of the bits, but for the last places of sums.
    """
    i, j = align(tuple(keys_a), tuple(keys_b)).pairs.T
    same = (a.shape[i] == b.shape[j]).all(axis=1) & (a.hash[i] == b.hash[j]).all(axis=1)
    same &= np.array([keys_a[x].dtype == keys_b[y].dtype for x, y in zip(i, j, strict=True)], bool)
    x, y = a.statistics[i], b.statistics[j]
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(x - y) <= 1e-9 * np.abs(x[:, RMS : RMS + 1])
    sums = np.isin(np.arange(x.shape[1]), (STATISTICS.index("mean"), RMS))
    alike = (x == y) | np.isnan(x) & np.isnan(y) | close & sums
    found = [(int(i[row]), "statistics") for row in np.flatnonzero(same & ~alike.all(axis=1))]
    x, y = a.samples[i], b.samples[j]
    alike = (x == y) | np.isnan(x) & np.isnan(y)
    return found + [(int(i[row]), "samples") for row in np.flatnonzero(same & ~alike.all(axis=1))]


def bound(a: Columns, b: Columns, i: int, j: int, dtype: str) -> Distance:
    """Return a lower bound of the distance of two ops' results, from samples and statistics.

    The largest difference is at least that of any sample, of the minima, of the maxima, of the
    means, and of the root mean squares.
    """
    x, y = a.samples[i], b.samples[j]
    delta = np.zeros_like(x)
    if (a.shape[i] == b.shape[j]).all():
        both = ~(np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            delta = np.where(both, np.abs(x - y), 0.0)
            delta[np.isnan(delta)] = np.where(x == y, 0.0, np.inf)[np.isnan(delta)]
    counts = slice(STATISTICS.index("num_nan"), None)
    if (a.statistics[i, counts] != b.statistics[j, counts]).any():
        return Distance(float("inf"), float("inf"), 1, exact=False)
    with np.errstate(invalid="ignore"):
        of_statistics = np.abs(a.statistics[i, :4] - b.statistics[j, :4])
    rounding = 1e-12 * np.nan_to_num(np.abs(a.statistics[i, :4]))  # of sums in fp64
    of_statistics = np.where(of_statistics > rounding, of_statistics, 0.0)
    worst = max(float(delta.max(initial=0.0)), float(np.nan_to_num(of_statistics).max(initial=0.0)))
    ulps = max_ulps(delta, x, y, dtype)
    return Distance(worst, ulps, int(np.count_nonzero(delta)), exact=False)


def op_distance(
    values: tuple[tuple[NDArray, str] | None, tuple[NDArray, str] | None],
    columns: tuple[Columns, Columns],
    rows: tuple[int, int],
    dtypes: tuple[str, str],
) -> Distance:
    """Return how far an op's results are apart: exactly where both records hold the values."""
    value_a, value_b = values
    if value_a is not None and value_b is not None and value_a[0].shape == value_b[0].shape:
        return distance(*value_a, *value_b)
    return bound(*columns, *rows, coarser_dtype(*dtypes))
