"""The trainer on a GPU: bf16, no waiting for the device, exact repeats and resume."""

from __future__ import annotations

import json
import math

import pytest
import torch

from xtrain import checkpoint
from xtrain.config import OptimSection
from xtrain.model import Config, Transformer
from xtrain.optim import Schedule, build_adamw
from xtrain.training.loader import Loader
from xtrain.training.update import TrainingError, Updater

pytestmark = pytest.mark.gpu

FLAGS = ("--dropout=0.2", "--device=cuda", "--set=train.micro_batch_size=2")


def newest(runner, name):
    path, _ = checkpoint.newest_complete(runner.run(name) / "checkpoints")
    return checkpoint.read(path)


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
def test_a_bf16_run_learns(runner, capsys, compiled):
    flags = ("--steps=60", "--set=train.eval_interval=20", "--set=train.sample_tokens=20")
    assert runner("--name=gpu", compiled, *flags, *FLAGS) == 0
    out = capsys.readouterr().out
    assert "dtype bf16" in out and "text after training" in out
    records = runner.records("gpu")
    assert [record["step"] for record in records] == list(range(60))
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    assert all(record["peak_memory_gib"] > 0 for record in records)
    assert {r["step"] for r in records if "val_loss" in r} == {19, 39, 59}
    tensors = newest(runner, "gpu").tensors
    assert {t.dtype for t in (tensors["model"] | tensors["optimizer"]).values()} == {torch.float32}


def test_ten_deterministic_steps_are_five_and_five(runner):
    """Rows C43 and C58 on a GPU, with the deterministic switch."""
    flags = (*FLAGS, "--deterministic", "--set=optim.schedule_steps=10")
    for name in ("one", "two"):
        assert runner(f"--name={name}", "--steps=10", *flags) == 0
    assert runner("--name=parts", "--steps=5", *flags) == 0
    assert runner(f"--resume={runner.run('parts')}", "--steps=10") == 0
    one = newest(runner, "one").tensors
    for name in ("two", "parts"):
        assert runner.losses(name) == runner.losses("one")
        for group, tensors in newest(runner, name).tensors.items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, one[group][key]), (group, key)


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
def test_twenty_deterministic_steps_are_equal(runner, compiled):
    """Row C58: losses and weights, with cold and with warm compile caches."""
    from torch._inductor.utils import fresh_cache

    flags = (*FLAGS, compiled, "--steps=20", "--deterministic")
    with fresh_cache():
        for name in ("cold", "warm"):
            torch._dynamo.reset()
            assert runner(f"--name={name}", *flags) == 0
    assert runner.losses("warm") == runner.losses("cold") and len(runner.losses("cold")) == 20
    cold, warm = newest(runner, "cold").tensors, newest(runner, "warm").tensors
    for group, tensors in warm.items():
        assert all(torch.equal(tensor, cold[group][key]) for key, tensor in tensors.items()), group


def test_first_losses_are_those_of_the_cpu(runner):
    """One seed: the same weights, batches and masks on both; fp32 differs by rounding alone."""
    for device in ("cpu", "cuda"):
        flags = ("--steps=5", "--dropout=0.2", "--dtype=fp32", "--set=optim.learning_rate=1e-4")
        assert runner(f"--name={device}", f"--device={device}", *flags) == 0
    assert runner.losses("cuda") == pytest.approx(runner.losses("cpu"), rel=1e-5)


class Numbers:
    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 16, (4, 17), generator=generator).numpy()
        return tokens[:, :-1], tokens[:, 1:]


def updater(model):
    optimizer = build_adamw(model, OptimSection(learning_rate=1e-3), compiled=False)
    schedule = Schedule(kind="constant", peak=1e-3, minimum=0, warmup_steps=0, total_steps=9)
    model.set_step = lambda step, first_sample: None
    return Updater(model, optimizer, schedule=schedule, grad_clip=1.0)


def test_a_step_never_waits_for_the_device():
    """torch raises at the first synchronisation."""
    model = Transformer(Config.preset("tiny")).cuda()
    update = updater(model)
    loader = Loader(Numbers(), micro_batch_size=2, device=torch.device("cuda"))
    batches = loader.steps(0, 4)
    results = [update.step(next(batches))]  # the lazy start-up of libraries may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        results += [update.step(batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [result.values()[0] for result in results]
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == 4


def test_a_failure_seen_late_has_not_reached_the_weights():
    model = Transformer(Config.preset("tiny")).cuda()
    update = updater(model)
    loader = Loader(Numbers(), micro_batch_size=4, device=torch.device("cuda"))
    first, second, third = loader.steps(0, 3)
    update.step(first).values()
    with torch.no_grad():
        model.norm.weight[0] = math.inf
    before = [p.detach().clone() for p in model.parameters()]
    broken = update.step(second)
    update.step(third)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(TrainingError, match="step 1: the loss is not finite"):
        broken.values()


def test_records_are_json(runner):
    assert runner("--name=lines", "--steps=3", *FLAGS) == 0
    for line in (runner.run("lines") / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step_time_ms"] > 0
