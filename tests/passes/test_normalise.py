"""normalise and remove_noop_views: what is taken out, and what only looks like nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import D, stream
from harness import capture, hand_built
from torch import nn
from torch.utils.checkpoint import checkpoint

from xtrain.passes.graph import clone_graph, op_name, walk_graphs
from xtrain.passes.swaps.normalise import normalise, remove_noop_views


def ops_left(function, *args, run=normalise):
    """Names of the ops that a pass leaves; results stay equal, a second run changes nothing."""
    captured = capture(function, *args)
    module = clone_graph(captured.module)
    result = run(module.graph)
    assert result.num_replaced + sum(result.skipped.values()) == result.num_matched
    parts = list(walk_graphs(module))
    for part in parts:
        part.graph.lint()
        part.recompile()
    expected = captured.module(*(a.clone() for a in captured.inputs))
    found = module(*(a.clone() for a in captured.inputs))
    assert all(map(torch.equal, found, expected))
    assert run(module.graph).num_replaced == 0
    nodes = [n for part in parts for n in part.graph.nodes]
    return [op_name(n) for n in nodes if n.op in ("call_function", "call_method")]


def same_casts(x):
    return torch.sin(x.to(torch.float32).float().type_as(x).to(dtype=torch.float32))


def absent_dropout(x):
    return torch.sin(F.dropout(F.dropout(x, 0.0, True), 0.5, False))


def whole_slices(x):
    return torch.sin(x[:, 0:, :][..., :D][...])


def turned_twice(x):
    return torch.sin(x.transpose(1, 2).transpose(-1, 1))


def same_shape(x):
    return torch.sin(x.view(x.shape).reshape(2, -1, D).expand(2, -1, -1))


def times_one(x):
    return torch.sin(1.0 * x * 1 / 1.0)


@pytest.mark.parametrize(
    "function", [same_casts, absent_dropout, whole_slices, turned_twice, same_shape, times_one]
)
def test_what_hands_a_value_on_is_taken_out(function):
    assert ops_left(function, stream()) == ["sin"]


def other_dtype(x):
    return torch.sin(x.to(torch.bfloat16))


def copies(x):
    return torch.sin(x.to(torch.float32, copy=True))


def active_dropout(x):
    return torch.sin(F.dropout(x * 0.0, 0.5, True))


def part_of_it(x):
    return torch.sin(x[:, 1:, : D - 1])


def new_dim(x):
    return torch.sin(x[None])


def reversed_steps(x):
    return torch.sin(x[..., ::2])


def other_dims(x):
    return torch.sin(x.transpose(1, 2).transpose(0, 1))


def other_shape(x):
    return torch.sin(x.view(-1, D))


def one_makes_floats_of_ints(x):
    return torch.sin((x > 0).long() * 1.0)


def one_over(x):
    return torch.sin(1.0 / x)


CHANGED = [other_shape, one_makes_floats_of_ints, one_over, other_dtype, copies, active_dropout]
CHANGED += [part_of_it, new_dim, reversed_steps, other_dims]


@pytest.mark.parametrize("function", CHANGED)
def test_what_changes_a_value_stays(function):
    before = [n for n in capture(function, stream()).module.graph.nodes]
    calls = [n for n in before if n.op in ("call_function", "call_method")]
    assert len(ops_left(function, stream())) == len(calls)


def test_a_value_that_is_written_is_left_with_the_reason():
    """The cast hands out x itself: without it the write would land elsewhere, or be seen."""

    def model(x):
        y = x * 2
        z = y.to(torch.float32)
        y.mul_(2)
        return z + 1

    module = clone_graph(capture(model, stream()).module)
    result = normalise(module.graph)
    assert result.skipped == {"an op writes in place into what it reads": 1}
    assert result.num_replaced == 0


# --- adds in place --------------------------------------------------------------------------------


def residual_in_place(x):
    h = x * 2
    h += torch.sin(x)
    h = h.add_(torch.cos(x))
    return torch.tanh(h)


def old_value_is_read_before(x):
    h = x * 2
    y = torch.sin(h)
    h += y
    return h * y


@pytest.mark.parametrize("function", [residual_in_place, old_value_is_read_before])
def test_adds_in_place_become_plain_where_nobody_sees_it(function):
    left = ops_left(function, stream())
    assert "add" in left and not {"iadd", "add_"} & set(left)


def another_name_is_read_later(x):
    h = x * 2
    view = h[:, 1:]
    h += torch.sin(x)
    return view * 3, h


def the_input_is_written(x):
    x += 1
    return torch.sin(x)


def a_view_is_written(x):
    h = x * 2
    h[:, 0] += 1.0
    return torch.sin(h)


def old_name_is_returned(x):
    h = x * 2
    g = h
    torch.sin(h.add_(1.0))
    return g


def a_multiple_is_added(x):
    return (x * 2).add_(torch.sin(x), alpha=3)


@pytest.mark.parametrize(
    "function",
    [
        another_name_is_read_later,
        the_input_is_written,
        a_view_is_written,
        old_name_is_returned,
        a_multiple_is_added,
    ],
)
def test_adds_in_place_that_others_see_or_that_scale_stay(function):
    left = ops_left(function, stream())
    # torch 2.11's Dynamo writes the multiple as a product, and then nothing scales
    is_spelt_out = function is a_multiple_is_added and left.count("mul") == 2
    assert {"iadd", "add_"} & set(left) or is_spelt_out


def test_bodies_of_checkpoints():
    def block(x):
        return same_casts(x) * 2

    def model(x):
        return checkpoint(block, x, use_reentrant=False) + 0.5

    assert sorted(ops_left(model, stream())) == sorted(
        ["tag_activation_checkpoint", "getitem", "add", "sin", "mul"]
    )


def test_symbolic_sizes_are_whole_only_when_known():
    def model(x, n):
        return torch.sin(x[:, : x.shape[1]]) + n

    torch._dynamo.mark_dynamic(x := torch.randn(2, 5, D), 1)
    module = clone_graph(capture(model, x, torch.ones(())).module)
    assert normalise(module.graph).num_replaced == 1


def test_the_last_pass_takes_widening_casts_back():
    def widened(x):
        return torch.sin(x.float().to(torch.bfloat16))

    def narrowed(x):
        return torch.sin(x.to(torch.bfloat16).float())

    def other_half(x):
        return torch.sin(x.float().to(torch.float16))

    assert ops_left(widened, stream().bfloat16(), run=remove_noop_views) == ["sin"]
    for function, x in ((narrowed, stream()), (other_half, stream().bfloat16())):
        assert len(ops_left(function, x, run=remove_noop_views)) == 3
    assert ops_left(turned_twice, stream(), run=remove_noop_views) == ["sin"]


def test_a_graph_without_meta_is_left_alone():
    module = hand_built(lambda x, w: F.linear(x, w), stream(), nn.Parameter(torch.eye(D)))
    for node in module.graph.nodes:
        node.meta.clear()
    assert normalise(module.graph).num_matched == 0
