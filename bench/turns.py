"""What compare.py and compare_hf.py share: variants that take turns, their flags and figures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import harness
from bench.harness import Ratio, Report, Summary, block_ratio, flat
from bench.worker import Team
from xtrain.command_line import output_file
from xtrain.rng import SEED_RANGE


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


class Results:
    """The outcomes of a run with the figures that follow from them."""

    def __init__(self, setting: Any, outcomes: Mapping[str, Outcome]):
        self.setting = setting
        self.outcomes = outcomes

    def ratio(self, numerator: str, denominator: str) -> Ratio | None:
        """Return the ratio of two variants' step times, None unless both ran every block."""
        found = [self.outcomes.get(name) for name in (numerator, denominator)]
        if any(o is None or o.error or not o.blocks for o in found):
            return None
        return block_ratio(found[0].blocks, found[1].blocks)  # type: ignore[union-attr]

    def speed(self, variant: str, baseline: str) -> Ratio | None:
        """Return how many times faster a variant is: baseline's time / variant's time."""
        return self.ratio(baseline, variant)

    def summary(self, name: str) -> Summary | None:
        """Return the percentiles of a variant's step times, None where it was not timed."""
        times = flat(self.outcomes[name].blocks)
        return Summary.of(times) if times else None

    def tokens_per_s(self, name: str) -> float | None:
        """Return a variant's tokens per second at its median step time."""
        summary = self.summary(name)
        return self.setting.tokens_per_step / summary.p50 * 1e3 if summary else None


# --- flags ---------------------------------------------------------------------------------------


def add_flags(add: Callable[..., Any], *, variants: str, blocks: int) -> None:
    """Add the flags of both: variants as the default list, blocks as the default count."""
    add("--batch", type=positive, help="samples a step (by size of model)")
    add("--seq", type=positive, help="tokens a sample (by size of model)")
    add("--device", help="cuda | cuda:N | cpu (cuda where there is one)")
    add("--dtype", choices=("fp32", "bf16"), help="bf16 is autocast (GPU: bf16, CPU: fp32)")
    add("--dropout", type=probability, default=0.1, help="probability of dropping (0.1)")
    add("--variants", default=variants, help=f"comma-separated ({variants})")
    add(
        "--blocks",
        type=positive,
        default=blocks,
        help=f"each visits every variant twice ({blocks})",
    )
    add("--steps", type=positive, help="timed steps a visit (GPU: 10, CPU: 2)")
    add("--seed", type=seed, default=0, help="of weights, data and dropout (0)")
    add("--commit", help="commit to name in the report where the folder is no git checkout")
    add("--json", type=output_file, metavar="FILE", help="write everything measured")
    add("--markdown", type=output_file, metavar="FILE", help="write the report")


def names_of(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the variants named in a flag, each once; ValueError for one that is unknown."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown variant {name!r}; known: {', '.join(known)}")
    return names


def device_of(flags: Namespace) -> str:
    """Return the device to measure on; ValueError for one that is not there."""
    import torch

    device: str = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda, cuda:N or cpu, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device")
    return device


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def seed(text: str) -> int:
    """Parse what torch's generators take."""
    value = int(text)
    if not SEED_RANGE[0] <= value <= SEED_RANGE[1]:
        raise ValueError
    return value


def probability(text: str) -> float:
    """Parse a number in [0, 1)."""
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


# What argparse calls them when they refuse a value.
positive.__name__ = "positive int"
seed.__name__ = "seed, from -2^63 to 2^64 - 1"
probability.__name__ = "probability in [0, 1)"


# --- measuring -----------------------------------------------------------------------------------


def start(
    team: Team, plan: Plan, names: Sequence[str], num_losses: int, timed: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Build all variants and run their first steps, one after the other.

    Args:     timed: those that go on; the others are wanted for their first steps alone.
    Returns:  the environment and the outcomes, so far.
    """
    outcomes = {name: Outcome() for name in names}
    team.ask_all(names, "ready")
    environments = (team.ask(name, "environment", plan.commit) for name in names)
    environment: dict[str, Any] = next((found for found in environments if found), {})
    for name in names:
        if first := team.ask(name, "first_steps", num_losses):
            outcomes[name].first = first
            print(f"{name}: first step {first['first_step_s']:.1f} s", flush=True)
        if name not in timed:
            team.stop(name)
    return environment, outcomes


def take_turns(
    team: Team, plan: Plan, timed: Sequence[str], outcomes: Mapping[str, Outcome]
) -> None:
    """Time the variants block by block, then ask each what it has to say in the end."""
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


def show(report: Report, outcomes: Mapping[str, Outcome]) -> int:
    """Print a report's result, checks and table; return the exit code, 1 if a variant failed."""
    print("\n" + "\n".join(report.result))
    for claim, wanted, measured, verdict in report.checks:
        print(f"  {verdict:>6}  {claim}: {measured} (wanted {wanted})")
    print("\n" + report.table())
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0
