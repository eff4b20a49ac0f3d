"""loss.png: training and validation loss by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GREY, BLUE, ORANGE = "0.35", "#4c78a8", "#e4572e"


def plot_losses(records: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the records of metrics.jsonl: each step's loss, its smoothed course, validation.

    The smoothed line is an exponential average over about a fiftieth of the run, corrected for its
    start, so that it begins at the first loss.
    """
    # a figure without pyplot: no window system, no global state, usable from any thread
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [record for record in records if record.get("loss") is not None]
    if not records:
        return
    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    validation = [(r["step"], r["val_loss"]) for r in records if r.get("val_loss") is not None]

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=BLUE, alpha=0.35, linewidth=1, label="train, each step")
    axes.plot(steps, _smoothed(losses), color=BLUE, linewidth=2, label="train, smoothed")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color=ORANGE,
            linewidth=2,
            marker="o",
            markersize=5,
            label="validation, dropout off",
        )
        step, loss = validation[-1]
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            textcoords="offset points",
            xytext=(0, -9),
            ha="center",
            va="top",
            color=ORANGE,
            bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1),
        )
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.02, y=0.1)  # y: room for the number below the last point
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)
    axes.legend(frameon=False)
    figure.savefig(path)


def _smoothed(values: list[float]) -> list[float]:
    keep = max(1.0 - 50.0 / max(len(values), 1), 0.0)
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = keep * average + (1.0 - keep) * value
        weight = keep * weight + (1.0 - keep)
        result.append(average / weight)
    return result
