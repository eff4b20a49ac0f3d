"""What does dropout cost, and is xtrain.compile faster than plain torch.compile?

One training step (forward, backward, AdamW) of one model, run in turn by

    eager         the model with F.dropout on its residual branches
    torch         torch.compile of the same: the best that a user has without xtrain
    torch-p0      torch.compile of the model without dropout: the floor
    xtrain        xtrain.compile(model, dropout=p)
    xtrain-p0     xtrain.compile(model, dropout=0): prices our dropout
    xtrain-eager  xtrain.compile(model, dropout=p, backend="eager"): the same masks without inductor
    xtrain-fused-rounding  xtrain without the bf16 roundings that eager does between ops
    xtrain-torch-sdpa      xtrain that leaves attention as torch's call
    xtrain-drop            xtrain with logits="drop"
    eager-p0      the model without dropout or compiler (run for its losses)

each in a process of its own with empty compile caches. With --model gpt2 the model drops out by
itself, in nn.Dropout modules that xtrain.compile(existing="replace") takes over. Prints a table;
--json and --markdown write the report. Without flags it takes under four minutes on two cores and
measures the 124M shape on a GPU. Exit code 1 if a variant failed, 2 for a wrong flag, 70 for a
fault of this script.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness, turns  # noqa: E402
from bench.turns import Outcome, Plan  # noqa: E402
from bench.variants import DEFAULT_VARIANTS, MODELS, SHAPES, VARIANTS, Setting  # noqa: E402
from bench.worker import Team  # noqa: E402
from xtrain.command_line import Parser, command  # noqa: E402

NUM_LOSSES = 10


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
    if flags.drift:
        from bench.drift import report as drift_report

        print("\n" + drift_report(setting), end="")
        return 0
    if flags.kernels:
        print(kernel_table(setting, plan))
        return 0
    start, load = time.perf_counter(), harness.load_average()
    environment, outcomes = run(setting, plan)
    from bench.compare_report import build_report

    environment |= {"load_average_before": load, "run_took_s": time.perf_counter() - start}
    line = harness.command_line("bench/compare.py", arguments)
    report = build_report(setting, plan, environment, outcomes, line)
    report.write(flags.json, flags.markdown)
    return turns.show(report, outcomes)


def build_parser() -> Any:
    """Return the command line's parser."""
    parser = Parser(prog="bench/compare.py", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=tuple(SHAPES), help="model (GPU: 124m, CPU: small)")
    add("--model", choices=MODELS, default="transformer", help="written as (transformer)")
    add("--vocab", type=turns.positive, help="vocabulary (by preset)")
    add("--recompute", type=_recompute, default="none", help="none | full | first N layers (none)")
    add("--threads", type=turns.positive, help="CPU threads (torch's default)")
    add("--drift", action="store_true", help="compare numbers, not speed: eager against compiled")
    add("--kernels", action="store_true", help="print each variant's time by kernel, no more")
    turns.add_flags(add, variants=",".join(DEFAULT_VARIANTS), blocks=9)
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and preset; ValueError names what does not fit."""
    from bench.models import build_config
    from xtrain.model import Config
    from xtrain.training.build import check_size

    names, device = turns.names_of(flags.variants, VARIANTS), turns.device_of(flags)
    kind = device.partition(":")[0]
    preset = flags.preset or ("124m" if kind == "cuda" else "small")
    batch, seq = SHAPES[preset]
    setting = Setting(
        preset=preset,
        model=flags.model,
        batch=flags.batch or batch,
        seq=flags.seq or seq,
        vocab=flags.vocab or Config.preset(preset).vocab_size,
        dropout=flags.dropout,
        recompute=flags.recompute,
        device=device,
        dtype=flags.dtype or ("bf16" if kind == "cuda" else "fp32"),
        threads=flags.threads,
        seed=flags.seed,
    )
    check_size(
        build_config(setting),
        device,
        batch_size=setting.batch,
        micro_batch_size=setting.batch,
        seq_len=setting.seq,
    )
    # A visit on a GPU starts with an empty allocator and another variant's clocks and power: some
    # steps fill the one and settle the others. On a CPU one step warms the caches.
    steps, warm_up = (10, 6) if kind == "cuda" else (2, 1)
    return setting, Plan(names, flags.blocks, flags.steps or steps, warm_up, flags.commit)


def run(setting: Setting, plan: Plan) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return the environment and each variant's outcome, those run as a reference included."""
    references = [VARIANTS[name].reference for name in plan.variants]
    names = tuple(dict.fromkeys((*plan.variants, *references)))
    with Team(setting, names) as team:
        environment, outcomes = turns.start(team, plan, names, NUM_LOSSES, plan.variants)
        turns.take_turns(team, plan, plan.variants, outcomes)
        dropping = [n for n in plan.variants if VARIANTS[n].dropout and setting.dropout]
        for name, masks in team.ask_all(dropping, "masks").items():
            outcomes[name].masks = masks
        for name, error in team.errors.items():
            outcomes[name].error = error
    return environment, outcomes


def kernel_table(setting: Setting, plan: Plan, num_rows: int = 40) -> str:
    """Return the time of a step by kernel, the longest first, one pair of columns a variant."""
    with Team(setting, plan.variants) as team:
        found = {name: team.ask(name, "kernels", plan.num_steps) for name in plan.variants}
    found = {name: kernels for name, kernels in found.items() if kernels}
    names = sorted(
        {kernel for kernels in found.values() for kernel in kernels},
        key=lambda kernel: -max(kernels.get(kernel, (0, 0))[1] for kernels in found.values()),
    )
    lines = [" ".join(f"{name + ' ms':>20} {'calls':>7}" for name in found) + "  kernel"]
    totals = {name: sum(ms for _, ms in kernels.values()) for name, kernels in found.items()}
    lines.append(" ".join(f"{ms:20.3f} {'':>7}" for ms in totals.values()) + "  all")
    for kernel in names[:num_rows]:
        pairs = (kernels.get(kernel, (0.0, 0.0)) for kernels in found.values())
        lines.append(" ".join(f"{ms:20.3f} {n:7.1f}" for n, ms in pairs) + f"  {kernel[:100]}")
    return "\n".join(lines)


def _recompute(text: str) -> str | int:
    return text if text in ("none", "full") else turns.positive(text)


# What argparse calls it when it refuses a value.
_recompute.__name__ = "none, full or positive int"

if __name__ == "__main__":
    sys.exit(main())
