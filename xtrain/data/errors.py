"""The one exception of xtrain.data, and opening files so that the system's errors become it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from xtrain.files import why


class DataError(ValueError):
    """What is wrong with the user's data, where, and what to do: one line, fit for the terminal."""


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn what the tokenizers package raises, a panic of its Rust included, into a DataError."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({why(error)})") from None


@contextmanager
def os_errors_as_data_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError about path into a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {why(error)}") from error


@contextmanager
def open_binary(path: str | Path) -> Iterator[BinaryIO]:
    """Open path for reading bytes; what fails while it is open is a DataError too."""
    with os_errors_as_data_errors(path), open(path, "rb") as file:
        yield file
