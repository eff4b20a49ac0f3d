"""compute-sanitizer finds nothing in any kernel, and would find something if it were there."""

from __future__ import annotations

import subprocess
import warnings

import pytest
import sanitize
from samples import AWKWARD

from xtrain.ops import OPS


def test_every_op_has_calls_with_gradients():
    assert sanitize.launch_everything("cpu") == 0
    assert AWKWARD.keys() <= OPS.keys()


def test_kernels_are_found_by_name():
    names = sanitize.kernels_of_ours()
    assert "_dropout_fwd_kernel" in names and all(n.endswith("_kernel") for n in names)


@pytest.mark.gpu
def test_memcheck_is_clean_on_small_shapes():
    """Without a CUDA toolkit the launches run without the checker, and a warning says so."""
    tool = sanitize.compute_sanitizer()
    command = sanitize.command(tool or "")
    if tool is None:
        warnings.warn("compute-sanitizer is missing: kernels ran without it", stacklevel=1)
        command = command[-3:]
    done = subprocess.run(command, env=sanitize.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert tool is None or "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-2000:]


OUT_OF_BOUNDS = """
import torch, triton, triton.language as tl

@triton.jit
def write_past_the_end(x_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, lane * 1.0)

if __name__ == "__main__":
    write_past_the_end[(1,)](torch.zeros(1000, device="cuda"), BLOCK=1024)
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_memcheck_finds_a_write_past_the_end(tmp_path):
    tool = sanitize.compute_sanitizer()
    if tool is None:
        warnings.warn("compute-sanitizer is missing: nothing to try out", stacklevel=1)
        return
    script = tmp_path / "out_of_bounds.py"
    script.write_text(OUT_OF_BOUNDS)
    command = [*sanitize.command(tool)[:-2], str(script)]
    done = subprocess.run(command, env=sanitize.environment(), capture_output=True, text=True)
    assert done.returncode == sanitize.FINDING, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Invalid __global__ write" in done.stdout
