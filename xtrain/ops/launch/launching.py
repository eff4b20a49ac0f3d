"""How launchers launch: at once, and noted down where somebody records what an op launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton

Launch = tuple[triton.JITFunction, Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


class _OfThread(threading.local):
    note: Callable[[Launch], None] | None = None


_of_thread = _OfThread()


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], /, *args: Any, **options: Any
) -> None:
    """Do kernel[grid](*args, **options); every kernel of an op that is replayed goes through here.

    A launch that did not would be missing where the op is replayed (replay.py).
    """
    compiled = kernel[grid](*args, **options)
    if _of_thread.note is not None:
        _of_thread.note((kernel, compiled, grid, args, options))


class noting:
    """Call `note` with each launch that this thread makes inside the context."""

    def __init__(self, note: Callable[[Launch], None]):
        self._note = note

    def __enter__(self) -> None:
        _of_thread.note = self._note

    def __exit__(self, *_: object) -> None:
        _of_thread.note = None
