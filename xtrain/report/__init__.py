"""Reports as one self-contained HTML page: a template of jinja2, plots of matplotlib; no script.

    page.html extends "base.html", which has the style; "macros.html" has `table` and `figure`
    render(Path(__file__).with_name("page.html"), plot=line_plot(...), rows=rows)

A page loads nothing from anywhere. Colours are those of the page's style, light and dark.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# what a plot is drawn with -> the variable of base.html
COLOURS = {
    "#0969da": "var(--s0)",
    "#bc4c00": "var(--s1)",
    "#cf222e": "var(--bad)",
    "#59636e": "var(--dim)",
    "#d1d9e0": "var(--line)",
}
FIRST, SECOND, BAD, DIM, LINE = COLOURS
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "xtrain",  # ids: the same page every time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": DIM,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": DIM,
    "ytick.labelcolor": DIM,
    "grid.color": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
}


def template(path: Path, *, escape: bool = True) -> Template:
    """Return a template, which may extend those beside this file; escape: of HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["g"] = "{:.3g}".format  # a number in three digits
    return environment.get_template(path.name)


def render(page: Path, **values: Any) -> str:
    """Return what a template makes of values, which are escaped."""
    return template(page).render(values)


def line_plot(
    title: str,
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    x_names: Sequence[str] = (),
) -> Any:
    """Return a plot of one line or two over 0, 1, 2, ..., the y axis logarithmic."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(x_label, y_label)
    low, high = _decades([value for values in series.values() for value in values])
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tips = {}
    for number, (name, values) in enumerate(series.items()):
        shown = [_within(value, low, high) for value in values]
        colour, dashes = ((FIRST, "-"), (SECOND, (0, (4, 3))))[number]
        (line,) = axes.plot(shown, linestyle=dashes, color=colour, label=name)
        line.set(marker="o", markersize=4)
        line.set_clip_on(False)
        line.set_gid(f"series{number}")
        where = x_names or [f"{x_label} {i}" for i in range(len(values))]
        tips[f"series{number}"] = [
            f"{name} {place}: {value:.3g}" for place, value in zip(where, values, strict=True)
        ]
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor="linecolor")
    return _svg(figure, title, tips)


def scatter_plot(
    title: str,
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    x_label: str,
    y_label: str,
    zero: str,
) -> Any:
    """Return points {colour: (x, y, tip)} on two logarithmic axes with the line y = x.

    zero: what a point at the lower end says beside its tip.
    """
    figure, axes = _figure(x_label, y_label)
    every = [point for some in points.values() for point in some]
    x_low, x_high = _decades([x for x, *_ in every])
    # down to x as well, so that the line is in the picture
    y_low, y_high = _decades([value for x, y, _ in every for value in (x, y)])
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    axes.plot((x_low, x_high), (x_low, x_high), color=BAD, linestyle="--")
    tips = {}
    for number, (colour, some) in enumerate(points.items()):
        marks = axes.scatter(
            [_within(x, x_low, x_high) for x, *_ in some],
            [_within(y, y_low, y_high) for _, y, _ in some],
            s=18,
            color=colour,
            clip_on=False,
            zorder=3,
        )
        marks.set_gid(f"points{number}")
        tips[f"points{number}"] = [
            tip + (f" ({zero})" if x == 0 or y == 0 else "") for x, y, tip in some
        ]
    return _svg(figure, title, tips)


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten around all finite values above 0."""
    kept = [value for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min(kept))) if kept else -1
    high = math.ceil(math.log10(max(kept))) if kept else 0
    return 10.0**low, 10.0 ** max(high, low + 1)


def _within(value: float, low: float, high: float) -> float:
    """Return a value on the axis; NaN, the largest of all, goes to the end."""
    return high if math.isnan(value) else min(max(value, low), high)


def _svg(figure: Figure, title: str, tips: Mapping[str, Sequence[str]]) -> Any:
    """Return a figure as markup, with the tip of each mark that a group of that id has."""
    import matplotlib
    from markupsafe import Markup

    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    root = ElementTree.fromstring(text)
    root.remove(root.find(f"{{{SVG}}}metadata"))  # type: ignore[arg-type]
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": title}
    for group in root.iter(f"{{{SVG}}}g"):
        marks = group.iter(f"{{{SVG}}}use")
        for mark, tip in zip(marks, tips.get(group.attrib.pop("id", ""), ()), strict=False):
            ElementTree.SubElement(mark, f"{{{SVG}}}title").text = tip
    return Markup(ElementTree.tostring(root, encoding="unicode"))
