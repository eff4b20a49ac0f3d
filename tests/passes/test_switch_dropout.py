"""The pass that lets a caller switch each inserted dropout off, and what it leaves as it was."""

from __future__ import annotations

import torch
from harness import P, calls, capture, insert, seeds_tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

from xtrain import ops
from xtrain.passes.sites.switch_dropout import OFF, switch_dropout

KEYS = [(11, 0), (12, 5), (13, 0)]


class Branches(nn.Module):
    """Three residual branches, the last in the body of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def add(self, x, linear):
        return x + linear(x)

    def forward(self, x):
        for linear in self.linears[:2]:
            x = self.add(x, linear)
        return checkpoint(self.add, x, self.linears[2], use_reentrant=False)


def switched():
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(2, 3, 8)
    captured = capture(model, x)
    module, result = insert(captured)
    assert len(result.slots) == 3
    switch_dropout(module)
    module.graph.lint()
    return model, x, captured, module


def expected(model, x, is_on):
    for linear, on, key in zip(model.linears, is_on, KEYS, strict=True):
        branch = linear(x)
        x = x + (ops.dropout(branch, P, *key) if on else branch)
    return x


def test_each_dropout_is_followed_by_a_choice_that_its_readers_read():
    _, _, _, module = switched()
    drops, choices = calls(module, "dropout"), calls(module, "where")
    assert len(drops) == len(choices) == 3
    for drop, choice in zip(drops, choices, strict=True):
        is_off, branch, dropped = choice.args
        assert dropped is drop and branch is drop.args[0] and is_off.args == (drop.args[3], OFF)
        assert set(drop.users) == {choice} and choice.meta.keys() == drop.meta.keys()


def test_offsets_decide_which_branches_are_dropped():
    model, x, captured, module = switched()
    for number in range(8):
        is_on = [bool(number & 1 << i) for i in range(3)]
        rows = [(seed, at if on else OFF) for on, (seed, at) in zip(is_on, KEYS, strict=True)]
        (got,) = module(*captured.inputs, seeds_tensor(rows))
        assert torch.equal(got, expected(model, x, is_on)), is_on


def test_what_is_off_is_the_branch_itself_where_that_is_no_number():
    """A product with a mask would make a NaN of it."""
    model, x, captured, module = switched()
    with torch.no_grad():
        model.linears[0].bias.fill_(float("inf"))
    (got,) = module(*captured.inputs, seeds_tensor([(seed, OFF) for seed, _ in KEYS]))
    torch.testing.assert_close(got, model(x), equal_nan=True, rtol=0, atol=0)


def test_without_a_dropout_nothing_changes():
    captured = capture(nn.Linear(8, 8), torch.ones(2, 3, 8))
    module, _ = insert(captured)
    code = module.code
    switch_dropout(module)
    assert module.code == code
