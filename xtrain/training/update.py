"""The optimiser step: learning rate, AdamW with its groups, and one step from batch to update.

loss = sum of token losses over the step / targets that count in the step, over all ranks. The mean
of micro-batch means would weigh a token by how empty its micro-batch is.

The learning rate is one 0-d tensor shared by all groups. A new value is written into it: a Python
float there would make a compiled optimiser step recompile each time it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.config import OptimSection
from xtrain.training.loader import StepBatch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate by step: linear warm-up, then cosine, linear, constant or wsd.

    Step s of the warm-up has peak * (s + 1) / (warmup_steps + 1): the first update is not lost to
    a rate of zero, and step warmup_steps is the first at the peak. From there on the rate falls
    to `minimum` at step total_steps, which is one past the last. wsd (warm-up, stable, decay: Hu
    et al. 2024, MiniCPM) stays at the peak until the last decay_fraction of the steps.
    """

    kind: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int
    decay_fraction: float = 0.2

    @classmethod
    def from_config(cls, optim: OptimSection, steps: int) -> Schedule:
        """Return the schedule of a resolved configuration; steps is the length of the run."""
        assert optim.learning_rate is not None and optim.warmup_steps is not None
        return cls(
            kind=optim.schedule,
            peak=optim.learning_rate,
            minimum=optim.min_learning_rate,
            warmup_steps=optim.warmup_steps,
            total_steps=optim.schedule_steps or steps,
            decay_fraction=optim.decay_fraction,
        )

    @property
    def ends_at(self) -> float:
        """The step from which on the rate is `minimum`; a constant one never ends."""
        return math.inf if self.kind == "constant" else self.total_steps

    def __call__(self, step: int) -> float:
        """Return the learning rate of one step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.peak
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.total_steps - round(self.total_steps * self.decay_fraction))
        if step < start:
            return self.peak
        progress = min((step - start) / max(self.total_steps - start, 1), 1.0)
        share = (
            0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        )
        return self.minimum + (self.peak - self.minimum) * share


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW groups: matrices decay; norms, biases and embeddings do not.

    An embedding is known by its class, so that a head tied to it, which is the same tensor, counts
    as embedding and appears once. Frozen parameters are left out.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.dim() >= 2 and id(p) not in embeddings]
    kept = {id(p) for p in decayed}
    others = [p for p in trained if id(p) not in kept]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(model: nn.Module, optim: OptimSection, *, compiled: bool) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, its learning rate a 0-d fp32 tensor.

    compiled: the step is to go through torch.compile, which takes the multi-tensor form; else the
    fused kernel.
    """
    groups = parameter_groups(model, optim.weight_decay)
    if not groups:
        raise ValueError("the model has no parameter to train")
    device = groups[0]["params"][0].device
    # capturable lets the multi-tensor form take its learning rate as a tensor
    form = {"foreach": True, "capturable": True} if compiled else {"fused": True}
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(optim.learning_rate, dtype=torch.float32, device=device),
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        **form,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write value into the learning-rate tensor of every group."""
    for lr in {id(group["lr"]): group["lr"] for group in optimizer.param_groups}.values():
        lr.fill_(value)


def skip_updates_where(optimizer: torch.optim.Optimizer, flag: Tensor) -> bool:
    """Have the fused kernel leave weights and state as they are while flag, on the device, is 1.

    The hook is the one through which torch.amp.GradScaler skips steps with infinite gradients.
    Returns False, and does nothing, for an optimiser that has no such kernel.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    return True


# --- one step ------------------------------------------------------------------------------------


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
        compiled: bool = False,
        grad_clip: float = 0.0,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        world_size: int = 1,
        deferred: bool | None = None,
    ):
        """Prepare.

        model:      called as model(inputs, targets, return_logits=False) -> (_, loss), loss the
                    mean over the targets that count; set_step(step, first_sample) goes before.
        compiled:   the update through torch.compile.
        grad_clip:  largest norm of all gradients together; 0: none.
        autocast:   makes the context of each forward.
        world_size: ranks whose gradients are averaged during the last backward.
        deferred:   queue the update without having seen the loss; None: on a GPU.
        """
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.update = torch.compile(optimizer.step) if compiled else optimizer.step
        self.grad_clip = grad_clip
        self.autocast = autocast
        self.world_size = world_size
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        # A host that waits for the loss before it queues the update leaves a GPU idle. Deferred,
        # the device itself decides whether to update; the error is raised when the loss arrives.
        self.deferred = self.device.type == "cuda" if deferred is None else deferred
        flag = torch.zeros((), device=self.device)
        is_guarded = self.deferred and skip_updates_where(optimizer, flag)
        self.failed = flag if is_guarded else None

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


# --- its state -----------------------------------------------------------------------------------


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the optimiser's state as "parameter name / entry" -> tensor.

    names: id(parameter) -> name. Names instead of positions: the order of parameters or groups may
    change between two versions of a program without mixing up their moments.
    """
    return {
        f"{names[id(parameter)]}/{entry}": torch.as_tensor(value)
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
    }


def load_named_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what named_state returned; the groups and the learning-rate tensor stay.

    Raises: ValueError naming a parameter whose state is missing or of another shape, or a state
            without a parameter.
    """
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        by_parameter.setdefault(name, {})[entry] = value
    state, index = {}, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = by_parameter.pop(names[id(parameter)], {})
            if tensors and not entries:  # an optimiser saved before its first step has none at all
                raise ValueError(f"no optimiser state for parameter {names[id(parameter)]!r}")
            for entry, value in entries.items():
                if value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"the optimiser's {entry} is {tuple(value.shape)} for the parameter "
                        f"{names[id(parameter)]!r} of shape {tuple(parameter.shape)}"
                    )
            if entries:
                state[index] = entries
            index += 1
    if by_parameter:
        raise ValueError(f"optimiser state for an unknown parameter {next(iter(by_parameter))!r}")
    kept = [group["lr"] for group in optimizer.param_groups]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})  # places and casts entries
    for group, lr in zip(optimizer.param_groups, kept, strict=True):
        group["lr"] = lr  # load_state_dict put a copy there
