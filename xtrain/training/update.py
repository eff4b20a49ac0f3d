"""One optimiser step: forwards and backwards of its micro-batches, clipping, guard, AdamW.

loss = sum of token losses over the step / targets that count in the step, over all ranks. The mean
of micro-batch means would weigh a token by how empty its micro-batch is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.optim import Schedule, set_learning_rate, skip_updates_where
from xtrain.training.loader import StepBatch


def autocast(device: torch.device, dtype: str) -> Callable[[], AbstractContextManager]:
    """Return what makes the context of a forward: bf16 activations, or nothing for fp32."""
    if dtype == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says at which step and what to try."""


@dataclass(frozen=True)
class StepResult:
    """A step under way: on a GPU its numbers arrive later, read them with `values`."""

    step: int
    learning_rate: float
    numbers: Tensor  # [loss, grad_norm], fp32, on the CPU; filled once `ready` has happened
    ready: Any  # torch.cuda.Event, or None where numbers are there already

    def values(self) -> tuple[float, float]:
        """Return (loss, gradient norm before clipping), waiting for the device.

        Raises: TrainingError if either is not finite; this step and all later ones then left the
                weights as they were.
        """
        if self.ready is not None:
            self.ready.synchronize()
        loss, grad_norm = self.numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            raise TrainingError(
                f"step {self.step}: the {what} is not finite (loss {loss}, gradient norm "
                f"{grad_norm}, learning rate {self.learning_rate:.3g}); the weights were not "
                "updated. Try a lower optim.learning_rate, a longer optim.warmup_steps or a lower "
                "optim.grad_clip"
            )
        return loss, grad_norm


class Updater:
    """Performs optimiser steps on a model from xtrain.compile."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule,
        update: Callable[[], object] | None = None,
        grad_clip: float = 0.0,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        world_size: int = 1,
        deferred: bool | None = None,
    ):
        """Prepare.

        model:      called as model(inputs, targets, return_logits=False) -> (_, loss), loss the
                    mean over the targets that count; set_step(step, first_sample) goes before.
        update:     performs the update, optimizer.step unless given (a compiled one).
        grad_clip:  largest norm of all gradients together; 0: none.
        autocast:   makes the context of each forward.
        world_size: ranks whose gradients are averaged during the last backward.
        deferred:   queue the update without having seen the loss; None: on a GPU.
        """
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.update = update or optimizer.step
        self.grad_clip = grad_clip
        self.autocast = autocast
        self.world_size = world_size
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        # A host that waits for the loss before it queues the update leaves a GPU idle. Deferred,
        # the device itself decides whether to update; the error is raised when the loss arrives.
        self.deferred = self.device.type == "cuda" if deferred is None else deferred
        self.failed = None
        if self.deferred and skip_updates_where(optimizer, None):
            self.failed = torch.zeros((), device=self.device)
            skip_updates_where(optimizer, self.failed)

    def step(self, batch: StepBatch) -> StepResult | None:
        """Perform one step; None, and nothing done, if no target in it counts.

        Raises: TrainingError if loss or gradient norm is not finite, the weights untouched: here,
                or when deferred from StepResult.values.
        """
        if batch.num_targets == 0:
            return None
        learning_rate = self.schedule(batch.step)
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(batch)
        grad_norm = self._clip()
        result = self._result(batch, learning_rate, loss, grad_norm)
        if self.failed is None:
            result.values()  # raises before the update
        self.update()
        return result

    def _accumulate(self, batch: StepBatch) -> Tensor:
        """Leave the gradient of the step's loss in the parameters and return the loss."""
        total: Tensor | None = None
        for micro in batch.micro_batches:
            self.model.set_step(batch.step, first_sample=micro.first_sample)  # type: ignore[operator]
            with self.autocast():
                _, mean = self.model(micro.inputs, micro.targets, return_logits=False)
            # mean over the micro-batch -> its share of the mean over the step
            loss = mean * (micro.num_targets / batch.num_targets)
            (loss * self.world_size if self.world_size > 1 else loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _clip(self) -> Tensor:
        """Clip once, after accumulation, and return the norm from before."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, norm)
        return norm

    def _result(
        self, batch: StepBatch, learning_rate: float, loss: Tensor, grad_norm: Tensor
    ) -> StepResult:
        numbers = torch.stack((loss.float(), grad_norm.float()))
        ready = None
        if self.failed is not None:
            # sticky: no later step may move the weights before the host has seen the failure
            self.failed.copy_(torch.maximum(self.failed, (~numbers.isfinite()).any().float()))
        if self.device.type == "cuda":
            host = torch.empty(2, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            numbers = host
        return StepResult(batch.step, learning_rate, numbers, ready)
