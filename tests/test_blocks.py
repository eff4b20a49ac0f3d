"""Which modules are a model's blocks: read off the module tree, in module order."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import xtrain
from xtrain.blocks import Blocks
from xtrain.model import Config, Transformer


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Attention(Mlp):
    pass


class Layer(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = Attention()
        self.mlp = mlp or Mlp()


class PreNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.LayerNorm(4), function


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))


class Stage(nn.Module):
    """Swin: a list of equal blocks and little else."""

    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))
        self.downsample = nn.Linear(4, 4)


class MixedLayer(nn.Module):
    """T5: the layer's own list holds parts of different classes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([Attention(), Mlp()])


class Model(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def layers(count=2, make=Layer):
    return nn.ModuleList(make() for _ in range(count))


class Gpt(nn.Module):
    """nanoGPT: everything inside a ModuleDict."""

    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(8, 4), "h": layers(3), "ln_f": nn.LayerNorm(4)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(4, 8)


named = OrderedDict(first=Layer(), second=Layer())
CASES = {
    "nanoGPT": (Gpt, [f"transformer.h.{i}" for i in range(3)]),
    "list": (lambda: Model(embed=nn.Embedding(8, 4), layers=layers()), ["layers.0", "layers.1"]),
    "sequential": (lambda: Model(body=nn.Sequential(*layers(3))), ["body.0", "body.1", "body.2"]),
    "dict": (lambda: Model(body=nn.ModuleDict(named)), ["body.first", "body.second"]),
    "the model is a container": (lambda: nn.Sequential(Layer(), Layer()), ["0", "1"]),
    "attributes": (
        lambda: Model(first=Layer(), norm=nn.LayerNorm(4), second=Layer()),
        ["first", "second"],
    ),
    "attributes below": (
        lambda: Model(body=Model(a=Layer(), b=Layer()), head=nn.Linear(4, 4)),
        ["body.a", "body.b"],
    ),
    "mixture of experts": (
        lambda: Model(layers=layers(make=lambda: Layer(Experts()))),
        ["layers.0", "layers.1"],
    ),
    "mixed layer lists": (lambda: Model(block=layers(make=MixedLayer)), ["block.0", "block.1"]),
    "stages": (
        lambda: Model(layers=nn.ModuleList([Stage(2), Stage(1)])),
        ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"],
    ),
    "lists of lists": (
        lambda: Model(layers=nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "lists of wrapped parts": (
        lambda: Model(
            layers=nn.ModuleList(
                nn.ModuleList([PreNorm(Attention()), PreNorm(nn.Sequential(*Mlp().children()))])
                for _ in range(2)
            )
        ),
        ["layers.0", "layers.1"],
    ),
    "dicts of parts": (
        lambda: Model(
            layers=nn.ModuleList(
                nn.ModuleDict({"attention": Attention(), "mlp": Mlp()}) for _ in range(2)
            )
        ),
        ["layers.0", "layers.1"],
    ),
    "lists of equal blocks": (
        lambda: Model(stages=nn.ModuleList([layers(2), layers(1)])),
        ["stages.0.0", "stages.0.1", "stages.1.0"],
    ),
    "an encoder's and a decoder's lists": (
        lambda: Model(towers=nn.ModuleDict({"encoder": layers(2), "decoder": layers(1)})),
        ["towers.encoder.0", "towers.encoder.1", "towers.decoder.0"],
    ),
    "encoder and decoder": (
        lambda: Model(encoder=Model(layers=layers(2)), decoder=Model(layers=layers(2))),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    ),
    "MLP as Sequential": (
        lambda: Model(mlp=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))),
        [],
    ),
    "blocks whose MLP is Sequential": (
        lambda: Model(
            layers=layers(make=lambda: Layer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))))
        ),
        ["layers.0", "layers.1"],
    ),
    "one block": (lambda: Model(layers=layers(1)), ["layers.0"]),
    "one attribute": (lambda: Model(block=Layer()), []),
    "torch.nn.TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False
        ),
        ["layers.0", "layers.1"],
    ),
    "ours": (
        lambda: Transformer(Config.preset("tiny", n_layers=3)),
        ["blocks.0", "blocks.1", "blocks.2"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks(name):
    make, expected = CASES[name]
    assert Blocks(make()).paths == expected


SMALL = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, intermediate_size=32
)
FAMILIES = {
    "llama": (SMALL, ["model.layers.0", "model.layers.1"]),
    "gpt2": (
        dict(n_embd=16, n_layer=2, n_head=2, vocab_size=32),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "qwen3_moe": (
        dict(SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
        ["model.layers.0", "model.layers.1"],
    ),
    "deepseek_v3": (
        dict(SMALL, num_key_value_heads=2, n_routed_experts=4, first_k_dense_replace=1),
        ["model.layers.0", "model.layers.1"],
    ),
    "mamba": (dict(hidden_size=16, num_hidden_layers=2, vocab_size=32),
              ["backbone.layers.0", "backbone.layers.1"]),
    "t5": (
        dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "swin": (
        dict(embed_dim=8, depths=[2, 1], num_heads=[1, 1], image_size=32),
        [f"encoder.layers.{i}.blocks.{j}" for i, j in ((0, 0), (0, 1), (1, 0))],
    ),
    "albert": (dict(SMALL), ["encoder.albert_layer_groups.0.albert_layers.0"]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    values, expected = FAMILIES[family]
    auto = {
        "t5": transformers.AutoModelForSeq2SeqLM,
        "swin": transformers.AutoModel,
        "albert": transformers.AutoModel,
    }.get(family, transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(family, **values))
    blocks = Blocks(model)
    assert blocks.paths == expected
    assert len(set(map(type, blocks.modules.values()))) == 1


class ListsOfParts(nn.Module):
    """The residual adds are the model's own code: a list has no forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([PreNorm(Mlp()), PreNorm(Mlp())]) for _ in "ab")
        for layer in self.layers:
            layer[1].function = nn.Sequential(*layer[1].function.children())

    def forward(self, x):
        for first, second in self.layers:
            x = x + first.function.down(first.function.up(first.norm(x)))
            x = x + second.function(second.norm(x))
        return x


class OneMatrix(nn.Module):
    """x + linear(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class ByName(nn.Module):
    """Blocks as attributes, or as the values of a dict, between layers that are none."""

    def __init__(self, as_dict):
        super().__init__()
        self.inputs = nn.Linear(8, 8)
        if as_dict:
            self.parts = nn.ModuleDict({"a": OneMatrix(), "b": OneMatrix()})
        else:
            self.block1, self.block2 = OneMatrix(), OneMatrix()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.inputs(x)
        for part in self.parts.values() if "parts" in self._modules else (self.block1, self.block2):
            x = part(x)
        return self.head(x)


ONE_MATRIX = {
    "Sequential": (lambda: nn.Sequential(*(OneMatrix() for _ in range(3))), ["0", "1", "2"]),
    "between layers": (
        lambda: nn.Sequential(nn.Linear(8, 8), OneMatrix(), OneMatrix(), nn.Linear(8, 8)),
        ["1", "2"],
    ),
    "Sequential in Sequential": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(OneMatrix(), OneMatrix())),
        ["1.0", "1.1"],
    ),
    "ModuleDict": (lambda: ByName(as_dict=True), ["parts.a", "parts.b"]),
    "attributes": (lambda: ByName(as_dict=False), ["block1", "block2"]),
}


@pytest.mark.parametrize("compile_it", [xtrain.compile, xtrain.compile_blocks])
@pytest.mark.parametrize("name", ONE_MATRIX)
def test_blocks_of_one_matrix_are_numbered_by_themselves(name, compile_it):
    make, paths = ONE_MATRIX[name]
    compiled = compile_it(make(), dropout=0.5, seed=0, backend="eager")
    compiled(torch.randn(2, 3, 8))
    sites = [(s.name, s.layer) for s in compiled.report().sites]
    assert sites == [(f"{path}.feed_forward", i) for i, path in enumerate(paths)]


def test_sites_of_lists_of_parts():
    compiled = xtrain.compile(ListsOfParts(), dropout=0.5, seed=1, backend="eager")
    compiled(torch.randn(2, 3, 4))
    sites = [(site.name, site.layer) for site in compiled.report().sites]
    assert sites == [
        (f"layers.{layer}.{name}", layer)
        for layer in range(2)
        for name in ("feed_forward", "feed_forward_2")
    ]


def test_lists_cannot_be_compiled_one_by_one():
    with pytest.raises(ValueError, match="layers.0 is a ModuleList, which has no forward"):
        xtrain.compile_blocks(ListsOfParts(), dropout=0.5, seed=1, backend="eager")


def test_block_of_a_path():
    blocks = Blocks(Gpt())
    assert blocks.block_of("transformer.h.1.attn.up.weight") == "transformer.h.1"
    assert blocks.block_of("transformer.h.1") == "transformer.h.1"
    for outside in ("transformer.h.10", "transformer.wte.weight", "lm_head", ""):
        assert blocks.block_of(outside) is None


def test_layers_are_ordinals_and_others_lie_behind():
    model = Gpt()
    blocks = Blocks(model)
    assert [blocks.layer(f"transformer.h.{i}") for i in range(3)] == [0, 1, 2]
    others = [name for name, _ in model.named_modules() if name not in blocks.paths]
    ordinals = [blocks.layer(name) for name in others]
    assert min(ordinals) >= 3 and len(set(ordinals)) == len(ordinals)
    with pytest.raises(KeyError):
        blocks.layer("no.such.module")


def test_a_shared_block_counts_once():
    shared = Layer()
    blocks = Blocks(Model(layers=nn.ModuleList([shared, shared, Layer()])))
    assert blocks.paths == ["layers.0", "layers.2"]
    assert blocks.block_of("layers.1.attn.up.weight") == "layers.0"
    assert [blocks.layer(f"layers.{i}") for i in range(3)] == [0, 0, 1]


def test_a_part_shared_by_two_blocks_belongs_to_each():
    one, two = Layer(), Layer()
    two.mlp = one.mlp
    blocks = Blocks(Model(layers=nn.ModuleList([one, two])))
    assert blocks.block_of("layers.1.mlp.up.weight") == "layers.1"
    assert blocks.block_of("layers.0.mlp.up.weight") == "layers.0"


def test_a_block_in_two_places_of_a_list_has_the_sites_of_both():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(PreNormLayer() for _ in range(2))
            self.layers.insert(1, self.layers[0])
            self.last = self.layers[2]  # another name alone, not another place

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class PreNormLayer(Layer):
        def forward(self, x):
            x = x + self.attn.down(self.attn.up(self.norm(x)))
            return x + self.mlp.down(self.mlp.up(self.norm(x)))

    for compile_ in (xtrain.compile, xtrain.compile_blocks):
        torch._dynamo.reset()
        compiled = compile_(Stack(), dropout=0.5, seed=0, backend="eager")
        compiled(torch.randn(2, 3, 4))
        names = [s.name for s in compiled.last_executed_sites]
        first = ["layers.0.feed_forward", "layers.0.feed_forward_2"]
        again = ["layers.0.feed_forward_3", "layers.0.feed_forward_4"]
        assert names == [*first, *again, "layers.2.feed_forward", "layers.2.feed_forward_2"]
