"""Time one op against its alternatives: `python bench/run_op.py dropout`.

bench/ops/ gives inputs, providers, the truth that outputs are held to before anything is timed, and
the bytes or FLOPs of a call. `bench/report_ops.py` does the same for all ops.
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
from xtrain.command_line import Parser, command  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="bench/run_op.py", description=__doc__)
    known = list(FAMILIES)
    parser.add_argument("op", choices=known, metavar="OP", help=", ".join(known))
    add_flags(parser)
    flags = parser.parse_args(arguments)
    return run([flags.op], flags, harness.command_line(parser.prog, arguments))


if __name__ == "__main__":
    sys.exit(main())
