"""The helpers that guard kernels notice what they are there to notice."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import ARCHITECTURES, compile_launches, meta
from interpreter import run_interpreted


@triton.jit
def _sum_of_many_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Each of BLOCK / 32 loads of a thread stays alive until the last has come."""
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
    x = tl.exp(x) / tl.sum(x, 0)
    tl.store(out_ptr + lane, x, mask=lane < n)


def compiled(arch: int, n: int = 4096, **options: int):
    x = meta(4096, dtype=torch.float32)
    launch = _sum_of_many_kernel[(1,)]
    (usage,) = compile_launches(lambda: launch(x, x, n, BLOCK=4096, num_warps=1, **options), arch)
    return usage


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_launches_reads_registers_spills_and_opcodes(arch):
    free, tight = compiled(arch), compiled(arch, maxnreg=32)
    assert free.registers > 128 and free.spills == 0, free
    assert tight.registers <= 32 and tight.spills > 4 * 64, tight
    # 4096 fp32 elements by 32 threads, 4 to an instruction
    assert free.count("LDG", "128") == free.count("STG", "128") == 32, free
    assert free.count("LDG") == 32 and free.instructions["EXIT"] >= 1, free
    assert free.num_warps == 1 and free.grid == (1,)


def test_compile_launches_specialises_as_a_launch_does():
    """A size that is no multiple of 16 leaves no vector whole."""
    usage = compiled(90, n=4095)
    assert usage.count("LDG", "128") == 0 and usage.count("LDG") == 128, usage


@pytest.mark.parametrize(
    "body, good",
    [
        ("assert True", True),
        ("assert False", False),
        ("import pytest; pytest.skip('reason')", False),
    ],
)
def test_run_interpreted_wants_passes_alone(tmp_path, body, good):
    path = tmp_path / "interpreted.py"
    path.write_text(
        "import os\n\ndef interpreted_mode():\n    assert os.environ['TRITON_INTERPRET'] == '1'\n\n"
        f"def interpreted_body():\n    {body}\n"
    )
    if good:
        run_interpreted(path)
    else:
        with pytest.raises(AssertionError):
            run_interpreted(path)


def test_run_interpreted_wants_a_test(tmp_path):
    path = tmp_path / "interpreted.py"
    path.write_text("")
    with pytest.raises(AssertionError):
        run_interpreted(path)
