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

from bench import harness  # noqa: E402
from bench.compare import Outcome, Plan  # noqa: E402
from bench.hf_variants import DEFAULT_VARIANTS, SHAPES, VARIANTS, Setting  # noqa: E402
from bench.worker import Team  # noqa: E402


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
    command = harness.command_line("bench/compare_hf.py", arguments)
    report = build_report(setting, plan, environment, outcomes, command)
    report.write(flags.json, flags.markdown)
    if flags.plot is not None:
        draw_losses(flags.plot, setting, outcomes)
    print("\n" + "\n".join(report.result))
    for claim, wanted, measured, verdict in report.checks:
        print(f"  {verdict:>6}  {claim}: {measured} (wanted {wanted})")
    print("\n" + report.table())
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


def build_parser() -> Any:
    """Return the command line's parser."""
    from xtrain.command_line import Parser

    parser = Parser(prog="bench/compare_hf.py", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), help="of the Llama (GPU: 1b, CPU: tiny)")
    add("--batch", type=_positive, help="samples a step (by shape)")
    add("--seq", type=_positive, help="tokens a sample (by shape)")
    add("--layers", type=_positive, help="number of layers (by shape)")
    add("--dropout", type=float, default=0.1, help="of the variants that drop (0.1)")
    add("--learning-rate", type=float, default=3e-4, help="constant (3e-4)")
    add("--device", help="cuda | cuda:N | cpu (cuda where there is one)")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast (GPU: bf16, CPU: fp32)")
    add("--variants", default=",".join(DEFAULT_VARIANTS), help="comma-separated")
    add("--blocks", type=_positive, default=7, help="each visits every variant twice (7)")
    add("--steps", type=_positive, help="timed steps a visit (GPU: 10, CPU: 2)")
    add("--seed", type=int, default=0, help="of weights, data and dropout (0)")
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the report")
    add("--plot", type=Path, metavar="FILE", help="draw the loss curves, a PNG")
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and shape; ValueError names what does not fit."""
    names = tuple(dict.fromkeys(name.strip() for name in flags.variants.split(",")))
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(VARIANTS)}")
    if not 0 <= flags.dropout < 1:
        raise ValueError(f"--dropout must lie in [0, 1), got {flags.dropout}")
    import torch

    device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.partition(":")[0] == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device")
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
    outcomes = {name: Outcome() for name in plan.variants}
    timed = [name for name in plan.variants if VARIANTS[name].timed]
    with Team(setting, plan.variants) as team:
        team.ask_all(plan.variants, "ready")
        environments = (team.ask(name, "environment", plan.commit) for name in plan.variants)
        environment: dict[str, Any] = next((found for found in environments if found), {})
        for name in plan.variants:
            if first := team.ask(name, "first_steps", 4):
                outcomes[name].first = first
                print(f"{name}: first step {first['first_step_s']:.1f} s", flush=True)
            if name not in timed:
                team.stop(name)
        for block in range(plan.num_blocks):
            visits: dict[str, list[list[float]]] = {name: [] for name in timed}
            for name in harness.order_of_block(timed, block):
                if times := team.ask(name, "visit", plan.num_warm_up, plan.num_steps):
                    visits[name].append(times)
            for name, both in visits.items():
                if len(both) == 2:  # else it has failed
                    outcomes[name].blocks.append(both)
            print(f"block {block + 1}/{plan.num_blocks}", flush=True)
        for name in timed:
            outcomes[name].final = team.ask(name, "finish") or {}
        for name, error in team.errors.items():
            outcomes[name].error = error
    return environment, outcomes


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "positive int"  # what argparse calls it when it refuses a value

if __name__ == "__main__":
    sys.exit(main())
