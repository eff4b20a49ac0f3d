"""fx_utils: what an op is called, what a call holds, and clones that leave Dynamo's graph alone."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import D, stream
from harness import captured_case, code_of, insert_into
from torch import fx, nn

from xtrain.passes import fx_utils

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
    assert fx_utils.op_name(node) == name


def test_operands_by_position_and_by_name():
    def add(x, y):
        return torch.add(input=x, other=y) + torch.add(x, other=y) + x.add(other=y) + x.add(y)

    graph = fx.symbolic_trace(add).graph
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    adds = [n for n in graph.nodes if fx_utils.op_name(n) == "add" and y in n.all_input_nodes]
    assert len(adds) == 4
    assert all(fx_utils.add_operands(n) == (x, y) for n in adds)
    assert fx_utils.operand(adds[0], 2, "alpha", default=1) == 1


def test_walk_graphs_yields_every_body_once_outermost_first():
    module = captured_case("Checkpointed")[2].module
    graphs = list(fx_utils.walk_graphs(module))
    assert graphs[0] is module and len(graphs) == 3
    assert len(set(map(id, graphs))) == 3


def test_a_call_of_a_checkpointed_body_holds_its_contraction_and_its_operands():
    graph = captured_case("Checkpointed")[2].module.graph
    calls = [n for n in graph.nodes if fx_utils.called_bodies(n)]
    assert len(calls) == 2 and all(map(fx_utils.holds_contraction, calls))
    for call in calls:
        operands = fx_utils.body_operands(call)
        (body,) = fx_utils.called_bodies(call)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        assert list(operands) == placeholders and len(placeholders) > 3
        for inner, outer in operands.items():
            a, b = fx_utils.tensor_meta(inner), fx_utils.tensor_meta(outer)
            assert a.shape == b.shape and a.dtype == b.dtype
    norm = next(
        n for n in calls[0].graph.nodes if fx_utils.op_name(n) == "linear" or n.op == "output"
    )
    assert fx_utils.body_operands(norm) == {}


def test_holds_contraction_of_modules_and_ops():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x):
            return self.norm(self.linear(x)).relu() @ x.mT

    nodes = list(fx.symbolic_trace(Holder()).graph.nodes)
    held = [n.name for n in nodes if fx_utils.holds_contraction(n)]
    assert held == ["linear", "matmul"]


def test_module_path_is_that_of_the_innermost_module():
    module = captured_case("UNet")[2].module
    paths = {fx_utils.module_path(n) for n in module.graph.nodes if n.target is operator.add}
    assert {f"L['_xtrain_model'].blocks.{i}" for i in range(6)} <= paths
    assert fx_utils.module_path(fx.Graph().placeholder("x")) == ""


def test_a_clone_leaves_dynamos_graph_alone():
    """Run the pass on the clone: nothing of the original may move, bodies included."""
    captured = captured_case("Checkpointed")[2]
    original = captured.module
    code = code_of(original)
    nodes = [list(part.graph.nodes) for part in fx_utils.walk_graphs(original)]
    metas = [[dict(n.meta) for n in part] for part in nodes]
    clone = fx_utils.clone_graph(original)
    insert_into(clone)
    for part in fx_utils.walk_graphs(clone):
        for node in part.graph.nodes:
            node.meta["touched"] = True
    clone.meta["touched"] = True
    original.recompile()
    assert code_of(original) == code != code_of(clone)
    assert [list(part.graph.nodes) for part in fx_utils.walk_graphs(original)] == nodes
    assert [[dict(n.meta) for n in part] for part in nodes] == metas
    assert "touched" not in original.meta


def test_a_clone_carries_what_the_backend_looks_up():
    captured = captured_case("Checkpointed")[2]
    clone = fx_utils.clone_graph(captured.module)
    originals, copies = (list(fx_utils.walk_graphs(m)) for m in (captured.module, clone))
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
    clone = fx_utils.clone_graph(module)
    assert clone.weight is module.weight and clone.scale is module.scale
    assert torch.equal(clone(stream()), stream() * 2.0)
    assert isinstance(clone.graph.owning_module, fx.GraphModule)
