"""The keywords of xtrain.compile and the checks on them; what `sums=` says of a sum of a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from torch import fx, nn

from xtrain import passes as graph_passes
from xtrain import torch_compat
from xtrain.compiler.compile_report import line_of, plain_path

_ALLOWED = {
    "backend": ("inductor", "aot_eager", "eager"),
    "kernels": ("auto", "triton", "off"),
    "existing": ("skip", "replace"),
    "logits": ("keep", "drop"),
}
_OF_TORCH = ("mode", "options", "dynamic", "fullgraph")
_SETTLED = ("drop", "leave")


@dataclass(frozen=True)
class Options:
    """The keywords of xtrain.compile, whose docstring says what each means, and their defaults."""

    dropout: float = 0.0
    backend: str = "inductor"
    kernels: str = "auto"
    existing: str = "skip"
    logits: str = "keep"
    strict: bool = True
    verify: bool = False
    passes: tuple[Any, ...] = ()
    disable_passes: tuple[str, ...] = ()
    dump_graphs: Path | None = None
    sums: dict[str, str] = field(default_factory=dict)
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False

    def settled(self, node: fx.Node) -> str:
        """Return what the user says of a sum of a graph: "drop", "leave" or "".

        sums={"layers.*.mixer": "leave", "model.py:57": "drop"}: a place is the path of the module
        whose code adds, as reports name it, or its file and line. In a path `*` is anything.
        """
        if not self.sums:
            return ""
        path, line = plain_path(node), line_of(node)
        for place, said in self.sums.items():
            file, _, number = place.rpartition(":")
            is_line = file and number.isdigit()
            if f"/{line}".endswith(f"/{place}") if is_line else fnmatchcase(path, place):
                return said
        return ""


def checked_options(
    model: nn.Module,
    *,
    dropout: float | None = None,
    passes: Any = (),
    disable_passes: Any = (),
    dump_graphs: str | Path | None = None,
    sums: Mapping[str, str] | None = None,
    **others: Any,
) -> Options:
    """Return the keywords of xtrain.compile as Options.

    Raises:   TypeError, ValueError naming the keyword, the value and what it may be.
    """
    names = {option.name for option in dataclasses.fields(Options)}
    for name, allowed in _ALLOWED.items():
        if (value := others.get(name, allowed[0])) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    if unknown := sorted(set(others) - names):
        raise TypeError(
            f"unexpected keyword {unknown[0]!r}; beside its own, xtrain.compile takes "
            f"{', '.join(_OF_TORCH)} of torch.compile"
        )
    if isinstance(disable_passes, str):
        disable_passes = (disable_passes,)
    _check_passes(passes, disable_passes)
    if not isinstance(dump_graphs, str | PathLike | None):
        raise TypeError(f"dump_graphs must be a folder's path, got {dump_graphs!r}")
    for name in ("mode", "options"):
        if others.get(name) is None:
            others.pop(name, None)
    options = Options(
        dropout=_probability(model, dropout),
        passes=tuple(passes),
        disable_passes=tuple(disable_passes),
        dump_graphs=None if dump_graphs is None else Path(dump_graphs),
        sums=_checked_sums(sums),
        **others,
    )
    _check_of_torch(options)
    return options


def _check_passes(passes: Any, disable_passes: Any) -> None:
    """Raise for wrong passes here and not in the first step."""
    for name, value, what in (
        ("passes", passes, "functions"),
        ("disable_passes", disable_passes, "names"),
    ):
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list of {what}, got {value!r}")
    for entry in graph_passes.order((), passes, disable_passes):
        if entry.name in graph_passes.PASSES:
            raise ValueError(f"pass name {entry.name!r} belongs to xtrain; choose another")


def _checked_sums(sums: Any) -> dict[str, str]:
    """Return what the user says of single sums, by module path or line."""
    if sums is None:
        return {}
    if not isinstance(sums, Mapping):
        raise TypeError(
            "sums must map a module path or 'file.py:line' to 'drop' or 'leave', "
            f"got {type(sums).__name__}"
        )
    for place, said in sums.items():
        if not isinstance(place, str) or not place:
            raise TypeError(f"sums: a place must be a module path or 'file.py:line', got {place!r}")
        if said not in _SETTLED:
            raise ValueError(f"sums[{place!r}] must be one of {', '.join(_SETTLED)}, got {said!r}")
    return dict(sums)


def _check_of_torch(options: Options) -> None:
    """Raise for what torch.compile would take in silence, or refuse in the first step."""
    for name in ("strict", "verify", "fullgraph"):
        if not isinstance(value := getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    mode, given, dynamic = options.mode, options.options, options.dynamic
    if not isinstance(dynamic, bool | None):
        raise TypeError(f"dynamic must be True, False or None, got {dynamic!r}")
    if mode is None and not given:
        return
    if options.backend != "inductor":
        name = "options" if mode is None else "mode"
        raise ValueError(f"{name} is for backend='inductor', and backend is {options.backend!r}")
    if not isinstance(given, dict):
        raise TypeError(f"options must be a dict of inductor's settings, got {given!r}")
    try:
        torch_compat.inner_backend("inductor", mode=mode, options=given, dynamic=dynamic)
    except RuntimeError as error:
        raise ValueError(f"mode or options: {error}") from error


def _probability(model: nn.Module, dropout: float | None) -> float:
    if dropout is None:
        from xtrain.model import Transformer

        dropout = model.config.dropout if isinstance(model, Transformer) else 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout must be a number in [0, 1] or None, got {dropout!r}")
    if math.isnan(dropout) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    return float(dropout)
