"""The dropout kernel under Triton's interpreter, on CPU tensors.

Run by test_triton_dropout.py in a process of its own with TRITON_INTERPRET=1: Triton reads the
switch when a kernel is defined, and other tests compile the same kernels ahead of time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from mask_oracle import keep_mask

from xtrain.ops.dropout.kernel import _dropout_fwd_kernel, dropout_bwd, dropout_fwd
from xtrain.ops.dropout.op import dropout_mask, dropout_reference, scale_of, threshold_of
from xtrain.ops.shared.layout import in_rows

SEED = -7046029254386353131


pytestmark = pytest.mark.usefixtures("bf16_rounds_to_nearest")


def launch(function, x, p, seed, offset):
    return function(
        x, threshold_of(p), scale_of(p), torch.tensor(seed), torch.tensor(np.int64(offset))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_equal_reference(dtype):
    for n in (1, 11, 1000, 4099):
        x = torch.randn(n, dtype=torch.float64).to(dtype)
        for p in (0.1, 0.5, 1.0):
            expected = dropout_reference(x, p, SEED, 5)
            assert torch.equal(launch(dropout_fwd, x, p, SEED, 5), expected)
            assert torch.equal(launch(dropout_bwd, x, p, SEED, 5), expected)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 7), (10007,), (128, 1000)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mask_equals_oracle(shape, p):
    """Row C3. The last shape takes several blocks per program."""
    # the interpreter takes milliseconds per program: one offset for the large shape
    for offset in (2**31 - 3,) if len(shape) == 2 else (0, 2**31 - 3, 2**32 + 1, -9):
        mask = launch(dropout_fwd, torch.ones(shape), p, SEED, offset) != 0
        assert (mask.numpy() == keep_mask(shape, p, SEED, offset)).all()


@pytest.mark.parametrize("block,num_blocks,vec", [(64, 1, 8), (256, 3, 1), (1024, 4, 4)])
def test_mask_does_not_depend_on_the_tiling(block, num_blocks, vec):
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
def test_rows_in_place_have_the_mask_of_their_values(dtype):
    for x in views(dtype):
        assert in_rows(x)[0] is x and not x.is_contiguous()
        for offset in (5, 2**32 - 11):
            out = launch(dropout_fwd, x, 0.3, SEED, offset)
            assert out.is_contiguous()
            assert torch.equal(out, launch(dropout_fwd, x.contiguous(), 0.3, SEED, offset))
        ones = x.clone().fill_(1.0)  # in x's layout, where it is dense
        mask = launch(dropout_bwd, ones, 0.3, SEED, offset) != 0
        assert torch.equal(mask, dropout_mask(x.shape, 0.3, SEED, offset))
        assert (mask.numpy() == keep_mask(x.shape, 0.3, SEED, offset)).all()


def test_seed_is_read_by_value_not_by_address():
    x = torch.ones(5000)
    a, b = torch.tensor(77), torch.tensor([1, 77])[1]
    outs = [dropout_fwd(x, threshold_of(0.5), 2.0, seed, torch.tensor(0)) for seed in (a, b)]
    assert torch.equal(outs[0], outs[1])
    assert ((outs[0] != 0).numpy() == keep_mask(5000, 0.5, 77)).all()


def test_dropped_nan_gives_plus_zero():
    keep = torch.from_numpy(keep_mask(1000, 0.5, SEED))
    for value in (float("nan"), float("inf"), -1.0):
        out = launch(dropout_fwd, torch.full((1000,), value), 0.5, SEED, 0)
        assert set(out[~keep].view(torch.int32).tolist()) == {0}
        assert torch.equal(out[keep].isnan(), torch.full((int(keep.sum()),), value).isnan())
