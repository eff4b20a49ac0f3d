"""Time every op against its alternatives and write one report: `python bench/report_ops.py`.

One process, one run: peers and ours in turn, block by block. --json, --markdown and --plot say
where the figures, the report with the verdict on each target, and the plot go.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.ops import FAMILIES, add_flags, run  # noqa: E402
from xtrain.command_line import Parser, command, output_file  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="bench/report_ops.py", description=__doc__)
    known = ",".join(FAMILIES)
    parser.add_argument("--ops", metavar="A,B", help=f"these alone ({known})")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw the rates, a PNG")
    add_flags(parser)
    flags = parser.parse_args(arguments)
    ops = flags.ops.split(",") if flags.ops else list(FAMILIES)
    if unknown := [op for op in ops if op not in FAMILIES]:
        parser.error(f"unknown op {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    return run(ops, flags, harness.command_line(parser.prog, arguments))


if __name__ == "__main__":
    sys.exit(main())
