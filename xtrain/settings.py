"""Settings: frozen dataclasses whose fields carry default, meaning, unit and range, declared once.

    @dataclass(frozen=True, kw_only=True)
    class Sampling(Settings):
        num_tokens: int = option(200, "how many to sample", at_least=1, flag={"name": "tokens"})
        temperature: float = option(0.8, "0: greedy", at_least=0)

A value is checked on construction, whoever wrote it. `flags` are those of a command line, with
their help; `fits` is the check of a value in a file that somebody else may have written.

No torch here, see xtrain.config.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from xtrain.files import shown


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field and says what to do."""


def option(default: Any, meaning: str, **about: Any) -> Any:
    """Return a dataclass field that carries its meaning.

    Args:   about: limits, any of unit, choices, at_least, above, below, at_most, pattern (a regular
            expression and the words for it); flag, a dict of what is otherwise on a command line
            (name, default, meaning, shown as the default, words beside numbers, limits, what
            argparse takes), or None for no flag; and whatever else its readers want to know.
    """
    return field(default=default, metadata={"meaning": meaning, **about})


class Settings:
    """Base of all settings: checks every field's type and limits on construction."""

    section_name: ClassVar[str] = ""  # put before a field's name in messages
    error: ClassVar[type[ValueError]] = ConfigError

    def __post_init__(self) -> None:
        section: Any = type(self)
        hints = type_hints(section)
        for item in fields(section):
            name = f"{self.section_name}.{item.name}".lstrip(".")
            try:
                value = _check_type(name, getattr(self, item.name), kinds_of(hints[item.name]))
                _check_limits(name, value, item.metadata)
            except ConfigError as error:
                raise self.error(str(error)) from None
            object.__setattr__(self, item.name, value)  # a list became a tuple, an int a float


def fits(section: Any, item: Field) -> Callable[[Any], bool]:
    """Return whether a value may be that of a field: the check of a file's reader."""

    def check(value: Any) -> bool:
        try:
            checked = _check_type(item.name, value, kinds_of(type_hints(section)[item.name]))
            _check_limits(item.name, checked, item.metadata)
        except ConfigError:
            return False
        return True

    return check


# --- on a command line ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A field on a command line."""

    field: str  # behind its section's name
    name: str  # without the dashes in front
    kind: type  # bool, int, float, str
    default: Any
    about: Mapping[str, Any]  # the field's metadata, and what is otherwise here

    @property
    def dest(self) -> str:
        """The name of its value in what argparse returns."""
        return self.name.replace("-", "_")

    def add_to(self, add: Callable[..., Any]) -> None:
        """Add it to a parser. It has no default there: None says that it was not given."""
        about = self.about
        given = {key: about[key] for key in ("action", "nargs", "metavar") if key in about}
        if self.kind is bool:
            given.setdefault("action", "store_true")
        else:
            given["type"] = str if "words" in about else self.kind
        default = about.get("shown", self.default)
        text = f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
        if self.kind is bool or default in (None, "", ()):
            text = ""
        add(f"--{self.name}", default=None, help=f"{about['meaning']}{text}", **given)

    def was_given(self, args: argparse.Namespace) -> bool:
        """Return whether it stands on the command line."""
        value = getattr(args, self.dest)
        return value is not None and value is not False

    def value(self, args: argparse.Namespace) -> Any:
        """Return what was given, or the default."""
        value = getattr(args, self.dest) if self.was_given(args) else self.default
        text = isinstance(value, str) and value not in self.about.get("words", ())
        return self.kind(value) if text else value

    def shown(self, args: argparse.Namespace) -> str:
        """Return it as it was given."""
        value = getattr(args, self.dest)
        return f"--{self.name}" if value is True else f"--{self.name} {value}"

    def check(self, value: Any) -> None:
        """Raise ConfigError for a value that it cannot have; text stands for a number."""
        name, about = f"--{self.name}", self.about
        if value in about.get("words", ()):
            return
        if self.kind in (int, float) and isinstance(value, str):
            try:
                value = self.kind(value)
            except ValueError:
                wanted = " or ".join((_KIND_NAMES[self.kind], *about.get("words", ())))
                raise ConfigError(f"{name} must be {wanted}, got {shown(value)}") from None
        _check_limits(name, value, about)


def flags(*sections: Any, named_only: bool = False) -> dict[str, Flag]:
    """Return the flags of some classes of settings by their names, in the order of the fields.

    named_only: those of fields that have a `flag` of their own.
    """
    found = {}
    for section in sections:
        for item in fields(section):
            other = item.metadata.get("flag", None if named_only else {})
            if other is None:
                continue
            about: dict[str, Any] = {"name": item.name.replace("_", "-"), "default": item.default}
            about |= {**item.metadata, **other}
            kinds = kinds_of(type_hints(section)[item.name])
            kind = next((k for k in kinds if k in _KIND_NAMES), str)
            field_name = f"{section.section_name}.{item.name}".lstrip(".")
            flag = Flag(field_name, about["name"], kind, about["default"], about)
            found[flag.name] = flag
    return found


# --- names ---------------------------------------------------------------------------------------


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


# --- values --------------------------------------------------------------------------------------


def _check_type(name: str, value: Any, kinds: list[type]) -> Any:
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
    if "pattern" in limits and re.fullmatch(limits["pattern"][0], value) is None:
        raise ConfigError(f"{name} must be {limits['pattern'][1]}, got {shown(value)}")
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
