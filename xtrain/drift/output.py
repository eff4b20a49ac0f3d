"""Where results go: stdout and files. What the reader or the disk does is no internal error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xtrain.drift.errors import DriftError


def deliver(path: str | None, values: Callable[[], Any], text: Callable[[], str]) -> None:
    """Show a report as text; with a path of --json write its values there, "-": instead.

    Raises: DriftError where that is impossible.
    """
    if path:
        written = json.dumps(values(), indent=1, allow_nan=False) + "\n"
        if path == "-":
            show(written)
            return
        write_text(path, written)
    show(text())


def write_text(path: str, text: str) -> None:
    """Write a report. Raises: DriftError where that is impossible."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DriftError(f"cannot write {path}: {error.strerror}") from None


def show(text: str) -> None:
    """Write to stdout. A reader that has left, such as head, changes no verdict.

    Raises: DriftError for a stdout that takes nothing.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # a prompt may hold what a terminal's encoding, or any encoding, has not
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # what is left in the buffer would fail once more when Python ends, with its own exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise DriftError(f"cannot write to stdout: {error.strerror}") from None
