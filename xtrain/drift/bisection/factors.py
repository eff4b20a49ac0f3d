"""Factors, and the runs that are made of them.

A factor is a setting with several values; a child process runs with one value of each.

NAME=VALUE,VALUE,... where NAME is

    UPPER_CASE    an environment variable; the value `unset` removes it
    python        an interpreter, or the folder of a virtual environment
    compile       off | on: --mode eager | inductor
    others        a flag of `record` that xtrain.drift.settings calls a factor: threads, batch, ...

The baseline has the first value of every factor. Then each other value alone, then each pair of
other values of two factors, and where there are three factors or more all last values at once:
single changes find what has an effect, pairs find what cancels or acts only together.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from xtrain.drift.comparison.records import Comparison
from xtrain.drift.errors import DriftError
from xtrain.drift.settings import FACTORS, FLAGS, check_flag

VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
UNSET = "unset"
CLEAN_UP_S = 5.0  # that a child has, when it is asked to end, before it is killed


@dataclass(frozen=True)
class Factor:
    """A name with the values to try, the first of which is the baseline's."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """How a child ended."""

    code: int
    output: str
    error: str | None  # why it has no result: its last line, or the signal that killed it


def parse(text: str) -> Factor:
    """Return the factor that NAME=V1,V2 means.

    Raises: DriftError for a name that is none, fewer than two different values, or a value that no
    child could take. What only a model or a machine can refuse is for the children to say.
    """
    name, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    name = name.strip()
    if not equals or len(set(values)) < 2 or not all(values) or len(set(values)) != len(values):
        raise DriftError(f"a factor is NAME=VALUE,VALUE of different values, got {text!r}")
    if name not in ("python", "compile", *FACTORS) and not VARIABLE.fullmatch(name):
        known = ", ".join(("python", "compile", *FACTORS))
        raise DriftError(f"unknown factor {name!r}; known: {known}, or a VARIABLE in capitals")
    if name == "compile" and not set(values) <= {"off", "on"}:
        raise DriftError(f"compile is off or on, got {rest!r}")
    for value in values:
        if name == "python":
            interpreter(value)
        elif name in FACTORS:
            check_flag(FLAGS[name], value)
    return Factor(name, values)


def parse_all(texts: Sequence[str]) -> list[Factor]:
    """Return all factors. Raises: DriftError for a name given twice, as `parse` does."""
    factors = [parse(text) for text in texts]
    names = [factor.name for factor in factors]
    for name in names:
        if names.count(name) > 1 or (name == "mode" and "compile" in names):
            raise DriftError(f"the factor {name} is given twice")
    return factors


def interpreter(value: str) -> str:
    """Return the Python of a virtual environment's folder, or the interpreter itself."""
    path = Path(value)
    found = path / "bin" / "python" if path.is_dir() else path
    if not os.access(found, os.X_OK):
        raise DriftError(f"python={value} is neither an interpreter nor a virtual environment")
    return str(found)


def run_child(
    arguments: Sequence[str], setting: Mapping[str, str], *, bootstrap: str | None = None
) -> Result:
    """Run `python -m xtrain.drift ARGUMENTS` alone, under a setting of factors.

    bootstrap: Python that runs first, in the same interpreter.
    """
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[3])  # this xtrain, whatever the interpreter has
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([root, *([inherited] if inherited else [])])
    python, flags = sys.executable, []
    for name, value in setting.items():
        if name == "python":
            python = interpreter(value)
        elif name == "compile":
            flags.append(f"--mode={'inductor' if value == 'on' else 'eager'}")
        elif name in FACTORS:
            flags.append(f"--{name}={value}")
        elif value == UNSET:
            environment.pop(name, None)
        else:
            environment[name] = value
    start = ["-m", "xtrain.drift"]
    if bootstrap is not None:
        script = f"{bootstrap}\nfrom xtrain.drift.command import main\nsys.exit(main())"
        start = ["-c", f"import sys\n{script}"]
    return _run([python, *start, *arguments, *flags], environment)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> Result:
    """Return how a process ended. When this one is ended it goes first, and may clean up."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            output, errors = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.wait(CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return Result(child.returncode, output, _failure(child.returncode, errors))


def _failure(code: int, stderr: str) -> str | None:
    if code == 0:
        return None
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return (lines[-1].strip() if lines else f"exit code {code}").removeprefix("error: ")


# --- which runs there are, and what they say ------------------------------------------------------

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
    def values(self) -> dict[str, tuple[str, ...]]:
        """The values of each factor by its name."""
        return {factor.name: factor.values for factor in self.factors}

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
