"""Which runs `bisect` makes, and what their equality says about each factor and each pair.

The baseline has the first value of every factor. Then each other value alone, then each pair of
other values of two factors, and where there are three factors or more all last values at once:
single changes find what has an effect, pairs find what cancels or acts only together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from xtrain.drift.bisection.factors import Factor
from xtrain.drift.comparison.records import Comparison

Setting = tuple[str, ...]  # one value per factor, in their order


@dataclass
class Run:
    """One child: a setting and what came of it."""

    setting: Setting
    record: Path | None = None
    error: str | None = None  # why there is no record
    comparison: Comparison | None = None  # with the baseline as a
    group: int | None = None  # runs of one group have equal bits

    @property
    def failed(self) -> bool:
        """Whether there is nothing to compare."""
        return self.error is not None


@dataclass
class Plan:
    """Factors and the runs made so far."""

    factors: Sequence[Factor]
    runs: dict[Setting, Run] = field(default_factory=dict)

    @property
    def baseline(self) -> Setting:
        """The first value of every factor."""
        return tuple(factor.values[0] for factor in self.factors)

    def changed(self, *changes: tuple[int, str]) -> Setting:
        """Return the baseline with some factors, by number, at other values."""
        values = list(self.baseline)
        for number, value in changes:
            values[number] = value
        return tuple(values)

    def singles(self) -> list[tuple[int, str]]:
        """Return (factor's number, value) of every value that is not the baseline's."""
        return [(i, value) for i, f in enumerate(self.factors) for value in f.values[1:]]

    def pairs(self) -> list[tuple[tuple[int, str], tuple[int, str]]]:
        """Return the pairs of single changes of two factors, both of which run."""
        alive = [change for change in self.singles() if not self._failed(change)]
        return [(x, y) for x, y in combinations(alive, 2) if x[0] != y[0]]

    def everything(self) -> list[Setting]:
        """Return the setting with all last values that run, where no pair is that already."""
        if len(self.factors) < 3:
            return []
        alive: dict[int, str] = {}
        for number, value in self.singles():
            if not self._failed((number, value)):
                alive[number] = value
        return [self.changed(*alive.items())] if len(alive) > 2 else []

    def num_runs(self) -> int:
        """Return how many runs there will be at most."""
        counts = [len(factor.values) - 1 for factor in self.factors]
        pairs = sum(x * y for x, y in combinations(counts, 2))
        return 1 + sum(counts) + pairs + len(self.everything())

    def named(self, setting: Setting) -> dict[str, str]:
        """Return a setting's values by the names of their factors."""
        names = [factor.name for factor in self.factors]
        return dict(zip(names, setting, strict=True))

    def describe(self, setting: Setting) -> str:
        """Return what differs from the baseline, as NAME=VALUE."""
        words = [
            f"{factor.name}={value}"
            for factor, value, base in zip(self.factors, setting, self.baseline, strict=True)
            if value != base
        ]
        return " ".join(words) or "baseline"

    def not_compared(self) -> list[Factor]:
        """Return the factors of which no value but the baseline's has a result."""
        alive = {number for number, value in self.singles() if not self._failed((number, value))}
        return [factor for number, factor in enumerate(self.factors) if number not in alive]

    def _failed(self, change: tuple[int, str]) -> bool:
        run = self.runs.get(self.changed(change))
        return run is not None and run.failed

    def group(self, *changes: tuple[int, str]) -> int | None:
        """Return the group of equal bits that a setting's run is in, None if there is none."""
        run = self.runs.get(self.changed(*changes))
        return run.group if run is not None else None


def effects(plan: Plan) -> list[tuple[str, str]]:
    """Return (factor, what its values do) for every factor."""
    base = plan.group()
    found = []
    for number, factor in enumerate(plan.factors):
        failed, moved = [], []
        for value in factor.values[1:]:
            run = plan.runs[plan.changed((number, value))]
            if run.failed:
                failed.append(value)
            elif run.group != base:
                moved.append(value)
        words = [f"changes the numbers at {', '.join(moved)}"] if moved else []
        if not moved and len(failed) < len(factor.values) - 1:
            words = ["no effect alone" if len(plan.factors) > 1 else "no effect"]
        if failed:
            nothing = "" if len(failed) < len(factor.values) - 1 else "nothing could be compared: "
            words.append(f"{nothing}no result at {', '.join(failed)}")
        found.append((factor.name, "; ".join(words)))
    return found


def interactions(plan: Plan) -> list[tuple[str, str]]:
    """Return (setting, what is special) of the pairs that singles do not explain."""
    base = plan.group()
    found = []
    for x, y in plan.pairs():
        both = plan.group(x, y)
        if both is None:
            continue
        effect_x, effect_y = plan.group(x) != base, plan.group(y) != base
        words = None
        if effect_x and effect_y and both == base:
            words = "each changes the numbers, together they cancel"
        elif not effect_x and not effect_y and both != base:
            words = "neither has an effect alone, together they have"
        elif effect_x != effect_y and both != plan.group(x if effect_x else y):
            quiet, loud = (y, x) if effect_x else (x, y)
            names = [f"{plan.factors[i].name}={value}" for i, value in (quiet, loud)]
            words = f"{names[0]} has an effect only where {names[1]}"
            if both == base:
                words = f"{names[0]} takes back what {names[1]} does"
        if words is not None:
            found.append((plan.describe(plan.changed(x, y)), words))
    return found + _of_everything(plan)


def _of_everything(plan: Plan) -> list[tuple[str, str]]:
    """Return what all last values at once do, where no single one and no pair of them says it."""
    base = plan.group()
    found = []
    for setting in plan.everything():
        run = plan.runs.get(setting)
        changes = [
            (i, value)
            for i, (value, first) in enumerate(zip(setting, plan.baseline, strict=True))
            if value != first
        ]
        fewer = [(change,) for change in changes] + list(combinations(changes, 2))
        moved = [plan.group(*some) != base for some in fewer]
        if run is None or run.failed or None in (plan.group(*some) for some in fewer):
            continue
        if run.group != base and not any(moved):
            found.append((plan.describe(setting), "no one and no pair has an effect, all have"))
        if run.group == base and all(moved):
            found.append((plan.describe(setting), "each changes the numbers, all together cancel"))
    return found


def groups(plan: Plan) -> list[list[Setting]]:
    """Return the settings of equal bits together, the baseline's first."""
    found: dict[int, list[Setting]] = {}
    for setting, run in plan.runs.items():
        if run.group is not None:
            found.setdefault(run.group, []).append(setting)
    return list(found.values())
