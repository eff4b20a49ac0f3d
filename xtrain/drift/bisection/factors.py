"""Factors: settings with several values, and the child process that runs with one value of each.

NAME=VALUE,VALUE,... where NAME is

    UPPER_CASE    an environment variable; the value `unset` removes it
    python        an interpreter, or the folder of a virtual environment
    compile       off | on: --mode eager | inductor
    others        a flag of `record` that xtrain.drift.settings calls a factor: threads, batch, ...
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xtrain.drift.settings import FACTORS, FLAGS, DriftError, check_flag

VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
UNSET = "unset"
CLEAN_UP_S = 5.0  # that a child has, when it is asked to end, before it is killed


@dataclass(frozen=True)
class Factor:
    """A name with the values to try, the first of which is the baseline's."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """How a child ended."""

    code: int
    output: str
    error: str | None  # why it has no result: its last line, or the signal that killed it


def parse(text: str) -> Factor:
    """Return the factor that NAME=V1,V2 means.

    Raises: DriftError for a name that is none, fewer than two different values, or a value that no
    child could take. What only a model or a machine can refuse is for the children to say.
    """
    name, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    name = name.strip()
    if not equals or len(values) < 2 or not all(values) or len(set(values)) != len(values):
        raise DriftError(f"a factor is NAME=VALUE,VALUE of different values, got {text!r}")
    if name not in ("python", "compile", *FACTORS) and not VARIABLE.fullmatch(name):
        known = ", ".join(("python", "compile", *FACTORS))
        raise DriftError(f"unknown factor {name!r}; known: {known}, or a VARIABLE in capitals")
    if name == "compile" and not set(values) <= {"off", "on"}:
        raise DriftError(f"compile is off or on, got {rest!r}")
    for value in values:
        if name == "python":
            interpreter(value)
        elif name in FACTORS:
            check_flag(FLAGS[name], value)
    return Factor(name, values)


def parse_all(texts: Sequence[str]) -> list[Factor]:
    """Return all factors. Raises: DriftError for a name given twice, as `parse` does."""
    factors = [parse(text) for text in texts]
    names = [factor.name for factor in factors]
    for name in names:
        if names.count(name) > 1 or (name == "mode" and "compile" in names):
            raise DriftError(f"the factor {name} is given twice")
    return factors


def interpreter(value: str) -> str:
    """Return the Python of a virtual environment's folder, or the interpreter itself."""
    path = Path(value)
    found = path / "bin" / "python" if path.is_dir() else path
    if not os.access(found, os.X_OK):
        raise DriftError(f"python={value} is neither an interpreter nor a virtual environment")
    return str(found)


def run_child(
    arguments: Sequence[str], setting: Mapping[str, str], *, bootstrap: str | None = None
) -> Result:
    """Run `python -m xtrain.drift ARGUMENTS` alone, under a setting of factors.

    bootstrap: Python that runs first, in the same interpreter.
    """
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[3])  # this xtrain, whatever the interpreter has
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([root, *([inherited] if inherited else [])])
    python, flags = sys.executable, []
    for name, value in setting.items():
        if name == "python":
            python = interpreter(value)
        elif name == "compile":
            flags.append(f"--mode={'inductor' if value == 'on' else 'eager'}")
        elif name in FACTORS:
            flags.append(f"--{name}={value}")
        elif value == UNSET:
            environment.pop(name, None)
        else:
            environment[name] = value
    start = ["-m", "xtrain.drift"]
    if bootstrap is not None:
        script = f"{bootstrap}\nfrom xtrain.drift.cli import main\nsys.exit(main())"
        start = ["-c", f"import sys\n{script}"]
    command, pipe = [python, *start, *arguments, *flags], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            output, errors = child.communicate()
        except BaseException:  # when this process is ended the child goes first, and may clean up
            child.terminate()
            try:
                child.wait(CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return Result(child.returncode, output, _failure(child.returncode, errors))


def _failure(code: int, stderr: str) -> str | None:
    if code == 0:
        return None
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return (lines[-1].strip() if lines else f"exit code {code}").removeprefix("error: ")
