"""Time one op against its alternatives: `python bench/run_op.py dropout`.

bench/ops/bench_<op>.py gives inputs, providers, the truth that outputs are held to before anything
is timed, and the bytes or FLOPs of a call. `bench/report_ops.py` does the same for all ops.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.turns import positive  # noqa: E402
from xtrain.command_line import Parser, command, output_file  # noqa: E402

if TYPE_CHECKING:
    from bench.op_report import OpsReport
    from bench.op_timing import Measured, Plan
    from bench.ops.common import Case

NUM_BLOCKS, QUICK_BLOCKS = 7, 3  # of 7 blocks the least and greatest ratio cover 98%


def known_ops() -> list[str]:
    """Return the ops that have a benchmark."""
    return sorted(p.stem.removeprefix("bench_") for p in (ROOT / "bench/ops").glob("bench_*.py"))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    flags = parser.parse_args(arguments)
    return run([flags.op], flags, harness.command_line("bench/run_op.py", arguments))


def build_parser() -> Any:
    """Return the command line's parser."""
    known = known_ops()
    parser = Parser(prog="bench/run_op.py", description=__doc__)
    parser.add_argument("op", choices=known, metavar="OP", help=", ".join(known))
    add_flags(parser)
    return parser


def add_flags(parser: Any) -> None:
    """Add what both commands take."""
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], help="cuda | cpu (cuda where there is one)")
    add("--threads", type=positive, help="CPU threads (torch's default)")
    add("--blocks", type=positive, help=f"each visits every provider twice ({NUM_BLOCKS})")
    add("--providers", metavar="A,B", help="these alone (all)")
    add("--quick", action="store_true", help=f"an op's first case, {QUICK_BLOCKS} blocks")
    add("--jobs", type=int, default=0, help="processes that fill the compile caches first (0)")
    add("--limit", type=float, metavar="SECONDS", help="begin no case after so long (no limit)")
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=output_file, metavar="FILE", help="write everything measured")
    add("--markdown", type=output_file, metavar="FILE", help="write the report")


def run(ops: Sequence[str], flags: Namespace, command: str) -> int:
    """Measure some ops, write and print; return the exit code: 1 if a provider failed."""
    report = measured_report(ops, flags, command)
    report.write(flags.json, flags.markdown)
    if getattr(flags, "plot", None) is not None:
        from bench.op_plot import draw

        title = f"Forward and backward on {report.setup['gpu']}"
        draw(report.data["rows"], flags.plot, title)
    print("\n" + report.table())
    for check in report.checks:
        print(" | ".join(check))
    return 1 if any(row["error"] for row in report.data["rows"]) else 0


def measured_report(ops: Sequence[str], flags: Namespace, command: str) -> OpsReport:
    """Measure some ops and return the report."""
    import torch

    from bench.op_report import build_report
    from bench.op_timing import Plan
    from bench.op_warm import fill_caches

    start = time.perf_counter()
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = torch.device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    blocks = flags.blocks or (QUICK_BLOCKS if flags.quick else NUM_BLOCKS)
    plan = Plan(blocks, flags.providers.split(",") if flags.providers else None)
    environment = harness.environment(device.type, flags.commit)
    environment["load_average_before"] = harness.load_average()
    benches = [import_module(f"bench.ops.bench_{op}") for op in ops]
    if flags.jobs:
        environment["compile_caches"] = f"filled before by {flags.jobs} processes"
        tasks = [(b.OP, i) for b in benches for i in range(len(cases_of(b, device, flags.quick)))]
        for problem in fill_caches(tasks, device.type, flags.jobs):
            print(f"filling the caches: {problem}", flush=True)
        print(f"caches filled: {time.perf_counter() - start:.1f} s", flush=True)
    end = math.inf if flags.limit is None else start + flags.limit
    measured: list[Measured] = []
    for bench in benches:
        measured += measure(bench, device, plan, quick=flags.quick, end=end)
    environment["run_took_s"] = time.perf_counter() - start
    return build_report(benches, measured, plan, environment, command)


def cases_of(bench: ModuleType, device: Any, quick: bool) -> list[Case]:
    cases = bench.CASES.get(device.type, [])
    return cases[:1] if quick else cases


def measure(
    bench: ModuleType, device: Any, plan: Plan, *, quick: bool, end: float = math.inf
) -> list[Measured]:
    """Return what was measured on every case of an op; a case that fails leaves rows behind.

    Args:     end: time.perf_counter() after which no case begins.
    """
    from bench.op_timing import caught, measure_case
    from bench.ops.common import NotThere

    measured: list[Measured] = []
    for case in cases_of(bench, device, quick):
        start = time.perf_counter()
        with caught(measured, bench, case):
            if start > end:
                raise NotThere("the time limit of the run was reached before")
            measured += measure_case(bench, case, device, plan)
        print(f"{bench.OP}, {case}: {time.perf_counter() - start:.1f} s", flush=True)
    return measured


if __name__ == "__main__":
    sys.exit(main())
