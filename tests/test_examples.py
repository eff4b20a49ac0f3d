"""The examples: each framework against one plain loop with masks from NumPy.

The truth is a transformers Llama whose output projections carry hooks that multiply by the masks of
mask_oracle: no xtrain.compile, no framework. A framework that bypassed the CompiledModel, took
other rows or drew other masks would leave its losses.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from mask_oracle import keep_mask
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer
from transformers.trainer_callback import PrinterCallback

import xtrain
from xtrain.rng import site_seed

ROOT = Path(__file__).parent.parent
NAMES = ["bare_loop", "accelerate_loop", "hf_trainer", "lightning_module"]
STEPS, BATCH, ACCUMULATE = 4, 4, 2
SMALL = ["--steps", str(STEPS), "--length", "16", "--dropout", "0.3", "--backend", "eager"]
# fp32 against other orders of summation over four steps; other masks are further away at each step.
LOSS_ATOL = 2e-5
PRINTED_ATOL = LOSS_ATOL + 5e-5  # four decimals


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def example(monkeypatch):
    """A function that runs an example's main and gives its Outcome."""

    def run_example(name, *flags):
        module, outcomes = importlib.import_module(name), []
        run = module.run
        with monkeypatch.context() as patch:
            patch.setattr(module, "run", lambda a: outcomes.append(run(a)) or outcomes[0])
            assert module.main([*SMALL, *flags]) == 0
        return outcomes[0]

    return run_example


@pytest.fixture(scope="module")
def common():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module("common")


@pytest.fixture(scope="module")
def truth(common):
    """Losses and held-out loss of the plain loop, and those with the masks of another seed."""
    arguments = common.parser("").parse_args(SMALL)
    return tuple(_plain_loop(common, arguments, mask_seed) for mask_seed in (0, 1))


def run_as_typed(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def printed_losses(text):
    found = re.search(r"^loss (\S+) -> (\S+) in 4 steps$", text, re.M)
    return [float(loss) for loss in found.groups()]


def _plain_loop(common, arguments, mask_seed):
    model = common.build_model(arguments)
    rows, held_out = common.load_rows(arguments)
    step = 0

    def dropped(layer, site):
        def hook(module, inputs, output):
            if module.training:
                seed = site_seed(mask_seed, step, layer, site)
                return output * torch.from_numpy(keep_mask(output.shape, 0.3, seed)) / 0.7

        return hook

    for i, block in enumerate(model.model.layers):
        block.self_attn.o_proj.register_forward_hook(dropped(i, "attention"))
        block.mlp.down_proj.register_forward_hook(dropped(i, "feed_forward"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    model.train()
    for step, batch in enumerate(rows.split(BATCH * ACCUMULATE)):  # noqa: B007
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model.eval()(input_ids=held_out, labels=held_out).loss.item(), held_out


def test_the_truth_tells_masks_apart(truth):
    (losses, _, _), (others, _, _) = truth
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    assert min(differences) > LOSS_ATOL and max(differences) > 100 * LOSS_ATOL, differences


@pytest.mark.parametrize("name", NAMES)
def test_losses_sites_and_saved_weights(name, example, common, truth, tmp_path):
    """Of a saved model: from_pretrained gives eval mode, which a framework may keep.

    No site would be executed then.
    """
    losses, held_out_loss, held_out = truth[0]
    common.build_model(common.parser("").parse_args(SMALL)).save_pretrained(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--output", str(tmp_path / "saved"))
    outcome = example(name, *flags)
    assert outcome.losses == pytest.approx(losses, abs=LOSS_ATOL)
    assert outcome.losses[-1] < outcome.losses[0] - 0.2
    assert outcome.num_sites == 4
    assert outcome.sites.training == [4] * (STEPS * ACCUMULATE)
    assert outcome.sites.evaluation == [0] * 8
    assert outcome.held_out[0] == outcome.held_out[1]
    assert outcome.held_out[0] == pytest.approx(held_out_loss, abs=LOSS_ATOL)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is LlamaForCausalLM
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    state = loaded.state_dict()
    assert state.keys() - stored.keys() == {"lm_head.weight"}, "tied: stored once"
    assert all(torch.equal(state[key], tensor) for key, tensor in stored.items())
    with torch.no_grad():
        plain = loaded.eval()(input_ids=held_out, labels=held_out).loss.item()
    assert plain == pytest.approx(outcome.held_out[0], abs=LOSS_ATOL)


@pytest.mark.parametrize("batch, accumulate", [(8, 1), (2, 4)])
def test_the_cut_into_micro_batches_changes_nothing(batch, accumulate, example, truth, tmp_path):
    flags = ["--batch", str(batch), "--accumulate", str(accumulate), "--output", str(tmp_path)]
    assert example("bare_loop", *flags).losses == pytest.approx(truth[0][0], abs=LOSS_ATOL)


@pytest.mark.parametrize("name", ["accelerate_loop", "hf_trainer"])
def test_two_ranks_find_the_losses_of_one(name, truth, tmp_path):
    """torchrun, DDP by accelerate: half a batch each."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"examples/{name}.py", *SMALL, "--batch=2", "--output", str(tmp_path)]
    done = run_as_typed(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = truth[0][0]
    expected = pytest.approx([losses[0], losses[-1]], abs=PRINTED_ATOL)
    assert printed_losses(done.stdout) == expected
    assert "training:   8 forwards, 4 of 4 residual sites executed in each" in done.stdout
    assert done.stdout.count("bit for bit") == 1, "the first rank prints"


def test_mixed_precision_by_accelerate_keeps_the_sites(example, truth, tmp_path):
    outcome = example("accelerate_loop", "--mixed-precision", "bf16", "--output", str(tmp_path))
    assert outcome.sites.training == [4] * (STEPS * ACCUMULATE)
    assert outcome.losses == pytest.approx(truth[0][0], rel=2**-8), "one rounding to bf16"
    assert outcome.losses != pytest.approx(truth[0][0], abs=1e-6)


def test_adapters_by_trainer(example, tmp_path):
    outcome = example("hf_trainer", "--lora", "--output", str(tmp_path))
    assert outcome.sites.training == [4] * (STEPS * ACCUMULATE)
    assert outcome.losses[-1] < outcome.losses[0]
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert len(names) == 2 * 2 * 7 and all("lora_" in name for name in names)
    assert not (tmp_path / "model.safetensors").exists()


def test_inductor_by_default_and_a_model_of_ones_own(example, truth, tmp_path):
    """The command of the README, then its result as --model, with a text as --data."""
    flags = ["--steps=4", "--length=16", "--dropout=0.3", "--output", str(tmp_path / "a")]
    # no pool of compile processes: each would import torch for this one graph
    done = run_as_typed("examples/bare_loop.py", *flags, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = truth[0][0]
    expected = pytest.approx([losses[0], losses[-1]], abs=PRINTED_ATOL)
    assert printed_losses(done.stdout) == expected
    (tmp_path / "text").write_text("def f(x):\n    return x + 1\n\n\n" * 100)
    flags = ["--model", str(tmp_path / "a"), "--data", str(tmp_path / "text")]
    again = example("bare_loop", *flags, "--output", str(tmp_path / "b"))
    assert again.losses[0] < losses[0] - 0.2


@pytest.mark.parametrize("name", NAMES)
def test_help_and_errors(name, capsys, tmp_path):
    main = importlib.import_module(name).main
    for flags, code in ((["--help"], 0), (["--steps", "0"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        assert stop.value.code == code
    said = capsys.readouterr()
    assert "--model FOLDER" in said.out
    assert "--steps: got '0'; give a whole number of 1 or more\n" in said.err
    for flag, advice in (("--model", "save_pretrained"), ("--data", "name a text file")):
        assert main([*SMALL, flag, str(tmp_path / "absent"), "--output", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {flag} {tmp_path}/absent: ") and advice in error
        assert error.count("\n") == 1
    (tmp_path / "short").write_text("x" * 100)
    assert main([*SMALL, "--data", str(tmp_path / "short"), "--output", str(tmp_path)]) == 2
    assert "error: the text has 6 rows of 16 tokens and 16 are held out" in capsys.readouterr().err


def test_trainer_resumes_with_the_same_masks(common, tmp_path):
    """From a checkpoint of the second step, recomputing activations: the same weights, bitwise."""
    hf_trainer = importlib.import_module("hf_trainer")
    arguments = common.parser("").parse_args([*SMALL, "--output", str(tmp_path)])
    rows, held_out = common.load_rows(arguments)
    states = []
    for checkpoint, recompute in ((None, False), (str(tmp_path / "checkpoint-2"), True)):
        model = common.build_model(arguments)
        compiled = xtrain.compile(model, dropout=0.3, seed=0, backend="eager")
        args = hf_trainer.settings(arguments)
        args.save_strategy, args.save_steps, args.gradient_checkpointing = "steps", 2, recompute
        trainer = Trainer(
            model=compiled,
            args=args,
            train_dataset=hf_trainer.examples(rows),
            callbacks=[hf_trainer.NameRows(compiled)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert model.is_gradient_checkpointing == recompute
        assert trainer.state.global_step == STEPS
        states.append(model.state_dict())
    fresh = common.build_model(arguments).state_dict()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert not any(torch.equal(fresh[name], tensor) for name, tensor in states[0].items())


# --- as it is typed, for one step of a model of real size, on a GPU -------------------------------


N_LAYERS = 22


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained Llama of 1.1 B parameters in bf16, as save_pretrained writes it."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    path = tmp_path_factory.mktemp("llama")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    torch.cuda.empty_cache()
    return path


@contextlib.contextmanager
def lane(factory, number):
    """Wait until no other worker's test is in this lane: two such models fit beside each other."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / f"lane_{number}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name,flags,number",
    [
        ("bare_loop", [], 0),
        ("accelerate_loop", [], 1),
        ("hf_trainer", [], 0),
        ("hf_trainer", ["--lora"], 1),
        ("lightning_module", [], 1),
    ],
)
def test_one_step_of_real_size(name, flags, number, folder, tmp_path_factory, tmp_path):
    """Two residual sites a layer run in each training forward and none in an evaluation."""
    if name == "lightning_module":
        pytest.importorskip("pytorch_lightning")
    command = [sys.executable, f"examples/{name}.py", f"--model={folder}", *flags]
    command += ["--steps=1", "--batch=2", "--accumulate=2", "--length=2048"]
    command += ["--learning-rate=2e-5", f"--output={tmp_path / 'out'}"]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with lane(tmp_path_factory, number):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sites = 2 * N_LAYERS
    assert f"training:   2 forwards, {sites} of {sites} residual sites" in done.stdout, done.stdout
    assert "0 sites executed in each" in done.stdout and "(identical)" in done.stdout
    losses = re.search(r"loss ([\d.]+) -> ", done.stdout)
    assert losses is not None and 9 < float(losses[1]) < 12  # ln 32000 is 10.4
