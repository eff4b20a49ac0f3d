"""Sums of gradients that reach a backward kernel become its own, where that is right."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import xtrain
from xtrain import passes, torch_compat
from xtrain.ops import OPS
from xtrain.passes.swaps.split_gradient_sums import split_gradient_sums

ADD = torch.ops.aten.add.Tensor
OP = OPS["dropout_add_rms_norm"]
GRAD_Y = 3
SHAPE = (5, 24)
NAME = "split_gradient_sums"


def values(dtype=torch.bfloat16):
    """h, weight, grad_h, then four gradients of y."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return [draw(*SHAPE), draw(24), draw(*SHAPE), *(draw(*SHAPE).to(dtype) for _ in range(4))]


def backward_graph(build_sum, *, opaque=True, inputs=None):
    """A backward graph whose grad_y is build_sum(graph, gradients), values in meta."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(7)]
    total = build_sum(graph, nodes[3:])
    zero = graph.call_function(torch.ops.aten.new_zeros.default, (nodes[0], []))
    zero.kwargs = {"dtype": torch.int64}
    rest = (0.25, zero, zero, 1e-6, "llama", torch.bfloat16, torch.float32)
    both = graph.call_function(OP.backward, (*nodes[:3], [total], *rest), {"opaque": opaque})
    graph.output((both, [n for n in graph.nodes if "kept" in n.name]))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) for v in inputs or values()]
        interpreter = Describe(fx.GraphModule({}, graph))
        interpreter.run(*fakes)
    return interpreter.module


class Describe(fx.Interpreter):
    """Record each node's value as AOTAutograd does."""

    def run_node(self, n):
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def chain(graph, grads):
    return graph.call_function(ADD, (graph.call_function(ADD, (grads[0], grads[1])), grads[2]))


def grads_of(module):
    (node,) = module.graph.find_nodes(op="call_function", target=OP.backward)
    return [n.name for n in node.args[GRAD_Y]]


def test_terms_take_the_place_of_their_sum():
    module = backward_graph(chain)
    before = module(*values())[0]
    split_gradient_sums(module.graph)
    module.graph.lint()
    module.recompile()
    assert grads_of(module) == ["x3", "x4", "x5"]
    assert not module.graph.find_nodes(op="call_function", target=ADD)
    # Against fp64, the sum without a rounding in between is no worse than with it.
    h, weight, grad_h, *grads = (v.double() for v in values())
    zero = torch.zeros((), dtype=torch.int64)
    rest = (0.25, zero, zero, 1e-6, "llama", torch.float64, torch.float64)
    truth = OP.backward(h, weight, grad_h, grads[:3], *rest)
    for found, rounded, exact in zip(module(*values())[0], before, truth, strict=True):
        error = (found.double() - exact).abs().max()
        assert error <= (rounded.double() - exact).abs().max() and error > 0


def test_more_terms_than_the_kernel_adds_stay_summed():
    def four(graph, grads):
        return graph.call_function(ADD, (chain(graph, grads), grads[3]))

    module = backward_graph(four)
    split_gradient_sums(module.graph)
    module.graph.lint()
    assert grads_of(module) == ["add_tensor", "x5", "x6"]


def read_twice(graph, grads):
    total = graph.call_function(ADD, (grads[0], grads[1]))
    graph.create_node("call_function", torch.ops.aten.neg.default, (total,), name="kept")
    return total


def scaled(graph, grads):
    return graph.call_function(ADD, (grads[0], grads[1]), {"alpha": 2})


def of_a_number(graph, grads):
    return graph.call_function(ADD, (grads[0], 1.0))


def broadcast(graph, grads):
    row = graph.call_function(torch.ops.aten.select.int, (grads[1], 0, 0))
    return graph.call_function(ADD, (grads[0], row))


def of_two_dtypes(graph, grads):
    wide = graph.call_function(torch.ops.aten._to_copy.default, (grads[1],))
    wide.kwargs = {"dtype": torch.float32}
    return graph.call_function(ADD, (grads[0], wide))


@pytest.mark.parametrize("build", [read_twice, scaled, of_a_number, broadcast, of_two_dtypes])
def test_other_sums_stay(build):
    module = backward_graph(build)
    split_gradient_sums(module.graph)
    module.graph.lint()
    assert len(grads_of(module)) == 1 and not grads_of(module)[0].startswith("x")


def test_a_see_through_call_keeps_its_sum():
    module = backward_graph(chain, opaque=False)
    split_gradient_sums(module.graph)
    assert grads_of(module) == ["add_tensor_1"]


def test_inductor_runs_it():
    """Through torch.compile: the three users of one norm, with the kernel asked for."""
    numbers = []

    def spy(graph):
        split_gradient_sums(graph)
        calls = graph.find_nodes(op="call_function", target=OP.backward)
        numbers.extend(len(n.args[GRAD_Y]) for n in calls)

    h, weight, _, *_ = values()
    weights = [torch.randn(24, 24) for _ in range(3)]
    zero = torch.zeros((), dtype=torch.int64)

    def loss(x, weight):
        _, y = OP.forward(x, x, weight, 0.25, zero, zero, 1e-6, "llama", None, True)
        return sum((y @ w).square().sum() for w in weights)

    def gradients(function):
        x, w = h.clone().requires_grad_(), weight.clone().requires_grad_()
        return torch.autograd.grad(function(x, w), (x, w))

    options = {"mode": None, "options": {}, "dynamic": False}
    backend = torch_compat.inner_backend("inductor", **options, backward_pass=spy, backward_key="1")
    with torch._inductor.utils.fresh_cache():
        found = gradients(torch.compile(loss, backend=backend, fullgraph=True))
    assert numbers == [3]
    for value, wanted in zip(found, gradients(loss), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


class TwoSums(nn.Module):
    """Two branches, and behind the sum with each a norm that fuses with it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=False):
            x = x + linear(norm(x))
        return self.norms[2](x).sum()


def trained(**options):
    """The row of the pass in the report of one training step of two norms, None if it has none."""
    torch._dynamo.reset()
    compiled = xtrain.compile(TwoSums(), dropout=0.1, seed=0, **options)
    with torch._inductor.utils.fresh_cache():
        compiled(torch.ones(1, 4, 8)).backward()
    return next((r for r in compiled.report().passes if r.name == NAME), None)


def test_the_report_shows_it_between_a_hook_and_a_pass_of_the_users(tmp_path):
    graphs, seen = [], []

    def look(graph):
        seen.append(graph)

    passes.register("look", look, after=NAME)
    try:
        with torch._inductor.config.patch(post_grad_custom_pre_pass=graphs.append):
            row = trained(dump_graphs=tmp_path)
    finally:
        passes.unregister("look")
    assert len(graphs) == 2  # forward and backward
    assert seen == graphs[1:]
    assert (row.num_matched, row.num_replaced) == (2, 0)
    assert row.skipped == {"inductor sees through the call and fuses its sum": 2}
    dumps = [path.name for path in sorted((tmp_path / "train_graph_01").iterdir())]
    assert dumps[-1] == f"{len(passes.PASSES) + 1}_look.before.py"
    assert f"{len(passes.PASSES)}_{NAME}.before.py" in dumps
    assert passes.PASSES[-1] == NAME


def test_disable_passes_reaches_it():
    graphs = []
    options = {"post_grad_custom_pre_pass": graphs.append}
    assert trained(disable_passes=[NAME], options=options) is None
    assert len(graphs) == 2


def test_no_other_backend_has_it():
    assert trained(backend="aot_eager") is None


def test_the_cache_knows_the_pass_and_the_users_hook():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Named(CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return "named"

    def key(hook, backward_key):
        options = {} if hook is None else {"post_grad_custom_pre_pass": hook}
        backend = torch_compat.inner_backend(
            *("inductor",),
            **{"mode": None, "options": options, "dynamic": None},
            **{"backward_pass": split_gradient_sums, "backward_key": backward_key},
        )
        return backend.config["post_grad_custom_pre_pass"].uuid()

    keys = [key(None, "a"), key(None, "b"), key(Named(), "a")]
    assert len(set(keys)) == 3 and None not in keys
    assert key(print, "a") is None  # a function without a name: inductor caches nothing
