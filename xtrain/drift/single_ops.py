"""`ops`: which ops, at which row lengths, keep their bits under two settings; as a picture.

A child runs each op alone on fixed inputs, row lengths 1 to 64 and a few large ones. No torch here
but in the child.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from tabulate import tabulate

from xtrain.command_line import show
from xtrain.drift.bisect import Factor, parse_all, run_child
from xtrain.drift.comparison.drift_report import deliver
from xtrain.drift.recording.tensors import hash_bits, same_nan
from xtrain.drift.settings import (
    DEVICE,
    DTYPES,
    FACTORS,
    MAX_THREADS,
    DriftError,
    check_factors,
    fill,
)
from xtrain.settings import Settings, flags, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTHS = (*range(1, 65), 127, 128, 256, 768, 1000, 4096)
SAME, DIFFERENT, ABSENT = ".", "#", " "


@dataclass(frozen=True, kw_only=True)
class Ops(Settings):
    """What each op runs on."""

    rows: int = option(64, "rows of the inputs", at_least=1)
    dtype: str = option("fp32", "fp32, bf16 or fp16", choices=DTYPES)
    device: str = option("cpu", "cpu, cuda or cuda:N", pattern=DEVICE)
    threads: int = option(1, "of torch, within an op", at_least=1, at_most=MAX_THREADS)


FLAGS = flags(Ops)


@dataclass(frozen=True)
class OpRow:
    """One op under two settings, a character per row length."""

    op: str
    lengths: tuple[int, ...]
    picture: str

    @property
    def first(self) -> int | None:
        """The smallest row length at which bits differ, None if none does."""
        index = self.picture.find(DIFFERENT)
        return None if index < 0 else self.lengths[index]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ops`."""
    add = parser.add_argument
    add(
        "--factor",
        action="append",
        default=[],
        metavar="NAME=A,B",
        help="the two settings: a VARIABLE, threads, python, dtype or device; may be given again",
    )
    for flag in FLAGS.values():
        flag.add_to(add)
    add("--json", metavar="FILE", help="write the picture as values; -: to stdout instead")
    add("--child", action="store_true", help=argparse.SUPPRESS)


def run_ops(args: argparse.Namespace) -> int:
    """Print the picture; exit code 0 if all bits are equal, else 1."""
    flags = fill(args, FLAGS)
    factors = parse_all(args.factor)
    check_factors(args, {f.name: f.values for f in factors}, FLAGS)
    if args.child:
        return _child(flags)
    if not factors or any(len(factor.values) != 2 for factor in factors):
        raise DriftError("ops compares two settings: --factor NAME=A,B")
    if unfit := [
        f.name for f in factors if f.name == "compile" or f.name in {*FACTORS} - FLAGS.keys()
    ]:
        raise DriftError(f"ops runs no model, {unfit[0]} says nothing to it")
    rows = compare_settings(flags, factors)
    values = [{**vars(row), "first": row.first} for row in rows]
    deliver(args.json, lambda: values, lambda: picture(rows, factors))
    return int(any(row.first is not None for row in rows))


def compare_settings(args: argparse.Namespace, factors: Sequence[Factor]) -> list[OpRow]:
    """Run both settings and return the ops that both have."""
    shared = ["ops", "--child", *(f"--{name}={getattr(args, name)}" for name in FLAGS)]
    found = []
    for side in range(2):
        setting = {factor.name: factor.values[side] for factor in factors}
        result = run_child(shared, setting)
        if result.error is not None:
            words = ", ".join(f"{name}={value}" for name, value in setting.items())
            raise DriftError(f"{words}: {result.error}")
        found.append(json.loads(result.output))
    a, b = found
    lengths = tuple(a["lengths"])
    return [
        OpRow(op, lengths, "".join(map(_mark, a["hashes"][op], b["hashes"][op])))
        for op in a["hashes"]
        if op in b["hashes"]
    ]


def picture(rows: Sequence[OpRow], factors: Sequence[Factor]) -> str:
    """Return the picture: ops that differ first, each with the row length where that begins."""
    lengths = rows[0].lengths
    small = sum(length <= 64 for length in lengths)
    large = " ".join(str(length) for length in lengths[small:])
    settings = " and ".join(
        ", ".join(f"{factor.name}={factor.values[side]}" for factor in factors) for side in (0, 1)
    )
    ruler = "".join(str(n // 10 or " ") if n % 10 == 0 else " " for n in range(1, small + 1))
    lines = [
        f"{settings}: {DIFFERENT} other bits, {SAME} the same",
        "",
        f"{'':14} {ruler}  {large}",
        f"{'row length':14} {''.join(str(n % 10) for n in range(1, small + 1))}",
    ]
    for row in sorted(rows, key=lambda row: (row.first is None, row.first or 0)):
        marks = [
            mark.rjust(len(str(length)))
            for mark, length in zip(row.picture[small:], lengths[small:], strict=True)
        ]
        lines.append(f"{row.op:14} {row.picture[:small]}  {' '.join(marks)}".rstrip())
    table = [
        (row.op, row.first, _ranges(row))
        for row in sorted(rows, key=lambda row: row.first or 0)
        if row.first is not None
    ]
    if not table:
        return "\n".join([*lines, "", "every op keeps its bits at every length"]) + "\n"
    headers = ("op", "differs from row length", "at lengths")
    return "\n".join([*lines, "", tabulate(table, headers, disable_numparse=True)]) + "\n"


def _ranges(row: OpRow) -> str:
    """Return "2-64, 128" of the lengths that differ; neighbours in the list are joined."""
    marked = zip(row.lengths, row.picture, strict=True)
    parts = []
    for different, group in groupby(marked, key=lambda item: item[1] == DIFFERENT):
        if different:
            members = [length for length, _ in group]
            parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts) if len(parts) <= 6 else f"{', '.join(parts[:5])}, ... {parts[-1]}"


def _mark(a: str, b: str) -> str:
    if not a or not b:
        return ABSENT
    return SAME if a == b else DIFFERENT


def _child(args: argparse.Namespace) -> int:
    """Print the hashes as JSON."""
    import torch

    from xtrain.drift.recording.recorded_model import CASTS

    torch.set_num_threads(args.threads)
    found = hashes(args.rows, CASTS[args.dtype], args.device)
    show(json.dumps({"lengths": LENGTHS, "hashes": found}) + "\n")
    return 0


# --- in the child: each op alone on fixed inputs -------------------------------------------------


def draw(*shape: int) -> Tensor:
    """Return numbers in [-2, 2), the same everywhere: multiples of 2^-22 made of integers."""
    import torch

    raw = np.random.PCG64(list(shape)).random_raw(int(np.prod(shape)))
    values = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-22) - np.float32(2)
    return torch.from_numpy(values.reshape(shape))


def ops() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return op -> what it computes of rows."""
    import torch
    import torch.nn.functional as F

    def attention(x: Tensor, num_queries: int, size: int, causal: bool = False) -> Tensor:
        """2 heads over x.shape[-1] keys."""
        lengths = (num_queries, x.shape[-1], x.shape[-1])
        q, k, v = (draw(1, 2, n, size + i)[..., :size].to(x) for i, n in enumerate(lengths))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {
        "add": lambda x: x + x.flip(-1),
        "mul": lambda x: x * x.flip(-1),
        "div": lambda x: x / (x.flip(-1) + 3),
        "sum": lambda x: x.sum(-1),
        "sum_all": lambda x: x.sum(),
        "mean": lambda x: x.mean(-1),
        "var": lambda x: x.var(-1, correction=0),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "cumsum": lambda x: x.cumsum(-1),
        "exp": torch.exp,
        "log": lambda x: torch.log(x + 3),
        "sin": torch.sin,
        "cos": torch.cos,
        "pow": lambda x: (x + 3).pow(2.5),
        "rsqrt": lambda x: (x * x + 1).rsqrt(),
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "softplus": F.softplus,
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
        "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
        "mm": lambda x: x @ draw(x.shape[-1], 48).to(x.dtype),
        "mv": lambda x: x @ draw(x.shape[-1]).to(x.dtype),
        "linear": lambda x: F.linear(x, draw(48, x.shape[-1]).to(x.dtype), draw(48).to(x.dtype)),
        "bmm": lambda x: x[None] @ draw(1, x.shape[-1], 8).to(x.dtype),
        "sdpa": lambda x: attention(x, x.shape[-1], 16),
        "sdpa_causal": lambda x: attention(x, x.shape[-1], 16, causal=True),
        # a step of decoding, where threads share keys
        "sdpa_one_query": lambda x: attention(x, 1, 32),
        "cross_entropy": lambda x: F.cross_entropy(
            x, torch.arange(len(x), device=x.device) % x.shape[-1], reduction="none"
        ),
    }


def hashes(rows: int, dtype: torch.dtype, device: str) -> dict[str, list[str]]:
    """Return op -> hash of its result per length of LENGTHS; "" where it cannot run."""
    import torch

    inputs = [draw(rows, length).to(device, dtype) for length in LENGTHS]
    with torch.no_grad():
        return {name: [_hash(op, x) for x in inputs] for name, op in ops().items()}


def _hash(op: Callable[[Tensor], Tensor], x: Tensor) -> str:
    from xtrain.drift.recording.writing import to_bits

    try:
        bits, dtype = to_bits(op(x))
    except (RuntimeError, NotImplementedError):
        return ""  # not implemented for this dtype or device
    return hash_bits(same_nan(bits.reshape(-1), dtype)).hex()[:16]
