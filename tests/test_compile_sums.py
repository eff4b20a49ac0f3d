"""Blocks whose residual sums are written in unusual ways: sites by count, masks by the oracle.

Each block holds an attention branch added plainly and a feed-forward branch (or more) merged some
other way. `Mark`s name the values that dropout belongs on; a plain eager run with NumPy's masks
hooked to them is the truth for outputs and gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mask_oracle import keep_mask
from torch import nn

import xtrain
from xtrain.rng import site_seed

P, D, LAYERS = 0.5, 8, 3


class Mark(nn.Module):
    """The identity, which leaves no trace in a graph."""

    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self, merge, num_merged):
        super().__init__()
        self.merge = merge
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.mixer, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.gate, self.narrow = nn.Linear(D, D), nn.Linear(D // 2, D // 2)
        self.weights = nn.Parameter(torch.tensor([0.75, 0.5]))
        self.marks = nn.ModuleList(Mark() for _ in range(1 + num_merged))

    def ff(self, x):
        return self.down(self.hidden(x))

    def hidden(self, x):
        return F.relu(self.up(self.norms[1](x)))

    def forward(self, x):
        q = self.mixer(self.norms[0](x))
        x = x + self.marks[0](self.out(F.scaled_dot_product_attention(q, q, q)))
        return self.merge(self, x)


class Model(nn.Module):
    def __init__(self, merge, num_merged):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, D), nn.Linear(D, 16)
        self.blocks = nn.ModuleList(Block(merge, num_merged) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def highway(m, x):
    g = m.gate(x).sigmoid()
    return g * m.marks[1](m.ff(x)) + (1 - g) * x


def blended(m, x):
    h = m.marks[1](m.ff(x))
    return h + m.gate(x).sigmoid() * (x - h)


def reversible(m, x):
    a, b = x.chunk(2, -1)
    a = a + m.marks[1](m.narrow(b))
    return torch.cat([a, b + m.marks[2](m.narrow(a).tanh() @ m.narrow.weight)], -1)


def together(m, x):
    a, b = x.split(D // 2, -1)
    added = torch._foreach_add([a, b], [m.marks[1](m.narrow(a)), m.marks[2](m.narrow(b))])
    return torch.cat(added, -1)


def chosen_tokens(m, x):
    """Mixture of depths: half of the tokens pass the branch and are added back to their rows."""
    rows = x.reshape(-1, D)
    chosen = torch.arange(0, rows.shape[0], 2, device=x.device)
    return rows.index_add(0, chosen, m.marks[1](m.ff(rows[chosen]))).view(x.shape)


def fused(m, x):
    rows, hidden = x.view(-1, D), m.hidden(x).view(-1, 2 * D)
    return torch.addmm(rows, hidden, m.down.weight.t()).view(x.shape)


def fused_apart(m, x):
    rows, hidden = x.view(-1, D), m.hidden(x).view(-1, 2 * D)
    return (rows + m.marks[1](hidden @ m.down.weight.t())).view(x.shape)


# name -> (what a block does, the same with its marks where that differs, number of merged branches)
MERGES = {
    "highway": (highway, highway, 1),
    "a blend": (blended, blended, 1),
    "lerp": (*[lambda m, x: torch.lerp(x, m.marks[1](m.ff(x)), m.gate(x).sigmoid())] * 2, 1),
    "stack.sum": (*[lambda m, x: torch.stack([x, m.marks[1](m.ff(x))]).sum(0)] * 2, 1),
    "stack.mean, three": (
        *[lambda m, x: torch.stack([m.marks[1](m.gate(x)), x, m.marks[2](m.ff(x))], 1).mean(1)] * 2,
        2,
    ),
    "learned weights": (
        *[lambda m, x: torch.stack([x, m.marks[1](m.ff(x))], -1) @ m.weights] * 2,
        1,
    ),
    "reversible": (reversible, reversible, 2),
    "_foreach_add": (together, together, 2),
    "some tokens": (chosen_tokens, chosen_tokens, 1),
    "addmm": (fused, fused_apart, 1),
    "add, alpha": (*[lambda m, x: x.add(m.marks[1](m.ff(x)), alpha=0.5)] * 2, 1),
    "sub of a negative": (*[lambda m, x: torch.sub(x, -m.marks[1](m.ff(x)))] * 2, 1),
    "into the branch": (*[lambda m, x: m.marks[1](m.ff(x)).add_(x)] * 2, 1),
}


def masked(model, sites):
    """Hook NumPy's masks to the marks of every block, in the order of its sites."""

    def drop(seed):
        def hook(_, __, value):
            keep = torch.from_numpy(keep_mask(tuple(value.shape), P, seed))
            return torch.where(keep, value * (1 / (1 - P)), 0.0)

        return hook

    for layer, block in enumerate(model.blocks):
        for mark, site in zip(block.marks, sites, strict=True):
            mark.register_forward_hook(drop(site_seed(1, 0, layer, site)))


def names(number):
    return ["attention", "feed_forward", "feed_forward_2"][: 1 + number]


@pytest.mark.parametrize("compile_it", [xtrain.compile, xtrain.compile_blocks])
@pytest.mark.parametrize("name", MERGES)
def test_sites_and_masks(name, compile_it):
    merge, marked, number = MERGES[name]
    torch.manual_seed(0)
    model = Model(merge, number)
    tokens = torch.arange(12).view(2, 6)
    compiled = compile_it(model, dropout=P, seed=1, backend="eager")
    found = compiled(tokens)
    found.square().sum().backward()
    report = compiled.report()
    expected = [(f"blocks.{i}.{s}", "xtrain") for i in range(LAYERS) for s in names(number)]
    assert [(s.name, s.dropout) for s in report.sites] == expected
    assert report.uncovered == [] and len(compiled.last_executed_sites) == len(expected)

    truth = Model(marked, number)
    truth.load_state_dict(model.state_dict())
    masked(truth, names(number))
    wanted = truth(tokens)
    wanted.square().sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        if one.grad is not None or other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_the_same_under_inductor():
    """A spelling that is rewritten: what inductor compiles has eager's masks."""
    tokens = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    model, truth = Model(fused, 1), Model(fused_apart, 1)
    truth.load_state_dict(model.state_dict())
    masked(truth, names(1))
    found = xtrain.compile(model, dropout=P, seed=1)(tokens)
    torch.testing.assert_close(found, truth(tokens), rtol=1e-5, atol=1e-5)


class TwoStreams(nn.Module):
    """A reversible block that takes and returns its halves; what is added to a reads b alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, a, b, memory):
        a = a + self.down(self.up(b).relu())
        return a, b + self.other(a) + memory


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(LAYERS))

    def forward(self, x):
        a, b, memory = x, x.flip(0) * 1.5, x.cos()
        for block in self.blocks:
            a, b = block(a, b, memory)
        return torch.cat([a, b], -1)


def test_a_branch_that_reads_another_stream_is_found_in_the_whole_and_refused_by_blocks():
    x = torch.randn(2, 3, D)
    compiled = xtrain.compile(Reversible(), dropout=P, seed=1, backend="eager")
    compiled(x)
    kinds = ("feed_forward", "feed_forward_2")
    expected = [f"blocks.{i}.{kind}" for i in range(LAYERS) for kind in kinds]
    assert [site.name for site in compiled.report().sites] == expected
    by_blocks = xtrain.compile_blocks(Reversible(), dropout=P, seed=1, backend="eager")
    with pytest.raises(
        xtrain.compiler.SiteError, match=r"`a = a \+ self.*different graphs.*use xtr"
    ):
        by_blocks(x)


class Rotated(nn.Module):
    """Attention with one key head, whose rotation has tables of the shape of the keys."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.q, self.o = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.kv, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, cos, sin):
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unsqueeze(1).chunk(2, -1)
        q, k = q * cos + self.turned(q) * sin, k * cos + self.turned(k) * sin
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))

    def turned(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


class RotatedModel(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.embedding = nn.Embedding(16, D)
        self.blocks = nn.ModuleList(Rotated() for _ in range(LAYERS))
        self.tables = tables
        angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1])).repeat(1, 2)
        if tables == "buffers":
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        elif tables == "attributes":
            self.cos, self.sin = angles.cos(), angles.sin()
        else:
            self.register_buffer("rates", torch.tensor([1.0, 0.1]))

    def forward(self, tokens):
        if self.tables == "computed":
            angles = torch.outer(torch.arange(6.0), self.rates).repeat(1, 2)
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = self.cos, self.sin
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos[None, None], sin[None, None])
        return x


@pytest.mark.parametrize("tables", ["buffers", "attributes", "computed"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_table_of_angles_is_no_stream(tables, batch):
    """At batch 1 with one key head cos and k are of one shape, and k comes from the last cos."""
    compiled = xtrain.compile(RotatedModel(tables), dropout=P, seed=0, backend="eager")
    compiled(torch.arange(6 * batch).view(batch, 6))
    kinds = [site.site for site in compiled.report().sites]
    assert kinds == ["attention", "feed_forward"] * LAYERS
