"""A recording that is ended from outside leaves nothing; what a killed one left is cleared away."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drift_models import Rowwise, decoder, prompts, subject, tokens

from xtrain import drift
from xtrain.drift.recording.recorder import record_prompts
from xtrain.drift.recording.writing import RecordWriter
from xtrain.drift.settings import Run

RECORD = [sys.executable, "-m", "xtrain.drift", "record"]
LONG = ["tiny", "--tokens=100", "--num-prompts=500", "--threads=1", "--prompt-length=8"]


def begin(command, folder: Path, pattern: str) -> subprocess.Popen:
    """Start a command and return it once something in folder has a name like pattern."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert child.poll() is None and time.monotonic() < limit, child.communicate()
        time.sleep(0.05)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_recording_and_leaves_nothing(tmp_path, number):
    child = begin([*RECORD, "--out", tmp_path / "x", *LONG], tmp_path, ".x.tmp-*/case*")
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number and out == ""
    assert "Traceback" not in err and err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_two_signals_at_once_leave_nothing_either(tmp_path):
    """A supervisor may send both; a closed terminal ends the shell, which sends its own."""
    child = begin([*RECORD, "--out", tmp_path / "x", *LONG], tmp_path, ".x.tmp-*/case*")
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGHUP)
    child.communicate(timeout=60)
    assert child.returncode in (128 + signal.SIGTERM, 128 + signal.SIGHUP)
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """nohup: a closed terminal does not end it."""
    command = ["nohup", *RECORD, "--out", str(tmp_path / "x"), *LONG]
    child = begin(command, tmp_path, ".x.tmp-*/case*")
    child.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert child.poll() is None
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM and not list(tmp_path.iterdir())


def test_a_signal_to_bisect_ends_its_child_too(tmp_path):
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "xtrain.drift", "bisect", *LONG[:-2], "--keep", str(kept)]
    child = begin([*command, "--factor=batch=1,2"], tmp_path, "kept/.000.drift.tmp-*/case*")
    recorder = int(next(kept.iterdir()).name.rpartition("-")[2])
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert not list(kept.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(recorder, 0)


def test_a_library_call_keeps_the_signal_handlers_of_its_process(tmp_path):
    seen = []

    def during(_):
        seen.append([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)])

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    settings = Run(num_tokens=1)
    record_prompts(
        subject(Rowwise()), prompts([1], [2]), settings, out=tmp_path / "x", progress=during
    )
    assert seen == [before, before]


def test_the_command_puts_the_handlers_back():
    from xtrain.drift.command import main

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["compare", "/nowhere", "/nowhere"]) == 5
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == before


def test_what_a_killed_recording_left_is_removed_by_the_next_one(tmp_path):
    child = begin([*RECORD, "--out", tmp_path / "x", *LONG], tmp_path, ".x.tmp-*/case*")
    child.kill()
    child.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [f".x.tmp-{child.pid}"]
    drift.record(decoder(), tokens(), out=tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_recording_under_way_keeps_its_folder(tmp_path):
    """Its process may be one of another machine or container, whose id says nothing here."""
    first = RecordWriter(tmp_path / "x")
    renamed = tmp_path / ".x.tmp-999999999"
    first.temp.rename(renamed)
    drift.record(decoder(), tokens(), out=tmp_path / "x")
    assert renamed.is_dir() and (tmp_path / "x" / "manifest.json").is_file()
    first.temp = renamed
    first.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_names_that_only_look_alike_stay(tmp_path):
    for name in (".x.tmp-1", ".x.tmp-2", ".x.tmp-notes", ".xy.tmp-1", ".x.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".x.tmp-3").write_text("a file")
    drift.record(decoder(), tokens(), out=tmp_path / "x")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".x.tmp", ".x.tmp-3", ".x.tmp-notes", ".xy.tmp-1", "x"]


def test_a_folder_whose_names_may_not_be_read_is_written_all_the_same(tmp_path, monkeypatch):
    """Some shared folders let everyone write and nobody look."""

    def refuse(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        writer = RecordWriter(tmp_path / "x")
    assert writer.temp.is_dir()
    writer.discard()


def test_a_mode_that_fails_before_the_first_forward_leaves_nothing(tmp_path):
    with pytest.raises(drift.DriftError):
        drift.record(decoder(), tokens(), out=tmp_path / "x", mode="other")
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_recording_names_its_process(tmp_path):
    writer = RecordWriter(tmp_path / "x")
    assert re.fullmatch(rf"\.x\.tmp-{os.getpid()}", writer.temp.name)
    writer.discard()
