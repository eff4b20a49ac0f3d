"""Images and speech: sites counted by hand, masks by the oracle, p = 0 to the bit."""

from __future__ import annotations

import pytest
import torch

import xtrain
from bench.coverage.check import masks_agree, recorded_dropout, spelt_sites

P, SEED = 0.5, 1
WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
IMAGE = dict(WIDTH, image_size=16, patch_size=4)
TEXT = dict(WIDTH, vocab_size=64, max_position_embeddings=16)
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1)
SPEECH = dict(TOKENS, d_model=32, vocab_size=64, dropout=0.0, num_mel_bins=8)
SPEECH |= {f"{side}_{name}": value for side in ("encoder", "decoder")
           for name, value in dict(layers=2, attention_heads=2, ffn_dim=48).items()}  # fmt: skip
SPEECH |= dict(max_source_positions=16, max_target_positions=32)

# class -> (model type, configuration, inputs by name, sites: a word a block)
MODELS = {
    "ViTForImageClassification": (
        "vit", dict(IMAGE, hidden_dropout_prob=0.0, num_labels=3), ("pixel_values",), "AF AF"
    ),
    "CLIPModel": (
        "clip", dict(text_config=TEXT, vision_config=IMAGE, projection_dim=16),
        ("input_ids", "pixel_values", "return_loss"), "AF AF AF AF",
    ),
    "WhisperForConditionalGeneration": (  # breaks at its random layer drop, of probability 0
        "whisper", SPEECH, ("input_features", "labels"), "AF AF ACF ACF"
    ),
}  # fmt: skip


def build(name):
    transformers = pytest.importorskip("transformers")
    kind, values, wanted, sites = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **values)).train()
    ids = torch.arange(3, 21).view(2, 9)
    given = dict(input_ids=ids, labels=ids, return_loss=True)
    given |= dict(pixel_values=torch.randn(2, 3, 16, 16), input_features=torch.randn(2, 8, 32))
    return model, {key: given[key] for key in wanted}, sites


def scalar(output):
    loss = getattr(output, "loss", None)
    return output.logits.square().mean() if loss is None else loss


def train(model, compiled, call):
    model.zero_grad(set_to_none=True)
    loss = scalar(compiled(**call))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_sites_masks_and_p_0(name):
    model, call, sites = build(name)
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="eager")
    with recorded_dropout() as drops:
        train(model, compiled, call)
    report = compiled.report()
    assert spelt_sites(report.sites) == sites and report.uncovered == []
    assert len(compiled.last_executed_sites) == len(report.sites) == len(drops)
    assert masks_agree(report.sites, drops) is True
    plain = train(model, model, call)
    absent = train(model, xtrain.compile(model, dropout=0.0, backend="eager"), call)
    assert len(plain) == len(absent) and all(map(torch.equal, plain, absent))


def test_gradients_under_checkpointing():
    model, call, _ = build("CLIPModel")
    keywords = dict(dropout=P, seed=SEED, backend="eager")
    stored = train(model, xtrain.compile(model, **keywords), call)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = train(model, xtrain.compile(model, **keywords), call)
    assert len(stored) == len(again) and all(map(torch.equal, stored, again))
