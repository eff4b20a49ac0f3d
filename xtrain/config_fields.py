"""What a configuration section is made of: fields with a meaning, checked on construction.

No torch here, see xtrain.config.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field and says what to do."""


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Return a dataclass field that carries its meaning.

    limits: any of unit, choices, at_least, above, below, at_most.
    """
    return field(default=default, metadata={"meaning": meaning, **limits})


class Section:
    """Base of the sections: checks every field's type and limits on construction."""

    section_name = ""

    def __post_init__(self) -> None:
        section: Any = type(self)
        hints = type_hints(section)
        for item in fields(section):
            name = f"{self.section_name}.{item.name}"
            value = _check_type(name, getattr(self, item.name), hints[item.name])
            _check_limits(name, value, item.metadata)
            object.__setattr__(self, item.name, value)  # a list became a tuple, an int a float


def unknown(what: str, name: str, known: Iterable[str], source: str) -> str:
    """Return the message for a name that is not among the known ones, with the closest of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    # train.learning_rate for optim.learning_rate: the right key in another section
    close += [
        k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2] and k not in close
    ]
    advice = f"did you mean {' or '.join(close[:3])}?" if close else f"known: {', '.join(known)}"
    return f"unknown {what} {name!r} in {source}; {advice}"


@cache
def type_hints(section: Any) -> dict[str, Any]:
    """Return the types of a section's fields."""
    return get_type_hints(section)


def kinds_of(hint: Any) -> list[type]:
    """Return the classes that a type allows: int | None gives int and NoneType."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [get_origin(part) or part for part in parts]


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _check_type(name: str, value: Any, hint: Any) -> Any:
    kinds = kinds_of(hint)
    if value is None and type(None) in kinds:
        return None
    if tuple in kinds:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{name} must be a list of texts, got {value!r}")
    if type(value) in kinds:  # exactly: a bool is no number here
        return value
    if float in kinds and type(value) is int:
        return float(value)
    wanted = " or ".join(_KIND_NAMES[kind] for kind in kinds if kind in _KIND_NAMES)
    raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None:
        return
    if "choices" in limits and value not in limits["choices"]:
        choices = limits["choices"]
        close = difflib.get_close_matches(value, choices, n=1)
        advice = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}{advice}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    if "at_least" in limits and value < limits["at_least"]:
        raise ConfigError(f"{name} must be at least {limits['at_least']}, got {value}")
    if "above" in limits and value <= limits["above"]:
        raise ConfigError(f"{name} must be above {limits['above']}, got {value}")
    if "below" in limits and value >= limits["below"]:
        raise ConfigError(f"{name} must be below {limits['below']}, got {value}")
    if "at_most" in limits and value > limits["at_most"]:
        raise ConfigError(f"{name} must be at most {limits['at_most']}, got {value}")
