"""Walk every causal language model of transformers: the command of bench/coverage.py.

check.py        what is checked on one class, in a child process with a time limit: a crash, a hang
                or a signal is that class's result
configs.toml    how configurations are shrunk, by the names of their fields and by type
expected.toml   the sites of every type, read off its modelling code
preload.py      what the server process imports once for all children
table.md.jinja  docs/coverage.md, from the records and the verdicts here

Results are kept in bench/results/coverage.json after each class; a second run takes up where the
first ended. No torch here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import ROOT, output_of
from bench.report import render
from xtrain.files import replace_text

HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "bench" / "results" / "coverage.json"
TABLE = ROOT / "docs" / "coverage.md"
CHECKS = ("plain", "sites", "p0", "checkpoint", "swaps")
QUICK = ("quick",)
Record = dict[str, Any]


def main(description: str = "") -> int:
    """Measure what is missing and write the table; return the exit code."""
    arguments = parse_arguments(description)
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


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
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


def model_types() -> dict[str, str]:
    """Return type -> class name of every causal language model that transformers maps."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        kind: name if isinstance(name, str) else name[0]
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


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

    def put(self, name: str, record: Record) -> None:
        """Keep the record of a class."""
        with self.lock:
            self.data["classes"][name] = record
            self.data["classes"] = dict(sorted(self.data["classes"].items()))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(self.data, indent=1) + "\n")


def environment() -> dict[str, str]:
    """Return the versions that a result holds for."""
    from importlib.metadata import version

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def walk(
    names: list[str], checks: tuple[str, ...], store: Store, arguments: argparse.Namespace
) -> None:
    """Check classes, `--jobs` at a time, each in a process of its own."""
    # The server of Python 3.11 does not take over sys.path, and keeps silent about what it misses.
    os.environ["PYTHONPATH"] = str(ROOT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.coverage.preload"])
    started = time.monotonic()
    done, commit = 0, output_of(["git", "rev-parse", "--short", "HEAD"], ROOT)

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
    context: Any, name: str, checks: tuple[str, ...], limit_s: float, target: Any = None
) -> Record:
    """Return the record of one class, whatever becomes of the process that checks it.

    Args:     target: what the process runs, by default `_child`.
    """
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as log:
        arguments = (name, checks, sender, log.name)
        process = context.Process(target=target or _child, args=arguments, daemon=True)
        started = time.monotonic()
        process.start()
        sender.close()
        record: Record = {}
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
    from bench.coverage.check import check_class

    check_class(name, checks, sender.send)


def _in_one_line(record: Record) -> str:
    skipped = ("class", "num_parameters", "running", "checks", "commit")
    return ", ".join(f"{k}={v}" for k, v in record.items() if k not in skipped)


# --- the table ------------------------------------------------------------------------------------

EXACT, REFUSED, WRONG, PART = "exact", "refused", "WRONG", "sites right"
NOT_TRAINED, NOT_BUILT, LEFT = "torch fails", "not built", "not measured"


def expected_sites() -> dict[str, str]:
    """Return type -> its sites, from the reviewed table."""
    with (HERE / "expected.toml").open("rb") as file:
        table = tomllib.load(file)
    return {**dict.fromkeys(table["types"], table["usual"]), **table["other"]}


def verdict(record: Record | None, expected: str | None) -> tuple[str, str]:
    """Return a class's verdict and what to say beside it."""
    if record is None:
        return LEFT, ""
    if "not_built" in record:
        return NOT_BUILT, record["not_built"]
    faults = faults_of(record, expected)
    if record.get("plain", True) is not True:
        ours = "as expected across the breaks" if not faults else "; ".join(faults)
        return NOT_TRAINED, f"{record['plain']} - xtrain.compile: {ours}"
    if "refused" in record:
        return REFUSED, record["refused"]
    if "plain" not in record and not faults:
        return PART, ""
    return (WRONG, "; ".join(faults)) if faults else (EXACT, "")


def faults_of(record: Record, expected: str | None) -> list[str]:
    """Return everything in a record that is not as it should be."""
    faults = [f"{key}: {record[key]}" for key in ("refused", "failed", "ended") if key in record]
    if expected is None:
        faults.append("no expected sites in expected.toml")
    elif "sites" in record and record["sites"] != expected:
        faults.append(f"sites {record['sites'] or 'none'}, expected {expected}")
    if record.get("masks", True) is not True:
        faults.append(f"masks: {record['masks']}")
    whole = record.get("plain") is True
    if whole and record.get("p0", True) is not True:
        faults.append(f"p = 0: {_said(record['p0'])}")
    checkpoint = record.get("checkpoint", True)
    if checkpoint is not True and not _is_excused(checkpoint):
        faults.append(f"checkpointing: {_said(checkpoint)}")
    if isinstance(record.get("swaps"), str):
        faults.append(f"swaps: {record['swaps']}")
    return faults


def _is_excused(checkpoint: Any) -> bool:
    """Whether checkpointing is not ours to judge: the class has none, or plain torch fails too."""
    excuses = ("the class has no", "plain torch.compile fails too", "plain torch.compile differs")
    return isinstance(checkpoint, str) and checkpoint.startswith(excuses)


def _said(value: Any) -> str:
    return "differs" if value is False else str(value)


def write_table(path: Path, data: dict[str, Any], types: dict[str, str]) -> None:
    """Write docs/coverage.md."""
    expected, records = expected_sites(), data["classes"]
    rows = {name: verdict(records.get(name), expected.get(name)) for name in types}
    whole = [name for name, record in records.items() if record.get("plain") is True]
    text = render(
        HERE / "table.md.jinja",
        environment=data["environment"],
        commits=sorted({record.get("commit", "") for record in records.values()} - {""}),
        rows=rows,
        records=records,
        expected=expected,
        counts=Counter(word for word, _ in rows.values()),
        whole=whole,
        exact=sum(rows[name][0] == EXACT for name in whole),
    )
    path.write_text(text)
