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

from xtrain.drift.errors import DriftError
from xtrain.drift.recording.format import (
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

try:
    import fcntl
except ImportError:  # no locks: nothing of others is ever removed
    fcntl = None  # type: ignore[assignment]

SMALL = 4096  # numbers of a result that is kept whole
ROOM = 4 << 20  # bytes of such results in all steps of a prompt
NOTHING = np.empty(0, np.uint8)

Table = tuple[tuple[OpKey, ...], tuple[Formula, ...] | None]  # None: of blocks

# --- the folder ----------------------------------------------------------------------------------

FREE, HELD, UNKNOWN = "free", "held", "unknown"  # whether a folder can be locked


class TemporaryFolder:
    """`.NAME.tmp-PID` beside NAME; made anew, after those of recordings that are dead are gone."""

    def __init__(self, target: Path):
        """Make it. Raises: OSError."""
        self.path = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        self._lock: int | None = None
        remove_dead(target)
        self.path.mkdir(parents=True)
        self._lock, _ = _try_lock(self.path)

    def release(self) -> None:
        """Give up the lock: the folder has its name, or is gone."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


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
        lock, state = _try_lock(path)
        # where the file system has no locks, this process's own name is still its own
        if state == FREE or state == UNKNOWN and match[1] == str(os.getpid()):
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _try_lock(path: Path) -> tuple[int | None, str]:
    """Return (descriptor that holds the lock until it is closed, FREE), or (None, why not)."""
    if fcntl is None:
        return None, UNKNOWN
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        return None, HELD if isinstance(error, BlockingIOError) else UNKNOWN
    return descriptor, FREE


class RecordWriter:
    """Writes into a folder beside `path`, which takes that name when everything is there."""

    def __init__(self, path: Path, *, overwrite: bool = False):
        self.path = path
        check_free(path, overwrite=overwrite)
        self.tables: dict[Table, int] = {}
        with writing(path):
            self.folder = TemporaryFolder(path)
        self.temp = self.folder.path

    def table(self, table: Table) -> int:
        """Return the number of a list of ops; equal lists are kept once."""
        return self.tables.setdefault(table, len(self.tables))

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
        self.folder.release()

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.temp, ignore_errors=True)
        self.folder.release()


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise DriftError if a record may not be written to path."""
    if not path.exists():
        return
    if not overwrite:
        raise DriftError(f"{path} exists; choose another name, or --overwrite a record")
    # A checkpoint has a manifest.json too.
    if not (path / "record.json").is_file() or not (path / "manifest.json").is_file():
        raise DriftError(f"{path} exists; it is no record and stays")
    others = [p.name for p in sorted(path.iterdir()) if not _is_ours(p.name)]
    if others:
        raise DriftError(
            f"{path} holds {others[0]!r}, which is no part of a record and would be lost; move it "
            "elsewhere, or choose another name"
        )


def _is_ours(name: str) -> bool:
    return name == "manifest.json" or OURS.fullmatch(name) is not None


class CaseWriter:
    """The files of one prompt; the arrays of a step go to the disk with the step."""

    def __init__(self, writer: RecordWriter, number: int, *, values: bool):
        self.writer = writer
        self.name = f"case_{number:04d}"
        self.arrays = TensorWriter(writer.temp / f"{self.name}.safetensors")
        self.values = None
        if values:
            self.values = TensorWriter(writer.temp / f"values_{number:04d}.safetensors")
        self.steps: list[dict[str, Any]] = []
        self.room = ROOM
        self.small: list[tuple[int, NDArray]] = []  # of the step under way: row, bits

    def add_value(self, index: int, bits: NDArray, dtype: str) -> None:
        """Keep the whole tensor of an op of the step under way, if it is small or all are kept."""
        if self.values is not None:
            self.values.add(f"step_{len(self.steps):04d}/{index:05d}", bits, dtype)
        elif bits.size <= SMALL and bits.ndim <= MAX_DIMS and bits.nbytes <= self.room:
            self.room -= bits.nbytes
            self.small.append((index, bits.reshape(-1).view(np.uint8).copy()))

    def add_rows(self, block: int, bits: NDArray, dtype: str) -> None:
        """Keep the rows of a block's output, in the step under way."""
        self.arrays.add(f"step_{len(self.steps):04d}/rows/{block:04d}", bits, dtype)

    def add_step(
        self,
        step: dict[str, Any],
        columns: dict[str, tuple[Table, Columns]],
        logits: tuple[NDArray, str],
    ) -> None:
        """Write one forward: "ops" and "blocks" in columns, logits [positions, V]."""
        prefix = f"step_{len(self.steps):04d}"
        for kind, (table, values) in columns.items():
            step[f"{kind}_table"] = self.writer.table(table)
            for item in fields(Columns):
                name, array = f"{prefix}/{kind}/{item.name}", getattr(values, item.name)
                self.arrays.add(name, array, item.metadata["dtype"])
        rows, bits = [row for row, _ in self.small], [bits for _, bits in self.small]
        self.arrays.add(f"{prefix}/small/rows", np.array(rows, np.int64), "I64")
        self.arrays.add(f"{prefix}/small/bits", np.concatenate([*bits, NOTHING]), "U8")
        self.small = []
        self.arrays.add(f"{prefix}/logits", *logits)
        self.steps.append(step)

    def close(self, text: str | None) -> None:
        """Finish the prompt."""
        self.arrays.close()
        if self.values is not None:
            self.values.close()
        contents = {"text": text, "steps": self.steps}
        write_json(self.writer.temp / f"{self.name}.json", contents)


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
        self.makers = Columns.makers()
        self.rows: dict[str, list[list[Any]]] = {k: [[] for _ in writers] for k in self.keys}

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
        for row, writer in enumerate(self.writers):
            columns = {
                kind: (
                    (tuple(self.keys[kind]), tuple(self.formulas) if kind == "ops" else None),
                    Columns.of(self.rows[kind][row]),
                )
                for kind in self.keys
            }
            writer.add_step(steps[row], columns, (bits[row, self.positions[row]], dtype))

    def _block_rows(self, bits: NDArray, row: int) -> NDArray:
        if bits.ndim == 3 and bits.shape[0] == self.layout.batch:
            return bits[row, self.positions[row]]
        return np.empty((0, 0), bits.dtype)  # no [B, T, D]: nothing to say by position
