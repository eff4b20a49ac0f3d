"""Reading and copying graphs, and what torch says of them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import D, stream
from harness import captured_case, code_of, insert_into
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain import torch_compat
from xtrain.passes.graph import (
    body_operands,
    called_bodies,
    clone_graph,
    first_two,
    holds_contraction,
    module_path,
    op_name,
    operand,
    tensor_meta,
    walk_graphs,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "target", "name"),
    [
        ("call_function", F.linear, "linear"),
        ("call_function", aten.linear.default, "linear"),
        ("call_function", aten.linear, "linear"),
        ("call_method", "matmul", "matmul"),
        ("call_function", operator.matmul, "matmul"),
        ("call_function", torch.matmul, "matmul"),
        ("call_function", aten.add.Tensor, "add"),
        ("call_function", operator.iadd, "iadd"),
        ("call_function", aten._softmax.default, "_softmax"),
        ("call_function", torch.ops.higher_order.tag_activation_checkpoint,
         "tag_activation_checkpoint"),
        ("get_attr", "linear", ""),
        ("placeholder", "linear", ""),
    ],
)  # fmt: skip
def test_op_name(op, target, name):
    node = fx.Graph().create_node(op, target, ())
    assert op_name(node) == name


def test_operands_by_position_and_by_name():
    def add(x, y):
        return torch.add(input=x, other=y) + torch.add(x, other=y) + x.add(other=y) + x.add(y)

    graph = fx.symbolic_trace(add).graph
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    adds = [n for n in graph.nodes if op_name(n) == "add" and y in n.all_input_nodes]
    assert len(adds) == 4
    assert all(first_two(n) == (x, y) for n in adds)
    assert operand(adds[0], 2, "alpha", default=1) == 1


def test_walk_graphs_yields_every_body_once_outermost_first():
    module = captured_case("Checkpointed")[2].module
    graphs = list(walk_graphs(module))
    assert graphs[0] is module and len(graphs) == 3
    assert len(set(map(id, graphs))) == 3


def test_a_call_of_a_checkpointed_body_holds_its_contraction_and_its_operands():
    graph = captured_case("Checkpointed")[2].module.graph
    calls = [n for n in graph.nodes if called_bodies(n)]
    assert len(calls) == 2 and all(map(holds_contraction, calls))
    for call in calls:
        operands = body_operands(call)
        (body,) = called_bodies(call)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        assert list(operands) == placeholders and len(placeholders) > 3
        for inner, outer in operands.items():
            a, b = tensor_meta(inner), tensor_meta(outer)
            assert a.shape == b.shape and a.dtype == b.dtype
    norm = next(n for n in calls[0].graph.nodes if op_name(n) == "linear" or n.op == "output")
    assert body_operands(norm) == {}


def test_holds_contraction_of_modules_and_ops():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x):
            return self.norm(self.linear(x)).relu() @ x.mT

    nodes = list(fx.symbolic_trace(Holder()).graph.nodes)
    held = [n.name for n in nodes if holds_contraction(n)]
    assert held == ["linear", "matmul"]


def test_module_path_is_that_of_the_innermost_module():
    module = captured_case("UNet")[2].module
    paths = {module_path(n) for n in module.graph.nodes if n.target is operator.add}
    assert {f"L['_xtrain_model'].blocks.{i}" for i in range(6)} <= paths
    assert module_path(fx.Graph().placeholder("x")) == ""


def test_a_clone_leaves_dynamos_graph_alone():
    """Run the pass on the clone: nothing of the original may move, bodies included."""
    captured = captured_case("Checkpointed")[2]
    original = captured.module
    code = code_of(original)
    nodes = [list(part.graph.nodes) for part in walk_graphs(original)]
    metas = [[dict(n.meta) for n in part] for part in nodes]
    clone = clone_graph(original)
    insert_into(clone)
    for part in walk_graphs(clone):
        for node in part.graph.nodes:
            node.meta["touched"] = True
    clone.meta["touched"] = True
    original.recompile()
    assert code_of(original) == code != code_of(clone)
    assert [list(part.graph.nodes) for part in walk_graphs(original)] == nodes
    assert [[dict(n.meta) for n in part] for part in nodes] == metas
    assert "touched" not in original.meta


def test_a_clone_carries_what_the_backend_looks_up():
    captured = captured_case("Checkpointed")[2]
    clone = clone_graph(captured.module)
    originals, copies = (list(walk_graphs(m)) for m in (captured.module, clone))
    assert len(originals) == len(copies) == 3
    for original, copy in zip(originals, copies, strict=True):
        assert original is not copy and original.graph is not copy.graph
        assert copy.meta == original.meta
        pairs = list(zip(original.graph.nodes, copy.graph.nodes, strict=True))
        for a, b in pairs:
            assert a is not b and (a.op, a.target, a.name) == (b.op, b.target, b.name)
            assert a.meta == b.meta and a.meta is not b.meta
            assert getattr(a, "_dynamo_source", "none") is getattr(b, "_dynamo_source", "none")
    assert all(hasattr(n, "_dynamo_source") for n in clone.graph.nodes if n.op == "placeholder")
    assert clone._param_name_to_source is captured.module._param_name_to_source
    assert code_of(clone) == code_of(captured.module)


def test_a_clone_runs_alike_and_shares_attributes():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(D))
            self.register_buffer("scale", torch.full((D,), 2.0))

        def forward(self, x):
            return F.linear(x, self.weight) * self.scale

    module = fx.symbolic_trace(Holder())
    clone = clone_graph(module)
    assert clone.weight is module.weight and clone.scale is module.scale
    assert torch.equal(clone(stream()), stream() * 2.0)
    assert isinstance(clone.graph.owning_module, fx.GraphModule)


# --- contracts of the torch internals that the passes use -----------------------------------------


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
