"""Time every op against its alternatives and write one report: `python bench/report_ops.py`.

One process, one run: peers and ours in turn, block by block. --json, --markdown and --plot say
where the figures, the report with the verdict on each target, and the plot go.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.run_op import add_flags, known_ops, run  # noqa: E402
from xtrain.command_line import Parser, command, output_file  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    flags = parser.parse_args(arguments)
    known = known_ops()
    ops = flags.ops.split(",") if flags.ops else known
    if unknown := [op for op in ops if op not in known]:
        parser.error(f"unknown op {unknown[0]!r}; known: {', '.join(known)}")
    return run(ops, flags, harness.command_line("bench/report_ops.py", arguments))


def build_parser() -> Any:
    """Return the command line's parser."""
    parser = Parser(prog="bench/report_ops.py", description=__doc__)
    parser.add_argument("--ops", metavar="A,B", help=f"these alone ({','.join(known_ops())})")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw the rates, a PNG")
    add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
