"""Hashes of a model's weights: as they are, and rounded to the dtypes that another record may have.

A model that was cast has other bits, and the same weights: bits in bf16 are compared with those
that fp32 rounds to. No rounding says anything about what it takes away, so that both hashes are of
every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from xtrain.drift.collect import to_bits
from xtrain.drift.storage import file_hash
from xtrain.drift.values import DTYPES, ROUNDED_TO, same_nan, samples_of

PIECE = 1 << 18  # elements that are hashed and rounded while they are in the second-level cache


def hash_weights(model: nn.Module) -> list[dict[str, Any]]:
    """Return name, shape, dtype, hashes and samples of every parameter and buffer, tied ones once.

    Buffers that a checkpoint does not hold are computed by the environment: those are results, and
    recorded as such.
    """
    found = []
    for name, tensor in saved_weights(model):
        name = name.replace("_orig_mod.", "")  # the wrapper of torch.compile is none of the model
        found.append({"name": name, "shape": list(tensor.shape), **_marks(tensor)})
    return found


def saved_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and saved buffer by name, tied ones once: a record's order."""
    return [*model.named_parameters(), *_buffers(model, persistent=True)]


def _marks(tensor: Tensor) -> dict[str, Any]:
    """Return dtype, hash of the bits, hashes of them rounded to other dtypes, and samples.

    "rounded" has the weight's own dtype as well where it holds a NaN, whose bits a cast may change.
    """
    tensor = tensor.detach().cpu()  # once
    bits, dtype = to_bits(tensor)
    own: Any = xxhash.xxh3_128()
    marks = {name: xxhash.xxh3_128() for name in ROUNDED_TO.get(dtype, ())}
    for piece in _pieces(tensor):
        strange = marks and math.isnan(float(piece.sum()))
        if strange and dtype not in marks:
            marks[dtype] = own.copy()
        own.update(_bytes(to_bits(piece)[0]))
        for name, digest in marks.items():
            rounded, _ = to_bits(piece.to(getattr(torch, DTYPES[name][1])))
            digest.update(_bytes(same_nan(rounded, name) if strange else rounded))
    return {
        "dtype": dtype,
        "xxh3_128": own.hexdigest(),
        "rounded": {name: digest.hexdigest() for name, digest in marks.items()},
        "samples": [json_number(value) for value in samples_of(bits.reshape(-1), dtype)],
    }


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    yield from tensor.resolve_neg().contiguous().view(-1).split(PIECE)


def _bytes(bits: np.ndarray) -> memoryview:
    return bits.view(np.uint8).data


def placement(model: nn.Module) -> dict[str, list[str]]:
    """Return how the weights lie in memory, which chooses kernels and changes no bit of a weight.

    Named are those that do not lie as usual: at a multiple of 64, row by row, in memory of their
    own. Weights that are mapped from a file lie where its header ends.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, t) for name, t in tensors if t.layout == torch.strided and not t.is_meta]
    files = _mapped_files()
    return {
        "weights.address_mod_64": [
            f"{name} {t.data_ptr() % 64}" for name, t in tensors if t.data_ptr() % 64
        ],
        "weights.strides": [
            f"{name} {list(t.stride())}" for name, t in tensors if not t.is_contiguous()
        ],
        "weights.mapped_from_file": [
            name
            for name, t in tensors
            if t.device.type == "cpu" and any(a <= t.data_ptr() < b for a, b in files)
        ],
    }


def _mapped_files() -> list[tuple[int, int]]:
    """Return the addresses at which this process has files of weights in memory."""
    path = Path("/proc/self/maps")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    kept = [line.split(maxsplit=5) for line in lines]
    ends = (".safetensors", ".bin", ".pt", ".pth")
    found = [
        fields[0].split("-") for fields in kept if len(fields) > 5 and fields[5].endswith(ends)
    ]
    return [(int(start, 16), int(end, 16)) for start, end in found]


def header_sizes(folder: Path) -> list[str]:
    """Return the length of each safetensors header: weights that are mapped lie behind it."""
    return [
        f"{path.name} {int.from_bytes(path.open('rb').read(8), 'little')}"
        for path in sorted(folder.glob("*.safetensors"))
    ]


def checkpoint_hash(folder: Path) -> str | None:
    """Return a hash of the files that hold a Hugging Face folder's weights, None if there are none.

    It ties records whose dtypes are no roundings of each other (bf16 and fp16) to one source.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    marks = "".join(file_hash(path) for path in files).encode()
    return xxhash.xxh3_128_hexdigest(marks) if files else None


def json_number(value: float) -> float | str | None:
    """Return what JSON holds: text for what is not finite."""
    return float(value) if np.isfinite(value) else str(float(value))


def derived_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that the model computes for itself, such as tables of frequencies."""
    return _buffers(model, persistent=False)


def _buffers(model: nn.Module, *, persistent: bool) -> list[tuple[str, Tensor]]:
    saved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return [
        (name, buffer) for name, buffer in model.named_buffers() if (name in saved) is persistent
    ]


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers the parameters hold."""
    return sum(parameter.numel() for parameter in model.parameters())


def weight_sizes(model: nn.Module) -> frozenset[int]:
    """Return every size that a dimension of a parameter has."""
    return frozenset(size for parameter in model.parameters() for size in parameter.shape)
