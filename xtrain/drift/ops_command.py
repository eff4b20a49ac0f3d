"""`ops`: which ops, at which row lengths, keep their bits under two settings; as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tabulate import tabulate

from xtrain.command_line import show
from xtrain.drift.errors import DriftError
from xtrain.drift.factors import Factor, parse_all, run_child
from xtrain.drift.flag_use import check_factors, fill
from xtrain.drift.output import deliver

DEFAULTS = {"dtype": "fp32", "device": "cpu", "threads": 1}
SAME, DIFFERENT, ABSENT = ".", "#", " "


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
    add("--rows", type=int, default=64, help="rows of the inputs [64]")
    add("--dtype", help="fp32, bf16 or fp16 [fp32]")
    add("--device", help="cpu, cuda or cuda:N [cpu]")
    add("--threads", type=int, help="of torch, within an op [1]")
    add("--json", metavar="FILE", help="write the picture as values; -: to stdout instead")
    add("--child", action="store_true", help=argparse.SUPPRESS)


def run_ops(args: argparse.Namespace) -> int:
    """Print the picture; exit code 0 if all bits are equal, else 1."""
    for name in ("rows", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DriftError(f"--{name} must be at least 1, got {value}")
    factors = parse_all(args.factor)
    check_factors(args, factors)
    args = fill(args, DEFAULTS)
    if args.child:
        return _child(args)
    if not factors or any(len(factor.values) != 2 for factor in factors):
        raise DriftError("ops compares two settings: --factor NAME=A,B")
    if unfit := [
        f.name for f in factors if f.name in ("batch", "mode", "decode", "pad-to", "compile")
    ]:
        raise DriftError(f"ops runs no model, {unfit[0]} says nothing to it")
    rows = compare_settings(args, factors)
    values = [{**vars(row), "first": row.first} for row in rows]
    deliver(args.json, lambda: values, lambda: picture(rows, factors))
    return int(any(row.first is not None for row in rows))


def compare_settings(args: argparse.Namespace, factors: Sequence[Factor]) -> list[OpRow]:
    """Run both settings and return the ops that both have."""
    shared = ["ops", "--child", f"--rows={args.rows}"]
    shared += [f"--{name}={getattr(args, name)}" for name in ("dtype", "device", "threads")]
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
    from xtrain.drift.models import DTYPES
    from xtrain.drift.op_hashes import run

    if args.dtype not in DTYPES:
        raise DriftError(f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}")
    dtype: Any = DTYPES[args.dtype]
    show(run(args.rows, dtype, args.device, args.threads) + "\n")
    return 0
