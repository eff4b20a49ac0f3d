"""A comparison as tables for the terminal, as plain values for --json, as one page for --html."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from xtrain.command_line import show
from xtrain.drift.comparison.differences import Distance
from xtrain.drift.comparison.flip import Margins, margins
from xtrain.drift.comparison.two_records import Comparison, Divergence, Position, PromptResult
from xtrain.drift.comparison.two_runs import TrainingComparison
from xtrain.drift.recording.record_format import Record
from xtrain.drift.settings import DriftError
from xtrain.report import BAD, FIRST, line_plot, render, scatter_plot

MAX_ROWS = 12
MAX_TEXT = 60
MAX_POINTS = 4000  # of the scatter plot: those nearest to a flip
VERDICT_COLOURS = ("#1a7f37", "#0969da", "#bf8700", "#cf222e", "#6e7781")  # by exit code
PROMPTS = ("prompt", "steps", "ops", "logits", "tokens", "differs from")
GROWTH = ("block output", "max difference", "ulp", "relative to rms", "places that differ")
WHERE = {
    "a": "A alone",
    "b": "B alone",
    "both": "both, other shape, or integers or rows of a whole batch",
}


def as_text(comparison: Comparison | TrainingComparison) -> str:
    """Return the whole report; the verdict comes last, where a terminal shows it."""
    if isinstance(comparison, TrainingComparison):
        parts = [
            _only_one_has(comparison),
            _settings(comparison),
            _losses(comparison),
            _training_divergence(comparison),
        ]
    else:
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
        ]
    parts.append(f"verdict {comparison.exit_code}: {comparison.verdict}")
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(comparison: Comparison | TrainingComparison) -> dict[str, Any]:
    """Return the report as JSON holds it; infinities and NaN are text."""
    if isinstance(comparison, TrainingComparison):
        return {**plain(comparison), "exit_code": comparison.exit_code}
    sides = {"a": comparison.a, "b": comparison.b}
    places = {
        name: place and {**plain(place), "context": context(comparison.a, place)}
        for name, place in (
            ("tightest", comparison.tightest),
            ("smallest_margin", comparison.smallest_margin),
        )
    }
    return plain(
        {
            "exit_code": comparison.exit_code,
            "verdict": comparison.verdict,
            "a": str(comparison.a.path),
            "b": str(comparison.b.path),
            "environment_changes": comparison.changes,
            "observer_effect": {n: r.contents["observer_effect"] for n, r in sides.items()},
            "first_divergence": comparison.first_divergence,
            "prompts": comparison.prompts,
            "growth": comparison.growth,
            "unmatched": comparison.unmatched,
            "renamed": comparison.renamed,
            "num_matched": comparison.num_matched,
            "num_positions": len(comparison.positions),
            "num_can_flip": sum(p.can_flip for p in comparison.positions),
            "num_flipped": sum(p.flipped for p in comparison.positions),
            "max_shift": comparison.max_shift,
            **places,
            "positions": comparison.positions,
            "margins": {name: margins(record) for name, record in sides.items()},
        }
    )


def plain(value: Any) -> Any:
    """Return values as JSON holds them: records as objects, text for what is not finite."""
    if is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


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
    return "\n".join(
        f"observer effect in {side}: watched, the logits move by {effect['max_abs']:.3g}"
        + _whose_logits(record)
        for side, record, effect in _effects(comparison)
    )


def _effects(comparison: Comparison) -> list[tuple[str, Record, dict[str, Any]]]:
    """Return (side, record, effect) of what watching the model has changed."""
    sides = (("A", comparison.a), ("B", comparison.b))
    found = [(side, record, record.contents["observer_effect"]) for side, record in sides]
    return [item for item in found if item[2] and item[2]["differs"]]


def _whose_logits(record: Record) -> str:
    if record.run["mode"] in ("aot_eager", "inductor"):
        return "; those of the unwatched run are recorded"
    return " (the model computes otherwise where modules have hooks); try --mode aot_eager"


def _prompts(comparison: Comparison) -> str:
    order = sorted(
        comparison.prompts, key=lambda p: (p.tokens_equal, p.logits_equal, p.ops_equal, p.prompt)
    )  # what differs is within the rows that are shown
    return _table(_prompt_rows(order), PROMPTS) if order else ""


def _prompt_rows(results: Iterable[PromptResult]) -> list[tuple[Any, ...]]:
    return [(p.prompt, p.num_steps, *p.words, _place(p.first_divergence)) for p in results]


def _place(first: Divergence | None) -> str:
    return "-" if first is None else f"step {first.step}, {first}"


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
    rows = _growth_rows(comparison)
    return "growth by layer\n" + tabulate(rows, GROWTH, floatfmt=".3g") if rows else ""


def _growth_rows(comparison: Comparison) -> list[tuple[Any, ...]]:
    """Return a row per block; none where no block differs."""
    rows = [
        (g.path, g.max_abs, g.max_ulps, g.max_relative, f"{g.num_different}/{g.num_compared}")
        for g in comparison.growth
        if g.num_compared
    ]
    return rows if any(row[1] for row in rows) else []


def _unmatched(comparison: Comparison) -> str:
    if not comparison.unmatched:
        return ""
    counts: Counter[tuple[str, str]] = Counter()
    for item in comparison.unmatched:
        counts[item.record, item.op] += item.times
    rows = [(WHERE[side], op, count) for (side, op), count in counts.items()]
    rows.sort(key=lambda row: -row[2])
    title = f"ops without partner, not compared ({comparison.num_matched} results were)"
    return title + "\n" + _table(rows, ("in", "op", "times"))


def _tokens(comparison: Comparison) -> str:
    if not comparison.positions:
        return ""
    lines = [_counts(comparison)]
    places = {"smallest margin": comparison.smallest_margin}
    if comparison.max_shift > 0:
        places["tightest against its shift"] = comparison.tightest
    for name, place in places.items():
        if place is not None:
            lines.append(
                f"{name}: {place.margin:.3g} (shift {place.shift:.3g}) at {place}, tokens "
                f"{_tokens_of(place)}, after {context(comparison.a, place)}"
            )
    return "\n".join(lines)


def _counts(comparison: Comparison) -> str:
    positions = comparison.positions
    return (
        f"{len(positions)} places: the largest shift of a pair is {comparison.max_shift:.3g}, "
        f"{sum(p.can_flip for p in positions)} can flip, {sum(p.flipped for p in positions)} did"
    )


def _margins(comparison: Comparison) -> str:
    found = _of_both(comparison)
    if found is None:
        return ""
    ends = found[-1][1].ends
    headers = ("", f"median margin, first {ends} steps", f"last {ends} steps", "end in a loop")
    return tabulate(_margin_rows(found), headers, floatfmt=".3g")


def _of_both(comparison: Comparison) -> list[tuple[str, Margins]] | None:
    """Return the margins of A and B, None where one of them has not two steps."""
    found = [(side, margins(r)) for side, r in (("A", comparison.a), ("B", comparison.b))]
    kept = [(side, item) for side, item in found if item is not None and len(item.by_step) > 1]
    return kept if len(kept) == 2 else None


def _margin_rows(found: Sequence[tuple[str, Margins]]) -> list[tuple[Any, ...]]:
    rows = []
    for side, item in found:
        loops = f"{len(item.loops)} of {item.num_prompts} prompts"
        if starts := sorted(loop.start for loop in item.loops):
            loops += f", from step {starts[len(starts) // 2]} (median)"
        rows.append((side, item.first, item.last, loops))
    return rows


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    shown = list(rows[:MAX_ROWS])
    text = tabulate(shown, headers, disable_numparse=True)
    return text + (f"\n({len(rows) - MAX_ROWS} more rows)" if len(rows) > MAX_ROWS else "")


def _short(value: Any) -> str:
    text = _words(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _words(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- of two training runs ------------------------------------------------------------------------


def _settings(comparison: TrainingComparison) -> str:
    rows = [(name, str(a)[:60], str(b)[:60]) for name, a, b in comparison.changes]
    return tabulate(rows, ("setting", "A", "B"), disable_numparse=True) if rows else ""


def _losses(comparison: TrainingComparison) -> str:
    shown = comparison.losses[-8:]
    headers = ("rank", "step", "loss of A", "loss of B")
    return tabulate(shown, headers, floatfmt=".9g") if shown else ""


def _training_divergence(comparison: TrainingComparison) -> str:
    first = comparison.first_divergence
    if first is None:
        return ""
    before = "no recorded step before it"
    if first.last_equal is not None:
        before = f"step {first.last_equal} was equal in everything"
    size = f", size at least {first.size:.3g}" if first.size else ""
    cause = f"\n  {first.cause}" if first.cause else ""
    where = f"step {first.step}, rank {first.rank}"
    return f"first difference: {where}: {first}{size}\n  {before}{cause}"


def _only_one_has(comparison: TrainingComparison) -> str:
    """Return what was not compared, steps and results."""
    lines = [
        f"recorded by {name} alone: steps {', '.join(map(str, steps[:8]))}"
        + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
        for name, steps in zip("AB", comparison.alone, strict=True)
        if steps
    ]
    if comparison.micro_batches:
        lines.append(
            f"the micro-batches differ ({comparison.micro_batches}): their inputs and ops are of "
            "other samples and not compared; weights, optimiser, loss and gradients are"
        )
    if comparison.num_unmatched:
        lines.append(f"without a partner, not compared: {comparison.num_unmatched} results")
        rows = list(comparison.unmatched.items())
        lines += [f"  {name}{f', {times} times' if times > 1 else ''}" for name, times in rows[:8]]
        lines += [f"  and {len(rows) - 8} more"] if len(rows) > 8 else []
    return "\n".join(lines)


# --- the page ------------------------------------------------------------------------------------


def page(comparison: Comparison | TrainingComparison) -> str:
    """Return the page; it loads nothing from anywhere."""
    names, values = "two training runs", {"text": as_text(comparison), "verdict": ""}
    if isinstance(comparison, Comparison):
        names = f"{comparison.a.path.name} and {comparison.b.path.name}"
        values = _page_values(comparison)
    return render(
        Path(__file__).with_name("drift_page.html"),
        names=names,
        title=f"Drift: {names}",
        colour=VERDICT_COLOURS[comparison.exit_code],
        exit_code=comparison.exit_code,
        **values,
    )


def _page_values(comparison: Comparison) -> dict[str, Any]:
    layers, found = _growth_rows(comparison), _of_both(comparison)
    first, changed = comparison.first_divergence, {change.name for change in comparison.changes}
    places = {
        "smallest margin": comparison.smallest_margin,
        "nearest to a flip": comparison.tightest,
    }
    return {
        "text": "",
        "verdict": comparison.verdict,
        "first": first,
        "size": first and size_text(first.distance),
        "effects": [(side, f"{e['max_abs']:.3g}") for side, _, e in _effects(comparison)],
        "growth_headers": GROWTH,
        "growth": layers,
        "growth_plot": layers
        and line_plot(
            "Largest difference of each block's output",
            {"largest difference": [row[1] for row in layers]},
            x_label="block",
            y_label="largest difference",
            x_names=[row[0] for row in layers],
        ),
        "counts": comparison.positions and _counts(comparison),
        "scatter": comparison.max_shift > 0 and _scatter(comparison.positions),
        "places": [
            (name, p.margin, p.shift, p, _tokens_of(p), context(comparison.a, p))
            for name, p in places.items()
            if p is not None
        ],
        "margins": _margin_rows(found or ()),
        "ends": found and found[-1][1].ends,
        "margins_plot": found
        and line_plot(
            "Median margin by step",
            {side: item.by_step for side, item in found},
            x_label="step",
            y_label="median margin over the prompts",
        ),
        "prompt_headers": PROMPTS,
        "prompts": _prompt_rows(comparison.prompts),
        "unmatched": [
            (WHERE[u.record], u.path or "model", u.op, u.times) for u in comparison.unmatched
        ],
        "changes": [(c.name, _words(c.a), _words(c.b)) for c in comparison.changes],
        "same": [
            (name, _words(value))
            for name, value in comparison.a.environment.items()
            if name not in changed
        ],
    }


def _tokens_of(place: Position) -> str:
    return f"{place.token_a} over {place.runner_up}"


def _scatter(positions: Sequence[Position]) -> Any:
    points: dict[str, list[tuple[float, float, str]]] = {FIRST: [], BAD: []}
    for place in sorted(positions, key=lambda p: p.margin - p.shift)[:MAX_POINTS]:
        tip = f"{place}: margin {place.margin:.3g}, shift {place.shift:.3g}"
        points[BAD if place.can_flip else FIRST].append((place.shift, place.margin, tip))
    title = "Margin of the chosen token against the largest shift of a pair, by place"
    return scatter_plot(title, points, x_label="shift", y_label="margin", zero="0: at the edge")


# --- where results go ----------------------------------------------------------------------------


def deliver(path: str | None, values: Callable[[], Any], text: Callable[[], str]) -> None:
    """Show a report as text; with a path of --json write its values there, "-": instead.

    Raises: DriftError where that is impossible.
    """
    if path:
        written = json.dumps(values(), indent=1, allow_nan=False) + "\n"
        if path == "-":
            show(written)
            return
        write_text(path, written)
    show(text())


def write_text(path: str, text: str) -> None:
    """Write a report. Raises: DriftError where that is impossible."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DriftError(f"cannot write {path}: {error.strerror}") from None
