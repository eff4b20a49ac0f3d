"""Time ops against their alternatives: the command of report_ops.py (all) and run_op.py (one).

FAMILIES says where the benchmark of an op stands: bench_<family>.py gives inputs, providers, the
truth that outputs are held to before anything is timed, and the bytes or FLOPs of a call
(common.py: `Bench`). `run` has timing.py check and time them, then report.py say what came out.
No torch until something is measured, so that `--help` answers at once.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench import harness

if TYPE_CHECKING:
    from bench.ops.common import Bench, Case
    from bench.ops.timing import Measured, Plan

FAMILIES = {
    "dropout": "residual",
    "dropout_add_rms_norm": "residual",
    "geglu": "glu",
    "linear_cross_entropy": "losses",
    "rms_norm": "residual",
    "rope_qk": "attention",
    "sdpa": "attention",
    "swiglu": "glu",
}
NUM_BLOCKS, QUICK_BLOCKS = 7, 3  # of 7 blocks the least and greatest ratio cover 98%


def bench_of(op: str) -> Bench:
    """Return the benchmark of an op; KeyError for one that has none."""
    family = import_module(f"bench.ops.bench_{FAMILIES[op]}")
    return next(bench for bench in family.BENCHES if bench.op == op)


def add_flags(parser: Any) -> None:
    """Add what both commands take."""
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="cuda | cpu (cuda where there is one)")
    add("--threads", type=harness.positive, help="CPU threads (torch's default)")
    add("--blocks", type=harness.positive, help=f"each visits every provider twice ({NUM_BLOCKS})")
    add("--providers", metavar="A,B", help="these alone (all)")
    add("--quick", action="store_true", help=f"an op's first case, {QUICK_BLOCKS} blocks")
    add("--jobs", type=int, default=0, help="processes that fill the compile caches first (0)")
    add("--limit", type=float, metavar="SECONDS", help="begin no case after so long (no limit)")
    harness.add_report_flags(add)


def run(ops: Sequence[str], flags: Namespace, command: str) -> int:
    """Measure some ops, write and print; return the exit code: 1 if a provider failed."""
    import torch

    from bench.ops.report import build_report, draw
    from bench.ops.timing import Plan, fill_caches

    start = time.perf_counter()
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = torch.device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    blocks = flags.blocks or (QUICK_BLOCKS if flags.quick else NUM_BLOCKS)
    plan = Plan(blocks, flags.providers.split(",") if flags.providers else None)
    environment = harness.environment(device.type, flags.commit)
    environment["load_average_before"] = harness.load_average()
    benches = [bench_of(op) for op in ops]
    if flags.jobs:
        environment["compile_caches"] = f"filled before by {flags.jobs} processes"
        tasks = [(b.op, i) for b in benches for i in range(len(cases_of(b, device, flags.quick)))]
        for problem in fill_caches(tasks, device.type, flags.jobs):
            print(f"filling the caches: {problem}", flush=True)
        print(f"caches filled: {time.perf_counter() - start:.1f} s", flush=True)
    end = math.inf if flags.limit is None else start + flags.limit
    measured = [m for b in benches for m in measure(b, device, plan, quick=flags.quick, end=end)]
    environment["run_took_s"] = time.perf_counter() - start
    report = build_report(benches, measured, plan, environment, command)
    report.write(flags.json, flags.markdown)
    if getattr(flags, "plot", None) is not None:
        title = f"Forward and backward on {report.setup['gpu']}"
        draw(report.data["rows"], flags.plot, title)
    print("\n" + report.table())
    for check in report.checks:
        print(" | ".join(check))
    return 1 if any(row["error"] for row in report.data["rows"]) else 0


def cases_of(bench: Bench, device: Any, quick: bool) -> list[Case]:
    cases = bench.cases.get(device.type, [])
    return cases[:1] if quick else cases


def measure(
    bench: Bench, device: Any, plan: Plan, *, quick: bool, end: float = math.inf
) -> list[Measured]:
    """Return what was measured on every case of an op; a case that fails leaves rows behind.

    Args:     end: time.perf_counter() after which no case begins.
    """
    from bench.ops.common import NotThere
    from bench.ops.timing import measure_case, rows_of_failure

    measured: list[Measured] = []
    for case in cases_of(bench, device, quick):
        start = time.perf_counter()
        if start > end:
            late = NotThere("the time limit of the run was reached before")
            measured += rows_of_failure(bench, case, late)
        else:
            measured += measure_case(bench, case, device, plan)
        print(f"{bench.op}, {case}: {time.perf_counter() - start:.1f} s", flush=True)
    return measured
