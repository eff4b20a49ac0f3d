"""Plant one-line faults in a copy of xtrain, one at a time: a narrow test must catch each.

    python tests/planted_faults.py                 all of planted_faults.toml
    python tests/planted_faults.py --only sdpa     those with this in their name, area or test
    python tests/planted_faults.py --check         only that each still has its place and its test

The table is the measure of the suite's strength: after tests were merged or cut the same faults
must be caught. A fault that no test catches is a test that is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
AREAS = ("ops", "passes", "compiler", "drift", "data", "training")


@dataclass(frozen=True)
class Fault:
    """One fault: old is what the code says, new what it would say, caught_by the test."""

    name: str
    area: str
    old: str
    new: str
    caught_by: str


def faults() -> list[Fault]:
    """Return the table."""
    with TABLE.open("rb") as file:
        return [Fault(**row) for row in tomllib.load(file)["fault"]]


def place(fault: Fault, sources: dict[Path, str]) -> Path:
    """Return the one file that holds a fault's old text. Raises LookupError if there is none."""
    found = [path for path, text in sources.items() for _ in range(text.count(fault.old))]
    if len(found) != 1:
        raise LookupError(f"{fault.name}: its old text is there {len(found)} times, not once")
    return found[0]


def test_of(fault: Fault, tests: dict[Path, str]) -> str:
    """Return the node id of a fault's test, wherever it is. Raises LookupError if that is open."""
    stem, _, function = fault.caught_by.rpartition("::")
    definition = re.compile(rf"^def {function}\(", re.MULTILINE)
    found = [p for p, text in tests.items() if stem in ("", p.stem) and definition.search(text)]
    if len(found) != 1:
        raise LookupError(f"{fault.name}: {len(found)} files have its test {fault.caught_by}")
    return f"{found[0].relative_to(ROOT)}::{function}"


def read(folder: Path, pattern: str) -> dict[Path, str]:
    """Return the text of the files below a folder."""
    return {path: path.read_text() for path in sorted(folder.rglob(pattern))}


def places(chosen: Sequence[Fault]) -> list[tuple[Fault, Path, str]]:
    """Return each fault with the file that it goes into and its test. Raises LookupError."""
    sources, tests = read(ROOT / "xtrain", "*.py"), read(ROOT / "tests", "test_*.py")
    return [(fault, place(fault, sources), test_of(fault, tests)) for fault in chosen]


def is_caught(fault: Fault, path: Path, test: str) -> bool:
    """Plant a fault and run its test, which must begin and then fail."""
    with tempfile.TemporaryDirectory(prefix="xtrain-fault-") as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "xtrain", folder / "xtrain", ignore=ignored)
        planted = folder / path.relative_to(ROOT)
        planted.write_text(planted.read_text().replace(fault.old, fault.new))
        code, output = _pytest(folder, test)
    if code not in (0, 1):
        raise RuntimeError(f"{fault.name}: pytest ended with {code}\n{output}")
    return code == 1


def _pytest(folder: Path, test: str) -> tuple[int, str]:
    """Return exit code and output of a test with the xtrain of a folder, in a fork of this process.

    A fork has torch already, which takes longer to import than most of these tests to run.
    """
    import pytest
    import torch._dynamo  # noqa: F401

    log = folder / "output"
    if (process := os.fork()) == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder))
        # for what the test starts: the working folder, whose xtrain is whole, stays off the path
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        # pyproject.toml has pytest put the working folder in front: the copy goes before it, also
        # where a test starts pytest again
        os.environ["PYTEST_ADDOPTS"] = f"-o 'pythonpath={folder} {ROOT}'"
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", test]))
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), log.read_text()


def main() -> int:
    """Print a line for each fault; 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="TEXT", help="in name, area or test")
    parser.add_argument("--check", action="store_true", help="look the places up, run nothing")
    args = parser.parse_args()
    wanted = args.only or [""]
    chosen = places(
        [f for f in faults() if any(t in f"{f.area}/{f.name}/{f.caught_by}" for t in wanted)]
    )
    if args.check:
        print(f"{len(chosen)} faults")
        return 0
    missed = 0
    for fault, path, test in chosen:
        started = time.perf_counter()
        caught = is_caught(fault, path, test)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'} in {time.perf_counter() - started:5.1f} s"
              f"  {fault.area}: {fault.name}, by {test}", flush=True)  # fmt: skip
    print(f"{len(chosen)} faults, {missed} missed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
