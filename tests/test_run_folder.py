"""A run's folder: never half a run, held by one process, whole wherever it is continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from training import FLAGS, apart, assert_same_end, error_of

from xtrain import generate, train
from xtrain.config import ConfigError
from xtrain.training import loop, run_folder
from xtrain.training.update import Updater


def test_a_run_without_checkpoint_starts_at_step_0(runner, straight, capsys):
    """As a kill before the first checkpoint leaves it: by --resume, or under its name anew."""
    for name in ("killed", "early"):
        folder = runner.run(name)
        folder.mkdir()
        config = (straight / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace('"straight"', f'"{name}"'))
        (folder / ".lock").write_text("process 1 on a machine that is off\n")
    lines = (straight / "metrics.jsonl").read_text().splitlines(True)
    (runner.run("killed") / "metrics.jsonl").write_text("".join(lines[:3]))
    assert runner("--name=killed", "--steps=10", *FLAGS) == 2  # there are steps in it
    assert "exists already: add --resume to continue that run" in error_of(capsys)
    assert runner.resume("killed", "--steps=10") == 0
    assert "has no checkpoint yet: starting at step 0" in capsys.readouterr().out
    assert_same_end(runner, "killed")
    assert runner("--name=early", "--steps=10", *FLAGS) == 0  # there is nothing in it
    assert_same_end(runner, "early")


def test_a_folder_that_is_no_run_is_left_alone(runner, capsys, untrained):
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


# --- signals ------------------------------------------------------------------------------------


class Process:
    """The command in a process of its own, its steps slow enough to be met by a signal.

    patch: code that runs before it.
    """

    def __init__(self, runner, *extra, patch=""):
        output, written = apart.Pipe(duplex=False)
        arguments = runner.arguments(*extra)
        self.process = apart.Process(target=slowly, args=(arguments, patch, written), daemon=True)
        self.process.start()
        written.close()
        self.stdout = open(os.dup(output.fileno()))
        self.output = ""

    def wait_for(self, text):
        for line in self.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def signal(self, number):
        self.signalled = time.perf_counter()
        os.killpg(self.process.pid, number)  # as a terminal does: to the whole group

    def end(self):
        self.output += self.stdout.read()
        self.stdout.close()
        self.process.join(60)
        self.took_s = time.perf_counter() - self.signalled
        return self.process.exitcode


def slowly(arguments, patch, written):
    os.setsid()
    for stream in (1, 2):
        os.dup2(written.fileno(), stream)
    written.close()
    exec(patch, {})
    torch.set_num_threads(1)
    original = Updater.step

    def step(self, batch):
        print("begin", batch.step, flush=True)
        time.sleep(0.3)
        return original(self, batch)

    Updater.step = step
    sys.exit(train.main(arguments))


def test_ctrl_c_saves_and_the_rest_can_follow(runner, straight):
    process = Process(runner, "--name=run", "--steps=10", *FLAGS)
    process.wait_for("begin 3")
    process.signal(signal.SIGINT)
    assert process.end() == 130, process.output
    assert "stopping after this step, then saving; once more leaves at once" in process.output
    command = f"continue with: python -m xtrain.train --resume {runner.run('run')}"
    assert "stopped by SIGINT" in process.output and command in process.output
    assert "begin 4" not in process.output
    assert len(runner.records("run")) == runner.newest("run").step == 4
    assert (runner.run("run") / "loss.png").exists()
    assert runner.resume("run") == 0
    assert_same_end(runner, "run")


def test_sigterm_saves_as_ctrl_c_does(runner, capfd, monkeypatch):
    original = Updater.step

    def step(self, batch):
        if batch.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(self, batch)

    monkeypatch.setattr(Updater, "step", step)
    assert runner("--name=term", "--steps=10", *FLAGS) == 128 + signal.SIGTERM
    out, error = capfd.readouterr()
    assert "stopping after this step, then saving" in error and "stopped by SIGTERM" in out
    assert runner.newest("term").step == 2


def test_a_second_ctrl_c_leaves_at_once(runner):
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
def test_a_signal_while_data_are_read_leaves_the_name_free(
    runner, capsys, monkeypatch, untrained, number
):
    original = loop.open_corpus

    def interrupted(*arguments, **options):
        signal.raise_signal(number)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_corpus", interrupted)
        assert runner("--name=r", "--steps=1") == 128 + number
    assert "nothing is left of" in capsys.readouterr().out and not runner.run("r").exists()
    # killed there, it leaves a folder in which nothing was trained
    runner.run("r").mkdir()
    (runner.run("r") / "config.toml").write_text("")
    (runner.run("r") / ".lock").write_text("process 1 on another\n")
    assert runner("--name=r", "--steps=1") == 0


def test_a_kill_loses_only_what_was_not_saved(runner, straight):
    process = Process(runner, "--name=run", "--steps=10", "--set=checkpoint.interval=2", *FLAGS)
    process.wait_for("begin 5")
    process.signal(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    assert len(runner.records("run")) == 5  # every finished step was on the disk
    assert runner.newest("run").step == 4
    assert runner.resume("run") == 0
    assert_same_end(runner, "run")


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
        "from xtrain.training.signals import StopSignals\n"
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
        "from xtrain.training.signals import Interrupted, StopSignals\n"
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


@pytest.mark.parametrize(
    ("number", "patch"),
    [(signal.SIGINT, SLOW_READING), (signal.SIGTERM, DEAF)],
    ids=["in Python", "outside Python"],
)
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


def test_a_kill_while_reading_the_data_leaves_the_name_free(runner, straight, capsys):
    flags = ("--steps=10", f"--set=data.cache_dir={runner.folder / 'other'}", *FLAGS)
    process = Process(runner, "--name=run", *flags, patch=SLOW_READING)
    process.wait_for("reading")
    assert runner("--name=run", "--steps=10", *FLAGS) == 2
    assert f"is in use by process {process.process.pid} on" in error_of(capsys)
    process.signal(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    assert runner.resume("run") == 0  # starts it with its own configuration
    assert_same_end(runner, "run")


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
