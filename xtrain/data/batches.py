"""Batches as a pure function of (data seed, step, sample): any position in O(1), nothing replayed.

The corpus is cut into windows of T tokens: window k has inputs tokens[k T : k T + T] and, shifted
by one, targets tokens[k T + 1 : k T + T + 1]. Every token but the first is a target once an epoch;
the tokens after the last whole window are left out.

Samples are numbered through the whole run: sample i of step s is number g = s * batch_size + i; a
rank or a micro-batch that takes part of a batch takes part of its numbers. Epoch g // num_samples
visits window permute(g % num_samples), a permutation keyed by (data seed, epoch). A batch at the
seam of two epochs takes samples from both, so each window comes once an epoch at any batch size.

Letters: B batch, T sequence length.
"""

from __future__ import annotations

import math
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xtrain.data.errors import DataError
from xtrain.rng import site_seed, splitmix64

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]

_SITE = "data_order"  # keeps these seeds apart from those of dropout
_ROUNDS = 12


class Batches:
    """Shuffled windows of a 1-D array of token ids; holds no position and no random state."""

    def __init__(
        self, tokens: npt.NDArray[Any], *, seq_len: int, batch_size: int, seed: int
    ) -> None:
        """Cut tokens into windows.

        Args:     tokens: 1-D ids, usually a view of Corpus.tokens; not copied.
                  seq_len: T, tokens in a sample; each needs one token more, for its last target.
                  batch_size: B, samples in a step, over all ranks and micro-batches.
                  seed: the data seed; any int, taken mod 2^64.
        Raises:   DataError when tokens are too short for one sequence; ValueError for sizes < 1.
        """
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if index(value) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if tokens.size <= seq_len:
            raise DataError(
                f"the data hold {tokens.size} tokens, too short for one sequence: seq_len {seq_len}"
                f" needs {seq_len} + 1 tokens; use more data or a smaller seq_len"
            )
        self.tokens, self.seed = tokens, seed
        self.seq_len, self.batch_size = seq_len, batch_size
        self.num_samples = (tokens.size - 1) // seq_len
        self.num_left_out = tokens.size - (self.num_samples * seq_len + 1)

    @property
    def description(self) -> str:
        """One line: samples, their length, what is left out, steps in an epoch."""
        left_out = f", last {self.num_left_out} tokens left out" if self.num_left_out else ""
        return (
            f"{self.num_samples:,} samples of {self.seq_len} tokens{left_out};"
            f" {self.num_samples / self.batch_size:,.1f} steps of {self.batch_size} an epoch"
        )

    def batch(self, step: int) -> tuple[Int64, Int64]:
        """Return (inputs [B, T], targets [B, T]) of a step."""
        return self.samples(_count("step", step) * self.batch_size, self.batch_size)

    def ids(self, start: int, count: int) -> Int64:
        """Return the windows of the sample numbers start, ..., start + count - 1."""
        start, count = _count("start", start), _count("count", count)
        # Python ints, so that a sample number of any size is exact.
        epoch, position = divmod(start, self.num_samples)
        offsets = position + np.arange(count, dtype=np.int64)
        epochs, positions = np.divmod(offsets, self.num_samples)
        last = int(epochs[-1]) if count else -1
        keys = np.array([self._key(epoch + e) for e in range(last + 1)], dtype=np.uint64)
        order = permute(positions.astype(np.uint64), self.num_samples, keys[epochs])
        return order.astype(np.int64)

    def samples(self, start: int, count: int) -> tuple[Int64, Int64]:
        """Return (inputs [count, T], targets [count, T]) of consecutive sample numbers."""
        windows = self.ids(start, count)
        inputs = np.empty((count, self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, window in enumerate(windows):
            first = int(window) * self.seq_len
            inputs[row] = self.tokens[first : first + self.seq_len]
            targets[row] = self.tokens[first + 1 : first + self.seq_len + 1]
        return inputs, targets

    def _key(self, epoch: int) -> int:
        return site_seed(self.seed, epoch, 0, _SITE) % (1 << 64)


def permute(positions: Uint64, size: int, keys: Uint64) -> Uint64:
    """Return where a keyed permutation of range(size) sends each position, element by element.

    A number x of an a-by-b grid, a = ceil(sqrt(size)), b = ceil(size / a), is (x // b, x % b). Each
    round adds a hash of one coordinate to the other, modulo its size: a bijection of the grid. The
    grid has at most a - 1 numbers beyond size; a position sent there is sent on until it comes back
    (cycle walking), which keeps it a bijection of range(size) and rarely takes a second turn.

    Args:     positions: uint64 below size;  keys: uint64, one per position.
    Source:   Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (generalised Feistel
              network, cycle walking); round function SplitMix64 (Steele, Lea, Flood 2014).
    """
    columns = math.isqrt(size - 1) + 1 if size > 1 else 1  # a
    rows = -(-size // columns)  # b
    result = _rounds(positions, columns, rows, keys)
    while (outside := result >= size).any():
        result[outside] = _rounds(result[outside], columns, rows, keys[outside])
    return result


def _rounds(x: Uint64, columns: int, rows: int, keys: Uint64) -> Uint64:
    left, right = np.divmod(x, rows)
    for number in range(_ROUNDS):
        # Coordinates are below 2^32, so that number and coordinate never overlap in the key.
        round_keys = keys ^ (number << 56)
        if number % 2 == 0:
            left = (left + splitmix64(round_keys ^ right) % columns) % columns
        else:
            right = (right + splitmix64(round_keys ^ left) % rows) % rows
    return left * rows + right


def _count(name: str, value: int) -> int:
    value = index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def to_torch(
    arrays: tuple[npt.NDArray[Any], ...], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """Return arrays as tensors on device.

    CPU tensors share the arrays' memory. For CUDA they are copied from pinned memory without
    waiting, so that the copy overlaps with the step that runs.
    """
    import torch

    tensors = tuple(torch.from_numpy(array) for array in arrays)
    device = torch.device(device)
    if device.type == "cuda":
        return tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)
    return tuple(t.to(device) for t in tensors)
