"""The default first_sample of a forward: which samples of the global batch this rank holds."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_ASK = (
    "; call set_step(step, first_sample) before each training forward to say which samples of the "
    "global batch it holds"
)
# Batch sizes that all ranks have been seen to agree on, per model and process group.
_agreed: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()


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
