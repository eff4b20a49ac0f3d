"""From the data's global batches to what one rank feeds its model, one step ahead.

A step's global batch is a function of (data seed, step) alone (`xtrain.data.Batches`). It is cut
here, and only here, by rank and into micro-batches; each piece carries the index of its first
sample within the global batch, the key that keeps a sample's dropout mask the same under any cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from xtrain.data.batches import Batches
from xtrain.model import IGNORE_INDEX


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones."""

    rank: int = 0
    world_size: int = 1


ONE = Ranks()


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes: inputs and targets [B, T], int64."""

    first_sample: int  # index of row 0 within the step's global batch
    inputs: Tensor
    targets: Tensor
    num_targets: int  # targets that count, in this micro-batch

    def to(self, device: torch.device) -> MicroBatch:
        """Return it on a device; from pinned memory the copy does not wait."""
        inputs, targets = (t.to(device, non_blocking=True) for t in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


@dataclass(frozen=True)
class StepBatch:
    """All that one rank computes in one optimiser step."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
    num_targets: int  # targets that count, in the global batch over all ranks

    def to(self, device: torch.device) -> StepBatch:
        """Return it on a device."""
        return replace(self, micro_batches=tuple(m.to(device) for m in self.micro_batches))


def cut_batch(
    step: int,
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    micro_batch_size: int,
    ranks: Ranks = ONE,
    pin: bool = False,
) -> StepBatch:
    """Return this rank's micro-batches of a global batch, on the CPU.

    Args:   inputs, targets: [B, T], any integer dtype.
            micro_batch_size: rows of one forward; divides B / world_size.
            pin: into page-locked memory, from which copies to the GPU overlap with its work.
    Raises: ValueError when the batch cannot be cut evenly.
    """
    local, rest = divmod(len(inputs), ranks.world_size)
    if rest or local % micro_batch_size:
        raise ValueError(
            f"a batch of {len(inputs)} sequences cannot be cut into micro-batches of "
            f"{micro_batch_size} on {ranks.world_size} ranks"
        )
    start = ranks.rank * local
    counts = (targets != IGNORE_INDEX).sum(axis=1)
    micro_batches = []
    for first in range(start, start + local, micro_batch_size):
        rows = slice(first, first + micro_batch_size)
        pair = (_to_tensor(inputs[rows], pin), _to_tensor(targets[rows], pin))
        micro_batches.append(MicroBatch(first, *pair, int(counts[rows].sum())))
    return StepBatch(step, tuple(micro_batches), int(counts.sum()))


@dataclass(frozen=True)
class Loader:
    """Iterates over the StepBatches of steps first, first + 1, ... last - 1, on the device.

    While a step is computed, a thread reads and cuts the next one. What it has read ahead is lost
    without harm when the loop stops: the next run asks for its steps by number.
    """

    batches: Batches
    micro_batch_size: int
    device: torch.device
    ranks: Ranks = ONE

    def steps(self, first: int, last: int) -> Iterator[StepBatch]:
        """Yield the batches of steps first .. last - 1."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending = pool.submit(self._read, first) if first < last else None
            for step in range(first, last):
                assert pending is not None
                batch = pending.result()
                pending = pool.submit(self._read, step + 1) if step + 1 < last else None
                yield batch.to(self.device)

    def _read(self, step: int) -> StepBatch:
        return cut_batch(
            step,
            *self.batches.batch(step),
            micro_batch_size=self.micro_batch_size,
            ranks=self.ranks,
            pin=self.device.type == "cuda",
        )


def in_order(
    batches: Batches, count: int, *, micro_batch_size: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Yield samples 0 .. count - 1 on one rank, as for a validation; every micro-batch is full.

    The last rows may be too many: they keep the shape, which is compiled, and do not count.
    """
    for first in range(0, count, micro_batch_size):
        inputs, targets = batches.samples(first, micro_batch_size)
        targets[count - first :] = IGNORE_INDEX
        cut = cut_batch(first, inputs, targets, micro_batch_size=micro_batch_size)
        yield cut.micro_batches[0].to(device)


def _to_tensor(array: np.ndarray, pin: bool) -> Tensor:
    tensor = torch.from_numpy(array.astype(np.int64))  # a copy: the source may be a memory map
    return tensor.pin_memory() if pin else tensor
