"""A run from top to bottom: `train` starts and ends it, `prepare` builds it, Trainer.run loops.

One process on one device so far. What more of them have to be told has one place each: which
samples a rank computes, in loader.py; the optimiser step and what is reduced over ranks, in
update.py; what is written and read back, in saving.py.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import xtrain
from xtrain import metrics
from xtrain.command_line import DISK_ERRORS
from xtrain.compiler import CompiledModel
from xtrain.config import ConfigError, RunConfig
from xtrain.data.batches import Batches
from xtrain.data.corpus import Corpus, open_corpus
from xtrain.files import shown
from xtrain.generate import generate
from xtrain.model import Transformer
from xtrain.training import choices, console, run_folder, saving
from xtrain.training.loader import Loader, StepBatch, in_order
from xtrain.training.run_folder import RunFolder, metrics_line
from xtrain.training.signals import Interrupted, StopSignals
from xtrain.training.update import (
    Schedule,
    StepResult,
    TrainingError,
    Updater,
    autocast,
    build_adamw,
)

log = logging.getLogger(__name__)

PROMPT_TOKENS = 32  # from the data, where the user names no prompt


class Watcher(Protocol):
    """What looks at some steps from outside, such as xtrain.drift's fingerprints."""

    def due(self, step: int) -> bool:
        """Return whether it looks at a step."""

    def before(self, step: int, inputs: Tensor, targets: Tensor) -> None:
        """Look at what the step starts from."""

    def after(self, step: int, loss: float, grad_norm: float) -> None:
        """Look at what the step has done."""


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
    device, bf16 = choices.choose_device(config.run.device)
    was_auto = config.model.preset == "auto"
    config = choices.resolve(config, device=device, bf16=bf16)
    choices.set_deterministic(bool(config.run.deterministic), device)
    is_new = run is None
    with StopSignals() as stop:
        if run is None:
            run = run_folder.create(_shown(config.run.folder), config.run.name, config.model.preset)
        else:
            run.acquire()
        stop.at_once = lambda number: _say_stopped(run, number, is_new)
        try:
            try:
                trainer = prepare(config, run, is_new=is_new, was_auto=was_auto)
            except BaseException:
                if is_new:
                    run.remove_if_unused()  # its name stays free
                raise
            return _train(trainer, stop, watch)
        except Interrupted as interrupted:
            _say_stopped(run, interrupted.number, is_new)
            return 128 + interrupted.number
        finally:
            run.release()


def _shown(folder: str) -> Path:
    """Return a folder as its user would name it from here."""
    here = Path.cwd()
    return Path(folder).relative_to(here) if Path(folder).is_relative_to(here) else Path(folder)


def _say_stopped(run: RunFolder, number: int, is_new: bool) -> None:
    """Say that a signal came before a step was done, and how the run starts or goes on."""
    name = signal.Signals(number).name
    if is_new and (not run.path.exists() or run.remove_if_unused()):
        log.info("stopped by %s before the first step: nothing is left of %s", name, run.path)
    else:
        log.info("stopped by %s; continue with: %s", name, run.resume_command)


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


def prepare(config: RunConfig, run: RunFolder, *, is_new: bool, was_auto: bool) -> Trainer:
    """Open the data, build a run on them or restore it, and leave config.toml and the tokenizer.

    config: resolved.  run: locked.  was_auto: the preset was chosen by the device.
    Nothing is said before the data are read: what is wrong with them would stand below a page of
    configuration.
    """
    with _disk_errors(run):
        config = config.override({"run.name": run.name})
        versions = choices.versions(config.run.device)
        # Before the data, whose first reading can take long; only the vocabulary is still theirs.
        choices.check_pass_names(config.run.disable_passes)
        if config.run.dump_graphs:  # else it fails when it is first needed, in the first step
            Path(config.run.dump_graphs).mkdir(parents=True, exist_ok=True)
        early = choices.with_model(config, choices.model_config(config, vocab_size=1))
        saved, tokenizer = None, config.data.tokenizer
        if is_new:
            # from here on --resume starts the run, should it be killed before its first checkpoint
            run.write_config(config, versions)
        else:
            saved = saving.checkpoint_to_resume(run)
            if saved is not None:  # else anything may be another
                saving.check_config(run, saved, early)
            tokenizer = saving.tokenizer_to_resume(run, config)

        corpus, batches, validation = _open_data(config, tokenizer)
        if saved is not None:
            saving.check_data(saved, corpus)
        shape = choices.model_config(config, corpus.vocab_size)
        corpus.check_vocab(shape.vocab_size, "model.vocab_size")
        _check_sample_prompt(config, corpus, shape.vocab_size)

        log.info("%s", "  ".join(f"{name} {version}" for name, version in versions.items()))
        if was_auto:
            log.info(
                "device %s: preset %s, %s (choose by --device, --preset, --set run.dtype=...)",
                config.run.device,
                config.model.preset,
                config.run.dtype,
            )
        console.log_config(early.override({"model.vocab_size": config.model.vocab_size}))
        log.info("data: %s", corpus.description)
        log.info("training on %s", batches.description)
        config = choices.with_model(config, shape)
        trainer = Trainer(config, run, corpus, batches, validation, versions)
        if saved is not None:
            trainer.num_tokens = trainer.saver.restore(saved)
            trainer.first_step = saved.step
            log.info("continuing after step %d of %s", saved.step, saved.path)
        console.log_held(trainer.schedule, trainer.steps)
        run.write_config(config, versions)
        if tokenizer != str(run.tokenizer):  # that is what was read
            corpus.tokenizer.save(run.tokenizer)
    return trainer


def _open_data(config: RunConfig, tokenizer: str) -> tuple[Corpus, Batches, Batches | None]:
    """Return the corpus, its training batches and, unless there are none, validation windows.

    tokenizer: read in place of data.tokenizer: the run's own copy of it.
    """
    data, train = config.data, config.train
    assert train.seq_len and train.batch_size
    corpus = open_corpus(
        list(data.paths) or None,
        tokenizer=tokenizer,
        field=data.field,
        errors=data.errors,
        cache_dir=Path(data.cache_dir) if data.cache_dir else None,
    )
    training, held_out = corpus.split(val_fraction=data.val_fraction, seq_len=train.seq_len)
    batches = Batches(training, seq_len=train.seq_len, batch_size=train.batch_size, seed=train.seed)
    if not held_out.size or not train.eval_interval:
        return corpus, batches, None
    # always the same windows, in the same order, so that validation losses compare
    val = Batches(held_out, seq_len=train.seq_len, batch_size=train.batch_size, seed=0)
    return corpus, batches, val


def _check_sample_prompt(config: RunConfig, corpus: Corpus, vocab_size: int) -> None:
    """Refuse a prompt of the text samples that the tokenizer or the model cannot take."""
    text = config.train.sample_prompt
    if text and config.train.sample_tokens:
        ids = corpus.tokenizer.encode(text)
        if not ids or max(ids) >= vocab_size:
            raise ConfigError(
                f"train.sample_prompt {shown(text)} gives the ids {shown(ids)}; at least one is "
                f"needed, all below model.vocab_size {vocab_size}"
            )


def build_model(config: RunConfig) -> tuple[Transformer, CompiledModel]:
    """Return the plain model on its device, and the same model behind xtrain.compile.

    The weights are drawn on the CPU: one seed gives one model on every device.
    """
    run = config.run
    torch.manual_seed(config.train.seed)
    model = Transformer(choices.model_config(config, 1)).to(run.device)
    compiled = xtrain.compile(
        model,
        dropout=config.model.dropout,
        seed=config.train.seed,
        backend="inductor" if run.compile else "eager",
        kernels=run.kernels,
        verify=run.verify,
        disable_passes=run.disable_passes,
        dump_graphs=run.dump_graphs or None,
    )
    return model, compiled


def _train(trainer: Trainer, stop: StopSignals, watch: Callable[[Trainer], Watcher] | None) -> int:
    """Train, and show what came of it; return the exit code."""
    config, run = trainer.config, trainer.run_folder
    started = time.perf_counter()
    if trainer.first_step == 0:
        trainer.log_sample("before training")
    try:
        with _disk_errors(run):
            received = trainer.run(stop, watch(trainer) if watch is not None else None)
    except TrainingError as error:
        raise TrainingError(f"{error}. {trainer.saver.how_to_resume}") from error
    finally:
        title = (
            f"{run.name}: {trainer.model.config.num_parameters():,} parameters, "
            f"dropout {config.model.dropout:g}, {config.run.dtype}"
        )
        console.draw_losses(run, title)
    if received is not None:
        name = signal.Signals(received).name
        log.info("stopped by %s. %s", name, trainer.saver.how_to_resume)
        return 128 + received
    trainer.log_sample("after training")
    seconds = time.perf_counter() - started
    console.log_end(run, config, trainer.num_tokens, trainer.meter, seconds)
    return 0


class Trainer:
    """A run with all that it works on, at its first step or behind a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        corpus: Corpus,
        batches: Batches,
        validation: Batches | None,
        versions: Mapping[str, str],
    ):
        """Build model, optimiser and all that drives them.

        config: resolved, every field of [model] written out.
        """
        train = config.train
        assert train.steps and train.micro_batch_size and train.seq_len
        self.config, self.run_folder, self.corpus = config, run, corpus
        self.batches, self.validation = batches, validation
        self.device = torch.device(config.run.device)
        self.model, self.compiled = build_model(config)
        shape = self.model.config
        log.info(
            "model: %s, %s parameters, vocabulary %d (tokenizer %s: %d)",
            config.model.preset,
            f"{shape.num_parameters():,}",
            shape.vocab_size,
            corpus.tokenizer.name,
            corpus.vocab_size,
        )
        compiled = config.run.compile_optimizer
        self.optimizer = build_adamw(self.model, config.optim, compiled=compiled)
        self.schedule = Schedule.from_config(config.optim, train.steps)
        self.autocast = autocast(self.device, config.run.dtype)
        self.updater = Updater(
            self.compiled,
            self.optimizer,
            schedule=self.schedule,
            compiled=compiled,
            grad_clip=config.optim.grad_clip,
            autocast=self.autocast,
        )
        self.loader = Loader(batches, micro_batch_size=train.micro_batch_size, device=self.device)
        self.saver = saving.Saver(
            run, config, self.model, self.optimizer, corpus.fingerprint, versions
        )
        self.meter = metrics.SpeedMeter(
            metrics.model_flops_per_token(shape, train.seq_len),
            peak_flops=metrics.device_peak_flops(self.device),
        )
        self.first_step, self.steps = 0, train.steps
        self.num_tokens = 0  # targets that counted in all steps so far
        self.clock = 0.0  # when the last step was seen to end

    def run(self, stop: StopSignals, watcher: Watcher | None = None) -> int | None:
        """Train to the last step; return the signal that ended it earlier, or None.

        Raises: TrainingError for a loss that is not finite or memory that does not suffice;
                Interrupted for a signal before the first step is done.
        """
        progress = console.Progress(self.first_step, self.steps, self.config.train.log_interval)
        with self.run_folder.open_metrics(self.first_step) as file:

            def write(record: Mapping[str, Any]) -> None:
                file.write(metrics_line(record))
                progress.update(record)

            try:
                return self._loop(stop, watcher, write)
            except torch.OutOfMemoryError as error:
                raise TrainingError(self._out_of_memory()) from error
            except Exception:
                # Ctrl-C also reaches the compilers that torch has started, and their end looks
                # like a failed compilation.
                if not stop.received or stop.gently:
                    raise
                raise Interrupted(stop.received) from None
            finally:
                stop.gently = False
                progress.close()

    def _loop(
        self,
        stop: StopSignals,
        watcher: Watcher | None,
        write: Callable[[Mapping[str, Any]], None],
    ) -> int | None:
        """Perform the steps, and after each of them what is due.

        A GPU's numbers are looked at while it runs the next step: it never waits for the host,
        except where something is due that needs them.
        """
        train, interval = self.config.train, self.config.checkpoint.interval
        pending: tuple[StepBatch, StepResult | None] | None = None  # its numbers are not read yet
        reported = False
        self.compiled.train()
        self.clock = time.perf_counter()
        for batch in self.loader.steps(self.first_step, self.steps):
            watched = watcher if watcher is not None and watcher.due(batch.step) else None
            if watched is not None and batch.num_targets:
                first = batch.micro_batches[0]
                watched.before(batch.step, first.inputs, first.targets)
            result = self.updater.step(batch)
            if result is None:
                log.warning("step %d skipped: none of its targets counts", batch.step)
            elif watched is not None:
                watched.after(batch.step, *result.values())
            if pending is not None:
                write(self._record(*pending))

            done, stopping = batch.step + 1, stop.received
            is_first, is_last = batch.step == self.first_step, done == self.steps
            evaluate = self.validation is not None and _due(done, train.eval_interval, is_last)
            save = is_last or _due(done, interval) or stopping is not None
            if self.updater.deferred and not (is_first or evaluate or save):
                pending = batch, result
                continue
            pending = None
            record = self._record(batch, result)
            if result is not None and not reported:
                report = self.compiled.report()
                if report.sites or report.passes or report.notes or report.unseeded:
                    log.info("%s", report)  # else there is no dropout, nothing was looked for
                reported = True
            if evaluate:
                record["val_loss"] = self.evaluate()
                log.info("step %d/%d  validation loss %.4f", done, self.steps, record["val_loss"])
            write(record)
            if save:
                self.saver.save(done, self.num_tokens)
            if stopping is not None:
                return stopping
            stop.gently = True  # what has been done is worth a checkpoint
            self.clock = time.perf_counter()  # validation and saving are no step's time
        return None

    def _record(self, batch: StepBatch, result: StepResult | None) -> dict[str, Any]:
        """Wait for a step and return its record.

        A step's time runs from the moment the one before was seen to end until it is seen to end
        itself. On a GPU the next step is queued in between, so that this is the device's own pace.
        Raises: TrainingError if its loss or gradient norm is not finite.
        """
        loss, grad_norm = (None, None) if result is None else result.values()
        now = time.perf_counter()
        speed = self.meter.record(now - self.clock, batch.num_targets)
        self.clock = now
        self.num_tokens += batch.num_targets
        return {
            "step": batch.step,
            "loss": loss,
            "learning_rate": self.schedule(batch.step),
            "grad_norm": grad_norm,
            **speed.to_dict(),
            "peak_memory_gib": metrics.peak_memory_gib(self.device),
            "tokens": self.num_tokens,
            "compile": batch.step == self.first_step,  # the first compiles and fills caches
        }

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation windows' targets, dropout off.

        Which windows these are depends on the data and on eval_batches * batch_size alone.
        """
        validation, train = self.validation, self.config.train
        assert validation is not None and train.micro_batch_size and train.batch_size
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        # no window twice
        num_windows = min(train.eval_batches * train.batch_size, validation.num_samples)
        size = train.micro_batch_size
        self.compiled.eval()
        for micro in in_order(validation, num_windows, micro_batch_size=size, device=self.device):
            with self.autocast():
                _, loss = self.compiled(micro.inputs, micro.targets, return_logits=False)
            total += loss * micro.num_targets
            count += micro.num_targets
        self.compiled.train()
        return total.item() / count

    def log_sample(self, when: str) -> None:
        """Show text that the model makes now, from the plain model: dropout off, not compiled."""
        train, tokenizer = self.config.train, self.corpus.tokenizer
        if not train.sample_tokens:
            return
        if train.sample_prompt:
            prompt = tokenizer.encode(train.sample_prompt)
        else:
            source = self.validation or self.batches
            prompt = [int(token) for token in source.tokens[:PROMPT_TOKENS]]
        try:
            with self.autocast():
                ids = generate(
                    self.model,
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
        else:
            console.log_sample(when, tokenizer, prompt, ids)

    def _out_of_memory(self) -> str:
        size = self.config.train.micro_batch_size or 1
        if size > 1:
            advice = (
                f"--set train.micro_batch_size={size // 2} gives the same result in less memory"
            )
        else:
            advice = "--recompute full, a shorter train.seq_len or a smaller preset need less"
        return f"{self.device} is out of memory; {advice}"


def _due(done: int, interval: int | None, is_last: bool = False) -> bool:
    return interval is not None and interval > 0 and (is_last or done % interval == 0)
