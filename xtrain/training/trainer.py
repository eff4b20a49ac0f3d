"""The training loop: steps, and between them records, validation and checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from xtrain import checkpoint, metrics
from xtrain.config import RunConfig
from xtrain.data import Batches, Corpus
from xtrain.model import Transformer
from xtrain.optim import Schedule, build_adamw, load_named_state, named_state, step_function
from xtrain.state_names import load_model_tensors, model_tensors, parameter_names
from xtrain.training import build
from xtrain.training.console import Interrupted, Progress, StopSignals
from xtrain.training.loader import IGNORE_INDEX, Loader, StepBatch, cut_batch, to_device
from xtrain.training.run_folder import RunFolder, metrics_line
from xtrain.training.update import StepResult, TrainingError, Updater

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """What a trainer works on; xtrain.training.build makes them from a configuration."""

    config: RunConfig  # resolved
    run: RunFolder
    model: Transformer  # the plain one
    compiled: Any  # the same model behind xtrain.compile
    corpus: Corpus
    batches: Batches
    validation: Batches | None
    versions: Mapping[str, str] = field(default_factory=dict)


class Watcher(Protocol):
    """What looks at some steps from outside, such as xtrain.drift's fingerprints."""

    def due(self, step: int) -> bool:
        """Return whether it looks at a step."""

    def before(self, step: int, inputs: Tensor, targets: Tensor) -> None:
        """Look at what the step starts from."""

    def after(self, step: int, loss: float, grad_norm: float) -> None:
        """Look at what the step has done."""


class Trainer:
    """Takes a run from its first step, or from a checkpoint, to its last step or a signal.

    watch: gives what looks at its steps, when the first one is due; None: nothing does.
    """

    watch: Callable[[Trainer], Watcher] | None = None

    def __init__(self, parts: Parts):
        self.parts = parts
        config, train = parts.config, parts.config.train
        assert train.steps and train.micro_batch_size and train.seq_len
        self.device = torch.device(config.run.device)
        self.names = parameter_names(parts.model)
        compiled = config.run.compile_optimizer
        self.optimizer = build_adamw(parts.model, config.optim, compiled=compiled)
        self.schedule = Schedule.from_config(config.optim, train.steps)
        self.autocast = build.autocast(config)
        self.updater = Updater(
            parts.compiled,
            self.optimizer,
            schedule=self.schedule,
            update=step_function(self.optimizer, compiled=compiled),
            grad_clip=config.optim.grad_clip,
            autocast=self.autocast,
        )
        self.loader = Loader(
            parts.batches, micro_batch_size=train.micro_batch_size, device=self.device
        )
        self.meter = metrics.SpeedMeter(
            metrics.model_flops_per_token(parts.model.config, train.seq_len),
            peak_flops=metrics.device_peak_flops(self.device),
        )
        self.first_step, self.steps = 0, train.steps
        self.num_tokens = 0  # targets that counted in all steps so far
        self.saved_step: int | None = None
        # A GPU's numbers are looked at while it runs the next step: it never waits for the host.
        self.lag = self.device.type == "cuda"
        self.reported = False
        self.watcher: Watcher | None = None
        self.pending: tuple[StepBatch, StepResult | None] | None = None

    # --- state ----------------------------------------------------------------------------------

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint: weights, moments, generators, position."""
        load_model_tensors(self.parts.model, saved.tensors["model"], saved.state["aliases"])
        try:
            load_named_state(self.optimizer, self.names, saved.tensors["optimizer"])
            build.restore_rng(saved.tensors["rng"], self.device)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointError(
                f"{saved.path} is damaged: its optimiser or generators cannot be restored ({error})"
            ) from error
        self.first_step = self.saved_step = saved.step
        self.num_tokens = saved.state["data"]["tokens"]

    def save(self, step: int) -> None:
        """Write the checkpoint of `step` finished steps.

        Raises: CheckpointError when it cannot be written; older ones are intact.
        """
        parts = self.parts
        tensors, aliases = model_tensors(parts.model)
        state = {
            "model": parts.model.config.to_dict(),
            "config": parts.config.to_dict(),
            "data": {
                "fingerprint": parts.corpus.fingerprint,
                "next_sample": step * parts.batches.batch_size,
                "tokens": self.num_tokens,
            },
            "aliases": aliases,
            "versions": dict(parts.versions),
        }
        groups: dict[str, Mapping[str, Tensor]] = {
            "model": tensors,
            "optimizer": named_state(self.optimizer, self.names),
            "rng": build.rng_states(self.device),
        }
        keep_last = parts.config.checkpoint.keep_last
        checkpoint.write(parts.run.checkpoints, step, groups, state, keep_last=keep_last)
        self.saved_step = step

    # --- the loop -------------------------------------------------------------------------------

    def run(self, stop: StopSignals) -> int | None:
        """Train to the last step; return the signal that ended it earlier, or None.

        Raises: TrainingError for a loss that is not finite or memory that does not suffice;
                Interrupted for a signal before the first step is done.
        """
        self.watcher = self.watch(self) if self.watch is not None else None
        log_interval = self.parts.config.train.log_interval
        progress = Progress(self.first_step, self.steps, log_interval)
        self.parts.compiled.train()
        with self.parts.run.open_metrics(self.first_step) as file:
            recorder = Recorder(file, progress, self.meter, self.device, num_tokens=self.num_tokens)
            try:
                for batch in self.loader.steps(self.first_step, self.steps):
                    self._step(batch, recorder, stop)
                    if stop.received:
                        return stop.received
                    stop.gently = True  # what has been done is worth a checkpoint
            except torch.OutOfMemoryError as error:
                raise TrainingError(self._out_of_memory()) from error
            except Exception:
                # Ctrl-C also reaches the compilers that torch has started, and their end looks
                # like a failed compilation.
                if not stop.received or recorder.num_records:
                    raise
                raise Interrupted(stop.received) from None
            finally:
                stop.gently = False
                progress.close()
        return None

    def _step(self, batch: StepBatch, recorder: Recorder, stop: StopSignals) -> None:
        """Perform a step, then what is due after it; with nothing due a GPU's record can wait."""
        result = self._update(batch)
        if result is None:
            log.warning("step %d skipped: none of its targets counts", batch.step)
        if self.pending is not None:
            recorder.write(self._finish(recorder))
        self.pending = batch, result
        train, done = self.parts.config.train, batch.step + 1
        first, last = batch.step == self.first_step, done == self.steps
        evaluate = self.parts.validation is not None and _due(done, train.eval_interval, last)
        save = last or _due(done, self.parts.config.checkpoint.interval)
        if self.lag and not (first or evaluate or save or stop.received):
            return
        record = self._finish(recorder)
        if result is not None and not self.reported:
            report = self.parts.compiled.report()
            if report.sites or report.passes or report.notes or report.unseeded:
                log.info("%s", report)  # else there is no dropout, nothing was looked for
            self.reported = True
        if evaluate:
            record["val_loss"] = self.evaluate()
            log.info("step %d/%d  validation loss %.4f", done, self.steps, record["val_loss"])
        recorder.write(record)
        if save or stop.received:
            self.save(done)
        recorder.restart_clock()

    def _update(self, batch: StepBatch) -> StepResult | None:
        """Perform a step, watched where that is due."""
        watcher = self.watcher
        if watcher is None or not watcher.due(batch.step) or not batch.num_targets:
            return self.updater.step(batch)
        micro = batch.micro_batches[0]
        watcher.before(batch.step, micro.inputs, micro.targets)
        result = self.updater.step(batch)
        if result is not None:
            watcher.after(batch.step, *result.values())
        return result

    def _finish(self, recorder: Recorder) -> dict[str, Any]:
        assert self.pending is not None
        batch, result = self.pending
        self.pending = None
        record = recorder.finish(batch, result, self.schedule(batch.step))
        self.num_tokens = recorder.num_tokens
        return record

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation windows' targets, dropout off.

        Which windows these are depends on the data and on eval_batches * batch_size alone.
        """
        validation, train = self.parts.validation, self.parts.config.train
        assert validation is not None and train.micro_batch_size and train.batch_size
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        # no window twice
        num_windows = min(train.eval_batches * train.batch_size, validation.num_samples)
        self.parts.compiled.eval()
        for first in range(0, num_windows, train.micro_batch_size):
            inputs, targets = validation.samples(first, train.micro_batch_size)
            # the last rows may be too many: they keep the shape, which is compiled, and count not
            targets[num_windows - first :] = IGNORE_INDEX
            whole = cut_batch(first, inputs, targets, micro_batch_size=len(inputs))
            micro = to_device(whole, self.device).micro_batches[0]
            with self.autocast():
                _, loss = self.parts.compiled(micro.inputs, micro.targets, return_logits=False)
            total += loss * micro.num_targets
            count += micro.num_targets
        self.parts.compiled.train()
        return total.item() / count

    def _out_of_memory(self) -> str:
        size = self.parts.config.train.micro_batch_size or 1
        if size > 1:
            advice = (
                f"--set train.micro_batch_size={size // 2} gives the same result in less memory"
            )
        else:
            advice = "--recompute full, a shorter train.seq_len or a smaller preset need less"
        return f"{self.device} is out of memory; {advice}"


def _due(done: int, interval: int | None, last: bool = False) -> bool:
    return interval is not None and interval > 0 and (last or done % interval == 0)


class Recorder:
    """Times steps, counts tokens, writes records; holds no tensor.

    A step's time runs from the moment the one before was seen to end until it is seen to end
    itself. On a GPU the next step is queued in between, so that this is the device's own pace.
    """

    def __init__(
        self,
        file: TextIO,
        progress: Progress,
        meter: metrics.SpeedMeter,
        device: torch.device,
        *,
        num_tokens: int = 0,
    ):
        self.file = file
        self.progress = progress
        self.meter = meter
        self.device = device
        self.num_tokens = num_tokens  # targets that counted, since the run's first step
        self.num_records = 0
        self.clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Leave what was done since the last step (validation, a save) out of the next one."""
        self.clock = time.perf_counter()

    def finish(self, batch: StepBatch, result: StepResult | None, lr: float) -> dict[str, Any]:
        """Wait for a step and return its record.

        Raises: TrainingError if its loss or gradient norm is not finite.
        """
        loss, grad_norm = (None, None) if result is None else result.values()
        now = time.perf_counter()
        speed = self.meter.record(now - self.clock, batch.num_targets)
        self.clock = now
        self.num_tokens += batch.num_targets
        record = {
            "step": batch.step,
            "loss": loss,
            "learning_rate": lr,
            "grad_norm": grad_norm,
            **speed.to_dict(),
            "peak_memory_gib": metrics.peak_memory_gib(self.device),
            "tokens": self.num_tokens,
            "compile": self.num_records == 0,  # this process's first step: compiles, fills caches
        }
        self.num_records += 1
        return record

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to the file and show it."""
        self.file.write(metrics_line(record))
        self.progress.update(record)
