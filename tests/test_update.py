"""One optimiser step: what the loss is a mean of, cuts of the batch, clipping, guards, dtypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import xtrain
from xtrain.config import OptimSection
from xtrain.model import Config, Transformer
from xtrain.optim import Schedule, build_adamw, named_state
from xtrain.state_names import parameter_names
from xtrain.training.loader import Loader, Ranks, StepBatch, cut_batch
from xtrain.training.update import TrainingError, Updater

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


def batch_of(rows, micro_batch_size, *, ranks=None, step=0):
    """Rows of token losses, None where the target does not count."""
    tokens = np.array([[0 if x is None else x for x in row] for row in rows])
    targets = np.array([[IGNORE if x is None else 1 for x in row] for row in rows])
    return cut_batch(step, tokens, targets, micro_batch_size=micro_batch_size, ranks=ranks)


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
        torch.manual_seed(0)
        model = Transformer(Config.preset("tiny", n_layers=1))
        compiled = xtrain.compile(model, dropout=0.3, seed=5, backend="eager")
        step = cut_batch(3, tokens, ignored, micro_batch_size=1)
        if normal_alone:
            step = StepBatch(3, step.micro_batches[1:], 8)
        result = updater(compiled).step(step)
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
    for size in (4, 2, 1):
        torch.manual_seed(0)
        model = Transformer(Config.preset("tiny", n_layers=1))
        compiled = xtrain.compile(model, dropout=0.5, seed=1, backend="eager")
        updater(compiled).step(cut_batch(2, tokens, targets, micro_batch_size=size))
        gradients[size] = torch.cat([p.grad.flatten() for p in model.parameters()])
    for size in (2, 1):
        torch.testing.assert_close(gradients[size], gradients[4], rtol=1e-4, atol=1e-7)
    torch.manual_seed(0)
    model = Transformer(Config.preset("tiny", n_layers=1))
    compiled = xtrain.compile(model, dropout=0.5, seed=1, backend="eager")
    updater(compiled).step(cut_batch(3, tokens, targets, micro_batch_size=4))
    other = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (other - gradients[4]).norm() > 0.1 * other.norm()  # another step, another mask


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


def test_a_deferred_failure_freezes_the_weights_until_it_is_seen():
    """How a GPU runs: the update is queued before the loss is known; the flag is sticky."""

    class Breaks(TokenLosses):
        def forward(self, tokens, targets, *, return_logits):
            return None, self.weight.sum() * tokens.float().mean().log().reciprocal()  # 1: infinite

    model = Breaks()
    optimizer = build_adamw(model, OptimSection(learning_rate=0.1), compiled=False)
    update = Updater(model, optimizer, schedule=schedule(), deferred=True, grad_clip=1.0)
    fine = update.step(batch_of([[2]], 1, step=0))
    assert math.isfinite(fine.values()[0])
    before = model.weight.item(), optimizer.state[model.weight]["exp_avg"].item()
    assert before[0] != 1.0
    broken = update.step(batch_of([[1]], 1, step=1))
    later = update.step(batch_of([[2]], 1, step=2))  # queued before anybody looked
    assert (model.weight.item(), optimizer.state[model.weight]["exp_avg"].item()) == before
    with pytest.raises(TrainingError, match="step 1: the loss is not finite"):
        broken.values()
    assert math.isfinite(later.values()[0])


def test_bf16_autocast_keeps_master_weights_in_fp32():
    rng = np.random.default_rng(0)
    batch = cut_batch(0, *rng.integers(0, 16, (2, 4, 8)), micro_batch_size=2)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = Transformer(Config.preset("tiny", n_layers=1))
        compiled = xtrain.compile(model, dropout=0.1, seed=0, backend="eager")
        optimizer = build_adamw(model, OptimSection(learning_rate=0.01), compiled=False)
        update = Updater(
            compiled,
            optimizer,
            schedule=schedule(0.01),
            autocast=lambda d=dtype: torch.autocast("cpu", d, enabled=d is not torch.float32),
        )
        losses[dtype] = update.step(batch).values()[0]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
        tensors += named_state(optimizer, parameter_names(model)).values()
        assert {t.dtype for t in tensors} == {torch.float32}
    assert losses[torch.bfloat16] != losses[torch.float32]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=1e-2)


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
