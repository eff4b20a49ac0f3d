"""What a run and its user exchange: log lines, the progress bar, Ctrl-C."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from xtrain.command_line import leave_stdout

log = logging.getLogger(__name__)


class _Handler(logging.Handler):
    """Prints records on stdout, above the progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            tqdm.write(prefix + self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:  # the reader, such as head, has left: train on in silence
            leave_stdout()
            if not isinstance(error, BrokenPipeError):
                print(f"warning: no more is shown on stdout: {error.strerror}", file=sys.stderr)
        except Exception:  # logging's own rule is not to raise
            self.handleError(record)


def set_up_logging() -> None:
    """Show xtrain's log from INFO and Python's warnings, one line each."""
    logger = logging.getLogger("xtrain")
    logger.handlers = [_Handler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = " ".join(str(message).split())
    logging.getLogger("xtrain").warning(
        "%s (%s, %s:%d)", text, category.__name__, os.path.basename(filename), lineno
    )


class Progress:
    """A bar on a terminal; elsewhere a line every log_interval steps."""

    def __init__(self, first_step: int, steps: int, log_interval: int):
        self.steps = steps
        self.log_interval = log_interval
        self.started = False
        self.bar = tqdm(
            total=steps,
            initial=first_step,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            unit="step",
            bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
        )
        self.bar.set_postfix_str("first step, which compiles")

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one finished step."""
        loss = "skipped" if record["loss"] is None else f"loss {record['loss']:.4f}"
        rate = f"{_short(record['tokens_per_s'])} tokens/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{loss}, {rate}", refresh=False)
            if self.started:
                self.bar.update()
            else:  # the first step, which compiled, says nothing about the time of the others
                bar, self.started = self.bar, True
                bar.n = bar.initial = bar.last_print_n = record["step"] + 1
                bar.start_t = bar.last_print_t = time.time()
                bar.refresh()
            return
        step = record["step"] + 1
        if step % self.log_interval == 0 or step == self.steps or not self.started:
            self.started = True
            mfu = record.get("mfu_percent")
            log.info(
                "step %d/%d  %s  lr %.3g  grad norm %s  %.0f ms  %s%s",
                step,
                self.steps,
                loss,
                record["learning_rate"],
                "n/a" if record["grad_norm"] is None else f"{record['grad_norm']:.3g}",
                record["step_time_ms"],
                rate,
                "" if mfu is None else f"  MFU {mfu:.1f}%",
            )

    def close(self) -> None:
        """Leave the bar where it stands."""
        self.bar.close()


def _short(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM at a moment when nothing is worth a wait."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Within the context, the first SIGINT or SIGTERM ends the run.

    While `gently` is set it only sets `received`: the loop ends after its step and saves. Else,
    while data are read or the first step compiles, it raises Interrupted, once more where Python
    swallows it (in the callback of a weak reference, of which compilers make many). Where that does
    not come through within GRACE_S seconds (a compiler or a tokenizer keeps Python from running),
    `at_once` is called and the process ends. The signal's default action is restored with the
    first: a second one ends the process on the spot.
    """

    GRACE_S = 3.0

    def __init__(self) -> None:
        self.received: int | None = None
        self.gently = False
        self.at_once: Callable[[int], object] = lambda number: None
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
            # the system's handler writes a signal's number here even where Python's must wait
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
            self._hook_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            sys.unraisablehook = self._hook_before
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._writer)  # the watch ends

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        if not self.gently:
            raise Interrupted(number)
        # not through logging: a handler may run in the middle of another print
        again = "; once more leaves at once" if number == signal.SIGINT else ""
        os.write(2, f"\nstopping after this step, then saving{again}\n".encode())

    def _unraisable(self, swallowed: sys.UnraisableHookArgs) -> None:
        if isinstance(swallowed.exc_value, Interrupted):
            number = swallowed.exc_value.number
            signal.signal(number, self._handle)
            again = threading.Timer(0.05, _thread.interrupt_main, [number])  # past the callback
            again.daemon = True
            again.start()
        else:
            self._hook_before(swallowed)

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in self._before and not self.gently:
                if not self._ended.wait(self.GRACE_S) and not self.gently:
                    self.at_once(number[0])
                    os._exit(128 + number[0])
        os.close(reader)
