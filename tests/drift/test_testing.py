"""assert_no_drift as a project would use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from drift_models import Rowwise, decoder, next_up, tokens

from xtrain import drift
from xtrain.drift.recording.recorder import record_prompts
from xtrain.drift.recording.subject import Subject, hash_weights
from xtrain.drift.settings import Run


def test_a_model_that_stays_passes_and_one_that_moves_fails(tmp_path):
    drift.record(decoder(), tokens(batch=2), out=tmp_path / "base.drift")
    found = drift.assert_no_drift(decoder(), tmp_path / "base.drift")
    assert found.exit_code == 0 and len(found.positions) == 18
    model = decoder()
    next_up(model.blocks[1].feed_forward.up.weight)
    with pytest.raises(
        AssertionError, match="first difference: aten.mm in blocks.1.feed_forward.up"
    ):
        drift.assert_no_drift(model, tmp_path / "base.drift", accept=2)


class Noisy(Rowwise):
    """The same weights, computed with an error: another environment."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return logits * (1 + self.noise) if self.noise else logits


def test_what_is_accepted(tmp_path):
    drift.record(Noisy(0.0), tokens(), out=tmp_path / "base.drift")
    drift.assert_no_drift(Noisy(1e-6), tmp_path / "base.drift", accept=1)
    with pytest.raises(AssertionError, match="verdict 1: the numbers differ, no token can flip"):
        drift.assert_no_drift(Noisy(1e-6), tmp_path / "base.drift")
    with pytest.raises(AssertionError, match="verdict 3: the tokens differ"):
        drift.assert_no_drift(Noisy(-2.0), tmp_path / "base.drift", accept=2)
    with pytest.raises(ValueError, match="accept must be 0, 1 or 2, got 3"):
        drift.assert_no_drift(Noisy(0.0), tmp_path / "base.drift", accept=3)
    with pytest.raises(drift.DriftError, match="there is no record"):
        drift.assert_no_drift(Noisy(0.0), tmp_path / "other.drift")


def test_a_baseline_of_decoded_prompts(tmp_path):
    model = Rowwise()
    subject = Subject(model, {"kind": "preset"}, 16, None, weights=hash_weights(model))
    lists = [{"tokens": [1, 2, 3], "text": None}, {"tokens": [4], "text": None}]
    settings = Run(num_tokens=3, batch_size=2)
    record_prompts(subject, lists, settings, out=tmp_path / "base.drift")
    assert drift.assert_no_drift(Rowwise(), tmp_path / "base.drift").exit_code == 0
    other = Rowwise()
    with torch.no_grad():
        other.head.mul_(-1)
    with pytest.raises(AssertionError, match="not comparable: other weights: head"):
        drift.assert_no_drift(other, tmp_path / "base.drift")


def test_the_page_s_example_as_it_stands(tmp_path, monkeypatch):
    """What a reader pastes: the comparison at its end is that of the model with itself."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "drift.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    model, x = decoder(), tokens(2)
    drift.record(model, x, out="tests/baseline.drift")
    names = {"torch": torch, "model": model, "tokens": x, "vector": torch.ones(48)}
    exec(code, names)
    assert names["comparison"].exit_code == 0 and len(names["comparison"].positions) == x.numel()
    assert names["linear"].cases[0].steps[0].logits()[0].shape == (1, 440)
