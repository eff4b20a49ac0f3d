"""Which results are in an order of their own, so that no part of them is one prompt's.

Of two records of other batches each prompt's part is compared, an even share of the leading
dimension. A mixture of experts sorts the tokens of the whole batch, some models put time before
the batch: the parts are then rows of other prompts, and their difference says nothing.

Two things tell such rows from a batch that really computes otherwise. They differ by more than half
of their digits, as no rounding of an op does; and what follows with rows of the prompt's own (the
output of their block, else the logits) differs far less.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.align import RowDifferences, align, differences
from xtrain.drift.pairing import Partners
from xtrain.drift.record_folder import Columns, Record, Step
from xtrain.drift.values import (
    FLOATS,
    STATISTICS,
    absolute_difference,
    coarser_dtype,
    to_float64,
)

GROSS = 2.0**-5  # of a number's size, where a real difference went before
FAR_LESS = 1 / 16
RMS, NUM_NAN = STATISTICS.index("rms"), STATISTICS.index("num_nan")

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
    rows = differences(partners(a, b).pairs, *columns, keys_a, keys_b, same_layout=False)
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
