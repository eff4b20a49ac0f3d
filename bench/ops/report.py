"""From what timing.py measured to the report: rows, targets, the choice of form, plot."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import Ratio, Summary, block_ratio, flat
from bench.ops.common import BEST_OTHER, COPY, INDUCTOR, LIGER, OURS, SEE_THROUGH, Bench, Target
from bench.ops.timing import Measured, Plan
from bench.report import NOT_AVAILABLE, Report, cell, figure, noise, short, texts

HEADERS_BEFORE = ["Case", "Mode", "Provider", "Time p50 [p20, p80] (us)", "Rate", "Of copy"]
HEADERS_AFTER = ["Peak (GiB)", "Error", "First call (s)"]
GLANCE_HEADERS = ["Op, case", "xtrain (us)", "Rate", "Of copy", "vs inductor", "vs Liger"]
GLANCE_HEADERS += ["Best other", "Peak (GiB)"]
FORM_HEADERS = ["Op, case", "Mode", "Kernel / see-through", "Better form"]
PLOT_COLUMNS = 2


class Rows:
    """What was measured, by op, case, mode and provider."""

    def __init__(self, measured: Sequence[Measured]):
        self.all = list(measured)
        self._by_key = {(m.op, m.case, m.mode, m.provider): m for m in measured}

    def other(self, row: Measured, provider: str) -> Measured | None:
        return self._by_key.get((row.op, row.case, row.mode, provider))

    def ratio(self, row: Measured, provider: str) -> Ratio | None:
        """Return a row's time over another provider's, block by block."""
        other = self.other(row, provider)
        if other is None or not other.is_timed or not row.is_timed:
            return None
        return block_ratio(row.blocks, other.blocks)

    def of(self, op: str, mode: str, provider: str) -> list[Measured]:
        return [m for m in self.all if (m.op, m.mode, m.provider) == (op, mode, provider)]

    def fastest_other(self, row: Measured) -> str | None:
        """Return the provider with the least median time besides a row's own and copy."""
        others = [
            m
            for m in self.all
            if (m.op, m.case, m.mode) == (row.op, row.case, row.mode)
            and m.provider not in (row.provider, COPY)
            and m.is_timed
        ]
        return min(others, key=p50_ms).provider if others else None


def p50_ms(row: Measured) -> float:
    return statistics.median(flat(row.blocks))


def build_report(
    benches: Sequence[Bench],
    measured: Sequence[Measured],
    plan: Plan,
    environment: dict[str, Any],
    command: str,
) -> Report:
    """Return the report of a run over some ops."""
    rows = Rows(measured)
    on_gpu = environment["gpu"] != NOT_AVAILABLE
    checks = [check for bench in benches for check in checks_of(bench, rows)]
    said = texts(
        Path(__file__).with_name("words.jinja"),
        environment=environment,
        on_gpu=on_gpu,
        benches=benches,
        plan=plan,
        num_met=sum(c[3].startswith("met") for c in checks),
        missed=[(c[0], c[3].removeprefix("missed ")) for c in checks if c[3].startswith("missed")],
        num_unmeasured=sum(c[3] == "not measured" for c in checks),
        num_targets=len(checks),
        missing=by_reason(rows, "missing"),
        failed=by_reason(rows, "error"),
        noise=noise(
            {
                f"{m.op} {m.case}, {m.provider}": Summary.of(flat(m.blocks))
                for m in measured
                if m.is_timed
            }
        ),
    )
    sections = [("At a glance: forward and backward", GLANCE_HEADERS, glance_rows(rows))]
    sections += [section(bench, rows) for bench in benches]
    if forms := form_rows(rows):
        sections.append(("See-through or opaque", FORM_HEADERS, forms))
    return Report(
        title=said["title"][0],
        question=" ".join(bench.question for bench in benches),
        result=said["result"],
        setup=environment,
        method=said["method"],
        reproduce=command,
        limits=said["limits"],
        checks=checks,
        data={"plan": asdict(plan), "rows": [row_data(rows, m) for m in measured]},
        sections=sections,
    )


def section(bench: Bench, rows: Rows) -> tuple[str, list[str], list[list[str]]]:
    mine = [m for m in rows.all if m.op == bench.op]
    headers = [*HEADERS_BEFORE, *(f"vs {p}" for p in bench.versus), *HEADERS_AFTER]
    return bench.op, headers, [table_row(rows, m, bench.versus) for m in mine]


def table_row(rows: Rows, row: Measured, versus: Sequence[str]) -> list[str]:
    """Return one line of an op's table; what is missing says why."""
    start = [str(row.case), row.mode, row.provider]
    if not row.is_timed:
        reason = f"not there: {row.missing}" if row.missing else f"failed: {row.error}"
        return [*start, reason] + [NOT_AVAILABLE] * (5 + len(versus))
    summary = Summary.of([1e3 * t for t in flat(row.blocks)])
    of_copy = rows.ratio(row, COPY)
    return [
        *start,
        str(summary) + (f" ({row.note})" if row.note else ""),
        rate(row, summary.p50),
        cell(of_copy and as_share(of_copy)),
        *(cell(rows.ratio(row, p)) for p in versus),
        cell(row.peak_gib, "{:.3g}"),
        cell(row.error_ratio, "{:.2g}"),
        cell(row.first_call_s, "{:.1f}"),
    ]


def rate(row: Measured, p50_us: float) -> str:
    """Return TFLOP/s where the op is limited by arithmetic, else GB/s."""
    if row.num_flops is not None:
        return f"{row.num_flops / p50_us / 1e6:.3g} TFLOP/s"
    if row.num_bytes is not None:
        return f"{short(row.num_bytes / p50_us / 1e3)} GB/s"
    return NOT_AVAILABLE


def as_share(time_ratio: Ratio) -> str:
    """Return a ratio of times to copy's as a share of copy's bandwidth, in percent."""
    median, low, high = (100 / t for t in (time_ratio.median, time_ratio.high, time_ratio.low))
    return f"{median:.1f}% [{low:.1f}, {high:.1f}]"


# --- targets --------------------------------------------------------------------------------------


def checks_of(bench: Bench, rows: Rows) -> list[list[str]]:
    """Return [claim, wanted, measured, met or missed] for each target and case."""
    found = []
    for target in bench.targets:
        for row in rows.of(bench.op, target.mode, target.of):
            if not target.cases or row.case.name in target.cases:
                found.append(check(bench.op, target, row, rows))
    return found


def check(op: str, target: Target, row: Measured, rows: Rows) -> list[str]:
    """Return the verdict on one target."""
    what = f"{op}, {row.case}, {row.mode}: {row.provider} {target.claim}"
    if target.against == "":
        wanted = f"<= {target.at_most:g} GiB"
        if row.peak_gib is None or not row.is_timed:
            return [what, wanted, _why_not(row), "not measured"]
        return [what, wanted, f"{row.peak_gib:.3g} GiB", _verdict(row.peak_gib / target.at_most)]
    against = rows.fastest_other(row) if target.against == BEST_OTHER else target.against
    ratio = rows.ratio(row, against) if against else None
    wanted = f"<= {target.at_most:.3f} x {against or target.against}"
    if ratio is None or against is None:
        other = rows.other(row, against) if against else None
        return [what, wanted, _why_not(row if not row.is_timed else other), "not measured"]
    shown = f"{ratio} = {as_share(ratio)} of copy" if against == COPY else str(ratio)
    return [what, wanted, shown, _verdict(ratio.median / target.at_most)]


def _verdict(part_of_limit: float) -> str:
    """Say by how much a target was met or missed."""
    if part_of_limit <= 1:
        return "met" if part_of_limit > 0.995 else f"met, by {1 - part_of_limit:.0%}"
    return f"missed by {part_of_limit - 1:.1%}"


def _why_not(row: Measured | None) -> str:
    if row is None:
        return NOT_AVAILABLE
    return f"{row.provider}: {row.missing or row.error or 'not timed'}"


def glance_rows(rows: Rows) -> list[list[str]]:
    """Return ours alone, a line per case."""
    found = []
    for row in rows.all:
        if row.provider != OURS or row.mode != "both" or not row.is_timed:
            continue
        of_copy, other = rows.ratio(row, COPY), rows.fastest_other(row)
        versus = [rows.ratio(row, p) for p in (INDUCTOR, LIGER)]
        p50_us = 1e3 * p50_ms(row)
        found.append(
            [
                f"{row.op}, {row.case}",
                short(p50_us),
                rate(row, p50_us),
                cell(of_copy and 100 / of_copy.median, "{:.0f}%"),
                *(cell(r and r.median, "{:.2f}") for r in versus),
                cell(other and f"{other}: {rows.ratio(row, other)}"),
                cell(row.peak_gib, "{:.3g}"),
            ]
        )
    return found


def form_rows(rows: Rows) -> list[list[str]]:
    """Return, where both were measured, which form of an op wins alone under inductor."""
    found = []
    for row in rows.all:
        if row.provider != OURS or (ratio := rows.ratio(row, SEE_THROUGH)) is None:
            continue
        better = {"faster": "decomposition", "slower": "kernel"}.get(ratio.verdict(), "either")
        if row.note:
            better = f"no kernel: {row.note}"
        found.append([f"{row.op}, {row.case}", row.mode, str(ratio), better])
    return found


# --- values for the words and for machines --------------------------------------------------------


def by_reason(rows: Rows, attribute: str) -> dict[str, list[str]]:
    """Return why rows are "missing", or what their "error" is -> the providers that say so."""
    found: dict[str, list[str]] = {}
    for m in rows.all:
        if reason := getattr(m, attribute):
            who, name = found.setdefault(reason, []), f"{m.op} {m.provider}"
            who += [name] if name not in who else []
    return found


def row_data(rows: Rows, row: Measured) -> dict[str, Any]:
    """Return what the JSON holds of a row; times in microseconds."""
    us = [1e3 * t for t in flat(row.blocks)]
    ratios = {p: rows.ratio(row, p) for p in (COPY, INDUCTOR, LIGER, SEE_THROUGH)}
    p50 = statistics.median(us) if us else None
    return {
        "op": row.op,
        "case": row.case.name,
        "shape": row.case.shape,
        "dtype": row.case.dtype_name,
        "options": {k: str(v) for k, v in row.case.options.items()},
        "mode": row.mode,
        "provider": row.provider,
        "time_us": asdict(Summary.of(us)) if us else None,
        "gb_per_s": row.num_bytes / p50 / 1e3 if p50 and row.num_bytes else None,
        "tflop_per_s": row.num_flops / p50 / 1e6 if p50 and row.num_flops else None,
        "peak_bytes": row.peak_bytes,
        "error_ratio": row.error_ratio,
        "first_call_s": row.first_call_s,
        "note": row.note,
        "missing": row.missing,
        "error": row.error,
        "visits_us": [[round(1e3 * statistics.median(v), 3) for v in b] for b in row.blocks],
        **{f"time_over_{p}": asdict(r) if r else None for p, r in ratios.items()},
    }


# --- the plot -------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG, one panel per op: GB/s, or TFLOP/s where arithmetic is the limit.

    Args:     rows: those of the report's JSON; mode "both" is drawn.
    """
    timed = [r for r in rows if r["mode"] == "both" and r["time_us"] and not r["error"]]
    ops, everybody = (list(dict.fromkeys(r[name] for r in timed)) for name in ("op", "provider"))
    if not ops:
        return
    num_rows = math.ceil(len(ops) / PLOT_COLUMNS)
    size = (15, 4.2 * num_rows)
    with figure(path, 110, num_rows, PLOT_COLUMNS, figsize=size) as (drawn, panels):
        for panel in panels.flat[len(ops) :]:
            panel.set_visible(False)
        for op, panel in zip(ops, panels.flat, strict=False):
            draw_op(panel, [r for r in timed if r["op"] == op], everybody)
            panel.set_title(op, loc="left", fontweight="bold")
        drawn.suptitle(title)


def draw_op(panel: Any, rows: Sequence[Mapping[str, Any]], all_providers: Sequence[str]) -> None:
    """Draw bars per case, one per provider; copy is a line over its case.

    Args:     all_providers: of all panels, which share their colours.
    """
    cases = list(dict.fromkeys(label_of(r) for r in rows))
    providers = [p for p in dict.fromkeys(r["provider"] for r in rows) if p != COPY]
    unit = "TFLOP/s" if any(r["tflop_per_s"] for r in rows) else "GB/s"
    width = 0.8 / max(len(providers), 1)
    for index, provider in enumerate(providers):
        mine = [r for r in rows if r["provider"] == provider]
        middles = [cases.index(label_of(r)) - 0.4 + (index + 0.5) * width for r in mine]
        colour = f"C{all_providers.index(provider)}"
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
