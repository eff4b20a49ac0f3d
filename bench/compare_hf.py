"""Is an unmodified transformers Llama faster under xtrain.compile than by what its users have?

One training step (forward, backward, AdamW) on real text, run in turn by

    torch        torch.compile of transformers' LlamaForCausalLM, without dropout
    liger        the same model patched by Liger-Kernel, eager, without dropout
    xtrain       xtrain.compile(model, dropout=p, logits="drop") of the unmodified model
    xtrain-p0    the same with dropout=0
    own          xtrain's own Transformer of that shape under xtrain.compile(dropout=p)
    liger-torch  liger under torch.compile
    eager        the model as it is
    blocks       xtrain.compile_blocks of the unmodified model: its first step alone

each in a process of its own with empty compile caches. Every step counts for the loss curves, which
--plot lays over each other. Without flags: the 1.1B shape on a GPU, a tiny one on a CPU. Exit code
1 if a variant failed, 2 for a wrong flag.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness, turns  # noqa: E402
from bench.hf_variants import DEFAULT_VARIANTS, SHAPES, VARIANTS, Setting  # noqa: E402
from bench.turns import Outcome, Plan  # noqa: E402
from bench.worker import Team  # noqa: E402
from xtrain.command_line import Parser, command, output_file  # noqa: E402

NUM_LOSSES = 4


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    flags = parser.parse_args(arguments)
    try:
        setting, plan = resolve(flags)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    print(setting, flush=True)
    start, load = time.perf_counter(), harness.load_average()
    environment, outcomes = run(setting, plan)
    from bench.hf_report import build_report, draw_losses

    environment |= {"load_average_before": load, "run_took_s": time.perf_counter() - start}
    line = harness.command_line("bench/compare_hf.py", arguments)
    report = build_report(setting, plan, environment, outcomes, line)
    report.write(flags.json, flags.markdown)
    if flags.plot is not None:
        draw_losses(flags.plot, setting, outcomes)
    return turns.show(report, outcomes)


def build_parser() -> Any:
    """Return the command line's parser."""
    parser = Parser(prog="bench/compare_hf.py", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), help="of the Llama (GPU: 1b, CPU: tiny)")
    add("--layers", type=turns.positive, help="number of layers (by shape)")
    add("--learning-rate", type=float, default=3e-4, help="constant (3e-4)")
    add("--plot", type=output_file, metavar="FILE", help="draw the loss curves, a PNG")
    turns.add_flags(add, variants=",".join(DEFAULT_VARIANTS), blocks=7)
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and shape; ValueError names what does not fit."""
    names, device = turns.names_of(flags.variants, VARIANTS), turns.device_of(flags)
    on_gpu = device.partition(":")[0] == "cuda"
    name = flags.shape or ("1b" if on_gpu else "tiny")
    given = {"batch": flags.batch, "seq": flags.seq, "num_hidden_layers": flags.layers}
    setting = Setting(
        name=name,
        shape=replace(SHAPES[name], **{k: v for k, v in given.items() if v is not None}),
        dropout=flags.dropout,
        device=device,
        dtype=flags.dtype or ("bf16" if on_gpu else "fp32"),
        learning_rate=flags.learning_rate,
        seed=flags.seed,
    )
    # On a GPU first steps and visits add up to 200 steps of each variant.
    steps, warm_up = (10, 4) if on_gpu else (2, 1)
    return setting, Plan(names, flags.blocks, flags.steps or steps, warm_up, flags.commit)


def run(setting: Setting, plan: Plan) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return the environment and each variant's outcome."""
    timed = [name for name in plan.variants if VARIANTS[name].timed]
    with Team(setting, plan.variants) as team:
        environment, outcomes = turns.start(team, plan, plan.variants, NUM_LOSSES, timed)
        turns.take_turns(team, plan, timed, outcomes)
        for name, error in team.errors.items():
            outcomes[name].error = error
    return environment, outcomes


if __name__ == "__main__":
    sys.exit(main())
