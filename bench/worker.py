"""A process of its own for each variant.

Apart, variants cannot share compiled code, caches or allocators: first-step times and memory belong
to one variant, and one that dies takes no other along. They take turns: the parent asks one worker
at a time and waits, while the others sleep.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 900.0  # for one answer: a first step that takes longer counts as hung


class VariantFailed(RuntimeError):
    """A variant that raised, died or hung; the message is what its cells say."""


class Worker:
    """The parent's side of one process."""

    def __init__(self, setting: Any, variant_name: str):
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
        try:
            self._connection.send((method, args))
        except OSError:
            raise VariantFailed(self._death(method)) from None

    def receive(self, method: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for the answer to the last `send`."""
        try:
            if not self._connection.poll(timeout_s):
                raise VariantFailed(f"{method}: no answer within {timeout_s:.0f} s")
            is_answer, value = self._connection.recv()
        except (EOFError, OSError):
            raise VariantFailed(self._death(method)) from None
        if not is_answer:
            raise VariantFailed(f"{method}: {value}")
        return value

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

    def _death(self, method: str) -> str:
        self._process.join(10)
        return f"{method}: the worker process ended (exit code {self._process.exitcode})"


class Team:
    """The workers of a run by variant; `errors` says why some have dropped out."""

    def __init__(self, setting: Any, names: Sequence[str]):
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


def serve(connection: Connection, folder: str, setting: Any, variant_name: str) -> None:
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
                module = importlib.import_module(setting.subject)
                subject = module.Subject(setting, variant_name)
            answer = (True, getattr(subject, method)(*args))
        except Exception as error:
            traceback.print_exc()
            answer = (False, describe(error))
        try:
            connection.send(answer)
        except OSError:  # the parent has gone, or has given up waiting
            return


def describe(error: BaseException) -> str:
    """Return an error as one line that fits a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
