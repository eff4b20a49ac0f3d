"""Adds that hide in other ops: found, dropped on the branch alone, and left where they are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import B, D, Model, T, stream
from harness import P, capture, code_of, insert, insert_into, seeds_tensor
from mask_oracle import keep_mask

from xtrain.passes.graph import clone_graph
from xtrain.passes.sites.spell_out_sums import spell_out_sums

SEED = (7, 40)


def dropped(value, row=0):
    keep = torch.from_numpy(keep_mask(tuple(value.shape), P, SEED[0] + row, SEED[1]))
    return torch.where(keep, value * (1 / (1 - P)), 0.0)


def seeds(count):
    return seeds_tensor([(SEED[0] + row, SEED[1]) for row in range(count)])


def rows(x):
    return x.view(-1, D)


# op -> (what the model writes, the same with the branch as a value of its own: x, h, w, drop)
PRODUCTS = {
    "addmm": (
        lambda x, h, w: torch.addmm(rows(x), rows(h), w).view(x.shape),
        lambda x, h, w, drop: x + drop(rows(h) @ w).view(x.shape),
    ),
    "addmm, beta, alpha": (
        lambda x, h, w: rows(x).addmm(rows(h), mat2=w, beta=0.5, alpha=2),
        lambda x, h, w, drop: rows(x) * 0.5 + drop(rows(h) @ w) * 2,
    ),
    "addmm_": (
        lambda x, h, w: (x := x.clone(), rows(x).addmm_(rows(h), w, beta=0.5), x * 1)[2],
        lambda x, h, w, drop: x * 0.5 + drop(rows(h) @ w).view(x.shape),
    ),
    "baddbmm": (
        lambda x, h, w: torch.baddbmm(x, h, w.expand(B, D, D), alpha=0.5),
        lambda x, h, w, drop: x + 0.5 * drop(h @ w),
    ),
    "addbmm": (
        lambda x, h, w: torch.addbmm(y := x[0], y.sin().expand(B, T, D), w.expand(B, D, D)),
        lambda x, h, w, drop: x[0] + drop((x[0].sin().expand(B, T, D) @ w).sum(0)),
    ),
    "linear with the stream as its bias": (
        lambda x, h, w: F.linear(rows(h), w, rows(x)),
        lambda x, h, w, drop: rows(x) + drop(rows(h) @ w.T),
    ),
    "linear that adds a form of the stream": (
        lambda x, h, w: F.linear(rows(h), w, rows(torch.tanh(x).flip(-1))),
        lambda x, h, w, drop: rows(torch.tanh(x).flip(-1)) + drop(rows(h) @ w.T),
    ),
    "addcmul": (
        lambda x, h, w: torch.addcmul(x, w[0].expand_as(x), h, value=2),
        lambda x, h, w, drop: x + 2 * drop(w[0] * h),
    ),
    "addcmul, branch first": (
        lambda x, h, w: torch.addcmul(x, h, x.sigmoid()),
        lambda x, h, w, drop: x + drop(h * x.sigmoid()),
    ),
    "addcmul, a gate that is projected": (
        lambda x, h, w: torch.addcmul(x, h, (x @ w).sigmoid()),
        lambda x, h, w, drop: x + drop(h * (x @ w).sigmoid()),
    ),
    "addcmul, one factor twice": (
        lambda x, h, w: torch.addcmul(x, h, h),
        lambda x, h, w, drop: x + drop(h * h),
    ),
    "addcmul_": (
        lambda x, h, w: (x := x.clone(), x.addcmul_(h, x.sin(), value=0.5), x * 1)[2],
        lambda x, h, w, drop: x + 0.5 * drop(h * x.sin()),
    ),
    "addcdiv_": (
        lambda x, h, w: (x := x.clone(), x.addcdiv_(h, x.exp(), value=0.5), x * 1)[2],
        lambda x, h, w, drop: x + 0.5 * drop(h / x.exp()),
    ),
    "_foreach_addcmul": (
        lambda x, h, w: torch._foreach_addcmul([x], [h], [x.sin()], [2.0])[0],
        lambda x, h, w, drop: x + 2 * drop(h * x.sin()),
    ),
    "gated": (
        lambda x, h, w: torch.addmm(rows(x.sigmoid() * x), rows(h), w),
        lambda x, h, w, drop: rows(x.sigmoid() * x) + drop(rows(h) @ w),
    ),
}


class Fused(Model):
    num_linear = 2

    def __init__(self, function):
        super().__init__()
        self.function = function

    def hidden(self, x):
        return F.silu(self.linears[0](F.rms_norm(x, (D,))))

    def forward(self, x):
        return self.function(x, self.hidden(x), self.linears[1].weight)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_adds_the_stream_is_a_branch(name):
    """Class E2: the product is rounded before it is added."""
    fused, spelt = PRODUCTS[name]
    model = Fused(fused)
    captured = capture(model, stream())
    module, result = insert(captured)
    assert [(s.kind, s.covered_by) for s in result.slots] == [("feed_forward", "xtrain")]
    (found,) = module(*captured.inputs, seeds(1))
    expected = spelt(stream(), model.hidden(stream()), model.linears[1].weight, dropped)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for gone in ("addmm", "baddbmm", "addbmm", "addcmul"):
        assert f"{gone}(" not in code_of(module)


def test_a_product_under_autocast_keeps_its_dtype():
    def step(x, h, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.addmm(rows(x), rows(h), w)

    model = Fused(step)
    captured = capture(model, stream())
    module, result = insert(captured)
    assert result.num_replaced == 1
    (found,) = module(*captured.inputs, seeds(1))
    x, h, w = (v.bfloat16() for v in (stream(), model.hidden(stream()), model.linears[1].weight))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rows(x) + dropped(rows(h) @ w))


LOOK_ALIKES = {
    "bias": lambda x, h, w: torch.addmm(w[0].expand(B * T, D), rows(h), w),
    "a matrix of biases": lambda x, h, w: torch.addmm(w, w, w),
    "low-rank update": lambda x, h, w: torch.addmm(rows(h @ w), rows(h), w),
    "attention scores": lambda x, h, w: torch.baddbmm(h @ h.mT, h, h.mT).softmax(-1) @ h,
    "scores of scores": lambda x, h, w: torch.baddbmm(x @ x.mT, x @ w, x.mT).softmax(-1) @ h,
    "addcmul of no branch": lambda x, h, w: h @ torch.addcmul(x, x.sin(), w[0], value=2).mT,
    "a linear layer": lambda x, h, w: F.linear(h, w, w[0]),
    "a stack of its own": lambda x, h, w: torch.stack([x, h @ w]).sum(0),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_is_no_hidden_add_stays_as_it_is(name):
    module = clone_graph(capture(Fused(LOOK_ALIKES[name]), stream()).module)
    before = code_of(module)
    spell_out_sums(module.graph)
    module.recompile()
    assert code_of(module) == before


@pytest.mark.parametrize("kind", ["stack", "cat"])
def test_a_stack_that_others_read_keeps_the_undropped_branch(kind):
    def both(x, h, w):
        branch = h @ w
        if kind == "stack":
            stacked = torch.stack([x, branch])
        else:
            stacked = torch.cat([x[None], shown := branch[None]])
            branch = shown * 2
        return stacked.double().sum(0), stacked[1], branch

    model = Fused(both)
    captured = capture(model, stream())
    module, result = insert(captured)
    assert result.num_replaced == 1
    x, branch = stream(), model.hidden(stream()) @ model.linears[1].weight
    total, shown, other = module(*captured.inputs, seeds(1))
    assert torch.equal(total, x.double() + dropped(branch).double())
    assert torch.equal(shown, branch)
    assert torch.equal(other, branch if kind == "stack" else branch[None] * 2)


def test_a_value_that_is_stacked_twice_is_one_branch():
    model = Fused(lambda x, h, w: torch.stack([y := h @ w, x, y]).sum(0))
    captured = capture(model, stream())
    module, result = insert(captured)
    assert result.num_replaced == 1
    y = dropped(model.hidden(stream()) @ model.linears[1].weight)
    assert torch.equal(module(*captured.inputs, seeds(1))[0], y + stream() + y)


def test_lists_that_are_added_by_one_call():
    """A scalar for all, a scalar for each, in place, and a result that is read as a list."""

    def lists(x, h, w):
        a, b = torch._foreach_add([x, x * 2], [h @ w, h @ w.T], alpha=0.5)
        torch._foreach_sub_([a, b], 1.0)
        c, d = torch._foreach_addcdiv([a, b], [b.sin(), a.cos()], [a, b], [1.0, 2.0])
        return a, b, c, d

    model = Fused(lists)
    captured = capture(model, stream())
    module, result = insert(captured)
    assert result.num_replaced == 2 and "_foreach" not in code_of(module)
    found = module(*captured.inputs, seeds(2))
    x, h, w = stream(), model.hidden(stream()), model.linears[1].weight
    a, b = x + 0.5 * dropped(h @ w) - 1, x * 2 + 0.5 * dropped(h @ w.T, 1) - 1
    expected = a, b, a + b.sin() / a, b + 2 * a.cos() / b
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_second_run_changes_nothing():
    module, _ = insert(capture(Fused(PRODUCTS["addmm"][0]), stream()))
    before = code_of(module)
    assert insert_into(module).num_replaced == 0 and code_of(module) == before
