"""A whole run as its user sees it: what is said first, the text samples, what lies where."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xtrain.command_line import DISK_ERRORS
from xtrain.config import ConfigError, RunConfig
from xtrain.data import Tokenizer
from xtrain.files import shown
from xtrain.generate import generate
from xtrain.metrics import format_mfu
from xtrain.training import build, run_folder
from xtrain.training.console import Interrupted, StopSignals
from xtrain.training.plot import plot_losses
from xtrain.training.resolve import resolve
from xtrain.training.resume import ResumePoint
from xtrain.training.run_folder import RunFolder
from xtrain.training.trainer import Parts, Trainer, Watcher
from xtrain.training.update import TrainingError

log = logging.getLogger(__name__)

PROMPT_TOKENS = 32  # from the data, where the user names no prompt


def train(
    config: RunConfig,
    run: RunFolder | None = None,
    watch: Callable[[Trainer], Watcher] | None = None,
) -> int:
    """Run a configuration to its end and return the exit code: 0, or 128 + the signal.

    run:    the folder of a run to continue, whose configuration config has been made from.
    watch:  gives what looks at every run.drift_every-th step from outside.
    Raises: ConfigError, DataError, CheckpointError, TrainingError.
    """
    if config.run.drift_every and watch is None:
        raise ConfigError(
            f"run.drift_every is {config.run.drift_every} and nothing watches the steps; hand in "
            "xtrain.drift.recording.training_steps.fingerprints_of, as xtrain.train does"
        )
    device, bf16 = build.choose_device(config.run.device)
    auto = config.model.preset == "auto"
    config = resolve(config, device=device, bf16=bf16)
    build.set_deterministic(bool(config.run.deterministic), device)
    versions = build.versions(device)
    said = ["  ".join(f"{name} {version}" for name, version in versions.items())]
    if auto:
        said.append(
            f"device {device}: preset {config.model.preset}, {config.run.dtype} (choose by "
            "--device, --preset, --set run.dtype=...)"
        )
    is_new = run is None
    with StopSignals() as stop:
        if run is None:
            run = run_folder.create(_shown(config.run.folder), config.run.name, config.model.preset)
        else:
            run.acquire()
        stop.at_once = lambda number: _say_stopped(run, number, is_new)
        try:
            trainer = _build(config, run, versions, said, is_new)
            trainer.watch = watch
            return _train(trainer, stop)
        except Interrupted as interrupted:
            _say_stopped(run, interrupted.number, is_new)
            return 128 + interrupted.number
        finally:
            run.release()


def _shown(folder: str) -> Path:
    """Return a folder as its user would name it from here."""
    here = Path.cwd()
    return Path(folder).relative_to(here) if Path(folder).is_relative_to(here) else Path(folder)


def _build(
    config: RunConfig,
    run: RunFolder,
    versions: dict[str, str],
    said: Sequence[str],
    is_new: bool,
) -> Trainer:
    """Build a run or restore it, in a locked folder; of a new one that fails nothing is left."""
    try:
        with _disk_errors(run):
            resume = None if is_new else ResumePoint.open(run)
            return _build_in(config, run, versions, said, resume)
    except BaseException:
        if is_new:
            run.remove_if_unused()  # its name stays free
        raise


def _build_in(
    config: RunConfig,
    run: RunFolder,
    versions: dict[str, str],
    said: Sequence[str],
    resume: ResumePoint | None,
) -> Trainer:
    """Open the data, build everything on them, and leave config.toml and the tokenizer.

    said: lines about the run. Nothing is said before the data are read: what is wrong with them
    would stand below a page of configuration.
    """
    # Before the data, whose first reading can take long; only the vocabulary is still theirs.
    build.check_pass_names(config.run.disable_passes)
    if config.run.dump_graphs:  # else it fails when it is first needed, in the first step
        Path(config.run.dump_graphs).mkdir(parents=True, exist_ok=True)
    early = build.with_model(config, build.model_config(config, vocab_size=1))
    asked = config.model.vocab_size
    tokenizer = config.data.tokenizer
    if resume is not None:
        resume.check_config(early)
        resume.check_paths(config)
        tokenizer = resume.tokenizer(config)
    else:
        # from here on --resume starts the run, should it be killed before its first checkpoint
        run.write_config(config.override({"run.name": run.name}), versions)
    corpus, batches, validation = build.open_data(config, tokenizer)
    if resume is not None:
        resume.check_data(corpus)
    shape = build.model_config(config, corpus.vocab_size)
    corpus.check_vocab(shape.vocab_size, "model.vocab_size")
    _check_sample_prompt(config, corpus.tokenizer, shape.vocab_size)
    config = build.with_model(config, shape).override({"run.name": run.name})
    for line in said:
        log.info("%s", line)
    _log_config(early.override({"run.name": run.name, "model.vocab_size": asked}))
    log.info("data: %s", corpus.description)
    log.info("training on %s", batches.description)
    model, compiled = build.build_model(config, shape)
    log.info(
        "model: %s, %s parameters, vocabulary %d (tokenizer %s: %d)",
        config.model.preset,
        f"{shape.num_parameters():,}",
        shape.vocab_size,
        corpus.tokenizer.name,
        corpus.vocab_size,
    )
    trainer = Trainer(Parts(config, run, model, compiled, corpus, batches, validation, versions))
    if resume is not None and resume.saved is not None:
        trainer.restore(resume.saved)
        log.info("continuing after step %d of %s", resume.saved.step, resume.saved.path)
    if trainer.schedule.ends_at < trainer.steps:
        _say_held(trainer)
    run.write_config(config, versions)
    if tokenizer != str(run.tokenizer):  # that is what was read
        corpus.tokenizer.save(run.tokenizer)
    return trainer


def _say_held(trainer: Trainer) -> None:
    """Say that the schedule ends before the run, and how to stretch it."""
    end, rate = trainer.schedule.ends_at, trainer.schedule.minimum
    log.log(
        logging.INFO if rate else logging.WARNING,
        "learning rate: the schedule ends at step %d of %d; from there on it stays at %g%s "
        "(--set optim.schedule_steps=%d stretches it)",
        end,
        trainer.steps,
        rate,
        "" if rate else ", which changes no weight",
        trainer.steps,
    )


def _train(trainer: Trainer, stop: StopSignals) -> int:
    run = trainer.parts.run
    started = time.perf_counter()
    if trainer.first_step == 0:
        _log_sample(trainer, "before training")
    try:
        with _disk_errors(run):
            received = trainer.run(stop)
    except TrainingError as error:
        raise TrainingError(f"{error}. {_how_to_resume(trainer)}") from error
    finally:
        _plot(trainer)
    if received is not None:
        log.info("stopped by %s. %s", signal.Signals(received).name, _how_to_resume(trainer))
        return 128 + received
    _log_sample(trainer, "after training")
    _log_end(trainer, time.perf_counter() - started)
    return 0


def _say_stopped(run: RunFolder, number: int, is_new: bool) -> None:
    """Say that a signal came before a step was done, and how the run starts or goes on."""
    name = signal.Signals(number).name
    if is_new and (not run.path.exists() or run.remove_if_unused()):
        log.info("stopped by %s before the first step: nothing is left of %s", name, run.path)
    else:
        command = f"python -m xtrain.train --resume {run.path}"
        log.info("stopped by %s; continue with: %s", name, command)


def _check_sample_prompt(config: RunConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a prompt of the text samples that the tokenizer or the model cannot take."""
    text = config.train.sample_prompt
    if text and config.train.sample_tokens:
        ids = tokenizer.encode(text)
        if not ids or max(ids) >= vocab_size:
            raise ConfigError(
                f"train.sample_prompt {shown(text)} gives the ids {shown(ids)}; at least one is "
                f"needed, all below model.vocab_size {vocab_size}"
            )


@contextmanager
def _disk_errors(run: RunFolder) -> Iterator[None]:
    """Say in one line that the disk is full or broken."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise TrainingError(
            f"cannot write {error.filename or run.path}: {error.strerror}"
        ) from error


def _plot(trainer: Trainer) -> None:
    """Draw loss.png; a run that trained, or that ends with an error, does not end with this one."""
    run = trainer.parts.run
    try:
        plot_losses(run.read_metrics(), run.plot, f"{run.name}: {_title(trainer)}")
    except OSError as error:
        run.plot.unlink(missing_ok=True)
        log.warning("cannot write %s: %s", run.plot, error.strerror)


def _log_config(config: RunConfig) -> None:
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


def _log_sample(trainer: Trainer, when: str) -> None:
    """Print text that the model makes now, from the plain model: dropout off, nothing compiled."""
    parts, train = trainer.parts, trainer.parts.config.train
    if not train.sample_tokens:
        return
    tokenizer = parts.corpus.tokenizer
    if train.sample_prompt:
        prompt = tokenizer.encode(train.sample_prompt)
    else:
        source = parts.validation or parts.batches
        prompt = [int(token) for token in source.tokens[:PROMPT_TOKENS]]
    try:
        with trainer.autocast():
            ids = generate(
                parts.model,
                prompt,
                num_tokens=train.sample_tokens,
                vocab_size=tokenizer.vocab_size,
                temperature=train.sample_temperature,
                top_k=train.sample_top_k,
                seed=train.seed,
                eos_id=tokenizer.eos_id,
            )
    except FloatingPointError as error:  # the last update, whose effect no step has seen
        log.warning("no text %s: %s", when, error)
        return
    # of all ids together, as the space before a token, or half a character, may need both sides
    whole = tokenizer.decode(prompt + ids)
    start = len(os.path.commonprefix([tokenizer.decode(prompt), whole]))
    text = f"{_printable(whole[:start])} >>> {_printable(whole[start:])}"
    indented = "\n".join(f"  | {line}" for line in text.splitlines())
    log.info("text %s, prompt >>> sampled:\n%s", when, indented)


def _printable(text: str) -> str:
    """Show what a terminal would obey (escapes, bells) as a replacement character."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _title(trainer: Trainer) -> str:
    config = trainer.parts.config
    return (
        f"{trainer.parts.model.config.num_parameters():,} parameters, "
        f"dropout {config.model.dropout:g}, {config.run.dtype}"
    )


def _how_to_resume(trainer: Trainer) -> str:
    run = trainer.parts.run
    command = f"python -m xtrain.train --resume {run.path}"
    if trainer.saved_step is None:
        return f"No checkpoint was written; start it again with: {command}"
    return (
        f"The last checkpoint, after step {trainer.saved_step} of {trainer.steps}, is in "
        f"{run.checkpoints}; continue with: {command}"
    )


def _log_end(trainer: Trainer, seconds: float) -> None:
    run, meter = trainer.parts.run, trainer.meter
    records = list(run.read_metrics())
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    validation = [record["val_loss"] for record in records if record.get("val_loss") is not None]
    lines = [
        f"done: step {trainer.steps}, {trainer.num_tokens:,} tokens, {seconds:.0f} s of which the "
        f"first step took {meter.first_step_time_s or 0:.1f} s"
    ]
    if (speed := meter.summary()) is not None:
        lines.append(
            f"  {speed.tokens_per_s:,.0f} tokens/s, {speed.step_time_ms:.0f} ms a step, "
            f"MFU {format_mfu(speed.mfu)}"
        )
    if losses:
        lines.append(f"  training loss   {losses[0]:.4f} -> {losses[-1]:.4f}")
    if validation:
        lines.append(f"  validation loss {validation[0]:.4f} -> {validation[-1]:.4f} (dropout off)")
    more = 2 * trainer.steps
    set_length = trainer.parts.config.optim.schedule_steps
    stretch = f" --set optim.schedule_steps={more}" if set_length and set_length < more else ""
    lines += [
        f"{run.path}/ holds {run.config.name}, {run.metrics.name}, {run.plot.name}, "
        f"{run.tokenizer.name}, {run.checkpoints.name}/",
        f"  more steps: python -m xtrain.train --resume {run.path} --steps {more}{stretch}",
        f"  more text:  python -m xtrain.generate --run {run.path}",
    ]
    log.info("%s", "\n".join(lines))
