"""MODEL on a command line -> a model, its tokenizer, and the arguments of one training forward.

    small             a preset: a Transformer of xtrain.model
    runs/small        a run, by its path or its name in runs/: the model that it trains
    path/to/llama     a folder with a Hugging Face config.json; nothing is fetched
    my_models:build   a function of a module, that returns a model or (model, inputs)

`kind_of` tells them apart, `load` builds them, whole or with fewer layers and less width, so that a
model of any size can be looked at on any machine. Weights are drawn, not loaded. torch is imported
where a model is built: a wrong name is refused at once.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.config import PRESETS, ConfigError, RunConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xtrain.data import Tokenizer

DEFAULT_LAYERS = 2  # of a model that is too large to be built whole
REFUSED_PARAMETERS = 2_000_000_000  # 8 GB


@dataclass
class Subject:
    """A model and one training forward of it.

    kind:           of `kind_of`.
    title:          names it; facts: say how it was built.
    options:        with which keywords of xtrain.compile, and which dtype, it trains.
    advice:         what to change if the forward fails.
    tokenizer_spec: what load_tokenizer makes its tokenizer of; None where none is known.
    max_length:     the longest sequence; None: unknown.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    title: str
    kind: str = "function"
    advice: str = ""
    facts: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer_spec: str | Path | None = None
    max_length: int | None = None

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer, read anew; None where none is known. Raises DataError if damaged."""
        from xtrain.data import load_tokenizer

        return None if self.tokenizer_spec is None else load_tokenizer(self.tokenizer_spec)


@dataclass(frozen=True)
class Size:
    """How large a model and its inputs are to be.

    layers, hidden: fewer layers, less width; None: its own.
    changes:        other fields of its configuration.
    batch, seq:     of the inputs, where a function gives none.
    max_parameters: with more, and where `layers` is not given, it is built with two layers: what
                    repeats in every layer is seen in two. None: whole, whatever it takes.
    """

    layers: int | None = None
    hidden: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    seq: int = 16
    max_parameters: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden % HEAD_DIM:
            raise ConfigError(f"--hidden must be a multiple of {HEAD_DIM}, got {self.hidden}")

    @property
    def limit(self) -> float:
        """With more parameters than this a model is built with two layers."""
        given = self.layers is not None or self.max_parameters is None
        return math.inf if given else self.max_parameters  # type: ignore[return-value]


def load(name: str, **size: Any) -> Subject:
    """Build what MODEL names; its weights are drawn, not loaded.

    Args:     name: a preset, a run (a name in runs/ or a path), a folder with a Hugging Face
              config.json, or module:function.
              size: the fields of `Size`.
    Raises:   ConfigError for what cannot be found, imported or built.
    """
    kind = kind_of(name)
    build = {"preset": _preset, "run": _run, "folder": _hugging_face, "function": _from_function}
    subject = build[kind](name, Size(**size))
    subject.kind = kind
    return subject


def kind_of(model: str) -> str:
    """Return what MODEL names: a "preset", a "run", a "folder" of Hugging Face, or a "function".

    Raises:   ConfigError if it is none of them.
    """
    path = Path(model)
    if model in PRESETS:
        return "preset"
    if run_path(model) is not None:
        return "run"
    if path.exists():
        if path.is_file() and path.name != "config.json":
            raise ConfigError(
                f"{model!r} is a file; MODEL is a Hugging Face config folder, or module:function "
                f"for a function of a Python module ({path.stem}:NAME)"
            )
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"no config.json in {folder}, nor a run's config.toml; MODEL is a Hugging Face "
                "config folder or the folder of a run"
            )
        return "folder"
    if ":" in model and "/" not in model:
        return "function"
    close = difflib.get_close_matches(model, PRESETS, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"{model!r} is no preset ({', '.join(PRESETS)}), no run, no folder with a Hugging Face "
        f"config.json and no module:function{advice}"
    )


def run_path(model: str) -> Path | None:
    """Return the folder of the run that MODEL names, by its path or in runs/; None if none."""
    for path in (Path(model), Path(RunConfig().run.folder) / model):
        if (path / "config.toml").is_file() and not (path / "config.json").is_file():
            return path
    return None


# --- ours ----------------------------------------------------------------------------------------


def _preset(name: str, size: Size) -> Subject:
    from xtrain.model import PRESETS as SHAPES

    subject = _ours(SHAPES[name], f"preset {name}", size)
    # whose vocabulary is that of bytes
    subject.tokenizer_spec = "byte" if name == "small" else None
    return subject


def _run(name: str, size: Size) -> Subject:
    """The model of a run, with the keywords of xtrain.compile that its trainer uses."""
    from xtrain.model import PRESETS as SHAPES

    path = run_path(name)
    assert path is not None
    config = RunConfig.load(path / "config.toml")
    values = config.to_dict()["model"]
    preset = values.pop("preset")
    if preset in SHAPES:  # a config.toml that was written by hand may leave fields to it
        values = {**SHAPES[preset], **values}
    subject = _ours(values, f"run {path}", size)
    subject.tokenizer_spec = path / "tokenizer.json"
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


def _ours(values: dict[str, Any], title: str, size: Size) -> Subject:
    """A Transformer called as the trainer calls it: without logits."""
    from xtrain.metrics import check_fits
    from xtrain.model import Config, Transformer

    facts = []
    try:
        values = {**shrunk_preset(values, layers=size.layers, hidden=size.hidden), **size.changes}
        if Config.from_dict(values).num_parameters() > size.limit:
            facts.append(_fewer_layers(values["n_layers"]))
            values["n_layers"] = DEFAULT_LAYERS
        config = Config.from_dict(values)
    except ValueError as error:
        raise ConfigError(f"{title}: {error}") from None
    batch, seq = size.batch, min(size.seq, config.max_seq_len)
    count = config.num_parameters()
    tables = 4 * config.max_seq_len * config.head_dim
    check_fits(8 * count + tables, f"{title}: {count:,} parameters with their gradients", "cpu")
    check_fits(4 * batch * seq * config.dim, f"{title}: --batch {batch}, --seq {seq}", "cpu")
    tokens = _tokens(config.vocab_size, batch, seq)
    subject = Subject(Transformer(config), (tokens, tokens.clone()), {}, title, facts=facts)
    subject.kwargs["return_logits"] = False
    subject.max_length = config.max_seq_len
    if config.dropout:
        subject.options["dropout"] = config.dropout
    return subject


def _fewer_layers(total: int) -> str:
    return f"{DEFAULT_LAYERS} of {total} layers (--layers builds more)"


# --- of transformers -----------------------------------------------------------------------------


def _hugging_face(name: str, size: Size) -> Subject:
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{folder} needs the package transformers; install it") from None
    transformers.logging.set_verbosity_error()
    facts = []
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        shrink_hugging_face(config, layers=size.layers, hidden=size.hidden)
        _change(config, size.changes)
        total, count = num_layers(config) or 0, 0
        if size.limit < math.inf:
            count = _count(config)
        if total > DEFAULT_LAYERS and count > size.limit:
            shrink_hugging_face(config, layers=DEFAULT_LAYERS, hidden=None)
            facts.append(_fewer_layers(total))
            count = _count(config)
        facts += _computable_experts(config)
        if size.hidden is None and count > REFUSED_PARAMETERS:
            raise ConfigError(  # who names a size gets it
                f"{type(config).__name__}: {count / 1e9:.1f} G parameters even with few layers; "
                "--hidden 64 builds it narrower, --layers 2 as it is"
            )
        model = _class_of(config)._from_config(config)
    except ConfigError:
        raise
    except Exception as error:  # whatever the library finds wrong with the folder or the sizes
        raise ConfigError(f"cannot build {folder}: {_reason(error)}") from None
    title = f"{type(model).__name__} of {folder}"
    advice = "; --hidden knows the usual sizes, --set reaches the others" if size.hidden else ""
    inputs = example_inputs(model, size.batch, size.seq)
    subject = Subject(model, (), inputs, title, advice=advice, facts=facts)
    subject.max_length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if (folder / "tokenizer.json").is_file():
        subject.tokenizer_spec = folder / "tokenizer.json"
    return subject


def _change(config: Any, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        owner = next((c for c in (config, config.get_text_config()) if hasattr(c, name)), None)
        if owner is None:
            raise ConfigError(f"--set: {type(config).__name__} has no field {name!r}")
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
    raise ConfigError(f"transformers has no model for {type(config).__name__}")


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


def _count(config: Any) -> int:
    import torch

    with torch.device("meta"):
        model = _class_of(config)._from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def example_inputs(model: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return the keywords of one training forward of a model of transformers."""
    import torch

    names = inspect.signature(model.forward).parameters
    config = model.config
    if model.main_input_name == "pixel_values":
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.zeros(batch, channels, size, size)}
    if "input_ids" not in names:
        raise ConfigError(
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


# --- a function ----------------------------------------------------------------------------------


def _from_function(name: str, size: Size) -> Subject:
    from torch import nn

    if size.layers or size.hidden or size.changes:
        raise ConfigError("--layers, --hidden and --set change configurations, no function")
    result = imported(name)
    if not isinstance(result, nn.Module):
        try:
            result = result()
        except (Exception, SystemExit) as error:  # a script's main ends so
            raise ConfigError(f"{name}() fails: {_reason(error)}") from None
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        kind = type(result).__name__
        raise ConfigError(f"{name} must return an nn.Module, or (model, inputs); got {kind}")
    if inputs is None:
        inputs = _guessed(model, name, size.batch, size.seq)
    if isinstance(inputs, dict):
        return Subject(model, (), inputs, name)
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return Subject(model, args, {}, name)


def imported(name: str) -> Any:
    """Return what module:attribute names; modules of the working folder are found, too."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigError(f"cannot import {module_name!r}: {_reason(error)}") from None
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{module_name} has no {attribute!r}{advice}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{name} must be a function, got {type(found).__name__}")
    return found


def _guessed(model: nn.Module, name: str, batch: int, seq: int) -> Any:
    """Return tokens for a model that begins with an embedding: also as targets, if it takes any."""
    from torch import nn

    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise ConfigError(
            f"{name} returns a model without an embedding, so its inputs cannot be guessed; return "
            "(model, inputs), inputs a tensor, a tuple, or a dict of keywords"
        )
    tokens = _tokens(table.num_embeddings, batch, seq)
    names = list(inspect.signature(model.forward).parameters)
    second = next((n for n in names[1:] if n in ("targets", "labels", "target")), None)
    return {names[0]: tokens, **({second: tokens.clone()} if second else {})}


def _tokens(vocab_size: int, batch: int, seq: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, seq), generator=generator)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- smaller -------------------------------------------------------------------------------------

_LAYERS = (
    "num_hidden_layers num_layers num_decoder_layers encoder_layers decoder_layers "
    "encoder_num_hidden_layers"
).split()
# Sizes that are a multiple of the width, and are kept so.
_WIDTHS = (
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
    "shared_expert_intermediate_size n_inner word_embed_proj_dim"
).split()
_HEADS = "num_attention_heads num_heads encoder_attention_heads decoder_attention_heads".split()
HEAD_DIM = 16  # of a narrowed model: even, as rope needs it
# Sizes within a head; where the query's is split, part of it is turned by rope and part is not.
_HEAD_SIZES = {
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), HEAD_DIM),
    "rotary_dim": HEAD_DIM // 2,
    "qk_head_dim": 2 * HEAD_DIM,
}


def shrink_hugging_face(config: Any, *, layers: int | None, hidden: int | None) -> None:
    """Change a transformers configuration in place; the text part of one with several parts."""
    text = config.get_text_config()
    for part in {id(c): c for c in (config, text)}.values():
        if layers is not None:
            _set_layers(part, layers)
        if hidden is not None and getattr(part, "hidden_size", None):
            _set_width(part, hidden)


def num_layers(config: Any) -> int | None:
    """Return how many layers a transformers configuration asks for, None if it does not say."""
    text = config.get_text_config()
    return next((getattr(text, name) for name in _whole(text, _LAYERS)), None)


def _whole(config: Any, names: Iterable[str]) -> list[str]:
    """Return the fields of these names that a configuration has, and as a whole number."""
    return [name for name in names if isinstance(getattr(config, name, None), int)]


def _set_layers(config: Any, layers: int) -> None:
    names = _whole(config, _LAYERS)
    before = {getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, layers)
    # layer_types and other lists, one item a layer
    lists = {n: v for n, v in vars(config).items() if isinstance(v, list) and len(v) in before}
    kinds = getattr(config, "layer_types", None)
    for name, value in lists.items():
        same = kinds if isinstance(kinds, list) and len(kinds) == len(value) else value
        setattr(config, name, [value[i] for i in _one_of_each(same, layers)])


def _one_of_each(kinds: list[Any], count: int) -> list[int]:
    """Return the places of `count` layers, in order: the first of each kind, then the earliest."""
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    others = [i for i in range(len(kinds)) if i not in firsts]
    return sorted([*firsts, *others][:count])


def _set_width(config: Any, hidden: int) -> None:
    for name in _whole(config, _WIDTHS):
        setattr(config, name, _narrowed(getattr(config, name), hidden, config.hidden_size))
    for name in _whole(config, _HEADS):
        heads, groups = getattr(config, name), getattr(config, "num_key_value_heads", None)
        fewer, fewer_groups = _fewer_heads(hidden, heads, groups or heads)
        setattr(config, name, fewer)
        if isinstance(groups, int):
            config.num_key_value_heads = fewer_groups
    for name in _whole(config, _HEAD_SIZES):
        with contextlib.suppress(AttributeError):  # some compute it from the others
            setattr(config, name, _HEAD_SIZES[name])
    config.hidden_size = hidden


def shrunk_preset(values: dict[str, Any], *, layers: int | None, hidden: int | None) -> Any:
    """Return fields of our own Config, with fewer layers and less width where asked for."""
    values = dict(values) if layers is None else {**values, "n_layers": layers}
    if hidden is not None:
        heads, width = values["n_heads"], values["dim"]
        values["ffn_hidden"] = _narrowed(values["ffn_hidden"], hidden, width)
        groups = values.get("n_kv_heads", heads)
        values["n_heads"], values["n_kv_heads"] = _fewer_heads(hidden, heads, groups)
        values["dim"] = hidden
    return values


def _narrowed(size: int, hidden: int, width: int) -> int:
    """Return a size that keeps its ratio to the width; both are multiples of HEAD_DIM."""
    return max(HEAD_DIM, size * hidden // width // HEAD_DIM * HEAD_DIM)


def _fewer_heads(hidden: int, heads: int, groups: int) -> tuple[int, int]:
    """Return heads and groups of a width: as many heads to a group as before, where that goes."""
    fewer = hidden // HEAD_DIM
    fewer_groups = max(1, fewer * groups // heads)
    return fewer, fewer_groups if fewer % fewer_groups == 0 else 1
