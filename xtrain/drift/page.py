"""A comparison as one self-contained HTML page: tables, and plots as inline SVG; no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from xtrain.drift.comparison import Comparison, Position
from xtrain.drift.margins import margins
from xtrain.drift.report import context, size_text
from xtrain.drift.svg import line_plot, scatter_plot

MAX_POINTS = 4000  # of the scatter plot: those nearest to a flip
COLOURS = ("#1a7f37", "#0969da", "#bf8700", "#cf222e", "#6e7781")  # by exit code

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #ffffff;
  --s0: #0969da; --s1: #bc4c00; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --line: #3d444d;
  --back: #0d1117; --s0: #4493f8; --s1: #f0883e; --bad: #f85149; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink);
  background: var(--back); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { border-left: .5rem solid; padding: .5rem 1rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-size: .92em; overflow-wrap: anywhere; }
td:first-child code { white-space: nowrap; }
td + td > code { display: inline-block; min-width: 16rem; }
.value { min-width: 18rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; min-width: 32rem; max-width: 44rem; display: block; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
.tick, .label { text-anchor: middle; } .end, .key { text-anchor: end; }
svg .key { font-weight: 600; } svg .key.s0 { fill: var(--s0); } svg .key.s1 { fill: var(--s1); }
.grid { stroke: var(--line); stroke-width: 1; }
.line { fill: none; stroke: var(--s0); stroke-width: 2; }
.line.s1 { stroke: var(--s1); stroke-dasharray: 8 6; }
.dot { fill: var(--s0); } .dot.s1 { fill: var(--s1); } .dot.flips { fill: var(--bad); }
.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 4; }
"""


def page(comparison: Comparison) -> str:
    """Return the page; it loads nothing from anywhere."""
    names = escape(f"{comparison.a.path.name} and {comparison.b.path.name}")
    colour = COLOURS[comparison.exit_code]
    body = [
        f"<h1>Drift between {names}</h1>",
        f'<p class="verdict" style="border-color: {colour}">Exit code {comparison.exit_code}: '
        f"{escape(comparison.verdict)}</p>",
        *_first(comparison),
        *_growth(comparison),
        *_positions(comparison),
        *_margins(comparison),
        *_prompts(comparison),
        *_unmatched(comparison),
        *_environment(comparison),
    ]
    return _document(names, body)


def training_page(text: str, exit_code: int) -> str:
    """Return the page of two training runs: their report as it is."""
    colour = COLOURS[exit_code]
    body = [
        "<h1>Drift between two training runs</h1>",
        f'<p class="verdict" style="border-color: {colour}">Exit code {exit_code}</p>',
        f'<pre class="scroll">{escape(text)}</pre>',
    ]
    return _document("two training runs", body)


def _document(names: str, body: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Drift: {names}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _first(comparison: Comparison) -> list[str]:
    first = comparison.first_divergence
    parts = []
    if first is not None:
        where = escape(first.module_path or "the model itself")
        parts.append(
            f"<p>The first difference is in <code>{escape(first.op)}</code> of "
            f"<code>{where}</code>, at prompt {first.prompt}, step {first.step}: "
            f"{escape(size_text(first.distance))}"
            f"{f'; {escape(first.cause)}' if first.cause else ''}.</p>"
        )
    elif comparison.prompts:
        parts.append("<p>No op that both have differs.</p>")
    for side, record in (("A", comparison.a), ("B", comparison.b)):
        effect = record.contents["observer_effect"]
        if effect and effect["differs"]:
            parts.append(
                f"<p>Observer effect in {side}: watched, the logits move by "
                f"{effect['max_abs']:.3g}.</p>"
            )
    return parts


def _growth(comparison: Comparison) -> list[str]:
    layers = [layer for layer in comparison.growth if layer.num_compared]
    if not any(layer.max_abs for layer in layers):
        return []
    plot = line_plot(
        "Largest difference of each block's output",
        [("largest difference", [layer.max_abs for layer in layers])],
        x_label="block",
        y_label="largest difference",
        x_names=[layer.path for layer in layers],
    )
    rows = [
        (
            f"<code>{escape(layer.path)}</code>",
            f"{layer.max_abs:.3g}",
            f"{layer.max_ulps:.3g}",
            f"{layer.max_relative:.3g}",
            f"{layer.num_different}/{layer.num_compared}",
        )
        for layer in layers
    ]
    headers = ("block output", "max difference", "ulp", "relative to rms", "places that differ")
    return ["<h2>Growth by layer</h2>", _scroll(plot), _table(headers, rows, numbers=(1, 2, 3, 4))]


def _positions(comparison: Comparison) -> list[str]:
    positions = comparison.positions
    if not positions:
        return []
    flips = sum(position.can_flip for position in positions)
    parts = [
        "<h2>Margins against shifts</h2>",
        f"<p>{len(positions)} places; the largest shift of a pair is {comparison.max_shift:.3g}; "
        f"{flips} can flip, {sum(position.flipped for position in positions)} did. A place left of "
        "and above the dashed line keeps its token whichever pair moved.</p>",
    ]
    if comparison.max_shift > 0:
        parts.append(_scroll(_scatter(positions)))
    rows = []
    for name, place in (
        ("smallest margin", comparison.smallest_margin),
        ("nearest to a flip", comparison.tightest),
    ):
        if place is not None:
            rows.append(
                (
                    name,
                    f"{place.margin:.3g}",
                    f"{place.shift:.3g}",
                    f"prompt {place.prompt}, step {place.step}, position {place.position}",
                    f"{place.token_a} over {place.runner_up}",
                    f"<code>{escape(context(comparison.a, place))}</code>",
                )
            )
    headers = ("", "margin", "shift", "where", "tokens", "after")
    return [*parts, _table(headers, rows, numbers=(1, 2))]


def _scatter(positions: Sequence[Position]) -> str:
    nearest = sorted(positions, key=lambda p: p.margin - p.shift)[:MAX_POINTS]
    points = [
        (
            place.shift,
            place.margin,
            "flips" if place.can_flip else "s0",
            f"prompt {place.prompt}, step {place.step}, position {place.position}: margin "
            f"{place.margin:.3g}, shift {place.shift:.3g}",
        )
        for place in nearest
    ]
    title = "Margin of the chosen token against the largest shift of a pair, by place"
    return scatter_plot(title, points, x_label="shift", y_label="margin", zero="0: at the edge")


def _margins(comparison: Comparison) -> list[str]:
    found = [(side, margins(r)) for side, r in (("A", comparison.a), ("B", comparison.b))]
    series = [(side, item.by_step) for side, item in found if item is not None]
    if len(series) < 2 or len(series[0][1]) < 2:
        return []
    plot = line_plot(
        "Median margin by step", series, x_label="step", y_label="median margin over the prompts"
    )
    rows = [
        (side, f"{m.first:.3g}", f"{m.last:.3g}", f"{len(m.loops)} of {m.num_prompts}")
        for side, m in found
        if m is not None
    ]
    ends = next(m.ends for _, m in found if m is not None)
    headers = ("", f"first {ends} steps", f"last {ends} steps", "prompts that end in a loop")
    return ["<h2>Margins by step</h2>", _scroll(plot), _table(headers, rows, numbers=(1, 2))]


def _prompts(comparison: Comparison) -> list[str]:
    rows = []
    for result in comparison.prompts:
        first = result.first_divergence
        where = "" if first is None else f"step {first.step}, <code>{escape(str(first))}</code>"
        rows.append((str(result.prompt), str(result.num_steps), *result.words, where))
    headers = ("prompt", "steps", "ops", "logits", "tokens", "differs from")
    return ["<h2>Prompts</h2>", _table(headers, rows, numbers=(0, 1))] if rows else []


def _unmatched(comparison: Comparison) -> list[str]:
    if not comparison.unmatched:
        return []
    side = {
        "a": "A alone",
        "b": "B alone",
        "both": "both, other shape, or integers or rows of a whole batch",
    }
    rows = [
        (side[u.record], f"<code>{escape(u.path or 'model')}</code>", escape(u.op), str(u.times))
        for u in comparison.unmatched
    ]
    summary = f"<summary>{len(rows)} without a partner, not compared</summary>"
    table = _table(("in", "module", "op", "times"), rows, numbers=(3,))
    return [f"<h2>Ops of one side</h2><details>{summary}{table}</details>"]


def _environment(comparison: Comparison) -> list[str]:
    changed = [
        (f"<code>{escape(c.name)}</code>", _cell(c.a), _cell(c.b)) for c in comparison.changes
    ]
    parts = ["<h2>Environment</h2>"]
    parts.append(_table(("differs", "A", "B"), changed) if changed else "<p>The same in both.</p>")
    names = {change.name for change in comparison.changes}
    same = [
        (f"<code>{escape(name)}</code>", _cell(value))
        for name, value in comparison.a.environment.items()
        if name not in names
    ]
    table = _table(("the same in both", ""), same)
    return [*parts, f"<details><summary>{len(same)} equal settings</summary>{table}</details>"]


def _cell(value: Any) -> str:
    return f'<div class="value">{_value(value)}</div>'


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return escape(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def _scroll(plot: str) -> str:
    """Return what a narrow window moves sideways instead of shrinking it beyond reading."""
    return f'<div class="scroll">{plot}</div>'


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    head = "".join(f"<th>{header}</th>" for header in headers)
    lines = [f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>']
    for row in rows:
        cells = "".join(
            f'<td class="number">{cell}</td>' if i in numbers else f"<td>{cell}</td>"
            for i, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])
