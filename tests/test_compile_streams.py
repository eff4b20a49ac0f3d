"""Streams that meet earlier values again, lie side by side, or are summed in unusual spellings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import (
    SEED,
    Block,
    D,
    Oracle,
    P,
    Stack,
    both,
    drop,
    hold,
    layers_of_blocks,
    made,
    marking,
    x,
)
from test_compile_account import Mlp, names_code
from torch import nn

import xtrain
from xtrain.compiler import SiteError


class Dense(Stack):
    """DenseFormer: each block reads a weighted sum of all that was before; none adds inside."""

    def __init__(self):
        super().__init__(Mlp, 3)
        self.weights = nn.ParameterList(torch.rand(n + 1) + 0.5 for n in range(4))

    def forward(self, x):
        outputs = [x]
        for block, weights in zip([*self.blocks, None], self.weights, strict=True):
            x = sum(w * o for w, o in zip(weights, outputs, strict=True))
            if block is not None:
                outputs.append(drop(block(x), block))
        return x


class DepthAttention(Stack):
    """Each block reads what a softmax over depth chooses of all earlier streams."""

    def __init__(self):
        super().__init__(Block, 3)
        self.queries = nn.Parameter(torch.randn(3, D))

    def forward(self, x):
        streams = [x]
        for query, block in zip(self.queries, self.blocks, strict=True):
            earlier = torch.stack(streams)
            weights = (earlier @ query).softmax(0)
            streams.append(block((weights.unsqueeze(-1) * earlier).sum(0)))
        return streams[-1]


class Injected(Stack):
    """modded-nanogpt: the embedding is mixed into each block's stream."""

    breaks = True

    def __init__(self):
        super().__init__(Block, 3)
        self.mix = nn.Parameter(torch.rand(3, 2) + 0.5)

    def forward(self, x):
        first = x
        for mix, block in zip(self.mix, self.blocks, strict=True):
            x = block(mix[0] * x + mix[1] * first)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class InjectedWhole(Injected):
    breaks = False


class InjectedInside(Injected):
    """The same in the block's own code."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MixingBlock() for _ in range(3))

    def forward(self, x):
        first = x
        for mix, block in zip(self.mix, self.blocks, strict=True):
            x = block(x, first, mix)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class InjectedInsideWhole(InjectedInside):
    breaks = False


class MixingBlock(Block):
    def forward(self, x, first, mix):
        return super().forward(mix[0] * x + mix[1] * first)


class UNet(Stack):
    """The first half's streams are added to the second half's."""

    def __init__(self):
        super().__init__(Block, 4)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + skips.pop()
            x = block(x)
            if i < 2:
                skips.append(x)
        return x


MIXED = [DepthAttention, Injected, InjectedWhole, InjectedInside, InjectedInsideWhole, UNet]


@both
@pytest.mark.parametrize("model", MIXED)
def test_a_mix_of_earlier_streams_is_no_branch(model, compile_it):
    hold(model, compile_it)


@both
def test_dense_connections(compile_it):
    """Every block's output is a branch of the sums behind it: one mask, or a refusal that is so."""
    error = hold(Dense, compile_it, must_run=False)
    assert "pattern was missed" not in str(error)


class AltUp(nn.Module):
    """Streams side by side, mixed by a small matrix; a block works on one of them."""

    def __init__(self, computed, inside):
        super().__init__()
        self.blocks = nn.ModuleList((Adding if inside else Mlp)() for _ in range(3))
        self.mix = nn.ParameterList(torch.randn(2, 2) / 4 for _ in range(3))
        self.router = nn.Linear(D, 4) if computed else None

    def forward(self, x):
        h = torch.stack([x, x * 0.5])
        for mix, block in zip(self.mix, self.blocks, strict=True):
            if self.router is not None:
                mix = self.router(h[0]).tanh().unflatten(-1, (2, 2))
                h = torch.einsum("btij,jbtd->ibtd", mix, h) + h
            else:
                h = torch.einsum("ij,jbtd->ibtd", mix, h) + h
            active = block(h[0]) if isinstance(block, Adding) else h[0] + drop(block(h[0]), block)
            h = torch.cat([active[None], h[1:]])
        return h.mean(0)


class Adding(Block):
    def forward(self, x):
        return x + drop(self.mlp(self.norm(x)), self)


@both
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_mix_of_streams_side_by_side_is_no_branch(computed, inside, compile_it):
    """Block by block, a branch that the model's own forward adds may be refused: no graph adds."""
    must_run = inside or compile_it is xtrain.compile
    hold(AltUp, compile_it, computed, inside, must_run=must_run)


class HyperConnected(nn.Module):
    """Two streams, unrolled: one branch joins both, so one mask."""

    def __init__(self, inside):
        super().__init__()
        self.blocks = nn.ModuleList((HyperBlock if inside else Mlp)() for _ in range(2))
        self.weights = nn.ParameterList(torch.rand(6) + 0.5 for _ in range(2))

    def forward(self, x):
        a, b = x, x * 0.5
        for w, block in zip(self.weights, self.blocks, strict=True):
            if isinstance(block, HyperBlock):
                a, b = block(a, b, w)
            else:
                y = drop(block(w[0] * a + w[1] * b), block)
                a, b = w[2] * a + w[3] * y, w[4] * b + w[5] * y
        return a + b


class HyperBlock(Block):
    def forward(self, a, b, w):
        y = drop(self.mlp(self.norm(w[0] * a + w[1] * b)), self)
        return w[2] * a + w[3] * y, w[4] * b + w[5] * y


@both
@pytest.mark.parametrize("inside", [False, True])
def test_a_branch_of_two_streams_has_one_mask(inside, compile_it):
    must_run = compile_it is xtrain.compile
    hold(HyperConnected, compile_it, inside, must_run=must_run)


class SharedKeys(nn.Module):
    """Later layers attend to the first one's keys and values: self-attention all the same."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SharingBlock() for _ in range(3))

    def forward(self, x):
        keys = None
        for block in self.blocks:
            x, keys = block(x, keys)
        return x


class SharingBlock(Block):
    def forward(self, x, keys):
        n = self.norm(x)
        if keys is None:
            keys = tuple(map(self.heads, self.qkv(n).chunk(3, -1)[1:]))
        x = x + drop(self.attention(n, keys), self, "attention")
        return x + drop(self.mlp(self.norm2(x)), self), keys


@both
def test_keys_of_an_earlier_layer_are_the_models_own(compile_it):
    """A block that is handed some cannot tell; what made them in the same forward can."""
    hold(SharedKeys, compile_it)


class Attending(nn.Module):
    """A decoder whose layers read an encoder's states, through keys that the first one made."""

    def __init__(self, shared):
        super().__init__()
        self.encoder, self.shared = nn.Linear(D, D), shared
        self.blocks = nn.ModuleList(AttendingBlock() for _ in range(3))

    def forward(self, x, memory):
        memory, keys = self.encoder(memory), None
        for block in self.blocks:
            x, made = block(x, memory, keys)
            keys = made if self.shared else None
        return x


class AttendingBlock(Block):
    def forward(self, x, memory, keys):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        if keys is None:
            keys = tuple(map(self.heads, self.qkv(memory).chunk(3, -1)[1:]))
        return x + drop(self.attention(self.norm2(x), keys), self, "cross_attention"), keys


@both
@pytest.mark.parametrize("shared", [False, True])
def test_keys_of_an_encoder_are_none_of_the_streams_own(shared, compile_it):
    hold(Attending, compile_it, shared, inputs=(x(), x(5)))


def test_keys_keep_their_name_in_graphs_that_are_compiled_later():
    """A longer sequence makes other graphs, in a forward that nothing records."""
    compiled = xtrain.compile_blocks(
        made(SharedKeys)(), dropout=P, seed=SEED, backend="eager", dynamic=False
    )
    for length in (6, 7):
        compiled(x(length))
        assert {s.site for s in compiled.last_executed_sites} == {"attention", "feed_forward"}


class Routed(nn.Module):
    """One layer whose experts are the model's only list: they are its blocks."""

    def __init__(self, stacked):
        super().__init__()
        self.norm, self.stacked = nn.LayerNorm(D), stacked
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
        n, out = self.norm(x).flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        if self.stacked:
            up, down = (torch.stack([getattr(e, w).weight for e in self.experts]) for w in WEIGHTS)
            rows = n.view(-1, 2, D).transpose(0, 1)
            out = torch.bmm(F.gelu(torch.bmm(rows, up.mT)), down.mT).transpose(0, 1)
        else:
            for i, expert in enumerate(self.experts):
                at = torch.arange(i, len(n), 2)
                out = out.index_add(0, at, expert(n[at]))
        return x + drop(out.reshape(x.shape), self)


WEIGHTS = ("up", "down")


@both
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_a_loop_run_as_stacked_ones(stacked, compile_it):
    """One site. The add is the model's own, and block by block (by experts) no graph holds it."""
    compiled = xtrain.compile(made(Routed, stacked)(), dropout=P, seed=SEED, backend="eager")
    compiled(x())
    (site,) = compiled.report().sites
    by_experts = compile_it is xtrain.compile_blocks
    error = hold(
        Routed, compile_it, stacked, layers=lambda m: {m: site.layer}, must_run=not by_experts
    )
    if error is not None:
        names_code(error, Routed.forward, "block")


class RoutedBlock(Block):
    """Tokens that a router sends, weighted; a shared expert beside them, in a module of its own."""

    def __init__(self):
        super().__init__()
        self.moe = Mixture()

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        return x + drop(self.moe(self.norm2(x)), self)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.shared = nn.ModuleList(Mlp() for _ in range(3)), Mlp()
        self.router = nn.Linear(D, 3)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            at = torch.arange(i % 2, len(rows), 2)
            out = out.index_add(0, at, weights[at, i, None] * expert(rows[at]))
        return out.view_as(x) + self.shared(x)


@both
def test_a_mixture_with_a_shared_expert_is_one_branch(compile_it):
    hold(Stack, compile_it, RoutedBlock)


# --- sums that are written in unusual ways --------------------------------------------------------


class Merged(Block):
    """An attention branch added plainly, and a feed-forward branch merged as `merge` says."""

    def __init__(self, merge):
        super().__init__()
        self.merge = merge
        self.gate, self.narrow = nn.Linear(D, D), nn.Linear(D // 2, D // 2)
        self.weights = nn.Parameter(torch.tensor([0.75, 0.5]))

    def ff(self, x):
        return drop(self.down(self.hidden(x)), self)

    def hidden(self, x):
        return F.relu(self.up(self.norm2(x)))

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        return self.merge(self, x)


def highway(m, x):
    g = m.gate(x).sigmoid()
    return g * m.ff(x) + (1 - g) * x


def blended(m, x):
    h = m.ff(x)
    return h + m.gate(x).sigmoid() * (x - h)


def reversible(m, x):
    a, b = x.chunk(2, -1)
    a = a + drop(m.narrow(b), m)
    return torch.cat([a, b + drop(m.narrow(a).tanh() @ m.narrow.weight, m)], -1)


def together(m, x):
    a, b = x.split(D // 2, -1)
    added = torch._foreach_add([a, b], [drop(m.narrow(a), m), drop(m.narrow(b), m)])
    return torch.cat(added, -1)


def chosen_tokens(m, x):
    """Mixture of depths: half of the tokens pass the branch and are added back to their rows."""
    rows = x.reshape(-1, D)
    chosen = torch.arange(0, rows.shape[0], 2, device=x.device)
    return rows.index_add(0, chosen, m.ff(rows[chosen])).view(x.shape)


def fused(m, x):
    rows, hidden = x.view(-1, D), m.hidden(x).view(-1, 2 * D)
    if marking():
        return (rows + drop(hidden @ m.down.weight.t(), m)).view(x.shape)
    return torch.addmm(rows, hidden, m.down.weight.t()).view(x.shape)


MERGES = {
    "highway": highway,
    "a blend": blended,
    "lerp": lambda m, x: torch.lerp(x, m.ff(x), m.gate(x).sigmoid()),
    "stack.sum": lambda m, x: torch.stack([x, m.ff(x)]).sum(0),
    "stack.mean, three": lambda m, x: torch.stack([drop(m.gate(x), m), x, m.ff(x)], 1).mean(1),
    "learned weights": lambda m, x: torch.stack([x, m.ff(x)], -1) @ m.weights,
    "reversible": reversible,
    "_foreach_add": together,
    "some tokens": chosen_tokens,
    "addmm": fused,
    "add, alpha": lambda m, x: x.add(m.ff(x), alpha=0.5),
    "sub of a negative": lambda m, x: torch.sub(x, -m.ff(x)),
    "into the branch": lambda m, x: m.ff(x).add_(x),
}


@both
@pytest.mark.parametrize("name", MERGES)
def test_a_sum_in_another_spelling(name, compile_it):
    hold(Stack, compile_it, lambda: Merged(MERGES[name]))


def test_the_same_under_inductor():
    """A spelling that is rewritten: what inductor compiles has eager's masks."""
    make = made(Stack, lambda: Merged(fused))
    truth, model = make(), make()
    with torch.no_grad():
        with Oracle(layers_of_blocks(truth)):
            wanted = truth(x())
        found = xtrain.compile(model, dropout=P, seed=SEED)(x())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class TwoStreams(nn.Module):
    """A reversible block that takes and returns its halves; what is added to a reads b alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a, b, memory):
        a = a + self.down(self.up(b).relu())
        return a, b + self.other(a) + memory


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(3))

    def forward(self, x):
        a, b, memory = x, x.flip(0) * 1.5, x.cos()
        for block in self.blocks:
            a, b = block(a, b, memory)
        return torch.cat([a, b], -1)


def test_a_branch_that_reads_another_stream_is_found_in_the_whole_and_refused_by_blocks():
    x = torch.randn(2, 3, 8)
    compiled = xtrain.compile(Reversible(), dropout=P, seed=SEED, backend="eager")
    compiled(x)
    kinds = ("feed_forward", "feed_forward_2")
    expected = [f"blocks.{i}.{kind}" for i in range(3) for kind in kinds]
    assert [site.name for site in compiled.report().sites] == expected
    by_blocks = xtrain.compile_blocks(Reversible(), dropout=P, seed=SEED, backend="eager")
    with pytest.raises(SiteError, match=r"`a = a \+ self.*different graphs.*use xtr"):
        by_blocks(x)


class Rotated(nn.Module):
    """Attention with one key head, whose rotation has tables of the shape of the keys."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.q, self.o = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.kv, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

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
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Rotated() for _ in range(3))
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
    assert kinds == ["attention", "feed_forward"] * 3
