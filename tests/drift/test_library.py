"""What a program may hand to xtrain.drift, by mistake or as a baseline for its tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from drift_models import Rowwise, decoder, gpt2, llama, next_up, prompts, subject, tokens

from xtrain import drift
from xtrain.drift.cli import main
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run


@pytest.mark.parametrize("value", [-1, 1.5, "2", True], ids=repr)
def test_warm_up_is_a_number_of_forwards(tmp_path, value):
    """-1 would count down for ever."""
    with pytest.raises(drift.DriftError, match="warm_up must be (at least 0|a whole number), got"):
        drift.record(decoder(), tokens(), out=tmp_path / "x", warm_up=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["op_steps", "sample_seed", "pad_to"])
def test_other_counts_are_not_negative(name):
    with pytest.raises(drift.DriftError, match=f"{name} must be at least 0, got -1"):
        record_prompts(subject(decoder()), prompts([1]), Run(**{name: -1}))


def test_top_k_is_at_least_one():
    with pytest.raises(drift.DriftError, match="top_k must be at least 1, got 0"):
        drift.record(decoder(), tokens(), top_k=0)


def test_what_is_no_module_is_said():
    with pytest.raises(drift.DriftError, match="model must be a torch.nn.Module, got function"):
        drift.record(lambda ids: ids, tokens())


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_is_not_watched_from_inside(mode):
    """Dynamo would trace the watching itself, or compile what is compiled."""
    import xtrain

    for compiled in (
        torch.compile(decoder(), backend="eager"),
        xtrain.compile(decoder(), dropout=0.5, seed=0, backend="eager"),
    ):
        with pytest.raises(drift.DriftError, match=f"mode={mode} is for the plain model"):
            drift.record(compiled, tokens(), mode=mode)


def test_a_compiled_model_against_the_baseline_of_the_plain_one(tmp_path):
    """It runs as it is: the logits count."""
    drift.record(decoder(), tokens(), out=tmp_path / "base", tensors=True)
    calls = []

    def backend(graph, inputs):
        calls.append(len(inputs))

        def run(*arguments):
            calls.append("run")
            return graph(*arguments)

        return run

    found = drift.assert_no_drift(torch.compile(decoder(), backend=backend), tmp_path / "base")
    assert "run" in calls and found.b.run["mode"] == "unobserved" and found.num_matched == 0
    changed = decoder()
    with torch.no_grad():
        changed.blocks[1].attention.output.weight.mul_(2)
    with pytest.raises(AssertionError, match="other weights: blocks.1.attention.output.weight"):
        drift.assert_no_drift(torch.compile(changed, backend="eager"), tmp_path / "base")


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, capsys, make):
    """transformers draws them at random, in each process others; a tied head is no such weight."""
    from safetensors.torch import load_file, save_file

    folder, flags = tmp_path / "model", ["--tokens=1", "--num-prompts=1", "--threads=1"]
    make().save_pretrained(folder)
    assert main(["record", "--out", str(tmp_path / "a"), str(folder), *flags]) == 0
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["record", "--out", str(tmp_path / "b"), str(folder), *flags]) == 5
    assert f"its files lack 1 weight of the model: {name}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


# --- assert_no_drift -----------------------------------------------------------------------------


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
    settings = Run(num_tokens=3, batch_size=2)
    lists = prompts([1, 2, 3], [4])
    record_prompts(subject(model), lists, settings, out=tmp_path / "base.drift")
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
