"""The keywords of xtrain.compile and the checks on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from xtrain import passes as graph_passes
from xtrain import torch_compat

_BACKENDS = ("inductor", "aot_eager", "eager")
_KERNELS = ("auto", "triton", "off")
_EXISTING = ("skip", "replace")
_LOGITS = ("keep", "drop")
_SETTLED = ("drop", "leave")


@dataclass(frozen=True)
class Options:
    """The keywords of xtrain.compile, checked."""

    dropout: float
    backend: str
    kernels: str
    existing: str
    logits: str
    strict: bool
    verify: bool
    passes: tuple[Any, ...]
    disable_passes: tuple[str, ...]
    dump_graphs: Path | None
    sums: dict[str, str] = field(default_factory=dict)
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False


def checked_options(
    model: nn.Module,
    *,
    dropout: float | None = None,
    backend: str = "inductor",
    kernels: str = "auto",
    existing: str = "skip",
    logits: str = "keep",
    strict: bool = True,
    verify: bool = False,
    passes: Sequence[Any] = (),
    disable_passes: Sequence[str] = (),
    dump_graphs: str | Path | None = None,
    sums: Mapping[str, str] | None = None,
    **torch_compile_kwargs: Any,
) -> Options:
    """Return the keywords of xtrain.compile as Options; its docstring says what each means.

    Raises:   TypeError, ValueError naming the keyword, the value and what it may be.
    """
    for name, value, allowed in (
        ("backend", backend, _BACKENDS),
        ("kernels", kernels, _KERNELS),
        ("existing", existing, _EXISTING),
        ("logits", logits, _LOGITS),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    known = ("mode", "options", "dynamic", "fullgraph")
    if unknown := sorted(set(torch_compile_kwargs) - set(known)):
        raise TypeError(
            f"unexpected keyword {unknown[0]!r}; beside its own, xtrain.compile takes "
            f"{', '.join(known)} of torch.compile"
        )
    if isinstance(disable_passes, str):
        disable_passes = (disable_passes,)
    _check_passes(passes, disable_passes)
    if not isinstance(dump_graphs, str | PathLike | None):
        raise TypeError(f"dump_graphs must be a folder's path, got {dump_graphs!r}")
    for name in ("mode", "options"):
        if torch_compile_kwargs.get(name) is None:
            torch_compile_kwargs.pop(name, None)
    _check_of_torch({"strict": strict, "verify": verify}, backend, torch_compile_kwargs)
    return Options(
        dropout=_probability(model, dropout),
        backend=backend,
        kernels=kernels,
        existing=existing,
        logits=logits,
        strict=strict,
        verify=verify,
        passes=tuple(passes),
        disable_passes=tuple(disable_passes),
        dump_graphs=None if dump_graphs is None else Path(dump_graphs),
        sums=_checked_sums(sums),
        **torch_compile_kwargs,
    )


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


def _check_of_torch(ours: dict[str, Any], backend: str, keywords: dict[str, Any]) -> None:
    """Raise for what torch.compile would take in silence, or refuse in the first step."""
    for name, value in {**ours, "fullgraph": keywords.get("fullgraph", False)}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if not isinstance(dynamic := keywords.get("dynamic"), bool | None):
        raise TypeError(f"dynamic must be True, False or None, got {dynamic!r}")
    mode, options = keywords.get("mode"), keywords.get("options")
    given = "mode" if mode is not None else "options"
    if mode is None and not options:
        return
    if backend != "inductor":
        raise ValueError(f"{given} is for backend='inductor', and backend is {backend!r}")
    if options and not isinstance(options, dict):
        raise TypeError(f"options must be a dict of inductor's settings, got {options!r}")
    try:
        torch_compat.inner_backend(backend, mode=mode, options=options or {}, dynamic=dynamic)
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
