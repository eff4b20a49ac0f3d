"""JSON as this package writes it: no NaN, no key twice, every number finite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from xtrain.drift.errors import DriftError


def load(path: Path) -> Any:
    """Return what a file holds. Raises: DriftError, naming the file, for one that is no JSON."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise DriftError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DriftError(f"{path} is damaged: {error}; record again") from None


def parse(text: bytes) -> Any:
    """Return the values of a JSON text. Raises: ValueError for anything else."""
    try:
        return json.loads(
            text.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
    return found
