"""Walk every causal language model of transformers and say what xtrain.compile does to it.

    python bench/coverage.py --jobs 2                 # all of them; at most 3 hours on two cores
    python bench/coverage.py --only llama,gpt2        # these, again
    python bench/coverage.py --quick --jobs 2         # sites and masks of those not measured yet
    python bench/coverage.py --report-only            # docs/coverage.md from what was measured

Each class is built from a shrunken configuration (two layers, hidden size 64) and checked in a
child process with a time limit: a crash, a hang or a signal is that class's result. Results are
kept in bench/results/coverage.json after each class; a second run takes up where the first ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if __package__ in (None, ""):  # run as a script: the repository's root is not on the path
    sys.path[0] = str(ROOT)
RESULTS = HERE / "results" / "coverage.json"
TABLE = ROOT / "docs" / "coverage.md"
CHECKS = ("plain", "sites", "p0", "checkpoint", "swaps")
QUICK = ("quick",)


def main() -> int:
    arguments = parse_arguments()
    from bench.coverage_models import model_types
    from bench.coverage_report import write_table

    known = model_types()
    unknown = [name for name in arguments.only if name not in known]
    if unknown:
        print(f"--only: transformers maps no causal language model to {unknown}; see its "
              "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", file=sys.stderr)  # fmt: skip
        return 2
    store = Store(arguments.results)
    if not arguments.report_only:
        checks = QUICK if arguments.quick else CHECKS
        names = arguments.only or [n for n in known if not store.holds(n, checks)]
        walk(names, checks, store, arguments)
    write_table(arguments.table, store.data, known)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda s: s.split(","), default=[], metavar="TYPE,TYPE")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time (default 1)")
    parser.add_argument("--limit", type=float, default=300, help="seconds a class may take")
    parser.add_argument("--until", type=float, default=0, metavar="HOURS",
                        help="start no class after so many hours (default: no end)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--quick", action="store_true", help="one eager forward a class")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    return parser.parse_args()


class Store:
    """The results so far, written after each class."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.data: dict[str, Any] = {"environment": environment(), "classes": {}}
        if path.exists():
            old = json.loads(path.read_text())
            if old["environment"] == self.data["environment"]:
                self.data = old
            else:
                print(f"{path} is of other versions and is measured anew", file=sys.stderr)

    def holds(self, name: str, checks: tuple[str, ...]) -> bool:
        """Whether a class was measured, by these checks or by all."""
        return self.data["classes"].get(name, {}).get("checks") in (list(checks), list(CHECKS))

    def put(self, name: str, record: dict[str, Any]) -> None:
        """Keep the record of a class."""
        with self.lock:
            self.data["classes"][name] = record
            self.data["classes"] = dict(sorted(self.data["classes"].items()))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".tmp")
            fresh.write_text(json.dumps(self.data, indent=1) + "\n")
            fresh.replace(self.path)


def environment() -> dict[str, str]:
    """Return the versions that a result holds for."""
    from importlib.metadata import version

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def commit_of_this_tree() -> str:
    """Return the short hash of the commit that is measured, "" outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def walk(
    names: list[str], checks: tuple[str, ...], store: Store, arguments: argparse.Namespace
) -> None:
    """Check classes, `--jobs` at a time, each in a process of its own."""
    # The server of Python 3.11 does not take over sys.path, and keeps silent about what it misses.
    os.environ["PYTHONPATH"] = str(ROOT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.coverage_preload"])
    started = time.monotonic()
    done, commit = 0, commit_of_this_tree()

    def one(name: str) -> None:
        nonlocal done
        if arguments.until and time.monotonic() - started > arguments.until * 3600:
            return
        record = checked_in_a_child(context, name, checks, arguments.limit)
        record |= {"commit": commit, "checks": list(checks)}
        store.put(name, record)
        done += 1
        print(f"[{done}/{len(names)}] {name}: {_in_one_line(record)}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in [pool.submit(one, name) for name in names]:
            future.result()


def checked_in_a_child(
    context: Any, name: str, checks: tuple[str, ...], limit_s: float
) -> dict[str, Any]:
    """Return the record of one class, whatever becomes of the process that checks it."""
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as log:
        process = context.Process(target=_child, args=(name, checks, sender, log.name), daemon=True)
        started = time.monotonic()
        process.start()
        sender.close()
        record: dict[str, Any] = {}
        ended = False
        while not ended:
            left = limit_s - (time.monotonic() - started)
            if left <= 0 or not receiver.poll(left):
                process.kill()
                record["ended"] = f"no result within {limit_s:.0f} s"
                break
            try:
                record = receiver.recv()
            except EOFError:
                ended = True
        process.join()
        if ended and process.exitcode:
            tail = " | ".join(log.read().strip().splitlines()[-2:])
            record["ended"] = f"the process ended with {process.exitcode}: {tail}"[:300]
    if "ended" not in record:
        record.pop("running", None)
    record["seconds"] = round(time.monotonic() - started, 1)
    return record


def _child(name: str, checks: tuple[str, ...], sender: Any, log: str) -> None:
    handle = os.open(log, os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from bench.coverage_check import check_class

    check_class(name, checks, sender.send)


def _in_one_line(record: dict[str, Any]) -> str:
    skipped = ("class", "num_parameters", "running", "checks", "commit")
    return ", ".join(f"{k}={v}" for k, v in record.items() if k not in skipped)


if __name__ == "__main__":
    sys.exit(main())
