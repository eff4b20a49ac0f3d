"""The Triton dropout kernel without a GPU: interpreted, and compiled for four architectures."""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import ARCHITECTURES, compile_kernel
from interpreter import run_interpreted

from xtrain.ops.dropout.kernel import (
    _dropout_fwd_kernel,
    _dropout_rows_fwd_kernel,
    dropout_block_sizes,
)
from xtrain.ops.shared.rows import forward_block_sizes

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def test_under_the_interpreter():
    run_interpreted("interpreted_dropout.py")


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda sm: f"sm_{sm}")
def test_compiles_without_spills(arch, dtype):
    block, num_blocks, num_warps = dropout_block_sizes(1 << 28, ITEMSIZE[dtype])
    vec = 16 // ITEMSIZE[dtype]
    usage = compile_kernel(
        _dropout_fwd_kernel,
        {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "seed_ptr": "*i64", "offset_ptr": "*i64"}
        | {"n_elements": "i64:16", "last_dropped": "i32", "scale": "fp32"},
        {"BLOCK": block, "NUM_BLOCKS": num_blocks, "VEC": vec, "EVEN": True},
        arch=arch,
        num_warps=num_warps,
    )
    assert usage.spills == 0
    # 80 registers let six programs of 128 threads share an SM of 65536
    assert 0 < usage.registers <= 80, usage
    assert usage.count("LDG", "128") == usage.count("STG", "128") == num_blocks, usage
    # the random bits take 20 integer operations; the rest moves, converts, and zeroes what is
    # dropped by predicated moves, since selects would run on the busier pipe
    assert usage.instructions.total() / (num_blocks * vec) <= 28, usage
    assert usage.count("FSEL") == usage.count("SEL") == 0, usage
    assert usage.count("BRA") <= 1, usage  # the loop that pads the end: no lane goes its own way


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda sm: f"sm_{sm}")
def test_rows_at_three_distances(arch):
    """No spills, wide accesses, and hardly more instructions than a contiguous tensor takes."""
    for n_cols in (768, 4096) if arch == 90 else (768,):
        tile = forward_block_sizes(n_cols, (torch.bfloat16,))
        num_warps = tile.pop("num_warps")
        pointers = dict(x_ptr="*bf16", out_ptr="*bf16", seed_ptr="*i64", offset_ptr="*i64")
        strides = (f"x_{which}_stride" for which in ("outer", "middle", "inner"))
        distances = dict.fromkeys(strides, "i64:16") | dict(n_middle="i32", n_inner="i32")
        usage = compile_kernel(
            _dropout_rows_fwd_kernel,
            pointers | distances | dict(n_rows="i32:16", last_dropped="i32", scale="fp32"),
            dict(N_COLS=n_cols, EVEN=True, **tile),
            arch=arch,
            num_warps=num_warps,
        )
        assert usage.spills == 0 and usage.registers <= 128, usage
        elements = tile["BLOCK_ROWS"] * n_cols // (32 * num_warps)  # of a thread
        accesses = elements // tile["VEC"]
        assert usage.count("LDG", "128") == usage.count("STG", "128") == accesses, usage
        assert usage.instructions.total() / elements <= 36, usage


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
