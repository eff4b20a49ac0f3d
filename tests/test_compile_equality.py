"""Equal, bit for bit or within plain PyTorch's error: classes E1 and E2 of docs/design.md, CPU."""

from __future__ import annotations

import math

import pytest
import torch
from branch_oracle import hook_masks
from probe_model import ProbeModel, assert_masks, decode_masks, oracle_masks, tokens
from tolerances import assert_no_worse_than_plain

import xtrain
from xtrain import torch_compat
from xtrain.model import Config, Transformer

BACKENDS = ["eager", "aot_eager", "inductor"]
P = 0.1


@pytest.fixture(autouse=True)
def deterministic():
    """Inductor's embedding gradient differs from run to run without it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", **overrides))


def batch(seed, size=2, length=9):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 16, (size, length + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def plain(model, backend):
    """The same backend and options without our passes."""
    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    return torch.compile(model, backend=backend, options=options)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def step(forward, model, data, lr=0.0):
    """One forward, backward and SGD step: [logits, loss, every gradient]."""
    logits, loss = forward(*data)
    loss.backward()
    values = [logits.detach(), loss.detach(), *gradients(model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
            parameter.grad = None
    return values


def assert_bitwise(found, expected, where=""):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"{where}: value {i} differs"


# --- without dropout: p = 0 and evaluation ------------------------------------------------------


OVERFIT = batch(4, size=1, length=27)  # 28 random tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_dropout_every_bit_is_the_backends_alone(backend):
    """p = 0 in training, and p > 0 in evaluation: logits, loss, every gradient (class E1).

    Then 28 tokens are learnt by heart in 200 steps of a hand-written SGD.
    """
    ours, theirs = tiny(), tiny()
    compiled, reference = xtrain.compile(ours, dropout=0.0, backend=backend), plain(theirs, backend)
    losses = []
    for i in range(5):
        found = step(compiled, ours, OVERFIT, lr=0.3)
        assert_bitwise(found, step(reference, theirs, OVERFIT, lr=0.3), f"step {i}")
        losses.append(found[1].item())
    # Another model with p > 0, on the weights as they are now.
    evaluated = xtrain.compile(theirs, dropout=0.5, backend=backend).eval()
    assert_bitwise(step(evaluated, theirs, OVERFIT), step(compiled, ours, OVERFIT), "evaluation")
    report = evaluated.report()
    assert (report.num_train_graphs, report.num_eval_graphs, report.sites) == (0, 1, [])
    losses += [step(compiled, ours, OVERFIT, lr=0.3)[1].item() for _ in range(195)]
    assert abs(losses[0] - math.log(16)) < 0.1 and losses[-1] < 0.01
    assert torch.equal(step(compiled, ours, OVERFIT)[0].argmax(-1), OVERFIT[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modes_are_compiled_once_each(backend):
    """Row C14: train, eval, train, eval."""
    model, data = tiny(), batch(0)
    without = xtrain.compile(model, dropout=0.0, backend=backend)(*data)[0]
    compiled = xtrain.compile(model, dropout=P, seed=0, backend=backend)
    before = torch_compat.num_compiled_graphs()
    trained, evaluated = [], []
    for owner in (compiled, model):
        owner.train()
        trained.append(compiled(*data)[0])
        owner.eval()
        evaluated.append(compiled(*data)[0])
    assert torch_compat.num_compiled_graphs() - before == 2
    assert torch.equal(evaluated[0], evaluated[1]) and torch.equal(evaluated[0], without)
    assert not torch.equal(trained[0], trained[1])
    assert all(not torch.equal(out, without) for out in trained)


# --- with dropout -------------------------------------------------------------------------------


def twenty_steps(backend, recompute="none", dtype=torch.float32, **options):
    """Train with dropout: (losses [20] in fp64, the values of the first step)."""
    model = tiny(recompute=recompute).to(dtype)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend=backend, **options)
    losses, first = [], None
    for i in range(20):
        values = step(compiled, model, batch(i % 2), lr=0.3)
        first = values if first is None else first
        losses.append(values[1])
    assert compiled.report().num_train_graphs == 1
    return torch.stack(losses), first


@pytest.fixture(scope="module")
def eager_runs():
    """fp64 is the truth: masks do not depend on the dtype. fp32 eager is plain PyTorch's error."""
    runs = twenty_steps("eager", dtype=torch.float64), twenty_steps("eager")
    torch._dynamo.reset()
    return runs


@pytest.mark.parametrize("backend", BACKENDS)
def test_recompute_changes_no_bit_in_20_steps(backend, eager_runs):
    """Row C1, and eager against compiled."""
    losses, first = twenty_steps(backend)
    for recompute in ("full",) if backend == "inductor" else ("full", 1):
        again, values = twenty_steps(backend, recompute)
        assert torch.equal(losses, again), f"{backend}, recompute={recompute}"
        assert_bitwise(values, first, f"{backend}, recompute={recompute}")
    assert losses.isfinite().all() and losses[-4:].mean() < losses[:4].mean() - 0.1
    (truth_losses, truth), (eager_losses, eager) = eager_runs
    if backend == "eager":
        assert torch.equal(losses, eager_losses)
        return
    if backend == "aot_eager":
        unswapped, _ = twenty_steps(backend, kernels="off")
        assert torch.equal(unswapped, eager_losses), "dropout's own ops are eager's (class E1)"
    for found, plain_values, exact in zip(first, eager, truth, strict=True):
        assert_no_worse_than_plain(found, plain_values, exact)
    assert_no_worse_than_plain(losses, eager_losses, truth_losses)


def test_eager_without_compile_of_the_same_masks(eager_runs):
    """The masks by hand on the plain model: hooks on its branches, no graph of ours at all."""
    model = tiny()
    for layer, block in enumerate(model.blocks):
        sites = {block.attention: (layer, "attention"), block.feed_forward: (layer, "feed_forward")}
        hook_masks(sites, P)
    assert_bitwise(step(model, model, batch(0)), eager_runs[1][1], "first step")


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compile_for_30_steps_and_two_forwards_in_flight(backend):
    """Row C12 and item 7, on one compiled model: weights stay, so only masks change the loss."""
    torch._dynamo.utils.counters.clear()
    model, data = tiny(), batch(0)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend=backend)
    alone = [step(compiled, model, data) for _ in range(30)]
    assert len({values[1].item() for values in alone}) == 30
    compiled.set_step(3)
    losses = [compiled(*data)[1] for _ in range(2)]
    for k, loss in ((1, losses[1]), (0, losses[0])):
        loss.backward()
        assert_bitwise([loss.detach(), *gradients(model)], alone[3 + k][1:], f"step {3 + k}")
        model.zero_grad()
    assert compiled.report().num_train_graphs == torch_compat.num_compiled_graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] == 1, "no frame fell back to eager"


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mean_over_seeds_is_the_value_without_dropout(p):
    """E[out] = x: branch k adds 2^k / (1 - p) with probability 1 - p, so 15 in the mean."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=p, seed=9, backend="eager")
    runs = 400
    with torch.no_grad():
        outs = torch.stack([compiled(tokens()) for _ in range(runs)]).double()
    variance = p / (1 - p) * sum(4**k for k in range(4))
    assert abs(outs.mean() - 15) < 5 * (variance / outs.numel()) ** 0.5
    per_element = (outs.mean(0) - 15).abs().max()
    assert per_element < 5 * (variance / runs) ** 0.5  # 160 elements: 1e-4 of failing by chance
    assert outs.var() < 1.1 * variance and outs.var() > 0.9 * variance


def test_dropout_of_all_leaves_the_stream_and_zero_gradients():
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=1.0, seed=9, backend="aot_eager")
    out = compiled(tokens())
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    for block in model.blocks:
        for branch in (block.attn, block.mlp):
            assert torch.equal(branch.constant.grad, torch.zeros_like(branch.constant))


# --- one compile for all layers -----------------------------------------------------------------


def test_twelve_layers_share_their_graphs_at_every_size(caplog):
    """Row C36: one graph, one more once sizes change; masks are each layer's own."""
    model = ProbeModel(shape=(9, 140, 4), num_layers=11)  # 22 digits fit into fp32
    compiled = xtrain.compile_blocks(model, dropout=0.5, seed=2, backend="eager")
    sizes = [(4, 128), (4, 96), (4, 64), (4, 32), (4, 33), (3, 33), (3, 128)]
    for i, (size, length) in enumerate(sizes):
        out = compiled(tokens(size, length))
        out.sum().backward()
        assert compiled.report().num_train_graphs == (1 if i == 0 else 2)
        assert_masks(decode_masks(out, 11), oracle_masks(2, i, tuple(out.shape), 11), f"step {i}")
    assert "recompile_limit" not in caplog.text and "cache_size_limit" not in caplog.text
    assert [s.layer for s in compiled.report().sites] == [i // 2 for i in range(22)]


def test_a_layer_index_that_is_read_costs_no_compile():
    """With a graph for each, nine layers would pass Dynamo's recompile limit of eight."""
    model = tiny(n_layers=10)

    class Indexed(type(model.blocks[0])):
        def forward(self, x, cos, sin):
            return super().forward(x * (1 + self.index / 100), cos, sin)

    for i, block in enumerate(model.blocks):
        block.__class__, block.index = Indexed, i
    whole = xtrain.compile(model, dropout=P, seed=2, backend="eager")(*batch(0))
    compiled = xtrain.compile_blocks(model, dropout=P, seed=2, backend="eager")
    assert_bitwise(compiled(*batch(0)), whole)
    assert compiled.report().num_train_graphs == 1
    assert len(compiled.report().sites) == 20
