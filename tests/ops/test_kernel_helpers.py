"""The helpers that guard kernels notice what they are there to notice."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from ahead_of_time import ARCHITECTURES, compile_kernel
from interpreter import run_interpreted


@triton.jit
def _sum_of_many_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Each of BLOCK / 32 loads of a thread stays alive until the last has come."""
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane, mask=lane < n, other=0.0)
    x = tl.exp(x) / tl.sum(x, 0)
    tl.store(out_ptr + lane, x, mask=lane < n)


SIGNATURE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32:16"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_kernel_reads_registers_spills_and_opcodes(arch):
    free = compile_kernel(_sum_of_many_kernel, SIGNATURE, {"BLOCK": 4096}, arch=arch, num_warps=1)
    tight = compile_kernel(
        _sum_of_many_kernel, SIGNATURE, {"BLOCK": 4096}, arch=arch, num_warps=1, maxnreg=32
    )
    assert free.registers > 128 and free.spills == 0, free
    assert tight.registers <= 32 and tight.spills > 4 * 64, tight
    # 4096 fp32 elements by 32 threads, 4 to an instruction
    assert free.count("LDG", "128") == free.count("STG", "128") == 32, free
    assert free.count("LDG") == 32 and free.instructions["EXIT"] >= 1, free


def test_compile_kernel_says_unaligned_sizes_apart():
    signature = SIGNATURE | {"n": "i32"}
    usage = compile_kernel(_sum_of_many_kernel, signature, {"BLOCK": 4096}, arch=90, num_warps=1)
    assert usage.count("LDG", "128") == 0 and usage.count("LDG") == 128, usage


def test_compile_kernel_names_missing_and_unknown_arguments():
    with pytest.raises(ValueError, match=r"unknown \['y_ptr'\], missing \['x_ptr', 'n'\]"):
        signature = {"y_ptr": "*fp32", "out_ptr": "*fp32"}
        compile_kernel(_sum_of_many_kernel, signature, {"BLOCK": 64}, arch=90)


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
