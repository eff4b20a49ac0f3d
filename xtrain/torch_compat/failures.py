"""Failures of a backend: which of them Dynamo answers by leaving code to eager, and their cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_IN_BACKWARD = re.compile(r"Error detected in \w+\. Traceback of forward call")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*')
_IN_FORWARD = "Original traceback:"


def leaves_code_to_eager(error: BaseException) -> bool:
    """Return whether Dynamo answers this exception of a backend by running code without it."""
    return isinstance(error, torch._dynamo.exc.exceptions_allowed_to_be_fallback)


def cause_of(error: BaseException) -> BaseException:
    """Return what a failed compilation failed with, without the exceptions wrapped around it."""
    inner = getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, BaseException) else error


def is_missing_compiler(error: BaseException) -> bool:
    """Return whether inductor found no C++ compiler on this machine."""
    return isinstance(error, torch._inductor.exc.InvalidCxxCompiler)


@contextmanager
def noting_backward_errors() -> Iterator[list[str]]:
    """Hand out a list that receives the forward's stack of each op whose backward fails to trace.

    The exception itself knows only the backward's code. AOTAutograd traces with anomaly detection
    on, which says in a warning where the forward called the op.
    """
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_IN_BACKWARD.pattern)
        show = warnings.showwarning

        def note(message: Any, *args: Any, **keywords: Any) -> None:
            if _IN_BACKWARD.match(str(message)):
                found.append(str(message))
            else:
                show(message, *args, **keywords)

        warnings.showwarning = note
        yield found


def frames(stack: str) -> list[tuple[str, str]]:
    """Return (file, line) of each frame in a printed stack, outermost first."""
    return [(found["file"], found["line"]) for found in _FRAME.finditer(stack)]


def forward_stack(error: BaseException, in_backward: list[str]) -> str:
    """Return the printed stack of the op that failed to trace, "" where nothing tells it.

    Args:     in_backward: what `noting_backward_errors` has noted.
    """
    if in_backward:
        return in_backward[-1]
    text = str(error.args[0]) if error.args else ""  # fx's interpreter puts it behind the message
    return text.partition(_IN_FORWARD)[2]
