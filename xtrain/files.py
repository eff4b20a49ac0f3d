"""Files read strictly and written whole. No torch.

Read:    JSON and TOML that somebody else may have written. What cannot be opened is an OSError and
         what does not hold what it should a ValueError, never a hang, a RecursionError or a value
         that fails later. Both say what is wrong (`why`); the caller says which file it is and
         what to do.
Written: beside the name, flushed to the disk, then renamed, under a lock that ends with the
         process. So a kill at any moment leaves the old file or the new one, and at most a
         temporary file, which no reader takes for data and `remove_stale` takes away.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

MAX_DEPTH = 64  # of lists and objects in each other; nothing of ours needs ten

_STALE_SECONDS = 24 * 3600  # where locks say nothing

Check = Callable[[Any], bool]
# what a value must be: what passes a check, an object with fields, a list of one form
Form = Check | Mapping[str, Any] | list[Any]

# --- read ----------------------------------------------------------------------------------------


def file_bytes(path: str | Path, *, pipe: bool = False) -> bytes:
    """Return what a file holds.

    Args:   pipe: take a pipe too, as a shell's <(...) is one.
    Raises: OSError for what cannot be read, a device or a socket included, whose end may never
            come; ValueError for a name that no file can have.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not (stat.S_ISREG(mode) or pipe and stat.S_ISFIFO(mode)):
        raise OSError(errno.EINVAL, "it is no file but a device, a pipe or a socket", str(path))
    with open(path, "rb") as file:
        return file.read()


def json_file(path: str | Path) -> Any:
    """Return what a JSON file holds. Raises: OSError, ValueError."""
    return json_value(file_bytes(path))


def json_value(text: bytes) -> Any:
    """Return the values of a JSON text: no NaN, no key twice, every number finite.

    Raises: ValueError for anything else.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _shallow(value)


def toml_file(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises: OSError, ValueError."""
    return toml_tables(file_bytes(path, pipe=True).decode("utf-8"))


def toml_tables(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises: ValueError for anything else."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _shallow(found)


def toml_value(text: str) -> Any:
    """Return the value behind `name = ` in TOML; what is none is text without its quotes."""
    try:
        return toml_tables(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def check_fields(value: Any, fields: Mapping[str, Form], prefix: str = "") -> None:
    """Raise ValueError, naming the field, unless value is an object whose fields have their forms.

    A field `name?` may be absent.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the whole'} is {shown(value)}")
    for key, form in fields.items():
        name = key.removesuffix("?")
        if name in value:
            _check_form(value[name], form, prefix + name)
        elif name == key:
            raise ValueError(f"{prefix}{name} is missing")


def _check_form(value: Any, form: Form, name: str) -> None:
    if isinstance(form, Mapping):
        check_fields(value, form, f"{name}.")
    elif isinstance(form, list) and isinstance(value, list):
        for number, item in enumerate(value):
            _check_form(item, form[0], f"{name}[{number}]")
    elif isinstance(form, list) or not form(value):
        raise ValueError(f"{name} is {shown(value)}")


def listed(check: Check, size: int | None = None) -> Check:
    """Return the check for a list whose every element passes one, of `size` where it is known."""

    def passes(value: Any) -> bool:
        fits = isinstance(value, list) and size in (None, len(value))
        return fits and all(check(item) for item in value)

    return passes


def optional(check: Check) -> Check:
    """Return the check for null or what passes one."""
    return lambda value: value is None or check(value)


def one_of(values: Collection[str]) -> Check:
    """Return the check for some strings."""
    return lambda value: isinstance(value, str) and value in values


def is_count(value: Any) -> bool:
    """Return whether a value is a number of something; none in memory passes 2^63."""
    return type(value) is int and 0 <= value < 1 << 63


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def shown(value: Any, length: int = 40) -> str:
    """Return a value as an error message shows it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # a whole number of over 4300 digits has no decimal form
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def why(error: BaseException) -> str:
    """Return what was wrong, in one line, without the name of the file."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _shallow(value: Any) -> Any:
    """Return value. Raises: ValueError where lists and objects hold each other too deeply."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        inner = (v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list))
        level = [item for items in inner for item in items if type(item) in (dict, list)]
        depth += 1
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
    return found


# --- written -------------------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a temporary file that becomes path when the block ends well, and vanishes otherwise.

    Raises: OSError; path is as it was then.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with open_locked(temporary, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    flush(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole. Raises: OSError; path is as it was then."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


def is_temporary(name: str) -> bool:
    """Return whether a writer that was killed may have left a file of this name."""
    return name.endswith(".tmp")


def remove_stale(folder: Path) -> None:
    """Remove temporary files whose writer is gone: nobody holds their lock."""
    for path in folder.glob("*.tmp"):
        try:
            with open(path, "rb") as file:
                if try_lock(file) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink(missing_ok=True)
        except OSError:
            continue  # somebody else's, or gone by now


def flush(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- locks ---------------------------------------------------------------------------------------


def try_lock(file: IO[Any] | int) -> bool | None:
    """Lock an open file, or a folder's descriptor, until it is closed; without a wait.

    Returns: whether it is ours; None where the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_locked(path: Path, mode: str, on_wait: Callable[[], None] | None = None) -> BinaryIO:
    """Open path and lock it, after whoever holds it; again when it was removed in between.

    Where there are no locks, unique temporary names and the rename keep writers apart.
    """
    while True:
        file: BinaryIO = open(path, mode)  # type: ignore[assignment]  # closed by the caller
        try:
            if try_lock(file) is False:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether an open file is still the one at path, not removed or replaced since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
