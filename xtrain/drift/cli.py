"""`python -m xtrain.drift`: parsing, exit codes, the record and compare commands. No torch here."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from xtrain.command_line import Parser, exit_codes, limit_spinning, show
from xtrain.drift import bisect, single_ops
from xtrain.drift.comparison.drift_report import deliver, write_text
from xtrain.drift.settings import (
    BAD_INPUT,
    FLAGS,
    RUN_FLAGS,
    DriftError,
    Run,
    check_use,
    check_use_of_model,
    fill,
    missing_package,
)

if TYPE_CHECKING:
    from xtrain.drift.recording.record_format import Record

SIGNALLED = 128  # plus the signal's number: as a shell reports it
EXAMPLES = """\
examples:
  python -m xtrain.drift record --out A.drift small                 here and now
  python -m xtrain.drift record --out B.drift small                 there, or after the upgrade
  python -m xtrain.drift compare A.drift B.drift --html drift.html
  python -m xtrain.drift bisect small --factor threads=1,2 --factor compile=off,on
  python -m xtrain.drift ops --factor ATEN_CPU_CAPABILITY=default,avx2

exit codes of compare: 0 identical, 1 the numbers differ and no token can flip, 2 a token can flip,
3 tokens differ, 4 not comparable, 5 bad input or usage, 70 an internal error
"""


class DriftParser(Parser):
    """The house's parser with this command's exit code for wrong usage."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End; what argparse calls 2 is 5 here, where 2 means that a token can flip."""
        super().exit(BAD_INPUT if status == 2 else status, message)
        raise AssertionError


def build_parser() -> argparse.ArgumentParser:
    """Return the command line with its four commands."""
    parser = DriftParser(
        prog="python -m xtrain.drift",
        description="Where do two environments start to differ, how much, and can a token flip?",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_record(commands.add_parser("record", help="run a model and keep a fingerprint of it all"))
    _add_compare(commands.add_parser("compare", help="compare two records"))
    settings = commands.add_parser("bisect", help="which setting moves the numbers, and where")
    add_model_flags(settings.add_argument)
    bisect.add_flags(settings)
    settings.set_defaults(run=bisect.run_bisect)
    ops = commands.add_parser("ops", help="each op alone under two settings, by row length")
    single_ops.add_flags(ops)
    ops.set_defaults(run=single_ops.run_ops)
    return parser


def add_model_flags(add: Callable[..., Any]) -> None:
    """Add what record and bisect share: which model, which prompts, how it is run."""
    add("model", metavar="MODEL", help="a run, a preset (its weights drawn by --seed), a HF folder")
    for flag in FLAGS.values():
        flag.add_to(add)


def _add_record(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser.add_argument)
    parser.add_argument("--out", required=True, metavar="DIR", help="the record's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a record of that name")
    parser.set_defaults(run=run_record)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a record, or a run trained with --drift-every")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="read parts of names as others, in both: --map module.= --map attn=attention",
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write everything; -: to stdout, instead of the tables")
    add("--html", metavar="FILE", help="write one self-contained page with plots")
    parser.set_defaults(run=run_compare)


def run_record(args: argparse.Namespace) -> int:
    """Record a model; exit code 0."""
    flags = fill(args)
    check_use(args)
    limit_spinning()
    from xtrain.drift.recording.writing import check_free

    check_free(Path(args.out), overwrite=args.overwrite)  # before a model is loaded
    record = _record(args, flags)
    steps = sum(len(case.steps) for case in record.cases)
    size = sum(file["bytes"] for file in record.files.values()) / 2**20
    show(f"{args.out}: {len(record.cases)} prompts, {steps} forwards, {size:.1f} MiB\n")
    effect = record.contents["observer_effect"]
    if effect and effect["differs"]:
        moved = f"{effect['max_abs']:.3g}"
        show(f"observer effect: observed logits differ from the model's by {moved}\n")
    return 0


def _record(args: argparse.Namespace, flags: argparse.Namespace) -> Record:
    """Load MODEL, decode the prompts, write the record; flags are args with their defaults."""
    import torch

    from xtrain.drift.recording import forwards, recorded_model

    kind, _, number = flags.device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise DriftError(
            f"--device is {flags.device}, but torch {torch.__version__} finds {count} of them"
        )
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    values = {flag.field: getattr(flags, flag.dest) for flag in RUN_FLAGS.values()}
    values |= {"num_tokens": flags.tokens or 1, "decode": flags.decode if flags.tokens else None}
    settings = Run(**{**values, "pad_to": None})
    found = recorded_model.load(args.model, flags)
    check_use_of_model(args, found.description["kind"], tokenizer=found.encode is not None)
    prompts = recorded_model.prompts(found, flags)
    # compiled modes have one shape, and so one compile
    auto = flags.mode != "eager" and flags.decode != "generate"
    pad_to = flags.pad_to
    if pad_to == "auto" or pad_to is None and auto:
        longest = max(len(prompt["tokens"]) for prompt in prompts)
        pad_to = longest + max(flags.tokens - 1, 0)
    return forwards.record_prompts(
        found,
        prompts,
        replace(settings, pad_to=pad_to),
        out=args.out,
        overwrite=args.overwrite,
        progress=_progress if sys.stderr.isatty() else lambda text: None,
    )


def _progress(text: str) -> None:
    sys.stderr.write(f"\r{text}")
    sys.stderr.flush()


def run_compare(args: argparse.Namespace) -> int:
    """Compare two records, or two training runs; the exit code is the verdict."""
    from xtrain.drift.comparison.drift_report import as_json, as_text, page
    from xtrain.drift.comparison.two_records import Comparison, compare
    from xtrain.drift.comparison.two_runs import TrainingComparison, compare_training
    from xtrain.drift.recording.training_format import find

    if args.html == "-":
        raise DriftError("--html needs the name of a file; --json alone knows -, for stdout")
    comparison: Comparison | TrainingComparison
    if find(args.a) or find(args.b):
        if args.map:
            raise DriftError("--map is for records; training runs are compared by their own names")
        comparison = compare_training(args.a, args.b)
    else:
        comparison = compare(args.a, args.b, names=_names(args.map))
    if args.html:
        write_text(args.html, page(comparison))
    deliver(args.json, lambda: as_json(comparison), lambda: as_text(comparison))
    return comparison.exit_code


def _names(flags: Sequence[str]) -> dict[str, str]:
    for flag in flags:
        if "=" not in flag:
            raise DriftError(f"--map needs OLD=NEW, parts of the names of modules; got {flag!r}")
    return dict(flag.split("=", 1) for flag in flags)


# --- how the command ends ------------------------------------------------------------------------


# Another signal within this time finds the first one's clean-up under way, and is left out.
GRACE_S = 10.0


class Terminated(BaseException):
    """Raised where a signal arrives; a BaseException, so that nothing takes it for an error."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


@contextmanager
def termination_raises() -> Iterator[None]:
    """Within the context SIGTERM and SIGHUP raise Terminated; one that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread set handlers
        return
    process, last = os.getpid(), -GRACE_S

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != process:  # a fork of this process writes no record
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first, last = time.monotonic() - last >= GRACE_S, time.monotonic()
        if first:
            raise Terminated(number)

    names = (name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
    numbers = [getattr(signal, name) for name in names]
    caught = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    1, 2 and 3 are verdicts, so that no failure may end with Python's own 1.
    """
    with exit_codes(usage=BAD_INPUT, failure=BAD_INPUT) as status:
        args = build_parser().parse_args(arguments)
        try:
            with termination_raises():
                status.code = args.run(args)
        except ModuleNotFoundError as error:
            raise DriftError(missing_package(error)) from error
        except Terminated as error:
            print(error, file=sys.stderr)
            status.code = SIGNALLED + error.number
    return status.code
