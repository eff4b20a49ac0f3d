"""The training command as a user meets it: help, mistakes, a whole run, what it leaves behind."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from xtrain import checkpoint, train
from xtrain.config import RunConfig
from xtrain.data import Batches, load_tokenizer
from xtrain.model import Config, Transformer
from xtrain.training import console, loop
from xtrain.training.run_folder import RunFolder, metrics_line
from xtrain.training.update import Updater

# --- the command line ---------------------------------------------------------------------------


def test_help_is_quick_and_imports_no_torch():
    script = """
import sys
from xtrain import generate, train
for command in (train, generate):
    try:
        command.main(["--help"])
    except SystemExit as stop:
        assert stop.code == 0
assert not {"torch", "triton", "numpy", "safetensors"} & set(sys.modules)
"""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("train", "generate"):
        assert f"usage: python -m xtrain.{command}" in done.stdout
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--stepz", "3"], "unknown argument '--stepz'; did you mean --steps"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps", "0"], "train.steps must be at least 1, got 0"),
        (["--dropout", "1.5"], "model.dropout must be at most 1, got 1.5"),
        (["--preset", "smal"], "did you mean small?"),
        (["--recompute", "some"], "model.recompute must be none, full or a number of layers"),
        (["--set", "train.stesp=3"], "did you mean train.steps"),
        (["--config", "nowhere.toml"], "cannot read the configuration nowhere.toml: No such file"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer", "bpe:12"], "N must be from 257"),
        (["--device", "tpu"], "run.device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:97"], "run.device is cuda:97, but torch .* finds . CUDA devices"),
        (["--disable-pass", "insert"], "unknown pass 'insert' in run.disable_passes; known: ins"),
        (["--preset", "tiny", "--set", "model.n_heads=3"], "model.dim must be a multiple of n_he"),
        (["--resume", "gone"], "--resume found no run 'gone'"),
        (["--resume", "--config", "x.toml"], "no --config|cannot read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(runner, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(runner.folder)
    base = [] if {"--data", "--tokenizer"} & set(arguments) else [f"--data={runner.corpus}"]
    base += ["--device=cpu"] if "--device" not in arguments else []
    try:
        code = train.main([*base, *arguments, f"--set=data.cache_dir={runner.folder}"])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    runs = runner.folder / "runs"
    assert not runs.exists() or not list(runs.iterdir())  # a failed start leaves no folder


def test_flags_reach_their_fields():
    parser = train.build_parser()
    args = parser.parse_args(
        "--preset 124m --data a b --data c --compile --no-deterministic --recompute 3 "
        "--disable-pass x --disable-pass y --verify --dump-graphs d --set optim.grad_clip=0".split()
    )
    config = RunConfig().override(train.overrides(args))
    assert config.model.preset == "124m" and config.model.recompute == 3
    assert config.data.paths == ("a", "b", "c")
    assert config.run.compile is True and config.run.deterministic is False
    assert config.run.disable_passes == ("x", "y") and config.run.dump_graphs == "d"
    assert config.optim.grad_clip == 0.0 and config.run.verify is True
    assert RunConfig().override(train.overrides(parser.parse_args([]))) == RunConfig()


# --- a run --------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_folder(runner, capsys):
    graphs = runner.folder / "graphs"
    code = runner(
        "--name=first",
        "--steps=60",
        "--dropout=0.1",
        "--dtype=bf16",
        f"--dump-graphs={graphs}",
        "--set=train.eval_interval=20",
        "--set=train.micro_batch_size=2",
        "--set=train.sample_tokens=30",
        "--set=checkpoint.interval=25",
    )
    out = capsys.readouterr().out
    assert code == 0
    run = runner.run("first")

    records = runner.records("first")
    assert [record["step"] for record in records] == list(range(60))
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)  # nothing known yet: 256 bytes
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    assert {r["step"]: r["val_loss"] for r in records if "val_loss" in r}.keys() == {19, 39, 59}
    assert [record["compile"] for record in records] == [True, *[False] * 59]
    assert [record["tokens"] for record in records] == [64 * (i + 1) for i in range(60)]
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(64 / record["step_time_ms"] * 1e3)
        assert record["grad_norm"] > 0 and record["peak_memory_gib"] > 0
        assert record["mfu_percent"] is None

    saved = RunConfig.load(run / "config.toml")
    assert (saved.model.dim, saved.model.vocab_size, saved.run.name) == (32, 256, "first")
    assert f'torch = "{torch.__version__}"' in (run / "config.toml").read_text()
    assert [p.name for _, p in checkpoint.steps(run / "checkpoints")] == [
        "step_00000050",
        "step_00000060",
    ]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_tokenizer(run / "tokenizer.json").name == "byte"
    assert any(path.suffix == ".py" for path in graphs.rglob("*.py"))

    expected = [  # in this order
        f"torch {torch.__version__}",
        "configuration:",
        "model:      preset tiny, dim 32",
        "corpus.txt",
        "text before training",
        "insert_residual_dropout: 2 matched, 2 replaced",
        "blocks.0.attention",
        "blocks.0.feed_forward",
        "step 1/60",
        "step 20/60  validation loss",
        "text after training",
        "done: step 60, 3,840 tokens",
        "training loss",
        f"python -m xtrain.train --resume {run}",
    ]
    position = 0
    for text in expected:
        position = out.find(text, position)
        assert position >= 0, text


def test_a_name_is_never_used_twice(runner, capsys, untrained):
    assert runner("--name=mine", "--steps=1") == 0
    before = (runner.run("mine") / "metrics.jsonl").read_text()
    assert runner("--name=mine", "--steps=1") == 2
    error = capsys.readouterr().err
    assert "exists already: add --resume to continue that run, or choose another --name" in error
    assert (runner.run("mine") / "metrics.jsonl").read_text() == before
    assert [runner("--name=a/b", "--steps=1"), runner("--name=..", "--steps=1")] == [2, 2]
    assert [runner("--steps=1"), runner("--steps=1")] == [0, 0]
    assert sorted(p.name for p in (runner.folder / "runs").iterdir()) == ["mine", "tiny", "tiny-2"]


def assert_equal_runs(runner, first, second):
    assert runner.losses(first) == runner.losses(second)
    assert len(set(runner.losses(first))) == len(runner.losses(first)) >= 20
    one, two = (runner.newest(name) for name in (first, second))
    for group in ("model", "optimizer"):
        for key, tensor in one.tensors[group].items():
            assert torch.equal(tensor, two.tensors[group][key]), key


def test_thirty_compiled_steps_compile_once(runner, monkeypatch, caplog):
    """Row C12: step, seed and learning rate are values, not constants; masks change each step.

    --verify holds the first step, and no later one, against the graph without swaps.

    Row C58: the run again, its kernels from the cache now, is bitwise the same.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(runner.folder / "inductor"))
    compiles = []
    original = Updater.step
    tokens, targets = torch.arange(64).reshape(4, 16), torch.arange(1, 65).reshape(4, 16)

    def step(self, batch):
        result, compiled, losses = original(self, batch), self.model, []
        for key in (batch.step, batch.step, batch.step + 1):  # the same weights: masks alone differ
            compiled.set_step(key, first_sample=0)
            losses.append(compiled(tokens, targets, return_logits=False)[1].item())
        assert losses[0] == losses[1] != losses[2]
        compiles.append(counters["stats"]["unique_graphs"])
        verified = compiled.report().verification
        swapped = verified.num_losses == 1
        assert (verified.num_losses, verified.failures, verified.left_out) == (swapped, [], [])
        assert verified.num_gradients == len(self.parameters) * swapped
        swaps.append(swapped)
        return result

    swaps: list[bool] = []
    monkeypatch.setattr(Updater, "step", step)
    flags = ("--steps=30", "--dropout=0.2", "--compile", "--verify")
    torch._logging.set_logs(recompiles=True)
    try:
        with caplog.at_level(logging.DEBUG, logger="torch._dynamo"):
            for name in ("cold", "warm"):
                torch._dynamo.reset()
                counters.clear()
                assert runner(f"--name={name}", *flags) == 0
                caches = counters["inductor"]
                assert (caches["fxgraph_cache_miss"] > 0, caches["fxgraph_cache_hit"] > 0) == (
                    name == "cold",
                    name == "warm",
                )
    finally:
        torch._logging.set_logs()
    assert compiles == [1] * 60 and all(swaps)
    assert not [r for r in caplog.records if "Recompiling" in r.getMessage()]
    assert_equal_runs(runner, "cold", "warm")

    # row C47: what was saved compiled goes on eagerly, and is saved under the same names
    assert runner("--resume=warm", "--steps=31", "--no-compile") == 0
    eager, compiled = (runner.newest(name) for name in ("warm", "cold"))
    assert (eager.step, compiled.step) == (31, 30)
    assert swaps[60:] == [False]  # what runs eagerly has no swaps
    for group, tensors in compiled.tensors.items():
        assert eager.tensors[group].keys() == tensors.keys()


def test_records_one_step_late_are_the_same_records(runner, monkeypatch):
    """As on a GPU, where a step's numbers are read while the next one runs."""
    flags = ("--steps=12", "--set=train.eval_interval=5", "--set=checkpoint.interval=4")
    assert runner("--name=at-once", *flags) == 0
    looked_at = []
    step, record = Updater.step, loop.Trainer._record

    def noted_step(self, batch):
        looked_at.append(f"step {batch.step}")
        return step(self, batch)

    def noted_record(self, batch, result):
        looked_at.append(batch.step)
        return record(self, batch, result)

    monkeypatch.setattr(Updater, "step", noted_step)
    monkeypatch.setattr(loop.Trainer, "_record", noted_record)
    monkeypatch.setattr(loop, "Updater", functools.partial(Updater, deferred=True))
    assert runner("--name=late", *flags) == 0
    assert looked_at[:6] == ["step 0", 0, "step 1", "step 2", 1, "step 3"]
    for at_once, late in zip(runner.records("at-once"), runner.records("late"), strict=True):
        for key in ("step", "loss", "learning_rate", "grad_norm", "tokens", "compile"):
            assert at_once[key] == late[key]
        assert at_once.get("val_loss") == late.get("val_loss")
    assert runner.newest("late").state["data"] == runner.newest("at-once").state["data"]


def test_a_step_without_targets_is_skipped_and_said(runner, monkeypatch, capsys):
    """Row C24: the whole step has no target that counts; the next ones go on."""
    original = Batches.batch

    def batch(self, step):
        inputs, targets = original(self, step)
        return inputs, np.full_like(targets, -100) if step in (0, 2) else targets

    monkeypatch.setattr(Batches, "batch", batch)
    assert runner("--name=skips", "--steps=4", "--dropout=0.1") == 0
    out = capsys.readouterr().out
    assert "warning: step 2 skipped: none of its targets counts" in out
    assert "blocks.0.attention" in out  # the report of the first step that ran
    records = runner.records("skips")
    assert [record["loss"] is None for record in records] == [True, False, True, False]
    assert [record["tokens"] for record in records] == [0, 64, 64, 128]
    moments = runner.newest("skips").tensors["optimizer"]
    assert moments["norm.weight/step"] == 2  # two updates


# --- what goes wrong on the way -----------------------------------------------------------------


def error_line(capsys):
    """What came to stderr last, which is all of the error."""
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(runner, capsys):
    code = runner(
        "--name=bad",
        "--steps=9",
        "--set=optim.learning_rate=1e30",
        "--set=optim.grad_clip=0",
        "--set=optim.schedule=constant",
        "--set=checkpoint.interval=1",
    )
    error = error_line(capsys)
    assert code == 1 and error.startswith("error: step ")
    assert "is not finite" in error and "learning rate 1e+30" in error
    assert "continue with: python -m xtrain.train --resume" in error
    records = runner.records("bad")
    saved = runner.newest("bad")
    assert saved.step == len(records) >= 1  # the step before the failure
    assert all(math.isfinite(record["loss"]) for record in records)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--set=model.vocab_size=100", "model.vocab_size"),
        ("--set=train.seq_len=9000", "too short for one sequence of 9000 + 1 tokens"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(runner, capsys, flag, message):
    assert runner("--name=misfit", flag) == 2
    assert message in error_line(capsys)
    assert not runner.run("misfit").exists()


def test_dropout_without_its_pass_is_one_line(runner, capsys):
    flags = ("--dropout=0.1", "--disable-pass=insert_residual_dropout")
    assert runner("--name=without", "--steps=2", *flags) == 1
    assert "residual site" in error_line(capsys)
    assert runner.records("without") == []


def test_a_full_disk_is_one_line(runner, capsys, monkeypatch, untrained):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", no_space)
        assert runner("--name=full", "--steps=2") == 1
    error = error_line(capsys)
    assert "cannot write the checkpoint of step 2" in error and "No space left" in error
    assert checkpoint.steps(runner.run("full") / "checkpoints") == []
    monkeypatch.setattr(console, "plot_losses", no_space)  # costs the picture alone
    assert runner("--name=plot", "--steps=1") == 0
    assert "warning: cannot write" in capsys.readouterr().out
    monkeypatch.setattr(RunFolder, "open_metrics", lambda *_: open("/dev/full", "w", buffering=1))
    assert runner("--name=metrics", "--steps=1") == 1
    assert re.search(r"cannot write .*No space left.*No checkpoint", error_line(capsys))
    monkeypatch.setattr(RunFolder, "write_config", no_space)
    assert runner("--name=config", "--steps=1") == 1
    assert "No space left" in error_line(capsys) and not runner.run("config").exists()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_processes_is_refused(runner, capsys, monkeypatch, untrained, variable):
    monkeypatch.setenv(variable, "2")
    assert runner("--name=r", "--steps=1") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{variable} is 2: the trainer is one process" in error
    assert not runner.run("r").exists()
    monkeypatch.setenv(variable, "1")
    assert runner("--name=r", "--steps=1") == 0


def test_validation_does_not_depend_on_the_cut(runner, capsys):
    """It is the mean over the windows; the last of them fill no micro-batch."""
    losses = {}
    for micro, batch, count in ((8, 8, 2), (1, 8, 2), (16, 16, 99)):
        name = f"m{micro}"
        sizes = (f"--set=train.batch_size={batch}", f"--set=train.micro_batch_size={micro}")
        options = ("--steps=2", "--set=train.eval_interval=2", f"--set=train.eval_batches={count}")
        assert runner(f"--name={name}", *sizes, *options) == 0
        losses[name] = runner.records(name)[-1]["val_loss"]
    out = capsys.readouterr().out
    assert "residual site" not in out and "matched" not in out  # no dropout: no tables
    everything = losses.pop("m16")
    assert max(losses.values()) - min(losses.values()) < 1e-6
    saved = runner.newest("m16")
    model = Transformer(Config.from_dict(saved.state["model"]))
    model.load_state_dict(saved.tensors["model"])
    ids = np.frombuffer(runner.corpus.read_bytes(), dtype=np.uint8).astype(np.int64)
    held_out = ids[len(ids) - round(0.05 * len(ids)) :]
    count = (len(held_out) - 1) // 16
    assert count % 16  # a last micro-batch that is not full
    inputs = torch.from_numpy(held_out[: count * 16].reshape(count, 16).copy())
    targets = torch.from_numpy(held_out[1 : count * 16 + 1].reshape(count, 16).copy())
    with torch.no_grad():
        assert everything == pytest.approx(model(inputs, targets)[1].item(), abs=1e-5)
    sample = Batches(held_out, seq_len=16, batch_size=8, seed=0)
    inputs, targets = map(torch.from_numpy, sample.samples(0, 16))
    saved = runner.newest("m1")
    model.load_state_dict(saved.tensors["model"])
    with torch.no_grad():
        assert losses["m1"] == pytest.approx(model(inputs, targets)[1].item(), abs=1e-5)


def test_warnings_are_shown_in_one_line(runner, capsys, monkeypatch):
    def train_with_a_warning(config, resume):
        warnings.warn("look\nhere", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(loop, "train", train_with_a_warning)
    assert runner("--steps=1") == 0
    assert "warning: look here (UserWarning, test_train.py:" in capsys.readouterr().out


def test_records_are_json_whatever_the_numbers(tmp_path):
    run = RunFolder(tmp_path)
    with run.open_metrics(0) as file:
        for step in range(5):
            file.write(metrics_line({"step": step, "loss": math.nan if step == 1 else 0.5}))
        assert len(run.metrics.read_text().splitlines()) == 5  # nothing waits in a buffer
    assert json.loads(run.metrics.read_text().splitlines()[1]) == {"step": 1, "loss": None}
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "lo')  # a kill
    with run.open_metrics(3) as file:
        file.write(metrics_line({"step": 3}))
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2, 3]


# --- on a GPU: bf16, no waiting for the device, exact repeats and resume --------------------------


FLAGS = ("--dropout=0.2", "--device=cuda", "--set=train.micro_batch_size=2")


@pytest.mark.gpu
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
    tensors = runner.newest("gpu").tensors
    assert {t.dtype for t in (tensors["model"] | tensors["optimizer"]).values()} == {torch.float32}


@pytest.mark.gpu
def test_ten_deterministic_steps_are_five_and_five(runner):
    """Rows C43 and C58 on a GPU, with the deterministic switch."""
    flags = (*FLAGS, "--deterministic", "--set=optim.schedule_steps=10")
    for name in ("one", "two"):
        assert runner(f"--name={name}", "--steps=10", *flags) == 0
    assert runner("--name=parts", "--steps=5", *flags) == 0
    assert runner(f"--resume={runner.run('parts')}", "--steps=10") == 0
    one = runner.newest("one").tensors
    for name in ("two", "parts"):
        assert runner.losses(name) == runner.losses("one")
        for group, tensors in runner.newest(name).tensors.items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, one[group][key]), (group, key)


@pytest.mark.gpu
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
    cold, warm = runner.newest("cold").tensors, runner.newest("warm").tensors
    for group, tensors in warm.items():
        assert all(torch.equal(tensor, cold[group][key]) for key, tensor in tensors.items()), group


@pytest.mark.gpu
def test_first_losses_are_those_of_the_cpu(runner):
    """One seed: the same weights, batches and masks on both; fp32 differs by rounding alone."""
    for device in ("cpu", "cuda"):
        flags = ("--steps=5", "--dropout=0.2", "--dtype=fp32", "--set=optim.learning_rate=1e-4")
        assert runner(f"--name={device}", f"--device={device}", *flags) == 0
    assert runner.losses("cuda") == pytest.approx(runner.losses("cpu"), rel=1e-5)
