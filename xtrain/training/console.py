"""What a run shows: log lines, the progress bar, text samples, loss.png, the last words."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from xtrain.command_line import leave_stdout
from xtrain.config import RunConfig
from xtrain.data.tokenizer import Tokenizer
from xtrain.metrics import SpeedMeter, format_mfu
from xtrain.training.run_folder import RunFolder
from xtrain.training.update import Schedule

log = logging.getLogger(__name__)


class _Handler(logging.Handler):
    """Prints records on stdout, above the progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            tqdm.write(prefix + self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:  # the reader, such as head, has left: train on in silence
            leave_stdout()
            if not isinstance(error, BrokenPipeError):
                print(f"warning: no more is shown on stdout: {error.strerror}", file=sys.stderr)
        except Exception:  # logging's own rule is not to raise
            self.handleError(record)


def set_up_logging() -> None:
    """Show xtrain's log from INFO and Python's warnings, one line each."""
    logger = logging.getLogger("xtrain")
    logger.handlers = [_Handler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = " ".join(str(message).split())
    logging.getLogger("xtrain").warning(
        "%s (%s, %s:%d)", text, category.__name__, os.path.basename(filename), lineno
    )


class Progress:
    """A bar on a terminal; elsewhere a line every log_interval steps."""

    def __init__(self, first_step: int, steps: int, log_interval: int):
        self.steps = steps
        self.log_interval = log_interval
        self.started = False
        self.bar = tqdm(
            total=steps,
            initial=first_step,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            unit="step",
            bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
        )
        self.bar.set_postfix_str("first step, which compiles")

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one finished step."""
        loss = "skipped" if record["loss"] is None else f"loss {record['loss']:.4f}"
        rate = f"{_short(record['tokens_per_s'])} tokens/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{loss}, {rate}", refresh=False)
            if self.started:
                self.bar.update()
            else:  # the first step, which compiled, says nothing about the time of the others
                bar, self.started = self.bar, True
                bar.n = bar.initial = bar.last_print_n = record["step"] + 1
                bar.start_t = bar.last_print_t = time.time()
                bar.refresh()
            return
        step = record["step"] + 1
        if step % self.log_interval == 0 or step == self.steps or not self.started:
            self.started = True
            mfu = record.get("mfu_percent")
            log.info(
                "step %d/%d  %s  lr %.3g  grad norm %s  %.0f ms  %s%s",
                step,
                self.steps,
                loss,
                record["learning_rate"],
                "n/a" if record["grad_norm"] is None else f"{record['grad_norm']:.3g}",
                record["step_time_ms"],
                rate,
                "" if mfu is None else f"  MFU {mfu:.1f}%",
            )

    def close(self) -> None:
        """Leave the bar where it stands."""
        self.bar.close()


def _short(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


# --- the beginning ------------------------------------------------------------------------------


def log_config(config: RunConfig) -> None:
    """Print one line a section; config.toml has the meanings."""
    lines = [
        f"  {name + ':':<12}" + ", ".join(f"{key} {_plain(value)}" for key, value in table.items())
        for name, table in config.to_dict().items()
    ]
    log.info("configuration:\n%s", "\n".join(lines))


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"


def log_held(schedule: Schedule, steps: int) -> None:
    """Say that the schedule ends before the run, if it does, and how to stretch it."""
    if schedule.ends_at >= steps:
        return
    rate = schedule.minimum
    log.log(
        logging.INFO if rate else logging.WARNING,
        "learning rate: the schedule ends at step %d of %d; from there on it stays at %g%s "
        "(--set optim.schedule_steps=%d stretches it)",
        schedule.ends_at,
        steps,
        rate,
        "" if rate else ", which changes no weight",
        steps,
    )


def log_sample(when: str, tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    """Show sampled ids behind their prompt."""
    # of all ids together, as the space before a token, or half a character, may need both sides
    whole = tokenizer.decode(prompt + ids)
    start = len(os.path.commonprefix([tokenizer.decode(prompt), whole]))
    text = f"{_printable(whole[:start])} >>> {_printable(whole[start:])}"
    indented = "\n".join(f"  | {line}" for line in text.splitlines())
    log.info("text %s, prompt >>> sampled:\n%s", when, indented)


def _printable(text: str) -> str:
    """Show what a terminal would obey (escapes, bells) as a replacement character."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


# --- the end ------------------------------------------------------------------------------------


def log_end(
    run: RunFolder, config: RunConfig, num_tokens: int, meter: SpeedMeter, seconds: float
) -> None:
    """Say what a finished run has reached, where it lies and what can follow."""
    steps, set_length = config.train.steps or 0, config.optim.schedule_steps
    lines = [
        f"done: step {steps}, {num_tokens:,} tokens, {seconds:.0f} s of which the "
        f"first step took {meter.first_step_time_s or 0:.1f} s"
    ]
    if (speed := meter.summary()) is not None:
        lines.append(
            f"  {speed.tokens_per_s:,.0f} tokens/s, {speed.step_time_ms:.0f} ms a step, "
            f"MFU {format_mfu(speed.mfu)}"
        )
    records = list(run.read_metrics())
    for key, title, note in (
        ("loss", "training loss  ", ""),
        ("val_loss", "validation loss", " (dropout off)"),
    ):
        values = [record[key] for record in records if record.get(key) is not None]
        if values:
            lines.append(f"  {title} {values[0]:.4f} -> {values[-1]:.4f}{note}")
    more = 2 * steps
    stretch = f" --set optim.schedule_steps={more}" if set_length and set_length < more else ""
    lines += [
        f"{run.path}/ holds {run.config.name}, {run.metrics.name}, {run.plot.name}, "
        f"{run.tokenizer.name}, {run.checkpoints.name}/",
        f"  more steps: {run.resume_command} --steps {more}{stretch}",
        f"  more text:  python -m xtrain.generate --run {run.path}",
    ]
    log.info("%s", "\n".join(lines))


def draw_losses(run: RunFolder, title: str) -> None:
    """Draw loss.png; a run that trained, or that ends with an error, does not end with this one."""
    try:
        plot_losses(run.read_metrics(), run.plot, title)
    except OSError as error:
        run.plot.unlink(missing_ok=True)
        log.warning("cannot write %s: %s", run.plot, error.strerror)


_GREY, _BLUE, _ORANGE = "0.35", "#4c78a8", "#e4572e"


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
    axes.plot(steps, losses, color=_BLUE, alpha=0.35, linewidth=1, label="train, each step")
    axes.plot(steps, _smoothed(losses), color=_BLUE, linewidth=2, label="train, smoothed")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color=_ORANGE,
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
            color=_ORANGE,
            bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1),
        )
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.02, y=0.1)  # y: room for the number below the last point
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
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
