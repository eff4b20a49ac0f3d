"""Everything outside model and inputs that can choose another kernel, as one flat dictionary.

Names are dotted, values plain JSON. Nothing that differs between two processes of one environment
belongs here: no time, process id, path, load or host name.
"""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
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


def collect() -> dict[str, Any]:
    """Return the environment of this process as torch sees it now."""
    found: dict[str, Any] = {
        **_python(),
        **_cpu(),
        **_torch(),
        **_precision(),
        **_modes(),
        **_cuda(),
    }
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


def _torch() -> dict[str, Any]:
    import torch

    backends: Any = torch.backends
    build = torch.__config__.show()
    return {
        "torch.version": torch.__version__,
        "torch.git": getattr(torch.version, "git_version", None),
        "torch.build": _build_settings(build),
        "torch.blas": _first(r"BLAS_INFO=(\w+)", build),
        "torch.mkl": _first(r"(Intel\(R\)[^\n]*MKL[^\n]*|oneAPI Math Kernel[^\n]*)", build),
        "torch.onednn": _first(r"MKL-DNN v([^\n]*)", build),
        "torch.aten_cpu_capability": backends.cpu.get_cpu_capability(),
        "torch.mkl_available": backends.mkl.is_available(),
        "torch.onednn_available": backends.mkldnn.is_available(),
        "torch.onednn_enabled": backends.mkldnn.enabled,
        "torch.openmp_available": backends.openmp.is_available(),
        "threads.intra": torch.get_num_threads(),
        "threads.inter": torch.get_num_interop_threads(),
        "threads.parallel_backend": _first(
            r"ATen parallel backend: (\w+)", torch.__config__.parallel_info()
        ),
    }


def _build_settings(build: str) -> list[str]:
    """Return what torch was built with, as far as it decides about kernels."""
    head = [line.strip(" -") for line in build.splitlines()[1:]]
    # the capability in use is a setting of the process and has an entry of its own
    kept = [line for line in head if line and not line.startswith(("Build settings", "CPU cap"))]
    settings = (_first(r"Build settings: ([^\n]*)", build) or "").strip(", ").split(", ")
    return kept + [
        part
        for part in settings
        if re.match(r"BLAS_INFO|LAPACK_INFO|PERF_WITH|USE_|BUILD_TYPE", part)
    ]


def _precision() -> dict[str, Any]:
    import torch

    backends: Any = torch.backends
    found: dict[str, Any] = {
        "precision.float32_matmul": torch.get_float32_matmul_precision(),
        "precision.default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "precision.cuda_matmul_tf32": _ask(lambda: backends.cuda.matmul.allow_tf32),
        "precision.cudnn_tf32": _ask(lambda: backends.cudnn.allow_tf32),
        "deterministic.algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic.warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic.cudnn": backends.cudnn.deterministic,
        "deterministic.cudnn_benchmark": backends.cudnn.benchmark,
        "deterministic.cudnn_enabled": backends.cudnn.enabled,
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"sdpa.{name}"] = _ask(getattr(backends.cuda, f"{name}_sdp_enabled", None))
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        found[f"precision.{name}"] = _ask(lambda name=name: getattr(backends.cuda.matmul, name))
    for owner in ("mkldnn", "cuda"):  # the newer form of the TF32 switches
        for kind in ("matmul", "conv", "rnn"):
            value = _ask(lambda o=owner, k=kind: getattr(getattr(backends, o), k).fp32_precision)
            found[f"precision.{owner}_{kind}"] = value
    return found


def _modes() -> dict[str, Any]:
    import torch

    backends: Any = torch.backends
    found: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        found[f"precision.autocast_{device}"] = _ask(lambda device=device: _autocast(device))
    # there is no switch to read: the smallest number keeps its value or does not
    tiny = torch.full((1,), torch.finfo(torch.float32).smallest_normal / 2, dtype=torch.float32)
    found["precision.flush_denormal"] = not bool((tiny + 0).count_nonzero())
    einsum = backends.opt_einsum
    in_use = einsum.is_available() and einsum.enabled
    found["einsum.strategy"] = _ask(lambda: einsum.strategy if in_use else None)
    found["sdpa.mha_fastpath"] = _ask(lambda: backends.mha.get_fastpath_enabled())
    return found


def _autocast(device: str) -> str | None:
    import torch

    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _cuda() -> dict[str, Any]:
    import torch

    version: Any = torch.version
    found: dict[str, Any] = {"cuda.version": version.cuda, "cuda.hip": version.hip}
    cudnn: Any = torch.backends.cudnn
    found["cuda.cudnn"] = _ask(lambda: cudnn.version() if cudnn.is_available() else None)
    available = torch.cuda.is_available()
    found["cuda.gpus"] = []
    if available:
        found["cuda.gpus"] = [
            f"{torch.cuda.get_device_name(i)}, sm_{''.join(map(str, _capability(i)))}"
            for i in range(torch.cuda.device_count())
        ]
        found["cuda.blas_library"] = _ask(lambda: str(torch.backends.cuda.preferred_blas_library()))
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text(encoding="utf-8", errors="replace") if driver.exists() else ""
    found["cuda.driver"] = driver_version(text)
    return found


def driver_version(text: str) -> str | None:
    """Return the version in /proc/driver/nvidia/version, None where it names none.

    The open module's line names the architecture first, whose 64 is no version.
    """
    return _first(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)


def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def _ask(question: Any) -> Any:
    """Return the answer, None where this torch has no such switch or mixes old and new ones."""
    try:
        value = question() if question is not None else None
    except (AttributeError, RuntimeError):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].strip() if match else None
