"""Do the JSON files of a record hold what its reader takes for granted?

The manifest finds what was damaged by chance. A file that was edited together with its manifest
passes there, and is refused here by name instead of failing somewhere in a comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xtrain.drift.errors import DriftError

RUN = ("mode", "dtype", "device", "batch_size", "pad_to", "decode", "num_tokens")
STEP = {"length": int, "ops_table": int, "blocks_table": int, "tokens": list, "margin": list}


def check_record(contents: Any, path: Path) -> None:
    """Raise DriftError, naming the field, unless record.json has its form."""
    _is(contents, dict, path, "the whole")
    for name, kind in {"environment": dict, "model": dict, "run": dict}.items():
        _is(contents.get(name), kind, path, name)
    for name in ("prompts", "tables"):
        _filled(contents.get(name), path, name)
    for name in ("blocks", "weights"):
        _is(contents["model"].get(name), list, path, f"model.{name}")
    for name in RUN:
        if name not in contents["run"]:
            raise _wrong(path, f"run.{name}", "missing")
    for number, prompt in enumerate(contents["prompts"]):
        if not isinstance(prompt, dict) or "tokens" not in prompt:
            raise _wrong(path, f"prompts[{number}]", f"{str(prompt)[:40]!r}")
    effect = contents.get("observer_effect", "missing")
    known = isinstance(effect, dict) and {"differs", "max_abs"} <= effect.keys()
    if effect is not None and not known:
        raise _wrong(path, "observer_effect", f"{str(effect)[:40]!r}")


def check_case(contents: Any, path: Path, num_tables: int) -> None:
    """Raise DriftError, naming the field, unless case_NNNN.json has its form."""
    _is(contents, dict, path, "the whole")
    if "text" not in contents:
        raise _wrong(path, "text", "missing")
    for number, step in enumerate(_filled(contents.get("steps"), path, "steps")):
        where = f"steps[{number}]"
        _is(step, dict, path, where)
        for name, kind in STEP.items():
            _is(step.get(name), kind, path, f"{where}.{name}")
        for name in ("ops_table", "blocks_table"):
            if not 0 <= step[name] < num_tables:
                raise _wrong(path, f"{where}.{name}", str(step[name]))
        if not step["tokens"] or len(step["tokens"]) != len(step["margin"]):
            raise _wrong(path, f"{where}.margin", f"{len(step['margin'])} numbers")


def _filled(value: Any, path: Path, name: str) -> list:
    if not isinstance(value, list) or not value:
        raise _wrong(path, name, f"{str(value)[:40]!r}")
    return value


def _is(value: Any, kind: type, path: Path, name: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(path, name, f"{str(value)[:40]!r}")


def _wrong(path: Path, name: str, what: str) -> DriftError:
    return DriftError(f"{path} is damaged: {name} is {what}; record again")
