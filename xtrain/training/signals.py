"""Ctrl-C and SIGTERM while a run is at work."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


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
