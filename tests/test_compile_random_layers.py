"""Layers left out at random, and other breaks: refusals name what in the model causes them."""

from __future__ import annotations

import random
import re

import pytest
import torch
from probe_model import P, ProbeModel
from torch import nn

import xtrain
from xtrain.compiler import SiteError

HOW = ["tensor", "bernoulli", "item", "python"]


class LayerDrop(ProbeModel):
    """Layer 1 is left out with a probability."""

    def __init__(self, how, rate):
        super().__init__(num_layers=3)
        self.how, self.rate = how, rate

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if i == 1 and self.how == "tensor":
                drawn = torch.rand([])
                if drawn < self.rate:
                    continue
            if i == 1 and self.how == "bernoulli":
                if torch.bernoulli(torch.tensor(float(self.rate))):
                    continue
            if i == 1 and self.how == "item":
                if torch.rand(1).item() < self.rate:
                    continue
            if i == 1 and self.how == "python":
                if random.random() < self.rate:
                    continue
            x = block(x)
        return x


def tokens():
    return torch.zeros(4, 5, dtype=torch.long)


@pytest.mark.parametrize("how", HOW)
def test_a_random_branch_is_named_with_what_to_do(how):
    """Each forward is accounted for by itself; one with fewer sites than before is an error."""
    torch._dynamo.reset()
    compiled = xtrain.compile(LayerDrop(how, 0.0), dropout=P, seed=0, backend="eager")
    compiled(tokens())
    compiled.rate = 1.0
    with pytest.raises(SiteError) as error:
        compiled(tokens())
    text = str(error.value)
    assert "ran 4 residual sites of 6; missing: blocks.1.attention, blocks.1.feed_forward" in text
    assert re.search(r"The graph broke at \S*test_compile_random_layers.py:\d+ \(.*: `if ", text)
    assert "decided at random" in text and "layerdrop" in text and "strict=False" in text
    assert "experts" not in text
    loose = xtrain.compile(LayerDrop(how, 1.0), dropout=P, seed=0, backend="eager", strict=False)
    loose(tokens())
    assert [s.layer for s in loose.last_executed_sites] == [0, 0, 2, 2]


@pytest.mark.parametrize("how", ["tensor", "python"])
def test_probability_0_keeps_every_site(how):
    compiled = xtrain.compile(LayerDrop(how, 0.0), dropout=P, seed=0, backend="eager")
    compiled(tokens())
    assert len(compiled.last_executed_sites) == 6


def test_a_block_that_did_not_run_is_named_where_blocks_are_compiled_one_by_one():
    compiled = xtrain.compile_blocks(LayerDrop("python", 0.0), dropout=P, seed=0, backend="eager")
    compiled(tokens())
    compiled.rate = 1.0
    with pytest.raises(SiteError, match=r"blocks.1 did not run in this forward: .*at random"):
        compiled(tokens())


def test_a_break_that_no_value_causes_gets_no_advice_on_values():
    class Printing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            out = self.inner(x)
            torch._dynamo.graph_break()
            return out

    model = ProbeModel()
    model.blocks[0].mlp = Printing(model.blocks[0].mlp)
    torch._dynamo.reset()
    with pytest.raises(SiteError) as error:
        xtrain.compile(model, dropout=P, seed=0, backend="eager")(tokens())
    text = str(error.value)
    assert "`torch._dynamo.graph_break()`" in text and "Take out what breaks it (Dynamo: " in text
    assert "experts" not in text and "at random" not in text


def test_layer_drop_of_transformers_is_named():
    transformers = pytest.importorskip("transformers")
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, vocab_size=64, dropout=0.0)
    of_each = dict(attention_heads=2, ffn_dim=48, layerdrop=1.0).items()
    sizes |= {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in of_each}
    config = transformers.AutoConfig.for_model("m2m_100", **sizes)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).train()
    torch._dynamo.reset()
    ids = torch.arange(3, 21).view(2, 9)
    with pytest.raises(SiteError, match=r"`if dropout_probability < self.layerdrop:`.*at random"):
        xtrain.compile(model, dropout=P, seed=0, backend="eager")(input_ids=ids, labels=ids)


def test_modules_of_a_piece_are_spelt_plainly():
    from xtrain.compiler.seeds import ENTRY_ROOT, readable_path, without_locals

    assert readable_path("L['self'].self_attn") == "self.self_attn"
    assert readable_path(f"{ENTRY_ROOT}.layers.0") == "layers.0"
    assert readable_path(ENTRY_ROOT) == "the model's own forward"
    assert without_locals("dropout in L['self'].attn") == "dropout in self.attn"
