"""The model's configuration: presets, derived fields, round trip, every error."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from xtrain.model import Config, Transformer

TINY = Config.preset("tiny")


def test_tiny_has_21_tensors_and_21664_numbers():
    parameters = list(Transformer(TINY).parameters())
    assert len(parameters) == 21
    assert sum(p.numel() for p in parameters) == 21_664 == TINY.num_parameters()


# Published sizes: GPT-2 small and medium (to 1%), TinyLlama-1.1B and Llama-3-8B (exact).
@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("124m", 124e6, 0.01),
        ("350m", 350e6, 0.01),
        ("1b", 1_100_048_384, 0),
        ("8b", 8_030_261_248, 0),
    ],
)
def test_presets_have_their_size_and_build_on_meta(name, published, tolerance):
    config = Config.preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    built = sum(p.numel() for p in model.parameters())
    assert built == config.num_parameters()
    assert abs(built - published) <= tolerance * published
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_small_preset_is_wide_enough_and_byte_level():
    config = Config.preset("small")
    assert config.dim >= 256 and config.vocab_size == 256
    assert sum(p.numel() for p in Transformer(config).parameters()) == config.num_parameters()


def test_derived_fields_follow_overrides():
    config = Config.preset("tiny", dim=64, n_heads=4, vocab_size=300)
    assert (config.vocab_size, config.n_kv_heads, config.head_dim) == (300, 4, 16)
    assert Config.preset("8b").n_kv_heads == 8
    apart = Config.preset("tiny", head_dim=6)  # n_heads * head_dim = 12, dim = 32
    logits, _ = Transformer(apart)(torch.zeros(1, 5, dtype=torch.int64))
    assert logits.shape == (1, 5, 16)


def test_dict_round_trip_through_json():
    for config in (Config.preset("8b"), Config.preset("tiny", recompute=1, tie_embeddings=True)):
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_numpy_integers_become_python_integers():
    config = Config.preset("tiny", vocab_size=np.int64(24), rope_base=500000)
    assert type(config.vocab_size) is int and type(config.rope_base) is float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("vocab_size", "dim", "n_layers", "n_heads", "ffn_hidden")],
        ("n_layers", -1),
        ("n_layers", True),
        ("dim", 32.0),
        ("dim", "32"),
        ("dim", 33),  # not a multiple of n_heads
        ("n_kv_heads", 3),  # 2 query heads
        ("n_kv_heads", 0),
        ("head_dim", 15),
        ("head_dim", 2.0),
        ("max_seq_len", 0),
        ("rope_base", 0.0),
        ("rope_base", math.inf),
        ("rope_base", "1e4"),
        ("norm_eps", 0.0),
        ("norm_eps", math.nan),
        ("tie_embeddings", 1),
        ("recompute", "some"),
        ("recompute", "1"),
        ("recompute", 0),
        ("recompute", 3),  # of 2 layers
        ("recompute", True),
        ("recompute", None),
        ("dropout", -0.1),
        ("dropout", 1.1),
        ("dropout", math.nan),
        ("dropout", True),
    ],
)
def test_config_errors_name_field_and_value(field, value):
    with pytest.raises(ValueError, match=field) as error:
        Config.preset("tiny", **{field: value})
    assert str(value) in str(error.value)


def test_unknown_names_are_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'; known: tiny, small, 124m"):
        Config.preset("huge")
    with pytest.raises(ValueError, match=r"n_layer\b.*n_layers"):
        Config.preset("tiny", n_layer=3)
    with pytest.raises(ValueError, match="dim"):
        Config.from_dict({"vocab_size": 16})


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        TINY.dim = 64
