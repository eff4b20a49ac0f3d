"""The keywords of xtrain.compile and the checks on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from xtrain import passes as graph_passes

_BACKENDS = ("inductor", "aot_eager", "eager")
_KERNELS = ("auto", "triton", "off")
_EXISTING = ("skip", "replace")
_LOGITS = ("keep", "drop")


@dataclass(frozen=True)
class Options:
    """The keywords of xtrain.compile, checked."""

    dropout: float
    backend: str
    kernels: str
    existing: str
    logits: str
    strict: bool
    passes: tuple[Any, ...]
    disable_passes: tuple[str, ...]
    dump_graphs: Path | None
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
    passes: Sequence[Any] = (),
    disable_passes: Sequence[str] = (),
    dump_graphs: str | Path | None = None,
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
    if not isinstance(passes, list | tuple):
        raise TypeError(f"passes must be a list of functions, got {passes!r}")
    graph_passes.order((), passes, disable_passes)  # wrong ones raise here, not in the first step
    if torch_compile_kwargs.get("options") is None:
        torch_compile_kwargs.pop("options", None)
    return Options(
        dropout=_probability(model, dropout),
        backend=backend,
        kernels=kernels,
        existing=existing,
        logits=logits,
        strict=strict,
        passes=tuple(passes),
        disable_passes=tuple(disable_passes),
        dump_graphs=None if dump_graphs is None else Path(dump_graphs),
        **torch_compile_kwargs,
    )


def _probability(model: nn.Module, dropout: float | None) -> float:
    if dropout is None:
        from xtrain.model import Transformer

        dropout = model.config.dropout if isinstance(model, Transformer) else 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        raise TypeError(f"dropout must be a number in [0, 1] or None, got {dropout!r}")
    if math.isnan(dropout) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}")
    return float(dropout)
