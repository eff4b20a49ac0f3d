"""A disk that fills up while a record is written: one line, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from xtrain import drift
from xtrain.drift.command import main
from xtrain.drift.recording import tensors as storage


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
    """A device that takes nothing: the error comes from NumPy, without a number."""
    writer = storage.TensorWriter(tmp_path / "x.safetensors")
    writer.data.close()
    writer.data = Path("/dev/full").open("wb", buffering=0)
    bits = torch.zeros(1 << 16).numpy()
    with pytest.raises(drift.DriftError, match=r"cannot write .*x\.safetensors"):
        writer.add("x", bits, "F32")
