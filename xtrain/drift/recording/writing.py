"""Writing a record: a folder that is complete or absent, and what is kept of each forward.

The folder lies beside its name until everything is there. Every recording holds a lock on it, which
ends with its process. A process id would say less: it may be another's by now, or one of another
machine or container.

A forward computes B prompts at once, each cut or padded to the same length. A record is by prompt,
so that runs of other batch sizes compare: of each tensor a prompt owns its part of the leading
dimension (B, or a multiple of it such as B * T or B * heads), without the padding.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtrain.drift.recording.record_format import (
    FORMAT,
    MAX_DIMS,
    OURS,
    VERSION,
    Columns,
    Formula,
    OpKey,
    Result,
)
from xtrain.drift.recording.tensors import (
    NUM_NAN,
    OF_TORCH,
    TensorWriter,
    file_hash,
    fingerprint,
    hash_bits,
    same_nan,
    write_json,
    writing,
)
from xtrain.drift.settings import DriftError
from xtrain.files import try_lock

SMALL = 4096  # numbers of a result that is kept whole
ROOM = 4 << 20  # bytes of such results in all steps of a prompt
NOTHING = np.empty(0, np.uint8)

Table = tuple[tuple[OpKey, ...], tuple[Formula, ...] | None]  # None: of blocks

# --- the folder ----------------------------------------------------------------------------------


class RecordWriter:
    """Writes into `.NAME.tmp-PID` beside `path`, which takes that name when all is there."""

    def __init__(self, path: Path, *, overwrite: bool = False):
        """Make the folder anew, after those of recordings that are dead are gone."""
        self.path = path
        check_free(path, overwrite=overwrite)
        self.tables: dict[Table, int] = {}  # numbers of lists of ops; equal ones are kept once
        self.temp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with writing(path):
            remove_dead(path)
            self.temp.mkdir(parents=True)
            self._lock = os.open(self.temp, os.O_RDONLY)
        try_lock(self._lock)

    def close(self, contents: dict[str, Any]) -> None:
        """Write record.json and the manifest, and give the folder its name."""
        tables = [
            [
                [*key, *formula]
                for key, formula in zip(keys, formulas or [()] * len(keys), strict=True)
            ]
            for keys, formulas in self.tables
        ]
        record = {"format": FORMAT, "version": VERSION, **contents, "tables": tables}
        write_json(self.temp / "record.json", record)
        files = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}
            for path in sorted(self.temp.iterdir())
        }
        manifest = {"format": FORMAT, "version": VERSION, "files": files}
        write_json(self.temp / "manifest.json", manifest)
        with writing(self.path):
            old = self.temp.with_name(f"{self.temp.name}-old")
            if self.path.exists():
                os.rename(self.path, old)  # to remove it first would take a moment with neither
            os.rename(self.temp, self.path)
            shutil.rmtree(old, ignore_errors=True)
        os.close(self._lock)

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.temp, ignore_errors=True)
        os.close(self._lock)


def remove_dead(target: Path) -> None:
    """Remove the folders for a record of this name that no process is writing into."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.tmp-(\d+)(-old)?")
    try:
        beside = list(target.parent.iterdir())
    except OSError:  # not there yet, or nobody may look: nothing to remove
        return
    for path in beside:
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        try:
            folder = os.open(path, os.O_RDONLY)
        except OSError:  # somebody else's, or gone by now
            continue
        is_ours = try_lock(folder)
        # where the file system has no locks, this process's own name is still its own
        if is_ours or is_ours is None and match[1] == str(os.getpid()):
            shutil.rmtree(path, ignore_errors=True)
        os.close(folder)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise DriftError if a record may not be written to path."""
    if not path.exists():
        return
    if not overwrite:
        raise DriftError(f"{path} exists; choose another name, or --overwrite a record")
    # A checkpoint has a manifest.json too.
    if not (path / "record.json").is_file() or not (path / "manifest.json").is_file():
        raise DriftError(f"{path} exists; it is no record and stays")
    names = {p.name for p in path.iterdir()} - {"manifest.json"}
    if others := sorted(name for name in names if OURS.fullmatch(name) is None):
        raise DriftError(
            f"{path} holds {others[0]!r}, which is no part of a record and would be lost; move it "
            "elsewhere, or choose another name"
        )


class CaseWriter:
    """The files of one prompt; the arrays of a step go to the disk with the step."""

    def __init__(self, writer: RecordWriter, number: int, *, values: bool):
        self.writer, self.number = writer, number
        self.arrays = TensorWriter(writer.temp / f"case_{number:04d}.safetensors")
        path = writer.temp / f"values_{number:04d}.safetensors"
        self.values = TensorWriter(path) if values else None
        self.steps: list[dict[str, Any]] = []
        self.room = ROOM
        self.small: list[tuple[int, NDArray]] = []  # of the step under way: row, bits

    @property
    def prefix(self) -> str:
        """What the names of the step under way start with."""
        return f"step_{len(self.steps):04d}"

    def add_value(self, index: int, bits: NDArray, dtype: str) -> None:
        """Keep the whole tensor of an op of the step under way, if it is small or all are kept."""
        if self.values is not None:
            self.values.add(f"{self.prefix}/{index:05d}", bits, dtype)
        elif bits.size <= SMALL and bits.ndim <= MAX_DIMS and bits.nbytes <= self.room:
            self.room -= bits.nbytes
            self.small.append((index, bits.reshape(-1).view(np.uint8).copy()))

    def add_columns(self, kind: str, table: Table, rows: Sequence[Sequence[Any]]) -> int:
        """Write what is known of the "ops" or "blocks" of the step; return the table's number."""
        values = Columns.of(rows)
        for item in fields(Columns):
            name, array = f"{self.prefix}/{kind}/{item.name}", getattr(values, item.name)
            self.arrays.add(name, array, item.metadata["dtype"])
        return self.writer.tables.setdefault(table, len(self.writer.tables))

    def add_step(self, step: dict[str, Any], logits: NDArray, dtype: str) -> None:
        """End the step under way: its readable part, its logits [positions, V]."""
        rows, bits = [row for row, _ in self.small], [bits for _, bits in self.small]
        self.arrays.add(f"{self.prefix}/small/rows", np.array(rows, np.int64), "I64")
        self.arrays.add(f"{self.prefix}/small/bits", np.concatenate([*bits, NOTHING]), "U8")
        self.arrays.add(f"{self.prefix}/logits", logits, dtype)
        self.small = []
        self.steps.append(step)

    def close(self, text: str | None) -> None:
        """Finish the prompt."""
        self.arrays.close()
        if self.values is not None:
            self.values.close()
        contents = {"text": text, "steps": self.steps}
        write_json(self.writer.temp / f"case_{self.number:04d}.json", contents)


# --- what is kept of a forward --------------------------------------------------------------------


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
    lengths: tuple[int, ...]  # real tokens of each row that is recorded, batch or fewer
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
            # Queries and keys both: scores are [.., T, T]. Where a weight happens to have the size
            # of the sequence, the first such dimension alone: [T, D] with D = T.
            axes = [axis for axis, size in enumerate(bits.shape) if size == self.length]
            index = [slice(None)] * bits.ndim
            for axis in axes[:1] if self.length in self.weight_sizes else axes:
                index[axis] = slice(self.lengths[row])
            bits = bits[tuple(index)]
        return np.asarray(bits, order="C")  # a number stays one: ascontiguousarray adds an axis


class Collector:
    """Takes the results of ops and blocks of one forward and writes them as one step per prompt."""

    def __init__(self, layout: Layout, writers: Sequence[CaseWriter], positions: Sequence[slice]):
        """Prepare; positions: of each writer's prompt, where its logits are kept."""
        self.layout, self.writers, self.positions = layout, writers, positions
        self.split = layout.batch > 1 or layout.padded
        self.keys: dict[str, list[OpKey]] = {"ops": [], "blocks": []}
        self.formulas: list[Formula] = []  # of the ops
        self.makers = [item.metadata["of"] for item in fields(Columns)]
        self.rows: dict[str, list[list[Any]]] = {k: [[] for _ in writers] for k in self.keys}

    def add_op(
        self, path: str, op: str, tensor: Tensor, operands: Sequence[int] = (), arguments: str = ""
    ) -> int:
        """Take the result of an op; the tensor may change afterwards. Return its number."""
        self._add("ops", path, op, tensor)
        self.formulas.append(Formula(tuple(operands), arguments))
        return len(self.formulas) - 1

    def add_block(self, path: str, tensor: Tensor) -> None:
        """Take the output of a block; its rows at the positions go to the disk at once."""
        number = len(self.keys["blocks"])
        bits, dtype = self._add("blocks", path, "output", tensor)
        by_position = bits.ndim == 3 and bits.shape[0] == self.layout.batch  # [B, T, D]
        for row, writer in enumerate(self.writers):
            kept = bits[row, self.positions[row]] if by_position else np.empty((0, 0), bits.dtype)
            writer.arrays.add(f"{writer.prefix}/rows/{number:04d}", kept, dtype)

    def _add(self, kind: str, path: str, op: str, tensor: Tensor) -> tuple[NDArray, str]:
        bits, dtype = to_bits(tensor)
        index = len(self.keys[kind])
        self.keys[kind].append(OpKey(path, op, dtype))
        parts = [
            self.layout.part(bits, row) if self.split else bits for row in range(len(self.writers))
        ]
        marks = [fingerprint(part, dtype) for part in parts]
        whole = marks[0].hash  # the whole tensor is the prompt's
        if self.split:
            strange = any(mark.statistics[NUM_NAN] for mark in marks)
            whole = hash_bits(same_nan(bits.reshape(-1), dtype) if strange else bits)
        for row, (writer, part, mark) in enumerate(zip(self.writers, parts, marks, strict=True)):
            result = Result(part, mark, whole, bits.shape)
            self.rows[kind][row].append([of(result) for of in self.makers])
            if kind == "ops":
                writer.add_value(index, part, dtype)
        return bits, dtype

    def write(self, steps: Sequence[dict], logits: Tensor) -> None:
        """Write the forward: a step per prompt, with the logits [B, T, V] of its positions."""
        bits, dtype = to_bits(logits)
        for row, (writer, step) in enumerate(zip(self.writers, steps, strict=True)):
            for kind, keys in self.keys.items():
                table = tuple(keys), tuple(self.formulas) if kind == "ops" else None
                step[f"{kind}_table"] = writer.add_columns(kind, table, self.rows[kind][row])
            writer.add_step(step, bits[row, self.positions[row]], dtype)
