"""verify=True: the first step held against the graphs without swaps.

Planted faults are changes of what a swap of ours emitted: the pass that did it must be named,
whether it is seen in an output or in a gradient, in fp32 and under bf16 autocast.
"""

from __future__ import annotations

import functools
import logging
import operator
from contextlib import nullcontext

import pytest
import torch
from test_compile_models import FAMILIES, labelled
from torch import nn
from torch.utils.checkpoint import checkpoint

import xtrain
from xtrain import ops, passes
from xtrain.compiler import VerifyError, backend
from xtrain.compiler.compile_report import Verification
from xtrain.compiler.verify import VerifiedGraph
from xtrain.model import Config, Transformer
from xtrain.passes.graph import clone_graph

P = 0.1


def tiny(**overrides):
    torch.manual_seed(0)
    values = dict(vocab_size=64, n_kv_heads=1, n_layers=1) | overrides
    return Transformer(Config.preset("tiny", **values))


def tokens(length=9, size=2):
    ids = torch.randint(3, 64, (size, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def compiled_model(model, *, form=xtrain.compile, **options):
    options = dict(dropout=P, seed=1, backend="aot_eager", verify=True) | options
    return form(model, **options)


def step(compiled, *, autocast=False):
    """One training step of a model of ours, its logits not asked for: head and loss are swapped."""
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context:
        _, loss = compiled(*tokens(), return_logits=False)
    loss.backward()
    return loss.detach()


# --- planted faults -----------------------------------------------------------------------------


class Recorded:
    """The swapped graph of one training step, its inputs, and what it was called under."""

    def __init__(self, model, call, *, autocast=False, **options):
        self.autocast = autocast
        before = VerifiedGraph.__call__

        def keep(graph, *inputs):
            self.graph, self.inputs = graph, inputs
            return before(graph, *inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VerifiedGraph, "__call__", keep)
            self.compiled = compiled_model(model, logits="drop", **options)
            with self.context():
                self.compiled(**call)

    def context(self):
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def step_with(self, name, change):
        """Verify a step in which the pass of that name left `change` in the graph."""
        graph = self.graph
        stages = [(n, clone_graph(module)) for n, module in graph.stages]
        at = [n for n, _ in stages].index(name)
        for _, module in stages[at:]:
            change(module.graph)
            module.recompile()
        graph.session.report.verification = Verification()
        swapped = stages[-1][1]
        faulty = VerifiedGraph(graph.session, swapped, lambda other: other, graph.plain, stages)
        outputs = faulty(*self.inputs)
        loss = next(x for x in outputs if x is not None and x.ndim == 0)
        loss.backward()
        return graph.session.report.verification


@pytest.fixture(scope="module")
def ours():
    inputs, targets = tokens()
    return Recorded(tiny(), dict(tokens=inputs, targets=targets, return_logits=False))


@pytest.fixture(scope="module")
def gemma2():
    """Under autocast: bf16 in every product, where one percent is within the rounding."""
    values = FAMILIES["gemma2"][0] | {"num_hidden_layers": 1}
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gemma2", **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    return Recorded(model, labelled("gemma2"), autocast=True)


def calls(graph, op):
    found = [n for n in graph.nodes if n.target is ops.OPS[op].forward]
    assert found
    return found


def argument(op, position, value):
    """A fault: another constant, or what `value` makes of the one that is there."""

    def change(graph):
        for node in calls(graph, op):
            old = node.args[position]
            node.update_arg(position, value(old) if callable(value) else value)

    return change


def exchanged(op, first, second):
    def change(graph):
        for node in calls(graph, op):
            a, b = node.args[first], node.args[second]
            node.update_arg(first, b)
            node.update_arg(second, a)

    return change


def through(op, position, function, *args):
    """A fault: an operand goes through a function first."""

    def change(graph):
        for node in calls(graph, op):
            with graph.inserting_before(node):
                new = graph.call_function(function, (node.args[position], *args))
            new.meta = dict(node.args[position].meta)
            node.update_arg(position, new)

    return change


def rounded(x):
    return x.to(torch.bfloat16).to(x.dtype)


NORM, ROPE, SWIGLU = "use_triton_rms_norm", "use_triton_rope", "use_triton_swiglu"
GEGLU, SDPA, LOSS = "use_triton_geglu", "use_triton_sdpa", "use_triton_linear_cross_entropy"
FUSED = "fuse_dropout_add_rms_norm"
ten_times = functools.partial(operator.mul, 10)
one_percent_more = functools.partial(operator.mul, 1.01)

FAULTS = {
    "eps": (NORM, argument("rms_norm", 2, ten_times)),
    "norm's weight detached": (NORM, through("rms_norm", 1, torch.detach)),
    "norm of rounded values": (NORM, through("rms_norm", 0, rounded)),
    "rotation turned back": (ROPE, through("rope_qk", 3, torch.neg)),
    "other layout": (ROPE, argument("rope_qk", 4, "interleaved")),
    "keys detached": (ROPE, through("rope_qk", 1, torch.detach)),
    "gate for up": (SWIGLU, exchanged("swiglu", 0, 1)),
    "gate off by 1%": (SWIGLU, through("swiglu", 0, torch.mul, 1.01)),
    "scale off by 1%": (SDPA, argument("sdpa", 5, one_percent_more)),
    "no causal mask": (SDPA, argument("sdpa", 4, False)),
    "a window": (SDPA, argument("sdpa", 6, 4)),
    "a softcap": (LOSS, argument("linear_cross_entropy", 7, 5.0)),
    "mean for sum": (LOSS, argument("linear_cross_entropy", 8, "mean")),
    "a target left out": (LOSS, argument("linear_cross_entropy", 4, int(tokens()[1][0, 0]))),
    "another mask": (FUSED, through("dropout_add_rms_norm", 5, torch.add, 1)),
    "residual rounded": (FUSED, through("dropout_add_rms_norm", 1, rounded)),
    "fused eps": (FUSED, argument("dropout_add_rms_norm", 6, ten_times)),
    "other p": (FUSED, argument("dropout_add_rms_norm", 3, P * 1.01)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_swap_is_named(ours, fault):
    name, change = FAULTS[fault]
    with pytest.raises(VerifyError, match=name) as raised:
        ours.step_with(name, change)
    assert raised.value.pass_name == name
    assert f"disable_passes=['{name}'] trains without that swap" in str(raised.value)


FAULTS_IN_BF16 = {
    "eps": (NORM, argument("rms_norm", 2, ten_times)),
    "w for 1 + w": (NORM, argument("rms_norm", 3, "llama")),
    "erf for tanh": (GEGLU, argument("geglu", 2, "none")),
    "gate for up": (GEGLU, exchanged("geglu", 0, 1)),
    "up off by 1%": (GEGLU, through("geglu", 1, torch.mul, 1.01)),
    "a softcap": (SDPA, argument("sdpa", 7, 2.0)),
    "scale off by 1%": (SDPA, argument("sdpa", 5, one_percent_more)),
    "values detached": (SDPA, through("sdpa", 2, torch.detach)),
    "softcap of logits off by 1%": (LOSS, argument("linear_cross_entropy", 7, one_percent_more)),
}


@pytest.mark.parametrize("fault", FAULTS_IN_BF16)
def test_a_fault_as_small_as_the_rounding_of_bf16_is_named(gemma2, fault):
    name, change = FAULTS_IN_BF16[fault]
    with gemma2.context(), pytest.raises(VerifyError, match=name):
        gemma2.step_with(name, change)


def test_a_graph_without_fault_agrees(ours, gemma2):
    for recorded in (ours, gemma2):
        with recorded.context():
            verification = recorded.step_with("remove_noop_views", lambda graph: None)
        assert verification.num_losses == 1 and verification.num_gradients > 8
        assert not verification.failures and not verification.left_out
        assert 0 < verification.largest <= 1


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_family_agrees(family, autocast):
    """With attention dropout of its own, which both graphs draw alike; the logits are an output."""
    transformers = pytest.importorskip("transformers")
    values = FAMILIES[family][0] | {"num_hidden_layers": 1, "attention_dropout": 0.2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    compiled = compiled_model(model)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        out = compiled(**labelled(family))
    (out.loss + out.logits.square().mean()).backward()
    verification = compiled.report().verification
    assert not verification.failures and not verification.left_out
    assert (verification.num_losses, verification.num_outputs) == (1, 1)
    assert verification.num_gradients == len(list(model.parameters()))


def plant(monkeypatch, name, change):
    """Have the pass of that name leave `change` in every graph."""
    real = next(swap for swap in backend._SWAPS if swap.__name__ == name)

    @functools.wraps(real)
    def faulty(graph, **keywords):
        result = real(graph, **keywords)
        change(graph)
        return result

    changed = tuple(faulty if swap is real else swap for swap in backend._SWAPS)
    monkeypatch.setattr(backend, "_SWAPS", changed)


def test_what_failed_goes_on_failing(monkeypatch):
    """Who catches the error does not train on with wrong gradients."""
    plant(monkeypatch, *FAULTS["gate for up"])
    compiled = compiled_model(tiny())
    for _ in range(2):
        with pytest.raises(VerifyError, match=SWIGLU):
            step(compiled)
    assert "FAILED: the loss is off by" in str(compiled.report())


def test_a_failure_that_is_not_strict_warns_and_goes_on_without_swaps(monkeypatch, caplog):
    plant(monkeypatch, *FAULTS["keys detached"])
    model = tiny()
    compiled = compiled_model(model, strict=False)
    with caplog.at_level(logging.WARNING):
        step(compiled)
    (said,) = [r.getMessage() for r in caplog.records if "verify:" in r.getMessage()]
    assert f"verify: {ROPE} is wrong: the gradient of blocks.0." in said
    assert said.endswith("From now on this graph runs without swaps, op by op.")
    (line,) = compiled.report().verification.failures
    assert line.startswith("the gradient of blocks.0.") and ROPE in line
    model.zero_grad()
    compiled.set_step(1)
    loss = step(compiled)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    plain.set_step(1)
    assert torch.equal(loss, step(plain))
    assert all(map(torch.equal, found, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("first_wrong", ["plain", SDPA, "all"])
def test_a_fault_that_compiling_makes_is_put_down_to_what_was_compiled(ours, first_wrong):
    """A kernel or a lowering of a swapped op; or torch's own, which is no fault of a swap."""
    graph = ours.graph
    graph.session.report.verification = verification = Verification()
    modules = {"plain": graph.plain, **dict(graph.stages)}
    names = [*modules, "all"]

    def wrong(module):
        def compiled(*inputs):
            outputs = module(*inputs)
            return [x * 1.001 if x is not None and x.ndim == 0 else x for x in outputs]

        return compiled

    def compile_graph(module):
        name = next(n for n, m in modules.items() if m is module)
        return wrong(module) if names.index(name) >= names.index(first_wrong) else module

    compiled = wrong(graph.stages[-1][1])
    checked = VerifiedGraph(graph.session, compiled, compile_graph, graph.plain, graph.stages)
    if first_wrong == "plain":
        checked(*ours.inputs)
        assert not verification.failures
        assert "and so it is without swaps under 'aot_eager'" in verification.left_out[0]
        assert verification.num_losses == 1  # the swapped graph run op by op
        return
    with pytest.raises(VerifyError, match="is wrong: the loss is off by") as raised:
        checked(*ours.inputs)
    assert raised.value.pass_name == ("" if first_wrong == "all" else SDPA)


def test_a_pass_of_the_users_may_change_what_it_likes():
    def halve(graph):
        for node in calls(graph, "swiglu"):
            (reader,) = node.users
            with graph.inserting_before(reader):
                half = graph.call_function(torch.mul, (node, 0.5))
            half.meta = dict(node.meta)
            reader.replace_input_with(node, half)

    passes.register("halve", halve, after=SWIGLU)
    try:
        compiled = compiled_model(tiny())
        step(compiled)
    finally:
        passes.unregister("halve")
    verification = compiled.report().verification
    assert not verification.failures
    assert "your pass 'halve' changes it" in verification.left_out[0]


# --- what is compared ---------------------------------------------------------------------------


def test_the_report_says_what_was_compared():
    model = tiny()
    compiled = compiled_model(model)
    with pytest.raises(RuntimeError, match="nothing has been compiled yet"):
        compiled.report()
    inputs, targets = tokens()
    logits, loss = compiled(inputs, targets)
    assert "no backward has come yet" in str(compiled.report())
    (logits.float().square().mean() + loss).backward()
    verification = compiled.report().verification
    counts = verification.num_graphs, verification.num_losses, verification.num_outputs
    assert counts == (1, 1, 1)
    assert verification.num_gradients == len(list(model.parameters()))
    said = str(compiled.report()).splitlines()[-1]
    assert said.startswith("verified: 1 loss, 1 output, 12 gradients of 1 graph against the same")
    assert "largest error 0." in said


@pytest.mark.parametrize("options", [dict(backend="eager"), dict(kernels="off")])
def test_without_swaps_there_is_nothing_to_verify(options):
    compiled = compiled_model(tiny(), **options)
    step(compiled)
    assert str(compiled.report().verification).startswith("verified: nothing")


class Counted(nn.Module):
    """A block with everything that a second run could disturb: a buffer, a random op, a cache."""

    def __init__(self, own_dropout):
        super().__init__()
        self.own_dropout = own_dropout
        self.norm, self.up = nn.RMSNorm(16), nn.Linear(16, 64)
        self.down = nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.norm(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
            self.calls.add_(1)
        gate, up = self.up(nn.functional.dropout(h, self.own_dropout, self.training)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up) + 0.01 * self.seen


class Layers(nn.Module):
    def __init__(self, mode="", own_dropout=0.2):
        super().__init__()
        self.mode = mode
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counted(own_dropout) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if self.mode and self.training:
                x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
            else:
                x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("form", [xtrain.compile, xtrain.compile_blocks])
def test_nothing_of_the_run_is_disturbed(form):
    """Losses, gradients, buffers and the random stream are bitwise those of a run without it."""

    def run(verify):
        torch._dynamo.reset()
        model = Layers()
        compiled = compiled_model(model, form=form, verify=verify)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(7)
        values = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = compiled(torch.randn(2, 5, 16))
            loss.backward()
            optimizer.step()
            values += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return compiled, [*values, *(b.clone() for b in model.buffers()), torch.get_rng_state()]

    (compiled, found), (_, expected) = run(True), run(False)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    verification = compiled.report().verification
    assert not verification.left_out and verification.num_gradients >= 10
    # the stream (the loss) and the buffers that each layer writes
    assert verification.num_losses + verification.num_outputs >= 5


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpoints_around_compiled_blocks(mode):
    compiled = compiled_model(Layers(mode), form=xtrain.compile_blocks)
    for _ in range(2):
        compiled(torch.randn(2, 5, 16, requires_grad=True)).backward()
    verification = compiled.report().verification
    assert not verification.failures and not verification.left_out
    assert verification.num_gradients == 12  # each block's parameters and its stream


def test_blocks_that_are_recomputed_in_the_graph():
    model = tiny(n_layers=2, recompute="full")
    compiled = compiled_model(model)
    step(compiled)
    verification = compiled.report().verification
    assert not verification.failures and not verification.left_out
    assert verification.num_gradients == len(list(model.parameters()))


def test_what_torch_does_wrong_without_swaps_is_said_and_no_failure():
    """A buffer that a recomputed block writes: AOTAutograd's recompute reads the new value."""
    compiled = compiled_model(Layers("non-reentrant"))
    compiled(torch.randn(2, 5, 16)).backward()
    verification = compiled.report().verification
    assert not verification.failures and verification.num_gradients == 10
    (said,) = verification.left_out
    assert said.endswith("as it ran, and so it is without swaps under 'aot_eager'")


def test_layers_that_share_a_graph_are_each_verified():
    model = tiny(n_layers=3)
    compiled = compiled_model(model, form=xtrain.compile_blocks)
    step(compiled)
    verification = compiled.report().verification
    assert verification.num_outputs == 3 and not verification.left_out
    blocks = [p for b in model.blocks for p in b.parameters()]
    assert verification.num_gradients == len(blocks) + 3  # and of the stream, as each is given it


def test_the_first_step_alone_is_verified_and_no_evaluation():
    """Nor the later micro-batches of a step whose gradients are accumulated."""
    compiled = compiled_model(tiny())
    compiled.eval()
    compiled(*tokens())
    assert compiled.report().verification.num_graphs == 0
    compiled.train()
    step(compiled)
    before = str(compiled.report().verification)
    for _ in range(2):
        step(compiled)
    assert str(compiled.report().verification) == before
    with torch.no_grad():  # another graph: one for each grad mode
        compiled(*tokens(), return_logits=False)
    verification = compiled.report().verification
    assert verification.num_graphs == 2 and verification.num_losses == 2


def test_random_ops_under_inductor_are_compared_op_by_op():
    """Inductor draws other numbers than torch: what is compiled cannot be held to them."""
    compiled = compiled_model(Layers(), backend="inductor")
    compiled(torch.randn(2, 5, 16)).backward()
    verification = compiled.report().verification
    assert not verification.failures and verification.num_gradients == 10
