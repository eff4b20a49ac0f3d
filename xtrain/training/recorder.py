"""From a finished step to its line in metrics.jsonl and its place on the progress bar."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from xtrain import metrics
from xtrain.training.console import Progress
from xtrain.training.loader import StepBatch
from xtrain.training.run_folder import metrics_line
from xtrain.training.update import StepResult


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
