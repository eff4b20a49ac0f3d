"""Time the providers of one op on one case, in turn, after a check of what they compute.

On CUDA calls are captured in a graph and the graph is replayed, so that the host's launches cost
nothing; a call that reads a value back to the host cannot be captured and is timed as it is. Where
a call's tensors would fit in a few L2 caches, consecutive calls work on different copies of them.

Compiling takes most of a run over all ops and uses one core; its results (inductor's graphs,
Triton's binaries) are cached on disk under keys that do not know the process. `fill_caches` has
several processes fill them, so that one process can then time.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import harness
from bench.ops import bench_of
from bench.ops.common import (
    COPY,
    EAGER,
    OURS,
    Bench,
    Case,
    NotThere,
    Yardstick,
    forward_and_backward,
    outputs_of,
)

SAMPLE_MS = {"cpu": 2.0, "cuda": 1.0}  # calls are repeated until a sample is this long
VISIT_MS = 4.0  # samples of a visit together, where calls are that short
MAX_SAMPLES = 5
MAX_CALLS_IN_GRAPH = 50
COPY_BYTES = 2**28  # of one copy_: on an H200 one of 2**29 bytes ran at two thirds of the rate
FILL_S = 90  # of all processes that fill the caches
L2_CACHES = 4  # a working set of so many L2 caches hides nothing


@dataclass
class Measured:
    """One provider on one case and mode: what was measured, or why it was not."""

    op: str
    case: Case
    mode: str
    provider: str
    blocks: list[list[list[float]]] = field(default_factory=list)  # ms a call, by block and visit
    num_bytes: int | None = None
    num_flops: int | None = None
    peak_bytes: int | None = None
    error_ratio: float | None = None  # error against fp64, in units of plain PyTorch's
    first_call_s: float | None = None
    note: str = ""
    missing: str | None = None  # not there, and why
    error: str | None = None  # failed, or computed the wrong thing

    @property
    def is_timed(self) -> bool:
        return bool(self.blocks) and self.error is None

    @property
    def peak_gib(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / harness.GIB


@dataclass
class Plan:
    """How long to measure."""

    num_blocks: int = 7
    providers: Sequence[str] | None = None  # None: all


def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's last cache; 0 of a CPU, whose caches are part of what is timed."""
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0


def num_copies(working_set: int, l2_bytes: int) -> int:
    """Return how many copies of a call's tensors make the L2 useless."""
    return max(1, math.ceil(L2_CACHES * l2_bytes / max(working_set, 1)))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timed:
    """Calls that take turns over several sets of inputs, as one sample of known length."""

    def __init__(
        self, device: torch.device, call: Callable[[Any], object], sets: list[Any], capture: bool
    ):
        self.device_type, self.sets, self.call = device.type, sets, call
        for one in sets[:2]:
            call(one)
        wait(device)
        fastest = min(harness.time_calls(lambda: call(sets[0]), 3, device.type))
        wanted = math.ceil(SAMPLE_MS[device.type] / max(fastest, 1e-3))
        self.num_calls = max(len(sets), min(wanted, MAX_CALLS_IN_GRAPH))
        self.graph = self._captured() if capture else None
        sample_ms = fastest * self.num_calls
        self.num_samples = max(1, min(MAX_SAMPLES, round(VISIT_MS / sample_ms)))

    def _run(self) -> None:
        # as many results stay alive as there are sets: memory that is used again at once is cached
        kept: deque[object] = deque(maxlen=len(self.sets))
        for i in range(self.num_calls):
            kept.append(self.call(self.sets[i % len(self.sets)]))

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph

    def visit(self) -> list[float]:
        """Return the time of a call in ms, num_samples times; a sample before does not count."""
        sample = self._run if self.graph is None else self.graph.replay
        sample()
        times = harness.time_calls(sample, self.num_samples, self.device_type)
        return [t / self.num_calls for t in times]


def measure_case(bench: Bench, case: Case, device: torch.device, plan: Plan) -> list[Measured]:
    """Return the times of every mode and provider on one case; if it fails, rows that say why."""
    run = CaseRun(bench, case, device, plan)
    try:
        run.check()
        for mode in bench.modes:
            run.time(mode)
        rows = sorted(run.rows.values(), key=lambda row: bench.modes.index(row.mode))
    except Exception as error:
        rows = rows_of_failure(bench, case, error)
    del run
    # what a case left behind, compiled code too: dynamo limits how much one function has
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def rows_of_failure(bench: Bench, case: Case, error: Exception) -> list[Measured]:
    return [new_row(bench, case, mode, "all", **why(error)) for mode in bench.modes]


def new_row(bench: Bench, case: Case, mode: str, provider: str, **facts: Any) -> Measured:
    counts = (of(case, mode) for of in (bench.num_bytes, bench.num_flops))
    return replace(Measured(bench.op, case, mode, provider, [], *counts), **facts)


def why(error: Exception) -> dict[str, str]:
    """Return what a row says of a failure."""
    if isinstance(error, NotThere):
        return {"missing": str(error)}
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


class CaseRun:
    """One case of an op: every provider is checked, then those that are right take turns."""

    def __init__(self, bench: Bench, case: Case, device: torch.device, plan: Plan):
        self.bench, self.case, self.plan, self.device = bench, case, plan, device
        self.on_gpu = device.type == "cuda"
        self.names = [p for p in bench.providers if plan.providers is None or p in plan.providers]
        self.rows = {
            (mode, p): new_row(bench, case, mode, p) for mode in bench.modes for p in self.names
        }
        self.functions: dict[str, Callable[..., Any]] = {}  # of the providers that are right

    def check(self) -> None:
        """Draw the inputs and hold every provider to the truth."""
        torch.manual_seed(0)
        self.inputs = self.bench.make_inputs(self.case, self.device)
        yardstick = Yardstick.of(self.bench, self.case, self.inputs)
        for name in self.names:
            facts: dict[str, Any] = {}
            try:
                if name == OURS and self.on_gpu:
                    reason = self.bench.supports(self.case, self.inputs)
                    note = f"runs the decomposition: {reason}" if reason else ""
                    facts["note"] = note or self.bench.form(self.case, self.inputs)
                function = self.bench.providers[name].of(self.case, self.device)
                self._check(name, function, yardstick, facts)
            except Exception as error:  # one provider's failure costs its own rows
                facts |= why(error)
            if not facts.get("error") and not facts.get("missing"):
                self.functions[name] = function
            for mode in self.bench.modes:
                self.rows[mode, name] = replace(self.rows[mode, name], **facts)

    def _check(
        self,
        name: str,
        function: Callable[..., Any],
        yardstick: Yardstick,
        facts: dict[str, Any],
    ) -> None:
        """Note the provider's error, first call and peak memory."""
        provider = self.bench.providers[name]
        mine = self.inputs.clone() if provider.mutates else self.inputs
        start = time.perf_counter()
        results = forward_and_backward(function, mine)
        wait(self.device)
        facts["first_call_s"] = time.perf_counter() - start
        if provider.own_mask:
            assert self.bench.check_own_mask is not None
            facts["error"] = self.bench.check_own_mask(self.case, function, self.inputs)
        else:
            parts = [self.bench.part(self.case, t) for t in results]
            found = yardstick.compare(parts, provider.error_factor)
            del parts
            facts["error_ratio"], facts["error"] = found
        del results
        call = partial(forward_and_backward, function, mine)
        facts["peak_bytes"] = peak_bytes(call, self.device)

    def time(self, mode: str) -> None:
        """Let the providers take turns, block by block."""
        made = {name: self._timed(mode, name) for name in self.functions}
        timed = {name: calls for name, calls in made.items() if calls is not None}
        if (num_bytes := self.bench.num_bytes(self.case, mode)) is not None and timed:
            self.rows[mode, COPY] = new_row(self.bench, self.case, mode, COPY)
            timed[COPY] = _copy(num_bytes, self.device)
        for block in range(self.plan.num_blocks if timed else 0):
            for name in timed:
                self.rows[mode, name].blocks.append([])
            for name in harness.order_of_block(list(timed), block):
                self.rows[mode, name].blocks[-1].append(timed[name].visit())
        del made, timed
        if self.on_gpu:
            torch.cuda.empty_cache()  # the graphs' memory

    def _timed(self, mode: str, name: str) -> Timed | None:
        """Return a provider's timed calls; None, with the reason in its row, if they fail."""
        row, inputs, function = self.rows[mode, name], self.inputs, self.functions[name]
        run = {"forward": outputs_of, "both": forward_and_backward}[mode]
        working_set = sum(t.numel() * t.element_size() for t in inputs.tensors)
        wanted = num_copies(max(working_set, row.num_bytes or 0), l2_bytes(self.device))
        sets = [] if self.bench.providers[name].mutates else [inputs]
        sets += [inputs.clone() for _ in range(wanted - len(sets))]
        try:
            reason = reads_back(lambda: run(function, sets[0])) if self.on_gpu else None
            if reason:
                row.note = "; ".join(filter(None, [row.note, f"launches included: {reason}"]))
            capture = self.on_gpu and reason is None
            return Timed(self.device, lambda one: run(function, one), sets, capture)
        except Exception as error:
            row.error = why(error)["error"]
            return None


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the most memory one call held at a time beyond what was there, results included."""
    if device.type != "cuda":
        return harness.cpu_tensor_peak_bytes(call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = call()
    torch.cuda.synchronize(device)
    del results
    return torch.cuda.max_memory_allocated(device) - before


def reads_back(call: Callable[[], object]) -> str | None:
    """Return why a call cannot be captured in a CUDA graph: it waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return "it reads a value back to the host"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _copy(num_bytes: int, device: torch.device) -> Timed:
    """Return copies that read and write num_bytes in all."""
    half = max(num_bytes // 2, 1)

    def buffers() -> tuple[Tensor, Tensor]:
        source = torch.randint(256, (half,), dtype=torch.uint8, device=device)
        return torch.empty_like(source), source

    def copy(pair: tuple[Tensor, Tensor]) -> None:
        for target, source in zip(*(t.split(COPY_BYTES) for t in pair), strict=True):
            target.copy_(source)

    sets = [buffers() for _ in range(num_copies(num_bytes, l2_bytes(device)))]
    return Timed(device, copy, sets, device.type == "cuda")


# --- caches ---------------------------------------------------------------------------------------


def fill_caches(
    tasks: Sequence[tuple[str, int]], device_type: str, num_processes: int
) -> list[str]:
    """Compile every provider of some cases, of an op by number; say what went wrong.

    That costs time alone: the run itself meets it again and puts it in the table.
    """
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + FILL_S
    problems = []
    with context.Pool(num_processes, _prepare, (torch.get_num_threads(),)) as pool:
        calls = [pool.apply_async(_compile, (device_type, *task)) for task in tasks]
        for call, (op, number) in zip(calls, tasks, strict=True):
            try:
                problems += call.get(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                problems.append(f"{op}, case {number}: not compiled within {FILL_S} s")
            except Exception as error:
                problems.append(f"{op}, case {number}: {why(error)['error']}")
    return problems


def _prepare(num_threads: int) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # each process has compile workers of its own
    torch.set_num_threads(num_threads)  # part of the key of CPU code


def _compile(device_type: str, op: str, number: int) -> list[str]:
    """Compile the providers of one case; return what failed."""
    bench, device, problems = bench_of(op), torch.device(device_type), []
    case = bench.cases[device_type][number]
    torch.manual_seed(0)
    inputs = bench.make_inputs(case, device)
    for name, provider in bench.providers.items():
        try:
            if name != EAGER:
                forward_and_backward(provider.of(case, device), inputs.clone())
        except NotThere:
            continue
        except Exception as error:
            problems.append(f"{op}, {name}: {why(error)['error']}")
    torch._dynamo.reset()
    return problems
