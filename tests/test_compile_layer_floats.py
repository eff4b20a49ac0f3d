"""compile_blocks on layers that hold another float each: right values, and graphs that suffice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xtrain
from xtrain.compiler.layer_state import floats_of_layer

P, D, LAYERS = 0.5, 8, 10  # more layers than Dynamo keeps graphs for one function


class Block(nn.Module):
    def __init__(self, how, index):
        super().__init__()
        self.how, self.scale = how, D**-0.5 / (index + 1)
        self.eps = 1e-6  # the same in every layer
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        if self.how == "attention":
            mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            mixed = (q @ k.mT * self.scale).softmax(-1) @ v
        x = x + self.out(mixed[:, 0])
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList(Block(how, i) for i in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(compiled, x):
    compiled.zero_grad()
    loss = compiled(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in compiled.parameters())]


@pytest.mark.parametrize(("how", "backend"), [("attention", "eager"), ("product", "aot_eager")])
def test_a_scale_by_layer(how, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(how), torch.randn(2, 5, D)
    keywords = dict(dropout=P, seed=0, backend=backend, kernels="off")
    whole = train(xtrain.compile(model, **keywords), x)
    compiled = xtrain.compile_blocks(model, **keywords)
    assert all(map(torch.equal, train(compiled, x), whole))
    report = compiled.report()
    assert len(compiled.last_executed_sites) == len(report.sites) == 2 * LAYERS
    if how == "product":
        assert report.num_train_graphs == 2, "a constant first, then an input for all"
    else:  # an op that takes a constant; one attempt more where it was to be an input
        assert report.num_train_graphs in (LAYERS, LAYERS + 1)
    before = report.num_train_graphs
    compiled.set_step(0)
    assert all(map(torch.equal, train(compiled, x), whole))
    assert compiled.report().num_train_graphs == before, "every layer has found its graph again"
    with torch.no_grad():
        assert torch.equal(compiled.eval()(x), model(x))


def test_gpt2_with_a_scale_by_layer():
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    sizes = dict(n_embd=16, n_layer=10, n_head=2, vocab_size=32, n_positions=16)
    config = transformers.AutoConfig.for_model(
        "gpt2", **sizes, scale_attn_by_inverse_layer_idx=True, resid_pdrop=0.0, attn_pdrop=0.0
    )
    config.embd_pdrop = 0.0
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(12).view(2, 6)
    keywords = dict(dropout=P, seed=0, backend="eager")
    whole = xtrain.compile(model, **keywords)(input_ids=ids, labels=ids).loss
    compiled = xtrain.compile_blocks(model, **keywords)
    assert torch.equal(compiled(input_ids=ids, labels=ids).loss, whole)
    assert len(compiled.last_executed_sites) == 20


def test_floats_of_a_layer_are_those_that_differ():
    layers = Model("product").layers
    assert floats_of_layer(layers[1], layers) == (layers[1].scale,)
    assert floats_of_layer(layers[1], layers[1:2]) == ()
