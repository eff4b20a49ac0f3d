"""Two kinds of plot as inline SVG: lines over a number, points on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 86, 16, 14, 46


@dataclass(frozen=True)
class Axis:
    """From values to pixels, linear or logarithmic; values that a logarithm lacks go to its end."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; NaN, the largest of all, goes to the end."""
        value = math.inf if math.isnan(value) else value
        low, high = self.low, self.high
        if self.log:
            value = math.log10(max(value, 10.0**low))
        share = (value - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (pixel, label) of up to about eight ticks."""
        if self.log:
            step = max(1, round((self.high - self.low) / 7))
            powers = range(int(self.low), int(self.high) + 1, step)
            return [(self(10.0**power), f"1e{power}") for power in powers]
        raw = (self.high - self.low) / 7
        base = 10.0 ** math.floor(math.log10(raw))
        width = max(1.0, next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw))
        first = math.ceil(self.low / width)
        count = int((self.high - first * width) / width + 1e-9) + 1
        return [(self((first + i) * width), f"{(first + i) * width:g}") for i in range(count)]


def linear_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis over all values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Axis(low, high if high > low else low + 1, start, end, log=False)


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis over the powers of ten around all finite values above 0."""
    kept = [value for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min(kept))) if kept else -1
    high = math.ceil(math.log10(max(kept))) if kept else 0
    return Axis(low, max(high, low + 1), start, end, log=True)


def line_plot(
    title: str,
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    x_names: Sequence[str] = (),
) -> str:
    """Return a plot of several lines over 0, 1, 2, ..., the y axis logarithmic."""
    count = max(len(values) for _, values in series)
    x_axis = linear_axis([0, max(count - 1, 1)], LEFT, WIDTH - RIGHT)
    y_axis = log_axis([v for _, values in series for v in values], HEIGHT - BOTTOM, TOP)
    parts = []
    for number, (name, values) in enumerate(series):
        points = [(x_axis(i), y_axis(value)) for i, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{number}" points="{path}"/>')
        for i, (x, y) in enumerate(points):
            label = x_names[i] if x_names else f"{x_label} {i}"
            tip = escape(f"{name} {label}: {values[i]:.3g}".strip())
            parts.append(
                f'<circle class="dot s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{tip}</title></circle>"
            )
        if len(series) > 1:
            y = TOP + 14 + 18 * number
            parts.append(
                f'<text class="key s{number}" x="{WIDTH - RIGHT - 8}" y="{y}">{name}</text>'
            )
    return _frame(title, x_axis, y_axis, x_label, y_label, parts)


def scatter_plot(
    title: str,
    points: Sequence[tuple[float, float, str, str]],
    *,
    x_label: str,
    y_label: str,
    zero: str,
) -> str:
    """Return points (x, y, css class, tip) on two logarithmic axes with the line y = x.

    zero: what a point at the lower end says instead of its number.
    """
    x_axis = log_axis([x for x, *_ in points], LEFT, WIDTH - RIGHT)
    # down to the shifts as well, so that the line is in the picture
    y_axis = log_axis([value for point in points for value in point[:2]], HEIGHT - BOTTOM, TOP)
    ends = [10.0**power for power in (x_axis.low, x_axis.high)]
    (x1, y1), (x2, y2) = ((x_axis(value), y_axis(value)) for value in ends)
    parts = [f'<line class="limit" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>']
    for x, y, kind, tip in points:
        note = f" ({zero})" if x == 0 or y == 0 else ""
        parts.append(
            f'<circle class="dot {kind}" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="3">'
            f"<title>{escape(tip + note)}</title></circle>"
        )
    return _frame(title, x_axis, y_axis, x_label, y_label, parts)


def _frame(
    title: str, x_axis: Axis, y_axis: Axis, x_label: str, y_label: str, parts: Sequence[str]
) -> str:
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    bottom = HEIGHT - BOTTOM
    for x, label in x_axis.ticks():
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        lines.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{label}</text>')
    for y, label in y_axis.ticks():
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
    y_middle = (TOP + bottom) / 2
    lines.append(
        f'<text class="label" transform="translate(16 {y_middle}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    return "\n".join([*lines, *parts, "</svg>"])
