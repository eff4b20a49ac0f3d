"""AdamW with its parameter groups, and the learning rate as a function of the step.

The learning rate is one 0-d tensor shared by all groups. A new value is written into it: a Python
float there would make a compiled optimiser step recompile each time it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xtrain.config import OptimSection


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


def step_function(optimizer: torch.optim.Optimizer, *, compiled: bool) -> Callable[[], object]:
    """Return what performs one update."""
    return torch.compile(optimizer.step) if compiled else optimizer.step


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write value into the learning-rate tensor of every group."""
    for lr in {id(group["lr"]): group["lr"] for group in optimizer.param_groups}.values():
        lr.fill_(value)


def skip_updates_where(optimizer: torch.optim.Optimizer, flag: Tensor | None) -> bool:
    """Have the fused kernel leave weights and state as they are while flag, on the device, is 1.

    The hook is the one through which torch.amp.GradScaler skips steps with infinite gradients.
    Returns False, and does nothing, for an optimiser that has no such kernel.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    return True


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
