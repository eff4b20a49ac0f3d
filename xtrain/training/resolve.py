"""What preset, device and number of ranks decide where the configuration leaves it open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xtrain.config import ConfigError, RunConfig
from xtrain.data.sources import HF_PREFIX
from xtrain.data.tokenizer import names_file

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
    train, model = config.train, config.model
    preset = model.preset if model.preset != "auto" else "124m" if cuda else "small"
    defaults = PRESET_DEFAULTS[preset]
    batch_size = train.batch_size or _multiple(defaults["batch_size"], train.micro_batch_size or 1)
    micro = train.micro_batch_size or _largest_divisor(
        batch_size // world_size, defaults.get("micro_batch_size", batch_size)
    )
    if batch_size % (micro * world_size):
        raise ConfigError(
            f"train.batch_size must be a multiple of train.micro_batch_size x ranks = {micro} x "
            f"{world_size}, got {batch_size}"
        )
    steps = train.steps or defaults["steps"]
    warmup, learning_rate = config.optim.warmup_steps, config.optim.learning_rate
    seq_len = train.seq_len or min(defaults["seq_len"], model.max_seq_len or defaults["seq_len"])
    dtype, deterministic = config.run.dtype, config.run.deterministic
    interval = config.checkpoint.interval
    if warmup is None:
        warmup = min((config.optim.schedule_steps or steps) // 10, 1000)
    if dtype == "auto":
        dtype = "bf16" if cuda and bf16 else "fp32"
    return config.override(
        {
            "model.preset": preset,
            "train.seq_len": seq_len,
            "train.batch_size": batch_size,
            "train.micro_batch_size": micro,
            "train.steps": steps,
            "train.eval_interval": _default(train.eval_interval, defaults["eval_interval"]),
            "checkpoint.interval": _default(interval, defaults["checkpoint_interval"]),
            "optim.learning_rate": learning_rate or defaults["learning_rate"],
            "optim.warmup_steps": warmup,
            "run.device": device,
            "run.dtype": dtype,
            "run.deterministic": _default(deterministic, not cuda),
        }
    )


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


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _multiple(size: int, of: int) -> int:
    return max(size // of, 1) * of


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(max(min(number, at_most), 1), 0, -1) if number % d == 0)
