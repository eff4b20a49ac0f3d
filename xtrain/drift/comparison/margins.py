"""How sure greedy decoding is, step by step, and where it starts to repeat itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xtrain.drift.recording.format import Record

ENDS = 10  # steps at the beginning and at the end whose margins are compared
MIN_REPEATED = 8  # tokens that must repeat before a loop is called one
MAX_PERIOD = 32


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
