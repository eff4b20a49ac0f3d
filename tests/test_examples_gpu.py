"""Each example as it is typed, for one step of a model of real size on a GPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
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
