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

from xtrain.files import shown


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
    advice = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    return f"unknown {what} {shown(name)} in {source}; {advice}"


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the names "section.key" that may be meant by one that is not among them, best first.

    The key decides and the section, which may be another or not given, only ranks. A key is close
    in its spelling, or in its words: `warmup`, `lr` and `gradient_clipping` for warmup_steps,
    learning_rate and grad_clip.
    """
    section, _, key = name.rpartition(".")
    known = list(known)
    known = [other for other in known if other.rpartition(".")[2] == key] or known
    found = []
    for other in known:
        other_section, _, other_key = other.rpartition(".")
        score = _ratio_of_words(key.split("_"), other_key.split("_"))
        if (spelling := _ratio(key, other_key)) >= 0.7:
            score = max(score, spelling)
        if score >= 0.6:
            found.append((score + 0.3 * _ratio(section, other_section), other))
    found.sort(key=lambda item: -item[0])
    return [other for score, other in found[:count] if score > found[0][0] - 0.3]


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _ratio_of_words(asked: list[str], known: list[str]) -> float:
    """How much two names share: the harmonic mean of the shares of their words that match."""
    used, covered = 0, set()
    for word in asked:
        for start, other in enumerate(known):
            if min(len(word), len(other)) >= 3 and (
                word.startswith(other) or other.startswith(word)
            ):
                places = {start}
            elif len(word) >= 2 and word == "".join(w[:1] for w in known[start:][: len(word)]):
                places = set(range(start, start + len(word)))
            elif word == other:
                places = {start}
            else:
                continue
            used += 1
            covered |= places
            break
    return 2 * used * len(covered) / (used * len(known) + len(covered) * len(asked) or 1)


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
            return tuple(_check_text(name, item) for item in value)
        raise ConfigError(f"{name} must be a list of texts, got {shown(value)}")
    if type(value) in kinds:  # exactly: a bool is no number here
        return _check_text(name, value) if isinstance(value, str) else value
    if float in kinds and type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else math.inf
    wanted = " or ".join(_KIND_NAMES[kind] for kind in kinds if kind in _KIND_NAMES)
    raise ConfigError(f"{name} must be {wanted}, got {shown(value)}")


def _check_text(name: str, text: str) -> str:
    """Refuse what neither config.toml nor the name of a file can hold."""
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{name} must be UTF-8 text without NUL bytes, got {shown(text)}")
    return text


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None:
        return
    if "choices" in limits and value not in limits["choices"]:
        choices = limits["choices"]
        close = difflib.get_close_matches(value, choices, n=1)
        advice = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}{advice}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}")
    if isinstance(value, int) and value >= limits.get("at_most", 2**63 - 1) + 1:
        limit = limits.get("at_most", "2^63 - 1")
        raise ConfigError(f"{name} must be at most {limit}, got {shown(value)}")
    if "at_least" in limits and value < limits["at_least"]:
        raise ConfigError(f"{name} must be at least {limits['at_least']}, got {shown(value)}")
    if "above" in limits and value <= limits["above"]:
        raise ConfigError(f"{name} must be above {limits['above']}, got {shown(value)}")
    if "below" in limits and value >= limits["below"]:
        raise ConfigError(f"{name} must be below {limits['below']}, got {value}")
    if "at_most" in limits and value > limits["at_most"]:
        raise ConfigError(f"{name} must be at most {limits['at_most']}, got {value}")
