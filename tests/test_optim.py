"""The optimiser: groups, the schedule's values, the learning rate as a tensor, saved state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from xtrain.config import OptimSection
from xtrain.model import Config, Transformer
from xtrain.optim import (
    Schedule,
    build_adamw,
    load_named_state,
    named_state,
    parameter_groups,
    set_learning_rate,
    skip_updates_where,
    step_function,
)
from xtrain.state_names import parameter_names

OPTIM = OptimSection(learning_rate=1e-3, warmup_steps=10)


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", **overrides))


def give_gradients(model, seed):
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.grad = torch.from_numpy(rng.standard_normal(parameter.shape, np.float32))


def test_groups_leave_norms_and_embedding_undecayed():
    model = tiny()
    names = parameter_names(model)
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    other_names = {names[id(p)] for p in others["params"]}
    assert other_names == {
        "embedding.weight",
        "norm.weight",
        *(f"blocks.{i}.{norm}.weight" for i in (0, 1) for norm in NORMS),
    }
    assert len(decayed["params"]) == 2 * 7 + 1  # seven matrices a block, and the head


NORMS = ("attention_norm", "feed_forward_norm")


def test_a_tied_head_is_an_embedding_and_appears_once():
    model = tiny(tie_embeddings=True)
    groups = parameter_groups(model, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == 20
    assert id(model.embedding.weight) in {id(p) for p in groups[1]["params"]}


def test_frozen_parameters_are_left_out():
    model = tiny()
    model.embedding.weight.requires_grad_(False)
    ids = {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert id(model.embedding.weight) not in ids and len(ids) == 20


def schedule(kind, **changes):
    values = dict(kind=kind, peak=1e-3, minimum=0.0, warmup_steps=10, total_steps=100)
    return Schedule(**{**values, **changes})


def test_cosine_values():
    cosine = schedule("cosine")
    assert cosine(15) == pytest.approx(9.92404e-4, abs=5e-10)  # row C35
    assert cosine(10) == 1e-3
    assert cosine(55) == pytest.approx(5e-4)  # half-way
    assert cosine(100) == cosine(1000) == 0.0
    assert 0 < cosine(0) < cosine(9) < 1e-3
    assert np.allclose(np.diff([cosine(s) for s in range(11)]), 1e-3 / 11)


@pytest.mark.parametrize(
    "kind, values",
    [
        ("linear", {10: 1e-3, 55: 5.5e-4, 100: 1e-4, 500: 1e-4}),
        ("constant", {10: 1e-3, 99: 1e-3, 500: 1e-3}),
        ("wsd", {10: 1e-3, 80: 1e-3, 90: 5.5e-4, 100: 1e-4, 500: 1e-4}),
    ],
)
def test_other_schedules(kind, values):
    rate = schedule(kind, minimum=1e-4)
    for step, expected in values.items():
        assert rate(step) == pytest.approx(expected)
    assert schedule(kind, warmup_steps=0)(0) == 1e-3


def test_adamw_matches_the_formula():
    """Three steps in fp64 NumPy, by Loshchilov and Hutter's formula, both groups."""
    model = tiny()
    optim = OptimSection(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = build_adamw(model, optim, compiled=False)
    matrix, norm = model.blocks[0].attention.query.weight, model.norm.weight
    expected = {p: p.detach().double().numpy() for p in (matrix, norm)}
    moments = {p: (0.0, 0.0) for p in expected}
    for step in range(3):
        give_gradients(model, step)
        set_learning_rate(optimizer, 1e-2 / (step + 1))
        for p in expected:
            decay = 0.1 if p is matrix else 0.0
            g = p.grad.double().numpy()
            m = 0.9 * moments[p][0] + 0.1 * g
            v = 0.95 * moments[p][1] + 0.05 * g * g
            moments[p] = (m, v)
            lr = 1e-2 / (step + 1)
            update = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8)
            expected[p] = expected[p] * (1 - lr * decay) - lr * update
        optimizer.step()
    for p, value in expected.items():
        np.testing.assert_allclose(p.detach().numpy(), value, rtol=2e-6, atol=2e-7)


def learning_rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_fifty_compiled_steps_compile_once():
    """Row C35: the schedule changes the tensor's value, which no compiled step guards on."""
    torch._dynamo.reset()
    counters.clear()
    model = tiny()
    optimizer = build_adamw(model, OPTIM, compiled=True)
    torch_step = torch.compile(optimizer.step, backend="eager")
    rates, compiles = [], []
    rate = schedule("cosine")
    for step in range(50):
        give_gradients(model, step)
        set_learning_rate(optimizer, rate(step))
        torch_step()
        rates.append(learning_rates(optimizer)[0].item())
        compiles.append(counters["stats"]["unique_graphs"])
    assert compiles[1] >= 1 and compiles[-1] == compiles[1]
    assert rates == pytest.approx([rate(step) for step in range(50)], rel=1e-6)
    assert rates[15] == pytest.approx(9.92404e-4, abs=5e-10)


def test_compiled_and_fused_steps_agree():
    results = []
    for compiled in (False, True):
        model = tiny(n_layers=1)
        optimizer = build_adamw(model, OPTIM, compiled=compiled)
        step = step_function(optimizer, compiled=compiled)
        for seed in range(3):
            give_gradients(model, seed)
            step()
        results.append([p.detach().clone() for p in model.parameters()])
    for fused, inductor in zip(*results, strict=True):
        torch.testing.assert_close(inductor, fused, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, True])
def test_state_there_and_back_keeps_the_learning_rate_tensor(compiled):
    def fresh():
        model = tiny()
        return model, build_adamw(model, OPTIM, compiled=compiled)

    def steps(model, optimizer, seeds):
        # on CPU the multi-tensor form runs only inside a compiled step
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in seeds:
            give_gradients(model, seed)
            set_learning_rate(optimizer, 1e-3 * (seed + 1))
            step()

    straight, straight_optimizer = fresh()
    steps(straight, straight_optimizer, range(4))

    model, optimizer = fresh()
    steps(model, optimizer, range(2))
    weights = [p.detach().clone() for p in model.parameters()]
    saved = {k: v.clone() for k, v in named_state(optimizer, parameter_names(model)).items()}
    assert "blocks.1.attention.query.weight/exp_avg_sq" in saved

    model, optimizer = fresh()
    lr = learning_rates(optimizer)[0]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    load_named_state(optimizer, parameter_names(model), saved)
    assert all(rate is lr for rate in learning_rates(optimizer))
    steps(model, optimizer, range(2, 4))
    for ours, theirs in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # torch's own way keeps it a tensor too
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(isinstance(r, torch.Tensor) and r.dim() == 0 for r in learning_rates(optimizer))


def test_state_that_does_not_fit_is_refused():
    model = tiny()
    optimizer = build_adamw(model, OPTIM, compiled=False)
    names = parameter_names(model)
    load_named_state(optimizer, names, {})  # saved before the first step
    give_gradients(model, 0)
    optimizer.step()
    saved = named_state(optimizer, names)
    missing = {k: v for k, v in saved.items() if not k.startswith("norm.weight")}
    with pytest.raises(ValueError, match="no optimiser state for parameter 'norm.weight'"):
        load_named_state(optimizer, names, missing)
    with pytest.raises(ValueError, match="unknown parameter 'extra.weight'"):
        load_named_state(optimizer, names, {**saved, "extra.weight/step": torch.tensor(1.0)})


def test_flag_on_the_device_skips_an_update():
    """The hook that keeps a non-finite step from the weights without waiting for the loss."""
    model = tiny()
    optimizer = build_adamw(model, OPTIM, compiled=False)
    flag = torch.zeros(())
    assert skip_updates_where(optimizer, flag)
    give_gradients(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    state = {k: v.clone() for k, v in named_state(optimizer, parameter_names(model)).items()}
    flag.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad.fill_(math.nan)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for name, value in named_state(optimizer, parameter_names(model)).items():
        assert torch.equal(value, state[name]), name
    flag.fill_(0.0)
    give_gradients(model, 1)
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before[0])
    assert not skip_updates_where(build_adamw(model, OPTIM, compiled=True), flag)
