"""From what the variants of a training step gave to a report: rows, ratios, claims, curves.

What differs by kind of model stands side by side: the columns, the claims, and in words.jinja what
is said of compare.py's models and of compare_hf.py's Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.harness import Ratio, Summary, block_ratio, flat
from bench.report import NOT_AVAILABLE, Report, cell, figure, noise, short, texts
from bench.train.turns import Outcome, Plan
from bench.train.variants import Setting, Variant

LAST = 20  # steps whose mean loss a Llama's row shows
WINDOW = 10  # steps over which losses are meant before two curves are compared

# (faster variant, baseline, least ratio of speeds), (variant, floor, most extra time): what the
# project promises at the shape that each device is measured at by default.
SPEED_CLAIMS = {
    ("transformer", "cpu"): [("xtrain", "torch", 0.98), ("xtrain-p0", "torch-p0", 0.98)],
    ("transformer", "cuda"): [("xtrain", "torch", 1.01)],
    # whose own dropout is replaced, and whose logits are kept
    ("gpt2", "cuda"): [("xtrain", "torch", 1.00)],
    ("llama", "cuda"): [
        ("xtrain", "torch", 1.20),
        ("xtrain", "liger", 1.12),
        ("xtrain", "own", 0.98),
    ],
}
COST_CLAIMS = {
    ("transformer", "cpu"): [("xtrain", "xtrain-p0", 0.05)],
    ("transformer", "cuda"): [("xtrain", "xtrain-p0", 0.01), ("xtrain", "torch-p0", 0.01)],
}
CLAIMED_SHAPES = {"cpu": ("small", None), "cuda": ("124m", (32, 1024, 50304))}
CLAIMED_DROPOUT = 0.1
CLAIMED_LLAMA = "1b"
MAX_PASS_SHARE = 0.10  # of the own first step
MAX_LLAMA_PASS_SHARE = 0.05  # of torch.compile's first step
MAX_BLOCKS_SHARE = 0.5  # compile_blocks' first step / that of xtrain.compile on the whole model
MIN_LAYERS = 12  # of a Llama whose first steps are judged


class Results:
    """The outcomes of a run with the figures that follow from them."""

    def __init__(self, setting: Setting, outcomes: Mapping[str, Outcome]):
        self.setting = setting
        self.outcomes = outcomes
        self.variants = setting.kind.variants

    def label(self, name: str) -> str:
        return self.variants[name].label

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

    def losses(self, name: str) -> list[float]:
        """Return a variant's losses: of all steps where they are kept, else of the first ones."""
        if (outcome := self.outcomes.get(name)) is None:
            return []
        found = outcome.final if self.setting.kind.curves else outcome.first
        return found.get("losses", [])

    def last_loss(self, name: str) -> float | None:
        """Return the mean loss of the last steps."""
        losses = self.losses(name)[-LAST:]
        return fmean(losses) if losses else None

    def loss_difference(self, name: str, other: str = "", window: int = 1) -> float | None:
        """Return the largest difference of two variants' losses, meant over windows of steps.

        Args:     other: by default the variant's reference.
        """
        pair = self.losses(name), self.losses(other or self.variants[name].reference)
        if not all(pair):
            return None
        ours, theirs = (
            [fmean(losses[i : i + window]) for i in range(0, len(losses), window)]
            for losses in pair
        )
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=False))

    def equal_masks(self, name: str) -> tuple[int, int] | None:
        """Return (masks equal in forward and backward, masks looked at).

        Of xtrain: equal to the oracle of the seed contract. With F.dropout: equal to eager's, drawn
        from the same state of torch's generator.
        """
        if (outcome := self.outcomes.get(name)) is None:
            return None
        masks = outcome.masks
        wanted = masks.get("expected")
        if masks and self.variants[name].dropout == "F.dropout":
            eager = self.outcomes.get("eager")
            wanted = eager.masks.get("forward") if eager is not None else None
        if not wanted:
            return None
        triples = list(zip(masks["forward"], masks["backward"], wanted, strict=True))
        return sum(a == b == c for a, b, c in triples), len(triples)

    def first(self, name: str, key: str) -> float | None:
        """Return one figure of a variant's first steps."""
        return self.outcomes[name].first.get(key) if name in self.outcomes else None

    def pass_share(self, name: str = "xtrain", of: str = "xtrain") -> float | None:
        """Return our graph passes' time as a part of a variant's first step."""
        passes_ms, whole_s = self.first(name, "passes_ms"), self.first(of, "first_step_s")
        return passes_ms / 1e3 / whole_s if passes_ms and whole_s else None

    def blocks_share(self) -> float | None:
        """Return compile_blocks' first step as a part of xtrain.compile's."""
        part, whole = (self.first(name, "first_step_s") for name in ("blocks", "xtrain"))
        return part / whole if part and whole else None


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
    failed = {results.label(n): o.error for n, o in outcomes.items() if o.error is not None}
    values: dict[str, Any] = dict(
        setting=setting, plan=plan, environment=environment, results=results
    )
    values |= dict(failed=failed, noise=noise({n: results.summary(n) for n in plan.variants}))
    said = texts(Path(__file__).with_name("words.jinja"), **values)
    columns = COLUMNS | (LLAMA_COLUMNS if setting.model == "llama" else OWN_COLUMNS)
    return Report(
        title=said["title"][0],
        question=said["question"][0],
        result=said["result"] or ["Nothing was measured that could be compared."],
        setup={"configuration": str(setting), **environment},
        method=said["method"],
        headers=list(columns),
        rows=[[column(results, name) for column in columns.values()] for name in timed],
        reproduce=command,
        limits=said["limits"],
        checks=_checks(results),
        data={
            "setting": asdict(setting),
            "plan": asdict(plan),
            "variants": {name: _row_data(results, name) for name in outcomes},
        },
    )


# --- the table -----------------------------------------------------------------------------------


def _time_cell(results: Results, name: str) -> str:
    """The step time; of a variant that failed, before it was timed or after, why."""
    summary, error = results.summary(name), results.outcomes[name].error
    said = [str(summary)] if summary else []
    return "; ".join([*said, f"failed: {error}"] if error is not None else said) or NOT_AVAILABLE


def _memory_cell(results: Results, name: str) -> str:
    memory = results.outcomes[name].final.get("peak_memory_gib")
    return short(memory) if memory else NOT_AVAILABLE


def _loss_cell(results: Results, name: str) -> str:
    variant = results.variants[name]
    if variant.reference == name:
        return "reference"
    difference = results.loss_difference(name)
    if difference is None:
        return NOT_AVAILABLE
    # that of GPT2's embedding is no residual branch's: it stays torch's
    torch_draws = variant.dropout == "F.dropout" or results.setting.model == "gpt2"
    return f"{difference:.1e}" + (" (other masks)" if variant.dropout and torch_draws else "")


def _masks_cell(results: Results, name: str) -> str:
    variant: Variant = results.variants[name]
    if not variant.dropout or not results.setting.dropout:
        return "no dropout"
    if name == "eager":
        return "torch's generator"
    found = results.equal_masks(name)
    if found is None:
        return NOT_AVAILABLE
    wanted = "eager's" if variant.dropout == "F.dropout" else "the oracle's"
    return f"{found[0]} of {found[1]} equal {wanted}"


def _against(baseline: str) -> Callable[[Results, str], str]:
    return lambda results, name: cell(results.speed(name, baseline))


COLUMNS: dict[str, Callable[[Results, str], str]] = {
    "Variant": Results.label,
    "Step time p50 [p20, p80] (ms)": _time_cell,
    "Tokens/s": lambda results, name: cell(results.tokens_per_s(name), "{:,.0f}"),
    "Peak memory (GiB)": _memory_cell,
    "First step (s)": lambda results, name: cell(results.first(name, "first_step_s"), "{:.1f}"),
    "Recompiles": lambda results, name: cell(results.outcomes[name].final.get("num_recompiles")),
}
OWN_COLUMNS = {
    "vs eager": _against("eager"),
    "vs torch.compile": _against("torch"),
    "Max loss difference": _loss_cell,
    "Masks": _masks_cell,
}
LLAMA_COLUMNS = {
    "vs torch.compile": _against("torch"),
    "vs Liger": _against("liger"),
    f"Loss, last {LAST} steps": lambda results, name: cell(results.last_loss(name), "{:.3f}"),
}


def _row_data(results: Results, name: str) -> dict[str, Any]:
    """Return what the JSON holds of a variant; where all losses are kept, those."""
    outcome, summary = results.outcomes[name], results.summary(name)
    ratios = {f"speed_vs_{other}": results.speed(name, other) for other in results.outcomes}
    return {
        "label": results.label(name),
        "error": outcome.error,
        "step_time_ms": asdict(summary) if summary else None,
        "tokens_per_s": results.tokens_per_s(name),
        **outcome.first,
        **outcome.final,
        "max_loss_difference": results.loss_difference(name),
        "pass_share_of_first_step": results.pass_share(name, name),
        "masks": outcome.masks,
        "blocks_ms": outcome.blocks,
        **{key: asdict(ratio) if ratio else None for key, ratio in ratios.items()},
    }


# --- what was promised ---------------------------------------------------------------------------

Check = list[str]  # claim, wanted, measured, met or missed


def _check(claim: str, wanted: str, measured: str, met: bool) -> Check:
    return [claim, wanted, measured, "met" if met else "missed"]


def _at_most(claim: str, found: float | None, most: float, wanted: str, shown: str) -> list[Check]:
    """Hold a figure to its limit; nothing is said of one that was not measured."""
    if found is None:
        return []
    return [_check(claim, f"<= {wanted.format(most)}", shown.format(found), found <= most)]


def _checks(results: Results) -> list[Check]:
    """Return the verdicts on what the project promises."""
    speeds = _speed_checks(results) if _is_claimed(results.setting) else []
    own = _llama_checks if results.setting.model == "llama" else _own_checks
    return speeds + own(results)


def _is_claimed(setting: Setting) -> bool:
    """Whether this is a shape that speeds are promised of."""
    if setting.model == "llama":
        return setting.preset == CLAIMED_LLAMA
    preset, shape = CLAIMED_SHAPES[setting.device_type]
    return (
        setting.preset == preset
        and shape in (None, (setting.batch, setting.seq, setting.vocab))
        and (setting.dropout, setting.recompute) == (CLAIMED_DROPOUT, "none")
    )


def _speed_checks(results: Results) -> list[Check]:
    rows = []
    where = results.setting.model, results.setting.device_type
    for variant, baseline, least in SPEED_CLAIMS.get(where, ()):
        if (speed := results.speed(variant, baseline)) is not None:
            claim = f"speed of {results.label(variant)} / {results.label(baseline)}"
            rows.append(_check(claim, f">= {least:.2f}", str(speed), speed.median >= least))
    for variant, floor, most in COST_CLAIMS.get(where, ()):
        if (cost := results.ratio(variant, floor)) is not None:
            claim = f"time of {results.label(variant)} over {results.label(floor)}"
            met = cost.median - 1 <= most
            rows.append(_check(claim, f"<= {100 * most:.0f}%", cost.as_cost(), met))
    return rows


def _own_checks(results: Results) -> list[Check]:
    claim = "graph passes' share of the first step"
    rows = _at_most(claim, results.pass_share(), MAX_PASS_SHARE, "{:.0%}", "{:.1%}")
    for name in ("xtrain", "xtrain-eager"):
        if (found := results.equal_masks(name)) is not None:
            claim = f"masks of {results.label(name)} equal to the oracle's"
            rows.append(_check(claim, "all", f"{found[0]} of {found[1]}", found[0] == found[1]))
    return rows


def _llama_checks(results: Results) -> list[Check]:
    rows = []
    assert results.setting.shape is not None
    if results.setting.shape.num_hidden_layers >= MIN_LAYERS:
        claim = "graph passes' time / torch.compile's own first step"
        share = results.pass_share("xtrain", of="torch")
        rows += _at_most(claim, share, MAX_LLAMA_PASS_SHARE, "{:.0%}", "{:.1%}")
        claim = "first step of xtrain.compile_blocks / of xtrain.compile"
        rows += _at_most(claim, results.blocks_share(), MAX_BLOCKS_SHARE, "{:.2f}", "{:.2f}")
    ours, liger = (results.loss_difference(n, "torch", WINDOW) for n in ("xtrain-p0", "liger"))
    if liger:  # whose own rounding is the yardstick
        claim = f"largest difference of {WINDOW}-step mean losses to torch.compile, without dropout"
        rows += _at_most(claim, ours, 2 * liger, "2 x Liger's, {:.2g}", "{:.2g}")
    return rows


def draw_losses(path: Path, setting: Setting, outcomes: Mapping[str, Outcome]) -> None:
    """Write a PNG: the loss of every step, variant over variant."""
    styles = ("-", "--", "-", ":", "-.", "-", "--")
    with figure(path, 120, figsize=(9, 5)) as (_, panels):
        panel = panels[0][0]
        for style, (name, outcome) in zip(styles, outcomes.items(), strict=False):
            losses, label = outcome.final.get("losses", []), setting.kind.variants[name].label
            panel.plot(range(1, len(losses) + 1), losses, style, label=label, lw=1.3)
        panel.set_xlabel("step")
        panel.set_ylabel("training loss (nats a byte)")
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
        panel.set_title(f"Llama {setting.preset}, learning rate {setting.learning_rate:g}")
