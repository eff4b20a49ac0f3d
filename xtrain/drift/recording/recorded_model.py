"""What a recording needs of a model: itself in its dtype, prompts, hashes of its weights.

xtrain.subject says what MODEL on the command line means. A preset's weights are drawn by NumPy's
raw bit stream in integers: torch.randn itself changes with the instruction set, and two records
must start from equal bits.

Weights are hashed as they are, and rounded to the dtypes that another record may have. A model that
was cast has other bits, and the same weights: bits in bf16 are compared with those that fp32 rounds
to. No rounding says anything about what it takes away, so that both hashes are of every number.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from xtrain.drift.recording.tensors import (
    DTYPES,
    ROUNDED_TO,
    file_hash,
    json_number,
    same_nan,
    samples_of,
)
from xtrain.drift.recording.writing import to_bits
from xtrain.drift.settings import DriftError
from xtrain.files import file_bytes, json_value, why

CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class RecordedModel:
    """A model to record, with what its prompts need."""

    model: nn.Module
    description: dict[str, Any]  # how to get it again
    vocab_size: int  # ids that a tokenizer knows; the head may have more rows
    max_length: int | None  # the longest sequence, None: unknown
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    weights: list[dict[str, Any]] = field(default_factory=list)  # before any cast
    file_headers: list[str] = field(default_factory=list)  # lengths; of a Hugging Face folder


def load(name: str, flags: argparse.Namespace) -> RecordedModel:
    """Return the model that `name` means, its weights hashed, then on its device in its dtype.

    Args:     flags: those of settings.FLAGS; used are seed, runs, dtype and device.
    Raises:   DriftError, ConfigError, DataError or CheckpointError when there is none, or it cannot
              be read.
    """
    from xtrain.config import PRESETS
    from xtrain.subject import kind_of

    named = Path(flags.runs) / name
    if name not in PRESETS and (named / "config.toml").is_file():
        name = str(named)
    kind = kind_of(name)
    if kind == "preset":
        found = _preset(name, flags.seed)
    elif kind == "run":
        found = _run(name)
    elif kind == "folder":
        found = _hugging_face(Path(name), flags.dtype)
    else:
        raise DriftError(f"{name} is a function; xtrain.drift.record takes the model that it makes")
    found.weights = hash_weights(found.model)
    cast = None if kind == "folder" else CASTS.get(flags.dtype)
    found.model.to(device=flags.device, dtype=cast).eval()
    return found


def _preset(name: str, seed: int) -> RecordedModel:
    from xtrain.data import load_tokenizer
    from xtrain.model import Config, Transformer

    config = Config.preset(name)

    class Undrawn(Transformer):  # numbers that would be overwritten take seconds to draw
        def reset_parameters(self) -> None:
            pass

    model: Transformer = Undrawn(config)
    model.__class__ = Transformer
    draw_weights(model, seed)
    description = {"kind": "preset", "name": name, "seed": seed}
    found = RecordedModel(model, description, config.vocab_size, config.max_seq_len)
    if name == "small":  # whose vocabulary is that of bytes
        tokenizer = load_tokenizer("byte")
        found.encode, found.decode = tokenizer.encode, tokenizer.decode
    return found


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Give matrices numbers of mean 0 and deviation 0.02, vectors ones; the same bits everywhere.

    A number is the sum of the four 16-bit parts of one raw 64-bit draw: near enough to a normal
    one, and made of integers alone until the last, exact, multiplication.
    """
    stream = np.random.PCG64(seed)
    scale = np.float32(0.02 / np.sqrt(4 / 12) / 65536)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        values = torch.empty(parameter.numel())
        for piece in values.split(1 << 20):
            parts = stream.random_raw(len(piece)).view(np.uint16).reshape(-1, 4)
            total = parts.astype(np.int32).sum(axis=1) - 2 * 65535
            piece.copy_(torch.from_numpy(total.astype(np.float32) * scale))
        parameter.copy_(values.view_as(parameter))


def _run(name: str) -> RecordedModel:
    from xtrain.generate import load_run
    from xtrain.subject import run_path
    from xtrain.training.run_folder import RunFolder

    run = RunFolder(run_path(name) or Path(name))
    model, tokenizer, step = load_run(run, "cpu")
    length: Any = model.config.max_seq_len  # type: ignore[union-attr]
    return RecordedModel(
        model,
        {"kind": "run", "name": run.name, "step": step},
        tokenizer.vocab_size,
        length,
        tokenizer.encode if not tokenizer.name.startswith("ids:") else None,
        tokenizer.decode,
    )


def _hugging_face(path: Path, dtype: str) -> RecordedModel:
    folder = path if path.is_dir() else path.parent
    try:
        import transformers
    except ImportError:
        raise DriftError(f"{folder} needs the package transformers; install it") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            # by the library: a later cast would also round tables that it keeps in fp32
            folder,
            local_files_only=True,
            dtype=CASTS.get(dtype, "auto"),
            output_loading_info=True,
        )
    except Exception as error:  # whatever the library finds wrong with the folder
        reason = " ".join(str(error).split())[:300]
        raise DriftError(f"cannot load {folder} as a causal language model: {reason}") from None
    model, report = loaded
    if lacking := [name for name, _ in model.named_parameters() if name in report["missing_keys"]]:
        weights = "1 weight" if len(lacking) == 1 else f"{len(lacking)} weights"
        raise DriftError(
            f"cannot record {folder}: its files lack {weights} of the model: {lacking[0]}; "
            "transformers would draw other numbers in each process"
        )
    config = model.config.get_text_config()
    description = {"kind": "hugging_face", "name": folder.name, "class": type(model).__name__}
    if dtype != "auto" and (checkpoint := checkpoint_hash(folder)) is not None:
        description["checkpoint"] = checkpoint  # what the cast may have taken away
    length = getattr(config, "max_position_embeddings", None)
    found = RecordedModel(model, description, config.vocab_size, length)
    found.file_headers = [  # weights that are mapped lie behind a header
        f"{file.name} {int.from_bytes(file.open('rb').read(8), 'little')}"
        for file in sorted(folder.glob("*.safetensors"))
    ]
    if (folder / "tokenizer.json").is_file():
        from xtrain.data import load_tokenizer

        tokenizer = load_tokenizer(folder / "tokenizer.json")
        known = tokenizer.vocab_size  # the head may choose an id that is none of its
        found.encode = tokenizer.encode
        found.decode = lambda ids: tokenizer.decode(i for i in ids if i < known)
    return found


# --- Prompts -------------------------------------------------------------------------------------

BUILT_IN = (
    "The sum of two floating-point numbers depends on",
    "def mean(values):\n    total = 0.0\n    for value in values:\n",
    "In the beginning",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "She opened the door, and behind it",
    "import torch\nimport torch.nn.functional as F\n",
    "To be, or not to be, that is",
    "A",
)


def prompts(found: RecordedModel, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return [{"tokens": ids, "text": text or None}].

    Those of the file --prompts: a .json of lists of ids, in others each line is one. Without it the
    built-in texts, or where no tokenizer is known --num-prompts of --prompt-length ids by --seed.
    """
    if flags.prompts is not None:
        listed = _from_file(Path(flags.prompts), found)
    elif found.encode is not None:
        listed = [{"tokens": found.encode(text), "text": text} for text in BUILT_IN]
    else:
        drawn = draw_tokens(flags.num_prompts, flags.prompt_length, found.vocab_size, flags.seed)
        listed = [{"tokens": ids, "text": None} for ids in drawn.tolist()]
    for number, prompt in enumerate(listed):
        tokens = prompt["tokens"]
        if not tokens or not all(type(t) is int and 0 <= t < found.vocab_size for t in tokens):
            raise DriftError(
                f"prompt {number} must be ids below {found.vocab_size}, at least one, got "
                f"{str(tokens)[:60]}"
            )
        if prompt["text"] is None and flags.prompts is not None and found.decode is not None:
            prompt["text"] = found.decode(tokens)
    return listed


def draw_tokens(count: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """Return [count, length] ids below vocab_size, the same everywhere."""
    raw = np.random.PCG64([seed, 1]).random_raw(count * length)
    return ((raw >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int64).reshape(count, length)


def _from_file(path: Path, found: RecordedModel) -> list[dict[str, Any]]:
    try:
        data = file_bytes(path, pipe=True)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise DriftError(f"cannot read the prompts {path}: {why(error)}") from None
    if path.suffix == ".json":
        try:
            lists = json_value(data)
            if not isinstance(lists, list) or not all(isinstance(ids, list) for ids in lists):
                raise ValueError("it holds something else")
        except (ValueError, TypeError) as error:
            raise DriftError(f"{path} must hold a list of lists of ids: {error}") from None
        listed: list[dict[str, Any]] = [{"tokens": ids, "text": None} for ids in lists]
    elif found.encode is None:
        raise DriftError(
            f"no tokenizer is known for this model; {path} must be a .json of lists of ids"
        )
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        listed = [{"tokens": found.encode(line), "text": line} for line in lines]
    if not listed:
        raise DriftError(f"{path} holds no prompt")
    return listed


# --- Weights -------------------------------------------------------------------------------------

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
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [*model.named_parameters(), *buffers]


def derived_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that the model computes for itself, such as tables of frequencies."""
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]


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


def checkpoint_hash(folder: Path) -> str | None:
    """Return a hash of the files that hold a Hugging Face folder's weights, None if there are none.

    It ties records whose dtypes are no roundings of each other (bf16 and fp16) to one source.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    marks = "".join(file_hash(path) for path in files).encode()
    return xxhash.xxh3_128_hexdigest(marks) if files else None
