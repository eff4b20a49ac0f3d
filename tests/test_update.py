"""One optimiser step: loss, clipping, guard, ranks; AdamW, its groups and schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import xtrain
from xtrain.checkpoint import parameter_names
from xtrain.config import OptimSection
from xtrain.model import Config, Transformer
from xtrain.training.loader import Loader, Ranks, StepBatch, cut_batch
from xtrain.training.update import (
    Schedule,
    TrainingError,
    Updater,
    autocast,
    build_adamw,
    load_named_state,
    named_state,
    parameter_groups,
    set_learning_rate,
    skip_updates_where,
)

IGNORE = -100


class TokenLosses(nn.Module):
    """Loss of a token = weight * tokens[b, t]: its loss and its gradient are read off the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.calls = []

    def set_step(self, step, first_sample=0):
        self.calls.append((step, first_sample))

    def forward(self, tokens, targets, *, return_logits):
        assert not return_logits
        counts = targets != IGNORE
        losses = self.weight * torch.where(counts, tokens, 0)
        return None, losses.sum() / counts.sum().clamp(min=1)


def schedule(peak=0.1):
    return Schedule(kind="constant", peak=peak, minimum=0.0, warmup_steps=0, total_steps=10)


def updater(model, *, lr=0.1, **keywords):
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(lr))
    return Updater(model, optimizer, schedule=schedule(lr), **keywords)


def small_model():
    """A layer of the real model, and the same behind xtrain.compile."""
    torch.manual_seed(0)
    model = Transformer(Config.preset("tiny", n_layers=1))
    return model, lambda dropout: xtrain.compile(model, dropout=dropout, seed=5, backend="eager")


def batch_of(rows, micro_batch_size, *, step=0, **options):
    """Rows of token losses, None where the target does not count."""
    tokens = np.array([[0 if x is None else x for x in row] for row in rows])
    targets = np.array([[IGNORE if x is None else 1 for x in row] for row in rows])
    return cut_batch(step, tokens, targets, micro_batch_size=micro_batch_size, **options)


ROWS = [[4, None, None], [1, 1, 1]]


def test_loss_is_the_mean_over_the_tokens_of_the_step():
    """Row C25: the mean of the two micro-batch means would be 2.5."""
    for size in (1, 2):
        model = TokenLosses()
        result = updater(model).step(batch_of(ROWS, size))
        assert result.values()[0] == 1.75
        assert model.weight.grad.item() == 1.75
        assert model.weight.item() == pytest.approx(1 - 0.1 * 1.75)


def test_two_ranks_average_to_the_gradient_of_one():
    """Row C25, the arithmetic of ranks: data parallelism averages their gradients."""
    gradients, losses = [], []
    for rank in range(2):
        model = TokenLosses()
        batch = batch_of(ROWS, 1, ranks=Ranks(rank, 2))
        assert (len(batch.micro_batches), batch.num_targets) == (1, 4)
        result = updater(model, world_size=2).step(batch)
        gradients.append(model.weight.grad.item())
        losses.append(result.values()[0])
        assert model.calls == [(0, rank)]
    assert np.mean(gradients) == 1.75
    assert sum(losses) == 1.75  # each rank's share of the step's loss


def test_an_ignored_micro_batch_changes_nothing():
    """Row C24, with the real model and dropout: gradients equal to those of the others alone."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (2, 8))
    targets = rng.integers(0, 16, (2, 8))
    ignored = np.stack([np.full(8, IGNORE), targets[1]])
    gradients = []
    for normal_alone in (False, True):
        model, compiled = small_model()
        step = cut_batch(3, tokens, ignored, micro_batch_size=1)
        if normal_alone:
            step = StepBatch(3, step.micro_batches[1:], 8)
        result = updater(compiled(0.3)).step(step)
        gradients.append([p.grad for p in model.parameters()])
        assert math.isfinite(result.values()[0])
    for both, alone in zip(*gradients, strict=True):
        assert torch.equal(both, alone)


def test_a_step_without_targets_is_skipped():
    """Row C24: nothing runs and nothing moves, momentum and weight decay included."""
    model = TokenLosses()
    optimizer = build_adamw(model, OptimSection(learning_rate=0.1), compiled=False)
    update = Updater(model, optimizer, schedule=schedule())
    assert update.step(batch_of([[1, 2]], 1)) is not None
    before = model.weight.item()
    assert update.step(batch_of([[None, None], [None, None]], 1, step=1)) is None
    assert model.weight.item() == before and model.calls == [(0, 0)]
    assert optimizer.state[model.weight]["step"] == 1


def test_every_forward_is_told_its_step_and_first_sample():
    model = TokenLosses()
    update = updater(model, lr=0.0)
    rows = [[1]] * 8
    update.step(batch_of(rows, 2, step=7))
    update.step(batch_of(rows, 8, step=8))
    update.step(batch_of(rows, 2, step=9, ranks=Ranks(1, 2)))
    assert model.calls == [
        *[(7, first) for first in (0, 2, 4, 6)],
        (8, 0),
        *[(9, first) for first in (4, 6)],
    ]


def test_cuts_of_the_batch_keep_every_mask():
    """The same gradients, up to the order of sums, in 1, 2 or 4 forwards, at dropout 0.5."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 16, (4, 8)), rng.integers(0, 16, (4, 8))
    gradients = {}
    for step, size in ((2, 4), (2, 2), (2, 1), (3, 4)):
        model, compiled = small_model()
        batch = cut_batch(step, tokens, targets, micro_batch_size=size)
        updater(compiled(0.5)).step(batch)
        gradients[step, size] = torch.cat([p.grad.flatten() for p in model.parameters()])
    whole, other = gradients[2, 4], gradients[3, 4]
    for size in (2, 1):
        torch.testing.assert_close(gradients[2, size], whole, rtol=1e-4, atol=1e-7)
    assert (other - whole).norm() > 0.1 * other.norm()  # another step, another mask


def test_clipping_once_after_accumulation_and_the_norm_before_it():
    class Two(TokenLosses):
        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.ones(()))

        def forward(self, tokens, targets, *, return_logits):
            return None, (3 * self.weight + 4 * self.other).sum() * tokens.float().mean()

    for clip, scale in ((0.0, 1.0), (1.0, 0.2), (10.0, 1.0)):
        model = Two()
        result = updater(model, grad_clip=clip).step(batch_of([[1], [1]], 1))
        assert result.values()[1] == pytest.approx(5.0)  # 3-4-5, whatever the clip
        assert model.weight.grad.item() == pytest.approx(3 * scale, rel=1e-5)
        assert model.other.grad.item() == pytest.approx(4 * scale, rel=1e-5)


@pytest.mark.parametrize("broken", ["loss", "gradient norm"])
def test_what_is_not_finite_never_reaches_the_weights(broken):
    class Broken(TokenLosses):
        def forward(self, tokens, targets, *, return_logits):
            if broken == "loss":
                return None, self.weight.sum() * math.inf
            # sqrt has an infinite slope where its value is still 0
            return None, (self.weight - 1).sum().sqrt()

    model = Broken()
    with pytest.raises(TrainingError) as error:
        updater(model, lr=0.25).step(batch_of([[1]], 1, step=17))
    assert model.weight.item() == 1.0
    assert f"step 17: the {broken} is not finite" in str(error.value)
    assert "learning rate 0.25" in str(error.value) and "gradient norm inf" in str(error.value)


def test_a_deferred_failure_freezes_the_weights_until_it_is_seen(device):
    """How a GPU runs: the update is queued before the loss is known; the flag is sticky."""

    class Breaks(TokenLosses):
        def forward(self, tokens, targets, *, return_logits):
            return None, self.weight.sum() * tokens.float().mean().log().reciprocal()  # 1: infinite

    model = Breaks().to(device)
    optimizer = build_adamw(model, OptimSection(learning_rate=0.1), compiled=False)
    update = Updater(model, optimizer, schedule=schedule(), deferred=True, grad_clip=1.0)
    fine = update.step(batch_of([[2]], 1, step=0).to(device))
    assert math.isfinite(fine.values()[0])
    before = model.weight.item(), optimizer.state[model.weight]["exp_avg"].item()
    assert before[0] != 1.0
    broken = update.step(batch_of([[1]], 1, step=1).to(device))
    later = update.step(batch_of([[2]], 1, step=2).to(device))  # before anybody looked
    assert (model.weight.item(), optimizer.state[model.weight]["exp_avg"].item()) == before
    with pytest.raises(TrainingError, match="step 1: the loss is not finite"):
        broken.values()
    assert math.isfinite(later.values()[0])


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device():
    """torch raises at the first synchronisation."""
    torch.manual_seed(0)
    model = Transformer(Config.preset("tiny", vocab_size=1000)).cuda()
    model.set_step = lambda step, first_sample: None
    optimizer = build_adamw(model, OptimSection(learning_rate=1e-3), compiled=False)
    update = Updater(model, optimizer, schedule=schedule(1e-3), grad_clip=1.0)
    batches = Loader(Numbered(), micro_batch_size=2, device=torch.device("cuda")).steps(0, 4)
    results = [update.step(next(batches))]  # the lazy start-up of libraries may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        results += [update.step(batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [result.values()[0] for result in results]
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == 4


def test_bf16_autocast_keeps_master_weights_in_fp32():
    rng = np.random.default_rng(0)
    batch = cut_batch(0, *rng.integers(0, 16, (2, 4, 8)), micro_batch_size=2)
    losses = {}
    for dtype in ("fp32", "bf16"):
        model, compiled = small_model()
        optimizer = build_adamw(model, OptimSection(learning_rate=0.01), compiled=False)
        context = autocast(torch.device("cpu"), dtype)
        update = Updater(compiled(0.1), optimizer, schedule=schedule(0.01), autocast=context)
        losses[dtype] = update.step(batch).values()[0]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
        tensors += named_state(optimizer, parameter_names(model)).values()
        assert {t.dtype for t in tensors} == {torch.float32}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)


# --- the loader ---------------------------------------------------------------------------------


class Numbered:
    """A source whose tokens say which step and sample they belong to."""

    def __init__(self, rows=6, fail_at=None):
        self.rows, self.fail_at = rows, fail_at

    def batch(self, step):
        if step == self.fail_at:
            raise OSError("the disk is gone")
        inputs = np.arange(self.rows)[:, None] + np.array([[100 * step, 100 * step]])
        return inputs.astype(np.uint16), inputs + 1


def test_loader_gives_each_step_in_order_from_any_step():
    loader = Loader(Numbered(), micro_batch_size=2, device=torch.device("cpu"))
    batches = list(loader.steps(3, 6))
    assert [batch.step for batch in batches] == [3, 4, 5]
    for batch in batches:
        assert [micro.first_sample for micro in batch.micro_batches] == [0, 2, 4]
        rows = torch.cat([micro.inputs[:, 0] for micro in batch.micro_batches])
        assert rows.tolist() == [100 * batch.step + i for i in range(6)]
        assert all(m.inputs.dtype == m.targets.dtype == torch.int64 for m in batch.micro_batches)
        assert batch.num_targets == 12
    assert list(loader.steps(6, 6)) == []


def test_loader_cuts_by_rank():
    rows = []
    for rank in range(3):
        ranks = Ranks(rank, 3)
        loader = Loader(Numbered(), micro_batch_size=1, device=torch.device("cpu"), ranks=ranks)
        (batch,) = loader.steps(0, 1)
        assert [m.first_sample for m in batch.micro_batches] == [2 * rank, 2 * rank + 1]
        assert batch.num_targets == 12  # of all ranks
        rows += [int(m.inputs[0, 0]) for m in batch.micro_batches]
    assert rows == list(range(6))
    with pytest.raises(ValueError, match="6 sequences cannot be cut into micro-batches of 4 on 1"):
        list(Loader(Numbered(), micro_batch_size=4, device=torch.device("cpu")).steps(0, 1))


def test_loader_hands_on_what_its_thread_met():
    loader = Loader(Numbered(fail_at=1), micro_batch_size=6, device=torch.device("cpu"))
    steps = loader.steps(0, 3)
    assert next(steps).step == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)


# --- the optimiser: groups, schedules, the learning rate as a tensor, saved state -----------------


OPTIM = OptimSection(learning_rate=1e-3, warmup_steps=10)


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", **overrides))


def give_gradients(model, seed):
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.grad = torch.from_numpy(rng.standard_normal(parameter.shape, np.float32))


NORMS = {f"blocks.{i}.{part}_norm.weight" for i in (0, 1) for part in ("attention", "feed_forward")}
OTHERS = {"embedding.weight", "norm.weight", *NORMS}


@pytest.mark.parametrize(
    ("tied", "frozen", "others", "num_decayed"),
    [
        (False, None, OTHERS, 2 * 7 + 1),  # seven matrices a block, and the head
        (True, None, OTHERS, 2 * 7),  # the head is the embedding, once
        (False, "embedding.weight", OTHERS - {"embedding.weight"}, 2 * 7 + 1),
    ],
)
def test_groups_leave_norms_and_embedding_undecayed(tied, frozen, others, num_decayed):
    model = tiny(tie_embeddings=tied)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    names = parameter_names(model)
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in rest["params"]} == others
    ids = [id(p) for group in (decayed, rest) for p in group["params"]]
    assert len(decayed["params"]) == num_decayed and len(ids) == len(set(ids))


def schedule_of(kind, **changes):
    values = dict(kind=kind, peak=1e-3, minimum=0.0, warmup_steps=10, total_steps=100)
    return Schedule(**{**values, **changes})


def test_cosine_values():
    cosine = schedule_of("cosine")
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
    rate = schedule_of(kind, minimum=1e-4)
    for step, expected in values.items():
        assert rate(step) == pytest.approx(expected)
    assert schedule_of(kind, warmup_steps=0)(0) == 1e-3


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
    model = tiny(n_layers=1)
    optimizer = build_adamw(model, OPTIM, compiled=True)
    torch_step = torch.compile(optimizer.step, backend="eager")
    rates, compiles = [], []
    rate = schedule_of("cosine")
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
        step = Updater(model, optimizer, schedule=schedule(), compiled=compiled).update
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
