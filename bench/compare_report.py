"""From what compare.py measured to its report: rows, ratios, claims, the result in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench import turns
from bench.harness import NOT_AVAILABLE, Report, short
from bench.turns import Outcome, Plan
from bench.variants import VARIANTS, Setting, Variant

HEADERS = [
    "Variant",
    "Step time p50 [p20, p80] (ms)",
    "Tokens/s",
    "Peak memory (GiB)",
    "First step (s)",
    "Recompiles",
    "vs eager",
    "vs torch.compile",
    "Max loss difference",
    "Masks",
]
MAX_PASS_SHARE = 0.10
# (faster variant, baseline, least ratio of speeds), (variant, floor, most extra time): what the
# project promises at the shape that each device is measured at by default.
SPEED_CLAIMS = {
    "cpu": [("xtrain", "torch", 0.98), ("xtrain-p0", "torch-p0", 0.98)],
    "cuda": [("xtrain", "torch", 1.01)],
}
# the same at that shape of a model whose own dropout is replaced, and whose logits are kept
GPT2_CLAIMS = [("xtrain", "torch", 1.00)]
COST_CLAIMS = {
    "cpu": [("xtrain", "xtrain-p0", 0.05)],
    "cuda": [("xtrain", "xtrain-p0", 0.01), ("xtrain", "torch-p0", 0.01)],
}
CLAIMED_SHAPES = {"cpu": ("small", None), "cuda": ("124m", (32, 1024, 50304))}
CLAIMED_DROPOUT = 0.1


class Results(turns.Results):
    """The outcomes of a run with the figures that follow from them."""

    def loss_difference(self, name: str) -> float | None:
        """Return the largest difference to the reference's losses over the first steps."""
        reference = self.outcomes.get(VARIANTS[name].reference)
        losses = self.outcomes[name].first.get("losses")
        if reference is None or not losses or "losses" not in reference.first:
            return None
        pairs = zip(losses, reference.first["losses"], strict=True)
        return max(abs(a - b) for a, b in pairs)

    def equal_masks(self, name: str) -> tuple[int, int] | None:
        """Return (masks equal in forward and backward, masks looked at).

        Of xtrain: equal to the oracle of the seed contract. With F.dropout: equal to eager's, drawn
        from the same state of torch's generator.
        """
        masks = self.outcomes[name].masks
        wanted = masks.get("expected")
        if masks and VARIANTS[name].dropout == "F.dropout":
            eager = self.outcomes.get("eager")
            wanted = eager.masks.get("forward") if eager is not None else None
        if not wanted:
            return None
        triples = list(zip(masks["forward"], masks["backward"], wanted, strict=True))
        return sum(a == b == c for a, b, c in triples), len(triples)

    def pass_share(self, name: str = "xtrain") -> float | None:
        """Return what part of the first step our graph passes took."""
        first = self.outcomes[name].first if name in self.outcomes else {}
        if not first.get("passes_ms"):
            return None
        return first["passes_ms"] / 1e3 / first["first_step_s"]


def build_report(
    setting: Setting,
    plan: Plan,
    environment: dict[str, Any],
    outcomes: Mapping[str, Outcome],
    command: str,
) -> Report:
    """Return the report of a run."""
    results = Results(setting, outcomes)
    timed = [name for name in outcomes if name in plan.variants]
    return Report(
        title=f"Dropout in a training step: {_name(setting)} on {_machine(environment, setting)}",
        question="Is a training step with dropout from xtrain.compile faster than plain "
        "torch.compile with F.dropout, and what does the dropout cost?",
        result=result_sentences(results),
        setup={"configuration": str(setting), **environment},
        method=method_sentences(setting, plan),
        headers=HEADERS,
        rows=[table_row(results, name) for name in timed],
        reproduce=command,
        limits=limits(results, plan, environment),
        checks=checks(results),
        data={
            "setting": asdict(setting),
            "plan": asdict(plan),
            "variants": {name: _row_data(results, name) for name in outcomes},
        },
    )


def table_row(results: Results, name: str) -> list[str]:
    """Return a variant's cells; one that failed says why in each cell that it leaves empty."""
    variant, outcome = VARIANTS[name], results.outcomes[name]
    missing = NOT_AVAILABLE if outcome.error is None else f"failed: {outcome.error}"
    summary, rate = results.summary(name), results.tokens_per_s(name)
    cells = [
        str(summary) if summary else missing,
        f"{rate:,.0f}" if rate else NOT_AVAILABLE,
        short(memory) if (memory := outcome.final.get("peak_memory_gib")) else NOT_AVAILABLE,
        _cell(outcome.first.get("first_step_s"), "{:.1f}"),
        _cell(outcome.final.get("num_recompiles"), "{}"),
        _cell(results.speed(name, "eager"), "{}"),
        _cell(results.speed(name, "torch"), "{}"),
        _loss_cell(results, variant),
        _masks_cell(results, variant),
    ]
    if outcome.error is not None and summary:  # it failed after it had been timed for a while
        cells[0] += f"; {missing}"
    return [variant.label, *cells]


def _cell(value: Any, form: str) -> str:
    return NOT_AVAILABLE if value is None else form.format(value)


def _loss_cell(results: Results, variant: Variant) -> str:
    if variant.reference == variant.name:
        return "reference"
    difference = results.loss_difference(variant.name)
    if difference is None:
        return NOT_AVAILABLE
    # that of GPT2's embedding is no residual branch's: it stays torch's
    torch_draws = variant.dropout == "F.dropout" or results.setting.model == "gpt2"
    return f"{difference:.1e}" + (" (other masks)" if variant.dropout and torch_draws else "")


def _masks_cell(results: Results, variant: Variant) -> str:
    if not variant.dropout or not results.setting.dropout:
        return "no dropout"
    if variant.name == "eager":
        return "torch's generator"
    found = results.equal_masks(variant.name)
    if found is None:
        return NOT_AVAILABLE
    wanted = "eager's" if variant.dropout == "F.dropout" else "the oracle's"
    return f"{found[0]} of {found[1]} equal {wanted}"


def result_sentences(results: Results) -> list[str]:
    """Say in a sentence what came out, wins and losses alike, and in another what failed."""
    speeds = []
    for variant, baseline, words in (
        ("xtrain", "torch", "xtrain.compile ran at {} the speed of torch.compile with F.dropout"),
        ("xtrain", "eager", "at {} that of eager with F.dropout"),
        ("xtrain-p0", "torch-p0", "without dropout at {} that of torch.compile"),
    ):
        if ratio := results.speed(variant, baseline):
            speeds.append(words.format(f"{ratio} x") + f" ({ratio.verdict()})")
    costs = []
    for variant, floor, words in (
        ("xtrain", "xtrain-p0", "dropout added {} to its own step"),
        ("xtrain", "torch-p0", "{} to that of torch.compile without dropout"),
        ("torch", "torch-p0", "where F.dropout added {}"),
    ):
        if ratio := results.ratio(variant, floor):
            costs.append(words.format(ratio.as_cost()))
    said = [", ".join(words) for words in (speeds, costs) if words]
    sentences = []
    if said:
        sentences.append(f"With dropout {results.setting.dropout:g}, {'; '.join(said)}.")
    failed = [VARIANTS[n].label for n, o in results.outcomes.items() if o.error is not None]
    if failed:
        sentences.append(f"Failed: {', '.join(failed)}; the table says why.")
    return sentences or ["Nothing was measured that could be compared."]


def checks(results: Results) -> list[list[str]]:
    """Return [claim, wanted, measured, met or missed] for what the project promises."""
    setting = results.setting
    kind = setting.device_type
    rows = []
    preset, shape = CLAIMED_SHAPES[kind]
    is_claimed = (
        setting.preset == preset
        and shape in (None, (setting.batch, setting.seq, setting.vocab))
        and (setting.dropout, setting.recompute) == (CLAIMED_DROPOUT, "none")
    )
    speeds, costs = SPEED_CLAIMS[kind], COST_CLAIMS[kind]
    if setting.model != "transformer":
        speeds, costs = GPT2_CLAIMS if kind == "cuda" else [], []
    for variant, baseline, least in speeds if is_claimed else ():
        speed = results.speed(variant, baseline)
        if speed is not None:
            claim = f"speed of {VARIANTS[variant].label} / {VARIANTS[baseline].label}"
            rows.append([claim, f">= {least:.2f}", str(speed), _met(speed.median >= least)])
    for variant, floor, most in costs if is_claimed else ():
        cost = results.ratio(variant, floor)
        if cost is not None:
            claim = f"time of {VARIANTS[variant].label} over {VARIANTS[floor].label}"
            wanted, met = f"<= {100 * most:.0f}%", cost.median - 1 <= most
            rows.append([claim, wanted, cost.as_cost(), _met(met)])
    share = results.pass_share()
    if share is not None:
        wanted, met = f"<= {100 * MAX_PASS_SHARE:.0f}%", share <= MAX_PASS_SHARE
        rows.append(["graph passes' share of the first step", wanted, f"{share:.1%}", _met(met)])
    for name in ("xtrain", "xtrain-eager"):
        found = results.equal_masks(name) if name in results.outcomes else None
        if found is not None:
            claim = f"masks of {VARIANTS[name].label} equal to the oracle's"
            rows.append([claim, "all", f"{found[0]} of {found[1]}", _met(found[0] == found[1])])
    return rows


def _met(met: bool) -> str:
    return "met" if met else "missed"


def method_sentences(setting: Setting, plan: Plan) -> list[str]:
    clock = "CUDA events" if setting.device_type == "cuda" else "wall time"
    memory = (
        "max_memory_allocated"
        if setting.device_type == "cuda"
        else "tensors alone: what is held between steps plus the peak of torch's CPU allocator "
        "during one step; libraries and compiled code are left out"
    )
    return [
        "A step is forward, backward and a fused AdamW update; random tokens, the same batches and "
        "initial weights for every variant.",
        "Each variant lives in a process of its own with empty compile caches; they take turns.",
        f"{plan.num_blocks} blocks; in each every variant is visited twice, there and back (A B C "
        "C B A), in an order that changes from block to block, so that drift and what ran before "
        f"cancel. A visit is {plan.num_warm_up} warm-up and {plan.num_steps} timed steps by "
        f"{clock}; the table's step time is over all timed steps.",
        "Ratios are formed within each block, of the mean of a variant's two visit medians; given "
        "are their median over the blocks and in brackets a distribution-free interval for it, of "
        "at least 95% where there are 6 blocks or more. Above 1 is faster than the baseline.",
        f"Peak memory: {memory}.",
        "First step: everything from the call to the finished update, compilation included.",
        "Recompiles: graphs compiled after the first step.",
        "Max loss difference: over the first 10 steps, to eager with the same masks (rows with "
        "xtrain's dropout: backend eager; rows without dropout: plain eager; F.dropout rows: eager "
        "F.dropout, whose masks differ).",
        "Masks: read off a small decoder, forward and backward, two steps of four sites; xtrain's "
        "against ops.dropout_mask on the CPU, F.dropout's against eager after an equal "
        "torch.manual_seed.",
    ]


def limits(results: Results, plan: Plan, environment: dict[str, Any]) -> list[str]:
    """Say what the figures do not show, the noise that was met, and what failed."""
    lines = []
    load, cores = environment.get("load_average_before"), environment.get("cpu_cores")
    if load is not None and cores and load > 0.25 * cores:
        lines.append(
            f"The machine was shared: load average {load:.1f} on {cores} cores before the run. "
            "Trust the ratios, not the times."
        )
    summaries = {n: results.summary(n) for n in plan.variants}
    spreads = {n: (s.p80 - s.p20) / s.p50 for n, s in summaries.items() if s}
    if spreads:
        name = max(spreads, key=lambda n: spreads[n])
        lines.append(f"Noise: p20 to p80 spans up to {spreads[name]:.0%} of the median ({name}).")
    lines.append(
        "Losses of F.dropout rows are drawn with other masks than eager's, so that their difference"
        " shows chance, not error."
    )
    lines.append("Random tokens: the losses mean nothing beyond the comparison.")
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
        "tokens_per_s": results.tokens_per_s(name),
        **outcome.final,
        **outcome.first,
        "max_loss_difference": results.loss_difference(name),
        "pass_share_of_first_step": results.pass_share(name),
        "masks": outcome.masks,
        "blocks_ms": outcome.blocks,
        **{key: asdict(ratio) if ratio else None for key, ratio in ratios.items()},
    }


def _name(setting: Setting) -> str:
    return setting.preset if setting.model == "transformer" else f"{setting.model} {setting.preset}"


def _machine(environment: dict[str, Any], setting: Setting) -> str:
    if setting.device_type == "cuda":
        return str(environment.get("gpu", "a GPU"))
    return f"{environment.get('cpu', 'a CPU')}, {environment.get('cpu_threads', '?')} threads"
