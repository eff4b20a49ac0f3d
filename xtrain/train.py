"""Train a decoder on text: `python -m xtrain.train --compile --dropout 0.1`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from xtrain.command_line import Parser, exit_codes, limit_spinning
from xtrain.config import FLAGS, ConfigError, RunConfig, parse_assignment

EXAMPLES = """\
examples:
  python -m xtrain.train                              the standard library's source, on any machine
  python -m xtrain.train --compile --dropout 0.1 --data book.txt notes/ --tokenizer bpe:4096
  python -m xtrain.train --data hf:roneneldan/TinyStories --preset 124m --compile
  python -m xtrain.train --resume                     continue the newest run
  python -m xtrain.train --resume runs/small --steps 400

Everything else is set by --set section.key=value; a run's config.toml lists all keys with their
meaning and can be edited and passed to --config. Exit codes: 0, 1 the run failed, 2 what was asked
for or given to read is wrong, 70 a fault of xtrain's, 128 + N ended by signal N.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line; a flag that is not given is None and leaves its field alone."""
    parser = Parser(
        prog="python -m xtrain.train",
        description="Train a decoder language model on text.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    for flag in FLAGS.values():
        flag.add_to(add)
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a run, by name or path [--name's, or the newest]; with other --steps the "
        "schedule is stretched",
    )
    add("--config", metavar="FILE", help="a TOML file of the form of a run's config.toml")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field, such as optim.learning_rate=1e-3; may be given again",
    )
    return parser


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return "section.key" -> value of everything that was said on the command line."""
    given = {flag.field: getattr(args, flag.dest) for flag in FLAGS.values()}
    given = {name: value for name, value in given.items() if value is not None}
    if str(given.get("model.recompute", "")).isdecimal():
        given["model.recompute"] = int(given["model.recompute"])
    return {**given, **dict(parse_assignment(text) for text in args.set)}


def check_one_process() -> None:
    """Refuse to be one of several: each would train a copy of the same run."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ConfigError(
                f"{name} is {size}: the trainer is one process on one device, and {size} would "
                "train equal copies; start it without torchrun, mpirun or srun (several GPUs are "
                "planned), or unset the variable"
            )


def leave(code: int) -> NoReturn:
    """End the process; after a signal without a wait for compilers that are still at work."""
    if code > 128:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, build the configuration and train; return the exit code."""
    with exit_codes() as status:
        args = build_parser().parse_args(arguments)
        changes = overrides(args)
        base = RunConfig.load(args.config) if args.config else RunConfig()
        config = base.override(changes)  # wrong values are refused before torch is imported
        if args.resume is not None and args.config:
            raise ConfigError("--resume continues with the run's own config.toml; no --config")
        check_one_process()
        limit_spinning()
        from xtrain.training import console, loop
        from xtrain.training.choices import start_folder, with_absolute_paths
        from xtrain.training.run_folder import find

        console.set_up_logging()
        run = None
        if args.resume is not None:
            run = find(Path(config.run.folder), args.resume or config.run.name)
            saved = RunConfig.load(run.config)
            saved = with_absolute_paths(saved, start_folder(saved, run.path))
            # the run is where it was found, whatever it was called when it started
            changes |= {"run.name": run.name, "run.folder": str(run.path.parent)}
            config = saved.override(changes)
        watched: dict[str, Any] = {}
        if config.run.drift_every:
            from xtrain.drift.recording.training_steps import fingerprints_of

            watched = {"watch": fingerprints_of}
        status.code = loop.train(with_absolute_paths(config, Path.cwd()), run, **watched)
    return status.code


if __name__ == "__main__":
    leave(main())
