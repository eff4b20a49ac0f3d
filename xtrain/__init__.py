"""xtrain: seeded stateless dropout and fused kernels for decoder language models, by graph passes.

Importing the package imports neither torch nor Triton: `xtrain.compile` and its
neighbours load on first use, so that `python -m xtrain.train --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from xtrain.compiler import CompiledModel, compile, compile_blocks

# public name -> the module that defines it
_LAZY = {
    "compile": "xtrain.compiler",
    "compile_blocks": "xtrain.compiler",
    "CompiledModel": "xtrain.compiler",
}
_SUBMODULES = (
    "compiler",
    "config",
    "data",
    "drift",
    "explain",
    "metrics",
    "model",
    "ops",
    "passes",
    "rng",
    "train",
)

__all__ = ["CompiledModel", "__version__", "compile", "compile_blocks"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return import_module(f"xtrain.{name}")
    raise AttributeError(f"module 'xtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
