"""Margins and shifts of many prompts: how near two settings come to another token.

bench/drift_study.py uses it for two instruction sets, bench/drift_devices.py for a CPU and a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xtrain.drift import compare
from xtrain.drift.comparison.margins import ENDS, find_loop
from xtrain.drift.comparison.report import context


@dataclass
class Margins:
    """What 200 prompts x 100 tokens say, over all pieces."""

    margins: list[list[float]] = field(default_factory=list)  # per prompt and step, of A
    shifts: list[float] = field(default_factory=list)
    num_can_flip: int = 0
    num_other_tokens: int = 0
    num_equal_prompts: int = 0
    loops: list[int] = field(default_factory=list)  # first step of each
    tightest: tuple[float, float, str] = (float("inf"), 0.0, "")  # margin, its shift, text
    nearest: tuple[float, float, str] = (float("inf"), 1.0, "")
    first: str = ""


def gather(found: Margins, a: Path, b: Path) -> None:
    """Add one piece."""
    comparison = compare(a, b)
    if comparison.reason is not None:
        raise SystemExit(f"{a} and {b}: {comparison.reason}")
    found.first = found.first or str(comparison.first_divergence)
    for case in comparison.a.cases:
        found.margins.append([float(step.info["margin"][0]) for step in case.steps])
        loop = find_loop([step.tokens[0] for step in case.steps])
        if loop is not None:
            found.loops.append(loop[0])
    found.num_other_tokens += sum(not prompt.tokens_equal for prompt in comparison.prompts)
    found.num_equal_prompts += sum(prompt.logits_equal for prompt in comparison.prompts)
    for position in comparison.positions:
        found.shifts.append(position.shift)
        found.num_can_flip += position.can_flip
        place = (position.margin, position.shift)
        if position.margin < found.tightest[0]:
            found.tightest = (*place, context(comparison.a, position))
        if position.shift * found.nearest[0] > position.margin * found.nearest[1]:
            found.nearest = (*place, context(comparison.a, position))


def margins_text(found: Margins, setting: str, num_tokens: int) -> str:
    """Return what the margins say, as Markdown."""
    table = np.array(found.margins)
    first, last = np.median(table[:, :ENDS]), np.median(table[:, -ENDS:])
    shifts = np.array(found.shifts)
    loops = "none of the prompts ends in a loop"
    if found.loops:
        loops = (
            f"{len(found.loops)} of {len(table)} prompts end in a loop, from step "
            f"{int(np.median(found.loops))} in the median"
        )
    verdict = "no token can flip" if not found.num_can_flip else f"{found.num_can_flip} can flip"
    lines = [
        f"largest shift of a pair of logits: {shifts.max():.3g} (median {np.median(shifts):.3g})",
        f"smallest margin of all: {found.tightest[0]:.3g}, where the shift is "
        f"{found.tightest[1]:.3g}, after `{found.tightest[2]}`",
        f"nearest to a flip: margin {found.nearest[0]:.3g} against shift {found.nearest[1]:.3g}, a "
        f"factor of {ratio_text(*found.nearest[:2])}, after `{found.nearest[2]}`",
        "smallest margin over largest shift, wherever they are: "
        f"{ratio_text(found.tightest[0], float(shifts.max()))}",
        f"median margin of the first {ENDS} steps {first:.3g}, of the last {ENDS} {last:.3g}; "
        f"{loops}",
    ]
    head = (
        f"{setting}, {len(table)} prompts x {num_tokens} tokens, {len(shifts)} places. "
        f"The first difference is {found.first}. {found.num_equal_prompts} prompts keep the bits "
        f"of all their logits, {found.num_other_tokens} get other tokens, and {verdict}."
    )
    return f"{head}\n\n" + "\n".join(f"- {line}" for line in lines)


def ratio_text(margin: float, shift: float) -> str:
    """Return how many times the shift fits into the margin."""
    return f"{margin / shift:.3g}" if shift > 0 else "infinity"
