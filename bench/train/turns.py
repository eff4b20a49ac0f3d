"""Variants that take turns, each in a process of its own, and the command that has them do so.

Apart, variants cannot share compiled code, caches or allocators: first-step times and memory belong
to one variant, and one that dies takes no other along. They take turns: the parent asks one worker
at a time and waits, while the others sleep.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import harness
from bench.train.variants import Kind, Setting
from xtrain.command_line import Parser

TIMEOUT_S = 900.0  # for one answer: a first step that takes longer counts as hung


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    variants: tuple[str, ...]
    num_blocks: int
    num_steps: int
    num_warm_up: int
    commit: str | None = None


@dataclass
class Outcome:
    """What one variant gave; `error` says why the rest is missing."""

    blocks: list[list[list[float]]] = field(default_factory=list)  # ms, by block and visit
    first: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


# --- the command ---------------------------------------------------------------------------------


def add_flags(add: Callable[..., Any], kind: Kind) -> None:
    """Add the flags of both commands."""
    names = ",".join(kind.default)
    add("--batch", type=harness.positive, help="samples a step (by size of model)")
    add("--seq", type=harness.positive, help="tokens a sample (by size of model)")
    add("--device", help="cuda | cuda:N | cpu (cuda where there is one)")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast (GPU: bf16, CPU: fp32)")
    add("--dropout", type=harness.probability, default=0.1, help="probability of dropping (0.1)")
    add("--variants", default=names, help=f"comma-separated ({names})")
    add(
        "--blocks",
        type=harness.positive,
        default=kind.num_blocks,
        help=f"each visits every variant twice ({kind.num_blocks})",
    )
    add("--steps", type=harness.positive, help="timed steps a visit (GPU: 10, CPU: 2)")
    add("--seed", type=harness.seed, default=0, help="of weights, data and dropout (0)")
    harness.add_report_flags(add)


Asked = tuple[Namespace, Setting, Plan, str]  # the last is the command that asks for it again


def read(
    parser: Parser,
    resolve: Callable[[Namespace], tuple[Setting, Plan]],
    arguments: Sequence[str] | None,
) -> Asked:
    """Read a command line and print the setting; a value that does not fit ends it with code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(arguments)
    try:
        setting, plan = resolve(flags)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    print(setting, flush=True)
    return flags, setting, plan, harness.command_line(parser.prog, arguments)


def compare(flags: Namespace, setting: Setting, plan: Plan, command: str) -> int:
    """Measure, write and print; return the exit code, 1 if a variant failed."""
    from bench.train.report import build_report, draw_losses

    start, load = time.perf_counter(), harness.load_average()
    environment, outcomes = run(setting, plan)
    environment |= {"load_average_before": load, "run_took_s": time.perf_counter() - start}
    report = build_report(setting, plan, environment, outcomes, command)
    report.write(flags.json, flags.markdown)
    if (plot := getattr(flags, "plot", None)) is not None:
        draw_losses(plot, setting, outcomes)
    print("\n" + "\n".join(report.result))
    for claim, wanted, measured, verdict in report.checks:
        print(f"  {verdict:>6}  {claim}: {measured} (wanted {wanted})")
    print("\n" + report.table())
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


# --- measuring -----------------------------------------------------------------------------------


def run(setting: Setting, plan: Plan) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return the environment and each variant's outcome, those run as a reference included."""
    known = setting.kind.variants
    timed = [name for name in plan.variants if known[name].timed]
    references = [known[name].reference or name for name in plan.variants]
    names = tuple(dict.fromkeys((*plan.variants, *references)))
    with Team(setting, names) as team:
        environment, outcomes = _first_steps(team, plan, names, setting.kind.num_losses, timed)
        _take_turns(team, plan, timed, outcomes)
        if setting.model != "llama" and setting.dropout:
            dropping = [name for name in plan.variants if known[name].dropout]
            for name, masks in team.ask_all(dropping, "masks").items():
                outcomes[name].masks = masks
        for name, error in team.errors.items():
            outcomes[name].error = error
    return environment, outcomes


def _first_steps(
    team: Team, plan: Plan, names: Sequence[str], num_losses: int, timed: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Build all variants and run their first steps, one after the other.

    Args:     timed: those that go on; the others are wanted for their first steps alone.
    Returns:  the environment and the outcomes, so far.
    """
    outcomes = {name: Outcome() for name in names}
    team.ask_all(names, "ready")
    environments = (team.ask(name, "environment", plan.commit) for name in names)
    environment: dict[str, Any] = next((found for found in environments if found), {})
    for name in names:
        if first := team.ask(name, "first_steps", num_losses):
            outcomes[name].first = first
            print(f"{name}: first step {first['first_step_s']:.1f} s", flush=True)
        if name not in timed:
            team.stop(name)
    return environment, outcomes


def _take_turns(
    team: Team, plan: Plan, timed: Sequence[str], outcomes: Mapping[str, Outcome]
) -> None:
    """Time the variants block by block, then ask each what it has to say in the end."""
    for block in range(plan.num_blocks):
        visits: dict[str, list[list[float]]] = {name: [] for name in timed}
        for name in harness.order_of_block(timed, block):
            if times := team.ask(name, "visit", plan.num_warm_up, plan.num_steps):
                visits[name].append(times)
        for name, both in visits.items():
            if len(both) == 2:  # else it has failed
                outcomes[name].blocks.append(both)
        print(f"block {block + 1}/{plan.num_blocks}", flush=True)
    for name in timed:
        outcomes[name].final = team.ask(name, "finish") or {}


def kernel_table(setting: Setting, plan: Plan, num_rows: int = 40) -> str:
    """Return the time of a step by kernel, the longest first, one pair of columns a variant."""
    with Team(setting, plan.variants) as team:
        found = {name: team.ask(name, "kernels", plan.num_steps) for name in plan.variants}
    found = {name: kernels for name, kernels in found.items() if kernels}
    names = sorted(
        {kernel for kernels in found.values() for kernel in kernels},
        key=lambda kernel: -max(kernels.get(kernel, (0, 0))[1] for kernels in found.values()),
    )
    lines = [" ".join(f"{name + ' ms':>20} {'calls':>7}" for name in found) + "  kernel"]
    totals = {name: sum(ms for _, ms in kernels.values()) for name, kernels in found.items()}
    lines.append(" ".join(f"{ms:20.3f} {'':>7}" for ms in totals.values()) + "  all")
    for kernel in names[:num_rows]:
        pairs = (kernels.get(kernel, (0.0, 0.0)) for kernels in found.values())
        lines.append(" ".join(f"{ms:20.3f} {n:7.1f}" for n, ms in pairs) + f"  {kernel[:100]}")
    return "\n".join(lines)


# --- processes -----------------------------------------------------------------------------------


class VariantFailed(RuntimeError):
    """A variant that raised, died or hung; the message is what its cells say."""


class Worker:
    """The parent's side of one process."""

    def __init__(self, setting: Setting, variant_name: str):
        self.variant_name = variant_name
        self._folder = tempfile.TemporaryDirectory(
            prefix="xtrain_bench_", ignore_cleanup_errors=True
        )
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, self._folder.name, setting, variant_name), daemon=False
        )
        self._process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        """Start what `receive` returns the answer of."""
        with self._alive(method):
            self._connection.send((method, args))

    def receive(self, method: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for the answer to the last `send`."""
        with self._alive(method):
            if not self._connection.poll(timeout_s):
                raise VariantFailed(f"{method}: no answer within {timeout_s:.0f} s")
            is_answer, value = self._connection.recv()
        if not is_answer:
            raise VariantFailed(f"{method}: {value}")
        return value

    @contextmanager
    def _alive(self, method: str) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self._process.join(10)
            said = f"the worker process ended (exit code {self._process.exitcode})"
            raise VariantFailed(f"{method}: {said}") from None

    def release(self) -> None:
        """Let the process end: it reads the end of the pipe once it is idle."""
        self._connection.close()

    def stop(self) -> None:
        """End the process and remove its caches."""
        self.release()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()


class Team:
    """The workers of a run by variant; `errors` says why some have dropped out."""

    def __init__(self, setting: Setting, names: Sequence[str]):
        self.errors: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}
        try:
            for name in names:
                self._workers[name] = Worker(setting, name)
        except BaseException:
            self.stop(*names)
            raise

    def ask(self, name: str, method: str, *args: Any) -> Any:
        """Return one worker's answer; None if it has failed, now or before."""
        return self.ask_all([name], method, *args).get(name)

    def ask_all(self, names: Sequence[str], method: str, *args: Any) -> dict[str, Any]:
        """Let several answer at the same time, where nothing is timed; return what came."""
        answers: dict[str, Any] = {}
        for name in names:
            self._try(name, lambda worker: worker.send(method, *args))
        for name in names:
            answers[name] = self._try(name, lambda worker: worker.receive(method))
        return {name: answer for name, answer in answers.items() if name not in self.errors}

    def stop(self, *names: str) -> None:
        """End some workers."""
        stopped = [self._workers.pop(name) for name in names if name in self._workers]
        for worker in stopped:
            worker.release()
        for worker in stopped:
            worker.stop()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*list(self._workers))

    def _try(self, name: str, call: Callable[[Worker], Any]) -> Any:
        if name in self.errors:
            return None
        try:
            return call(self._workers[name])
        except VariantFailed as failure:
            self.errors[name] = str(failure)
            print(f"{name} failed: {failure}", flush=True)
            self.stop(name)  # what it holds is for the others
            return None


def serve(connection: Connection, folder: str, setting: Setting, variant_name: str) -> None:
    """Answer the parent's questions until it closes the pipe: the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops us
    # Empty caches: every variant compiles everything, whatever earlier runs left on this machine.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
    subject = None
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if subject is None:
                from bench.train.subject import Subject

                subject = Subject(setting, variant_name)
            answer = (True, getattr(subject, method)(*args))
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            answer = (False, f"{type(error).__name__}: {text}"[:200])  # a line that fits a table
        try:
            connection.send(answer)
        except OSError:  # the parent has gone, or has given up waiting
            return
