"""What does dropout cost, and is xtrain.compile faster than plain torch.compile?

One training step (forward, backward, AdamW) of one model, run in turn by the variants below, each
in a process of its own with empty compile caches. "torch" is the best that a user has without
xtrain, "torch-p0" the floor, "xtrain-p0" prices our dropout, "xtrain-eager" has the same masks
without inductor. With --model gpt2 the model drops out by itself, in nn.Dropout modules that
xtrain.compile(existing="replace") takes over. Prints a table; --json and --markdown write the
report. Without flags it takes under four minutes on two cores and measures the 124M shape on a GPU.
Exit code 1 if a variant failed, 2 for a wrong flag, 70 for a fault of this script.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.train import turns  # noqa: E402
from bench.train.turns import Plan  # noqa: E402
from bench.train.variants import KINDS, OWN_KINDS, SHAPES, Setting  # noqa: E402
from xtrain.command_line import Parser, command  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    flags, setting, plan, command = turns.read(build_parser(), resolve, arguments)
    if flags.drift:
        from bench.drift.records import eager_against_compiled

        print("\n" + eager_against_compiled(setting), end="")
        return 0
    if flags.kernels:
        print(turns.kernel_table(setting, plan))
        return 0
    return turns.compare(flags, setting, plan, command)


def build_parser() -> Parser:
    """Return the command line's parser."""
    kind = KINDS["transformer"]
    parser = Parser(prog="bench/compare.py", description=__doc__, epilog=kind.listing())
    add = parser.add_argument
    add("--preset", choices=tuple(SHAPES), help="model (GPU: 124m, CPU: small)")
    add("--model", choices=OWN_KINDS, default="transformer", help="written as (transformer)")
    add("--vocab", type=harness.positive, help="vocabulary (by preset)")
    add("--recompute", type=_recompute, default="none", help="none | full | first N layers (none)")
    add("--threads", type=harness.positive, help="CPU threads (torch's default)")
    add("--drift", action="store_true", help="compare numbers, not speed: eager against compiled")
    add("--kernels", action="store_true", help="print each variant's time by kernel, no more")
    turns.add_flags(add, kind)
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and preset; ValueError names what does not fit."""
    from bench.train.models import build_config
    from xtrain.model import Config
    from xtrain.training.choices import check_size

    names = harness.names_of(flags.variants, KINDS[flags.model].variants)
    device = harness.device_of(flags.device)
    kind = device.partition(":")[0]
    preset = flags.preset or ("124m" if kind == "cuda" else "small")
    batch, seq = SHAPES[preset]
    usual = {"batch": batch, "seq": seq, "vocab": Config.preset(preset).vocab_size}
    setting = Setting.of(flags, device, usual, preset=preset)
    rows = setting.batch
    config = build_config(setting)
    check_size(config, device, batch_size=rows, micro_batch_size=rows, seq_len=setting.seq)
    # A visit on a GPU starts with an empty allocator and another variant's clocks and power: some
    # steps fill the one and settle the others. On a CPU one step warms the caches.
    steps, warm_up = (10, 6) if kind == "cuda" else (2, 1)
    return setting, Plan(names, flags.blocks, flags.steps or steps, warm_up, flags.commit)


def _recompute(text: str) -> str | int:
    return text if text in ("none", "full") else harness.positive(text)


# What argparse calls it when it refuses a value.
_recompute.__name__ = "none, full or positive int"

if __name__ == "__main__":
    sys.exit(main())
