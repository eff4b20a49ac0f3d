"""The folder of one run: config.toml, metrics.jsonl, loss.png, tokenizer, checkpoints/.

A run never writes into a folder that it has not made, except by --resume.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from xtrain import checkpoint
from xtrain.config import ConfigError, RunConfig
from xtrain.strict_read import (
    Check,
    check_fields,
    file_bytes,
    is_count,
    is_object,
    json_value,
    shown,
    why,
)


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "loss.png"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoints = path / "checkpoints"
        self.drift = path / "drift"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    def remove_if_unused(self) -> None:
        """Delete a folder in which nothing has been written."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_config(self, config: RunConfig, versions: Mapping[str, str]) -> None:
        """Write the resolved configuration, with the versions that ran it as a last section."""
        lines = [f"{name} = {json.dumps(version)}" for name, version in versions.items()]
        text = "\n".join([config.to_toml(), "[versions]", *lines, ""])
        _replace_text(self.config, text)

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
        _replace_text(self.metrics, "".join(metrics_line(record) for record in kept))
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
    """Make the folder of a new run.

    Args:   name: the folder's name; empty: `preset`, `preset-2`, `preset-3`, ...
    Raises: ConfigError if the name is taken or cannot be a folder's name.
    """
    if name:
        if Path(name).name != name or name == "..":
            raise ConfigError(
                f"run.name must be the name of a folder, got {name!r}; see run.folder"
            )
        try:
            return _make(folder / name)
        except FileExistsError:
            raise ConfigError(
                f"{folder / name} exists already: add --resume to continue that run, or choose "
                "another --name"
            ) from None
    number = 1
    while True:  # another process may take a name between a look and the making
        try:
            return _make(folder / (preset if number == 1 else f"{preset}-{number}"))
        except FileExistsError:
            number += 1


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
    if (Path(which) / "config.toml").is_file():
        return RunFolder(Path(which))
    close = difflib.get_close_matches(which, runs, n=3) or sorted(runs)[:5]
    advice = f"did you mean {' or '.join(close)}?" if close else "there are none"
    raise ConfigError(f"{flag} found no run {shown(which)} in {folder} and no such path; {advice}")


def _make(path: Path) -> RunFolder:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, for one
        raise ConfigError(f"cannot make the folder of runs {path.parent}: {why(error)}") from None
    try:
        path.mkdir()
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder {path}: {why(error)}") from None
    return RunFolder(path)


def _runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if (path / "config.toml").is_file())


def _last_change(run: RunFolder) -> tuple[bool, float]:
    """Runs with a checkpoint come after those without: an interrupted start hides no run."""
    found = checkpoint.steps(run.checkpoints)
    times = [run.config.stat().st_mtime, *(path.stat().st_mtime for _, path in found)]
    return bool(found), max(times)


def _replace_text(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temp.write_text(text, encoding="utf-8")
        os.replace(temp, path)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
