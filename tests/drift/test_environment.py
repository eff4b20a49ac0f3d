"""The environment is complete where it can choose a kernel, and silent about the rest."""

from __future__ import annotations

import json

import pytest
import torch
from drift_models import decoder, tokens

from xtrain.drift import compare, record
from xtrain.drift.recording.environment import collect, driver_version

EXPECTED = """python.version package.torch package.triton package.transformers package.numpy
cpu.model cpu.flags torch.version torch.git torch.build torch.blas torch.mkl torch.onednn
torch.aten_cpu_capability threads.intra threads.inter precision.float32_matmul
precision.cuda_matmul_tf32 precision.cudnn_tf32 deterministic.algorithms
deterministic.cudnn_benchmark cuda.version cuda.driver cuda.gpus cuda.cudnn sdpa.flash""".split()
KERNELS = """ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE
MKL_CBWR MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS OMP_NUM_THREADS OMP_SCHEDULE KMP_AFFINITY
OPENBLAS_CORETYPE CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
TORCHINDUCTOR_MAX_AUTOTUNE TRITON_INTERPRET PYTORCH_CUDA_ALLOC_CONF GLIBC_TUNABLES
NPY_DISABLE_CPU_FEATURES LD_PRELOAD""".split()
# torch sets CUDA_MODULE_LOADING when it first uses a GPU
NO_KERNEL = """TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TORCH_LOGS CUDA_HOME CUDA_MODULE_LOADING
CUDA_VISIBLE_DEVICES HOME HOSTNAME""".split()
SECRETS = ["TORCH_HUB_TOKEN", "NVIDIA_API_KEY", "XTRAIN_PASSWORD", "HF_TOKEN"]


def test_what_is_there_and_that_it_is_json():
    found = collect()
    assert set(found) >= set(EXPECTED)
    assert found["torch.version"] == torch.__version__
    assert found["threads.intra"] == torch.get_num_threads()
    assert found == json.loads(json.dumps(found)) == collect()


def test_every_variable_that_selects_a_kernel_and_no_other(monkeypatch):
    for name in (*KERNELS, *NO_KERNEL, *SECRETS):
        monkeypatch.delenv(name, raising=False)
    before = collect()
    for name in (*KERNELS, *NO_KERNEL, *SECRETS):
        monkeypatch.setenv(name, "a value")
    found = collect()
    assert {name: found[name] for name in found.keys() - before.keys()} == {
        f"env.{name}": "a value" for name in KERNELS
    }
    assert {name: found[name] for name in before} == before


def test_switches_are_read_where_they_are_set():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        found = collect()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert found["precision.float32_matmul"] == "medium"
    assert found["deterministic.algorithms"] is True and found["deterministic.warn_only"] is True


def test_modes_that_change_numbers_are_part_of_it():
    """A record under autocast, or with denormals flushed, differs by nothing else that is kept."""
    assert torch.set_flush_denormal(True), "x86 can"
    try:
        flushed = collect()
    finally:
        torch.set_flush_denormal(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = collect()
    fast, plan = torch.backends.mha.get_fastpath_enabled(), torch.backends.opt_einsum.enabled
    try:
        torch.backends.mha.set_fastpath_enabled(not fast)
        torch.backends.opt_einsum.enabled = False
        other = collect()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.opt_einsum.enabled = plan
    usual = collect()
    changed = [{n for n in usual if found[n] != usual[n]} for found in (flushed, cast, other)]
    assert changed[0] == {"precision.flush_denormal"} and flushed["precision.flush_denormal"]
    assert changed[1] == {"precision.autocast_cpu"} and cast["precision.autocast_cpu"] == "bfloat16"
    assert usual["precision.autocast_cpu"] is None
    einsum = {"einsum.strategy"} if torch.backends.opt_einsum.is_available() else set()
    assert changed[2] == {"sdpa.mha_fastpath"} | einsum


def test_two_records_that_autocast_alone_tells_apart():
    model, x = decoder(), tokens()
    plain = record(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = record(model, x)
    changes = compare(plain, cast).environment_changes
    assert changes == [("precision.autocast_cpu", None, "bfloat16")]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)", "580.95.05"),
        (
            "NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
            "535.183.01",
        ),
        ("NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build", "570.86.15"),
        ("something else 1.2.3 ", None),
    ],
)
def test_the_driver_is_no_part_of_the_architectures_name(line, version):
    """Forms of the line in /proc; the second line there names the compiler."""
    assert driver_version(f"NVRM version: {line}\nGCC version:  gcc 12.3.0\n") == version
