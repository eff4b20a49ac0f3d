"""Can a shift of the logits change the greedy token? The pairwise rule, in fp64.

Per position, with i the lowest argmax of a and d = b - a:

    margin    a_i - max over j != i of a_j
    shift     max over j != i of |d_j - d_i|
    can_flip  some j != i has |d_j - d_i| >= a_i - a_j
    flipped   argmax b != i

A shift that moved one pair this far may move it back next time or the other way, so its size is
what counts, not its direction. A constant added to all logits has d_j = d_i and flips nothing;
a tie (a_i = a_j) can flip without any shift; a margin above 2 * max |d| survives everything.

NumPy alone: the same code serves live tensors and records that are read without torch.

Margins by step say how sure greedy decoding is, and loops where it starts to repeat itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.recording.record_format import Record

CHUNK_ELEMENTS = 1 << 22  # of one fp64 temporary: 32 MiB
HUGE = 2.0**1020  # of larger numbers a difference of differences may be infinite
ENDS = 10  # steps at the beginning and at the end whose margins are compared
MIN_REPEATED = 8  # tokens that must repeat before a loop is called one
MAX_PERIOD = 32


@dataclass(frozen=True, eq=False)
class FlipVerdict:
    """An array per field, a number for each position; one position when an int indexes it."""

    token: Any  # i, what a chooses
    token_b: Any  # what b chooses
    runner_up: Any  # the j of the margin; -1 where no other token has a logit above -inf
    margin: Any
    shift: Any
    can_flip: Any
    flipped: Any

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, position: int) -> FlipVerdict:
        return FlipVerdict(*(getattr(self, f.name)[position].item() for f in fields(self)))

    def __iter__(self) -> Iterator[FlipVerdict]:
        return (self[position] for position in range(len(self)))


def flip_verdict(logits_a: Any, logits_b: Any) -> FlipVerdict:
    """Return per position whether the step from logits_a to logits_b can change the argmax.

    Shapes:   both [positions, V]; torch tensors of any dtype and device, or NumPy arrays.
    Numerics: fp64. NaN counts as the largest value, as in torch's and NumPy's argmax; NaN or an
              infinity in the same place of both is no shift, in one alone it is an infinite one.
    Raises:   ValueError for shapes that differ, are not [positions, V], or have V = 0.
    """
    a, b = as_float64(logits_a), as_float64(logits_b)
    if a.shape != b.shape or a.ndim != 2 or a.shape[1] == 0:
        raise ValueError(
            f"logits must be two [positions, V] of one shape, got {a.shape}, {b.shape}"
        )
    rows = max(1, CHUNK_ELEMENTS // a.shape[1])
    pieces = [_verdict(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows)]
    if not pieces:
        pieces = [_verdict(a, b)]
    return FlipVerdict(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def as_float64(values: Any) -> NDArray[np.float64]:
    """Return a torch tensor or an array as fp64; bf16 needs torch's own cast."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _verdict(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
    token, token_b = a.argmax(axis=1), b.argmax(axis=1)
    scale = _room(a, b)
    x, y = a * scale, b * scale
    # np.asarray of a matrix minus a column: pairs (i, j) of each position, j along the columns
    gap = _difference(_column(x, token), x, equal_infinities=0.0)
    moved = _difference(y, x, equal_infinities=0.0)
    # both of a pair became infinite: nothing is known of their order any more
    shift = np.abs(_difference(moved, _column(moved, token), equal_infinities=np.inf))
    np.put_along_axis(gap, token[:, None], np.inf, axis=1)  # i with itself is no pair
    np.put_along_axis(shift, token[:, None], 0.0, axis=1)
    flipped = token != token_b
    with np.errstate(over="ignore"):  # a difference of two numbers may be none in fp64
        margin = gap.min(axis=1, initial=np.inf) / scale[:, 0]
        largest = shift.max(axis=1, initial=0.0) / scale[:, 0]
    return (
        token,
        token_b,
        _runner_up(a, token),
        margin,
        largest,
        # a flip that happened could happen, whatever the last rounding of the differences says
        (shift >= gap).any(axis=1) | flipped,
        flipped,
    )


def _room(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a power of two per position that keeps differences of differences finite."""
    largest = np.zeros(len(a))
    for values in (a, b):
        sizes = np.abs(values, where=np.isfinite(values), out=np.zeros_like(values))
        largest = np.maximum(largest, sizes.max(axis=1, initial=0.0))
    return np.where(largest > HUGE, 2.0**-3, 1.0)[:, None]


def _runner_up(a: NDArray[np.float64], token: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest of the others, -1 where all of them are out of the question."""
    others = a.copy()
    np.put_along_axis(others, token[:, None], -np.inf, axis=1)
    found = others.argmax(axis=1)
    tie = np.isneginf(_column(a, token)[:, 0])  # every logit is -inf: the next index
    none = np.isneginf(_column(others, found)[:, 0]) & (~tie | (a.shape[1] == 1))
    return np.where(none, -1, np.where(tie, 1, found))


def _column(values: NDArray[np.float64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.take_along_axis(values, index[:, None], axis=1)


def _difference(
    x: NDArray[np.float64], y: NDArray[np.float64], *, equal_infinities: float
) -> NDArray[np.float64]:
    """Return x - y; NaN is larger than all and equals itself, infinities that cancel are given."""
    with np.errstate(invalid="ignore"):
        result = np.asarray(x - y)
    strange = np.isnan(result)
    if strange.any():
        x_nan, y_nan = np.broadcast_arrays(np.isnan(x), np.isnan(y))
        values = np.where(x_nan, np.inf, -np.inf)
        values[x_nan & y_nan] = 0.0
        values[~x_nan & ~y_nan] = equal_infinities
        result[strange] = values[strange]
    return result


# --- margins by step, loops -----------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A text that repeats its last `period` tokens from `start` to its end."""

    prompt: int
    start: int  # step of the first token of the first turn
    period: int


@dataclass(frozen=True)
class Margins:
    """Margins of a record that decodes."""

    by_step: tuple[float, ...]  # median over the prompts
    ends: int  # steps at each end: ENDS, or all there are
    first: float  # median over the first `ends` steps of all prompts
    last: float
    loops: tuple[Loop, ...]
    num_prompts: int


def find_loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return (start, period) of the repetition that a list ends with, None if it ends without.

    At least two whole turns, and MIN_REPEATED tokens that equal those a period before.
    """
    size = len(tokens)
    for period in range(1, min(MAX_PERIOD, size // 2) + 1):
        start = size - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if size - period - start >= max(period, MIN_REPEATED):
            return start, period
    return None


def margins(record: Record) -> Margins | None:
    """Return the margins by step, None for a record of one forward."""
    if record.run["decode"] is None:
        return None
    rows, loops = [], []
    for case in record.cases:
        rows.append([float(step.info["margin"][-1]) for step in case.steps])
        loop = find_loop([step.tokens[-1] for step in case.steps])
        if loop is not None:
            loops.append(Loop(case.number, *loop))
    table = np.array(rows)
    ends = min(ENDS, table.shape[1])
    return Margins(
        by_step=tuple(float(value) for value in np.median(table, axis=0)),
        ends=ends,
        first=float(np.median(table[:, :ends])),
        last=float(np.median(table[:, -ends:])),
        loops=tuple(loops),
        num_prompts=len(rows),
    )
