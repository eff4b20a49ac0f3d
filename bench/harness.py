"""What every benchmark shares: statistics, timing, memory, the machine, flags.

The scripts beside this file are the commands; report.py is the report of all of them.

train/      a training step, ours and others': what is compared (variants), of what (models,
            subject), by processes that take turns, and what came out (report)
ops/        every op against its alternatives: `Bench` (common), timing, report, a file a family
coverage/   what xtrain.compile does to every causal language model of transformers
drift/      what is done with records of xtrain.drift
results/    committed reports

A step time is summed up as p20, p50 and p80. Two variants are compared block by block: in a block
every variant is visited twice, there and back (A B C C B A), so that drift of the machine cancels;
the order changes from block to block, since what ran before matters too: a GPU at its power limit
is faster after light work. The ratio of two variants is formed within each block, and the median of
these ratios is given with a distribution-free confidence interval.

torch is imported only where something is measured, so that `--help` answers at once.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import NOT_AVAILABLE, short
from xtrain.command_line import output_file
from xtrain.rng import SEED_RANGE

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
# Read where torch is imported: keeps the profiler's start and stop lines off the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """p20, p50 and p80 of `count` measurements."""

    p20: float
    p50: float
    p80: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        p20, p50, p80 = np.percentile(values, (20, 50, 80)).tolist()
        return cls(p20, p50, p80, len(values))

    def __str__(self) -> str:
        return f"{short(self.p50)} [{short(self.p20)}, {short(self.p80)}]"


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """Return (low, high, coverage) of an interval for the median of what `values` are drawn from.

    The k-th smallest and k-th largest value, k as large as the wanted coverage allows: the median
    lies between them with probability 1 - 2 * P(Binomial(n, 1/2) < k), whatever the distribution.
    With fewer than 6 values even their whole range covers less than 95%; the last item says so.
    """
    ordered, n = sorted(values), len(values)

    def reached(k: int) -> float:
        return max(0.0, 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)

    k = max((k for k in range(1, (n + 1) // 2 + 1) if reached(k) >= coverage), default=1)
    return ordered[k - 1], ordered[n - k], reached(k)


@dataclass(frozen=True)
class Ratio:
    """The median of block-wise ratios, with its interval."""

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_cost(self) -> str:
        """Return a ratio of times as what the numerator costs on top, in percent."""
        cost, low, high = (100 * (x - 1) for x in (self.median, self.low, self.high))
        return f"{cost:.1f}% [{low:.1f}, {high:.1f}]"

    def verdict(self) -> str:
        """Return which way a ratio of speeds points, if its interval leaves no doubt."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no measurable difference"


Visits = Sequence[Sequence[float]]  # the times of one variant in one block, visit by visit


def block_ratio(numerator: Sequence[Visits], denominator: Sequence[Visits]) -> Ratio:
    """Return the Ratio of two variants' times; of a block, the mean of its visits' medians."""
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"blocks must pair up, got {len(numerator)} and {len(denominator)}: compare variants "
            "that ran in the same blocks"
        )
    ratios = [_mean_visit(a) / _mean_visit(b) for a, b in zip(numerator, denominator, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios))


def _mean_visit(visits: Visits) -> float:
    return statistics.fmean(statistics.median(times) for times in visits)


def flat(blocks: Sequence[Visits]) -> list[float]:
    """Return all times of some blocks."""
    return [t for visits in blocks for times in visits for t in times]


def order_of_block(names: Sequence[str], block: int) -> list[str]:
    """Return the visits of a block: an order of the names, then the same backwards.

    Over as many blocks as there are names each has stood at each position once, and for an even
    number of them beside each other one equally often.
    Source: Williams 1949 (row-complete Latin squares: 0, 1, n - 1, 2, n - 2, ... shifted by block).
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    order = [names[(position + block) % n] for position in zigzag]
    return order + order[::-1]


# --- timing and memory ----------------------------------------------------------------------------


def time_calls(call: Callable[[], object], num_calls: int, device_type: str) -> list[float]:
    """Return the time of each of num_calls calls in ms, one after the other.

    CUDA: between events in the stream; the host may run ahead as it does in training, and waits
    only at the end. CPU: wall time.
    """
    if device_type != "cuda":
        times = []
        for _ in range(num_calls):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def cpu_tensor_peak_bytes(call: Callable[[], object]) -> int:
    """Return the most that tensors allocated during one call held at a time, in bytes.

    Counts what torch's CPU allocator gave out since the call began, the counterpart of CUDA's
    max_memory_allocated; what was alive before does not count.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    if not totals:
        raise RuntimeError("the profiler recorded no allocation")
    return max(totals)


# --- the machine ----------------------------------------------------------------------------------


def environment(device_type: str, commit: str | None = None) -> dict[str, Any]:
    """Return what a reader needs to know of hardware and versions; call where torch is loaded."""
    import torch

    found = {
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_threads": torch.get_num_threads(),
        "gpu": NOT_AVAILABLE,
        "gpu_power_limit_w": NOT_AVAILABLE,
        "gpu_driver": NOT_AVAILABLE,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or NOT_AVAILABLE,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit or git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if device_type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_power_limit_w"], found["gpu_driver"] = _nvidia_smi("power.limit,driver_version")
    return found


def git_commit(folder: Path = ROOT) -> str:
    """Return the commit of a checkout, "-dirty" behind it if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return output_of(command, folder) or "unknown (not a git checkout; --commit names one)"


def command_line(script: str, arguments: Sequence[str]) -> str:
    """Return the command that measures the same again, without the flags that name files."""
    kept, skip = [], False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        if skip or name in ("--json", "--markdown", "--plot", "--commit"):
            skip = not skip and not has_value
            continue
        kept.append(argument)
    return shlex.join(["python", script, *kept])


def load_average() -> float | None:
    """Return the mean number of runnable processes over the last minute, None where unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _nvidia_smi(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = output_of(command).splitlines()
    if not lines:
        return [NOT_AVAILABLE] * len(fields.split(","))
    return [value.strip() for value in lines[0].split(",")]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version_of(module: str) -> str:
    """Ask the module itself, since distributions go under several names, then its metadata."""
    from importlib import import_module, metadata

    try:
        found = import_module(module)
        return getattr(found, "__version__", None) or metadata.version(module)
    except (ImportError, metadata.PackageNotFoundError):
        return "not installed"


def output_of(command: list[str], folder: Path | None = None) -> str:
    """Return what a command prints, "" if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- flags ----------------------------------------------------------------------------------------


def add_report_flags(add: Callable[..., Any]) -> None:
    """Add what names the commit and the files of a report."""
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=output_file, metavar="FILE", help="write everything measured")
    add("--markdown", type=output_file, metavar="FILE", help="write the report")


def names_of(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the variants named in a flag, each once; ValueError for one that is unknown."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(known)}")
    return names


def device_of(given: str | None) -> str:
    """Return the device to measure on; ValueError for one that is not there."""
    import torch

    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda, cuda:N or cpu, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device")
    return device


def number(name: str, kind: type, at_least: float, at_most: float = math.inf) -> Callable:
    """Return a parser of numbers in a range, by the name that argparse calls them."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not at_least <= value <= at_most:
            raise ValueError
        return value

    parse.__name__ = name
    return parse


positive = number("positive int", int, 1)
seed = number("seed, from -2^63 to 2^64 - 1", int, *SEED_RANGE)
probability = number("probability in [0, 1)", float, 0, math.nextafter(1, 0))
