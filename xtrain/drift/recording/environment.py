"""Everything outside model and inputs that can choose another kernel, as one flat dictionary.

Names are dotted, values plain JSON. Nothing that differs between two processes of one environment
belongs here: no time, process id, path, load or host name.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "safetensors", "xxhash")
# Families of variables that libraries below torch read to choose kernels, threads or precision.
VARIABLES = re.compile(
    r"(ATEN|ONEDNN|DNNL|MKL|MKLDNN|OMP|GOMP|KMP|LIBOMP|OPENBLAS|GOTO|BLIS|VECLIB|ACCELERATE|NPY|ARM"
    r"|CUBLAS|CUBLASLT|CUDNN|CUDA|CUTLASS|NVIDIA|NVTE|NCCL|ROCBLAS|HIPBLASLT|HIP|HSA|MIOPEN|PYTORCH"
    r"|TORCH|TORCHINDUCTOR|TORCHDYNAMO|TRITON|XLA|XTRAIN|DISABLE_ADDMM_CUDA_LT|GLIBC_TUNABLES"
    r"|TRANSFORMERS|LD_PRELOAD|LD_LIBRARY_PATH|USE_FLASH_ATTENTION|FLASH_ATTENTION)(_.*)?"
)
# Where caches and logs lie chooses no kernel; libraries set some of these for themselves.
NO_KERNEL = re.compile(
    r".*(_DIR|_HOME|_LOGS?|_CACHE\w*|_VISIBLE_DEVICES)|CUDA_(PATH|CACHE_PATH|MODULE_LOADING)"
    r"|GOMP_SPINCOUNT|KMP_(INIT_AT_FORK|DUPLICATE_LIB_OK)"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")


# name -> where torch has it: a value, or a function of nothing; None where this torch has it not
SWITCHES = {
    "torch.version": "__version__",
    "torch.git": "version.git_version",
    "torch.aten_cpu_capability": "backends.cpu.get_cpu_capability",
    "torch.mkl_available": "backends.mkl.is_available",
    "torch.onednn_available": "backends.mkldnn.is_available",
    "torch.onednn_enabled": "backends.mkldnn.enabled",
    "torch.openmp_available": "backends.openmp.is_available",
    "threads.intra": "get_num_threads",
    "threads.inter": "get_num_interop_threads",
    "precision.float32_matmul": "get_float32_matmul_precision",
    "precision.default_dtype": "get_default_dtype",
    "precision.cuda_matmul_tf32": "backends.cuda.matmul.allow_tf32",
    "precision.cudnn_tf32": "backends.cudnn.allow_tf32",
    "deterministic.algorithms": "are_deterministic_algorithms_enabled",
    "deterministic.warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "deterministic.cudnn": "backends.cudnn.deterministic",
    "deterministic.cudnn_benchmark": "backends.cudnn.benchmark",
    "deterministic.cudnn_enabled": "backends.cudnn.enabled",
    **{
        f"sdpa.{name}": f"backends.cuda.{name}_sdp_enabled"
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    **{
        f"precision.allow_{name}_reduction": f"backends.cuda.matmul.allow_{name}_reduction"
        for name in ("fp16_reduced_precision", "bf16_reduced_precision")
    },
    **{  # the newer form of the TF32 switches
        f"precision.{owner}_{kind}": f"backends.{owner}.{kind}.fp32_precision"
        for owner in ("mkldnn", "cuda")
        for kind in ("matmul", "conv", "rnn")
    },
    "sdpa.mha_fastpath": "backends.mha.get_fastpath_enabled",
    "cuda.version": "version.cuda",
    "cuda.hip": "version.hip",
}


def collect() -> dict[str, Any]:
    """Return the environment of this process as torch sees it now."""
    import torch

    found: dict[str, Any] = {**_python(), **_cpu(), **_build()}
    for name, path in SWITCHES.items():
        found[name] = _ask(partial(attrgetter(path), torch))
    found |= {**_modes(), **_cuda()}
    for name, value in sorted(os.environ.items()):
        if VARIABLES.fullmatch(name) and not (NO_KERNEL.fullmatch(name) or SECRET.search(name)):
            found[f"env.{name}"] = value
    return found


def _python() -> dict[str, Any]:
    import xtrain

    found: dict[str, Any] = {
        "python.version": platform.python_version(),
        "python.implementation": platform.python_implementation(),
        "system.kernel": f"{platform.system()} {platform.release()}",
        "system.libc": " ".join(platform.libc_ver()),  # exp, log and pow of the scalar kernels
        "package.xtrain": xtrain.__version__,
    }
    for name in PACKAGES:
        try:
            found[f"package.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[f"package.{name}"] = None
    return found


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {
        "cpu.machine": platform.machine(),
        "cpu.model": fields.get("model name") or platform.processor(),
        # x86 calls them flags, Arm features
        "cpu.flags": sorted((fields.get("flags") or fields.get("Features") or "").split()),
        "cpu.count": os.cpu_count(),
        "cpu.usable": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def _build() -> dict[str, Any]:
    """Return what torch was built with, as far as it decides about kernels."""
    import torch

    build = torch.__config__.show()
    head = [line.strip(" -") for line in build.splitlines()[1:]]
    # the capability in use is a setting of the process and has an entry of its own
    kept = [line for line in head if line and not line.startswith(("Build settings", "CPU cap"))]
    settings = (_first(r"Build settings: ([^\n]*)", build) or "").strip(", ").split(", ")
    decisive = re.compile(r"BLAS_INFO|LAPACK_INFO|PERF_WITH|USE_|BUILD_TYPE")
    parallel = torch.__config__.parallel_info()
    return {
        "torch.build": kept + [part for part in settings if decisive.match(part)],
        "torch.blas": _first(r"BLAS_INFO=(\w+)", build),
        "torch.mkl": _first(r"(Intel\(R\)[^\n]*MKL[^\n]*|oneAPI Math Kernel[^\n]*)", build),
        "torch.onednn": _first(r"MKL-DNN v([^\n]*)", build),
        "threads.parallel_backend": _first(r"ATen parallel backend: (\w+)", parallel),
    }


def _modes() -> dict[str, Any]:
    import torch

    def autocast(device: str) -> Any:
        on = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if on else None

    # there is no switch to read: the smallest number keeps its value or does not
    tiny = torch.full((1,), torch.finfo(torch.float32).smallest_normal / 2, dtype=torch.float32)
    einsum: Any = torch.backends.opt_einsum
    in_use = einsum.is_available() and einsum.enabled
    return {
        "precision.autocast_cpu": _ask(lambda: autocast("cpu")),
        "precision.autocast_cuda": _ask(lambda: autocast("cuda")),
        "precision.flush_denormal": not bool((tiny + 0).count_nonzero()),
        "einsum.strategy": _ask(lambda: einsum.strategy if in_use else None),
    }


def _cuda() -> dict[str, Any]:
    import torch

    cudnn: Any = torch.backends.cudnn
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text(encoding="utf-8", errors="replace") if driver.exists() else ""
    found: dict[str, Any] = {
        "cuda.cudnn": _ask(lambda: cudnn.version() if cudnn.is_available() else None),
        "cuda.gpus": [],
        "cuda.driver": driver_version(text),
    }
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            found["cuda.gpus"].append(f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}")
        found["cuda.blas_library"] = _ask(torch.backends.cuda.preferred_blas_library)
    return found


def driver_version(text: str) -> str | None:
    """Return the version in /proc/driver/nvidia/version, None where it names none.

    The open module's line names the architecture first, whose 64 is no version.
    """
    return _first(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, None where this torch has no such switch or mixes old and new ones."""
    try:
        value = question()
        value = value() if callable(value) else value
    except (AttributeError, RuntimeError):
        return None
    plain = isinstance(value, bool | int | float | str | None)
    return value if plain else str(value).removeprefix("torch.")


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].strip() if match else None
