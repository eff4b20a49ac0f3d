"""From what op_timing measured to the report: rows, targets, the choice of form, words."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import harness
from bench.harness import GIB, NOT_AVAILABLE, Ratio, Summary, block_ratio, flat, short
from bench.op_timing import Measured, Plan
from bench.ops.common import BEST_OTHER, COPY, INDUCTOR, LIGER, OURS, SEE_THROUGH, Target

HEADERS_BEFORE = ["Case", "Mode", "Provider", "Time p50 [p20, p80] (us)", "Rate", "Of copy"]
HEADERS_AFTER = ["Peak (GiB)", "Error", "First call (s)"]
GLANCE_HEADERS = ["Op, case", "xtrain (us)", "Rate", "Of copy", "vs inductor", "vs Liger"]
GLANCE_HEADERS += ["Best other", "Peak (GiB)"]
FORM_HEADERS = ["Op, case", "Mode", "Kernel / see-through", "Better form"]


@dataclass
class OpsReport(harness.Report):
    """A report with a table per op in place of one; `data` holds all rows for the JSON."""

    sections: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Write the files that were asked for; in the JSON a measured row is a line."""
        super().write(None, markdown_path)
        if json_path is not None:
            found = harness.plain({k: v for k, v in asdict(self).items() if k != "sections"})
            text = json.dumps(found, separators=(",", ":"))
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(text.replace('{"op":', '\n{"op":') + "\n")

    def table(self, form: str = "simple") -> str:
        """Return the tables of all sections under their titles."""
        mark = "### " if form == "github" else ""
        return "\n\n".join(
            f"{mark}{title}\n\n{harness.table(headers, rows, form)}"
            for title, headers, rows in self.sections
        )


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
    return harness.percentile(flat(row.blocks), 50)


def build_report(
    benches: Sequence[ModuleType],
    measured: Sequence[Measured],
    plan: Plan,
    environment: dict[str, Any],
    command: str,
) -> OpsReport:
    """Return the report of a run over some ops."""
    rows = Rows(measured)
    on_gpu = environment["gpu"] != NOT_AVAILABLE
    machine = environment["gpu" if on_gpu else "cpu"]
    checks = [check for bench in benches for check in checks_of(bench, rows)]
    sections = [("At a glance: forward and backward", GLANCE_HEADERS, glance_rows(rows))]
    sections += [section(bench, rows) for bench in benches]
    if forms := form_rows(rows):
        sections.append(("See-through or opaque", FORM_HEADERS, forms))
    return OpsReport(
        title=f"Ops on {machine}: {', '.join(bench.OP for bench in benches)}",
        question=" ".join(bench.QUESTION for bench in benches),
        result=result_sentences(checks, rows),
        setup=environment,
        method=method_sentences(plan, on_gpu),
        headers=[],
        rows=[],
        reproduce=command,
        limits=limits(rows),
        checks=checks,
        data={"plan": asdict(plan), "rows": [row_data(rows, m) for m in measured]},
        sections=sections,
    )


def section(bench: ModuleType, rows: Rows) -> tuple[str, list[str], list[list[str]]]:
    mine = [m for m in rows.all if m.op == bench.OP]
    versus = versus_of(bench)
    headers = [*HEADERS_BEFORE, *(f"vs {p}" for p in versus), *HEADERS_AFTER]
    return bench.OP, headers, [table_row(rows, m, versus) for m in mine]


def versus_of(bench: ModuleType) -> tuple[str, ...]:
    """Return the providers that an op's rows are compared with."""
    return getattr(bench, "VERSUS", (INDUCTOR, LIGER))


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
        NOT_AVAILABLE if of_copy is None else as_share(of_copy),
        *(str(rows.ratio(row, p) or NOT_AVAILABLE) for p in versus),
        NOT_AVAILABLE if row.peak_bytes is None else f"{row.peak_bytes / GIB:.3g}",
        NOT_AVAILABLE if math.isnan(row.error_ratio) else f"{row.error_ratio:.2g}",
        NOT_AVAILABLE if math.isnan(row.first_call_s) else f"{row.first_call_s:.1f}",
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
    shares = (100 / t for t in (time_ratio.median, time_ratio.high, time_ratio.low))
    median, low, high = shares
    return f"{median:.1f}% [{low:.1f}, {high:.1f}]"


# --- targets --------------------------------------------------------------------------------------


def checks_of(bench: ModuleType, rows: Rows) -> list[list[str]]:
    """Return [claim, wanted, measured, met or missed] for each target and case."""
    found = []
    for target in bench.TARGETS:
        for row in rows.of(bench.OP, target.mode, target.of):
            if not target.cases or row.case.name in target.cases:
                found.append(check(bench.OP, target, row, rows))
    return found


def check(op: str, target: Target, row: Measured, rows: Rows) -> list[str]:
    """Return the verdict on one target."""
    what = f"{op}, {row.case}, {row.mode}: {row.provider} {target.claim}"
    if target.against == "":
        wanted = f"<= {target.at_most:g} GiB"
        if row.peak_bytes is None or not row.is_timed:
            return [what, wanted, _why_not(row), "not measured"]
        peak = row.peak_bytes / GIB
        return [what, wanted, f"{peak:.3g} GiB", _verdict(peak / target.at_most)]
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
                NOT_AVAILABLE if of_copy is None else f"{100 / of_copy.median:.0f}%",
                *(NOT_AVAILABLE if r is None else f"{r.median:.2f}" for r in versus),
                NOT_AVAILABLE if other is None else f"{other}: {rows.ratio(row, other)}",
                NOT_AVAILABLE if row.peak_bytes is None else f"{row.peak_bytes / GIB:.3g}",
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


# --- words ----------------------------------------------------------------------------------------


def result_sentences(checks: Sequence[Sequence[str]], rows: Rows) -> list[str]:
    """Say how many targets were met, which were missed and what failed."""
    met = sum(c[3].startswith("met") for c in checks)
    missed = [c for c in checks if c[3].startswith("missed")]
    sentences = []
    if checks:
        sentences.append(f"{met} of {len(checks)} targets were met.")
    if missed:
        sentences.append("Missed: " + "; ".join(f"{c[0]} ({c[3][7:]})" for c in missed) + ".")
    if unmeasured := sum(c[3] == "not measured" for c in checks):
        sentences.append(f"Not measured: {unmeasured}; the table says why.")
    if failed := sorted({f"{m.op} {m.provider}" for m in rows.all if m.error}):
        sentences.append(f"Failed: {', '.join(failed)}.")
    return sentences or ["No targets are set for these cases."]


def method_sentences(plan: Plan, on_gpu: bool) -> list[str]:
    clock = (
        "CUDA events around replays of a CUDA graph, which leaves out launches (rows that cannot "
        "be captured say so)"
        if on_gpu
        else "wall time"
    )
    return [
        f"{plan.num_blocks} blocks; in each every provider is visited twice, there and back, in an "
        f"order that changes from block to block. A visit is a sample that does not count and some "
        f"that do, by {clock}.",
        "forward is a training forward, which keeps what its backward needs; both is forward and "
        "backward, with all gradients returned. Random data; where a call's tensors would fit in "
        "four L2 caches, calls take turns over copies of them.",
        "Of copy: the time that torch's copy_ takes to move as many bytes as must move at least, "
        "over the provider's, measured as one more provider in the same blocks. Rates count those "
        "bytes, or the FLOPs of the products alone.",
        "vs: the provider's time over another's, e.g. inductor's (plain PyTorch under "
        "torch.compile); below 1 is faster. Ratios are formed within each block; given are their "
        "median and in brackets a distribution-free interval for it.",
        "Peak: memory of forward and backward beyond the inputs, returned gradients included. "
        "Error: the largest error against fp64 over plain PyTorch's in the same dtype; every "
        "output and gradient is checked before anything is timed (ours at most 2; providers that "
        "draw their own masks are held to those).",
        "First call: forward and backward, compilation included, from caches on disk where the "
        "setup says that they were filled before.",
    ]


def limits(rows: Rows) -> list[str]:
    """Say what the figures do not show, what is missing and what failed."""
    lines = [
        "Alone in a loop: in a model an op shares caches, launches and fusions with its "
        "neighbours; the training comparison shows what is left of it.",
    ]
    spreads = {}
    for m in rows.all:
        if m.is_timed:
            summary = Summary.of(flat(m.blocks))
            spreads[f"{m.op} {m.case}, {m.provider}"] = (summary.p80 - summary.p20) / summary.p50
    if spreads:
        name = max(spreads, key=lambda n: spreads[n])
        lines.append(f"Noise: p20 to p80 spans up to {spreads[name]:.0%} of the median ({name}).")
    for words, attribute in (("not there", "missing"), ("failed", "error")):
        by_reason: dict[str, list[str]] = {}
        for m in rows.all:
            if reason := getattr(m, attribute):
                by_reason.setdefault(reason, []).append(f"{m.op} {m.provider}")
        for reason, who in by_reason.items():
            lines.append(f"{', '.join(dict.fromkeys(who))} {words}: {reason}")
    return lines


def row_data(rows: Rows, row: Measured) -> dict[str, Any]:
    """Return what the JSON holds of a row; times in microseconds."""
    us = [1e3 * t for t in flat(row.blocks)]
    ratios = {p: rows.ratio(row, p) for p in (COPY, INDUCTOR, LIGER, SEE_THROUGH)}
    p50 = harness.percentile(us, 50) if us else None
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
