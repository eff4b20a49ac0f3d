"""Row C58 on a GPU: atomics are named where two runs part, and gone with determinism on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from xtrain.drift.comparison.training import compare_training
from xtrain.drift.recording.training import TrainingFingerprints

pytestmark = pytest.mark.gpu

VOCAB, TOKENS, STEPS, PAIRS = 16, 1 << 15, 3, 5


class Gathered(nn.Module):
    """A bigram model by gather, whose backward adds thousands of gradients to each weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB, VOCAB))

    def forward(self, inputs, targets, return_logits=False):
        rows = inputs.reshape(-1, 1).expand(-1, VOCAB)
        logits = self.table.gather(0, rows)
        return None, nn.functional.cross_entropy(logits, targets.reshape(-1))


def train(folder):
    model = Gathered().cuda()
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(VOCAB, (2, TOKENS), generator=generator).cuda()
    weights = torch.rand(VOCAB, VOCAB, generator=generator)
    model.table.data.copy_(weights)
    recorder = TrainingFingerprints(folder, model, every=1, autocast=contextlib.nullcontext)
    for step in range(STEPS):
        recorder.before(step, x, x.flip(1))
        _, loss = model(x, x.flip(1))
        loss.backward()
        recorder.after(step, loss.item(), 1.0)
        with torch.no_grad():
            model.table -= model.table.grad
            model.table.grad = None
    return folder


@pytest.fixture
def deterministic():
    """torch's switch, off again behind the test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_op_that_adds_with_atomics_is_named(tmp_path):
    for pair in range(PAIRS):
        a, b = (train(tmp_path / f"{pair}{name}") for name in "ab")
        found = compare_training(a, b)
        if found.exit_code != 0:
            break
    first = found.first_divergence
    assert first is not None, f"{PAIRS} pairs of runs were equal"
    assert "scatter_add" in first.op and "backward" in first.module_path, first
    assert first.step == 0 and first.size > 0


def test_with_the_deterministic_switch_runs_are_identical(tmp_path, deterministic):
    a, b = train(tmp_path / "a"), train(tmp_path / "b")
    assert compare_training(a, b).exit_code == 0
