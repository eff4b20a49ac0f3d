"""Whole tensors go to the disk as they come: a longer record needs no more memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

CODE = """
import resource, sys
from xtrain.drift.command import main
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
