"""How far results that belong together are apart: two tensors, two rows of a record, a forward.

xtrain.drift.comparison.pairing says which belong together. Ops that only one side has (fused,
decomposed, missing) are no divergence; they are listed apart.

Of two records of other batches each prompt's part is compared, an even share of the leading
dimension. A mixture of experts sorts the tokens of the whole batch, some models put time before
the batch: the parts are then rows of other prompts, and their difference says nothing. Two things
tell such rows from a batch that really computes otherwise. They differ by more than half of their
digits, as no rounding of an op does; and what follows with rows of the prompt's own (the output of
their block, else the logits) differs far less.

What two places say that cannot both be true finds out who edited one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.comparison.pairing import Alignment, Partners, common_order
from xtrain.drift.recording.record_format import Columns, OpKey, Record, Step, damaged, shape_of
from xtrain.drift.recording.tensors import (
    CHUNK,
    FLOATS,
    NUM_NAN,
    NUM_SAMPLES,
    RMS,
    STATISTICS,
    coarser_dtype,
    hash_bits,
    rms_of,
    same_nan,
    to_float64,
)
from xtrain.drift.settings import DriftError

# --- two tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far two tensors of one shape are apart; computed in fp64."""

    max_abs: float  # inf when something that is not finite differs
    max_ulps: float  # of the coarser dtype, at the larger of the two numbers and the rms of all
    num_different: int
    exact: bool = True  # False: a lower bound near it, from samples; 0: no figure can be given


def distance(a: NDArray, dtype_a: str, b: NDArray, dtype_b: str) -> Distance:
    """Return the distance of two arrays of bits; NaN in the same place is no difference."""
    worst, ulps, count = 0.0, 0.0, 0
    a, b = a.reshape(-1), b.reshape(-1)
    coarser = coarser_dtype(dtype_a, dtype_b)
    rms = max(rms_of(a, dtype_a), rms_of(b, dtype_b))
    for start in range(0, a.size, CHUNK):
        x = to_float64(a[start : start + CHUNK], dtype_a)
        y = to_float64(b[start : start + CHUNK], dtype_b)
        delta = absolute_difference(x, y)
        count += int(np.count_nonzero(delta))
        worst = max(worst, float(delta.max()))
        ulps = max(ulps, max_ulps(delta, x, y, coarser, rms))
    return Distance(worst, ulps, count)


def absolute_difference(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |x - y|: 0 for equal infinities or NaN in both places, inf for those in one."""
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(x - y)
    strange = np.isnan(delta)
    if strange.any():
        delta[strange] = np.where(np.isnan(x) & np.isnan(y) | (x == y), 0.0, np.inf)[strange]
    return delta


def max_ulps(
    delta: NDArray[np.float64],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    dtype: str,
    rms: float | NDArray[np.float64] = 0.0,
) -> float:
    """Return the largest delta in units of the last place of the largest of |x|, |y| and rms.

    Beside numbers of a usual size a rounding error of theirs is many last places of one near zero.
    """
    if dtype not in FLOATS or not delta.size or not delta.any():
        return 0.0
    if np.isinf(delta).any():
        return float("inf")
    exponent_bits, mantissa = FLOATS[dtype]
    smallest = 2 - (1 << (exponent_bits - 1))  # exponent of the smallest normal number
    size = np.maximum(np.abs(np.nan_to_num(x)), np.abs(np.nan_to_num(y)))
    exponent = np.maximum(np.frexp(np.maximum(size, rms))[1] - 1, smallest)
    with np.errstate(over="ignore"):
        return float(np.max(np.ldexp(delta, mantissa - exponent)))


# --- the rows of two forwards ---------------------------------------------------------------------


def align(a: Sequence[OpKey], b: Sequence[OpKey]) -> Alignment:
    """Return the common order of (path, op) alone, whatever the dtypes: of blocks."""
    pairs = common_order([key[:2] for key in a], [key[:2] for key in b])
    return Alignment.of(pairs, len(a), len(b))


@dataclass(frozen=True)
class RowDifferences:
    """Of the aligned rows: which are comparable, and which of those differ."""

    pairs: NDArray[np.int64]  # [n, 2]
    comparable: NDArray[np.bool_]
    different: NDArray[np.bool_]


def differences(
    pairs: NDArray[np.int64], a: Step, b: Step, kind: str = "ops", *, same_layout: bool = True
) -> RowDifferences:
    """Compare the ops or blocks of two forwards that belong together.

    same_layout: both have the same batch and padding. Otherwise integers are not compared: counts,
    positions and masks of a whole batch say nothing about one prompt.

    A prompt's part is compared with the other's part; where the leading dimension was mistaken for
    a batch (a table of T rows that all prompts share), the whole tensors are.
    """
    (i, j), x, y = pairs.T, a.columns(kind), b.columns(kind)
    dtypes_a, dtypes_b = (
        np.array([key.dtype for key in step.keys(kind)], "U8")[rows]
        for step, rows in ((a, i), (b, j))
    )
    equal = same_bits = (dtypes_a == dtypes_b) & _alike(x.hash[i], y.hash[j])  # in whatever shape
    comparable = same_bits
    for shape_a, hash_a in ((x.shape, x.hash), (x.whole_shape, x.whole)):
        for shape_b, hash_b in ((y.shape, y.hash), (y.whole_shape, y.whole)):
            same_shape = _alike(shape_a[i], shape_b[j])
            equal = equal | same_shape & _alike(hash_a[i], hash_b[j])
            comparable = comparable | same_shape
    if not same_layout:
        comparable &= np.isin(dtypes_a, list(FLOATS))
    different = comparable & ~equal
    for row in np.flatnonzero(different & (dtypes_a != dtypes_b)):
        # bits of two dtypes say nothing: what is left are the numbers that were kept
        different[row] = seen_difference(x, y, i[row], j[row])[1] > 0
    return RowDifferences(pairs, comparable, different)


def _alike(x: NDArray, y: NDArray) -> NDArray[np.bool_]:
    """Return which rows of two arrays are equal."""
    return (x == y).all(axis=1)


def seen_difference(a: Columns, b: Columns, i: int, j: int) -> tuple[NDArray[np.float64], float]:
    """Return the differences of the samples, and the largest of them and of the statistics.

    The largest difference of all is at least that: of any sample, of the minima, the maxima, the
    means, and of the root mean squares.
    """
    x, y = a.samples[i], b.samples[j]
    delta = np.zeros_like(x)
    if (a.shape[i] == b.shape[j]).all():
        delta = absolute_difference(x, y)
    counts = slice(NUM_NAN, None)
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
    size = math.prod(shape_of(a.shape[i]))
    whole = size <= NUM_SAMPLES and (a.shape[i] == b.shape[j]).all()
    if not whole and np.isfinite(least) and count < min(size, NUM_SAMPLES) / 2:
        return Distance(0.0, 0.0, count, exact=False)
    rms = np.nanmax([a.statistics[i, RMS], b.statistics[j, RMS], 0.0])
    worst = float(delta.max(initial=0.0)) if whole else least
    ulps = max_ulps(delta, x, y, dtype, rms) if np.isfinite(least) else float("inf")
    return Distance(worst, ulps, count, exact=bool(whole))


# --- rows in an order of their own ----------------------------------------------------------------

GROSS = 2.0**-5  # of a number's size, where a real difference went before
FAR_LESS = 1 / 16

Aside = set[tuple[int, int, int, int]]  # tables of ops of a and b, rows in them


def out_of_order(a: Record, b: Record, partners: Partners) -> Aside:
    """Return the results, in all forwards of a table, that some forward shows to be in disorder."""
    found: Aside = set()
    for case_a, case_b in zip(a.cases, b.cases, strict=True):
        for step_a, step_b in zip(case_a.steps, case_b.steps, strict=False):
            _look(step_a, step_b, partners, found)
            if step_a.tokens != step_b.tokens:
                break  # from here on the inputs differ
    return found


def set_aside(rows: RowDifferences, a: Step, b: Step, aside: Aside) -> RowDifferences:
    """Return rows without those that are no prompt's own."""
    tables = a.info["ops_table"], b.info["ops_table"]
    own = np.array([(*tables, int(i), int(j)) not in aside for i, j in rows.pairs], bool)
    return RowDifferences(rows.pairs, rows.comparable & own, rows.different & own)


def _look(a: Step, b: Step, partners: Partners, found: Aside) -> None:
    keys_a, keys_b = a.keys("ops"), b.keys("ops")
    if not keys_a or not keys_b:
        return
    columns = a.columns("ops"), b.columns("ops")
    rows = differences(partners(a, b).pairs, a, b, same_layout=False)
    after: dict[str, float] = {}
    limit = 0.0
    for i, j in rows.pairs[rows.different].tolist():
        name = a.info["ops_table"], b.info["ops_table"], i, j
        if name in found:
            continue
        share = _share(*columns, i, j)
        if share <= max(limit, _half_the_digits(keys_a[i].dtype, keys_b[j].dtype)):
            limit = GROSS  # what follows may have made more of this difference
            continue
        block = _block_of(keys_a[i].path, a)
        if block not in after:
            after[block] = _share_after(a, b, block)
        if after[block] < share * FAR_LESS:
            found.add(name)


def _half_the_digits(dtype_a: str, dtype_b: str) -> float:
    """Return a share of a number's size that one op's roundings never come near."""
    return 2.0 ** -(FLOATS[coarser_dtype(dtype_a, dtype_b)][1] / 2)


def _block_of(path: str, step: Step) -> str:
    names = (key.path for key in step.keys("blocks"))
    return next((name for name in names if f"{path}.".startswith(f"{name}.")), "")


def _share_after(a: Step, b: Step, block: str) -> float:
    """Return the difference of a block's output, else of the logits, as a share of its size."""
    shares = []
    columns = a.columns("blocks"), b.columns("blocks")
    for i, j in align(a.keys("blocks"), b.keys("blocks")).pairs.tolist():
        if a.keys("blocks")[i].path != block:
            continue
        (bits_a, dtype_a), (bits_b, dtype_b) = a.rows(i), b.rows(j)
        if bits_a.shape == bits_b.shape and bits_a.size:
            shares.append(_of_values(to_float64(bits_a, dtype_a), to_float64(bits_b, dtype_b)))
            shares.append(_share(*columns, i, j))
    if not shares:
        shares.append(_of_values(a.logits_float64(), b.logits_float64()))
    return max(shares)


def _share(a: Columns, b: Columns, i: int, j: int) -> float:
    """Return the largest difference of samples and statistics as a share of their size."""
    x, y = a.statistics[i], b.statistics[j]
    if (a.shape[i] != b.shape[j]).any() or (x[NUM_NAN:] != y[NUM_NAN:]).any():
        return np.inf
    rms = np.nanmax([x[RMS], y[RMS], 0.0])
    return max(_ratio(a.samples[i], b.samples[j], rms), _ratio(x[:NUM_NAN], y[:NUM_NAN], rms))


def _of_values(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    kept = x[np.isfinite(x)]
    return _ratio(x, y, np.sqrt(np.mean(kept * kept)) if kept.size else 0.0)


def _ratio(x: NDArray[np.float64], y: NDArray[np.float64], rms: float) -> float:
    delta = absolute_difference(x, y)
    size = np.maximum(np.fmax(np.abs(x), np.abs(y)), rms)
    with np.errstate(all="ignore"):
        shares = np.where(delta > 0, delta / size, 0.0)
    shares[np.isnan(shares)] = np.inf  # of infinities
    return float(shares.max(initial=0.0))


# --- contradictions -------------------------------------------------------------------------------

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
    same = _alike(left.shape[i], right.shape[j]) & _alike(left.hash[i], right.hash[j])
    same &= np.array([keys_a[x].dtype == keys_b[y].dtype for x, y in zip(i, j, strict=True)], bool)
    x, y = left.statistics[i], right.statistics[j]
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(x - y) <= 1e-9 * np.abs(x[:, RMS : RMS + 1])
    sums = np.isin(np.arange(x.shape[1]), (STATISTICS.index("mean"), RMS))
    samples = _same(left.samples[i], right.samples[j])
    statistics = _same(x, y) | close & sums
    for what, alike in (("statistics", statistics), ("samples", samples)):
        for row in np.flatnonzero(same & ~alike.all(axis=1))[:1]:
            raise contradiction_of(a, kind, int(i[row]), what)


def verify(record: Record) -> None:
    """Compare, once, what a record says twice: all of its numbers are read.

    The readable logits, margins and tokens follow from the logits, the hashes of whole tensors from
    these.

    Raises: DriftError naming the first place that contradicts another.
    """
    if record not in _verified:
        for step in record.steps():
            _verify_readable(step)
            rows = range(len(step.keys())) if step.case.values is not None else step.small
            for index in rows:
                _verify_hash(step, index)
        _verified.add(record)


def _verify_readable(step: Step) -> None:
    info, logits, decode = step.info, step.logits_float64(), step.record.run["decode"]
    ids = np.array(info["top_ids"], np.int64)
    known = np.minimum(ids, logits.shape[1] - 1)
    shown, margin = (np.array(info[name], np.float64) for name in ("top_logits", "margin"))
    wrong = ""
    if (ids != known).any():
        wrong = f"top_ids has {ids.max()}, of {logits.shape[1]} logits"
    elif not _same(shown, np.take_along_axis(logits, known, axis=1)).all():
        wrong = f"top_logits are not those of case_{step.case.number:04d}"
    elif not _same(margin, _margins(logits)).all():
        wrong = "margin is not that of its logits"
    elif decode in (None, "greedy") and step.tokens != logits.argmax(axis=1).tolist():
        wrong = "tokens are not the largest of its logits"
    if wrong:
        raise damaged(step.case.path("case.json"), f"steps[{step.number}].{wrong}")


def _margins(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest minus the second largest of each position; NaN counts as the largest."""
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf)
    top = np.partition(np.where(np.isnan(logits), np.inf, logits), -2, axis=1)[:, -2:]
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(np.isnan(logits).any(axis=1), np.nan, top[:, 1] - top[:, 0])


def _verify_hash(step: Step, index: int) -> None:
    value = step.value(index)
    assert value is not None
    bits, columns = value[0].reshape(-1), step.columns()
    if columns.statistics[index, NUM_NAN]:
        bits = same_nan(bits, value[1])
    if hash_bits(bits) != columns.hash[index].tobytes():
        whole, name = step.case.values, f"{step.prefix}/small/bits, row {index},"
        file, name = (whole, f"{step.prefix}/{index:05d}") if whole else (step.case.arrays, name)
        raise damaged(file.path, f"the tensor {name} has not the hash that it was given")


def _same(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which numbers are equal, or NaN in both places."""
    return (a == b) | np.isnan(a) & np.isnan(b)
