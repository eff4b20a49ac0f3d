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
SEED = -7046029254386353131


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
    from samples import SAMPLES, maker

    for layout in ("contiguous", "padded"):
        make = maker(layout, torch.bfloat16)
        yield from SAMPLES[name](make)
        yield from AWKWARD.get(name, lambda make: iter(()))(make)


def _int64(value: int) -> Any:
    import torch

    return torch.tensor(value)


def _tables(*shape: int) -> tuple[Any, Any]:
    import torch

    angles = torch.randn(shape)
    return angles.cos(), angles.sin()


def _heads(make: Any) -> Any:
    """[B, N, T, H] at three distances, the last row at the end of its memory."""
    return make(3, 7, 198)[..., 99:].unflatten(-1, (3, 33)).transpose(1, 2)


def _dropout(make: Any) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (1, 1025), (3, 4099)):
        yield make(*shape), 0.25, _int64(SEED), _int64(2**31 - 3)
    yield _heads(make), 0.25, _int64(SEED), _int64(2**31 - 3)


def _rms_norm(make: Any) -> Iterator[tuple[Any, ...]]:
    for shape, cast in (((1, 1), "llama"), ((1, 1025), "gemma"), ((133, 129), "llama")):
        yield make(*shape), make(shape[-1]), 1e-5, cast
    yield _heads(make), make(33), 1e-5, "llama"


def _dropout_add_rms_norm(make: Any) -> Iterator[tuple[Any, ...]]:
    for shape, p in (((1, 1), 0.1), ((1, 1025), 0.5), ((133, 129), 0.1)):
        args = make(*shape), make(*shape), make(shape[-1])
        yield *args, p, _int64(SEED), _int64(7), 1e-5, "llama"
    yield _heads(make), _heads(make), make(33), 0.1, _int64(SEED), _int64(7), 1e-5, "llama"
    args = make(5, 129), make(5, 129).float(), make(129).float()
    yield *args, 0.1, _int64(SEED), _int64(7), 1e-5, "llama"


def _swiglu(make: Any) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (1, 1025), (3, 4099)):
        yield make(*shape), make(*shape)


def _swiglu_packed(make: Any) -> Iterator[tuple[Any, ...]]:
    for shape, order in (((1, 2), "gate_up"), ((1, 2050), "up_gate"), ((3, 258), "gate_up")):
        yield make(*shape), order


def _geglu(make: Any) -> Iterator[tuple[Any, ...]]:
    for approximate in ("none", "tanh"):
        for args in _swiglu(make):
            yield *args, approximate


def _geglu_packed(make: Any) -> Iterator[tuple[Any, ...]]:
    for approximate in ("none", "tanh"):
        for args in _swiglu_packed(make):
            yield *args, approximate


def _rope_qk(make: Any) -> Iterator[tuple[Any, ...]]:
    for layout in ("half", "interleaved"):
        yield make(1, 1, 1, 2), make(1, 1, 1, 2), *_tables(1, 1), layout
        yield make(2, 5, 33, 10), make(2, 1, 33, 10), *_tables(2, 33, 3), layout


def _sdpa(make: Any) -> Iterator[tuple[Any, ...]]:
    import torch

    for T, S, H in ((1, 1, 8), (65, 129, 40), (129, 129, 72)):
        q, k, v = make(2, 4, T, H), make(2, 2, S, H), make(2, 2, S, H)
        yield q, k, v, None, True, H**-0.5, None, 20.0
        yield q, k, v, None, True, H**-0.5, 17, None
    documents = (torch.arange(T) // 40).expand(2, T)
    yield q, k, v, None, True, H**-0.5, None, None, documents


def _cross_entropy(make: Any) -> Iterator[tuple[Any, ...]]:
    import torch

    for T, V in ((1, 1), (5, 1025), (3, 4099)):
        targets = torch.randint(V, (T,))
        yield make(T, V), targets, None, -100, 0.1, 1e-3, "mean"


def _linear_cross_entropy(make: Any) -> Iterator[tuple[Any, ...]]:
    import torch

    for T, D, V in ((1, 1, 1), (5, 33, 1025), (131, 8, 129)):
        options = (None, -100, 0.1, 1e-3, None, "mean", True, True)
        for accumulation in ("fp32", "same"):
            yield make(T, D), make(V, D), torch.randint(V, (T,)), *options, accumulation


AWKWARD = {
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "dropout_add_rms_norm": _dropout_add_rms_norm,
    "swiglu": _swiglu,
    "swiglu_packed": _swiglu_packed,
    "geglu": _geglu,
    "geglu_packed": _geglu_packed,
    "rope_qk": _rope_qk,
    "sdpa": _sdpa,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
