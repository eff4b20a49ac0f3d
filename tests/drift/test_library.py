"""What a program may hand to xtrain.drift.record by mistake: said before anything runs."""

from __future__ import annotations

import pytest
import torch
from drift_models import decoder, gpt2, llama, prompts, subject, tokens

from xtrain import drift
from xtrain.drift.command import main
from xtrain.drift.recording.recorder import record_prompts
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


@pytest.mark.parametrize("text", ['{"a": 1}', "3", '"text"', "[1, 2]", '["text"]'])
def test_prompts_that_are_no_lists_of_ids(tmp_path, capsys, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    arguments = ["record", "--out", str(tmp_path / "a"), "tiny", "--prompts", str(path)]
    assert main(arguments) == 5
    assert f"{path} must hold a list of lists of ids" in capsys.readouterr().err


def test_a_page_needs_a_file(tmp_path, capsys):
    drift.record(decoder(), tokens(), out=tmp_path / "a")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--html", "-"]) == 5
    out, err = capsys.readouterr()
    assert out == "" and "--html needs the name of a file" in err


def test_threads_that_no_machine_starts(tmp_path, capsys):
    """torch ends the process where the system refuses it a thread."""
    arguments = ["record", "--out", str(tmp_path / "a"), "tiny", "--threads=100000"]
    assert main(arguments) == 5
    assert "--threads must be at most 1024, got 100000" in capsys.readouterr().err
    assert main(["bisect", "tiny", "--factor=threads=1,100000"]) == 5
