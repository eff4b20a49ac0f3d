"""Compile a Triton kernel for a GPU that is not there, and read what the binary needs.

usage = compile_kernel(
    kernel,
    {"x_ptr": "*bf16", "out_ptr": "*bf16", "n": "i64:16"},
    {"BLOCK": 1024},
    arch=90,
)
assert usage.spills == 0 and usage.registers <= 128 and usage.count("LDG", "128")
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100, 120)
ALIGNED = [["tt.divisibility", 16]]
# "   /*00f0*/     @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;": address, predicate, opcode
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel needs, as the binary says."""

    registers: int  # per thread
    spills: int  # stack and local bytes per thread
    shared_bytes: int  # per program
    instructions: Counter[str]  # by SASS opcode with its modifiers, e.g. "LDG.E.128"
    ptx: str = field(repr=False, default="")

    def count(self, *parts: str) -> int:
        """Return how many instructions have all of parts in their opcode: count("LDG", "128")."""
        return sum(n for opcode, n in self.instructions.items() if {*parts} <= {*opcode.split(".")})


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: object,
) -> Resources:
    """Compile kernel as its launcher would specialise it for aligned tensors.

    Args:     kernel: a @triton.jit function.
              signature: argument -> type: "*bf16", "*fp32", "*i64", "i32", "i64", "fp32", ...; an
              integer known to be a multiple of 16 is "i32:16"; pointers always count as aligned.
              constants: the tl.constexpr arguments, and arguments that are None or 1: Triton makes
              those constant when it launches.
              arch: 90 for sm_90.
              options: further options of a launch, e.g. maxnreg.
    """
    names = list(kernel.arg_names)
    unknown = [name for name in (*signature, *constants) if name not in names]
    missing = [name for name in names if name not in signature and name not in constants]
    if unknown or missing:
        raise ValueError(
            f"compile_kernel: {kernel.__name__} has arguments {names}; unknown {unknown}, missing "
            f"{missing}: name each in signature or constants"
        )
    types = {name: signature[name].removesuffix(":16") for name in signature}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or kind.endswith(":16")]
    attributes = {(names.index(name),): ALIGNED for name in aligned if name not in constants}
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},  # Triton reads the types by position
        constexprs=dict(constants),
        attrs=attributes,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
    return _resources(compiled)


def _resources(compiled: Any) -> Resources:
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
        instructions=instructions,
        ptx=compiled.asm["ptx"],
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
