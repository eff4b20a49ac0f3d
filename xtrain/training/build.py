"""From a configuration to the parts of a run: device, data, model, optimiser, saved state."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

import xtrain
from xtrain import model as models
from xtrain import passes
from xtrain.compiler import CompiledModel
from xtrain.config import ConfigError, ModelSection, RunConfig
from xtrain.data import Batches, Corpus, open_corpus
from xtrain.metrics import check_fits
from xtrain.settings import unknown

VOCAB_MULTIPLE = 64  # rows of embedding and head: whole tiles for the matrix units
WEIGHT_BYTES = 16  # a parameter in fp32 with its gradient and AdamW's two moments
_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "head_dim", "ffn_hidden", "max_seq_len")


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


def open_data(config: RunConfig, tokenizer: str) -> tuple[Corpus, Batches, Batches | None]:
    """Return the corpus, its training batches and, unless there are none, its validation windows.

    tokenizer: to read in place of data.tokenizer: the run's own copy of it.
    Raises: DataError for everything that is wrong with the data.
    """
    data, train = config.data, config.train
    assert train.seq_len and train.batch_size and train.micro_batch_size
    corpus = open_corpus(
        list(data.paths) or None,
        tokenizer=tokenizer,
        field=data.field,
        errors=data.errors,
        cache_dir=Path(data.cache_dir) if data.cache_dir else None,
    )
    training, validation = corpus.split(val_fraction=data.val_fraction, seq_len=train.seq_len)
    batches = Batches(training, seq_len=train.seq_len, batch_size=train.batch_size, seed=train.seed)
    if not validation.size or not train.eval_interval:
        return corpus, batches, None
    # always the same windows, in the same order, so that validation losses compare
    val = Batches(validation, seq_len=train.seq_len, batch_size=train.batch_size, seed=0)
    return corpus, batches, val


def model_config(config: RunConfig, vocab_size: int) -> models.Config:
    """Return the model's own configuration; vocab_size is the tokenizer's.

    Raises: ConfigError naming the field of [model] that does not fit.
    """
    section = config.model
    values = {item.name: getattr(section, item.name) for item in fields(ModelSection)}
    del values["preset"]
    overrides = {name: value for name, value in values.items() if value is not None}
    overrides.setdefault("vocab_size", -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    longest = models.Config.preset(section.preset).max_seq_len
    if config.train.seq_len is not None and config.train.seq_len > longest:
        # the preset's is a limit on positions, which no weight depends on
        overrides.setdefault("max_seq_len", config.train.seq_len)
    try:
        shape = models.Config.preset(section.preset, **overrides)
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


def build_model(
    config: RunConfig, shape: models.Config
) -> tuple[models.Transformer, CompiledModel]:
    """Return the plain model on its device, and the same model behind xtrain.compile.

    The weights are drawn on the CPU: one seed gives one model on every device.
    """
    run = config.run
    torch.manual_seed(config.train.seed)
    model = models.Transformer(shape).to(run.device)
    compiled = xtrain.compile(
        model,
        dropout=config.model.dropout,
        seed=config.train.seed,
        backend="inductor" if run.compile else "eager",
        kernels=run.kernels,
        verify=run.verify,
        disable_passes=run.disable_passes,
        dump_graphs=run.dump_graphs or None,
    )
    return model, compiled


def check_pass_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError for the name of a pass that there is not."""
    try:
        passes.order((), disabled=names)
    except ValueError:
        wrong = next(name for name in names if name not in passes.PASSES)
        raise ConfigError(unknown("pass", wrong, passes.PASSES, "run.disable_passes")) from None


def autocast(config: RunConfig) -> Callable[[], AbstractContextManager]:
    """Return what makes the context of a forward: bf16 activations, or nothing for fp32."""
    if config.run.dtype == "fp32":
        return nullcontext
    kind = torch.device(config.run.device).type
    return lambda: torch.autocast(kind, dtype=torch.bfloat16)


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators of the CPU and of the run's device.

    Nothing of xtrain draws from them after the weights; what a user adds may.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Put back what rng_states returned; a run that changes its device keeps the CPU's alone."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
