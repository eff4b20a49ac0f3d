"""The one report of every benchmark: sections, tables and claims as Markdown, JSON and plots.

No torch and nothing of bench: every other file here may import this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xtrain.report import template

NOT_AVAILABLE = "n/a"


@dataclass
class Report:
    """A benchmark's outcome: the sections of the Markdown file, and `data` for the JSON alone.

    sections: (title, headers, rows) of tables that stand in place of the one of headers and rows;
              `data` holds them for the JSON, of which each measured row is a line.
    """

    title: str
    question: str
    result: list[str]
    setup: dict[str, Any]
    method: list[str]
    reproduce: str
    limits: list[str]
    headers: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    checks: list[list[str]] = field(default_factory=list)  # [what, wanted, measured, met or missed]
    data: dict[str, Any] = field(default_factory=dict)
    sections: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)

    def table(self, form: str = "simple") -> str:
        """Return the table, or those of all sections under their titles."""
        mark = "### " if form == "github" else ""
        tables = [
            f"{mark}{title}\n\n{table(headers, rows, form)}"
            for title, headers, rows in self.sections
        ]
        return "\n\n".join(tables) or table(self.headers, self.rows, form)

    def markdown(self) -> str:
        """Return the report as a Markdown file."""
        return render(Path(__file__).with_name("report.md.jinja"), report=self, table=table)

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Write the files that were asked for."""
        found = plain({k: v for k, v in asdict(self).items() if k != "sections"})
        if self.sections:
            text = json.dumps(found, separators=(",", ":")).replace('{"op":', '\n{"op":')
        else:
            text = json.dumps(found, indent=1)
        for path, contents in ((json_path, text + "\n"), (markdown_path, self.markdown())):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(contents)


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: numbers that JSON lacks become None, the unknown text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def short(value: float) -> str:
    """Return a number with about four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cell(value: Any, form: str = "{}") -> str:
    """Return a value as a table shows it; one that is missing says so."""
    return NOT_AVAILABLE if value is None else form.format(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], form: str = "github") -> str:
    from tabulate import tabulate

    align = ["left"] + ["right"] * (len(headers) - 1) if form == "simple" else None
    return tabulate(rows, headers, tablefmt=form, disable_numparse=True, colalign=align or ())


def render(path: Path, **values: Any) -> str:
    """Return the Markdown that a template makes of values."""
    return template(path, escape=False).render(values)


def texts(path: Path, **values: Any) -> dict[str, list[str]]:
    """Return the texts that a template sets, by name, in sentences or items: its lines."""
    found = vars(template(path, escape=False).make_module(values))
    found = {name: text for name, text in found.items() if isinstance(text, str)}
    return {name: text.strip().splitlines() for name, text in found.items()}


def noise(summaries: Mapping[str, Any]) -> list[str]:
    """Say how far the 20th and 80th percentiles lie apart where they do most; None: not timed."""
    spreads = {name: (s.p80 - s.p20) / s.p50 for name, s in summaries.items() if s}
    if not spreads:
        return []
    name = max(spreads, key=lambda n: spreads[n])
    return [f"Noise: p20 to p80 spans up to {spreads[name]:.0%} of the median ({name})."]


# --- plots ----------------------------------------------------------------------------------------


@contextmanager
def figure(path: Path, dpi: int, num_rows: int = 1, num_columns: int = 1, **size: Any) -> Iterator:
    """Give (figure, panels) to draw on, then write them as a PNG; needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, panels = pyplot.subplots(
        num_rows, num_columns, squeeze=False, layout="constrained", **size
    )
    try:
        yield drawn, panels
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=dpi, format="png")
    finally:
        pyplot.close(drawn)
