"""What does dropout cost, and is xtrain.compile faster than plain torch.compile?

One training step (forward, backward, AdamW) of one model, run in turn by

    eager         the model with F.dropout on its residual branches
    torch         torch.compile of the same: the best that a user has without xtrain
    torch-p0      torch.compile of the model without dropout: the floor
    xtrain        xtrain.compile(model, dropout=p)
    xtrain-p0     xtrain.compile(model, dropout=0): prices our dropout
    xtrain-eager  xtrain.compile(model, dropout=p, backend="eager"): the same masks without inductor
    xtrain-fused-rounding  xtrain without the bf16 roundings that eager does between ops
    eager-p0      the model without dropout or compiler (run for its losses)

each in a process of its own with empty compile caches. Prints a table; --json and --markdown write
the report. Without flags it takes under four minutes on two cores and measures the 124M shape on a
GPU. Exit code 1 if a variant failed, 2 for a wrong flag.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # measure the checkout that this file and the commit belong to
    sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.variants import DEFAULT_VARIANTS, SHAPES, VARIANTS, Setting  # noqa: E402
from bench.worker import Team  # noqa: E402

NUM_LOSSES = 10


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    variants: tuple[str, ...]
    num_blocks: int
    num_steps: int
    num_warm_up: int
    commit: str | None = None


@dataclass
class Outcome:
    """What one variant gave; `error` says why the rest is missing."""

    blocks: list[list[list[float]]] = field(default_factory=list)  # ms, by block and visit
    first: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


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
    start, load = time.perf_counter(), harness.load_average()
    environment, outcomes = run(setting, plan)
    from bench.compare_report import build_report

    environment |= {"load_average_before": load, "run_took_s": time.perf_counter() - start}
    command = harness.command_line("bench/compare.py", arguments)
    report = build_report(setting, plan, environment, outcomes, command)
    report.write(flags.json, flags.markdown)
    print("\n" + "\n".join(report.result))
    for claim, wanted, measured, verdict in report.checks:
        print(f"  {verdict:>6}  {claim}: {measured} (wanted {wanted})")
    print("\n" + report.table())
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


def build_parser() -> Any:
    """Return the command line's parser."""
    from xtrain.command_line import Parser

    parser = Parser(prog="bench/compare.py", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=tuple(SHAPES), help="model (GPU: 124m, CPU: small)")
    add("--batch", type=_positive, help="samples a step (by preset)")
    add("--seq", type=_positive, help="tokens a sample (by preset)")
    add("--vocab", type=_positive, help="vocabulary (by preset)")
    add("--dropout", type=_probability, default=0.1, help="probability of dropping (0.1)")
    add("--recompute", type=_recompute, default="none", help="none | full | first N layers (none)")
    add("--device", help="cuda | cuda:N | cpu (cuda where there is one)")
    add("--threads", type=_positive, help="CPU threads (torch's default)")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast (GPU: bf16, CPU: fp32)")
    add("--variants", default=",".join(DEFAULT_VARIANTS), help="comma-separated (all but eager-p0)")
    add("--blocks", type=_positive, default=9, help="each visits every variant twice (9)")
    add("--steps", type=_positive, help="timed steps a visit (GPU: 10, CPU: 2)")
    add("--drift", action="store_true", help="compare numbers, not speed: eager against compiled")
    add("--seed", type=int, default=0, help="of weights, data and dropout (0)")
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the report")
    return parser


def resolve(flags: Namespace) -> tuple[Setting, Plan]:
    """Fill what was not given, by device and preset; ValueError names what does not fit."""
    names = tuple(dict.fromkeys(name.strip() for name in flags.variants.split(",")))
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(VARIANTS)}")
    import torch

    from bench.models import build_config
    from xtrain.model import Config

    device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda, cuda:N or cpu, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device")
    preset = flags.preset or ("124m" if kind == "cuda" else "small")
    batch, seq = SHAPES[preset]
    setting = Setting(
        preset=preset,
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
    build_config(setting)
    # A visit on a GPU starts with an empty allocator and another variant's clocks and power: some
    # steps fill the one and settle the others. On a CPU one step warms the caches.
    steps, warm_up = (10, 6) if kind == "cuda" else (2, 1)
    return setting, Plan(names, flags.blocks, flags.steps or steps, warm_up, flags.commit)


def run(setting: Setting, plan: Plan) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Return the environment and each variant's outcome, those run as a reference included."""
    references = [VARIANTS[name].reference for name in plan.variants]
    names = tuple(dict.fromkeys((*plan.variants, *references)))
    outcomes = {name: Outcome() for name in names}
    with Team(setting, names) as team:
        team.ask_all(names, "ready")
        environments = (team.ask(name, "environment", plan.commit) for name in names)
        environment: dict[str, Any] = next((found for found in environments if found), {})
        for name in names:
            if first := team.ask(name, "first_steps", NUM_LOSSES):
                outcomes[name].first = first
                print(f"{name}: first step {first['first_step_s']:.1f} s", flush=True)
            if name not in plan.variants:  # a reference, wanted for its losses alone
                team.stop(name)
        for block in range(plan.num_blocks):
            visits: dict[str, list[list[float]]] = {name: [] for name in plan.variants}
            for name in harness.order_of_block(plan.variants, block):
                if times := team.ask(name, "visit", plan.num_warm_up, plan.num_steps):
                    visits[name].append(times)
            for name, both in visits.items():
                if len(both) == 2:  # else it has failed
                    outcomes[name].blocks.append(both)
            print(f"block {block + 1}/{plan.num_blocks}", flush=True)
        for name in plan.variants:
            outcomes[name].final = team.ask(name, "finish") or {}
        dropping = [n for n in plan.variants if VARIANTS[n].dropout and setting.dropout]
        for name, masks in team.ask_all(dropping, "masks").items():
            outcomes[name].masks = masks
        for name, error in team.errors.items():
            outcomes[name].error = error
    return environment, outcomes


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


def _recompute(text: str) -> str | int:
    return text if text in ("none", "full") else _positive(text)


# What argparse calls them when they refuse a value.
_positive.__name__ = "positive int"
_probability.__name__ = "probability in [0, 1)"
_recompute.__name__ = "none, full or positive int"

if __name__ == "__main__":
    sys.exit(main())
