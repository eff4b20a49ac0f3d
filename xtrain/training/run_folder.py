"""The folder of one run: config.toml, metrics.jsonl, loss.png, tokenizer, checkpoints/.

A run never writes into a folder that it has not made, except by --resume, and holds the folder's
lock while it is at work. A folder with the configuration of a run and nothing that was trained is
what a start has left that was killed: its name is free, and --resume starts the run.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from xtrain import checkpoint
from xtrain.config import ConfigError, RunConfig
from xtrain.files import (
    Check,
    check_fields,
    file_bytes,
    is_at,
    is_count,
    is_object,
    is_temporary,
    json_value,
    remove_stale,
    replace_text,
    shown,
    try_lock,
    why,
)

# What a start writes before the first step.
_OF_A_START = {
    "config.toml",
    "metrics.jsonl",
    "tokenizer.json",
    "tokenizer_config.json",
    ".lock",
}


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.lock_file = path / ".lock"
        self._lock: TextIO | None = None
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "loss.png"
        self.tokenizer = path / "tokenizer.json"
        self.special_tokens = path / "tokenizer_config.json"  # JsonTokenizer.save writes it
        self.checkpoints = path / "checkpoints"
        self.drift = path / "drift"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    @property
    def resume_command(self) -> str:
        """What its user types to go on with it."""
        return f"python -m xtrain.train --resume {self.path}"

    @property
    def is_unused(self) -> bool:
        """Whether the folder is empty, or holds a start after which nothing was trained."""
        names = {name for name in os.listdir(self.path) if not is_temporary(name)}
        return names <= _OF_A_START and not (self.metrics.is_file() and self.metrics.stat().st_size)

    def remove_if_unused(self) -> bool:
        """Delete the folder, unless something was trained in it; return whether it is gone."""
        try:
            if not self.is_unused:
                return False
            for path in sorted(self.path.iterdir(), key=lambda path: path == self.lock_file):
                path.unlink()  # the lock at the end
            self.path.rmdir()
        except OSError:
            return False
        return True

    def acquire(self) -> None:
        """Lock the folder until `release`: one process at a time trains in it. Readers need none.

        The lock is the system's, on a file held open: it ends with its process, however that ends.

        Raises: ConfigError if another process holds it, or the folder cannot be written to.
        """
        if not self._try_lock():
            raise ConfigError(self._in_use())
        remove_stale(self.path)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_lock(self) -> bool:
        try:
            file = open(self.lock_file, "a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run's folder {self.path}: {why(error)}"
            ) from None
        # or a start that failed has just removed it
        if try_lock(file) is False or not is_at(file, self.lock_file):
            file.close()
            return False
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._lock = file
        return True

    def _in_use(self) -> str:
        try:
            owner = (
                " ".join(self.lock_file.read_text(encoding="utf-8").split()) or "another process"
            )
        except (OSError, ValueError):
            owner = "another process"
        return (
            f"{self.path} is in use by {owner[:80]}: one process at a time trains in a run's "
            "folder; wait for its end, or stop it"
        )

    def write_config(self, config: RunConfig, versions: Mapping[str, str]) -> None:
        """Write the resolved configuration, with the versions that ran it as a last section."""
        lines = [f"{name} = {json.dumps(version)}" for name, version in versions.items()]
        text = "\n".join([config.to_toml(), "[versions]", *lines, ""])
        replace_text(self.config, text)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the records of metrics.jsonl; a last line that a kill cut short is left out.

        Raises: ConfigError for a file or a line that is something else.
        """
        try:
            *lines, _ = file_bytes(self.metrics).split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"cannot read {self.metrics}: {why(error)}") from None
        for number, line in enumerate(lines, start=1):
            try:
                record = json_value(line)
                check_fields(_ABSENT | record if is_object(record) else record, RECORD)
            except ValueError as error:
                raise ConfigError(
                    f"{self.metrics}: line {number} is no record of a step ({why(error)}); take "
                    "the line out, or move the file away to go on without the records in it"
                ) from None
            yield record

    def open_metrics(self, first_step: int) -> TextIO:
        """Open metrics.jsonl for the records of first_step and later, dropping any it has."""
        kept = [record for record in self.read_metrics() if record["step"] < first_step]
        replace_text(self.metrics, "".join(metrics_line(record) for record in kept))
        # line-buffered: a reader sees every finished step, a kill loses none
        return self.metrics.open("a", buffering=1, encoding="utf-8")


def _is_loss(value: Any) -> bool:
    return value is None or type(value) in (int, float)


# What readers of a record rely on; not every step has a loss of the validation, for one.
_ABSENT = {"loss": None, "val_loss": None}
RECORD: dict[str, Check] = {"step": is_count, "loss": _is_loss, "val_loss": _is_loss}


def metrics_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON; a number that is not finite, which JSON has not, becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def create(folder: Path, name: str, preset: str) -> RunFolder:
    """Make and lock the folder of a new run.

    Args:   name: the folder's name; empty: `preset`, `preset-2`, `preset-3`, ...
    Raises: ConfigError if the name is taken or cannot be a folder's name.
    """
    if not name:  # another process may take a name between a look and the making
        numbered = (preset if n == 1 else f"{preset}-{n}" for n in itertools.count(1))
        return next(run for n in numbered if (run := _claim(folder / n)) is not None)
    if Path(name).name != name or name == "..":
        raise ConfigError(f"run.name must be the name of a folder, got {name!r}; see run.folder")
    run = _claim(folder / name)
    if run is not None:
        return run
    taken = RunFolder(folder / name)
    if not taken.config.is_file():
        raise ConfigError(f"{taken.path} exists already and is no run; choose another --name")
    if not taken._try_lock():
        raise ConfigError(f"{taken._in_use()}, or choose another --name")
    taken.release()
    raise ConfigError(
        f"{taken.path} exists already: add --resume to continue that run, or choose another --name"
    )


def find(folder: Path, which: str, flag: str = "--resume") -> RunFolder:
    """Return the run that a flag names.

    Args:   which: a name within folder, the path of a run, or empty: the run in folder whose
            checkpoint is the newest.
            flag: as errors call it.
    Raises: ConfigError if there is none; the message names what is there.
    """
    runs = {path.name: RunFolder(path) for path in _runs(folder)}
    if not which:
        if not runs:
            raise ConfigError(f"{flag} found no run in {folder}; name one by {flag} PATH")
        return max(runs.values(), key=_last_change)
    if which in runs:
        return runs[which]
    for path in (folder / which, Path(which)):
        try:
            os.stat(path / "config.toml")
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {why(error)}") from None
        return RunFolder(path)
    close = difflib.get_close_matches(which, runs, n=3) or sorted(runs)[:5]
    advice = f"did you mean {' or '.join(close)}?" if close else "there are none"
    raise ConfigError(f"{flag} found no run {shown(which)} in {folder} and no such path; {advice}")


def _claim(path: Path) -> RunFolder | None:
    """Return the locked folder of a new run; None if the name is taken."""
    run = RunFolder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, for one
        raise ConfigError(f"cannot make the folder of runs {path.parent}: {why(error)}") from None
    try:
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir() or not run.is_unused:
                return None
        if not run._try_lock():
            return None
        if run.is_unused:
            return run
        run.release()  # another start was quicker
        return None
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {path}: {why(error)}") from None


def _runs(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if os.path.isfile(p / "config.toml"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {why(error)}") from None


def _last_change(run: RunFolder) -> tuple[bool, float]:
    """Runs with a checkpoint come after those without: an interrupted start hides no run."""
    found = checkpoint.steps(run.checkpoints)
    times = [run.config.stat().st_mtime, *(path.stat().st_mtime for _, path in found)]
    return bool(found), max(times)
