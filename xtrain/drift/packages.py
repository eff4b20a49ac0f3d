"""Of two Pythons whose numbers differ, which package does it: one of the other's at a time.

The first Python runs with one package of the second put before its own. What that package needs
and the first Python lacks comes, last in order, from the second.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xtrain.drift.bisect_runs import Plan
from xtrain.drift.comparison import compare
from xtrain.drift.errors import DriftError
from xtrain.drift.factors import interpreter, run_child
from xtrain.drift.record_folder import Record

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
