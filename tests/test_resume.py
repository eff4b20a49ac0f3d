"""Stopping and going on: the interrupted run is the straight one, bit for bit."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil

import pytest
import torch
from training import FLAGS, TINY, assert_same_end, error_of

from xtrain import checkpoint, train
from xtrain.compiler import CompiledModel
from xtrain.config import RunConfig
from xtrain.data import load_tokenizer
from xtrain.data.tokenizer import train_bpe
from xtrain.training import run_folder
from xtrain.training.update import Updater


@pytest.fixture
def seen(monkeypatch):
    """What every step was trained on: (step, tokens), and every mask's key."""
    samples, keys = [], []
    original_step, original_key = Updater.step, CompiledModel.set_step

    def step(self, batch):
        tokens = torch.cat([micro.inputs for micro in batch.micro_batches])
        samples.append((batch.step, tokens.tolist()))
        return original_step(self, batch)

    def set_step(self, step, first_sample=0):
        keys.append((self._session.keys.seed, step, first_sample))
        original_key(self, step, first_sample)

    monkeypatch.setattr(Updater, "step", step)
    monkeypatch.setattr(CompiledModel, "set_step", set_step)
    return samples, keys


def test_ten_steps_are_three_three_and_four(runner, seen):
    """Rows C43, C46 and C58, and C47's save -> resume -> save -> resume."""
    samples, keys = seen
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    straight_samples, straight_keys = list(samples), list(keys)
    assert [step for step, _ in straight_samples] == list(range(10))
    assert straight_keys == [(0, step, first) for step in range(10) for first in (0, 2)]
    assert len({str(tokens) for _, tokens in straight_samples}) == 10

    samples.clear()
    keys.clear()
    assert runner("--name=parts", "--steps=3", *FLAGS) == 0
    for steps in (6, 10):
        assert runner.resume("parts", f"--steps={steps}") == 0
    assert samples == straight_samples
    assert keys == straight_keys
    assert_same_end(runner, "parts")
    assert len(set(runner.losses("parts"))) == 10


def test_resuming_twice_from_one_checkpoint_is_the_same(runner, capsys):
    """Row C46: no step is done twice. A kill lost the second half, records and all."""
    assert runner("--name=run", "--steps=5", "--set=checkpoint.keep_last=9", *FLAGS) == 0
    assert runner.resume("run", "--steps=10") == 0
    first = [runner.records("run"), runner.newest("run")]
    newest_path = runner.run("run") / "checkpoints" / "step_00000010"
    model = newest_path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])  # row C41: one byte short
    capsys.readouterr()
    assert runner.resume("run", "--steps=10") == 0
    out = capsys.readouterr().out
    assert f"warning: passed over the checkpoint {newest_path}: model.safetensors has" in out
    assert "continuing after step 5 of" in out
    again = runner.newest("run")
    assert [r["loss"] for r in runner.records("run")] == [r["loss"] for r in first[0]]
    for key, tensor in first[1].tensors["model"].items():
        assert torch.equal(tensor, again.tensors["model"][key])


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--set=model.dim=64", "model.dim cannot change on resume: it is 32 in .*, and 64 was"),
        ("--preset=small", "model.preset cannot change on resume"),
        ("--set=train.batch_size=8", "train.batch_size cannot change on resume"),
        ("--set=train.seed=1", "train.seed cannot change on resume"),
        ("--steps=2", "has already done 2 steps of 2; ask for more with --steps"),
        ("--data={other}", "the data or the tokenizer are not those of"),
        ("--set=data.tokenizer=bpe:300", "model|the data or the tokenizer are not those of"),
    ],
)
def test_what_cannot_be_continued_is_refused(runner, capsys, flag, message, started):
    other = runner.folder / "other.txt"
    other.write_text(runner.corpus.read_text() + " more")
    # --data replaces the runner's own, which argparse would only add to
    arguments = [a for a in runner.arguments() if "data=" not in a or "{other}" not in flag]
    code = train.main([*arguments, "--steps=4", flag.format(other=other), f"--resume={started}"])
    error = error_of(capsys)
    assert code == 2 and re.search(message, error), error
    assert len((started / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_may_change_is_said(runner, capsys, started, untrained):
    capsys.readouterr()
    changes = ("--steps=3", "--dropout=0.1", "--recompute=full", "--set=optim.grad_clip=0.5")
    assert runner(*changes, f"--resume={started}") == 0
    out = capsys.readouterr().out
    for text in (
        "train.steps 2 -> 3",
        "model.dropout 0.3 -> 0.1",
        "model.recompute none -> full",
        "optim.grad_clip 1.0 -> 0.5",
    ):
        assert f"changed since the checkpoint: {text}" in out
    assert "text before training" not in out
    saved = RunConfig.load(started / "config.toml")
    assert (saved.train.steps, saved.model.dropout, saved.run.name) == (3, 0.1, "started")


def test_resume_finds_the_run(runner, capsys, started, untrained):
    """By name, by path, the newest one; and says so when there is none."""
    assert runner("--name=later", "--steps=1", *FLAGS) == 0
    os.utime(started / "checkpoints" / "step_00000002", (1, 1))
    os.utime(started / "config.toml", (1, 1))
    assert runner("--resume", "--steps=2") == 0
    assert len(runner.records("later")) == 2
    assert runner("--resume=started", "--steps=3") == 0
    assert runner("--resume", "--name=started", "--steps=4") == 0
    assert len(runner.records("started")) == 4
    assert runner("--resume=startde", "--steps=5") == 2
    assert "did you mean started?" in capsys.readouterr().err


def test_one_process_trains_in_a_folder(runner, capsys, started, untrained):
    """The second is refused before it writes; readers are not; the lock ends with its holder."""
    first = run_folder.RunFolder(started)
    first.acquire()
    before = (started / "metrics.jsonl").read_bytes()
    for arguments in (("--resume=started", "--steps=3"), ("--name=started", "--steps=3")):
        capsys.readouterr()
        assert runner(*arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"in use by process {os.getpid()} on" in error
    assert len(list(run_folder.RunFolder(started).read_metrics())) == 2
    assert runner.newest("started").step == 2
    assert (started / "metrics.jsonl").read_bytes() == before
    first.release()
    assert runner("--resume=started", "--steps=3") == 0


# --- from elsewhere, and for longer -------------------------------------------------------------


def test_a_run_goes_on_from_anywhere(runner, capsys, monkeypatch, untrained):
    """Relative paths are those of where it was started; the run itself may be moved."""
    elsewhere = runner.folder / "deep" / "er"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(runner.folder)
    train_bpe(300, [runner.corpus.read_text()]).save(runner.folder / "tokenizer.json")
    named = ("--data=corpus.txt", "--tokenizer=.", "--set=data.cache_dir=cache")
    named += ("--set=run.folder=runs", "--name=r", "--steps=2", "--device=cpu")
    assert train.main([*TINY, *named]) == 0
    config = RunConfig.load("runs/r/config.toml")
    assert config.data.paths == (str(runner.corpus),) and config.data.tokenizer == str(
        runner.folder
    )
    assert (config.data.cache_dir, config.run.folder) == (
        str(runner.folder / "cache"),
        str(runner.folder / "runs"),
    )
    monkeypatch.chdir(elsewhere)
    assert train.main(["--resume=../../runs/r", "--steps=3"]) == 0
    # a run of before, whose config.toml has the paths as they were given
    text = (runner.folder / "runs/r/config.toml").read_text()
    for path, name in (("/runs", "runs"), ("/corpus.txt", "corpus.txt"), ("/cache", "cache")):
        text = text.replace(f'"{runner.folder}{path}"', f'"{name}"')
    (runner.folder / "runs/r/config.toml").write_text(text)
    assert 'folder = "runs"' in text
    assert train.main(["--resume=../../runs/r", "--steps=4"]) == 0
    # moved: the run, and its tokenizer, of which it has its own copy; then the data
    (runner.folder / "runs/r").rename(runner.folder / "moved")
    (runner.folder / "tokenizer.json").unlink()
    (runner.folder / "tokenizer_config.json").unlink()
    assert train.main(["--resume=../../moved", "--steps=5"]) == 0
    config = RunConfig.load(runner.folder / "moved/config.toml")
    assert (config.run.folder, config.run.name) == (str(runner.folder), "moved")
    runner.corpus.rename(runner.folder / "deep" / "text.txt")
    capsys.readouterr()
    assert train.main(["--resume=../../moved", "--steps=6"]) == 2
    error = error_of(capsys)
    assert f"{runner.corpus} does not exist" in error and "pass --data" in error
    assert f"relative to {elsewhere}" in error
    for tokenizer in ("../../moved", "../../moved/tokenizer.json"):
        steps = 6 + (tokenizer != "../../moved")
        flags = ["--data=../text.txt", f"--tokenizer={tokenizer}", f"--steps={steps}"]
        assert train.main(["--resume=../../moved", *flags]) == 0, error_of(capsys)


def test_the_run_keeps_the_tokens_that_end_its_documents(runner, untrained):
    """The tokenizer.json alone would end them with another token, or none."""
    tokenizer = train_bpe(300, [runner.corpus.read_text()])
    backend = tokenizer.backend
    backend.add_special_tokens(["<|im_end|>"])
    source = runner.folder / "source"
    source.mkdir()
    backend.save(str(source / "tokenizer.json"))
    (source / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert runner("--name=r", "--steps=1", f"--tokenizer={source}") == 0
    run = runner.run("r")
    for number, name in enumerate((run, run / "tokenizer.json"), start=2):
        ours, theirs = load_tokenizer(name), load_tokenizer(source)
        assert ours.eos_id == theirs.eos_id == backend.token_to_id("<|im_end|>")
        assert (ours.vocab_size, ours.fingerprint) == (theirs.vocab_size, theirs.fingerprint)
        assert runner.resume("r", f"--tokenizer={name}", f"--steps={number}") == 0
    (run / "tokenizer_config.json").unlink()  # as a run of before left it
    assert load_tokenizer(run).eos_id == 0
    assert runner.resume("r", f"--tokenizer={source}", "--steps=4") == 0
    assert load_tokenizer(run).eos_id == theirs.eos_id
    shutil.rmtree(source)
    assert runner.resume("r", "--steps=5") == 0  # by its own copy


def test_more_steps_stretch_the_schedule_and_say_so(runner, capsys, untrained):
    flags = ("--set=optim.warmup_steps=0", "--set=optim.learning_rate=0.01")
    assert runner("--name=r", "--steps=4", *flags) == 0
    suggested = re.search(r"more steps: python -m xtrain.train (.*)", capsys.readouterr().out)[1]
    assert suggested == f"--resume {runner.run('r')} --steps 8"
    assert runner(*suggested.split()) == 0
    out = capsys.readouterr().out
    said = "learning rate: the schedule is now that of 8 steps, stretched; step 4 has 0.005, and "
    assert said + "had 0 by the schedule of 4 steps" in out
    cosine = [0.005 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    rates = [record["learning_rate"] for record in runner.records("r")]
    assert rates[4:] == pytest.approx(cosine[4:])
    assert "learning rate: the schedule" not in out.split("continuing after step")[1]


def test_a_schedule_of_a_set_length_is_held_at_its_end(runner, capsys, untrained):
    flags = ("--set=optim.schedule_steps=4", "--set=optim.min_learning_rate=1e-4")
    assert runner("--name=r", "--steps=4", *flags) == 0
    suggested = re.search(r"more steps: python -m xtrain.train (.*)", capsys.readouterr().out)[1]
    assert suggested.endswith(" --steps 8 --set optim.schedule_steps=8")
    assert runner.resume("r", "--steps=6") == 0
    said = "the schedule ends at step 4 of 6; from there on it stays at 0.0001 (--set"
    out = capsys.readouterr().out
    assert said in out and "optim.schedule_steps=6 stretches it" in out
    rates = [record["learning_rate"] for record in runner.records("r")]
    assert rates[4:] == [1e-4, 1e-4]
    assert runner.resume("r", "--steps=8", "--set=optim.min_learning_rate=0") == 0
    out = capsys.readouterr().out
    assert "warning: learning rate: the schedule ends at step 4 of 8" in out
    assert "stays at 0, which changes no weight" in out


# --- what may not be read ----------------------------------------------------------------------


def no_permission(monkeypatch, suffix):
    """Reading files whose path ends so fails, as it does for everybody but root."""
    original = checkpoint._sha256

    def refuse(path):
        if str(path).endswith(suffix):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(checkpoint, "_sha256", refuse)


def test_what_cannot_be_read_is_said_and_not_to_be_deleted(
    runner, capsys, monkeypatch, started, untrained
):
    newest_path = started / "checkpoints" / "step_00000002"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        no_permission(patch, "model.safetensors")
        assert runner.resume("started", "--steps=3") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "new run" not in error
    assert f"{newest_path}: model.safetensors cannot be read: Permission denied" in error
    assert "delete" not in error and "damaged" not in error
    assert runner.resume("started", "--steps=4") == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:  # a good older one takes its place, and that is said
        no_permission(patch, "step_00000004/optimizer.safetensors")
        assert runner.resume("started", "--steps=5") == 0
    out = capsys.readouterr().out
    assert "optimizer.safetensors cannot be read: Permission denied; using step_00000002" in out

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(type(started), "iterdir", refuse)
        assert runner.resume("started", "--steps=6") == 2
    assert re.search("cannot read .*: Permission denied", error_of(capsys))
    manifest = runner.newest("started").path / "manifest.json"
    for path in (manifest, manifest.parent.parent / "step_00000004" / "manifest.json"):
        if path.exists():
            path.unlink()
            path.mkdir()
    assert runner.resume("started", "--steps=6") == 2
    error = error_of(capsys)
    assert "manifest.json cannot be read: it is a folder" in error or "Is a directory" in error
    assert "delete" not in error
