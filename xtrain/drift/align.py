"""Ops that belong together, row by row: which can be compared, which differ, and how far.

xtrain.drift.pairing says which belong together. Ops that only one side has (fused, decomposed,
missing) are no divergence; they are listed apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.pairing import Alignment, common_order
from xtrain.drift.record_folder import Columns, OpKey
from xtrain.drift.values import (
    FLOATS,
    NUM_SAMPLES,
    STATISTICS,
    Distance,
    absolute_difference,
    coarser_dtype,
    distance,
    max_ulps,
)

RMS = STATISTICS.index("rms")


class Unmatched(NamedTuple):
    """An op without a partner: one of two records lacks it, or has it in another shape."""

    record: str  # "a" | "b": the one that has it; "both" when the shapes differ
    path: str
    op: str
    times: int  # occurrences in all compared forwards


def align(a: Sequence[OpKey], b: Sequence[OpKey]) -> Alignment:
    """Return the common order of (path, op) alone, whatever the dtypes: of blocks."""
    pairs = common_order([key[:2] for key in a], [key[:2] for key in b])
    used_a, used_b = {i for i, _ in pairs}, {j for _, j in pairs}
    return Alignment(
        np.array(pairs, np.int64).reshape(-1, 2),
        tuple(i for i in range(len(a)) if i not in used_a),
        tuple(j for j in range(len(b)) if j not in used_b),
    )


@dataclass(frozen=True)
class RowDifferences:
    """Of the aligned rows: which are comparable, and which of those differ."""

    pairs: NDArray[np.int64]  # [n, 2]
    comparable: NDArray[np.bool_]
    different: NDArray[np.bool_]


def differences(
    pairs: NDArray[np.int64],
    a: Columns,
    b: Columns,
    keys_a: Sequence[OpKey],
    keys_b: Sequence[OpKey],
    *,
    same_layout: bool = True,
) -> RowDifferences:
    """Compare the rows of two forwards that belong together.

    same_layout: both have the same batch and padding. Otherwise integers are not compared: counts,
    positions and masks of a whole batch say nothing about one prompt.

    A prompt's part is compared with the other's part; where the leading dimension was mistaken for
    a batch (a table of T rows that all prompts share), the whole tensors are.
    """
    i, j = pairs[:, 0], pairs[:, 1]
    comparable = np.zeros(len(pairs), bool)
    equal = np.zeros(len(pairs), bool)
    for shape_a, hash_a in ((a.shape, a.hash), (a.whole_shape, a.whole)):
        for shape_b, hash_b in ((b.shape, b.hash), (b.whole_shape, b.whole)):
            same_shape = (shape_a[i] == shape_b[j]).all(axis=1)
            equal |= same_shape & (hash_a[i] == hash_b[j]).all(axis=1)
            comparable |= same_shape
    dtypes = np.array([[keys_a[x].dtype, keys_b[y].dtype] for x, y in pairs.tolist()], "U8")
    same_dtype = dtypes.reshape(-1, 2)[:, 0] == dtypes.reshape(-1, 2)[:, 1]
    same_bits = same_dtype & (a.hash[i] == b.hash[j]).all(axis=1)  # in whatever shape
    equal |= same_bits
    comparable |= same_bits
    if not same_layout:
        floats = np.array([key.dtype in FLOATS for key in keys_a], bool)
        comparable &= floats[i]
    different = comparable & ~equal
    for row in np.flatnonzero(different):
        if keys_a[i[row]].dtype != keys_b[j[row]].dtype:
            # bits of two dtypes say nothing: what is left are the numbers that were kept
            different[row] = seen_difference(a, b, i[row], j[row])[1] > 0
    return RowDifferences(pairs, comparable, different)


def contradictions(
    pairs: NDArray[np.int64],
    a: Columns,
    b: Columns,
    keys_a: Sequence[OpKey],
    keys_b: Sequence[OpKey],
) -> list[tuple[int, str]]:
    """Return (row of a, "statistics" | "samples") where bits are equal and what is of them is not.

    Both are functions of the bits, but for the last places of sums.
    """
    i, j = pairs.T
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


def seen_difference(a: Columns, b: Columns, i: int, j: int) -> tuple[NDArray[np.float64], float]:
    """Return the differences of the samples, and the largest of them and of the statistics.

    The largest difference of all is at least that: of any sample, of the minima, the maxima, the
    means, and of the root mean squares.
    """
    x, y = a.samples[i], b.samples[j]
    delta = np.zeros_like(x)
    if (a.shape[i] == b.shape[j]).all():
        delta = absolute_difference(x, y)
    counts = slice(STATISTICS.index("num_nan"), None)
    if (a.statistics[i, counts] != b.statistics[j, counts]).any():
        return delta, float("inf")
    of_statistics = absolute_difference(a.statistics[i, :4], b.statistics[j, :4])
    with np.errstate(over="ignore"):
        rounding = 1e-12 * np.nan_to_num(np.abs(a.statistics[i, :4]))  # of sums in fp64
    of_statistics = np.where(of_statistics > rounding, of_statistics, 0.0)
    return delta, max(float(delta.max(initial=0.0)), float(of_statistics.max(initial=0.0)))


def bound(a: Columns, b: Columns, i: int, j: int, dtype: str) -> Distance:
    """Return the distance of two results as far as samples and statistics tell.

    All numbers of a result that has no more than samples: exact. Where most samples differ the
    largest is near the largest of all. Where few do, or none, nothing is near: no figure.
    """
    x, y = a.samples[i], b.samples[j]
    delta, least = seen_difference(a, b, i, j)
    count = int(np.count_nonzero(delta))
    size = math.prod(int(n) for n in a.shape[i] if n >= 0)
    whole = size <= NUM_SAMPLES and (a.shape[i] == b.shape[j]).all()
    if not whole and np.isfinite(least) and count < min(size, NUM_SAMPLES) / 2:
        return Distance(0.0, 0.0, count, exact=False)
    rms = np.nanmax([a.statistics[i, RMS], b.statistics[j, RMS], 0.0])
    worst = float(delta.max(initial=0.0)) if whole else least
    ulps = max_ulps(delta, x, y, dtype, rms) if np.isfinite(least) else float("inf")
    return Distance(worst, ulps, count, exact=bool(whole))


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
