"""Launch every kernel of xtrain.ops on small, awkward shapes under compute-sanitizer's memcheck.

    python tests/ops/sanitize.py            finds compute-sanitizer on PATH or in $CUDA_HOME/bin
    python tests/ops/sanitize.py --launch   the launches alone, by any checker

Memory outside of a tensor is outside of its allocation only where each tensor has one of its own:
torch's caching allocator is switched off. Exit code 9 is a finding, 1 a call that failed or a
kernel that was never launched.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FINDING = 9


def main(arguments: list[str]) -> int:
    if arguments == ["--launch"]:
        return launch_everything()
    tool = compute_sanitizer()
    if tool is None:
        print("error: compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin", file=sys.stderr)
        return 1
    return subprocess.run(command(tool), env=environment()).returncode


def compute_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, None where there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    folders = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), CUDA_HOME) if home]
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which("compute-sanitizer", path=search)


def command(tool: str) -> list[str]:
    check = [tool, "--tool", "memcheck", "--error-exitcode", str(FINDING)]
    check += ["--target-processes", "application-only"]  # not Triton's assembler
    return [*check, sys.executable, str(HERE / "sanitize.py"), "--launch"]


def environment() -> dict[str, str]:
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def launch_everything(device: str = "cuda") -> int:
    """Run each op forward and backward; return 1 if one failed or a kernel was never launched."""
    import torch

    from xtrain.ops import OPS

    torch.manual_seed(0)
    launched, num_failed = Counter[str](), 0
    if device == "cuda":
        from triton import knobs

        knobs.runtime.launch_enter_hook.add(lambda lazy: launched.update([lazy.get()["name"]]))
    for name in OPS:
        start, before = time.perf_counter(), launched.copy()
        num_calls = failed = 0
        for args in cases(name):
            num_calls += 1
            try:
                run(name, args, device)
            except Exception:  # the others' kernels are to be looked at all the same
                failed += 1
                traceback.print_exc()
        num_failed += failed
        if device == "cuda":
            torch.cuda.synchronize()
        kernels = ", ".join(f"{k} x{n}" for k, n in (launched - before).items()) or "no kernel"
        seconds = time.perf_counter() - start
        outcome = f"{failed} FAILED" if failed else kernels
        print(f"{name}: {num_calls} calls forward and backward, {seconds:.1f} s: {outcome}")
    missing = sorted(kernels_of_ours() - launched.keys()) if device == "cuda" else []
    if missing:
        print(f"error: never launched: {', '.join(missing)}: give them a case", file=sys.stderr)
    return 1 if missing or num_failed else 0


def kernels_of_ours() -> set[str]:
    """Return the names of all kernels in xtrain/ops: @triton.jit functions _*_kernel."""
    import triton

    import xtrain.ops

    names = set()
    folder = Path(xtrain.ops.__file__).parent
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(folder.parents[1]).with_suffix("").parts)
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, triton.JITFunction) and value.__name__.endswith("_kernel"):
                names.add(value.__name__)
    return names


def run(name: str, args: tuple[Any, ...], device: str) -> None:
    """Call an op and its backward on arguments moved to a device."""
    import torch
    from samples import wanting_gradients, with_gradients

    from xtrain.ops import OPS

    moved = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
    moved = with_gradients(name, moved)
    outputs = OPS[name].forward(*moved)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    wanted = [out for out in outputs if out.requires_grad]
    torch.autograd.grad(wanted, wanting_gradients(moved), [torch.ones_like(o) for o in wanted])


def cases(name: str) -> Iterator[tuple[Any, ...]]:
    """Yield arguments: all that opcheck sees, and sizes around those that kernels cut at."""
    import torch
    from samples import AWKWARD, SAMPLES, maker

    for layout in ("contiguous", "padded"):
        make = maker(layout, torch.bfloat16)
        yield from SAMPLES[name](make)
        yield from AWKWARD.get(name, lambda make: [])(make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
