"""What the commands share: a parser that answers in one line, how a command ends; no torch."""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Exit codes: the run failed; what the user asked for, or gave to read, is wrong; a fault of the
# program; Ctrl-C (128 + SIGINT); the reader of our output has left (128 + SIGPIPE).
FAILURE, USAGE, INTERNAL, INTERRUPTED, NO_READER = 1, 2, 70, 130, 141

# By name and module: importing their classes here would import torch for a wrong flag. The most
# derived class of an error that is named decides.
INPUT_ERRORS = {"ConfigError", "DataError", "CheckpointError"}
FAILURES = {
    "CheckpointWriteError",
    "DriftError",
    "PassError",
    "SiteError",
    "TrainingError",
    "VerifyError",
}
# What the disk refuses is no mistake of the user's.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
LONGEST_LINE = 2000  # of an error; a value that somebody else wrote may be of any size


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
        self.exit(USAGE, f"error: {as_line(message)}\n")


def limit_spinning() -> None:
    """Have idle OpenMP threads of torch, which must not be imported yet, sleep after 0.1 ms or so.

    By default they spin for milliseconds. Where another process wants a core as well, they take it
    from the very thread that they wait for: beside one busy process a step of the small preset took
    3.9 s on two cores, and 0.6 s with this (0.27 s alone). The user's own setting stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


class OutputError(Exception):
    """A stdout that takes nothing: its disk is full, say."""


def output_file(text: str) -> Path:
    """Parse the name of a file to write: what cannot be one is refused before the work, not after.

    Folders on the way to it are made when it is written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written into {folder}")
    return path


def leave_stdout() -> None:
    """Drop what is in the buffer: it would fail once more when Python ends, with its own code."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # not a file of the system
        pass


def show(text: str) -> None:
    """Write a command's result to stdout. A reader that has left, such as head, changes no code.

    Raises: OutputError for a stdout that takes nothing.
    """
    if sys.stdout is None:  # closed by whoever started the command
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # a prompt may hold what a terminal's encoding, or any encoding, has not
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        leave_stdout()
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to stdout: {error.strerror}") from None


@dataclass
class Status:
    """The exit code of a command."""

    code: int = 0


@contextmanager
def exit_codes(*, usage: int = USAGE, failure: int = FAILURE) -> Iterator[Status]:
    """Turn whatever ends a command into an exit code, and an error into one line on stderr.

    What a user can cause is `usage` or `failure`. Anything else is a fault of the program: its
    trace goes to a file, and the line says where that is. Warnings of xtrain's log are shown on
    stderr, a line each, unless the command shows the log in its own way.
    """
    status = Status()
    with _warnings_on_stderr():
        try:
            yield status
            show("")  # what is still in the buffer
        except (SystemExit, GeneratorExit):
            raise
        except KeyboardInterrupt:  # outside of the training loop, which ends more gently
            status.code = INTERRUPTED
            _say("\ninterrupted")
        except BrokenPipeError:
            status.code = NO_READER
            leave_stdout()
        except BaseException as error:  # a panic of the packages in Rust is no Exception
            status.code, line = _ending(error, usage, failure)
            try:
                show("")
            except OutputError:
                pass  # the first error is the one to tell
            _say(line)


def _say(line: str) -> None:
    """Print to stderr; where nobody takes it, the exit code says what there is to say."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[[Sequence[str] | None], int]:
    """Decorate a `main` that returns its exit code: errors become one too, as in `exit_codes`."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        with exit_codes() as status:
            status.code = main(arguments)
        return status.code

    return run


def _ending(error: BaseException, usage: int, failure: int) -> tuple[int, str]:
    """Return the exit code of an error and the line that is said of it."""
    whole = error
    if "torch._dynamo" in sys.modules:
        from xtrain import torch_compat

        error = torch_compat.cause_of(error)
        if torch_compat.is_missing_compiler(error):
            what = f"torch.compile needs a compiler: {as_line(error, 300)}"
            return failure, f"error: {what}; install one, or leave out --compile"
    for kind in type(error).__mro__:
        if kind.__module__.startswith("xtrain.") and kind.__name__ in INPUT_ERRORS | FAILURES:
            code = usage if kind.__name__ in INPUT_ERRORS else failure
            return code, f"error: {as_line(error)}"
    if isinstance(error, OutputError):
        return failure, f"error: {as_line(error)}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        code = failure if error.errno in DISK_ERRORS else usage
        return code, f"error: cannot read or write {error.filename}: {error.strerror}"
    if _is_out_of_memory(error):
        return (
            failure,
            f"error: out of memory: {as_line(error, 300)}; a smaller model or batch needs less",
        )
    return INTERNAL, _internal_error(whole)


def as_line(message: object, length: int = LONGEST_LINE) -> str:
    """Return a message as one line that a terminal prints and does not obey."""
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def _is_out_of_memory(error: BaseException) -> bool:
    """NumPy's, torch's of a device, and torch's of the CPU, which is a bare RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _internal_error(error: BaseException) -> str:
    """Keep the trace of a fault of the program and return the line that tells of it."""
    what = ": ".join(filter(None, (type(error).__name__, as_line(error, 300))))
    version = getattr(sys.modules.get("torch"), "__version__", "not imported")
    head = f"{sys.argv}\nPython {platform.python_version()}, torch {version}\n\n"
    trace = head + "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="xtrain-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
        where = f"with its trace, which was written to {path}"
    except OSError:  # no folder takes it: better here than nowhere
        _say(trace)
        where = "with its trace, which is above as no folder for it could be written to"
    return f"internal error: {what}; this is a fault of xtrain, please report it {where}"


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    logger = logging.getLogger("xtrain")
    before = logger.handlers
    if before:
        yield
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_OneLine())
    logger.handlers = [handler]
    try:
        yield
    finally:
        if logger.handlers == [handler]:  # else the command has put its own there
            logger.handlers = before


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {as_line(record.getMessage())}"
