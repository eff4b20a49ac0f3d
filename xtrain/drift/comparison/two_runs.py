"""Two training runs: their fingerprints compared step by step, rank by rank. NumPy alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xtrain.drift.comparison.pairing import Ops, cause, pair
from xtrain.drift.recording.record_format import FIRST_WEIGHT, Formula, OpKey
from xtrain.drift.recording.training_format import Row, find, ranks, read_start, read_step, steps
from xtrain.drift.settings import DriftError

ANY_MICRO_BATCH = ("weight", "optimizer", "mask", "loss", "gradient norm", "gradient")
# where a run's files lie, and what is written or computed beside the steps
NO_NUMBER = re.compile(
    r"run\.(name|folder|dump_graphs|drift_every)|data\.cache_dir|checkpoint\..*"
    r"|train\.(eval|sample|log)_.*"
)
CAPABILITY = "torch.aten_cpu_capability"
SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 4

Change = tuple[str, Any, Any]


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
    changes: list[Change]
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

    @property
    def verdict(self) -> str:
        """The exit code in words."""
        if self.reason is not None:
            return f"not comparable: {self.reason}"
        same = f"identical: all bits of {self.num_rows} results are equal"
        return same if self.first_divergence is None else "the runs differ"


def compare_training(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> TrainingComparison:
    """Compare the recorded steps of two runs, rank by rank, and name the first difference.

    Raises: DriftError for a folder that is none, or a file that is damaged.
    """
    sides, starts = [], []
    for path in (a, b):
        folder = find(path)
        if folder is None:
            raise DriftError(f"{path} holds no fingerprints; train with --drift-every N")
        sides.append(ranks(folder))
        starts.append([read_start(where, rank) for rank, where in enumerate(sides[-1])][0])
    environments = [start["environment"] for start in starts]
    if all("configuration" in start for start in starts):  # older runs have none
        environments = [{**start["environment"], **_settings(start)} for start in starts]
    x, y = environments
    names = dict.fromkeys([*x, *y])
    changes = [(name, x.get(name), y.get(name)) for name in names if x.get(name) != y.get(name)]
    reason = None
    if len(sides[0]) != len(sides[1]):
        reason = f"A has {len(sides[0])} ranks, B has {len(sides[1])}"
    elif starts[0]["weights"] != starts[1]["weights"]:
        reason = "other models: their weights have other names"
    if reason is not None:
        return TrainingComparison(reason, changes, None, [], 0)
    return _compare_ranks(sides[0], sides[1], changes, starts[0]["weights"])


def _compare_ranks(
    left: Sequence[Path], right: Sequence[Path], changes: list[Change], weights: Sequence[str]
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
            different, why, unmatched = _compare_step(one, other, weights)
            without.update(unmatched)
            if different is not None:
                row, size = different[0], _size(*different)
                found.append(
                    TrainingDivergence(
                        step, rank, row.kind, row.path, row.op, size, last_equal, why
                    )
                )
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
    return TrainingComparison(
        reason,
        changes,
        first,
        losses,
        num_rows,
        alone=(sorted(alone[0]), sorted(alone[1])),
        num_unmatched=without.total(),
        micro_batches=micro_batches,
        unmatched=dict(without),
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


def _drawn_otherwise(changes: list[Change]) -> str:
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


def _micro_batch(step: Mapping[str, Any]) -> list[int]:
    return next((row.shape for row in step["rows"] if row.kind == "input"), [])


def _of_any_micro_batch(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step without what is of its first micro-batch: inputs and the ops on them."""
    rows = [row for row in step["rows"] if row.kind in ANY_MICRO_BATCH]
    return {**step, "rows": rows, "formulas": None}


def _compare_step(
    a: Mapping[str, Any], b: Mapping[str, Any], weights: Sequence[str]
) -> tuple[tuple[Row, Row] | None, str, list[str]]:
    """Return the first rows that differ, why as far as is known, and results without a partner."""
    rows_a, rows_b = a["rows"], b["rows"]
    left, right = (_ops(step, weights) for step in (a, b))
    alignment = pair(left, right)
    alone = [
        f"{_result(rows[i])} in {side} alone"
        for side, rows, some in (("A", rows_a, alignment.only_a), ("B", rows_b, alignment.only_b))
        for i in some
    ]
    for i, j in alignment.pairs.tolist():
        x, y = rows_a[i], rows_b[j]
        if x.shape != y.shape:
            alone.append(f"{_result(x)} in both, other shape")
        elif x.hash != y.hash:
            marks = [
                {r.path: r.hash for r in rows if r.kind == "weight"} for rows in (rows_a, rows_b)
            ]
            others = {name for name, mark in marks[0].items() if mark != marks[1].get(name)}
            why = cause(left, right, alignment, i, j, others) if x.kind == "op" else ""
            return (x, y), why, alone
        elif x.dtype == y.dtype and x.statistics[:2] != y.statistics[:2]:
            raise DriftError(
                f"the runs contradict each other: {x.kind} {x.path} {x.op} of step {a['step']} has "
                "equal bits and other statistics; one of them was edited"
            )
    return None, "", alone


def _result(row: Row) -> str:
    return f"{row.op or row.kind} of {row.path or 'the model'}"


def _ops(step: Mapping[str, Any], weights: Sequence[str]) -> Ops:
    """Return the rows of a step as pairing takes them: what is no op computes from its own name."""
    rows: list[Row] = step["rows"]
    recorded = step["formulas"]  # operands are numbers of ops
    ops = [i for i, row in enumerate(rows) if row.kind == "op"]
    last = min((origin for origins, _ in recorded or () for origin in origins), default=0)
    names = [*weights, *(f"buffer {n}" for n in range(FIRST_WEIGHT - last + 1 - len(weights)))]
    formulas = [Formula((FIRST_WEIGHT - len(names) - i,), "") for i in range(len(rows))]
    for i, (origins, words) in zip(ops, recorded or (), strict=False):
        formulas[i] = Formula(tuple(ops[o] if o >= 0 else o for o in origins), words)
    keys = [OpKey(r.path, r.op if r.kind == "op" else f"{r.kind} {r.op}", r.dtype) for r in rows]
    return Ops(
        keys=keys,
        formulas=None if recorded is None else formulas,
        weights=[*names, *(f"{key.op} {key.path}" for key in keys)],
        values=[row.hash for row in rows],
        shapes=[tuple(row.shape) if row.kind == "op" else () for row in rows],
    )


def _size(a: Row, b: Row) -> float:
    differences = [
        abs(float(x) - float(y)) for x, y in zip(a.statistics, b.statistics, strict=True)
    ]
    return max((d for d in differences if d == d), default=0.0)
