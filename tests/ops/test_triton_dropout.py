"""The Triton dropout kernel without a GPU: interpreted, and compiled for four architectures."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
import triton
from ahead_of_time import ARCHITECTURES, compile_launches, far_rows, meta, seed_and_offset
from interpreter import INTERPRETING, bf16_rounds_to_nearest, run_interpreted  # noqa: F401
from mask_oracle import keep_mask

from xtrain.ops.dropout.kernel import (
    _dropout_fwd_kernel,
    dropout_block_sizes,
    dropout_fwd,
)
from xtrain.ops.dropout.op import dropout_mask, dropout_reference, scale_of, threshold_of
from xtrain.ops.shared.layout import in_rows
from xtrain.ops.shared.rows import forward_block_sizes


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [*((arch, torch.bfloat16) for arch in ARCHITECTURES), (90, torch.float32), (90, torch.float16)],
    ids=str,
)
def test_compiles_without_spills(arch, dtype):
    block, num_blocks, _ = dropout_block_sizes(1 << 28, dtype.itemsize)
    vec, x = 16 // dtype.itemsize, meta(1 << 28, dtype=dtype)
    (usage,) = compile_launches(lambda: dropout_fwd(x, 1000, 1.1, *seed_and_offset()), arch)
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
        x = far_rows(n_cols, torch.bfloat16)
        (usage,) = compile_launches(lambda: dropout_fwd(x, 1000, 1.1, *seed_and_offset()), arch)  # noqa: B023
        assert usage.spills == 0 and usage.registers <= 128, usage
        elements = tile["BLOCK_ROWS"] * n_cols // (32 * usage.num_warps)  # of a thread
        accesses = elements // tile["VEC"]
        assert usage.count("LDG", "128") == usage.count("STG", "128") == accesses, usage
        assert usage.instructions.total() / elements <= 36, usage


def test_block_sizes():
    for itemsize in (2, 4):
        for n in (1, 1 << 20, 1 << 32):
            block, num_blocks, num_warps = dropout_block_sizes(n, itemsize)
            assert block & (block - 1) == 0
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
    half = dropout(x[:, 2048:], 0.1, 5)
    assert torch.equal(half[-4:], dropout(x[-4:, 2048:], 0.1, 5, offset=(rows - 4) * 2048))
    assert torch.equal(alone.cpu(), dropout(x[-4:].cpu(), 0.1, 5, offset=(rows - 4) * cols))


# --- interpreted ---------------------------------------------------------------------------------


SEED = -7046029254386353131


def launch(function, x, p, seed, offset):
    return function(
        x, threshold_of(p), scale_of(p), torch.tensor(seed), torch.tensor(np.int64(offset))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def interpreted_outputs_equal_reference(dtype):
    for n in (1, 11, 1000, 4099):
        x = torch.randn(n, dtype=torch.float64).to(dtype)
        for p in (0.1, 0.5, 1.0):
            expected = dropout_reference(x, p, SEED, 5)
            assert torch.equal(launch(dropout_fwd, x, p, SEED, 5), expected)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 7), (4099,)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def interpreted_mask_equals_oracle(shape, p):
    """Row C3."""
    for offset in (0, 2**31 - 3, 2**32 + 1, -9):
        mask = launch(dropout_fwd, torch.ones(shape), p, SEED, offset) != 0
        assert (mask.numpy() == keep_mask(shape, p, SEED, offset)).all()


@pytest.mark.parametrize("block,num_blocks,vec", [(64, 1, 8), (256, 3, 1), (1024, 4, 4)])
def interpreted_mask_does_not_depend_on_the_tiling(block, num_blocks, vec):
    for n, even in ((3001, False), (block * num_blocks, True)):
        out = torch.full((n,), float("nan"))
        _dropout_fwd_kernel[(triton.cdiv(n, block * num_blocks),)](
            torch.ones(n),
            out,
            torch.tensor(SEED),
            torch.tensor(7),
            n,
            (threshold_of(0.3) << 8) - 1,
            scale_of(0.3),
            BLOCK=block,
            NUM_BLOCKS=num_blocks,
            VEC=vec,
            EVEN=even,
        )
        assert ((out != 0).numpy() == keep_mask(n, 0.3, SEED, 7)).all()


def views(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows at one, two and three distances, out of step with 16 bytes, and expanded."""
    packed = torch.randn(2, 5, 3 * 48).to(dtype)
    return [
        packed[..., 48:96],
        packed[..., 48:96].transpose(0, 1),
        packed[..., 48:88].unflatten(-1, (2, 20)),
        packed[..., 3:99].unflatten(-1, (2, 48)).transpose(1, 2),
        packed[:, :1].expand(2, 7, 144),
        torch.randn(3, 130, 5).to(dtype).transpose(0, 1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def interpreted_rows_in_place_have_the_mask_of_their_values(dtype):
    for x in views(dtype):
        assert in_rows(x)[0] is x and not x.is_contiguous()
        for offset in (5, 2**32 - 11):
            out = launch(dropout_fwd, x, 0.3, SEED, offset)
            assert out.is_contiguous()
            assert torch.equal(out, launch(dropout_fwd, x.contiguous(), 0.3, SEED, offset))
        ones = x.clone().fill_(1.0)  # in x's layout, where it is dense
        mask = launch(dropout_fwd, ones, 0.3, SEED, offset) != 0
        assert torch.equal(mask, dropout_mask(x.shape, 0.3, SEED, offset))
        assert (mask.numpy() == keep_mask(x.shape, 0.3, SEED, offset)).all()


def interpreted_what_a_gpu_runs_takes_any_layout():
    """In place or copied first: a row too long, elements apart, no dim at all."""
    run = import_module("xtrain.ops.dropout.op")._cuda
    odd = [torch.randn(2, 8200)[:, :8193], torch.randn(5, 64).t(), torch.tensor(3.0)]
    for x in views(torch.float32) + odd:
        out = run(x, 0.3, torch.tensor(SEED), torch.tensor(5))
        assert out.is_contiguous() and torch.equal(out, dropout_reference(x, 0.3, SEED, 5))


def interpreted_seed_is_read_by_value_not_by_address():
    x = torch.ones(5000)
    a, b = torch.tensor(77), torch.tensor([1, 77])[1]
    outs = [dropout_fwd(x, threshold_of(0.5), 2.0, seed, torch.tensor(0)) for seed in (a, b)]
    assert torch.equal(outs[0], outs[1])
    assert ((outs[0] != 0).numpy() == keep_mask(5000, 0.5, 77)).all()


def interpreted_dropped_nan_gives_plus_zero():
    keep = torch.from_numpy(keep_mask(1000, 0.5, SEED))
    for value in (float("nan"), float("inf"), -1.0):
        out = launch(dropout_fwd, torch.full((1000,), value), 0.5, SEED, 0)
        assert set(out[~keep].view(torch.int32).tolist()) == {0}
        assert torch.equal(out[keep].isnan(), torch.full((int(keep.sum()),), value).isnan())
