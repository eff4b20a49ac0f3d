"""The command `python -m xtrain.explain MODEL`: flags, what is written where, exit codes.

torch is imported once a wrong flag or name has been refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xtrain.command_line import FAILURE, Parser, exit_codes, limit_spinning, show
from xtrain.config import PRESETS, ConfigError
from xtrain.files import toml_value
from xtrain.subject import kind_of

EXAMPLES = """\
examples:
  python -m xtrain.explain small                                 a preset, called as in training
  python -m xtrain.explain runs/small                            a run, with its own settings
  python -m xtrain.explain path/to/llama --html page.html        a folder with a HF config.json
  python -m xtrain.explain path/to/llama --layers 2 --hidden 64 --dtype bf16
  python -m xtrain.explain my_models:build --existing replace    a function that returns a model,
                                                                 or (model, inputs)

Weights are drawn, not loaded. The site table is that of CompiledModel.report(); "left alone" says
why a match was not swapped. Exit codes: 0, 1 the compile or --verify fails, 2 a wrong flag or
model, 70 a fault of xtrain's.
"""


# Above this many parameters a model is built with two layers, unless --layers says otherwise:
# memory and compile time stay small.
MAX_PARAMETERS = 150_000_000
GIVEN = ("dropout", "existing", "kernels", "logits", "dtype", "dump_graphs")  # if they are


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = Parser(
        prog="python -m xtrain.explain",
        description="What xtrain.compile finds in a model, and what it does to its graph.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}, a run, a HF config folder, module:function",
    )
    # None: as the model trains, else the default of xtrain.compile
    add("--dropout", type=float, metavar="P", help="in (0, 1] [the run's or preset's, else 0.1]")
    add("--existing", choices=("skip", "replace"), help="model's own dropout [skip]")
    add("--kernels", choices=("auto", "triton", "off"), help="swaps [the run's, else auto]")
    add("--logits", choices=("keep", "drop"), help="in training [presets, runs: none; else keep]")
    add("--dtype", choices=("fp32", "bf16"), help="bf16: under autocast [the run's, else fp32]")
    add("--batch", type=_positive, default=2, metavar="B", help="samples of the forward [2]")
    add("--seq", type=_positive, default=16, metavar="T", help="tokens of a sample [16]")
    add("--layers", type=_positive, metavar="N", help="fewer layers [all; 2 if the model is large]")
    add("--hidden", type=_positive, metavar="D", help="a narrower model, a multiple of 16")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field of the model's configuration; may be given again",
    )
    add("--pass", action="append", default=[], metavar="M:F", help="a graph pass of yours, run too")
    add("--disable-pass", action="append", default=[], metavar="NAME", help="leave a pass out")
    add(
        "--verify",
        action="store_true",
        help="run the backward too, and hold both against the graph without swaps",
    )
    add("--graph", action="store_true", help="print all of the graph, not one block of each kind")
    add("--html", metavar="FILE", help="write one self-contained page, graphs side by side")
    add("--json", metavar="FILE", help="write everything; -: to stdout, instead of the text")
    add("--dump-graphs", metavar="DIR", help="write the graph before and after each pass")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, explain the model, write what was asked for; return the exit code."""
    with exit_codes() as status:
        args = build_parser().parse_args(arguments)
        changes = dict(_assignment(text) for text in args.set)
        _check(args)
        limit_spinning()
        with _quiet():
            from xtrain.explain.capture import explain
            from xtrain.subject import imported, load

            passes = [imported(name) for name in getattr(args, "pass")]
            subject = load(
                args.model,
                layers=args.layers,
                hidden=args.hidden,
                changes=changes,
                batch=args.batch,
                seq=args.seq,
                max_parameters=MAX_PARAMETERS,
            )
            if args.logits is not None:
                subject.kwargs.pop("return_logits", None)
            given = {name: getattr(args, name) for name in GIVEN}
            given["disable_passes"] = args.disable_pass or None
            given = {name: value for name, value in given.items() if value is not None}
            found = explain(subject, passes=passes, verify=args.verify, **given)
            _write(found, args)
            if found.report.verification is not None and found.report.verification.failures:
                status.code = FAILURE
    return status.code


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave warnings about graph breaks and fallbacks to the report, which lists them.

    Who asks torch for its logs gets them.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    import torch  # noqa: F401  (sets the levels of its loggers)

    loggers = [logging.getLogger(name) for name in ("torch", "xtrain.passes")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _write(found: Any, args: argparse.Namespace) -> None:
    from xtrain.explain.output import as_json, as_text, page

    if args.html:
        _write_file(args.html, page(found))
    if args.json:
        text = json.dumps(as_json(found), indent=1) + "\n"
        if args.json == "-":
            show(text)
            return
        _write_file(args.json, text)
    show(as_text(found, whole_graph=args.graph))


def _write_file(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from None


def _check(args: argparse.Namespace) -> None:
    """Refuse wrong values before torch is imported."""
    kind_of(args.model)
    if args.dropout is not None and not 0 < args.dropout <= 1:  # nan neither
        raise ConfigError(f"--dropout must be in (0, 1], got {args.dropout:g}")
    if args.dump_graphs:
        Path(args.dump_graphs).mkdir(parents=True, exist_ok=True)
    for flag, name in (("--html", args.html), ("--json", args.json)):
        if name not in (None, "-") and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{flag}: there is no folder {Path(name).parent}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set takes key=value, got {text!r}")
    return name, toml_value(value)


if __name__ == "__main__":
    sys.exit(main())
