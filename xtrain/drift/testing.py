"""assert_no_drift: a baseline that a project's tests compare their model with."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.drift.comparison.drift_report import as_text
from xtrain.drift.comparison.two_records import IDENTICAL, TOKENS_DIFFER, Comparison, compare
from xtrain.drift.recording.record_format import Record
from xtrain.drift.settings import DriftError, Run

if TYPE_CHECKING:
    from torch import nn


def assert_no_drift(
    model: nn.Module,
    baseline_folder: str | os.PathLike[str],
    inputs: Any = None,
    *,
    accept: int = IDENTICAL,
) -> Comparison:
    """Run model on the inputs of a baseline, as the baseline was run, and compare.

        xtrain.drift.record(model, tokens, out="tests/baseline.drift")       # once, committed
        xtrain.drift.assert_no_drift(model, "tests/baseline.drift")          # in the test

    Args:     inputs: what record took, for inputs beyond the token ids that the baseline holds.
              accept: the worst verdict that passes: 0 all bits equal, 1 the numbers differ and no
              token can flip (a baseline from another machine), 2 a token can flip.
    Returns:  the comparison, the baseline as a.
    Raises:   AssertionError with the report when the verdict is worse, or the weights are others;
              DriftError when the baseline is missing or damaged.
    """
    if not IDENTICAL <= accept < TOKENS_DIFFER:
        raise ValueError(f"accept must be 0, 1 or 2, got {accept}")
    baseline = Record(baseline_folder)
    comparison = compare(baseline, _replay(model, baseline, inputs))
    if comparison.exit_code > accept:
        name = Path(baseline_folder).name
        raise AssertionError(f"the model drifted from {name}\n\n{as_text(comparison)}")
    return comparison


def _replay(model: nn.Module, baseline: Record, inputs: Any) -> Record:
    """Return a temporary record of model with the prompts and settings of the baseline."""
    from xtrain.drift.recording import forwards

    run, prompts = baseline.run, baseline.contents["prompts"]
    if forwards.is_compiled(model):  # as it is, whatever the baseline's mode
        run = {**run, "mode": "unobserved", "tensors": False}
    if baseline.model["kind"] == "library":
        tokens = [prompt["tokens"] for prompt in prompts] if inputs is None else inputs
        if inputs is None and None in tokens:
            raise DriftError(
                f"{baseline.path} was recorded from inputs that are no token ids; pass inputs="
            )
        kept = {name: run[name] for name in ("mode", "tensors", "top_k")}
        return forwards.record(model, tokens, **kept)
    device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
    vocab_size = baseline.cases[0].steps[0].logits()[0].shape[-1]
    settings = Run(**{item.name: run[item.name] for item in fields(Run)} | {"device": device})
    return forwards.record_prompts(forwards.of_library(model, vocab_size), prompts, settings)
