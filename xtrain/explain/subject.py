"""MODEL on the command line -> a model, and the arguments of one training forward."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xtrain.config import RunConfig
from xtrain.explain.errors import ExplainError, kind_of, run_path
from xtrain.explain.shrink import num_layers, shrink_hugging_face, shrunk_preset
from xtrain.metrics import check_fits
from xtrain.model import PRESETS as SHAPES
from xtrain.model import Config, Transformer

# Above this many parameters a model is built with two layers, unless --layers says otherwise: what
# repeats in every layer is seen in two, and memory and compile time stay small.
MAX_PARAMETERS = 150_000_000
DEFAULT_LAYERS = 2
REFUSED_PARAMETERS = 2_000_000_000  # 8 GB


@dataclass
class Subject:
    """A model and one training forward of it. `title` names it, `facts` say how it was built,
    `options` with which keywords of `explain` it trains, `advice` what to change if the forward
    fails."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    title: str
    advice: str = ""
    facts: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def load(
    name: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    changes: dict[str, Any] | None = None,
    batch: int = 2,
    seq: int = 16,
) -> Subject:
    """Build what MODEL names; its weights are drawn, not loaded.

    Args:     name: a preset, a run (a name in runs/ or a path), a folder with a Hugging Face
              config.json, or module:function.
              layers, hidden: build it with fewer layers, narrower.
              changes: other fields of its configuration.
              batch, seq: of the inputs, where the function gives none.
    Raises:   ExplainError for what cannot be found, imported or built.
    """
    changes = changes or {}
    kind = kind_of(name)
    if kind == "preset":
        return _ours(SHAPES[name], f"preset {name}", layers, hidden, changes, batch, seq)
    if kind == "run":
        return _run(name, layers, hidden, changes, batch, seq)
    if kind == "folder":
        return _hugging_face(Path(name), layers, hidden, changes, batch, seq)
    if layers or hidden or changes:
        raise ExplainError("--layers, --hidden and --set change configurations, no function")
    return _from_function(name, batch, seq)


def _run(
    name: str, layers: int | None, hidden: int | None, changes: dict[str, Any], batch: int, seq: int
) -> Subject:
    """The model of a run, with the keywords of xtrain.compile that its trainer uses."""
    path = run_path(name)
    assert path is not None
    config = RunConfig.load(path / "config.toml")
    values = config.to_dict()["model"]
    preset = values.pop("preset")
    if preset in SHAPES:  # a config.toml that was written by hand may leave fields to it
        values = {**SHAPES[preset], **values}
    subject = _ours(values, f"run {path}", layers, hidden, changes, batch, seq)
    if not config.run.compile:
        subject.facts.append("trained without --compile: ops are not swapped")
    subject.options |= {
        "dropout": subject.model.config.dropout,  # type: ignore[union-attr]
        "kernels": config.run.kernels,
        "disable_passes": config.run.disable_passes,
        "backend": "aot_eager" if config.run.compile else "eager",
        "dtype": "bf16" if config.run.dtype == "bf16" else "fp32",
    }
    return subject


def _ours(
    values: dict[str, Any],
    title: str,
    layers: int | None,
    hidden: int | None,
    changes: dict[str, Any],
    batch: int,
    seq: int,
) -> Subject:
    """A Transformer called as the trainer calls it: without logits."""
    facts = []
    try:
        values = {**shrunk_preset(values, layers=layers, hidden=hidden), **changes}
        if layers is None and Config.from_dict(values).num_parameters() > MAX_PARAMETERS:
            facts.append(f"{DEFAULT_LAYERS} of {values['n_layers']} layers (--layers builds more)")
            values["n_layers"] = DEFAULT_LAYERS
        config = Config.from_dict(values)
    except ValueError as error:
        raise ExplainError(f"{title}: {error}") from None
    seq = min(seq, config.max_seq_len)
    count = config.num_parameters()
    tables = 4 * config.max_seq_len * config.head_dim
    check_fits(8 * count + tables, f"{title}: {count:,} parameters with their gradients", "cpu")
    check_fits(4 * batch * seq * config.dim, f"{title}: --batch {batch}, --seq {seq}", "cpu")
    tokens = _tokens(config.vocab_size, batch, seq)
    subject = Subject(Transformer(config), (tokens, tokens.clone()), {}, title, "", facts)
    subject.kwargs["return_logits"] = False
    if config.dropout:
        subject.options["dropout"] = config.dropout
    return subject


def _hugging_face(
    path: Path,
    layers: int | None,
    hidden: int | None,
    changes: dict[str, Any],
    batch: int,
    seq: int,
) -> Subject:
    folder = path if path.is_dir() else path.parent
    try:
        import transformers
    except ImportError:
        raise ExplainError(f"{folder} needs the package transformers; install it") from None
    transformers.logging.set_verbosity_error()
    facts = []
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        shrink_hugging_face(config, layers=layers, hidden=hidden)
        _change(config, changes)
        total = num_layers(config)
        if layers is None and total and total > DEFAULT_LAYERS and _is_large(config):
            shrink_hugging_face(config, layers=DEFAULT_LAYERS, hidden=None)
            facts.append(f"{DEFAULT_LAYERS} of {total} layers (--layers builds more)")
        facts += _computable_experts(config)
        _check_fits(config, layers, hidden)
        model = _class_of(config)._from_config(config)
    except ExplainError:
        raise
    except Exception as error:  # whatever the library finds wrong with the folder or the sizes
        raise ExplainError(f"cannot build {folder}: {_reason(error)}") from None
    title = f"{type(model).__name__} of {folder}"
    advice = "; --hidden knows the usual sizes, --set reaches the others" if hidden else ""
    return Subject(model, (), _inputs(model, folder, batch, seq), title, advice, facts)


def _change(config: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        owner = next((c for c in (config, config.get_text_config()) if hasattr(c, name)), None)
        if owner is None:
            raise ExplainError(f"--set: {type(config).__name__} has no field {name!r}")
        setattr(owner, name, value)


def _class_of(config: Any) -> Any:
    """The class that the configuration names, else the first that knows such configurations."""
    import transformers

    named = [getattr(transformers, n, None) for n in config.architectures or ()]
    if found := next((c for c in named if c is not None), None):
        return found
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ExplainError(f"transformers has no model for {type(config).__name__}")


def _computable_experts(config: Any) -> list[str]:
    """Compute experts by torch.bmm, unless the configuration says how: on a CPU, the default, a
    grouped product, cannot be compiled with its backward.
    """
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(getattr(text, name, None) for name in names) or text._experts_implementation:
        return []
    text._experts_implementation = config._experts_implementation = "batched_mm"
    return ["experts by batched_mm"]


def _is_large(config: Any) -> bool:
    return _count(config) > MAX_PARAMETERS


def _check_fits(config: Any, layers: int | None, hidden: int | None) -> None:
    """Refuse what would fill a machine by surprise; who names a size gets it."""
    if layers is None and hidden is None and (count := _count(config)) > REFUSED_PARAMETERS:
        raise ExplainError(
            f"{type(config).__name__}: {count / 1e9:.1f} G parameters even with few layers; "
            "--hidden 64 builds it narrower, --layers 2 as it is"
        )


def _count(config: Any) -> int:
    with torch.device("meta"):
        model = _class_of(config)._from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _inputs(model: Any, folder: Path, batch: int, seq: int) -> dict[str, torch.Tensor]:
    names = inspect.signature(model.forward).parameters
    config = model.config
    if model.main_input_name == "pixel_values":
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.zeros(batch, channels, size, size)}
    if "input_ids" not in names:
        raise ExplainError(
            f"{type(model).__name__} takes {model.main_input_name}, which is not made here; write "
            "a function that returns (model, inputs) and name it as module:function"
        )
    tokens = _tokens(config.get_text_config().vocab_size, batch, seq)
    inputs = {"input_ids": tokens}
    # a language model's labels are tokens; those of classifiers are not
    if "labels" in names and "Classification" not in type(model).__name__:
        inputs["labels"] = tokens.clone()  # one tensor given twice is one input to Dynamo
    if config.is_encoder_decoder and "labels" not in inputs:
        inputs["decoder_input_ids"] = tokens
    return inputs


def _from_function(name: str, batch: int, seq: int) -> Subject:
    result = imported(name)
    if not isinstance(result, nn.Module):
        try:
            result = result()
        except (Exception, SystemExit) as error:  # a script's main ends so
            raise ExplainError(f"{name}() fails: {_reason(error)}") from None
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        kind = type(result).__name__
        raise ExplainError(f"{name} must return an nn.Module, or (model, inputs); got {kind}")
    if inputs is None:
        inputs = _guessed(model, name, batch, seq)
    if isinstance(inputs, dict):
        return Subject(model, (), inputs, name)
    return Subject(
        model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, name
    )


def imported(name: str) -> Any:
    """Return what module:attribute names; modules of the working folder are found, too."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ExplainError(f"cannot import {module_name!r}: {_reason(error)}") from None
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise ExplainError(f"{module_name} has no {attribute!r}{advice}")
        found = getattr(found, part)
    if not callable(found):
        raise ExplainError(f"{name} must be a function, got {type(found).__name__}")
    return found


def _guessed(model: nn.Module, name: str, batch: int, seq: int) -> Any:
    """Return tokens for a model that begins with an embedding: also as targets, if it takes any."""
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise ExplainError(
            f"{name} returns a model without an embedding, so its inputs cannot be guessed; return "
            "(model, inputs), inputs a tensor, a tuple, or a dict of keywords"
        )
    tokens = _tokens(table.num_embeddings, batch, seq)
    names = list(inspect.signature(model.forward).parameters)
    second = next((n for n in names[1:] if n in ("targets", "labels", "target")), None)
    return {names[0]: tokens, **({second: tokens.clone()} if second else {})}


def _tokens(vocab_size: int, batch: int, seq: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, seq), generator=generator)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
