"""Speed, memory and MFU: formulas on numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from xtrain import metrics
from xtrain.model import Config, Transformer


def test_flops_per_token_and_mfu_by_hand():
    flops = metrics.flops_per_token(1e8, n_layers=10, width=1000, seq_len=1000)
    assert flops == 7.2e8
    one = metrics.mfu(100_000, flops, 989e12)
    eight = metrics.mfu(100_000, flops, 989e12, num_devices=8)
    assert metrics.format_mfu(one) == "7.28%" and metrics.format_mfu(eight) == "0.91%"


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_model_flops_equal_torchs_count(tie_embeddings):
    config = Config.preset(
        "tiny", n_kv_heads=1, head_dim=24, vocab_size=40, tie_embeddings=tie_embeddings
    )
    model, (batch, length) = Transformer(config), (2, 12)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    # The backend that makes plain matrix products, which the counter knows on every device.
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(tokens, tokens)[1].backward()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    # 6 N counts the norms' weights, which enter no matrix product.
    expected = metrics.model_flops_per_token(config, length) - 6 * norms
    assert counter.get_total_flops() == batch * length * expected


def test_recompute_does_not_raise_flops():
    without, full = (Config.preset("tiny", recompute=value) for value in ("none", "full"))
    assert metrics.model_flops_per_token(without, 64) == metrics.model_flops_per_token(full, 64)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_peak_of_device_names(name, tera):
    peak = metrics.peak_flops_of(name)
    assert peak is None if tera is None else peak == tera * 1e12


def test_cpu_has_no_peak_and_shows_not_available():
    assert metrics.device_peak_flops("cpu") is None
    meter = metrics.SpeedMeter(7.2e8, peak_flops=metrics.device_peak_flops("cpu"))
    speed = meter.record(0.5, 1000)
    assert speed.mfu is None and speed.to_dict()["mfu_percent"] is None
    assert (speed.tokens_per_s, speed.step_time_ms) == (2000, 500)
    assert metrics.format_mfu(speed.mfu) == "n/a"


def test_meter_leaves_the_first_step_out():
    meter = metrics.SpeedMeter(7.2e8, peak_flops=989e12, num_devices=8)
    first = meter.record(60.0, 1000)
    assert meter.summary() is None and first.step_time_ms == 60_000
    meter.record(0.01, 1000)
    meter.record(0.03, 3000)
    summary = meter.summary()
    assert summary.tokens_per_s == pytest.approx(100_000)  # 4000 tokens in 0.04 s
    assert summary.step_time_ms == pytest.approx(20)
    assert summary.to_dict()["mfu_percent"] == pytest.approx(0.91, abs=0.001)
    assert meter.first_step_time_s == 60.0


def test_meter_errors():
    with pytest.raises(ValueError, match="num_devices .* got 0"):
        metrics.SpeedMeter(1.0, num_devices=0)
    with pytest.raises(ValueError, match="step_time_s .* got 0"):
        metrics.SpeedMeter(1.0).record(0.0, 10)


def test_cpu_peak_memory_follows_the_resident_size():
    # In a process of its own: the peak of this one never falls. This one holds 1/4 GiB meanwhile,
    # which must not count as the child's.
    mine = np.ones(2**25)
    code = (
        "import numpy as np; from xtrain.metrics import peak_memory_gib as peak; a = peak('cpu');"
        "b = np.ones(2**25); print(a, peak('cpu'))"  # 1/4 GiB of doubles
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    before, after = map(float, output.split())
    assert mine.size == 2**25
    assert after - before == pytest.approx(0.25, abs=0.02) and before < 0.2


@pytest.mark.gpu
def test_cuda_peak_memory_counts_tensors():
    metrics.reset_peak_memory("cuda")
    before = metrics.peak_memory_gib("cuda")
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert metrics.peak_memory_gib("cuda") - before == pytest.approx(0.25, abs=0.01)
    del block
    metrics.reset_peak_memory("cuda")
    assert metrics.peak_memory_gib("cuda") == pytest.approx(before, abs=0.01)
