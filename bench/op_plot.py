"""Draw what each provider of each op achieved: GB/s, or TFLOP/s where arithmetic is the limit."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.ops.common import COPY

COLOURS = {
    "eager": "#9aa0a6",
    "inductor": "#4c78a8",
    "inductor, xtrain": "#72b7b2",
    "xtrain": "#e45756",
    "Liger": "#f2b04c",
}
OTHER_COLOURS = ("#54a24b", "#b279a2", "#9d755d", "#79706e", "#d6a5c9")
COLUMNS = 2


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG with one panel per op; `rows` are those of the report's JSON, mode "both"."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [r for r in rows if r["mode"] == "both" and r["time_us"] and not r["error"]]
    ops = list(dict.fromkeys(r["op"] for r in timed))
    if not ops:
        return
    num_rows = math.ceil(len(ops) / COLUMNS)
    figure, panels = pyplot.subplots(
        num_rows, COLUMNS, figsize=(15, 4.2 * num_rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(ops) :]:
        panel.set_visible(False)
    for op, panel in zip(ops, panels.flat, strict=False):
        draw_op(panel, [r for r in timed if r["op"] == op])
        panel.set_title(op, loc="left", fontweight="bold")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_op(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw bars per case, one per provider; copy is a line over its case."""
    cases = list(dict.fromkeys(label_of(r) for r in rows))
    providers = [p for p in dict.fromkeys(r["provider"] for r in rows) if p != COPY]
    unit = "TFLOP/s" if any(r["tflop_per_s"] for r in rows) else "GB/s"
    width = 0.8 / max(len(providers), 1)
    spare = iter(OTHER_COLOURS * 2)
    for index, provider in enumerate(providers):
        mine = [r for r in rows if r["provider"] == provider]
        middles = [cases.index(label_of(r)) - 0.4 + (index + 0.5) * width for r in mine]
        colour = COLOURS.get(provider) or next(spare)
        panel.bar(middles, [rate_of(r) for r in mine], width, label=provider, color=colour)
    for r in rows:
        if r["provider"] == COPY:
            at, first = cases.index(label_of(r)), label_of(r) == cases[0]
            label = "copy of as many bytes" if first else None
            panel.hlines(rate_of(r), at - 0.45, at + 0.45, "black", "--", label=label)
    panel.set_xticks(
        range(len(cases)), cases, fontsize=5.5 if len(cases) > 8 else 7 if len(cases) > 4 else 8
    )
    panel.set_ylabel(f"forward and backward, {unit}")
    panel.grid(axis="y", alpha=0.3)
    panel.margins(y=0.25)
    panel.legend(fontsize=7, ncols=6, loc="upper left", columnspacing=1.0, handlelength=1.4)


def label_of(row: Mapping[str, Any]) -> str:
    sizes = ", ".join(str(n) for n in row["shape"])
    return "\n".join(
        [*textwrap.wrap(row["case"], 14), *textwrap.wrap(f"[{sizes}]", 14), row["dtype"]]
    )


def rate_of(row: Mapping[str, Any]) -> float:
    return row["tflop_per_s"] or row["gb_per_s"] or 0.0
