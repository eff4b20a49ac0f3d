"""Compile a C++ file of this folder once per user, source, compiler and CPU, and load it.

The library lands in the user's cache folder under a name that holds a hash of all it depends on, by
an atomic rename: processes that compile at once do the same work twice and both end up right.
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
from pathlib import Path

logger = logging.getLogger(__name__)

# Plain IEEE arithmetic: a fused multiply-add or a reassociation would change bits.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
NATIVE = "-march=native"  # the CPU is part of the name, so a shared home folder is safe
COMPILE_TIMEOUT_S = 120


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
