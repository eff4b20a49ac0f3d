"""The configuration of a training run: frozen sections, TOML files, `section.key=value` overrides.

Every field states its default, meaning and unit in one place; the same text becomes the comment
beside the field in a run's `config.toml`. None means "chosen when the run starts", by the preset,
the device or the data; a run's own `config.toml` holds what was chosen.

No torch here: the command line answers --help and rejects a wrong value without importing it. The
shape of the model is checked by `xtrain.model.Config`, beside the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from xtrain.files import shown, toml_file, toml_value, why
from xtrain.rng import SEED_RANGE
from xtrain.settings import (
    ConfigError,
    Settings,
    closest,
    flags,
    kinds_of,
    option,
    type_hints,
    unknown,
)

_ON_OFF = {"action": argparse.BooleanOptionalAction}  # --compile, --no-compile
PRESETS = ("tiny", "small", "124m", "350m", "1b", "8b")  # those of xtrain.model


@dataclass(frozen=True, kw_only=True)
class ModelSection(Settings):
    """The model: a preset of xtrain.model and what differs from it."""

    section_name = "model"
    preset: str = option(
        "auto",
        f"size of the model: {', '.join(PRESETS)}; auto: small on CPU, 124m on CUDA",
        choices=("auto", *PRESETS),
        flag={},
    )
    vocab_size: int | None = option(
        None, "rows of the embedding; none: the tokenizer's, up to a multiple of 64", at_least=1
    )
    dim: int | None = option(None, "width of the residual stream; none: the preset's", at_least=1)
    n_layers: int | None = option(None, "number of blocks; none: the preset's", at_least=1)
    n_heads: int | None = option(None, "query heads; none: the preset's", at_least=1)
    n_kv_heads: int | None = option(None, "key and value heads; none: the preset's", at_least=1)
    head_dim: int | None = option(None, "width of a head; none: the preset's", at_least=1)
    ffn_hidden: int | None = option(None, "width of SwiGLU; none: the preset's", at_least=1)
    max_seq_len: int | None = option(
        None, "longest sequence; none: the preset's, or train.seq_len", unit="tokens", at_least=1
    )
    rope_base: float | None = option(None, "base of the rotary frequencies", above=0)
    norm_eps: float | None = option(None, "added to the mean square in RMSNorm", above=0)
    tie_embeddings: bool | None = option(None, "the head uses the embedding's tensor")
    recompute: str | int = option(
        "none",
        "activations computed again in backward: none, full, or the first N layers",
        flag={"metavar": "R"},
    )
    dropout: float = option(
        0.0,
        "probability of dropping, at every residual branch",
        at_least=0,
        at_most=1,
        flag={"metavar": "P"},
    )


@dataclass(frozen=True, kw_only=True)
class DataSection(Settings):
    """What is read, and how it becomes tokens."""

    section_name = "data"
    paths: tuple[str, ...] = option(
        (),
        "text files, folders, globs, .jsonl, .parquet, .bin shards or hf:NAME; none: the source of "
        "Python's standard library",
        flag={"name": "data", "nargs": "+", "action": "extend", "metavar": "PATH"},
    )
    tokenizer: str = option(
        "byte", "byte, bpe:N (trained on the data) or a tokenizer.json", flag={"metavar": "T"}
    )
    field: str = option(
        "text", "the column or key that holds the text in .parquet and .jsonl", flag={}
    )
    errors: str = option(
        "strict",
        "what is not UTF-8: strict stops, replace goes on",
        choices=("strict", "replace"),
        flag={},
    )
    cache_dir: str = option("", "where tokens are cached; empty: the user's cache folder")
    val_fraction: float = option(
        0.05, "share of the tokens kept for validation", at_least=0, at_most=0.5
    )


@dataclass(frozen=True, kw_only=True)
class TrainSection(Settings):
    """How long and on how much at a time; evaluation and text samples."""

    section_name = "train"
    steps: int | None = option(
        None, "optimiser steps; none: by the preset", at_least=1, flag={"metavar": "N"}
    )
    seq_len: int | None = option(
        None, "length of a sequence; none: by the preset", unit="tokens", at_least=1
    )
    batch_size: int | None = option(
        None,
        "per optimiser step, over all ranks; none: by the preset",
        unit="sequences",
        at_least=1,
    )
    micro_batch_size: int | None = option(
        None,
        "per forward on one rank; fewer than the batch: gradients are accumulated",
        unit="sequences",
        at_least=1,
    )
    seed: int = option(
        0,
        "of the initial weights, the order of data, dropout and text samples",
        at_least=SEED_RANGE[0],
        at_most=SEED_RANGE[1],
    )
    eval_interval: int | None = option(
        None,
        "between validations, the last step always; 0: never; none: by the preset",
        unit="steps",
        at_least=0,
    )
    eval_batches: int = option(
        8,
        "of train.batch_size sequences each in one validation, or all there are: the same ones "
        "every time, whatever micro_batch_size is",
        unit="batches",
        at_least=1,
    )
    log_interval: int = option(
        10, "between printed lines when the output is no terminal", unit="steps", at_least=1
    )
    sample_tokens: int = option(
        120, "length of the text sample before and after; 0: none", unit="tokens", at_least=0
    )
    sample_prompt: str = option("", "start of the text samples; empty: from the validation data")
    sample_temperature: float = option(0.8, "of the text samples; 0: greedy", at_least=0)
    sample_top_k: int = option(50, "candidates per token of the samples; 0: all", at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimSection(Settings):
    """AdamW and its schedule."""

    section_name = "optim"
    learning_rate: float | None = option(None, "the peak; none: by the preset", above=0)
    min_learning_rate: float = option(0.0, "at the end of the schedule", at_least=0)
    schedule: str = option(
        "cosine",
        "after the warm-up; wsd: constant, then linear",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    warmup_steps: int | None = option(
        None, "linear warm-up; none: a tenth of the run, 1000 at most", unit="steps", at_least=0
    )
    schedule_steps: int | None = option(
        None,
        "length of the schedule, at whose end min_learning_rate is reached and held; none: "
        "train.steps, so that --resume with other --steps stretches it",
        unit="steps",
        at_least=1,
    )
    decay_fraction: float = option(
        0.2, "last part of a wsd schedule in which it falls", at_least=0, at_most=1
    )
    beta1: float = option(0.9, "decay of the mean of gradients", at_least=0, below=1)
    beta2: float = option(0.95, "decay of the mean of their squares", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the second mean", above=0)
    weight_decay: float = option(0.1, "of matrices; norms and embeddings have none", at_least=0)
    grad_clip: float = option(1.0, "largest norm of all gradients; 0: no clipping", at_least=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(Settings):
    """When a checkpoint is written and how many are kept."""

    section_name = "checkpoint"
    interval: int | None = option(
        None,
        "between checkpoints, the last step always; 0: only the last; none: by the preset",
        unit="steps",
        at_least=0,
    )
    keep_last: int = option(2, "how many are kept", at_least=1)


@dataclass(frozen=True, kw_only=True)
class RunSection(Settings):
    """Where the run lies and how it is executed."""

    section_name = "run"
    name: str = option("", "folder in run.folder; empty: the preset's name and a number", flag={})
    folder: str = option("runs", "where the folders of runs lie")
    device: str = option(
        "auto", "auto, cpu, cuda or cuda:N; auto: cuda where there is one", flag={}
    )
    dtype: str = option(
        "auto",
        "of activations, by autocast; weights stay fp32; auto: bf16 on CUDA",
        choices=("auto", "fp32", "bf16"),
        flag={},
    )
    deterministic: bool | None = option(
        None, "bitwise equal repeats; none: on CPU only", flag=_ON_OFF
    )
    compile: bool = option(
        False, "inductor, else the same passes run with backend eager", flag=_ON_OFF
    )
    compile_optimizer: bool = option(False, "the optimiser's step through torch.compile too")
    kernels: str = option(
        "auto", "xtrain's own ops: auto, triton or off", choices=("auto", "triton", "off")
    )
    disable_passes: tuple[str, ...] = option(
        (),
        "names of passes that do not run",
        flag={"name": "disable-pass", "action": "append", "metavar": "NAME"},
    )
    verify: bool = option(
        False,
        "the first step also without swaps and in fp64, compared; takes that time and memory",
        flag=_ON_OFF,
    )
    dump_graphs: str = option(
        "", "folder for the graphs before and after each pass; empty: none", flag={"metavar": "DIR"}
    )
    drift_every: int = option(
        0,
        "between fingerprints of inputs, ops, gradients and weights; 0: none",
        unit="steps",
        at_least=0,
        flag={"metavar": "N"},
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections of a training run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()

    def __post_init__(self) -> None:
        _check_together(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
        """Return the configuration of nested tables; unknown sections and keys are refused."""
        sections = {}
        for name, table in values.items():
            if name not in SECTIONS:
                raise ConfigError(unknown("section", name, SECTIONS, source))
            if not isinstance(table, Mapping):
                raise ConfigError(
                    f"{name} must be a section ([{name}]) in {source}, got {shown(table)}"
                )
            for key in table:
                if f"{name}.{key}" not in names():
                    raise ConfigError(_unknown_key(f"{name}.{key}", source))
            sections[name] = SECTIONS[name](**table)
        return cls(**sections)

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Read a TOML file; ConfigError names the file and the place."""
        try:
            values = toml_file(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {why(error)}") from None
        values.pop("versions", None)  # what a run's own config.toml adds for its reader
        return cls.from_dict(values, source=str(path))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return nested tables, tuples as lists, fields that are None left out."""
        return {
            name: {
                item.name: list(value) if isinstance(value, tuple) else value
                for item in fields(SECTIONS[name])
                if (value := getattr(getattr(self, name), item.name)) is not None
            }
            for name in SECTIONS
        }

    def flat(self) -> dict[str, Any]:
        """Return the same as "section.key" -> value."""
        tables = self.to_dict().items()
        return {f"{name}.{key}": value for name, table in tables for key, value in table.items()}

    def to_toml(self) -> str:
        """Return a TOML document with each field's meaning and unit beside it."""
        lines = []
        for name, table in self.to_dict().items():
            lines.append(f"[{name}]")
            metadata = {item.name: item.metadata for item in fields(SECTIONS[name])}
            for key, value in table.items():
                # one entry per line, lists too: a comment can then follow it
                text = " ".join(tomli_w.dumps({key: value}).split("\n")).rstrip(" ")
                unit = metadata[key].get("unit")
                comment = metadata[key]["meaning"] + (f" [{unit}]" if unit else "")
                lines.append(f"{text}  # {comment}")
            lines.append("")
        return "\n".join(lines)

    def override(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with some fields, named "section.key", replaced."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = _split_name(name)
            changes.setdefault(section, {})[key] = value
        sections = {name: replace(getattr(self, name), **table) for name, table in changes.items()}
        return replace(self, **sections)


SECTIONS: dict[str, Any] = {item.name: type(item.default) for item in fields(RunConfig)}
# of python -m xtrain.train
FLAGS = flags(*SECTIONS.values(), named_only=True)


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return ("section.key", value) for `section.key=value`.

    The value is read as TOML (`true`, `1e-3`, `["a", "b"]`, `"text"`); where the field takes text,
    quotes may be left out, and `none` clears a field that may be empty.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"--set takes section.key=value, got {shown(text)}")
    section, key = _split_name(name)
    kinds = kinds_of(type_hints(SECTIONS[section])[key])
    if value == "none" and type(None) in kinds:
        return name, None
    parsed = toml_value(value)
    if str in kinds and not isinstance(parsed, tuple(kinds)):
        parsed = value
    if tuple in kinds and isinstance(parsed, str):
        parsed = [part for part in parsed.split(",") if part]
    return name, parsed


def _split_name(name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    if name not in names():
        raise ConfigError(_unknown_key(name, "--set"))
    return section, key


def names() -> list[str]:
    """Return "section.key" of every field."""
    return [f"{part}.{item.name}" for part in SECTIONS for item in fields(SECTIONS[part])]


def _unknown_key(name: str, source: str) -> str:
    """Return the message for a key that there is not: the closest of all sections, or its own's."""
    section, dot, key = name.rpartition(".")
    what = f"key {shown(name)}"
    close = closest(name, names())
    if source != "--set":  # a file, where the key stands below its section
        what = f"key in [{section}] {shown(key)}"
        close = [other.removeprefix(f"{section}.") for other in close]
    if close:
        advice = f"did you mean {' or '.join(close)}?"
    elif section in SECTIONS:
        keys = [item.name for item in fields(SECTIONS[section])]
        advice = f"keys of [{section}]: {', '.join(keys)}"
    elif dot:
        return unknown("section", section, SECTIONS, source)
    else:
        advice = f"write section.key=value; sections: {', '.join(SECTIONS)}"
    return f"unknown {what} in {source}; {advice}"


def _check_together(config: RunConfig) -> None:
    """Refuse values that are fine alone and contradict each other."""
    model, train, optim = config.model, config.train, config.optim
    if model.max_seq_len is not None and train.seq_len is not None:
        if train.seq_len > model.max_seq_len:
            raise ConfigError(
                f"train.seq_len {train.seq_len} is longer than model.max_seq_len "
                f"{model.max_seq_len}; shorten it or raise model.max_seq_len"
            )
    if train.batch_size is not None and train.micro_batch_size is not None:
        if train.batch_size % train.micro_batch_size:
            raise ConfigError(
                f"train.micro_batch_size must divide train.batch_size, got "
                f"{train.micro_batch_size} and {train.batch_size}"
            )
    if optim.learning_rate is not None and optim.min_learning_rate > optim.learning_rate:
        raise ConfigError(
            f"optim.min_learning_rate must be at most optim.learning_rate "
            f"{optim.learning_rate}, got {optim.min_learning_rate}"
        )
    length = optim.schedule_steps or train.steps
    if optim.warmup_steps is not None and length is not None and optim.warmup_steps > length:
        raise ConfigError(
            f"optim.warmup_steps {optim.warmup_steps} is longer than the schedule's {length} "
            "steps; shorten it or raise train.steps"
        )
    if isinstance(model.recompute, str) and model.recompute not in ("none", "full"):
        raise ConfigError(
            f"model.recompute must be none, full or a number of layers, got {model.recompute!r}"
        )
