"""Which key (base seed, step, first sample) a forward of a compiled model draws its masks with.

StepKeys       hands one key to each training forward
first_sample   which samples of the global batch a rank holds, where no set_step says so
ReplayLedger   the key again for a forward that a checkpoint recomputes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from xtrain import torch_compat
from xtrain.rng import SEED_RANGE, checked_int

T = TypeVar("T")
_ASK = (
    "; call set_step(step, first_sample) before each training forward to say which samples of the "
    "global batch it holds"
)
# Batch sizes that all ranks have been seen to agree on, per model and process group.
_agreed: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class StepKey:
    """The key of one training forward: with a site it gives the mask, with nothing else."""

    base_seed: int
    step: int
    first_sample: int


class StepKeys:
    """Hand out one key per training forward; `set_step` binds exactly the next one.

    seed: the run's base seed, in SEED_RANGE; None draws one per forward from torch's default CPU
    generator, so that torch.manual_seed and a restored generator state reproduce the masks.
    """

    def __init__(self, seed: int | None):
        self.seed = None if seed is None else checked_int("seed", seed)
        if self.seed is not None and not SEED_RANGE[0] <= self.seed <= SEED_RANGE[1]:
            raise ValueError(f"seed must be from -2^63 to 2^64 - 1, got {self.seed}")
        self._last_step = -1
        self._pending: tuple[int, int] | None = None

    def set_step(self, step: int, first_sample: int = 0) -> None:
        """Bind the next training forward to a step and to the samples that it holds."""
        step = checked_int("step", step)
        first_sample = checked_int("first_sample", first_sample)
        if first_sample < 0:
            raise ValueError(f"first_sample must be 0 or more, got {first_sample}")
        self._pending = (step, first_sample)

    @property
    def is_bound(self) -> bool:
        """Whether set_step has bound the next training forward."""
        return self._pending is not None

    def advance(self, default_first_sample: int) -> StepKey:
        """Consume and return the key of a training forward that starts now."""
        if self._pending is None:
            step, first_sample = self._last_step + 1, default_first_sample
        else:
            step, first_sample = self._pending
        self._pending = None
        self._last_step = step
        if self.seed is not None:
            return StepKey(self.seed, step, first_sample)
        base = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
        return StepKey(base, 0, first_sample)


def first_sample(model: nn.Module, batch: int, group: Any) -> int:
    """Return rank x local batch under plain data parallelism, 0 in a single process.

    Args:     batch: leading size of the forward's first tensor argument on this rank.
              group: process group whose ranks share the global batch; None: all ranks.
    Raises:   ValueError when the ranks' batches differ, when this rank's batch changes later (the
              others could not be asked without a hang), or when the model's parameters are cut
              over a tensor, context or pipeline parallel mesh.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 0
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return 0
    if group is None:
        _refuse_model_parallel(model)
    _check_equal(_agreed.setdefault(model, {}), batch, world_size, group)
    return dist.get_rank(group) * batch


def _check_equal(agreed: dict[Any, int], batch: int, world_size: int, group: Any) -> None:
    dist = torch.distributed
    key = dist.group.WORLD if group is None else group  # another one after a new initialisation
    known = agreed.get(key)
    if known == batch:
        return
    if known is not None:
        raise ValueError(
            f"this rank's batch changed from {known} to {batch} samples, so rank x batch no longer "
            "says which samples it holds" + _ASK
        )
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([batch], device=device)
    batches = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(batches, mine, group=group)
    sizes = [int(b) for b in batches]
    if len(set(sizes)) > 1:
        raise ValueError(f"ranks hold batches of different sizes {sizes}" + _ASK)
    agreed[key] = batch


def _refuse_model_parallel(model: nn.Module) -> None:
    """Raise where ranks need not hold different samples: a mesh that is not all data parallel."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = mesh.mesh_dim_names or ()
        other = [n for n in names if not n.startswith(("dp", "data", "fsdp", "replicate", "shard"))]
        if other:
            raise ValueError(
                f"parameter {name} lies on a device mesh with the dimension {other[0]!r}, which is "
                "not data parallel: pass data_parallel_group" + _ASK
            )


@dataclass
class _Entry(Generic[T]):
    identity: tuple[object, ...]
    storages: tuple[torch_compat.StorageRef, ...]
    value: T
    replayed: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether the memory of its tensors is still theirs."""
        return not any(storage.expired() for storage in self.storages)


class ReplayLedger(Generic[T]):
    """Remember what each forward was keyed with, so that a recompute can be given the same.

    torch.utils.checkpoint around a compiled module calls its forward again during the backward,
    with the tensors of the first call: same memory, same shape. That is what a call is found by.
    """

    def __init__(self, capacity: int = 1024):
        self._entries: list[_Entry[T]] = []
        self._capacity = capacity

    def record(self, scope: object, tensors: Iterable[torch.Tensor], value: T) -> None:
        """Remember `value` for a forward of `scope` (any hashable) on these input tensors."""
        tensors = list(tensors)
        entry = _Entry(
            (scope, *map(_identity, tensors)),
            tuple(torch_compat.StorageRef(t) for t in tensors),
            value,
        )
        self._entries.append(entry)
        if len(self._entries) > self._capacity:
            alive = [e for e in self._entries if e.is_alive]
            self._entries = alive[-self._capacity // 2 :]

    def find(self, scope: object, tensors: Iterable[torch.Tensor]) -> T:
        """Return the value of the forward that a recompute on these tensors repeats.

        Raises:   RuntimeError when no forward, or two with different values, could be meant.
        """
        identity = (scope, *map(_identity, tensors))
        alive = [e for e in self._entries if e.identity == identity and e.is_alive]
        fresh = [e for e in alive if not e.replayed] or alive[-1:]
        if not fresh or not all(_same(e.value, fresh[0].value) for e in fresh):
            found = "several forwards" if fresh else "no forward"
            raise RuntimeError(
                f"a compiled model was run during a backward and {found} of it could be the one "
                "that is being recomputed, so its dropout masks are unknown. Call "
                "set_step(step, first_sample) before each forward and give each forward its own "
                "input tensors, or checkpoint inside the model (torch.utils.checkpoint in its "
                "forward), where the graph recomputes with the same masks by construction."
            )
        for entry in fresh:
            entry.replayed = True
        return fresh[-1].value


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a, b)
    return a == b


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
