"""Is an unmodified transformers Llama faster under xtrain.compile than by what its users have?

One training step (forward, backward, AdamW) on real text, run in turn by the variants below, each
in a process of its own with empty compile caches. xtrain gets logits="drop"; "blocks" is run for
its first step alone. Every step counts for the loss curves, which --plot lays over each other.
Without flags: the 1.1B shape on a GPU, a tiny one on a CPU. Exit code 1 if a variant failed, 2 for
a wrong flag.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.train import turns  # noqa: E402
from bench.train.turns import Plan  # noqa: E402
from bench.train.variants import KINDS, LLAMA_SHAPES, Setting  # noqa: E402
from xtrain.command_line import Parser, command, output_file  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    return turns.compare(*turns.read(build_parser(), resolve, arguments))


def build_parser() -> Parser:
    """Return the command line's parser."""
    kind = KINDS["llama"]
    parser = Parser(prog="bench/compare_hf.py", description=__doc__, epilog=kind.listing())
    add = parser.add_argument
    add("--shape", choices=tuple(LLAMA_SHAPES), help="of the Llama (GPU: 1b, CPU: tiny)")
    add("--layers", type=harness.positive, help="number of layers (by shape)")
    add("--learning-rate", type=float, default=3e-4, help="constant (3e-4)")
    add("--plot", type=output_file, metavar="FILE", help="draw the loss curves, a PNG")
    turns.add_flags(add, kind)
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and shape; ValueError names what does not fit."""
    names = harness.names_of(flags.variants, KINDS["llama"].variants)
    device = harness.device_of(flags.device)
    on_gpu = device.partition(":")[0] == "cuda"
    name = flags.shape or ("1b" if on_gpu else "tiny")
    given = {"batch": flags.batch, "seq": flags.seq, "num_hidden_layers": flags.layers}
    shape = replace(LLAMA_SHAPES[name], **{k: v for k, v in given.items() if v is not None})
    setting = Setting.of(
        flags,
        device,
        {},
        preset=name,
        shape=shape,
        model="llama",
        batch=shape.batch,
        seq=shape.seq,
        vocab=shape.vocab_size,
    )
    # On a GPU first steps and visits add up to 200 steps of each variant.
    steps, warm_up = (10, 4) if on_gpu else (2, 1)
    return setting, Plan(names, flags.blocks, flags.steps or steps, warm_up, flags.commit)


if __name__ == "__main__":
    sys.exit(main())
