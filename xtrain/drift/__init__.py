"""Where do two environments start to differ, how much, and can a token flip?

    record = xtrain.drift.record(model, inputs)      # of every op, of logits and environment
    comparison = xtrain.drift.compare("A.drift", "B.drift")
    comparison.exit_code, comparison.first_divergence, comparison.positions

docs/drift.md says what a record holds and what the verdicts mean. Reading and comparing need
NumPy and xxhash, no torch.

settings     how a model is run, checked: flags, the record's "run"; DriftError
cli          python -m xtrain.drift: record, compare, bisect, ops
testing      assert_no_drift
recording/   a record being made, and its format
comparison/  two records, or two training runs, compared
bisect       which setting moves the numbers: runs of `record`, each in its own process
single_ops   ops: each op alone under two settings, as a picture
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.drift.comparison.flip import FlipVerdict as FlipVerdict
    from xtrain.drift.comparison.flip import flip_verdict as flip_verdict
    from xtrain.drift.comparison.two_records import Comparison as Comparison
    from xtrain.drift.comparison.two_records import compare as compare
    from xtrain.drift.recording.forwards import record as record
    from xtrain.drift.recording.record_format import Record as Record
    from xtrain.drift.settings import DriftError as DriftError
    from xtrain.drift.testing import assert_no_drift as assert_no_drift

# public name -> the module that defines it
_LAZY = {
    "Comparison": "comparison.two_records",
    "DriftError": "settings",
    "FlipVerdict": "comparison.flip",
    "Record": "recording.record_format",
    "assert_no_drift": "testing",
    "compare": "comparison.two_records",
    "flip_verdict": "comparison.flip",
    "record": "recording.forwards",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"xtrain.drift.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'xtrain.drift' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
