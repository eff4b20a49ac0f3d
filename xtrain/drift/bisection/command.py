"""`bisect`: which setting moves the numbers, at which op, how far; each in a process of its own.

Of two Pythons whose numbers differ, which package does it: one of the other's at a time.

The first Python runs with one package of the second put before its own. What that package needs
and the first Python lacks comes, last in order, from the second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from xtrain.drift.bisection.factors import (
    Plan,
    Run,
    Setting,
    effects,
    groups,
    interactions,
    interpreter,
    parse_all,
    run_child,
)
from xtrain.drift.comparison.records import IDENTICAL, NOT_COMPARABLE, compare
from xtrain.drift.comparison.report import deliver, size_text
from xtrain.drift.errors import DriftError
from xtrain.drift.recording.format import Record
from xtrain.drift.settings import FLAGS, check_use, counts, fill, values_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what bisect has beyond the flags of record."""
    add = parser.add_argument
    add(
        "--factor",
        action="append",
        default=[],
        metavar="NAME=A,B",
        help="values to try, the baseline's first: threads, batch, compile=off,on, mode, dtype, "
        "device, decode, pad-to, python=VENV,VENV, or a VARIABLE; may be given again",
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
    if args.packages and not any(factor.name == "python" for factor in plan.factors):
        raise DriftError("--packages compares two Pythons: --factor python=VENV1,VENV2")
    if plan.num_runs() > args.max_runs:
        raise DriftError(
            f"these factors need {plan.num_runs()} runs; fewer values, or --max-runs "
            f"{plan.num_runs()}"
        )
    folder = _folder(args.keep)
    try:
        result = bisect(args, plan, folder, _progress)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    deliver(args.json, lambda: result, lambda: as_text(result))
    return int(result["exit_code"])


def bisect(
    args: argparse.Namespace, plan: Plan, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Make the runs of a plan and return what they say, as plain values.

    Raises: DriftError when the baseline has no result.
    """
    runner = _Runner(args, plan, folder, progress)
    baseline = runner(plan.baseline)
    if baseline.failed:
        raise DriftError(f"the baseline has no result: {baseline.error}")
    for change in plan.singles():
        runner(plan.changed(change))
    for x, y in plan.pairs():
        runner(plan.changed(x, y))
    for setting in plan.everything():
        runner(setting)
    packages: list[dict[str, Any]] = []
    if args.packages:
        packages = one_at_a_time(plan, folder, runner.arguments(plan.baseline), progress)
    return _result(plan, packages)


class _Runner:
    """Runs settings, each once, and sorts their records into groups of equal bits."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: Plan,
        folder: Path,
        progress: Callable[[str], None],
    ):
        self.args, self.plan, self.folder, self.progress = args, plan, folder, progress
        self.representatives: list[Record] = []

    def arguments(self, setting: Setting) -> list[str]:
        """Return the arguments of a setting's child that are none of its factors."""
        return _record_arguments(self.args, self.plan.named(setting))

    def __call__(self, setting: Setting) -> Run:
        """Return the run of a setting."""
        runs = self.plan.runs
        if setting in runs:
            return runs[setting]
        self.progress(f"run {len(runs) + 1}: {self.plan.describe(setting)}")
        run = runs[setting] = Run(setting)
        out = self.folder / f"{len(runs) - 1:03d}.drift"
        arguments = [*self.arguments(setting), "--out", str(out)]
        child = run_child(arguments, self.plan.named(setting))
        if child.error is not None:
            run.error = child.error
            return run
        run.record = out
        record = Record(out)
        run.group = self._group(record)
        if setting != self.plan.baseline:
            base = self.representatives[0]
            run.comparison = compare(base, record)
        return run

    def _group(self, record: Record) -> int:
        for number, other in enumerate(self.representatives):
            if compare(other, record).exit_code == IDENTICAL:
                return number
        self.representatives.append(record)
        return len(self.representatives) - 1


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
    lines = [f"{name}: {words}" for name, words in result["effects"]]
    lines += [f"{setting}: {words}" for setting, words in result["interactions"]]
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def _result(plan: Plan, packages: list[dict[str, Any]]) -> dict[str, Any]:
    runs = []
    worst = IDENTICAL
    for setting, run in plan.runs.items():
        found = run.comparison
        first = found.first_divergence if found else None
        code = found.exit_code if found else (None if run.failed else IDENTICAL)
        worst = max(worst, code or 0)
        runs.append(
            {
                "setting": plan.describe(setting),
                "values": plan.named(setting),
                "group": None if run.group is None else letter(run.group),
                "exit_code": code,
                "error": run.error,
                "first_divergence": str(first) if first else None,
                "step": first.step if first else None,
                "size": size_text(first.distance) if first else None,
                "max_shift": found.max_shift if found else 0.0,
            }
        )
    if plan.not_compared():  # no complete comparison
        worst = NOT_COMPARABLE
    return {
        "exit_code": worst,
        "baseline": {f.name: f.values[0] for f in plan.factors},
        "runs": runs,
        "sets": [[plan.describe(setting) for setting in group] for group in groups(plan)],
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


def one_at_a_time(
    plan: Plan, folder: Path, arguments: Sequence[str], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return per differing package what the first Python gives with the second's version."""
    number = next(i for i, factor in enumerate(plan.factors) if factor.name == "python")
    values = plan.factors[number].values
    names = [factor.name for factor in plan.factors]
    base_run = plan.runs[plan.baseline]
    assert base_run.record is not None
    baseline = Record(base_run.record)
    first = listing(values[0])
    found: list[dict[str, Any]] = []
    for value in values[1:]:
        second = listing(value)
        if first["version"] != second["version"]:
            raise DriftError(
                f"packages of Python {second['version']} do not load in {first['version']}; "
                "--packages needs two environments of one Python version"
            )
        for name, old, new in differing(first, second):
            progress(f"{name} {old} -> {new}")
            out = folder / f"package_{len(found):03d}.drift"
            overlay = make_overlay(folder / f"overlay_{len(found):03d}", second, name)
            bootstrap = path_of(overlay, second["site"])
            setting = dict(zip(names, plan.baseline, strict=True))
            child = run_child([*arguments, "--out", str(out)], setting, bootstrap=bootstrap)
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
