"""A run's folder: never half a run, held by one process, whole wherever it is continued."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from test_resume import FLAGS, Process, assert_same_end, newest, resume
from training import TINY, running

from xtrain import checkpoint, generate, train
from xtrain.config import ConfigError, RunConfig
from xtrain.data import Batches, load_tokenizer
from xtrain.data.tokenizer import train_bpe
from xtrain.model import Config, Transformer
from xtrain.training import run_folder


@pytest.fixture
def runner(tmp_path):
    with running(tmp_path) as runner:
        yield runner


@pytest.fixture
def started(runner):
    assert runner("--name=started", "--steps=2", *FLAGS) == 0
    return runner.run("started")


def error_of(capsys):
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_without_checkpoint_starts_at_step_0(runner, capsys):
    """As a kill before the first checkpoint leaves it: by --resume, or under its name anew."""
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    for name in ("killed", "early"):
        folder = runner.run(name)
        folder.mkdir()
        config = (runner.run("straight") / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace('"straight"', f'"{name}"'))
        (folder / ".lock").write_text("process 1 on a machine that is off\n")
    lines = (runner.run("straight") / "metrics.jsonl").read_text().splitlines(True)
    (runner.run("killed") / "metrics.jsonl").write_text("".join(lines[:3]))
    assert runner("--name=killed", "--steps=10", *FLAGS) == 2  # there are steps in it
    assert "exists already: add --resume to continue that run" in error_of(capsys)
    assert resume(runner, "killed", "--steps=10") == 0
    assert "has no checkpoint yet: starting at step 0" in capsys.readouterr().out
    assert_same_end(runner, "killed", "straight")
    assert runner("--name=early", "--steps=10", *FLAGS) == 0  # there is nothing in it
    assert_same_end(runner, "early", "straight")


def test_a_folder_that_is_no_run_is_left_alone(runner, capsys):
    for name in ("mine", "empty"):
        runner.run(name).mkdir(parents=True)
    (runner.run("mine") / "thesis.tex").write_text("words")
    assert runner("--name=mine", "--steps=1") == 2
    assert "exists already and is no run; choose another --name" in error_of(capsys)
    assert os.listdir(runner.run("mine")) == ["thesis.tex"]
    assert runner("--name=empty", "--steps=1") == 0


def test_of_starts_at_one_moment_one_has_the_name(tmp_path):
    for number in range(20):
        barrier, made, refused = threading.Barrier(4), [], []

        def start(name=f"run-{number}", barrier=barrier, made=made, refused=refused):
            barrier.wait()
            try:
                made.append(run_folder.create(tmp_path, name, "tiny"))
            except ConfigError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(refused)) == (1, 3), refused
        made[0].release()


def test_a_run_in_use_can_be_read(runner, started):
    held = run_folder.RunFolder(started)
    held.acquire()
    flags = ("--temperature=0", "--tokens=3", "--device=cpu")
    assert generate.main([f"--run={started}", *flags]) == 0
    held.release()


def test_a_run_goes_on_from_anywhere(runner, capsys, monkeypatch):
    """Relative paths are those of where it was started; the run itself may be moved."""
    elsewhere = runner.folder / "deep" / "er"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(runner.folder)
    train_bpe(300, [runner.corpus.read_text()]).save(runner.folder / "tokenizer.json")
    named = ("--data=corpus.txt", "--tokenizer=.", "--set=data.cache_dir=cache", "--name=r")
    assert train.main([*TINY, *named, "--steps=2", "--device=cpu"]) == 0
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


def test_the_run_keeps_the_tokens_that_end_its_documents(runner):
    """The tokenizer.json alone would end them with another token, or none."""
    tokenizer = train_bpe(300, [runner.corpus.read_text()])
    backend = tokenizer.backend
    backend.add_special_tokens(["<|im_end|>"])
    source = runner.folder / "source"
    source.mkdir()
    backend.save(str(source / "tokenizer.json"))
    (source / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert runner("--name=r", "--steps=1", f"--tokenizer={source}") == 0
    for name in (runner.run("r"), runner.run("r") / "tokenizer.json"):
        ours, theirs = load_tokenizer(name), load_tokenizer(source)
        assert ours.eos_id == theirs.eos_id == backend.token_to_id("<|im_end|>")
        assert (ours.vocab_size, ours.fingerprint) == (theirs.vocab_size, theirs.fingerprint)
    assert (
        resume(runner, "r", f"--tokenizer={runner.run('r') / 'tokenizer.json'}", "--steps=2") == 0
    )
    (runner.run("r") / "tokenizer_config.json").unlink()  # as a run of before left it
    assert load_tokenizer(runner.run("r")).eos_id == 0
    assert resume(runner, "r", f"--tokenizer={source}", "--steps=3") == 0
    assert load_tokenizer(runner.run("r")).eos_id == theirs.eos_id


def test_more_steps_stretch_the_schedule_and_say_so(runner, capsys):
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


def test_a_schedule_of_a_set_length_is_held_at_its_end(runner, capsys):
    flags = ("--set=optim.schedule_steps=4", "--set=optim.min_learning_rate=1e-4")
    assert runner("--name=r", "--steps=4", *flags) == 0
    suggested = re.search(r"more steps: python -m xtrain.train (.*)", capsys.readouterr().out)[1]
    assert suggested.endswith(" --steps 8 --set optim.schedule_steps=8")
    assert resume(runner, "r", "--steps=6") == 0
    said = "the schedule ends at step 4 of 6; from there on it stays at 0.0001 (--set"
    assert said in capsys.readouterr().out
    rates = [record["learning_rate"] for record in runner.records("r")]
    assert rates[4:] == [1e-4, 1e-4]
    assert resume(runner, "r", "--steps=8", "--set=optim.min_learning_rate=0") == 0
    out = capsys.readouterr().out
    assert "warning: learning rate: the schedule ends at step 4 of 8" in out
    assert "stays at 0, which changes no weight" in out


def no_permission(monkeypatch, suffix):
    """Reading files whose path ends so fails, as it does for everybody but root."""
    original = checkpoint._sha256

    def refuse(path):
        if str(path).endswith(suffix):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(checkpoint, "_sha256", refuse)


def test_what_cannot_be_read_is_said_and_not_to_be_deleted(runner, capsys, monkeypatch, started):
    newest_path = started / "checkpoints" / "step_00000002"
    with monkeypatch.context() as patch:
        no_permission(patch, "model.safetensors")
        assert resume(runner, "started", "--steps=3") == 2
    error = error_of(capsys)
    assert f"{newest_path}: model.safetensors cannot be read: Permission denied" in error
    assert "delete" not in error and "damaged" not in error
    assert resume(runner, "started", "--steps=4") == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:  # a good older one takes its place, and that is said
        no_permission(patch, "step_00000004/optimizer.safetensors")
        assert resume(runner, "started", "--steps=5") == 0
    out = capsys.readouterr().out
    assert "optimizer.safetensors cannot be read: Permission denied; using step_00000002" in out

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(type(started), "iterdir", refuse)
        assert resume(runner, "started", "--steps=6") == 2
    assert re.search("cannot read .*: Permission denied", error_of(capsys))
    manifest = newest(runner, "started").path / "manifest.json"
    for path in (manifest, manifest.parent.parent / "step_00000004" / "manifest.json"):
        if path.exists():
            path.unlink()
            path.mkdir()
    assert resume(runner, "started", "--steps=6") == 2
    error = error_of(capsys)
    assert "manifest.json cannot be read: it is a folder" in error or "Is a directory" in error
    assert "delete" not in error


def test_micro_batches_do_not_change_the_validation_loss(runner):
    """It is the mean over the windows; the last of them fill no micro-batch."""
    losses = {}
    for micro, batch, count in ((8, 8, 2), (4, 8, 2), (2, 8, 2), (1, 8, 2), (16, 16, 99)):
        name = f"m{micro}"
        sizes = (f"--set=train.batch_size={batch}", f"--set=train.micro_batch_size={micro}")
        options = ("--steps=2", "--set=train.eval_interval=2", f"--set=train.eval_batches={count}")
        assert runner(f"--name={name}", *sizes, *options) == 0
        losses[name] = runner.records(name)[-1]["val_loss"]
    everything = losses.pop("m16")
    assert max(losses.values()) - min(losses.values()) < 1e-6
    saved = newest(runner, "m16")
    model = Transformer(Config.from_dict(saved.state["model"]))
    model.load_state_dict(saved.tensors["model"])
    ids = np.frombuffer(runner.corpus.read_bytes(), dtype=np.uint8).astype(np.int64)
    held_out = ids[len(ids) - round(0.05 * len(ids)) :]
    count = (len(held_out) - 1) // 16
    assert count % 16  # a last micro-batch that is not full
    inputs = torch.from_numpy(held_out[: count * 16].reshape(count, 16).copy())
    targets = torch.from_numpy(held_out[1 : count * 16 + 1].reshape(count, 16).copy())
    with torch.no_grad():
        assert everything == pytest.approx(model(inputs, targets)[1].item(), abs=1e-5)
    sample = Batches(held_out, seq_len=16, batch_size=8, seed=0)
    inputs, targets = map(torch.from_numpy, sample.samples(0, 16))
    saved = newest(runner, "m4")
    model.load_state_dict(saved.tensors["model"])
    with torch.no_grad():
        assert losses["m4"] == pytest.approx(model(inputs, targets)[1].item(), abs=1e-5)


SLOW_READING = """
import time
from xtrain.data import readers
original = readers.read_pieces
def read_pieces(*arguments):
    print("reading", flush=True)
    time.sleep(60)
    yield from original(*arguments)
from xtrain.data import encode
encode.read_pieces = read_pieces
"""
# As a tokenizer's training, or the first backward of a large model: Python does not get to run.
DEAF = """
import ctypes
from xtrain.data import encode
def read_pieces(*arguments):
    print("reading", flush=True)
    ctypes.PyDLL(None).usleep(1)
    ctypes.CDLL(None).pause()
    ctypes.CDLL(None).sleep(60)
encode.read_pieces = read_pieces
"""


@pytest.mark.parametrize("patch", [SLOW_READING, DEAF], ids=["in Python", "outside Python"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_leaves_the_name_free(runner, number, patch):
    process = Process(runner, "--name=run", "--steps=2", *FLAGS, patch=patch)
    process.wait_for("reading")
    time.sleep(0.2)
    process.signal(number)
    assert process.end() == 128 + number, process.output
    assert process.took_s < 15
    said = f"stopped by {number.name} before the first step: nothing is left of {runner.run('run')}"
    lines = process.output.strip().splitlines()
    assert lines[-1] == said and "Traceback" not in process.output
    assert not runner.run("run").exists()


def test_a_kill_while_reading_the_data_leaves_the_name_free(runner, capsys):
    assert runner("--name=straight", "--steps=10", *FLAGS) == 0
    flags = ("--steps=10", f"--set=data.cache_dir={runner.folder / 'other'}", *FLAGS)
    process = Process(runner, "--name=run", *flags, patch=SLOW_READING)
    process.wait_for("reading")
    assert runner("--name=run", "--steps=10", *FLAGS) == 2
    assert f"is in use by process {process.process.pid} on" in error_of(capsys)
    process.signal(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    assert resume(runner, "run") == 0  # starts it with its own configuration
    assert_same_end(runner, "run", "straight")


def test_ctrl_c_while_the_first_step_compiles_ends_at_once(runner):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(runner.folder / "inductor")}
    command = [sys.executable, "-m", "xtrain.train", *runner.arguments("--name=run", "--steps=2")]
    process = subprocess.Popen(
        [*command, "--compile", "--dropout=0.1"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = ""
    for line in process.stdout:
        output += line
        if "insert_residual_dropout" in line:
            break
    time.sleep(2)
    started = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert time.perf_counter() - started < 15
    assert "stopped by SIGINT before the first step: nothing is left of" in output
    assert "Traceback" not in output and "step 1/2" not in output
