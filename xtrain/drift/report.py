"""A comparison as tables for the terminal, and as plain values for --json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from xtrain.drift.comparison import Comparison, Divergence, Position, PromptResult
from xtrain.drift.margins import Margins, margins
from xtrain.drift.record_folder import Record
from xtrain.drift.values import Distance

MAX_ROWS = 12
MAX_TEXT = 60


def as_text(comparison: Comparison) -> str:
    """Return the whole report; the verdict comes last, where a terminal shows it."""
    parts = [
        _changes(comparison),
        _names(comparison),
        _observer(comparison),
        _prompts(comparison),
        _divergence(comparison),
        _growth(comparison),
        _unmatched(comparison),
        _tokens(comparison),
        _margins(comparison),
        f"verdict {comparison.exit_code}: {comparison.verdict}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the report as JSON holds it; infinities and NaN are text."""
    first = comparison.first_divergence
    return plain(
        {
            "exit_code": comparison.exit_code,
            "verdict": comparison.verdict,
            "a": str(comparison.a.path),
            "b": str(comparison.b.path),
            "environment_changes": [change._asdict() for change in comparison.changes],
            "observer_effect": {
                side: record.contents["observer_effect"]
                for side, record in (("a", comparison.a), ("b", comparison.b))
            },
            "first_divergence": _divergence_values(first) if first else None,
            "prompts": [_prompt_values(prompt) for prompt in comparison.prompts],
            "growth": [vars(layer) for layer in comparison.growth],
            "unmatched": [item._asdict() for item in comparison.unmatched],
            "renamed": comparison.renamed,
            "num_matched": comparison.num_matched,
            "num_positions": len(comparison.positions),
            "num_can_flip": sum(p.can_flip for p in comparison.positions),
            "num_flipped": sum(p.flipped for p in comparison.positions),
            "max_shift": comparison.max_shift,
            "tightest": _position_values(comparison, comparison.tightest),
            "smallest_margin": _position_values(comparison, comparison.smallest_margin),
            "positions": [vars(position) for position in comparison.positions],
            "margins": {
                side: _margin_values(margins(record))
                for side, record in (("a", comparison.a), ("b", comparison.b))
            },
        }
    )


def size_text(size: Distance) -> str:
    """Return "1.2e-07 (3 ulp)"; a lower bound says so; no figure where none is near."""
    if size.max_abs == 0 and not size.exact:
        return "not to be seen in the samples; record with --tensors"
    ulps = f" ({size.max_ulps:.3g} ulp)" if size.max_ulps else ""
    return f"{'' if size.exact else 'at least '}{size.max_abs:.3g}{ulps}"


def context(record: Record, position: Position) -> str:
    """Return the text that leads to a place, or its last tokens where no text is known."""
    case = record.cases[position.prompt]
    tokens = [step.tokens[-1] for step in case.steps[: position.step]]
    if case.prompt["tokens"] is None:
        return "its input"
    if record.run["decode"] is None:
        return f"tokens {case.prompt['tokens'][: position.position + 1][-8:]}"
    text, generated = case.prompt["text"], case.text
    if text is None or generated is None:
        return f"tokens {(case.prompt['tokens'] + tokens)[-8:]}"
    end = case.steps[position.step].info.get("text_end")
    if end is None:  # a record from before: as much of the text as of the tokens, exact for bytes
        end = round(len(generated) * position.step / max(len(case.steps), 1))
    return repr((text + generated[:end])[-MAX_TEXT:])


def _changes(comparison: Comparison) -> str:
    if not comparison.changes:
        return "environment: the same"
    rows = [(c.name, _short(c.a), _short(c.b)) for c in comparison.changes]
    table = tabulate(rows, ("setting", "A", "B"), disable_numparse=True)
    text = f"what differs in environment and run\n{table}"
    names = {change.name for change in comparison.changes}
    if names >= {"run.mode", "run.pad_to"}:  # compiled modes pad by themselves
        text += "\nthe padding differs beside the mode; --pad-to auto records both alike"
    return text


def _names(comparison: Comparison) -> str:
    renamed = comparison.renamed
    if not renamed:
        return ""
    return f"{len(renamed)} weights have other names: {renamed[0][0]} of B is {renamed[0][1]} of A"


def _observer(comparison: Comparison) -> str:
    lines = []
    for side, record in (("A", comparison.a), ("B", comparison.b)):
        effect = record.contents["observer_effect"]
        if effect and effect["differs"]:
            lines.append(
                f"observer effect in {side}: watched, the logits move by {effect['max_abs']:.3g}"
                + _whose_logits(record)
            )
    return "\n".join(lines)


def _whose_logits(record: Record) -> str:
    if record.run["mode"] in ("aot_eager", "inductor"):
        return "; those of the unwatched run are recorded"
    return " (the model computes otherwise where modules have hooks); try --mode aot_eager"


def _prompts(comparison: Comparison) -> str:
    rows = []
    order = sorted(
        comparison.prompts, key=lambda p: (p.tokens_equal, p.logits_equal, p.ops_equal, p.prompt)
    )
    for p in order:  # what differs is within the rows that are shown
        where = "-"
        if p.first_divergence:
            where = f"step {p.first_divergence.step}, {p.first_divergence}"
        rows.append((p.prompt, p.num_steps, *p.words, where))
    headers = ("prompt", "steps", "ops", "logits", "tokens", "differs from")
    return _table(rows, headers) if rows else ""


def _divergence(comparison: Comparison) -> str:
    first = comparison.first_divergence
    if first is None:
        return "no difference in any op that both have" if comparison.prompts else ""
    dtypes = first.dtypes[0] if len(set(first.dtypes)) == 1 else " against ".join(first.dtypes)
    lines = [
        f"first difference: {first.op} in {first.module_path or 'the model itself'}",
        f"  prompt {first.prompt}, step {first.step}, result {list(first.shape)} {dtypes}",
        f"  size {size_text(first.distance)}",
    ]
    if first.cause:
        lines.append(f"  {first.cause}")
    if len(set(first.dtypes)) > 1:
        lines.append("  the dtypes differ: compared as numbers, in the wider one")
    return "\n".join(lines)


def _growth(comparison: Comparison) -> str:
    rows = [
        (g.path, g.max_abs, g.max_ulps, g.max_relative, f"{g.num_different}/{g.num_compared}")
        for g in comparison.growth
        if g.num_compared
    ]
    if not any(row[1] for row in rows):
        return ""
    headers = ("block output", "max difference", "ulp", "relative to rms", "places that differ")
    return "growth by layer\n" + tabulate(rows, headers, floatfmt=".3g")


def _unmatched(comparison: Comparison) -> str:
    if not comparison.unmatched:
        return ""
    counts: dict[tuple[str, str], int] = {}
    for item in comparison.unmatched:
        key = item.record, item.op
        counts[key] = counts.get(key, 0) + item.times
    where = {
        "a": "A alone",
        "b": "B alone",
        "both": "both, other shape, or integers or rows of a whole batch",
    }
    rows = [(where[side], op, count) for (side, op), count in counts.items()]
    rows.sort(key=lambda row: -row[2])
    title = f"ops without partner, not compared ({comparison.num_matched} results were)"
    return title + "\n" + _table(rows, ("in", "op", "times"))


def _tokens(comparison: Comparison) -> str:
    positions = comparison.positions
    if not positions:
        return ""
    flips = [p for p in positions if p.can_flip]
    lines = [
        f"{len(positions)} places: the largest shift of a pair is {comparison.max_shift:.3g}, "
        f"{len(flips)} can flip, {sum(p.flipped for p in positions)} did",
    ]
    places = [("smallest margin", comparison.smallest_margin)]
    if comparison.max_shift > 0:
        places.append(("tightest against its shift", comparison.tightest))
    for name, place in places:
        if place is None:
            continue
        lines.append(
            f"{name}: {place.margin:.3g} (shift {place.shift:.3g}) at prompt {place.prompt}, "
            f"step {place.step}, position {place.position}, tokens {place.token_a} over "
            f"{place.runner_up}, after {context(comparison.a, place)}"
        )
    return "\n".join(lines)


def _margins(comparison: Comparison) -> str:
    rows = []
    for side, record in (("A", comparison.a), ("B", comparison.b)):
        found = margins(record)
        if found is None or len(found.by_step) < 2:
            return ""
        loops = f"{len(found.loops)} of {found.num_prompts} prompts"
        starts = sorted(loop.start for loop in found.loops)
        if starts:
            loops += f", from step {starts[len(starts) // 2]} (median)"
        rows.append((side, found.first, found.last, loops))
        ends = found.ends
    headers = ("", f"median margin, first {ends} steps", f"last {ends} steps", "end in a loop")
    return tabulate(rows, headers, floatfmt=".3g")


def _prompt_values(result: PromptResult) -> dict[str, Any]:
    first = result.first_divergence
    return {**vars(result), "first_divergence": _divergence_values(first) if first else None}


def _divergence_values(divergence: Divergence) -> dict[str, Any]:
    return {**vars(divergence), "distance": vars(divergence.distance)}


def _position_values(comparison: Comparison, position: Position | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {**vars(position), "context": context(comparison.a, position)}


def _margin_values(found: Margins | None) -> dict[str, Any] | None:
    return None if found is None else {**vars(found), "loops": [vars(x) for x in found.loops]}


def plain(value: Any) -> Any:
    """Return values as JSON holds them: lists, and text for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    shown = list(rows[:MAX_ROWS])
    text = tabulate(shown, headers, disable_numparse=True)
    return text + (f"\n({len(rows) - MAX_ROWS} more rows)" if len(rows) > MAX_ROWS else "")


def _short(value: Any) -> str:
    text = "-" if value is None else " ".join(map(str, value)) if isinstance(value, list) else value
    text = str(text)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
