"""What holds of every kernel that a CPU can interpret: the values, strides and inputs of its op."""

from __future__ import annotations

import pytest
import torch
from interpreter import (  # noqa: F401
    bf16_rounds_to_nearest,
    loop_bounds_are_scalars,
    run_interpreted,
)
from samples import LAYOUTS, SAMPLES, maker
from test_contract import backward_arguments, snapshot
from tolerances import TOLERANCES
from torch.utils import _pytree as pytree

from xtrain.ops import OPS
from xtrain.ops.launch import CALLS


def test_under_the_interpreter():
    run_interpreted(__file__)


# attention and losses ask where their tensors are: their kernels have tests of their own
INTERPRETED = [name for name in OPS if name in CALLS and "sdpa" not in name and "cross" not in name]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.float32) for layout in LAYOUTS), ("contiguous", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", INTERPRETED)
def interpreted_kernels_equal_the_op(name, layout, dtype):
    make = maker(layout, dtype)
    for args in SAMPLES[name](make):
        calls = [(OPS[name].forward, args)]
        calls += [(OPS[name].backward, call) for call in backward_arguments(name, args, make)]
        for op, given in calls:
            before = snapshot(given)
            results = pytree.tree_leaves(CALLS[op._opname]._implementation(*given))
            assert snapshot(given) == before
            for result, expected in zip(results, pytree.tree_leaves(op(*given)), strict=True):
                assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
                rtol, atol = TOLERANCES[result.dtype]
                torch.testing.assert_close(result, expected, rtol=4 * rtol, atol=4 * atol)
