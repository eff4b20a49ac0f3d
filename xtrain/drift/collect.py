"""From the tensors of one forward to the rows of its prompts.

A forward computes B prompts at once, each cut or padded to the same length. A record is by prompt,
so that runs of other batch sizes compare: of each tensor a prompt owns its part of the leading
dimension (B, or a multiple of it such as B * T or B * heads), without the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtrain.drift.record_arrays import MAX_DIMS
from xtrain.drift.record_folder import CaseWriter, Columns, Formula, OpKey
from xtrain.drift.values import (
    NUM_SAMPLES,
    OF_TORCH,
    STATISTICS,
    Fingerprint,
    fingerprint,
    hash_bits,
    same_nan,
)

NUM_NAN = STATISTICS.index("num_nan")


def to_bits(tensor: Tensor) -> tuple[NDArray, str]:
    """Return a tensor as (contiguous array of bits, name of its dtype in safetensors)."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg().cpu().contiguous()
    name = OF_TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if name is None:
        raise TypeError(f"no record holds {tensor.dtype}")
    if name == "BF16":
        tensor = tensor.view(torch.int16)
    elif name.startswith("F8"):
        tensor = tensor.view(torch.uint8)
    array = tensor.numpy()
    return (array.view(np.uint16) if name == "BF16" else array), name


@dataclass(frozen=True)
class Layout:
    """Which part of a forward's tensors belongs to which prompt."""

    batch: int  # rows of the forward
    length: int  # tokens of each row, padding included
    lengths: tuple[
        int, ...
    ]  # real tokens of each row that is recorded; fewer than batch rows: rest
    weight_sizes: frozenset[int] = frozenset()  # a size that weights have may not be the sequence

    @property
    def padded(self) -> bool:
        """Whether some row has tokens that are none of its prompt."""
        return any(length != self.length for length in self.lengths)

    def part(self, bits: NDArray, row: int) -> NDArray:
        """Return the part of row's prompt; all of it where the leading dimension is no batch."""
        if self.batch > 1 and bits.ndim and bits.shape[0] and bits.shape[0] % self.batch == 0:
            size = bits.shape[0] // self.batch
            bits = bits[row * size : (row + 1) * size]
        if self.padded:
            bits = self._without_padding(bits, self.lengths[row])
        return np.asarray(bits, order="C")  # a number stays one: ascontiguousarray adds an axis

    def _without_padding(self, bits: NDArray, length: int) -> NDArray:
        # Queries and keys both: scores are [.., T, T]. Where a weight happens to have the size of
        # the sequence, the first such dimension alone: [T, D] with D = T.
        axes = [axis for axis, size in enumerate(bits.shape) if size == self.length]
        if self.length in self.weight_sizes:
            axes = axes[:1]
        index = [slice(None)] * bits.ndim
        for axis in axes:
            index[axis] = slice(length)
        return bits[tuple(index)]


@dataclass
class _Rows:
    """Columns of one prompt, growing."""

    fingerprints: list[Fingerprint] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def columns(self, whole: list[tuple[bytes, tuple[int, ...]]] | None) -> Columns:
        hashes = [item.hash for item in self.fingerprints]
        # with a batch of one the whole tensor is the prompt's, unless padding was cut off
        whole_hashes = hashes if whole is None else [item[0] for item in whole]
        whole_shapes = self.shapes if whole is None else [item[1] for item in whole]
        return Columns(
            hash=_hash_array(hashes),
            whole=_hash_array(whole_hashes),
            shape=_shape_array(self.shapes),
            whole_shape=_shape_array(whole_shapes),
            statistics=_stack([item.statistics for item in self.fingerprints], len(STATISTICS)),
            samples=_stack([item.samples for item in self.fingerprints], NUM_SAMPLES),
        )


class Collector:
    """Takes the results of ops and blocks of one forward and writes them as one step per prompt."""

    def __init__(self, layout: Layout, writers: Sequence[CaseWriter], positions: Sequence[slice]):
        """Prepare; positions: of each writer's prompt, where its logits are kept."""
        self.layout = layout
        self.writers = writers
        self.positions = positions
        self.split = layout.batch > 1 or layout.padded
        self.keys: dict[str, list[OpKey]] = {"ops": [], "blocks": []}
        self.formulas: list[Formula] = []  # of the ops
        self.rows = {kind: [_Rows() for _ in writers] for kind in self.keys}
        self.whole: dict[str, list[tuple[bytes, tuple[int, ...]]]] = {"ops": [], "blocks": []}

    def add_op(
        self, path: str, op: str, tensor: Tensor, operands: Sequence[int] = (), arguments: str = ""
    ) -> int:
        """Take the result of an op; the tensor may change afterwards. Return its number."""
        self._add("ops", path, op, tensor)
        self.formulas.append(Formula(tuple(operands), arguments))
        return len(self.formulas) - 1

    def add_block(self, path: str, tensor: Tensor) -> None:
        """Take the output of a block; its rows go to the disk at once."""
        number = len(self.keys["blocks"])
        bits, dtype = self._add("blocks", path, "output", tensor)
        for row, writer in enumerate(self.writers):
            writer.add_rows(number, self._block_rows(bits, row), dtype)

    def _add(self, kind: str, path: str, op: str, tensor: Tensor) -> tuple[NDArray, str]:
        bits, dtype = to_bits(tensor)
        index = len(self.keys[kind])
        self.keys[kind].append(OpKey(path, op, dtype))
        strange = False
        for row, writer in enumerate(self.writers):
            part = self.layout.part(bits, row) if self.split else bits
            rows = self.rows[kind][row]
            rows.fingerprints.append(fingerprint(part, dtype))
            strange |= bool(rows.fingerprints[-1].statistics[NUM_NAN])
            rows.shapes.append(part.shape)
            if kind == "ops":
                writer.add_value(index, part, dtype)
        if self.split:
            comparable = same_nan(bits.reshape(-1), dtype) if strange else bits
            self.whole[kind].append((hash_bits(comparable), bits.shape))
        return bits, dtype

    def write(self, steps: Sequence[dict], logits: Tensor) -> None:
        """Write the forward: a step per prompt, with the logits [B, T, V] of its positions."""
        bits, dtype = to_bits(logits)
        for row, writer in enumerate(self.writers):
            columns = {
                kind: (
                    (tuple(self.keys[kind]), tuple(self.formulas) if kind == "ops" else None),
                    self.rows[kind][row].columns(self.whole[kind] if self.split else None),
                )
                for kind in self.keys
            }
            writer.add_step(steps[row], columns, (bits[row, self.positions[row]], dtype))

    def _block_rows(self, bits: NDArray, row: int) -> NDArray:
        if bits.ndim == 3 and bits.shape[0] == self.layout.batch:
            return bits[row, self.positions[row]]
        return np.empty((0, 0), bits.dtype)  # no [B, T, D]: nothing to say by position


def _hash_array(hashes: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)


def _shape_array(shapes: list[tuple[int, ...]]) -> NDArray[np.int64]:
    result = np.full((len(shapes), MAX_DIMS), -1, np.int64)
    for row, shape in enumerate(shapes):
        result[row, : len(shape)] = shape[:MAX_DIMS]
    return result


def _stack(rows: list[NDArray[np.float64]], width: int) -> NDArray[np.float64]:
    return np.stack(rows) if rows else np.empty((0, width))
