"""`python -m xtrain.drift`: parsing, exit codes, the record and compare commands. No torch here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from xtrain.command_line import Parser, exit_codes, limit_spinning, show
from xtrain.drift import bisect_command, ops_command
from xtrain.drift.errors import BAD_INPUT, DriftError, missing_package
from xtrain.drift.output import deliver, write_text
from xtrain.drift.signals import Terminated, termination_raises

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
    bisect = commands.add_parser("bisect", help="which setting moves the numbers, and where")
    add_model_flags(bisect.add_argument)
    bisect_command.add_flags(bisect)
    bisect.set_defaults(run=bisect_command.run_bisect)
    ops = commands.add_parser("ops", help="each op alone under two settings, by row length")
    ops_command.add_flags(ops)
    ops.set_defaults(run=ops_command.run_ops)
    return parser


def add_model_flags(add: Callable[..., Any]) -> None:
    """Add what record and bisect share: which model, which prompts, how it is run.

    No flag has its default here: xtrain.drift.flag_use must know which were given.
    """
    add("model", metavar="MODEL", help="a run, a preset (its weights drawn by --seed), a HF folder")
    add("--seed", type=int, help="of a preset's weights and drawn prompts [0]")
    add("--runs", metavar="DIR", help="where runs lie [runs]")
    add("--prompts", metavar="FILE", help="a prompt a line, or .json lists of ids [built in]")
    add("--num-prompts", type=int, help="drawn where there is no tokenizer [8]")
    add("--prompt-length", type=int, help="of drawn prompts, in tokens [16]")
    add("--tokens", type=int, help="chosen per prompt; 0: one forward [16]")
    add("--decode", help="greedy, generate (the model's own) or sample [greedy]")
    add("--temperature", type=float, help="of --decode sample [1]")
    add("--sample-seed", type=int, help="of --decode sample [0]")
    add("--mode", help="eager, aot_eager or inductor [eager]")
    add("--dtype", help="auto (as saved), fp32, bf16 or fp16 [auto]")
    add("--device", help="cpu, cuda or cuda:N [cpu]")
    add("--batch", type=int, help="prompts of a forward [1]")
    add("--pad-to", metavar="T", help="pad every forward to T tokens; auto: the longest [none]")
    add("--threads", type=int, help="of torch, within an op [torch's own choice]")
    add("--warm-up", type=int, help="forwards before the first recorded one [1]")
    add("--op-steps", type=int, help="steps of a prompt whose ops are recorded [all]")
    add("--top-k", type=int, help="logits in the readable part [8]")
    add("--tensors", action="store_true", help="keep whole tensors: exact sizes, large files")


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
    add_output_flags(parser.add_argument)
    parser.set_defaults(run=run_compare)


def add_output_flags(add: Callable[..., Any]) -> None:
    """Add where results go beside the terminal."""
    add("--json", metavar="FILE", help="write everything; -: to stdout, instead of the tables")
    add("--html", metavar="FILE", help="write one self-contained page with plots")


def run_record(args: argparse.Namespace) -> int:
    """Record a model; exit code 0."""
    from xtrain.drift.record_folder import check_free

    check_free(Path(args.out), overwrite=args.overwrite)  # before a model is loaded
    limit_spinning()
    from xtrain.drift.from_flags import record_from_flags

    record = record_from_flags(args)
    steps = sum(len(case.steps) for case in record.cases)
    size = sum(file["bytes"] for file in record.files.values()) / 2**20
    text = f"{args.out}: {len(record.cases)} prompts, {steps} forwards, {size:.1f} MiB\n"
    effect = record.contents["observer_effect"]
    if effect and effect["differs"]:
        size = effect["max_abs"]
        text += f"observer effect: observed logits differ from the model's by {size:.3g}\n"
    show(text)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Compare two records; the exit code is the verdict."""
    from xtrain.drift import training_folder
    from xtrain.drift.comparison import compare
    from xtrain.drift.report import as_json, as_text

    if args.html == "-":
        raise DriftError("--html needs the name of a file; --json alone knows -, for stdout")
    if training_folder.find(args.a) or training_folder.find(args.b):
        return _compare_training(args)
    comparison = compare(args.a, args.b, names=_names(args.map))
    if args.html:
        from xtrain.drift.page import page

        write_text(args.html, page(comparison))
    deliver(args.json, lambda: as_json(comparison), lambda: as_text(comparison))
    return comparison.exit_code


def _names(flags: Sequence[str]) -> dict[str, str]:
    found = {}
    for flag in flags:
        old, equals, new = flag.partition("=")
        if not equals:
            raise DriftError(f"--map needs OLD=NEW, parts of the names of modules; got {flag!r}")
        found[old] = new
    return found


def _compare_training(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from xtrain.drift.report import plain
    from xtrain.drift.training_folder import as_text, compare_training

    if args.map:
        raise DriftError("--map is for records; training runs are compared by their own names")
    comparison = compare_training(args.a, args.b)
    if args.html:
        from xtrain.drift.page import training_page

        write_text(args.html, training_page(as_text(comparison), comparison.exit_code))
    values = {**asdict(comparison), "exit_code": comparison.exit_code}
    deliver(args.json, lambda: plain(values), lambda: as_text(comparison))
    return comparison.exit_code


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
    except ModuleNotFoundError as error:
        raise DriftError(missing_package(error)) from error
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    1, 2 and 3 are verdicts, so that no failure may end with Python's own 1.
    """
    with exit_codes(usage=BAD_INPUT, failure=BAD_INPUT) as status:
        args = build_parser().parse_args(arguments)
        try:
            with termination_raises():
                status.code = _run(args)
        except Terminated as error:
            print(error, file=sys.stderr)
            status.code = SIGNALLED + error.number
    return status.code
