"""Fewer layers and less width, so that a model of any size can be looked at on any machine."""

from __future__ import annotations

import contextlib
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
# Sizes within a head; where the query's is split, part of it is turned by rope and part is not.
_HEAD_SIZES = {
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2,
    "v_head_dim": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
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
    return next((v for n in _LAYERS if isinstance(v := getattr(text, n, None), int)), None)


def _set_layers(config: Any, layers: int) -> None:
    before = {getattr(config, n) for n in _LAYERS if isinstance(getattr(config, n, None), int)}
    lists: dict[str, list[Any]] = {}
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, layers)
    for name, value in list(vars(config).items()):  # layer_types and other lists, one item a layer
        if isinstance(value, list) and len(value) in before:
            kinds = getattr(config, "layer_types", None)
            kinds = kinds if isinstance(kinds, list) and len(kinds) == len(value) else value
            kept = _one_of_each(kinds, layers)
            lists[name] = [value[i] for i in kept]
    for name, value in lists.items():
        setattr(config, name, value)


def _one_of_each(kinds: list[Any], count: int) -> list[int]:
    """Return the places of `count` layers, in order: the first of each kind, then the earliest."""
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    others = [i for i in range(len(kinds)) if i not in firsts]
    return sorted([*firsts, *others][:count])


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
    for name, size in _HEAD_SIZES.items():
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError):  # some compute it from the others
                setattr(config, name, size)
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
