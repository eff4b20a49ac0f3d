"""SIGTERM and SIGHUP as exceptions, so that what a command was writing is removed as on Ctrl-C.

For the commands alone: a program that calls the library keeps its own handlers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Another signal within this time finds the first one's clean-up under way, and is left out.
GRACE_S = 10.0


class Terminated(BaseException):
    """Raised where a signal arrives; a BaseException, so that nothing takes it for an error."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


@contextmanager
def termination_raises() -> Iterator[None]:
    """Within the context SIGTERM and SIGHUP raise Terminated; one that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread set handlers
        return
    process, last = os.getpid(), -GRACE_S

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != process:  # a fork of this process writes no record
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first, last = time.monotonic() - last >= GRACE_S, time.monotonic()
        if first:
            raise Terminated(number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
