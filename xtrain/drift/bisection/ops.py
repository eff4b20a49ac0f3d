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
from xtrain.drift.bisection.factors import Factor, parse_all, run_child
from xtrain.drift.comparison.report import deliver
from xtrain.drift.errors import DriftError
from xtrain.drift.settings import DEVICE, DTYPES, FACTORS, MAX_THREADS, check_factors, fill
from xtrain.settings import Settings, flags, option

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
    from xtrain.drift.bisection.op_hashes import run
    from xtrain.drift.recording.subject import CASTS

    dtype: Any = CASTS[args.dtype]
    show(run(args.rows, dtype, args.device, args.threads) + "\n")
    return 0
