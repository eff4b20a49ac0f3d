"""The Triton dropout kernel without a GPU: interpreted, and compiled for four architectures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xtrain.ops.triton.dropout import _dropout_fwd_kernel, dropout_block_sizes

HERE = Path(__file__).parent
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def test_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [*command, str(HERE / "interpreted_dropout.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout) and "skipped" not in result.stdout


def resource_usage(kernel: triton.compiler.CompiledKernel, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory per thread, as ptxas reported them in the binary."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    report = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("architecture", [80, 90, 100, 120], ids=lambda sm: f"sm_{sm}")
def test_compiles_without_spills(architecture, dtype, tmp_path):
    block, num_blocks, num_warps = dropout_block_sizes(1 << 24, ITEMSIZE[dtype])
    constants = {
        "THRESHOLD": 1677722,
        "SCALE": 1.0 / 0.9,
        "COMPUTE_DTYPE": tl.float64 if dtype == "fp64" else tl.float32,
        "BLOCK": block,
        "NUM_BLOCKS": num_blocks,
    }
    pointers = {"x_ptr": dtype, "out_ptr": dtype, "seed_ptr": "i64", "offset_ptr": "i64"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()}
    signature |= {"n_elements": "i64", **dict.fromkeys(constants, "constexpr")}
    # as the launcher specialises: 16-byte aligned pointers, a size that 16 divides
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(5)}
    kernel = triton.compile(
        ASTSource(_dropout_fwd_kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": num_warps},
    )
    usage = resource_usage(kernel, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    # 128 registers let four programs of 128 threads, and more, share an SM of 65536
    assert 0 < usage["REG"] <= 128, usage
    if dtype in ("fp32", "bf16", "fp16"):
        assert "ld.global.v4.b32" in kernel.asm["ptx"], "loads are not 16 bytes wide"


def test_block_sizes():
    for dtype, itemsize in ITEMSIZE.items():
        for n in (1, 1 << 20, 1 << 32):
            block, num_blocks, num_warps = dropout_block_sizes(n, itemsize)
            assert block & (block - 1) == 0, dtype
            assert block * itemsize == num_warps * 32 * 16
            assert n < 1 << 20 or num_blocks > 1


@pytest.mark.gpu
def test_past_2_to_the_31_elements():
    """Row C10: the last rows of a tensor past 2^31 elements equal the same rows alone."""
    from xtrain.ops import dropout

    rows, cols = 524289, 4096
    x = torch.ones(rows, cols, dtype=torch.bfloat16, device="cuda")
    out = dropout(x, 0.1, 5)
    alone = dropout(x[-4:], 0.1, 5, offset=(rows - 4) * cols)
    assert torch.equal(out[-4:], alone)
    assert torch.equal(alone.cpu(), dropout(x[-4:].cpu(), 0.1, 5, offset=(rows - 4) * cols))
