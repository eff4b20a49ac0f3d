"""What the commands share: a parser that answers in one line, errors as exit codes; no torch."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from xtrain.config_fields import ConfigError

# Exit codes: the run failed; what the user asked for is wrong; Ctrl-C (128 + SIGINT).
FAILURE, USAGE, INTERRUPTED = 1, 2, 130
FAILURES = (
    "CheckpointError",
    "DriftError",
    "PassError",
    "SiteError",
    "TrainingError",
    "VerifyError",
)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations; a wrong flag is one line with the closest known ones."""

    def __init__(self, **keywords):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [flag for action in self._actions for flag in action.option_strings]
            first = unknown.split()[0]
            close = difflib.get_close_matches(first.partition("=")[0], flags, n=2)
            advice = f"did you mean {' or '.join(close)}?" if close else "--help lists the flags"
            message = f"unknown argument {first!r}; {advice}"
        self.exit(USAGE, f"error: {message}\n")


def limit_spinning() -> None:
    """Have idle OpenMP threads of torch, which must not be imported yet, sleep after 0.1 ms or so.

    By default they spin for milliseconds. Where another process wants a core as well, they take it
    from the very thread that they wait for: beside one busy process a step of the small preset took
    3.9 s on two cores, and 0.6 s with this (0.27 s alone). The user's own setting stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@dataclass
class Status:
    """The exit code of a command."""

    code: int = 0


@contextmanager
def exit_codes() -> Iterator[Status]:
    """Turn the errors that a user can cause into one line on stderr and an exit code.

    Anything else is a fault of the program and keeps its traceback.
    """
    status = Status()
    try:
        yield status
    except KeyboardInterrupt:  # outside of the training loop, which ends more gently
        status.code = INTERRUPTED
        print("\ninterrupted", file=sys.stderr)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        status.code = code
        sys.stdout.flush()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def _exit_code(error: Exception) -> int | None:
    from xtrain.data import DataError

    if isinstance(error, ConfigError | DataError):
        return USAGE
    # by name: importing their classes here would import torch for a wrong flag
    ours = type(error).__module__.startswith("xtrain.")
    return FAILURE if ours and type(error).__name__ in FAILURES else None
