"""Two training runs: their fingerprints compared step by step, rank by rank. NumPy alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xtrain.drift.comparison.differences import align
from xtrain.drift.comparison.pairing import Ops, cause, pair
from xtrain.drift.errors import DriftError
from xtrain.drift.recording.format import FIRST_WEIGHT, Formula, OpKey
from xtrain.drift.recording.training_folder import (
    Row,
    find,
    ranks,
    read_start,
    read_step,
    steps,
)

ANY_MICRO_BATCH = ("weight", "optimizer", "mask", "loss", "gradient norm", "gradient")
# where a run's files lie, and what is written or computed beside the steps
NO_NUMBER = re.compile(
    r"run\.(name|folder|dump_graphs|drift_every)|data\.cache_dir|checkpoint\..*"
    r"|train\.(eval|sample|log)_.*"
)
CAPABILITY = "torch.aten_cpu_capability"
SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 4


@dataclass(frozen=True)
class TrainingDivergence:
    """The first thing that differs between two runs."""

    step: int
    rank: int
    kind: str
    module_path: str
    op: str
    size: float  # a lower bound, from the statistics
    last_equal: int | None  # the recorded step before, at which everything was equal
    cause: str = ""  # as far as the configurations tell

    def __str__(self) -> str:
        what = {"op": f"{self.op} in {self.module_path or 'the model itself'}"}
        words = " ".join(part for part in (self.kind, self.module_path, self.op) if part)
        return what.get(self.kind, words)


@dataclass(frozen=True)
class TrainingComparison:
    """Two runs, step by step."""

    reason: str | None
    changes: list[tuple[str, Any, Any]]
    first_divergence: TrainingDivergence | None
    losses: list[tuple[int, int, Any, Any]]  # rank, step, loss of a, loss of b
    num_rows: int
    alone: tuple[Sequence[int], Sequence[int]] = ((), ())  # steps that a has and b has not, and b's
    num_unmatched: int = 0  # results of common steps that one run alone has
    micro_batches: str = ""  # how those of the two runs differ
    unmatched: dict[str, int] = field(default_factory=dict)  # op, module and run -> times

    @property
    def exit_code(self) -> int:
        """Return 0 all bits equal, 1 they differ, 4 not comparable."""
        if self.reason is not None:
            return NOT_COMPARABLE
        return SAME if self.first_divergence is None else DIFFERENT


def compare_training(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> TrainingComparison:
    """Compare the recorded steps of two runs, rank by rank, and name the first difference.

    Raises: DriftError for a folder that is none, or a file that is damaged.
    """
    folders = [find(a), find(b)]
    for path, found in zip((a, b), folders, strict=True):
        if found is None:
            raise DriftError(f"{path} holds no fingerprints; train with --drift-every N")
    left, right = (ranks(folder) for folder in folders if folder is not None)
    starts = []
    for side in (left, right):
        every = [read_start(folder, rank) for rank, folder in enumerate(side)]
        starts.append(every[0])
    environments = [start["environment"] for start in starts]
    if all("configuration" in start for start in starts):  # older runs have none
        environments = [{**start["environment"], **_settings(start)} for start in starts]
    changes = [
        (name, environments[0].get(name), environments[1].get(name))
        for name in dict.fromkeys([*environments[0], *environments[1]])
        if environments[0].get(name) != environments[1].get(name)
    ]
    reason = None
    if len(left) != len(right):
        reason = f"A has {len(left)} ranks, B has {len(right)}"
    elif starts[0]["weights"] != starts[1]["weights"]:
        reason = "other models: their weights have other names"
    if reason is not None:
        return TrainingComparison(reason, changes, None, [], 0)
    return _compare_ranks(left, right, changes, starts[0]["weights"])


def _compare_ranks(
    left: Sequence[Path],
    right: Sequence[Path],
    changes: list[tuple[str, Any, Any]],
    weights: Sequence[str],
) -> TrainingComparison:
    found: list[TrainingDivergence] = []
    losses: list[tuple[int, int, Any, Any]] = []
    micro_batches = ""
    num_rows = 0
    without: Counter[str] = Counter()
    alone: tuple[set[int], set[int]] = set(), set()
    for rank, (x, y) in enumerate(zip(left, right, strict=True)):
        last_equal = None
        recorded = steps(x), steps(y)
        alone[0].update(recorded[0] - recorded[1])
        alone[1].update(recorded[1] - recorded[0])
        for step in sorted(recorded[0] & recorded[1]):
            one, other = (read_step(folder, step, rank) for folder in (x, y))
            losses.append((rank, step, one["loss"], other["loss"]))
            sizes = [_micro_batch(record) for record in (one, other)]
            if sizes[0] != sizes[1]:
                micro_batches = f"{sizes[0]} in A, {sizes[1]} in B"
                one, other = _of_any_micro_batch(one), _of_any_micro_batch(other)
            num_rows += len(one["rows"])
            divergence, unmatched = _first_row(one, other, step, rank, last_equal, weights)
            without.update(unmatched)
            if divergence is not None:
                found.append(divergence)
                break
            last_equal = step
    first = min(found, key=lambda d: (d.step, d.rank), default=None)
    settings = [f"{name} is {x} in A, {y} in B" for name, x, y in changes if _is_setting(name)]
    if first is not None and settings and not first.cause.startswith("its arguments"):
        first = replace(first, cause="; ".join([*settings, *filter(None, [first.cause])]))
    reason = None
    if not losses:
        reason = "no step was recorded in both; use the same --drift-every"
    elif first is not None and first.kind == "input":
        reason = f"other data: the {first.module_path} of step {first.step} differ"
    elif first is not None and first.kind == "weight" and first.step == 0 and "before" in first.op:
        reason = f"other initial weights: {first.module_path}{_drawn_otherwise(changes)}"
    sides = sorted(alone[0]), sorted(alone[1])
    return TrainingComparison(
        reason,
        changes,
        first,
        losses,
        num_rows,
        sides,
        without.total(),
        micro_batches,
        dict(without),
    )


def _settings(start: dict[str, Any]) -> dict[str, Any]:
    """Return "section.key" -> value of what in the configuration may move a number."""
    return {
        f"configuration.{section}.{key}": value
        for section, table in start["configuration"].items()
        for key, value in table.items()
        if NO_NUMBER.fullmatch(f"{section}.{key}") is None
    }


def _is_setting(name: str) -> bool:
    return name.startswith("configuration.")


def _drawn_otherwise(changes: list[tuple[str, Any, Any]]) -> str:
    """Return why two seeds alike give other weights, and what to do, where that is known."""
    for name, x, y in changes:
        if name == CAPABILITY:
            return (
                f"; torch draws other numbers from one seed under another CPU capability ({x} in "
                f"A, {y} in B; ATEN_CPU_CAPABILITY sets it). To compare the training alone, train "
                "one run to its first checkpoint, copy its folder, and continue both copies with "
                "--resume RUN, each under its own capability"
            )
    return ""


def _micro_batch(step: dict[str, Any]) -> list[int]:
    return next((row[4] for row in step["rows"] if row[0] == "input"), [])


def _of_any_micro_batch(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step without what is of its first micro-batch: inputs and the ops on them."""
    rows = [row for row in step["rows"] if row[0] in ANY_MICRO_BATCH]
    return {**step, "rows": rows, "formulas": None}


def _first_row(
    a: dict[str, Any],
    b: dict[str, Any],
    step: int,
    rank: int,
    last_equal: int | None,
    weights: Sequence[str],
) -> tuple[TrainingDivergence | None, list[str]]:
    """Return the first difference of a step, and the results without a partner."""
    rows_a, rows_b = ([Row(*row) for row in step["rows"]] for step in (a, b))
    partners = _Partners(a, b, rows_a, rows_b, weights)
    for i, j in partners.pairs:
        x, y = rows_a[i], rows_b[j]
        if x.shape != y.shape:
            partners.alone.append(
                f"{x.op or x.kind} of {x.path or 'the model'} in both, other shape"
            )
        elif x.hash != y.hash:
            found = TrainingDivergence(
                step, rank, x.kind, x.path, x.op, _size(x, y), last_equal, partners.cause(i, j)
            )
            return found, partners.alone
        elif x.dtype == y.dtype and x.statistics[:2] != y.statistics[:2]:
            raise DriftError(
                f"the runs contradict each other: {x.kind} {x.path} {x.op} of step {step} has "
                "equal bits and other statistics; one of them was edited"
            )
    return None, partners.alone


class _Partners:
    """Which rows of a step belong together: ops by what they compute from, the rest by name."""

    def __init__(
        self,
        a: dict[str, Any],
        b: dict[str, Any],
        rows_a: list[Row],
        rows_b: list[Row],
        weights: Sequence[str],
    ):
        sides = rows_a, rows_b
        ops, rest = (
            [[i for i, row in enumerate(rows) if (row.kind == "op") is kind] for rows in sides]
            for kind in (True, False)
        )
        named = align(
            *([_key(rows[i]) for i in where] for rows, where in zip(sides, rest, strict=True))
        )
        self.rows_of = ops
        self.ops = [
            _ops([rows[i] for i in where], step.get("formulas"), weights)
            for rows, where, step in zip(sides, ops, (a, b), strict=True)
        ]
        self.found = pair(*self.ops)
        pairs = [(rest[0][i], rest[1][j]) for i, j in named.pairs.tolist()]
        pairs += [(ops[0][i], ops[1][j]) for i, j in self.found.pairs.tolist()]
        self.pairs = sorted(pairs)
        marks = [{r.path: r.hash for r in rows if r.kind == "weight"} for rows in sides]
        self.other_weights = {name for name, mark in marks[0].items() if mark != marks[1].get(name)}
        self.alone = [
            f"{sides[side][i].op or sides[side][i].kind} of {sides[side][i].path or 'the model'} "
            f"in {'AB'[side]} alone"
            for side, where in enumerate(
                ((named.only_a, self.found.only_a), (named.only_b, self.found.only_b))
            )
            for i in [*(rest[side][k] for k in where[0]), *(ops[side][k] for k in where[1])]
        ]

    def cause(self, i: int, j: int) -> str:
        """Return why the results of two ops differ, "" for what is no op."""
        if i not in self.rows_of[0]:
            return ""
        rows = self.rows_of[0].index(i), self.rows_of[1].index(j)
        left, right = self.ops
        return cause(left, right, self.found, *rows, self.other_weights)


def _key(row: Row) -> OpKey:
    return OpKey(row.path, f"{row.kind} {row.op}", row.dtype)


def _ops(rows: list[Row], formulas: Sequence[Any] | None, weights: Sequence[str]) -> Ops:
    of = [Formula(tuple(origins), words) for origins, words in formulas or ()]
    last = min((origin for formula in of for origin in formula.operands), default=0)
    names = [*weights, *(f"buffer {n}" for n in range(FIRST_WEIGHT - last + 1))]
    return Ops(
        keys=[OpKey(row.path, row.op, row.dtype) for row in rows],
        formulas=None if formulas is None else of,
        weights=names,
        values=[row.hash for row in rows],
        shapes=[tuple(row.shape) for row in rows],
    )


def _size(a: Row, b: Row) -> float:
    differences = [
        abs(float(x) - float(y)) for x, y in zip(a.statistics, b.statistics, strict=True)
    ]
    return max((d for d in differences if d == d), default=0.0)


def as_text(comparison: TrainingComparison) -> str:
    """Return the report."""
    from tabulate import tabulate

    parts = _only_one_has(comparison)
    if comparison.changes:
        rows = [(name, str(a)[:60], str(b)[:60]) for name, a, b in comparison.changes]
        parts.append(tabulate(rows, ("setting", "A", "B"), disable_numparse=True))
    first = comparison.first_divergence
    if comparison.losses:
        shown = comparison.losses[-8:]
        parts.append(tabulate(shown, ("rank", "step", "loss of A", "loss of B"), floatfmt=".9g"))
    if first is not None:
        before = "no recorded step before it"
        if first.last_equal is not None:
            before = f"step {first.last_equal} was equal in everything"
        size = f", size at least {first.size:.3g}" if first.size else ""
        cause = f"\n  {first.cause}" if first.cause else ""
        parts.append(
            f"first difference: step {first.step}, rank {first.rank}: {first}{size}\n"
            f"  {before}{cause}"
        )
    if comparison.reason is not None:
        verdict = f"not comparable: {comparison.reason}"
    elif first is None:
        verdict = f"identical: all bits of {comparison.num_rows} results are equal"
    else:
        verdict = "the runs differ"
    return "\n\n".join([*parts, f"verdict {comparison.exit_code}: {verdict}"]) + "\n"


def _only_one_has(comparison: TrainingComparison) -> list[str]:
    """Return a line for what was not compared, steps and results."""
    lines = [
        f"recorded by {name} alone: steps {', '.join(map(str, steps[:8]))}"
        + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
        for name, steps in zip("AB", comparison.alone, strict=True)
        if steps
    ]
    if comparison.micro_batches:
        lines.append(
            f"the micro-batches differ ({comparison.micro_batches}): their inputs and ops are of "
            "other samples and not compared; weights, optimiser, loss and gradients are"
        )
    if comparison.num_unmatched:
        lines.append(f"without a partner, not compared: {comparison.num_unmatched} results")
        rows = list(comparison.unmatched.items())
        lines += [f"  {name}{f', {times} times' if times > 1 else ''}" for name, times in rows[:8]]
        lines += [f"  and {len(rows) - 8} more"] if len(rows) > 8 else []
    return ["\n".join(lines)] if lines else []
