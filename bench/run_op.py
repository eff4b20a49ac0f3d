"""Time one op against its alternatives: `python bench/run_op.py dropout`.

bench/ops/bench_<op>.py gives inputs, providers, a check of their outputs and the bytes that must
move at least; forward, backward and both are timed apart, every provider in turn.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.harness import Case  # noqa: E402

MODES = ("forward", "backward", "both")
HEADERS = [
    "Case",
    "Mode",
    "Provider",
    "Time p50 [p20, p80] (us)",
    "GB/s",
    "ns / element",
    "vs baseline",
    "First call (s)",
]
MIN_SAMPLE_MS = {"cpu": 2.0, "cuda": 0.2}  # calls are repeated until a sample is this long
FLUSH_BYTES = 256 * 2**20  # more than any GPU's L2: each sample on CUDA starts with a cold cache


@dataclass
class Measured:
    """Times of one provider on one case and mode, or why there are none."""

    case: Case
    mode: str
    provider: str
    first_call_s: float = math.nan
    blocks: list[list[list[float]]] = field(default_factory=list)  # us, by block and visit
    error: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    flags = parser.parse_args(arguments)
    import torch

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    bench = import_module(f"bench.ops.bench_{flags.op}")
    if torch.device(device).type not in bench.CASES:
        parser.error(f"bench_{flags.op} has no cases for {device!r}: {', '.join(bench.CASES)}")
    measured = measure(bench, torch.device(device), flags)
    environment = harness.environment(device, flags.commit)
    command = harness.command_line("bench/run_op.py", arguments)
    report = build_report(bench, flags, measured, environment, command)
    report.write(flags.json, flags.markdown)
    print("\n" + report.table())
    return 1 if any(m.error for m in measured) else 0


def build_parser() -> Any:
    """Return the command line's parser."""
    from xtrain.command_line import Parser

    known = sorted(p.stem.removeprefix("bench_") for p in (ROOT / "bench/ops").glob("bench_*.py"))
    parser = Parser(prog="bench/run_op.py", description=__doc__)
    add = parser.add_argument
    add("op", choices=known, metavar="OP", help=", ".join(known))
    add("--device", help="cuda | cpu (cuda where there is one)")
    add("--threads", type=int, help="CPU threads (torch's default)")
    add("--blocks", type=int, default=9, help="each visits every provider twice (9)")
    add("--samples", type=int, default=5, help="samples a visit (5)")
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the report")
    return parser


def measure(bench: ModuleType, device: Any, flags: Namespace) -> list[Measured]:
    """Return the times of every case, mode and provider."""
    found: list[Measured] = []
    for case in bench.CASES[device.type]:
        rows = {(m, p): Measured(case, m, p) for m in MODES for p in bench.PROVIDERS}
        found += rows.values()
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for provider in bench.PROVIDERS:
            calls |= prepare(bench, case, provider, device, rows)
        for mode in MODES:
            names = [p for m, p in calls if m == mode]
            repeats = {p: num_repeats(calls[mode, p], device.type) for p in names}
            for block in range(flags.blocks):
                for p in names:
                    rows[mode, p].blocks.append([])
                for p in harness.order_of_block(names, block):
                    times = time_visit(calls[mode, p], repeats[p], flags.samples, device)
                    rows[mode, p].blocks[-1].append(times)
        print(case, flush=True)
    return found


def prepare(
    bench: ModuleType, case: Case, provider: str, device: Any, rows: dict
) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the calls of one provider after a first one and its check; none if it failed."""
    import torch

    function = bench.PROVIDERS[provider]
    torch.manual_seed(0)
    inputs = bench.make_inputs(case, device)
    wanted = [x for x in inputs if x.requires_grad]
    try:
        start = time.perf_counter()
        output = function(*inputs)
        grad_out = torch.randn_like(output)
        torch.autograd.grad(output, wanted, grad_out, retain_graph=True)
        for mode in MODES:
            rows[mode, provider].first_call_s = time.perf_counter() - start
        problem = bench.check(case, provider, inputs, output.detach())
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if problem:
        for mode in MODES:
            rows[mode, provider].error = problem
        return {}

    def both() -> object:
        return torch.autograd.grad(function(*inputs), wanted, grad_out)

    return {
        ("forward", provider): lambda: function(*inputs),
        ("backward", provider): lambda: torch.autograd.grad(
            output, wanted, grad_out, retain_graph=True
        ),
        ("both", provider): both,
    }


def num_repeats(call: Callable[[], object], device_type: str) -> int:
    """Return how often a call is repeated within a sample, so that clocks resolve it."""
    call()
    fastest = min(harness.time_calls(call, 5, device_type))
    return max(1, math.ceil(MIN_SAMPLE_MS[device_type] / max(fastest, 1e-4)))


def time_visit(
    call: Callable[[], object], num_repeats: int, num_samples: int, device: Any
) -> list[float]:
    """Return the time of a call in us, num_samples times."""
    if device.type != "cuda":

        def sample() -> None:
            for _ in range(num_repeats):
                call()

        sample()
        times = harness.time_calls(sample, num_samples, "cpu")
        return [1e3 * t / num_repeats for t in times]
    return [1e3 * cold_time(call, device) for _ in range(num_samples)]


def cold_time(call: Callable[[], object], device: Any) -> float:
    """Return the time of one call in ms on CUDA, its inputs not in cache.

    The flush also keeps the GPU busy while the host queues the call, so that what is timed is the
    GPU's work and not the launch.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def build_report(
    bench: ModuleType,
    flags: Namespace,
    measured: list[Measured],
    environment: dict[str, Any],
    command: str,
) -> harness.Report:
    """Return the report of a run."""
    device = "GPU" if environment["gpu"] != harness.NOT_AVAILABLE else "CPU"
    return harness.Report(
        title=f"Op {flags.op} on {environment['gpu' if device == 'GPU' else 'cpu']}",
        question=bench.QUESTION,
        result=result_sentences(bench, measured),
        setup=environment,
        method=[
            f"{flags.blocks} blocks; in each every provider is visited twice, there and back, in "
            f"an order that changes from block to block. A visit is {flags.samples} samples, on a "
            "CPU after one that does not count. Outputs are checked before they are timed.",
            "GB/s is the least number of bytes that must move over the median time; on CUDA every "
            "sample starts with a cold cache.",
            "Ratios are baseline's time / provider's, block by block, with a distribution-free "
            "interval for their median; above 1 is faster.",
        ],
        headers=HEADERS,
        rows=[table_row(bench, m, measured) for m in measured],
        reproduce=command,
        limits=[f"{m.case}, {m.provider}: {m.error}" for m in measured if m.error]
        or ["Alone in a loop: in a model the op shares caches and launches with its neighbours."],
        data={"measured": [m.__dict__ | {"case": str(m.case)} for m in measured]},
    )


def table_row(bench: ModuleType, row: Measured, measured: list[Measured]) -> list[str]:
    """Return one line of the table."""
    start = [str(row.case), row.mode, row.provider]
    if row.error is not None:
        return [*start, f"failed: {row.error}"] + [harness.NOT_AVAILABLE] * (len(HEADERS) - 4)
    summary = harness.Summary.of(harness.flat(row.blocks))
    return [
        *start,
        str(summary),
        harness.short(bench.num_bytes(row.case, row.mode) / summary.p50 / 1e3),
        f"{1e3 * summary.p50 / row.case.numel:.3g}",
        str(speed(bench, row, measured) or harness.NOT_AVAILABLE),
        f"{row.first_call_s:.2f}",
    ]


def speed(bench: ModuleType, row: Measured, measured: list[Measured]) -> harness.Ratio | None:
    """Return how many times faster than the baseline a row is."""
    for other in measured:
        if (other.case, other.mode, other.provider) == (row.case, row.mode, bench.BASELINE):
            return harness.block_ratio(other.blocks, row.blocks) if other.blocks else None
    return None


def result_sentences(bench: ModuleType, measured: list[Measured]) -> list[str]:
    """Say how fast each provider is against the baseline, over all cases."""
    parts = []
    for provider in bench.PROVIDERS:
        ratios = [
            found.median
            for row in measured
            if row.provider == provider and row.mode == "both" and not row.error
            if (found := speed(bench, row, measured)) is not None
        ]
        if ratios and provider != bench.BASELINE:
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            parts.append(f"{provider} {statistics.median(ratios):.2f} x ({spread})")
    return [f"Forward and backward together, speed against {bench.BASELINE}: {'; '.join(parts)}."]


if __name__ == "__main__":
    sys.exit(main())
