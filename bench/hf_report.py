"""From what compare_hf.py measured to its report and the picture of the loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import turns
from bench.harness import NOT_AVAILABLE, Report, short
from bench.hf_variants import (
    CLAIMED,
    CLAIMS,
    MAX_BLOCKS_SHARE,
    MAX_PASS_SHARE,
    VARIANTS,
    Setting,
)
from bench.turns import Outcome, Plan

HEADERS = [
    "Variant",
    "Step time p50 [p20, p80] (ms)",
    "Tokens/s",
    "Peak memory (GiB)",
    "First step (s)",
    "Recompiles",
    "vs torch.compile",
    "vs Liger",
    "Loss, last 20 steps",
]
LAST = 20


class Results(turns.Results):
    """The outcomes of a run with the figures that follow from them."""

    def last_loss(self, name: str) -> float | None:
        """Return the mean loss of the last steps."""
        losses = self.outcomes[name].final.get("losses", [])[-LAST:]
        return sum(losses) / len(losses) if losses else None

    def loss_difference(self, name: str, other: str) -> float | None:
        """Return the largest difference of two variants' losses, step by step."""
        curves = [self.outcomes[n].final.get("losses") for n in (name, other) if n in self.outcomes]
        if len(curves) < 2 or not all(curves):
            return None
        return max(abs(a - b) for a, b in zip(*curves, strict=False))

    def mean_difference(self, name: str, other: str, window: int = 10) -> float | None:
        """Return the largest difference of two variants' losses, meant over windows of steps."""
        curves = [self.outcomes[n].final.get("losses") for n in (name, other) if n in self.outcomes]
        if len(curves) < 2 or not all(curves):
            return None
        ours, theirs = (
            [fmean(losses[i : i + window]) for i in range(0, len(losses), window)]
            for losses in curves
        )
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=False))

    def blocks_share(self) -> float | None:
        """Return compile_blocks' first step as a part of xtrain.compile's."""
        first = [self.outcomes[n].first for n in ("blocks", "xtrain") if n in self.outcomes]
        if len(first) < 2 or not all(first):
            return None
        return first[0]["first_step_s"] / first[1]["first_step_s"]

    def pass_share(self) -> float | None:
        """Return our graph passes' time as a part of torch.compile's own first step."""
        first = {n: self.outcomes[n].first for n in ("xtrain", "torch") if n in self.outcomes}
        if len(first) < 2 or not all(first.values()):
            return None
        return first["xtrain"]["passes_ms"] / 1e3 / first["torch"]["first_step_s"]


def build_report(
    setting: Setting,
    plan: Plan,
    environment: dict[str, Any],
    outcomes: Mapping[str, Outcome],
    command: str,
) -> Report:
    """Return the report of a run."""
    results = Results(setting, outcomes)
    machine = environment.get("gpu" if setting.device_type == "cuda" else "cpu", "?")
    return Report(
        title=f"An unmodified transformers Llama, {setting.name}, on {machine}",
        question="Is a training step of transformers' Llama under xtrain.compile, dropout on, "
        "faster than under torch.compile and than with Liger-Kernel without dropout?",
        result=result_sentences(results),
        setup={"configuration": str(setting), **environment},
        method=method_sentences(setting, plan),
        headers=HEADERS,
        rows=[_row(results, name) for name in outcomes],
        reproduce=command,
        limits=limits(results),
        checks=checks(results),
        data={
            "setting": asdict(setting),
            "plan": asdict(plan),
            "variants": {name: _row_data(results, name) for name in outcomes},
        },
    )


def _row(results: Results, name: str) -> list[str]:
    outcome = results.outcomes[name]
    summary, rate = results.summary(name), results.tokens_per_s(name)
    missing = NOT_AVAILABLE if outcome.error is None else f"failed: {outcome.error}"

    def cell(value: Any, form: str = "{}") -> str:
        return NOT_AVAILABLE if value is None else form.format(value)

    memory = outcome.final.get("peak_memory_gib")
    return [
        VARIANTS[name].label,
        str(summary) if summary else missing,
        cell(rate, "{:,.0f}"),
        short(memory) if memory else NOT_AVAILABLE,
        cell(outcome.first.get("first_step_s"), "{:.1f}"),
        cell(outcome.final.get("num_recompiles")),
        cell(results.speed(name, "torch")),
        cell(results.speed(name, "liger")),
        cell(results.last_loss(name), "{:.3f}"),
    ]


def result_sentences(results: Results) -> list[str]:
    """Say what came out, wins and losses alike, and what failed."""
    said = []
    for baseline, words in (
        ("torch", "{} x torch.compile without dropout ({})"),
        ("liger", "{} x transformers + Liger without dropout ({})"),
        ("own", "{} x xtrain's own Transformer with dropout ({})"),
    ):
        if ratio := results.speed("xtrain", baseline):
            said.append(words.format(ratio, ratio.verdict()))
    sentences = []
    if said:
        p = results.setting.dropout
        sentences.append(f"With dropout {p:g}, transformers under xtrain.compile ran at {said[0]}")
        sentences[0] = ", at ".join([sentences[0], *said[1:]]) + "."
    for name, other, words in (
        ("xtrain-p0", "torch", "Without dropout"),
        ("liger", "torch", "With Liger"),
    ):
        difference = results.loss_difference(name, other)
        if difference is not None:
            sentences.append(
                f"{words} the losses of all steps stay within {difference:.2g} of torch.compile's."
            )
    swaps = results.outcomes["xtrain"].first.get("swaps") if "xtrain" in results.outcomes else None
    if swaps:
        found = ", ".join(f"{name} {count}" for name, count in swaps.items())
        sentences.append(f"Swapped, of what was matched: {found}.")
    failed = [VARIANTS[n].label for n, o in results.outcomes.items() if o.error is not None]
    if failed:
        sentences.append(f"Failed: {', '.join(failed)}; the table says why.")
    return sentences or ["Nothing was measured that could be compared."]


def checks(results: Results) -> list[list[str]]:
    """Return [claim, wanted, measured, met or missed] for what the project promises."""
    rows = []
    claimed = results.setting.device_type == "cuda" and results.setting.name == CLAIMED
    for variant, baseline, least in CLAIMS if claimed else ():
        if speed := results.speed(variant, baseline):
            claim = f"speed of {VARIANTS[variant].label} / {VARIANTS[baseline].label}"
            met = "met" if speed.median >= least else "missed"
            rows.append([claim, f">= {least:.2f}", str(speed), met])
    share = results.pass_share()
    if share is not None and results.setting.shape.num_hidden_layers >= 12:
        met = "met" if share <= MAX_PASS_SHARE else "missed"
        claim = "graph passes' time / torch.compile's own first step"
        rows.append([claim, f"<= {MAX_PASS_SHARE:.0%}", f"{share:.1%}", met])
    share = results.blocks_share()
    if share is not None and results.setting.shape.num_hidden_layers >= 12:
        met = "met" if share <= MAX_BLOCKS_SHARE else "missed"
        claim = "first step of xtrain.compile_blocks / of xtrain.compile"
        rows.append([claim, f"<= {MAX_BLOCKS_SHARE:.2f}", f"{share:.2f}", met])
    ours, liger = (results.mean_difference(n, "torch") for n in ("xtrain-p0", "liger"))
    if ours is not None and liger:  # Liger's own rounding is the yardstick
        met = "met" if ours <= 2 * liger else "missed"
        claim = "largest difference of 10-step mean losses to torch.compile, without dropout"
        rows.append([claim, f"<= 2 x Liger's, {2 * liger:.2g}", f"{ours:.2g}", met])
    return rows


def method_sentences(setting: Setting, plan: Plan) -> list[str]:
    clock = "CUDA events" if setting.device_type == "cuda" else "wall time"
    return [
        "A step is forward, backward and a fused AdamW update on bytes of the Python standard "
        "library; the same batches for every variant, and for transformers' variants the same "
        "initial weights.",
        "Each variant lives in a process of its own with empty compile caches; they take turns.",
        f"{plan.num_blocks} blocks; in each every variant is visited twice, there and back, in an "
        "order that changes from block to block. A visit is "
        f"{plan.num_warm_up} warm-up and {plan.num_steps} timed steps by {clock}. All steps train.",
        "Ratios are formed within each block, of the mean of a variant's two visit medians; given "
        "are their median over the blocks and a distribution-free interval for it, of at least 95% "
        "where there are 6 blocks or more. Above 1 is faster than the baseline.",
        "First step: everything from the call to the finished update, compilation included.",
    ]


def limits(results: Results) -> list[str]:
    """Say what the figures do not show, and what failed."""
    lines = [
        "One shape, batch and length; the learning rate is constant and was not tuned.",
        "Rows with dropout learn with it: their curve lies above those without by design.",
        "xtrain's Transformer starts from other weights than transformers' models.",
    ]
    lines += [
        f"{VARIANTS[name].label} failed: {outcome.error}"
        for name, outcome in results.outcomes.items()
        if outcome.error is not None
    ]
    return lines


def _row_data(results: Results, name: str) -> dict[str, Any]:
    outcome, summary = results.outcomes[name], results.summary(name)
    ratios = {f"speed_vs_{other}": results.speed(name, other) for other in results.outcomes}
    return {
        "label": VARIANTS[name].label,
        "error": outcome.error,
        "step_time_ms": asdict(summary) if summary else None,
        **outcome.final,
        **outcome.first,
        "blocks_ms": outcome.blocks,
        **{key: asdict(ratio) if ratio else None for key, ratio in ratios.items()},
    }


def draw_losses(path: Path, setting: Setting, outcomes: Mapping[str, Outcome]) -> None:
    """Write a PNG: the loss of every step, variant over variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    styles = ("-", "--", "-", ":", "-.", "-", "--")
    for style, (name, outcome) in zip(styles, outcomes.items(), strict=False):
        losses = outcome.final.get("losses", [])
        panel.plot(range(1, len(losses) + 1), losses, style, label=VARIANTS[name].label, lw=1.3)
    panel.set_xlabel("step")
    panel.set_ylabel("training loss (nats a byte)")
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    panel.set_title(f"Llama {setting.name}, learning rate {setting.learning_rate:g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
