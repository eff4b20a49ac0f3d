"""Contracts of the torch internals that the passes use, on each torch version."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain import torch_compat


def test_real_tensors_suspends_fake_mode():
    with FakeTensorMode():
        with torch_compat.real_tensors():
            assert torch.arange(3).tolist() == [0, 1, 2]
        assert type(torch.arange(3)) is not torch.Tensor


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.1 + 0.2  # more digits than a decimal print shows

    def forward(self, x):
        return x * self.scale


def test_guarded_float_is_the_number_to_the_bit():
    """Under dynamic=True an attribute is an input; its value comes from the symbol's hint."""
    found = []

    def backend(module, _):
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymFloat):
                found.append(torch_compat.guarded_float(value))
        return module

    model = Scaled()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    compiled(torch.ones(3))
    assert found == [0.1 + 0.2]
    model.scale = 0.5
    assert compiled(torch.ones(3)).tolist() == [0.5] * 3  # the guard: traced again
    assert found == [0.1 + 0.2, 0.5]


def test_what_dynamo_answers_is_told_from_a_failure():
    with FakeTensorMode(), pytest.raises(Exception) as raised:
        torch.ones(1).item()  # a number that depends on data: Dynamo breaks the graph there
    assert torch_compat.is_for_dynamo(raised.value)
    assert torch_compat.is_for_dynamo(torch._dynamo.exc.RestartAnalysis())
    assert not torch_compat.is_for_dynamo(RuntimeError())
