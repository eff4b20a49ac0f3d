"""Configurations of a run and of a model: fields, presets, files, errors."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

from xtrain.config import PRESETS, SECTIONS, ConfigError, RunConfig, parse_assignment
from xtrain.model import Config, Transformer
from xtrain.training.choices import PRESET_DEFAULTS, resolve

TINY = Config.preset("tiny")


def test_every_field_has_a_default_and_a_meaning():
    config = RunConfig()
    for name, section in SECTIONS.items():
        for item in fields(section):
            assert item.metadata["meaning"], f"{name}.{item.name}"
            assert hasattr(getattr(config, name), item.name)
    for frozen, field in ((config.train, "steps"), (TINY, "dim")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, field, 3)


def test_presets_are_those_of_the_model():
    from xtrain import model

    assert tuple(model.PRESETS) == PRESETS == tuple(PRESET_DEFAULTS)
    for name, defaults in PRESET_DEFAULTS.items():
        assert defaults["seq_len"] <= model.Config.preset(name).max_seq_len


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("train.steps", 0, "train.steps must be at least 1, got 0"),
        ("train.steps", 2.5, "train.steps must be a whole number, got 2.5"),
        ("train.steps", True, "train.steps must be a whole number, got True"),
        ("model.dropout", 1.5, "model.dropout must be at most 1, got 1.5"),
        ("model.dropout", float("nan"), "model.dropout must be finite, got nan"),
        ("model.recompute", "half", "model.recompute must be none, full or a number of layers"),
        ("model.preset", "smal", "did you mean small?"),
        ("optim.learning_rate", 0.0, "optim.learning_rate must be above 0, got 0.0"),
        ("optim.beta1", 1.0, "optim.beta1 must be below 1, got 1.0"),
        ("optim.beta2", 1.0, "optim.beta2 must be below 1, got 1.0"),
        ("train.seed", 2**64, f"train.seed must be at most {2**64 - 1}, got {2**64}"),
        ("train.seed", -(2**63) - 1, f"train.seed must be at least {-(2**63)}"),
        ("optim.schedule", "cosinus", "must be one of cosine, linear, constant, wsd"),
        ("run.compile", "yes", "run.compile must be true or false, got 'yes'"),
        ("data.paths", "a.txt", "data.paths must be a list of texts, got 'a.txt'"),
        ("data.errors", "ignore", "data.errors must be one of strict, replace"),
    ],
)
def test_a_wrong_value_names_its_field(name, value, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as error:
        RunConfig().override({name: value})
    assert name in str(error.value)


def test_values_that_contradict_each_other():
    with pytest.raises(ConfigError, match="micro_batch_size must divide train.batch_size"):
        RunConfig().override({"train.batch_size": 8, "train.micro_batch_size": 3})
    with pytest.raises(ConfigError, match="train.seq_len 64 is longer than model.max_seq_len 32"):
        RunConfig().override({"train.seq_len": 64, "model.max_seq_len": 32})
    with pytest.raises(ConfigError, match="min_learning_rate must be at most"):
        RunConfig().override({"optim.learning_rate": 1e-3, "optim.min_learning_rate": 1e-2})
    with pytest.raises(ConfigError, match="warmup_steps 30 is longer than the schedule's 20"):
        RunConfig().override({"optim.warmup_steps": 30, "train.steps": 20})


def test_toml_there_and_back(tmp_path):
    config = resolve(
        RunConfig().override(
            {
                "data.paths": ["a b.txt", "quote\"d'#.md"],
                "optim.learning_rate": 3e-4,
                "model.recompute": 2,
                "model.tie_embeddings": False,
                "run.disable_passes": ["remove_noop_views"],
            }
        ),
        device="cpu",
        bf16=False,
    )
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml() + '\n[versions]\ntorch = "2"\n')
    assert RunConfig.load(path) == config
    assert tomllib.loads(config.to_toml()) == config.to_dict()
    assert "# per optimiser step, over all ranks" in config.to_toml()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("train.steps=30", 30),
        ("optim.learning_rate = 1e-3", 1e-3),
        ("model.recompute=full", "full"),
        ("model.recompute=3", 3),
        ("run.compile=true", True),
        ("run.name=0042", "0042"),
        ('data.field="a=b"', "a=b"),
        ("data.paths=a.txt,b c.md", ["a.txt", "b c.md"]),
        ('data.paths=["a,b"]', ["a,b"]),
        ("train.micro_batch_size=none", None),
    ],
)
def test_set_reads_values_by_the_field(text, expected):
    name, value = parse_assignment(text)
    assert value == expected and type(value) is type(expected)
    RunConfig().override({name: value})


@pytest.mark.parametrize(
    "text, message",
    [
        ("train.steps", "--set takes section.key=value, got 'train.steps'"),
        ("train.stpes=3", "unknown key 'train.stpes' in --set; did you mean train.steps"),
        ("train.learning_rate=3", "did you mean .*optim.learning_rate"),
        ("zzz=3", "unknown key 'zzz' in --set; write section.key=value; sections: model, data"),
        ("train.lr=1", "unknown key 'train.lr' in --set; did you mean optim.learning_rate or"),
        ("train.max_lr=1", "did you mean optim.learning_rate?"),
        ("optim.gradient_clipping=1", "did you mean optim.grad_clip?"),
        ("model.layers=1", "did you mean model.n_layers?"),
        ("run.dropout=1", "did you mean model.dropout?"),
        ("steps=1", "did you mean train.steps?"),
        ("lr=1", "did you mean optim.learning_rate"),
        ("model.context=1", r"keys of \[model\]: preset, vocab_size"),
        ("optimizer.foo=1", "unknown section 'optimizer' in --set; did you mean optim?"),
        ("nosec.x=3", "^unknown section 'nosec' in --set; known: model, data, train, [^;]*$"),
    ],
)
def test_set_refuses_what_it_does_not_know(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_assignment(text)


def test_presets_and_devices_decide_what_is_left_open():
    on_cpu = resolve(RunConfig(), device="cpu", bf16=True)
    assert (on_cpu.model.preset, on_cpu.run.dtype, on_cpu.run.deterministic) == (
        "small",
        "fp32",
        True,
    )
    on_gpu = resolve(RunConfig(), device="cuda:0", bf16=True)
    assert (on_gpu.model.preset, on_gpu.run.dtype, on_gpu.run.deterministic) == (
        "124m",
        "bf16",
        False,
    )
    assert resolve(RunConfig(), device="cuda:0", bf16=False).run.dtype == "fp32"
    assert (on_cpu.checkpoint.interval, on_gpu.checkpoint.interval) == (100, 1000)
    never = RunConfig().override({"train.eval_interval": 0, "checkpoint.interval": 0})
    never = resolve(never, device="cpu", bf16=False)
    assert (never.train.eval_interval, never.checkpoint.interval) == (0, 0)
    assert resolve(on_gpu, device="cuda:0", bf16=True) == on_gpu  # a saved run decides no more
    chosen = RunConfig().override({"train.steps": 50, "optim.warmup_steps": 0, "run.dtype": "bf16"})
    kept = resolve(chosen, device="cpu", bf16=False)
    assert (kept.train.steps, kept.optim.warmup_steps, kept.run.dtype) == (50, 0, "bf16")
    short = resolve(RunConfig().override({"model.max_seq_len": 32}), device="cpu", bf16=False)
    assert short.train.seq_len == 32


def test_micro_batches_divide_the_batch_on_all_ranks():
    def sizes(world_size=1, **train):
        values = {f"train.{name}": value for name, value in train.items()}
        train = resolve(
            RunConfig().override(values), device="cpu", bf16=False, world_size=world_size
        ).train
        return train.batch_size, train.micro_batch_size

    assert sizes() == (8, 8)
    assert sizes(world_size=2) == (8, 4)
    assert sizes(batch_size=6) == (6, 6)
    assert sizes(micro_batch_size=2) == (8, 2)
    assert sizes(micro_batch_size=3) == (6, 3)
    assert sizes(micro_batch_size=16) == (16, 16)
    with pytest.raises(ConfigError, match="train.batch_size must be a multiple of .* got 9"):
        sizes(batch_size=9, world_size=2)


# --- the model's: presets, derived fields, round trip, every error --------------------------------


def test_tiny_has_21_tensors_and_21664_numbers():
    parameters = list(Transformer(TINY).parameters())
    assert len(parameters) == 21
    assert sum(p.numel() for p in parameters) == 21_664 == TINY.num_parameters()


# Published sizes: GPT-2 small and medium (to 1%), TinyLlama-1.1B and Llama-3-8B (exact).
@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("small", 3.3e6, 0.02),
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
    assert name != "small" or (config.dim, config.vocab_size) == (256, 256)  # wide, byte-level
    assert {p.device.type for p in model.parameters()} == {"meta"}


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
