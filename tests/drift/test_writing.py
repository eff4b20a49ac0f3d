"""A record is complete or absent, whatever ends its recording; memory is that of one tensor."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from drift_models import Rowwise, decoder, prompts, subject, tokens

from xtrain import drift
from xtrain.drift.cli import main
from xtrain.drift.recording import tensors as storage
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.recording.writing import RecordWriter
from xtrain.drift.settings import Run

LONG = ["tiny", "--tokens=100", "--num-prompts=500", "--threads=1", "--prompt-length=8"]
# children are forked from a process that has imported torch once
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["xtrain.drift.recording.forwards"])


def run(arguments, said, ignored):
    """The command in a child, as a shell starts it: what it says goes to a file."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(descriptor, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    sys.exit(main(arguments))


def begin(arguments, folder: Path, pattern: str, ignored=()):
    """Start a command and return it once something in folder has a name like pattern."""
    said = folder.parent / f"{folder.name}.said"
    child = FORKED.Process(target=run, args=([str(a) for a in arguments], said, ignored))
    child.start()
    limit = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert child.is_alive() and time.monotonic() < limit, said.read_text()
        time.sleep(0.05)
    return child, said


def begin_recording(folder: Path, ignored=()):
    return begin(["record", "--out", folder / "x", *LONG], folder, ".x.tmp-*/case*", ignored)


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGHUP)],
    ids=lambda numbers: " ".join(number.name for number in numbers),
)
def test_a_signal_ends_a_recording_and_leaves_nothing(tmp_path, numbers):
    """A supervisor may send two; a closed terminal ends the shell, which sends its own."""
    child, said = begin_recording(tmp_path)
    for number in numbers:
        os.kill(child.pid, number)
    child.join(60)
    assert child.exitcode in {128 + number for number in numbers}
    assert "Traceback" not in said.read_text() and said.read_text().strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """nohup: a closed terminal does not end it."""
    child, _ = begin_recording(tmp_path, ignored=(signal.SIGHUP,))
    os.kill(child.pid, signal.SIGHUP)
    time.sleep(1)
    assert child.is_alive()
    child.terminate()
    child.join(60)
    assert child.exitcode == 128 + signal.SIGTERM and not list(tmp_path.iterdir())


def test_a_signal_to_bisect_ends_its_child_too(tmp_path):
    kept = tmp_path / "kept"
    command = ["bisect", *LONG[:-2], "--keep", kept, "--factor=batch=1,2"]
    child, _ = begin(command, tmp_path, "kept/.000.drift.tmp-*/case*")
    recorder = int(next(kept.iterdir()).name.rpartition("-")[2])
    os.kill(child.pid, signal.SIGHUP)
    child.join(60)
    assert child.exitcode == 128 + signal.SIGHUP
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
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["compare", "/nowhere", "/nowhere"]) == 5
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == before


def test_what_a_killed_recording_left_is_removed_by_the_next_one(tmp_path):
    child, _ = begin_recording(tmp_path)
    child.kill()
    child.join()
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


# --- a disk that is full -------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(storage.shutil, "copyfileobj"), (storage.os, "replace"), (storage.Path, "write_text")],
    ids=lambda value: str(value)[:20],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, owner, name):
    monkeypatch.setattr(owner, name, full)
    flags = ["--tokens=1", "--num-prompts=1", "--warm-up=0", "--threads=1"]
    assert main(["record", "--out", str(tmp_path / "x"), "tiny", *flags]) == 5
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: cannot write ")
    assert "No space left on device" in err and not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_in_the_middle_of_a_tensor(tmp_path):
    """A device that takes nothing."""
    writer = storage.TensorWriter(tmp_path / "x.safetensors")
    writer.data.close()
    writer.data = Path("/dev/full").open("wb", buffering=0)
    bits = torch.zeros(1 << 16).numpy()
    with pytest.raises(drift.DriftError, match=r"cannot write .*x\.safetensors"):
        writer.add("x", bits, "F32")


# --- memory --------------------------------------------------------------------------------------


CODE = """
import resource, sys
from xtrain.drift.cli import main
code = main(["record", "--out", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
sys.exit(code)
"""


def size_and_peak_mib(folder: Path, prompts: Path, steps: int) -> tuple[float, float]:
    """Return what a record of some steps takes on the disk, and its process of memory."""
    flags = ["--tensors", "--threads=1", "--warm-up=0", "--pad-to=128", f"--tokens={steps}"]
    command = [sys.executable, "-c", CODE, folder, "small", *flags, f"--prompts={prompts}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    shutil.rmtree(folder)
    return size, float(done.stdout.split()[-1])


def test_memory_does_not_grow_with_the_steps_of_whole_tensors(tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([list(range(1, 109))]))
    small, peak_small = size_and_peak_mib(tmp_path / "x", prompts, 2)
    large, peak_large = size_and_peak_mib(tmp_path / "x", prompts, 20)
    kept, grown = large - small, peak_large - peak_small
    assert kept > 150
    # what grows is a name and a place per tensor, and what the allocator does with pieces
    assert grown < 0.15 * kept, f"{grown:.0f} MiB of memory for {kept:.0f} MiB of files"
