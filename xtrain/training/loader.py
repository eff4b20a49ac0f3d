"""From the data's global batches to what one rank feeds its model, one step ahead.

A step's global batch is a function of (data seed, step) alone (`xtrain.data.Batches`). It is cut
here, and only here, by rank and into micro-batches; each piece carries the index of its first
sample within the global batch, the key that keeps a sample's dropout mask the same under any cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that does not count


class BatchSource(Protocol):
    """What the loader needs of xtrain.data.Batches."""

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, targets), each [B, T], of one step's global batch."""
        ...


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes: inputs and targets [B, T], int64, on the device."""

    first_sample: int  # index of row 0 within the step's global batch
    inputs: Tensor
    targets: Tensor
    num_targets: int  # targets that count, in this micro-batch


@dataclass(frozen=True)
class StepBatch:
    """All that one rank computes in one optimiser step."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
    num_targets: int  # targets that count, in the global batch over all ranks


def cut_batch(
    step: int,
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    micro_batch_size: int,
    ranks: Ranks | None = None,
    pin: bool = False,
) -> StepBatch:
    """Return this rank's micro-batches of a global batch, on the CPU.

    Args:   inputs, targets: [B, T], any integer dtype.
            micro_batch_size: rows of one forward; divides B / world_size.
            pin: into page-locked memory, from which copies to the GPU overlap with its work.
    Raises: ValueError when the batch cannot be cut evenly.
    """
    ranks = ranks or Ranks()
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
        micro_batches.append(
            MicroBatch(
                first_sample=first,
                inputs=_to_tensor(inputs[rows], pin),
                targets=_to_tensor(targets[rows], pin),
                num_targets=int(counts[rows].sum()),
            )
        )
    return StepBatch(step, tuple(micro_batches), int(counts.sum()))


class Loader:
    """Iterates over the StepBatches of steps first, first + 1, ... last - 1, on the device.

    While a step is computed, a thread reads and cuts the next one. What it has read ahead is lost
    without harm when the loop stops: the next run asks for its steps by number.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        micro_batch_size: int,
        device: torch.device,
        ranks: Ranks | None = None,
    ):
        self.source = source
        self.micro_batch_size = micro_batch_size
        self.device = device
        self.ranks = ranks or Ranks()

    def steps(self, first: int, last: int) -> Iterator[StepBatch]:
        """Yield the batches of steps first .. last - 1."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending = pool.submit(self._read, first) if first < last else None
            for step in range(first, last):
                assert pending is not None
                batch = pending.result()
                pending = pool.submit(self._read, step + 1) if step + 1 < last else None
                yield to_device(batch, self.device)

    def _read(self, step: int) -> StepBatch:
        inputs, targets = self.source.batch(step)
        return cut_batch(
            step,
            inputs,
            targets,
            micro_batch_size=self.micro_batch_size,
            ranks=self.ranks,
            pin=self.device.type == "cuda",
        )


def to_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """Return the batch on device; from pinned memory the copy does not wait."""
    if device.type == "cpu":
        return batch
    moved = tuple(
        MicroBatch(
            first_sample=micro.first_sample,
            inputs=micro.inputs.to(device, non_blocking=True),
            targets=micro.targets.to(device, non_blocking=True),
            num_targets=micro.num_targets,
        )
        for micro in batch.micro_batches
    )
    return StepBatch(batch.step, moved, batch.num_targets)


def _to_tensor(array: np.ndarray, pin: bool) -> Tensor:
    tensor = torch.from_numpy(array.astype(np.int64))  # a copy: the source may be a memory map
    return tensor.pin_memory() if pin else tensor
