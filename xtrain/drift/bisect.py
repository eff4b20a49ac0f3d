"""`bisect`: which setting moves the numbers, at which op, how far; each in a process of its own.

The baseline has the first value of every factor. Then each other value alone, then each pair of
other values of two factors, and where there are three factors or more all last values at once:
single changes find what has an effect, pairs find what cancels or acts only together.

A factor is NAME=VALUE,VALUE,... where NAME is

    UPPER_CASE    an environment variable; the value `unset` removes it
    python        an interpreter, or the folder of a virtual environment
    compile       off | on: --mode eager | inductor
    others        a flag of `record` that xtrain.drift.settings calls a factor: threads, batch, ...

Of two Pythons whose numbers differ, which package does it: one of the other's at a time. The first
Python runs with one package of the second put before its own. What that package needs and the first
Python lacks comes, last in order, from the second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from tabulate import tabulate

from xtrain.drift.comparison.drift_report import deliver, size_text
from xtrain.drift.comparison.two_records import IDENTICAL, NOT_COMPARABLE, Comparison, compare
from xtrain.drift.recording.record_format import Record
from xtrain.drift.settings import (
    FACTORS,
    FLAGS,
    DriftError,
    check_use,
    counts,
    fill,
    values_of,
)

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

    Raises: DriftError for a name that is none or fewer than two different values, ConfigError for a
    value that no child could take. What only a model or a machine can refuse the children say.
    """
    name, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    name = name.strip()
    if not equals or len(values) < 2 or not all(values) or len(set(values)) != len(values):
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
            FLAGS[name].check(value)
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
    root = str(Path(__file__).resolve().parents[2])  # this xtrain, whatever the interpreter has
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
        script = f"{bootstrap}\nfrom xtrain.drift.cli import main\nsys.exit(main())"
        start = ["-c", f"import sys\n{script}"]
    command, pipe = [python, *start, *arguments, *flags], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            output, errors = child.communicate()
        except BaseException:  # when this process is ended the child goes first, and may clean up
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

Change = tuple[str, str]  # a factor's name, and a value that is not the baseline's
Setting = tuple[Change, ...]  # in the order of the factors; () is the baseline
BASELINE: Setting = ()


@dataclass
class Trial:
    """One child: what came of a setting."""

    record: Path | None = None
    error: str | None = None  # why there is no record
    comparison: Comparison | None = None  # with the baseline as a
    group: int | None = None  # those of one group have equal bits


@dataclass
class Plan:
    """Factors and the runs made so far."""

    factors: Sequence[Factor]
    runs: dict[Setting, Trial] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, tuple[str, ...]]:
        """The values of each factor by its name."""
        return {factor.name: factor.values for factor in self.factors}

    def settings(self) -> Iterator[Setting]:
        """Yield what is to run; a value without a result alone is in no pair and no more."""
        yield BASELINE
        yield from ((change,) for change in self.singles())
        yield from self.pairs()
        yield from self.everything()

    def singles(self) -> list[Change]:
        """Return every value that is not the baseline's."""
        return [(factor.name, value) for factor in self.factors for value in factor.values[1:]]

    def alive(self) -> list[Change]:
        """Return the single changes but those that have no result."""
        return [c for c in self.singles() if (c,) not in self.runs or self.runs[c,].error is None]

    def pairs(self) -> list[tuple[Change, Change]]:
        """Return the pairs of single changes of two factors, both of which run."""
        return [(x, y) for x, y in combinations(self.alive(), 2) if x[0] != y[0]]

    def everything(self) -> list[Setting]:
        """Return the setting with all last values that run, where no pair is that already."""
        last = tuple(dict(self.alive()).items())
        return [last] if len(last) > 2 else []

    def not_compared(self) -> list[str]:
        """Return the factors of which no value but the baseline's has a result."""
        alive = dict(self.alive())
        return [factor.name for factor in self.factors if factor.name not in alive]

    def named(self, setting: Setting) -> dict[str, str]:
        """Return the value of every factor by its name."""
        return {factor.name: factor.values[0] for factor in self.factors} | dict(setting)

    def group(self, setting: Setting) -> int | None:
        """Return the group of equal bits that a setting's run is in, None if there is none."""
        return self.runs[setting].group if setting in self.runs else None


def describe(setting: Setting) -> str:
    """Return what differs from the baseline, as NAME=VALUE."""
    return " ".join(f"{name}={value}" for name, value in setting) or "baseline"


def effects(plan: Plan) -> list[tuple[str, str]]:
    """Return (factor, what its values do) for every factor."""
    found = []
    for factor in plan.factors:
        failed, moved = [], []
        for value in factor.values[1:]:
            trial = plan.runs[(factor.name, value),]
            if trial.error is not None:
                failed.append(value)
            elif trial.group != plan.group(BASELINE):
                moved.append(value)
        words = [f"changes the numbers at {', '.join(moved)}"] if moved else []
        compared = len(failed) < len(factor.values) - 1
        if not moved and compared:
            words = ["no effect alone" if len(plan.factors) > 1 else "no effect"]
        if failed:
            nothing = "" if compared else "nothing could be compared: "
            words.append(f"{nothing}no result at {', '.join(failed)}")
        found.append((factor.name, "; ".join(words)))
    return found


def interactions(plan: Plan) -> list[tuple[str, str]]:
    """Return (setting, what is special) of the pairs that singles do not explain."""
    base = plan.group(BASELINE)
    found = []
    for pair in plan.pairs():
        both = plan.group(pair)
        if both is None:
            continue
        moved = [change for change in pair if plan.group((change,)) != base]
        words = None
        if len(moved) == 2 and both == base:
            words = "each changes the numbers, together they cancel"
        elif not moved and both != base:
            words = "neither has an effect alone, together they have"
        elif len(moved) == 1 and both != plan.group((moved[0],)):
            [quiet] = [change for change in pair if change not in moved]
            names = describe((quiet,)), describe((moved[0],))
            words = f"{names[0]} has an effect only where {names[1]}"
            if both == base:
                words = f"{names[0]} takes back what {names[1]} does"
        if words is not None:
            found.append((describe(pair), words))
    for setting in plan.everything():  # where no single change and no pair says it
        fewer = [*((change,) for change in setting), *combinations(setting, 2)]
        groups = [plan.group(some) for some in fewer]
        if None in (plan.group(setting), *groups):
            continue
        acts, moves = plan.group(setting) != base, [group != base for group in groups]
        if acts and not any(moves):
            found.append((describe(setting), "no one and no pair has an effect, all have"))
        if not acts and all(moves):
            found.append((describe(setting), "each changes the numbers, all together cancel"))
    return found


def equal_sets(plan: Plan) -> list[list[Setting]]:
    """Return the settings of equal bits together, the baseline's first."""
    found: dict[int, list[Setting]] = {}
    for setting, trial in plan.runs.items():
        if trial.group is not None:
            found.setdefault(trial.group, []).append(setting)
    return list(found.values())


# --- the command ----------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what bisect has beyond the flags of record."""
    add = parser.add_argument
    add(
        "--factor",
        action="append",
        default=[],
        metavar="NAME=A,B",
        help=f"values to try, the baseline's first: {', '.join(FACTORS)}, compile=off,on, "
        "python=VENV,VENV, or a VARIABLE; may be given again",
    )
    add("--packages", action="store_true", help="of two Pythons that differ: one package at a time")
    add("--max-runs", type=int, default=64, metavar="N", help="refuse to make more [64]")
    add("--keep", metavar="DIR", help="keep the records in a new folder")
    add("--json", metavar="FILE", help="write the result; -: to stdout instead of the tables")


def run_bisect(args: argparse.Namespace) -> int:
    """Run everything; the exit code is the worst verdict of a run against the baseline.

    A factor without one result to compare makes it 4, not comparable.
    """
    fill(args)
    plan = Plan(parse_all(args.factor))
    if not plan.factors:
        raise DriftError("bisect needs at least one --factor NAME=VALUE,VALUE")
    check_use(args, plan.values)
    if args.packages and "python" not in plan.values:
        raise DriftError("--packages compares two Pythons: --factor python=VENV1,VENV2")
    num_runs = len(list(plan.settings()))
    if num_runs > args.max_runs:
        raise DriftError(
            f"these factors need {num_runs} runs; fewer values, or --max-runs {num_runs}"
        )
    folder = _folder(args.keep)
    try:
        result = bisect(args, plan, folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    deliver(args.json, lambda: result, lambda: as_text(result))
    return int(result["exit_code"])


def bisect(args: argparse.Namespace, plan: Plan, folder: Path) -> dict[str, Any]:
    """Make the runs of a plan and return what they say, as plain values.

    Raises: DriftError when the baseline has no result.
    """
    representatives: list[Record] = []  # of each group, the baseline's first
    for number, setting in enumerate(plan.settings()):
        _progress(f"run {number + 1}: {describe(setting)}")
        out = folder / f"{number:03d}.drift"
        trial = plan.runs[setting] = _try(args, plan.named(setting), out, representatives)
        if setting == BASELINE and trial.error is not None:
            raise DriftError(f"the baseline has no result: {trial.error}")
    return _result(plan, one_at_a_time(args, plan, folder) if args.packages else [])


def _try(
    args: argparse.Namespace, named: Mapping[str, str], out: Path, representatives: list[Record]
) -> Trial:
    """Return what comes of the values of the factors; a record like no other joins the list."""
    child = run_child([*_record_arguments(args, named), "--out", str(out)], named)
    if child.error is not None:
        return Trial(error=child.error)
    record = Record(out)
    comparison = compare(representatives[0], record) if representatives else None
    same = (compare(other, record).exit_code == IDENTICAL for other in representatives)
    group = next((number for number, equal in enumerate(same) if equal), len(representatives))
    if group == len(representatives):
        representatives.append(record)
    return Trial(out, comparison=comparison, group=group)


def as_text(result: dict[str, Any]) -> str:
    """Return the tables; what was found comes last."""
    rows = [
        (
            run["setting"],
            run["group"] or "-",
            run["exit_code"] if run["exit_code"] is not None else "-",
            run["error"] or run["first_divergence"] or "-",
            run["size"] or "-",
            f"{run['max_shift']:.3g}" if run["max_shift"] else "-",
        )
        for run in result["runs"]
    ]
    headers = ("run", "set", "verdict", "first difference from the baseline", "size", "max shift")
    parts = [tabulate(rows, headers, disable_numparse=True)]
    if result["packages"]:
        swaps = [
            (p["package"], p["from"], p["to"], p["error"] or p["first_divergence"] or "no effect")
            for p in result["packages"]
        ]
        columns = ("package, alone", "from", "to", "first difference")
        parts.append(tabulate(swaps, columns, disable_numparse=True))
    parts.append(f"{len(result['runs'])} runs, {len(result['sets'])} sets of equal bits")
    lines = [f"{name}: {words}" for name, words in result["effects"] + result["interactions"]]
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def _result(plan: Plan, packages: list[dict[str, Any]]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for setting, trial in plan.runs.items():
        found = trial.comparison
        first = found.first_divergence if found else None
        runs.append(
            {
                "setting": describe(setting),
                "values": plan.named(setting),
                "group": None if trial.group is None else letter(trial.group),
                "exit_code": found.exit_code if found else (None if trial.error else IDENTICAL),
                "error": trial.error,
                "first_divergence": str(first) if first else None,
                "step": first.step if first else None,
                "size": size_text(first.distance) if first else None,
                "max_shift": found.max_shift if found else 0.0,
            }
        )
    worst = max(run["exit_code"] or IDENTICAL for run in runs)
    return {
        # without a result of some factor there is no complete comparison
        "exit_code": NOT_COMPARABLE if plan.not_compared() else worst,
        "baseline": plan.named(BASELINE),
        "runs": runs,
        "sets": [[describe(setting) for setting in group] for group in equal_sets(plan)],
        "effects": effects(plan),
        "interactions": interactions(plan),
        "packages": packages,
    }


def letter(number: int) -> str:
    """Return A to Z, then A1, B1, ..."""
    turn, place = divmod(number, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


def _record_arguments(args: argparse.Namespace, named: Mapping[str, str]) -> list[str]:
    """Return what record gets of bisect's own flags, under the values of the factors.

    A flag that one value of a factor has no use for is left out there.
    """
    values = values_of(args, {name: (value,) for name, value in named.items()})
    arguments = ["record", args.model]
    for flag in FLAGS.values():
        if flag.was_given(args) and flag.name not in named and counts(flag, values):
            arguments.append(flag.shown(args).replace(" ", "=", 1))
    pad_to = FLAGS["pad-to"]
    padded = pad_to.was_given(args) or "pad-to" in named
    if named.keys() & {"mode", "compile"} and not padded and counts(pad_to, values):
        # compiled modes pad; without it the padding would be a second difference
        arguments.append("--pad-to=auto")
    return arguments


def _folder(keep: str | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="xtrain-drift-"))
    try:
        Path(keep).mkdir(parents=True)
    except OSError as error:
        raise DriftError(f"cannot make {keep}: {error.strerror}") from None
    return Path(keep)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- one package at a time ------------------------------------------------------------------------

# Prints {"version": [3, 11], "site": FOLDER, "packages": {name: [version, [top-level names]]}}.
LISTING = """
import json, sys, sysconfig
from importlib import metadata
site = sysconfig.get_paths()["purelib"]
found = {}
for dist in metadata.distributions(path=[site]):
    files = dist.files or []
    tops = sorted({f.parts[0] for f in files if f.parts[0] not in ("..", "__pycache__")})
    found[dist.metadata["Name"].lower()] = [dist.version, tops]
print(json.dumps({"version": sys.version_info[:2], "site": site, "packages": found}))
"""
# What a recording imports and computes with; others cannot change a number.
RELEVANT = ("torch", "triton", "transformers", "tokenizers", "numpy", "safetensors")


def one_at_a_time(args: argparse.Namespace, plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Return per differing package what the first Python gives with the second's version."""
    setting, record = plan.named(BASELINE), plan.runs[BASELINE].record
    assert record is not None
    baseline, first = Record(record), listing(setting["python"])
    found: list[dict[str, Any]] = []
    for value in plan.values["python"][1:]:
        second = listing(value)
        if first["version"] != second["version"]:
            raise DriftError(
                f"packages of Python {second['version']} do not load in {first['version']}; "
                "--packages needs two environments of one Python version"
            )
        for name, old, new in differing(first, second):
            _progress(f"{name} {old} -> {new}")
            out = folder / f"package_{len(found):03d}.drift"
            overlay = make_overlay(folder / f"overlay_{len(found):03d}", second, name)
            arguments = [*_record_arguments(args, setting), "--out", str(out)]
            child = run_child(arguments, setting, bootstrap=path_of(overlay, second["site"]))
            divergence = None
            if child.error is None:
                divergence = compare(baseline, Record(out)).first_divergence
            found.append(
                {
                    "python": value,
                    "package": name,
                    "from": old,
                    "to": new,
                    "error": child.error,
                    "first_divergence": str(divergence) if divergence else None,
                }
            )
    return found


def listing(value: str) -> dict[str, Any]:
    """Return what a Python has installed."""
    done = subprocess.run([interpreter(value), "-c", LISTING], capture_output=True, text=True)
    if done.returncode:
        raise DriftError(f"python={value} cannot list its packages: {done.stderr.strip()[-200:]}")
    return json.loads(done.stdout)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (package, version, other version) of the relevant packages that both have."""
    return [
        (name, first["packages"][name][0], second["packages"][name][0])
        for name in RELEVANT
        if name in first["packages"]
        and name in second["packages"]
        and first["packages"][name][0] != second["packages"][name][0]
    ]


def path_of(overlay: Path, site: str) -> str:
    """Return the Python that puts an overlay first, and the other environment last."""
    return f"sys.path.insert(1, {str(overlay)!r}); sys.path.append({site!r})"


def make_overlay(overlay: Path, source: dict[str, Any], package: str) -> Path:
    """Return a folder that holds links to one package and to what says its version."""
    overlay.mkdir()
    for name in source["packages"][package][1]:
        target = Path(source["site"]) / name
        if target.exists() and not (overlay / name).exists():
            (overlay / name).symlink_to(target)
    return overlay
