"""Fewer layers and less width, so that a model of any size can be looked at on any machine."""

from __future__ import annotations

from typing import Any

from xtrain.explain.errors import ExplainError

_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "encoder_num_hidden_layers",
)
# Sizes that are a multiple of the width, and are kept so.
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_inner",
    "word_embed_proj_dim",
)
_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
HEAD_DIM = 16  # of a narrowed model: even, as rope needs it


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
    return next((v for n in _LAYERS if isinstance(v := getattr(text, n, None), int)), None)


def _set_layers(config: Any, layers: int) -> None:
    before = {getattr(config, n) for n in _LAYERS if isinstance(getattr(config, n, None), int)}
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, layers)
    for name, value in list(vars(config).items()):  # layer_types and other lists, one item a layer
        if isinstance(value, list) and len(value) in before:
            setattr(config, name, value[:layers])


def _set_width(config: Any, hidden: int) -> None:
    if hidden % HEAD_DIM:
        raise ExplainError(f"--hidden must be a multiple of {HEAD_DIM}, got {hidden}")
    width = config.hidden_size
    for name in _WIDTHS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, max(HEAD_DIM, value * hidden // width // HEAD_DIM * HEAD_DIM))
    for name in _HEADS:
        heads = getattr(config, name, None)
        if not isinstance(heads, int):
            continue
        fewer = hidden // HEAD_DIM
        setattr(config, name, fewer)
        groups = getattr(config, "num_key_value_heads", None)
        if isinstance(groups, int):
            # as many query heads to a group as before, where that goes
            config.num_key_value_heads = max(1, fewer * groups // heads)
            if fewer % config.num_key_value_heads:
                config.num_key_value_heads = 1
    for name in ("head_dim", "d_kv"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, HEAD_DIM)
    config.hidden_size = hidden


def shrunk_preset(values: dict[str, Any], *, layers: int | None, hidden: int | None) -> Any:
    """Return fields of our own Config, with fewer layers and less width where asked for."""
    values = dict(values)
    if layers is not None:
        values["n_layers"] = layers
    if hidden is not None:
        if hidden % HEAD_DIM:
            raise ExplainError(f"--hidden must be a multiple of {HEAD_DIM}, got {hidden}")
        heads, groups = values["n_heads"], values.get("n_kv_heads", values["n_heads"])
        fewer = hidden // HEAD_DIM
        values["ffn_hidden"] = max(
            HEAD_DIM, values["ffn_hidden"] * hidden // values["dim"] // HEAD_DIM * HEAD_DIM
        )
        fewer_groups = max(1, fewer * groups // heads)
        values["n_kv_heads"] = fewer_groups if fewer % fewer_groups == 0 else 1
        values |= {"dim": hidden, "n_heads": fewer}
    return values
