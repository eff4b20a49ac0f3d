"""Compile the Triton kernels that a launcher launches, for a GPU that is not there, and read what
the binaries need. Tensors are on "meta": any size costs nothing, and every address is aligned.

x = torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta")
(usage,) = compile_launches(lambda: dropout_fwd(x, 1000, 1.1, *seed_and_offset), arch=90)
assert usage.spills == 0 and usage.registers <= 128 and usage.count("LDG", "128")
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCHITECTURES = (80, 90, 100, 120)
# "   /*00f0*/     @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;": address, predicate, opcode
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel needs, as the binary says, and how it was launched."""

    registers: int  # per thread
    spills: int  # stack and local bytes per thread
    shared_bytes: int  # per program
    num_warps: int
    grid: tuple[int, ...]
    instructions: Counter[str]  # by SASS opcode with its modifiers, e.g. "LDG.E.128"
    ptx: str = field(repr=False, default="")

    def count(self, *parts: str) -> int:
        """Return how many instructions have all of parts in their opcode: count("LDG", "128")."""
        return sum(n for opcode, n in self.instructions.items() if {*parts} <= {*opcode.split(".")})


class _Device:
    """Stands for a GPU where Triton asks for the current one; Triton caches by its number."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return 1000 + self.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compile_launches(call: Callable[[], Any], arch: int) -> list[Resources]:
    """Return what each kernel needs that `call` launches, in order; none of them runs.

    Args:     arch: 90 for sm_90.
    """
    found: list[Resources] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_resources(compiled, grid))

    with (
        patch.object(driver, "_active", _Device(arch)),
        patch.object(JITFunction, "run", compile_only),
        patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)),
    ):
        call()
    return found


def _resources(compiled: Any, grid: tuple[int, ...]) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        assembly = _run(knobs.nvidia.nvdisasm.path, "--print-code", str(cubin))
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = Counter(INSTRUCTION.findall(assembly))
    if found.keys() != {"REG", "STACK", "LOCAL"} or not instructions["EXIT"]:
        raise RuntimeError(
            f"cuobjdump and nvdisasm print another form:\n{usage}\n{assembly[:2000]}"
        )
    return Resources(
        registers=found["REG"],
        spills=found["STACK"] + found["LOCAL"],
        shared_bytes=int(compiled.metadata.shared),
        num_warps=compiled.metadata.num_warps,
        grid=grid,
        instructions=instructions,
        ptx=compiled.asm["ptx"],
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor to launch on."""
    return torch.empty(shape, dtype=dtype, device="meta")


def far_rows(n_cols: int, dtype: torch.dtype) -> torch.Tensor:
    """4096 rows at three distances, past 2^31 elements."""
    shape, strides = (4, 32, 32, n_cols), (1 << 35, 1 << 34, 1 << 33, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def seed_and_offset() -> list[torch.Tensor]:
    return [meta(dtype=torch.int64) for _ in range(2)]
