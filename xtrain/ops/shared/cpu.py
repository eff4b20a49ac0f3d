"""Compiled helpers for eager ops on the CPU, with torch operations to fall back on.

Eager torch needs a dozen passes over memory for one splitmix64; the helper needs one. A C++ file of
this folder is compiled once per user, source, compiler and CPU, and loaded. The library lands in
the user's cache folder under a name that holds a hash of all it depends on, by an atomic rename:
processes that compile at once do the same work twice and both end up right.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("xtrain.ops.cpu.build")

_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Plain IEEE arithmetic: a fused multiply-add or a reassociation would change bits.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
NATIVE = "-march=native"  # the CPU is part of the name, so a shared home folder is safe
COMPILE_TIMEOUT_S = 120


def dropout(x: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor) -> Tensor | None:
    """Return dropout of x, or None when there is no helper (said once) or it lacks the dtype.

    Args:     threshold: keep where the element's 24 random bits are >= threshold, in [0, 2^24].
              scale: what kept elements are multiplied by.
              seed, offset: 0-d int64 on the CPU.
    """
    helper = _dropout_helper()
    code = _DTYPE_CODES.get(x.dtype)
    if helper is None or code is None:
        return None
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # empty_like would keep odd strides
    helper(
        out.data_ptr(),
        x.data_ptr(),
        x.numel(),
        code,
        seed.data_ptr(),
        offset.data_ptr(),
        threshold,
        scale,
        torch.get_num_threads(),
    )
    return out


@cache
def _dropout_helper() -> Any:
    try:
        library = load_library(Path(__file__).with_name("dropout.cpp"))
    except RuntimeError as error:
        warnings.warn(
            f"xtrain: {error}. Eager dropout on the CPU falls back on torch integer operations: "
            "the same masks, several times slower. Install g++ or clang++, or name one in CXX.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    helper = library.xtrain_dropout
    helper.restype = ctypes.c_int
    helper.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_double,
        ctypes.c_int64,
    ]
    return helper


def load_library(source: Path) -> ctypes.CDLL:
    """Return the compiled and loaded library of one C++ file.

    Raises:   RuntimeError saying what is missing or what the compiler said.
    """
    compiler = find_compiler()
    library = cache_folder() / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if not library.exists():
        _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise RuntimeError(f"cannot load {library}: {error}") from error


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX if set, else the first of c++, g++, clang++."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    for name in names:
        program, *arguments = shlex.split(name)  # CXX may say "ccache g++"
        path = shutil.which(program)
        if path is not None:
            return [path, *arguments]
    raise RuntimeError(f"no C++ compiler found (looked for {', '.join(names)})")


def cache_folder() -> Path:
    """Return a folder of the user's own to keep compiled libraries in, made if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    for folder in (
        Path(base) / "xtrain",
        Path(tempfile.gettempdir()) / f"xtrain-{user}",
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # A library is code: never load one from a folder that another user could have filled.
        if os.access(folder, os.W_OK) and _is_own(folder):
            return folder
    raise RuntimeError(f"no writable cache folder (tried {base}/xtrain and the temporary folder)")


def _is_own(folder: Path) -> bool:
    status = folder.stat()
    return not hasattr(os, "getuid") or (
        status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def _fingerprint(source: Path, compiler: list[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
    ).stdout
    parts = (source.read_text(), *compiler, version, *FLAGS, NATIVE, _cpu_description())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_description() -> str:
    """Return what tells apart CPUs that differ in their instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    keys = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    handle, scratch = tempfile.mkstemp(suffix=".so", prefix=f".{source.stem}-", dir=library.parent)
    os.close(handle)
    try:
        for flags in ((*FLAGS, NATIVE), FLAGS):  # not every compiler knows -march=native
            command = [*compiler, *flags, "-o", scratch, str(source)]
            logger.info("compiling %s", " ".join(command))
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
            if result.returncode == 0:
                os.replace(scratch, library)
                return
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr.strip()[-2000:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"cannot compile {source}: {error}") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
