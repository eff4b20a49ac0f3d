"""What a configuration leaves open, decided: by device and preset, by the data, by the folder."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import xtrain
from xtrain import model as models
from xtrain import passes
from xtrain.config import ConfigError, RunConfig
from xtrain.data.sources import HF_PREFIX
from xtrain.data.tokenizer import names_file
from xtrain.metrics import check_fits
from xtrain.settings import unknown

VOCAB_MULTIPLE = 64  # rows of embedding and head: whole tiles for the matrix units
WEIGHT_BYTES = 16  # a parameter in fp32 with its gradient and AdamW's two moments
_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "head_dim", "ffn_hidden", "max_seq_len")

# What a preset does when nothing else is said. The CPU sizes end within minutes on two cores. The
# larger ones up to 1b fit a GPU of 80 GB (less memory: train.micro_batch_size); their steps are
# short beside a validation or the writing of gigabytes.
_CPU = dict(eval_interval=50, checkpoint_interval=100)
_GPU = dict(eval_interval=250, checkpoint_interval=1000, steps=2000)
PRESET_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": dict(_CPU, seq_len=64, batch_size=8, steps=200, learning_rate=1e-2),
    "small": dict(_CPU, seq_len=256, batch_size=8, steps=250, learning_rate=2e-3),
    "124m": dict(_GPU, seq_len=1024, batch_size=32, learning_rate=1e-3),
    "350m": dict(_GPU, seq_len=1024, batch_size=32, learning_rate=6e-4),
    "1b": dict(_GPU, seq_len=2048, batch_size=16, micro_batch_size=8, learning_rate=4e-4),
    "8b": dict(_GPU, seq_len=2048, batch_size=8, micro_batch_size=1, learning_rate=2e-4),
}


def resolve(config: RunConfig, *, device: str, bf16: bool, world_size: int = 1) -> RunConfig:
    """Return config with everything chosen that the device and the preset decide.

    Args:     device: where the run goes, "cpu" or "cuda:0", in place of run.device.
              bf16: whether that device computes in bf16 at full speed.
              world_size: ranks that share train.batch_size.
    Raises:   ConfigError where the chosen values contradict each other.
    """
    cuda = device.startswith("cuda")
    train, model, optim = config.train, config.model, config.optim
    preset = model.preset if model.preset != "auto" else "124m" if cuda else "small"
    defaults = PRESET_DEFAULTS[preset]
    multiple = train.micro_batch_size or 1
    batch_size = train.batch_size or max(defaults["batch_size"] // multiple, 1) * multiple
    micro = train.micro_batch_size or _largest_divisor(
        batch_size // world_size, defaults.get("micro_batch_size", batch_size)
    )
    if batch_size % (micro * world_size):
        raise ConfigError(
            f"train.batch_size must be a multiple of train.micro_batch_size x ranks = {micro} x "
            f"{world_size}, got {batch_size}"
        )
    schedule_steps = optim.schedule_steps or train.steps or defaults["steps"]
    left_open = {
        "train.seq_len": min(defaults["seq_len"], model.max_seq_len or defaults["seq_len"]),
        "train.batch_size": batch_size,
        "train.micro_batch_size": micro,
        "train.steps": defaults["steps"],
        "train.eval_interval": defaults["eval_interval"],
        "checkpoint.interval": defaults["checkpoint_interval"],
        "optim.learning_rate": defaults["learning_rate"],
        "optim.warmup_steps": min(schedule_steps // 10, 1000),
        "run.deterministic": not cuda,
    }
    decided = {"model.preset": preset, "run.device": device}
    if config.run.dtype == "auto":
        decided["run.dtype"] = "bf16" if cuda and bf16 else "fp32"
    return config.override({**left_open, **config.flat(), **decided})


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(max(min(number, at_most), 1), 0, -1) if number % d == 0)


def choose_device(name: str) -> tuple[str, bool]:
    """Return (device, whether it computes in bf16 at full speed).

    Raises: ConfigError for a device that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return "cpu", False
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"run.device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if int(number or 0) >= count:
        raise ConfigError(
            f"run.device is {name}, but torch {torch.__version__} finds {count} CUDA devices; use "
            "--device cpu or install a torch that matches the driver"
        )
    device = f"cuda:{int(number or 0)}"
    return device, torch.cuda.get_device_capability(device) >= (8, 0)


def set_deterministic(enabled: bool, device: str) -> None:
    """Have torch choose algorithms that repeat bit for bit, or the fastest."""
    if enabled and device.startswith("cuda"):
        # cuBLAS reads it when its first handle is made; with it matmuls on one stream repeat
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    # Filling fresh memory would hide nothing here (no op reads it) and costs a write per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not enabled


def versions(device: str) -> dict[str, str]:
    """Return what, beside the configuration, decides a run's numbers."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    hardware = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        hardware = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        hardware += (
            f", {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        )
    return {
        "xtrain": xtrain.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "hardware": hardware,
    }


# --- the model -----------------------------------------------------------------------------------


def model_config(config: RunConfig, vocab_size: int) -> models.Config:
    """Return the model's own configuration; vocab_size is the tokenizer's.

    Raises: ConfigError naming the field of [model] that does not fit.
    """
    overrides = config.to_dict()["model"]
    preset = overrides.pop("preset")
    overrides.setdefault("vocab_size", -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    longest = models.Config.preset(preset).max_seq_len
    if config.train.seq_len is not None and config.train.seq_len > longest:
        # the preset's is a limit on positions, which no weight depends on
        overrides.setdefault("max_seq_len", config.train.seq_len)
    try:
        shape = models.Config.preset(preset, **overrides)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    train = config.train
    check_size(
        shape,
        config.run.device.replace("auto", "cpu"),
        batch_size=train.batch_size,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
    )
    return shape


def check_size(
    shape: models.Config,
    device: str,
    *,
    batch_size: int | None,
    micro_batch_size: int | None,
    seq_len: int | None,
) -> None:
    """Refuse what could not be held even if nothing else were: before hours, or a machine's end.

    Of the activations only the residual stream counts: all others may be computed in pieces.
    Raises: ConfigError with the bytes that it would take.
    """
    tables = 4 * shape.max_seq_len * shape.head_dim  # cos and sin of rope
    sizes = ", ".join(f"{name} {getattr(shape, name)}" for name in _SIZES)
    parameters = shape.num_parameters()
    check_fits(
        WEIGHT_BYTES * parameters + tables,
        f"the model with {sizes} has {parameters:,} parameters, whose training",
        device,
    )
    if seq_len and batch_size and micro_batch_size:
        tokens = 2 * 8 * batch_size * seq_len  # inputs and targets, int64
        stream = 4 * micro_batch_size * seq_len * shape.dim
        what = f"a step of batch size {batch_size} ({micro_batch_size} at once), {seq_len} tokens,"
        check_fits(tokens + stream, what, device)


def with_model(config: RunConfig, shape: models.Config) -> RunConfig:
    """Return config with every field of [model] written out."""
    return config.override({f"model.{name}": value for name, value in shape.to_dict().items()})


def check_pass_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError for the name of a pass that there is not."""
    try:
        passes.order((), disabled=names)
    except ValueError:
        wrong = next(name for name in names if name not in passes.PASSES)
        raise ConfigError(unknown("pass", wrong, passes.PASSES, "run.disable_passes")) from None


# --- paths ---------------------------------------------------------------------------------------


def with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    """Return config with its paths absolute, those that are not being read from the folder base."""
    data, run = config.data, config.run
    tokenizer = data.tokenizer
    return config.override(
        {
            "data.paths": [_absolute_data(name, base) for name in data.paths],
            "data.tokenizer": _absolute(tokenizer, base) if names_file(tokenizer) else tokenizer,
            "data.cache_dir": data.cache_dir and _absolute(data.cache_dir, base),
            "run.folder": _absolute(run.folder, base),
            "run.dump_graphs": run.dump_graphs and _absolute(run.dump_graphs, base),
        }
    )


def start_folder(saved: RunConfig, run: Path) -> Path:
    """Return the folder from which the relative paths in a run's config.toml are to be read.

    Where run.folder is absolute, as every run now leaves it, none of them is relative. An older run
    lies in run.folder below the folder in which it was started.
    """
    folder, parent = Path(saved.run.folder), Path(os.path.abspath(run)).parent
    depth = len(parent.parts) - len(folder.parts)
    if not folder.is_absolute() and parent.parts[depth:] == folder.parts:
        return Path(*parent.parts[:depth])
    return Path.cwd()


def _absolute_data(name: str, base: Path) -> str:
    if not name.startswith(HF_PREFIX):
        return _absolute(name, base)
    path, *split = name.removeprefix(HF_PREFIX).split(":")  # of the hub, unless there is a folder
    local = _absolute(path, base)
    return HF_PREFIX + ":".join([local, *split]) if path and os.path.isdir(local) else name


def _absolute(name: str, base: Path) -> str:
    path = os.path.join(base, os.path.expanduser(name))
    normal = os.path.normpath(path)
    # a link before a "..": taking both out would name another place
    return normal if os.path.realpath(normal) == os.path.realpath(path) else path
