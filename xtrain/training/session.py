"""A whole run as its user sees it: what is said first, the text samples, what lies where."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xtrain.command_line import DISK_ERRORS
from xtrain.config import ConfigError, RunConfig
from xtrain.data import Tokenizer
from xtrain.generate import generate
from xtrain.metrics import format_mfu
from xtrain.strict_read import shown
from xtrain.training import build, run_folder
from xtrain.training.plot import plot_losses
from xtrain.training.resolve import resolve
from xtrain.training.resume import ResumePoint
from xtrain.training.run_folder import RunFolder
from xtrain.training.trainer import Parts, Trainer
from xtrain.training.update import TrainingError

log = logging.getLogger(__name__)

PROMPT_TOKENS = 32  # from the data, where the user names no prompt


def train(config: RunConfig, resume: ResumePoint | None = None) -> int:
    """Run a configuration to its end and return the exit code: 0, or 128 + the signal.

    Raises: ConfigError, DataError, CheckpointError, TrainingError.
    """
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
    if resume is not None:
        with _disk_errors(resume.run):
            trainer = _build(config, resume.run, versions, said, resume)
        return _train(trainer)
    run = run_folder.create(Path(config.run.folder), config.run.name, config.model.preset)
    try:
        with _disk_errors(run):
            trainer = _build(config, run, versions, said, None)
    except BaseException:
        run.remove_if_unused()  # its name stays free
        raise
    return _train(trainer)


def _build(
    config: RunConfig,
    run: RunFolder,
    versions: dict[str, str],
    said: Sequence[str],
    resume: ResumePoint | None,
) -> Trainer:
    """Open the data, build everything on them, and leave config.toml and tokenizer.json.

    said: lines about the run. Nothing is said before the data are read: what is wrong with them
    would stand below a page of configuration.
    """
    # Before the data, whose first reading can take long; only the vocabulary is still theirs.
    build.check_pass_names(config.run.disable_passes)
    if config.run.dump_graphs:  # else it fails when it is first needed, in the first step
        Path(config.run.dump_graphs).mkdir(parents=True, exist_ok=True)
    early = build.with_model(config, build.model_config(config, vocab_size=1))
    if resume is not None:
        resume.check_config(early)
    asked = config.model.vocab_size
    corpus, batches, validation = build.open_data(config)
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
    if resume is not None:
        trainer.restore(resume.saved)
        log.info("continuing after step %d of %s", resume.saved.step, resume.saved.path)
    run.write_config(config, versions)
    if not run.tokenizer.exists():  # resumed: the same one, as its fingerprint says
        corpus.tokenizer.save(run.tokenizer)
    return trainer


def _train(trainer: Trainer) -> int:
    run = trainer.parts.run
    started = time.perf_counter()
    if trainer.first_step == 0:
        _log_sample(trainer, "before training")
    try:
        with _disk_errors(run):
            received = trainer.run()
    except TrainingError as error:
        raise TrainingError(f"{error}. {_how_to_resume(trainer)}") from error
    finally:
        _plot(trainer)
    if received is not None:
        name = signal.Signals(received).name
        log.info("stopped by %s. %s", name, _how_to_resume(trainer))
        return 128 + received
    _log_sample(trainer, "after training")
    _log_end(trainer, time.perf_counter() - started)
    return 0


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
    if trainer.saved_step is None:
        return f"No checkpoint was written; the records are in {run.path}"
    return (
        f"The last checkpoint, after step {trainer.saved_step} of {trainer.steps}, is in "
        f"{run.checkpoints}; continue with: python -m xtrain.train --resume {run.path}"
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
    lines += [
        f"{run.path}/ holds {run.config.name}, {run.metrics.name}, {run.plot.name}, "
        f"{run.tokenizer.name}, {run.checkpoints.name}/",
        f"  more steps: python -m xtrain.train --resume {run.path} --steps {2 * trainer.steps}",
        f"  more text:  python -m xtrain.generate --run {run.path}",
    ]
    log.info("%s", "\n".join(lines))
