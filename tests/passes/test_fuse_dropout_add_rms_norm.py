"""fuse_dropout_add_rms_norm: within a block, across blocks, the final norm; masks by the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from mask_oracle import keep_mask
from swapping import assert_left_alone, assert_swapped, graph_of, run, run_swap
from torch import Tensor

from xtrain import ops
from xtrain.passes.swaps.fuse_dropout_add_rms_norm import fuse_dropout_add_rms_norm as swap
from xtrain.passes.swaps.use_triton_rms_norm import use_triton_rms_norm

P, EPS, SHAPE = 0.5, 1e-5, (2, 5, 8)


def norm(x, w):
    return ops.rms_norm(x, w, EPS)


def gemma(x, w):
    return ops.rms_norm(x, w, EPS, cast="gemma")


def drop(x, seed, offset=0):
    return ops.dropout(x, P, torch.full((), seed, dtype=torch.int64), offset)


def tensors(dtype=torch.float32, residual=None):
    x, r = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(residual or dtype)
    return x, r, (1 + torch.randn(8) / 4).to(residual or dtype)


def block(x, r, w):
    h = r + drop(x, 7)
    return norm(h, w), h


def branch_first(x, r, w):
    h = drop(x, 7) + r
    return gemma(h, w), h * 2


def without_dropout(x, r, w):
    h = x + r
    return norm(h, w), h


def added_in_place(x, r, w):
    h = r * 1
    h += drop(x, 7)
    return norm(h, w), h


def h_is_read_by_nobody_else(x, r, w):
    return norm(r + drop(x, 7), w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function", [block, branch_first, without_dropout, added_in_place, h_is_read_by_nobody_else]
)
def test_both_results_and_all_gradients(function, dtype):
    module = assert_swapped(swap, function, *tensors(dtype))
    (call,) = calls(module, "dropout_add_rms_norm")
    assert call.args[3] == (0.0 if function is without_dropout else P)
    assert call.args[7] == ("gemma" if function is branch_first else "llama")
    assert not calls(module, "dropout") and not calls(module, "rms_norm")


def test_a_bf16_branch_on_an_fp32_stream():
    """What autocast gives: the branch is bf16, stream and weight are fp32."""

    def half(x, r, w):
        h = r + drop(x if x.dtype == torch.float64 else x.bfloat16(), 7)
        return norm(h, w), h

    module = assert_swapped(swap, half, *tensors())
    values = [
        n.meta["example_value"].dtype for n in calls(module, "dropout_add_rms_norm")[0].args[:2]
    ]
    assert values == [torch.bfloat16, torch.float32]


def test_the_result_is_rounded_where_its_readers_round_it():
    def model(x, r, w, a):
        h = r + drop(x, 7)
        c = h.to(torch.float64 if h.dtype == torch.float64 else torch.float32)
        n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
        return F.linear(n.to(h.dtype) * w, a), h

    args = *tensors(), torch.randn(8, 8) / 3
    with torch.autocast("cpu", torch.bfloat16):
        module = graph_of(model, *args)
    assert run_swap(module, use_triton_rms_norm).num_replaced == 1
    assert run_swap(module, swap).num_replaced == 1
    (call,) = calls(module, "dropout_add_rms_norm")
    assert call.kwargs["y_dtype"] == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y, h = run(module, *args)
        expected_y, expected_h = model(*args)
    assert torch.equal(h, expected_h) and torch.equal(y, expected_y)


def test_across_two_layers_and_into_the_final_norm():
    """Each branch fuses with the next norm; the first norm has no sum before it."""

    def model(x, r, w):
        stream = r
        for layer in range(2):
            stream = stream + drop(torch.tanh(norm(stream, w)) * x, 2 * layer)
            stream = stream + drop(torch.sin(norm(stream, w)) + x, 2 * layer + 1)
        return norm(stream, w)

    module = assert_swapped(swap, model, *tensors(), count=4)
    assert len(calls(module, "rms_norm")) == 1
    assert [n.args[4].args[1] for n in calls(module, "dropout_add_rms_norm")] == [0, 1, 2, 3]


def test_masks_are_the_oracles():
    x, r = torch.ones(SHAPE), torch.zeros(SHAPE)
    module = graph_of(lambda x, r, w: block(x, r, w), x, r, torch.ones(8))
    assert run_swap(module, swap).num_replaced == 1
    _, h = run(module, x, r, torch.ones(8))
    assert torch.equal(h == 2.0, torch.from_numpy(keep_mask(SHAPE, P, 7)))


def test_two_norms_of_one_sum():
    """Parallel branches with a norm each: the first takes the sum along."""

    def model(x, r, w):
        h = r + drop(x, 7)
        return norm(h, w), gemma(h, w)

    module = assert_swapped(swap, model, *tensors())
    assert len(calls(module, "rms_norm")) == 1


def test_parallel_branches_fuse_with_the_last_add():
    def model(x, r, w):
        h = r + drop(x, 1) + drop(x * 2, 2)
        return norm(h, w), h

    module = assert_swapped(swap, model, *tensors())
    assert len(calls(module, "dropout")) == 1


# --- what must stay -----------------------------------------------------------------------------


def positions_are_added(x, r, w):
    h = x + r[0]
    return norm(h, w), h


def stream_is_written(x, r, w):
    h = r + drop(x, 7)
    y = norm(h, w)
    h.mul_(2)
    return y, h


def weight_comes_later(x, r, w):
    h = r + drop(x, 7)
    return norm(h, w * h.mean()), h


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (positions_are_added, "branch and residual differ in shape"),
        (stream_is_written, "writes in place"),
        (weight_comes_later, "weight is computed only behind the add"),
    ],
)
def test_what_is_refused_with_its_reason(function, reason):
    assert_left_alone(swap, function, *tensors(), reason=reason)


def test_a_dropout_with_other_readers_stays_and_the_sum_fuses_without_it():
    def model(x, r, w):
        d = drop(x, 7)
        h = r + d
        return norm(h, w), h, d

    module = assert_swapped(swap, model, *tensors())
    assert len(calls(module, "dropout")) == 1
    assert calls(module, "dropout_add_rms_norm")[0].args[3] == 0.0


def norm_of_a_product(x, r, w):
    return norm(drop(x, 7) * r, w)


def sum_without_norm(x, r, w):
    return r + drop(x, 7)


def layer_norm(x, r, w):
    h: Tensor = r + drop(x, 7)
    return F.layer_norm(h, (8,), w), h


@pytest.mark.parametrize("function", [norm_of_a_product, sum_without_norm, layer_norm])
def test_look_alikes_are_no_match(function):
    assert_left_alone(swap, function, *tensors())
