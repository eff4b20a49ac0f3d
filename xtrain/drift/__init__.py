"""Where do two environments start to differ, how much, and can a token flip?

    record = xtrain.drift.record(model, inputs)      # of every op, of logits and environment
    comparison = xtrain.drift.compare("A.drift", "B.drift")
    comparison.exit_code, comparison.first_divergence, comparison.positions

docs/drift.md says what a record holds and what the verdicts mean. Reading and comparing need
NumPy and xxhash, no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.drift.comparison import Comparison, compare
    from xtrain.drift.errors import DriftError
    from xtrain.drift.flip import FlipVerdict, flip_verdict
    from xtrain.drift.record_folder import Record
    from xtrain.drift.recording import record
    from xtrain.drift.testing import assert_no_drift

# public name -> the module that defines it
_LAZY = {
    "Comparison": "comparison",
    "DriftError": "errors",
    "FlipVerdict": "flip",
    "Record": "record_folder",
    "assert_no_drift": "testing",
    "compare": "comparison",
    "flip_verdict": "flip",
    "record": "recording",
}

__all__ = [
    "Comparison",
    "DriftError",
    "FlipVerdict",
    "Record",
    "assert_no_drift",
    "compare",
    "flip_verdict",
    "record",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"xtrain.drift.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'xtrain.drift' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
