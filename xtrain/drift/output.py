"""Where results go: stdout and files. What the disk does is no internal error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xtrain.command_line import show
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
