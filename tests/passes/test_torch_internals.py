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


def test_what_dynamo_calls_where_a_grad_mode_or_context_is_entered():
    """And each has no value in the graph, where all that computes has one."""
    found = []

    def backend(module, _):
        found.extend(n for n in module.graph.nodes if n.op == "call_function")
        return module

    def model(x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            y = x * 2
        return y + x

    torch.compile(model, backend=backend)(torch.ones(3, requires_grad=True))
    calls = {n.target: n for n in found}
    assert calls[torch_compat.ENTER_AUTOCAST].args[:3] == ("cpu", torch.bfloat16, True)
    assert calls[torch_compat.ENTER_INFERENCE_MODE].args == (True,)
    modes = [n.args for n in found if n.target is torch_compat.SET_GRAD_ENABLED]
    assert modes[0] == (False,) and modes[-1] == (True,)
    assert [n.name for n in found if "example_value" in n.meta] == ["y", "add"]


def test_memory_is_that_of_the_views_of_a_tensor():
    with FakeTensorMode():
        x = torch.ones(4, 6)
        views = x[1:], x.view(-1), x.t(), x.detach(), x.data, x.unbind()[2], x.ravel()
        assert {torch_compat.memory_of(v) for v in views} == {torch_compat.memory_of(x)}
        others = x.clone(), x + 1, x.t().reshape(-1)
        memories = {torch_compat.memory_of(v) for v in (x, *others)}
        assert len(memories) == 4 and None not in memories
    found = []
    torch.func.vmap(lambda row: found.append(torch_compat.memory_of(row)) or row)(torch.ones(2, 3))
    assert found == [None]


def test_what_a_call_in_a_graph_may_be_of():
    add = torch.ops.aten.add
    assert isinstance(add, torch_compat.OpOverloadPacket)
    assert isinstance(add.Tensor, torch_compat.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, torch_compat.HigherOrderOperator)
    schema = torch_compat.schema(torch.ops.aten.add_.Tensor)
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    assert schema.name == "aten::add_" and written == [True, False, False]


def test_copies_of_a_graph_keep_what_dynamo_noted_of_it():
    found = []

    def backend(module, _):
        found.append(module)
        return module

    linear = torch.nn.Linear(2, 2)
    torch.compile(linear, backend=backend)(torch.ones(2))
    (module,) = found
    graph = torch.fx.Graph()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copied = graph.placeholder(node.name)
            torch_compat.copy_source(node, copied)
            assert torch_compat.source_name(copied) == torch_compat.source_name(node) != ""
    new = graph.placeholder("new")
    torch_compat.has_no_source(new)
    assert torch_compat.source_name(new) == ""
    other = torch.nn.Module()
    torch_compat.copy_marks(module, other)
    for name in ("_param_name_to_source", "_backend_id"):
        assert getattr(other, name, None) is getattr(module, name, None)
    assert not torch_compat.is_erased(new)
    graph.erase_node(new)
    assert torch_compat.is_erased(new)
