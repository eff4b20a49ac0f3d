"""Run tests of Triton kernels under Triton's interpreter, on CPU tensors.

Triton reads TRITON_INTERPRET when a kernel is defined, and other tests compile the same kernels
ahead of time: so the interpreted tests, functions named interpreted_*, run in a process of their
own, which one test of their file starts; no other run collects them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(path: Path | str) -> None:
    """Run a file's functions interpreted_* with TRITON_INTERPRET=1.

    Fails unless they passed and none was skipped.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [*command, "-o", "python_functions=interpreted_*", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert re.search(r"\b\d+ passed", result.stdout), output
    assert not re.search(r"\b\d+ (skipped|deselected|xfailed)", result.stdout), output


@pytest.fixture(autouse=INTERPRETING)
def bf16_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to nearest even as a GPU does; the interpreter cuts fp32 off to bf16."""
    import triton.runtime.interpreter as interpreter

    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


@pytest.fixture(autouse=INTERPRETING)
def loop_bounds_are_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes ints of one-element arrays, which NumPy 2.4 refuses."""
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
