"""Stopping and going on: the interrupted run is the straight one, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from training import running

from xtrain import checkpoint, train
from xtrain.compiler import CompiledModel
from xtrain.config import RunConfig
from xtrain.data.tokenizer import load_tokenizer
from xtrain.training import run_folder, session

# Two micro-batches a step and dropout: what a resume could lose is in use.
FLAGS = ("--dropout=0.3", "--set=train.micro_batch_size=2", "--set=optim.schedule_steps=10")


@pytest.fixture
def runner(tmp_path):
    with running(tmp_path) as runner:
        yield runner


@pytest.fixture
def seen(monkeypatch):
    """What every step was trained on: (step, windows of the corpus), and every mask's key."""
    samples, keys = [], []
    original_step, original_key = session.Trainer._step, CompiledModel.set_step

    def step(self, batch, *rest):
        samples.append((batch.step, self.parts.batches.sample_ids(batch.step).tolist()))
        tokens = torch.cat([micro.inputs for micro in batch.micro_batches])
        samples[-1] += (tokens.tolist(),)
        original_step(self, batch, *rest)

    def set_step(self, step, first_sample=0):
        keys.append((self._session.keys.seed, step, first_sample))
        original_key(self, step, first_sample)

    monkeypatch.setattr(session.Trainer, "_step", step)
    monkeypatch.setattr(CompiledModel, "set_step", set_step)
    return samples, keys


def newest(runner, name):
    path, _ = checkpoint.newest_complete(runner.run(name) / "checkpoints")
    return checkpoint.read(path)


def assert_same_end(runner, name, other):
    """Every step's losses, rates and norms; weights, moments and generators at the end."""
    for key in ("step", "loss", "learning_rate", "grad_norm", "tokens"):
        values = [[record[key] for record in runner.records(n)] for n in (name, other)]
        assert values[0] == values[1], key
    ours, theirs = newest(runner, name), newest(runner, other)
    assert ours.step == theirs.step == 10
    assert ours.state["data"] == theirs.state["data"]
    for group, tensors in theirs.tensors.items():
        assert ours.tensors[group].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(ours.tensors[group][key], tensor), (group, key)


def resume(runner, name, *extra):
    return runner(*extra, f"--resume={runner.run(name)}")


def test_ten_steps_are_five_and_five(runner, seen):
    """Rows C43 and C46, and C47's save -> resume -> save -> resume: 10 = 5 + 5 = 3 + 3 + 4."""
    samples, keys = seen
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    straight_samples, straight_keys = list(samples), list(keys)
    assert [step for step, *_ in straight_samples] == list(range(10))
    assert straight_keys == [(0, step, first) for step in range(10) for first in (0, 2)]
    assert len({tuple(ids) for _, ids, _ in straight_samples}) == 10

    for name, parts in (("two", (5, 10)), ("three", (3, 6, 10))):
        samples.clear()
        keys.clear()
        assert runner(f"--name={name}", f"--steps={parts[0]}", *FLAGS) == 0
        for steps in parts[1:]:
            assert resume(runner, name, f"--steps={steps}") == 0
        assert samples == straight_samples
        assert keys == straight_keys
        assert_same_end(runner, name, "straight")


def test_resuming_twice_from_one_checkpoint_is_the_same(runner, capsys):
    """Row C46: no step is done twice. A kill lost the second half, records and all."""
    assert runner("--name=run", "--steps=5", "--set=checkpoint.keep_last=9", *FLAGS) == 0
    assert resume(runner, "run", "--steps=10") == 0
    first = [runner.records("run"), newest(runner, "run")]
    newest_path = runner.run("run") / "checkpoints" / "step_00000010"
    model = newest_path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])  # row C41: one byte short
    capsys.readouterr()
    assert resume(runner, "run", "--steps=10") == 0
    out = capsys.readouterr().out
    assert f"warning: passed over the checkpoint {newest_path}: model.safetensors has" in out
    assert "continuing after step 5 of" in out
    again = newest(runner, "run")
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
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and re.search(message, error), error
    assert len((started / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.fixture
def started(runner):
    assert runner("--name=started", "--steps=2", *FLAGS) == 0
    return runner.run("started")


def test_what_may_change_is_said(runner, capsys, started):
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


def test_resume_finds_the_run(runner, capsys, started):
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
    empty = runner.run("empty")
    empty.mkdir()
    (empty / "config.toml").write_text((started / "config.toml").read_text())
    assert runner("--resume=empty", "--steps=2") == 0
    assert "has no checkpoint yet: starting at step 0" in capsys.readouterr().out
    assert runner.losses("empty") == runner.losses("started")[:2]


def test_one_process_trains_in_a_folder(runner, capsys, started):
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
    assert newest(runner, "started").step == 2
    assert (started / "metrics.jsonl").read_bytes() == before
    first.release()
    assert runner("--resume=started", "--steps=3") == 0


def test_paths_hold_in_another_folder(runner, capsys, monkeypatch):
    monkeypatch.chdir(runner.folder)
    relative = ("--set=run.folder=runs", "--set=data.cache_dir=cache", "--data=corpus.txt")
    flags = [flag for flag in runner.arguments() if str(runner.folder) not in flag]
    assert train.main([*flags, *relative, "--name=r", "--steps=1"]) == 0
    (runner.folder / "sub").mkdir()
    monkeypatch.chdir(runner.folder / "sub")
    assert train.main(["--resume=../runs/r", "--steps=2"]) == 0
    assert len(runner.records("r")) == 2
    runner.corpus.rename("moved.txt")
    capsys.readouterr()
    assert train.main(["--resume=../runs/r", "--steps=3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{runner.corpus} does not exist" in error
    assert f"pass --data with where it lies now, relative to {runner.folder / 'sub'}" in error
    assert train.main(["--resume=../runs/r", "--steps=3", "--data=moved.txt"]) == 0


def test_the_run_holds_its_tokenizer_whole(runner):
    """Which token ends a document stands beside tokenizer.json, and is kept with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = runner.corpus.read_text().split()
    vocab = {word: i for i, word in enumerate(["<unk>", "<end>", *sorted(set(words))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = runner.folder / "tok"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert runner("--name=r", f"--tokenizer={folder}", "--steps=1") == 0
    run = runner.run("r")
    assert load_tokenizer(run / "tokenizer.json").eos_id == load_tokenizer(run).eos_id == 1
    for number, name in enumerate((run, run / "tokenizer.json", folder), start=2):
        assert runner("--resume=r", f"--tokenizer={name}", f"--steps={number}") == 0
    for path in folder.iterdir():
        path.unlink()
    assert runner("--resume=r", "--steps=5") == 0  # by its own copy


def test_more_steps_say_what_becomes_of_the_schedule(runner, capsys):
    assert runner("--name=r", "--steps=2") == 0
    assert runner("--name=held", "--steps=2", "--set=optim.schedule_steps=2") == 0
    capsys.readouterr()
    assert runner("--resume=r", "--steps=4") == 0
    out = capsys.readouterr().out
    assert "learning rate: the schedule is now that of 4 steps, stretched; step 2 has" in out
    assert runner("--resume=held", "--steps=4") == 0
    out = capsys.readouterr().out
    assert "the schedule ends at step 2 of 4; from there on it stays at" in out
    assert "--set optim.schedule_steps=4 stretches it" in out


def test_a_checkpoint_that_may_not_be_read_says_so(runner, capsys, monkeypatch, started):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "_sha256", refused)
    capsys.readouterr()
    assert runner("--resume=started", "--steps=3") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be read: Permission denied" in error
    assert "delete" not in error and "new run" not in error


# --- signals ------------------------------------------------------------------------------------


class Process:
    """The command in a process of its own, its steps slow enough to be met by a signal.

    patch: lines that run before it.
    """

    def __init__(self, runner, *extra, patch=""):
        script = patch + (
            "import sys, time, torch; torch.set_num_threads(1)\n"
            "from xtrain import train\n"
            "from xtrain.training import update\n"
            "original = update.Updater.step\n"
            "def step(self, batch):\n"
            "    print('begin', batch.step, flush=True)\n"
            "    time.sleep(float(sys.argv[1]))\n"
            "    return original(self, batch)\n"
            "update.Updater.step = step\n"
            "sys.exit(train.main(sys.argv[2:]))\n"
        )
        slowness = "0.3"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, slowness, *runner.arguments(*extra)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def wait_for(self, text):
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def signal(self, number):
        self.signalled = time.perf_counter()
        os.killpg(self.process.pid, number)  # as a terminal does: to the whole group

    def end(self):
        self.output += self.process.communicate(timeout=60)[0]
        self.took_s = time.perf_counter() - self.signalled
        return self.process.returncode


def test_ctrl_c_saves_and_the_rest_can_follow(runner):
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    process = Process(runner, "--name=run", "--steps=10", *FLAGS)
    process.wait_for("begin 3")
    process.signal(signal.SIGINT)
    assert process.end() == 130, process.output
    assert "stopping after this step, then saving; once more leaves at once" in process.output
    command = f"continue with: python -m xtrain.train --resume {runner.run('run')}"
    assert "stopped by SIGINT" in process.output and command in process.output
    assert "begin 4" not in process.output
    assert len(runner.records("run")) == newest(runner, "run").step == 4
    assert (runner.run("run") / "loss.png").exists()
    assert resume(runner, "run") == 0
    assert_same_end(runner, "run", "straight")


def test_sigterm_saves_and_a_second_ctrl_c_leaves_at_once(runner):
    process = Process(runner, "--name=term", "--steps=10", *FLAGS)
    process.wait_for("begin 1")
    process.signal(signal.SIGTERM)
    process.wait_for("stopping after this step, then saving")
    assert process.end() == 128 + signal.SIGTERM
    assert newest(runner, "term").step == 2

    process = Process(runner, "--name=twice", "--steps=10", *FLAGS)
    process.wait_for("begin 1")
    process.signal(signal.SIGINT)
    process.wait_for("stopping after this step")
    process.signal(signal.SIGINT)
    started = time.perf_counter()
    assert process.end() == -signal.SIGINT  # a shell shows 130
    assert time.perf_counter() - started < 5
    assert not (runner.run("twice") / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_data_are_read_leaves_the_name_free(runner, capsys, monkeypatch, number):
    original = session.build.open_data

    def interrupted(*arguments):
        signal.raise_signal(number)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(session.build, "open_data", interrupted)
        assert runner("--name=r", "--steps=1") == 128 + number
    assert "nothing is left of" in capsys.readouterr().out and not runner.run("r").exists()
    # killed there, it leaves a folder in which nothing was trained
    runner.run("r").mkdir()
    (runner.run("r") / "config.toml").write_text("")
    (runner.run("r") / ".lock").write_text("process 1 on another\n")
    assert runner("--name=r", "--steps=1") == 0


def test_a_kill_loses_only_what_was_not_saved(runner):
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    process = Process(runner, "--name=run", "--steps=10", "--set=checkpoint.interval=2", *FLAGS)
    process.wait_for("begin 5")
    process.signal(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    assert len(runner.records("run")) == 5  # every finished step was on the disk
    assert newest(runner, "run").step == 4
    assert resume(runner, "run") == 0
    assert_same_end(runner, "run", "straight")


def test_a_start_without_checkpoint_hides_no_run(tmp_path):
    """--resume alone takes the run that can be continued, not the newest folder."""
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("")
    (tmp_path / "older" / "checkpoints" / "step_00000004").mkdir(parents=True)
    os.utime(tmp_path / "older" / "checkpoints" / "step_00000004", (0, 0))
    os.utime(tmp_path / "older" / "config.toml", (0, 0))
    assert run_folder.find(tmp_path, "").path.name == "older"


def test_a_signal_that_does_not_come_through_ends_the_process():
    """Whoever swallows it, a compiler for one, costs seconds and not the rest of its work."""
    script = (
        "import signal, time\n"
        "from xtrain.training.console import StopSignals\n"
        "StopSignals.GRACE_S = 0.2\n"
        "with StopSignals() as stop:\n"
        "    stop.at_once = lambda number: print('at once', number, flush=True)\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    except BaseException:\n"
        "        time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (143, "at once 15\n"), ended.stderr


def test_a_signal_in_a_callback_comes_through_without_a_trace():
    """Python prints and drops what a weak reference's callback raises; a compiler has many."""
    script = (
        "import signal, weakref\n"
        "from xtrain.training.console import Interrupted, StopSignals\n"
        "class Gone: pass\n"
        "gone = Gone()\n"
        "with StopSignals() as stop:\n"
        "    reference = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    try:\n"
        "        del gone\n"
        "        while True: pass\n"
        "    except Interrupted as error:\n"
        "        print('through', error, flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "through SIGINT\n", "")
