"""What a CompiledModel is to its users: the model's own interface, a report, steps and seeds."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from branch_oracle import both
from probe_model import (
    SHAPE,
    SITES,
    Block,
    ProbeModel,
    decode_masks,
    oracle_mask,
    probe,
    tokens,
)
from torch import nn

import xtrain
from xtrain.compiler import CompiledModel, SiteError
from xtrain.config import ConfigError, TrainSection
from xtrain.model import Config, Transformer


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", **overrides))


# --- the model's own interface ------------------------------------------------------------------


@both
def test_names_and_state_are_the_models_own(compile_it):
    model = tiny()
    model.register_buffer("positions", torch.arange(3))
    names = {kind: dict(getattr(model, kind)()) for kind in ("named_parameters", "named_buffers")}
    modules = list(model.named_modules())
    state = model.state_dict()
    compiled = compile_it(model, dropout=0.1, backend="eager")
    assert isinstance(compiled, CompiledModel) and isinstance(compiled, nn.Module)
    for kind, expected in names.items():
        found = dict(getattr(compiled, kind)())
        assert list(found) == list(expected) and all(found[n] is expected[n] for n in found)
    assert list(compiled.named_modules()) == modules
    assert list(compiled.named_modules(prefix="p"))[1][0] == "p." + modules[1][0]
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert list(compiled.named_children()) == list(model.named_children())
    found = compiled.state_dict()
    assert list(found) == list(state)
    assert all(found[n].data_ptr() == state[n].data_ptr() for n in state)
    assert list(compiled.state_dict(prefix="a.")) == ["a." + n for n in state]


def test_loading_reaches_the_compiled_graphs():
    compiled, other = xtrain.compile(tiny(), dropout=0.1, backend="eager"), tiny()
    for parameter in other.parameters():
        nn.init.constant_(parameter, 0.01)
    compiled.eval()
    compiled(tokens())
    keys = compiled.load_state_dict(other.state_dict())
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert torch.equal(compiled(tokens())[0], other(tokens())[0])
    with pytest.raises(RuntimeError, match="Missing key"):
        compiled.load_state_dict({})
    holder = nn.ModuleDict({"model": compiled})
    assert list(holder.state_dict()) == ["model." + n for n in other.state_dict()]


def test_signature_and_documentation_of_forward():
    model = tiny()
    compiled = xtrain.compile(model, dropout=0.1, backend="eager")
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.forward.__doc__ == model.forward.__doc__
    logits, loss = compiled(tokens=tokens(), targets=tokens(), return_logits=False)
    assert logits is None and loss.shape == ()


def test_attributes_fall_through_and_are_set_on_the_model():
    model = tiny()
    compiled = xtrain.compile(model, dropout=0.1, backend="eager")
    assert compiled.config is model.config and compiled.blocks is model.blocks
    assert compiled.inner is model
    compiled.tag = "a"
    assert model.tag == "a" and compiled.tag == "a"
    del compiled.tag
    assert not hasattr(model, "tag") and not hasattr(compiled, "tag")
    compiled.extra = nn.Linear(2, 2)
    assert model.extra is compiled.extra and "extra.weight" in model.state_dict()
    with pytest.raises(AttributeError, match="no_such"):
        compiled.no_such  # noqa: B018
    assert {"blocks", "set_step", "report", "forward"} <= set(dir(compiled))
    assert repr(compiled).startswith("CompiledModel(\n  Transformer, dropout=0.1, eager")


@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_training_mode_is_one_for_both(through):
    model = ProbeModel()
    compiled = probe(model)
    target = compiled if through == "wrapper" else model
    for mode in (False, True, False):
        assert target.train(mode) is target
        assert compiled.training is model.training is mode
        assert all(m.training is mode for m in model.modules())
        assert (len(compiled(tokens()).unique()) > 1) is mode
    target.training = True
    assert compiled.training and model.training and not model.blocks[0].training


def test_to_another_dtype_compiles_anew_and_keeps_the_masks():
    compiled = probe()
    before = decode_masks(compiled(tokens()), 2)
    assert compiled.to(torch.float64) is compiled and compiled.double() is compiled
    assert {p.dtype for p in compiled.inner.parameters()} == {torch.float64}
    compiled.set_step(0)
    out = compiled(tokens())
    assert out.dtype == torch.float64
    assert all(map(torch.equal, decode_masks(out, 2), before))


def test_the_inner_model_alone_runs_without_our_dropout():
    for compile_it in (xtrain.compile, xtrain.compile_blocks):
        model = ProbeModel()
        compiled = probe(model, compile_it)
        compiled(tokens())
        assert compiled.inner(tokens()).unique().tolist() == [15.0]
        assert model.blocks[1](torch.zeros(SHAPE)).unique().tolist() == [12.0]


@both
def test_copies_are_compiled_models_of_their_own(compile_it):
    compiled = probe(None, compile_it, seed=3)
    first = compiled(tokens())
    twin = copy.deepcopy(compiled)
    assert isinstance(twin, CompiledModel) and twin.inner is not compiled.inner
    assert torch.equal(twin(tokens()), first), "a copy begins at step 0 with the same seed"
    nn.init.zeros_(twin.inner.blocks[0].attn.constant)
    compiled.set_step(0)
    assert torch.equal(compiled(tokens()), first)
    with pytest.raises(RuntimeError, match="nothing has been compiled"):
        copy.deepcopy(compiled).report()


@both
def test_pickling_is_refused_and_the_inner_model_pickles(compile_it):
    compiled = probe(None, compile_it, seed=3)
    compiled(tokens())
    with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict\(\).*compiled\.inner"):
        pickle.dumps(compiled)
    with pytest.raises(TypeError, match=r"no shallow copy.*copy\.deepcopy\(compiled\)"):
        copy.copy(compiled)
    loaded = pickle.loads(pickle.dumps(compiled.inner))
    assert loaded(tokens()).unique().tolist() == [15.0]
    again = probe(loaded, compile_it, seed=3)
    compiled.set_step(0)
    assert torch.equal(again(tokens()), compiled(tokens()))


def test_optimisers_hooks_and_module_calls_see_the_model():
    compiled = xtrain.compile(tiny(), dropout=0.1, seed=0, backend="eager")
    optimiser = torch.optim.SGD(compiled.parameters(), lr=0.5)
    weight = compiled.blocks[0].attention.query.weight
    before = weight.clone()
    seen = []
    handle = compiled.register_forward_hook(lambda module, args, out: seen.append(module))
    compiled(tokens(), tokens())[1].backward()
    handle.remove()
    optimiser.step()
    assert seen == [compiled] and not torch.equal(weight, before)
    compiled.zero_grad()
    assert weight.grad is None
    compiled.requires_grad_(False)
    assert not weight.requires_grad


# --- report and steps ---------------------------------------------------------------------------


def test_report_needs_a_forward_and_prints_a_table():
    compiled = probe()
    with pytest.raises(RuntimeError, match="nothing has been compiled yet: run a forward"):
        compiled.report()
    compiled(tokens())
    report = compiled.report()
    lines = str(report).splitlines()
    assert lines[0].split("  ")[0] == "residual site" and set(lines[1]) == {"-", " "}
    rows = [line.split() for line in lines[2:6]]
    assert rows == [
        [f"blocks.{layer}.{site}", str(layer), site, "xtrain"]
        for layer in range(2)
        for site in SITES
    ]
    assert any(line.startswith("insert_residual_dropout") for line in lines)
    assert "4 residual sites; graphs compiled: 1 for training, 0 for evaluation" in lines
    (result,) = report.passes
    assert (result.name, result.num_matched, result.num_replaced) == (
        "insert_residual_dropout",
        4,
        4,
    )


class Loose(nn.Module):
    """A dropout of its own, and a branch that the add writes into and others read."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = F.dropout(F.one_hot(tokens, 8).float(), 0.25)
        h = self.linears[0](x)
        shown = h.view(-1, 8)
        h.add_(x)
        return shown


def test_report_lists_what_stays_unseeded_and_uncovered():
    compiled = probe(Loose(), strict=False)
    compiled(tokens())
    lines = str(compiled.report()).splitlines()
    assert "unseeded: dropout in the model" in lines
    reason = "the add writes into the branch, which others see through a view"
    assert f"uncovered: feed_forward in the model's own forward: {reason}" in lines
    with pytest.raises(SiteError, match=f"gets no dropout: feed_forward.*{reason}.*strict=False"):
        probe(Loose())(tokens())


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((1.5,), TypeError, "step must be an int, got 1.5"),
        ((True,), TypeError, "step must be an int, got the bool True"),
        (("1",), TypeError, "step must be an int, got '1'"),
        ((0, 2.0), TypeError, "first_sample must be an int, got 2.0"),
        ((0, -1), ValueError, "first_sample must be 0 or more, got -1"),
    ],
)
def test_set_step_errors(args, error, match):
    with pytest.raises(error, match=match):
        probe().set_step(*args)


def test_set_step_takes_any_kind_of_int():
    compiled = probe()
    expected = None
    for step, first in ((3, 2), (np.int64(3), np.int32(2)), (torch.tensor(3), torch.tensor(2))):
        compiled.set_step(step, first_sample=first)
        out = compiled(tokens())
        assert expected is None or torch.equal(out, expected)
        expected = out
    compiled.set_step(-7)
    masks = decode_masks(compiled(tokens()), 2)
    assert torch.equal(masks[0], oracle_mask(0, -7, 0, "attention"))


@pytest.mark.parametrize("seed", [5, -(2**63), 2**64 - 1, np.int64(5), torch.tensor(5)])
def test_seeds_of_any_int(seed):
    masks = decode_masks(probe(seed=seed)(tokens()), 2)
    assert torch.equal(masks[3], oracle_mask(int(seed), 0, 1, "feed_forward"))


@pytest.mark.parametrize("seed", [2**64, 2**80, -(2**63) - 1])
def test_seeds_are_those_of_a_training_run(seed):
    """Taken mod 2^64, 2^64 would be seed 0 without a word; xtrain.train refuses the same."""
    for compile_it in (xtrain.compile, xtrain.compile_blocks):
        with pytest.raises(ValueError, match=rf"seed must be from -2\^63 to 2\^64 - 1, got {seed}"):
            probe(None, compile_it, seed=seed)
    with pytest.raises(ConfigError, match="seed"):
        TrainSection(seed=seed)


def test_numbers_before_the_samples_hold_no_batch():
    """num_items_in_batch and the like are tensors without dimensions: whose batch is the next's."""

    class Scaled(ProbeModel):
        def forward(self, count, tokens):
            return super().forward(tokens) * count

    compiled = probe(Scaled())
    count = torch.tensor(1.0)
    whole = compiled(count, tokens())
    parts = []
    for start in (0, 2):
        compiled.set_step(0, first_sample=start)
        parts.append(compiled(count, tokens(2)))
    assert torch.equal(torch.cat(parts), whole)


# --- layers that share weights ------------------------------------------------------------------


@both
def test_a_block_run_several_times_has_a_mask_for_each_run(compile_it):
    class Universal(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding.from_pretrained(torch.zeros(16, 8))
            self.blocks = nn.ModuleList([Block(SHAPE, 0)] * 3)

        def forward(self, tokens):
            x = self.embedding(tokens)
            outs = []
            for block in self.blocks:
                outs.append(block(x))
            return torch.stack(outs)

    compiled = probe(Universal(), compile_it)
    outs = compiled(tokens())
    for run, out in enumerate(outs):
        ending = f"_{run + 1}" if run else ""
        for mask, kind in zip(decode_masks(out, 1), SITES, strict=True):
            assert torch.equal(mask, oracle_mask(0, 0, 0, kind + ending))
    assert [s.layer for s in compiled.report().sites] == [0] * 6


def test_a_users_pass_runs_in_training_and_in_evaluation():
    """Also where our own passes have nothing to do: evaluation, and training without dropout."""
    seen = []

    def count_adds(graph):
        seen.append(sum(node.name.startswith("add") for node in graph.nodes))

    model = Transformer(Config.preset("tiny"))
    tokens = torch.randint(16, (2, 8))
    for dropout in (0.1, 0.0):
        compiled = xtrain.compile(
            model.train(), dropout=dropout, backend="eager", passes=[count_adds]
        )
        compiled(tokens)
        compiled.eval()(tokens)
    assert len(seen) == 4


def test_layers_that_share_a_part_keep_their_own_numbers():
    """The shared parameters belong to no layer: a graph for all layers is told which one runs."""
    outs, names = [], []
    for compile_it in (xtrain.compile, xtrain.compile_blocks):
        model = ProbeModel()
        model.blocks[1].mlp = model.blocks[0].mlp
        compiled = probe(model, compile_it)
        outs.append(compiled(tokens()))
        names.append([s.name for s in compiled.report().sites])
    assert torch.equal(*outs) and names[0] == names[1]
    assert names[0] == [f"blocks.{i}.{site}" for i in (0, 1) for site in SITES]
