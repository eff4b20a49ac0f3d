"""What is not there or gives way: packages, the reader of stdout. Never a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drift_models import decoder, tokens

from xtrain import drift

# Refuses every package but those that docs/drift.md asks for.
ALONE = """
import importlib.abc, runpy, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {known} or top in sys.stdlib_module_names:
            return None
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv[0] = "drift"
runpy.run_module("xtrain.drift", run_name="__main__", alter_sys=True)
"""
READER = ("xtrain", "numpy", "xxhash", "tabulate")


def alone(*arguments, known=READER):
    command = [sys.executable, "-c", ALONE.format(known=known), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("surroundings")
    drift.record(decoder(), tokens(), out=folder / "a")
    model = decoder()
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight[3, 4] += 0.5
    drift.record(model, tokens(), out=folder / "b")
    return folder


def test_comparing_needs_numpy_xxhash_and_tabulate_alone(records, tmp_path):
    done = alone("compare", records / "a", records / "a")
    assert done.returncode == 0 and done.stderr == "" and "verdict 0" in done.stdout
    done = alone("compare", records / "a", records / "a", "--html", tmp_path / "x.html")
    assert done.returncode == 5 and not (tmp_path / "x.html").exists()
    assert done.stderr == "error: this needs the package jinja2; install it\n"
    done = alone("compare", records / "a", records / "b", "--json", "-")
    assert done.returncode == 4 and json.loads(done.stdout)["exit_code"] == 4
    assert alone("compare", records / "a", "nowhere").returncode == 5
    assert "exit codes of compare" in alone("--help").stdout


def test_a_package_that_is_missing_is_one_line_and_no_verdict(tmp_path, records):
    for command, package in (
        (["record", "--out", tmp_path / "x", "tiny"], "torch"),
        (["ops", "--factor=A=1,2", "--child"], "torch"),
    ):
        done = alone(*command)
        assert done.returncode == 5 and done.stdout == ""
        assert done.stderr == f"error: this needs the package {package}; install it\n"
    for package in READER[1:]:
        known = tuple(name for name in READER if name != package)
        done = alone("compare", records / "a", records / "b", known=known)
        assert done.returncode == 5
        assert done.stderr == f"error: this needs the package {package}; install it\n"


# --- stdout --------------------------------------------------------------------------------------


def command_into(target, *arguments):
    command = [sys.executable, "-m", "xtrain.drift", *map(str, arguments)]
    return subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("flags", [[], ["--json=-"]], ids=str)
def test_a_reader_that_leaves_changes_no_verdict(records, flags):
    """As in `compare A B | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = command_into(pipe, "compare", records / "a", records / "b", *flags)
    assert (done.returncode, done.stderr) == (4, "")


def test_a_stdout_that_takes_nothing_is_one_line(records):
    with Path("/dev/full").open("w") as device:
        done = command_into(device, "compare", records / "a", records / "a")
    assert done.returncode == 5
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"
