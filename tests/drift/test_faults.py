"""Planted faults: one thing changed in a tiny model, and the op or cause that must be named.

The models are of many designs, and each fault is one line of its code. What is expected was read
off that code: the op behind the changed line, by the name that torch gives it.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xtrain.drift import DriftError, compare, record
from xtrain.drift.comparison.drift_report import as_text
from xtrain.drift.recording.recorded_model import draw_weights

VOCAB, DIM, HEADS = 32, 16, 4


class Norm(nn.Module):
    """x / rms(x) * w, or LayerNorm with a bias."""

    def __init__(self, fault, mean=False):
        super().__init__()
        self.fault, self.mean = fault, mean
        self.weight = nn.Parameter(torch.empty(1, DIM))
        self.bias = nn.Parameter(torch.empty(1, DIM)) if mean else None
        self.eps = 1e-3 if "eps" in fault else 1e-5

    def forward(self, x):
        if "norm of half" in self.fault:
            x = x.half().float()
        if self.mean:
            return F.layer_norm(x, (DIM,), self.weight[0], self.bias[0], self.eps)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        out = x * scale
        if "weight plus one" in self.fault:
            return out * (1 + self.weight)
        if "times one" in self.fault:
            out = out * 1.0
        if "times a bit" in self.fault:
            out = out * 1.001
        if "norm without weight" in self.fault:
            return out
        return self.weight * out if "other order" in self.fault else out * self.weight


class Attention(nn.Module):
    def __init__(self, fault, groups=1, bias=False, qk_norm=False):
        super().__init__()
        self.fault, self.groups = fault, groups
        kv = DIM // groups
        self.query = nn.Linear(DIM, DIM, bias)
        self.key, self.value = nn.Linear(DIM, kv, bias), nn.Linear(DIM, kv, bias)
        self.output = nn.Linear(DIM, DIM, bias)
        self.scale = nn.Parameter(torch.empty(1, 1)) if qk_norm else None

    def forward(self, x):
        B, T, _ = x.shape
        size = DIM // HEADS
        key, value = self.key, self.value
        if "key for value" in self.fault:
            key, value = value, key
        q = self.query(x).view(B, T, HEADS, size)
        k = key(x).view(B, T, HEADS // self.groups, size)
        v = value(x).view(B, T, HEADS // self.groups, size)
        if "head permuted" in self.fault:
            v = v.flip(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if "no rope on keys" not in self.fault:
            k = self.rope(k)
        q = self.rope(q)
        k = k.repeat_interleave(self.groups, 1)
        v = v.repeat_interleave(self.groups, 1)
        if "scores in bf16" in self.fault:
            q = q.bfloat16().float()
        scores = q @ k.transpose(-1, -2)
        scores = scores * (0.4 if "other scale" in self.fault else size**-0.5)
        if "scores plus zero" in self.fault:
            scores = scores + 0.0
        if self.scale is not None:
            scores = torch.tanh(scores / 30) * 30 if "soft cap" in self.fault else scores
            scores = scores * self.scale[0]
        diagonal = 2 if "mask off by one" in self.fault else 1
        mask = torch.ones(T, T, dtype=torch.bool).triu(diagonal)
        fill = -1e4 if "mask of a number" in self.fault else -torch.inf
        weights = scores.masked_fill(mask, fill).softmax(-1)
        if "weights in bf16" in self.fault:
            weights = weights.bfloat16().float()
        out = weights @ v
        if "output scaled" in self.fault:
            out = out * 0.999
        return self.output(out.transpose(1, 2).reshape(B, T, DIM))

    def rope(self, x):
        base = 500.0 if "rope base" in self.fault else 10_000.0
        half = x.shape[-1] // 2
        frequency = base ** (-torch.arange(half) / half)
        start = 1 if "positions from one" in self.fault else 0
        angle = torch.arange(start, start + x.shape[-2])[:, None] * frequency
        a, b = x.chunk(2, -1)
        sign = -1 if "rope turned" in self.fault else 1
        sin = angle.sin() * sign if "rope turned" in self.fault else angle.sin()
        return torch.cat([a * angle.cos() - b * sin, b * angle.cos() + a * sin], -1)


class FeedForward(nn.Module):
    def __init__(self, fault, gated=True, bias=False):
        super().__init__()
        self.fault, self.gated = fault, gated
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias), nn.Linear(2 * DIM, DIM, bias)
        self.gate = nn.Linear(DIM, 2 * DIM, bias) if gated else None

    def forward(self, x):
        approximate = "tanh" if "gelu tanh" in self.fault else "none"
        up = self.up(x)
        if "up split" in self.fault:
            half = self.up.weight.chunk(2)
            up = torch.cat([F.linear(x, half[0]), F.linear(x, half[1])], -1)
        if "up clamped" in self.fault:
            up = up.clamp(max=0.05)
        if self.gate is None:
            act = F.relu(up) if "relu" in self.fault else F.gelu(up, approximate=approximate)
            return self.down(act)
        gate = F.relu(self.gate(x)) if "relu" in self.fault else F.silu(self.gate(x))
        if "gate on the other" in self.fault:
            gate, up = F.silu(up), self.gate(x)
        hidden = gate * up
        if "hidden plus zero" in self.fault:
            hidden = hidden + 0.0
        return self.down(hidden)


class Experts(nn.Module):
    """Two experts, each token's mix by a softmax."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(DIM, 2, bias=False)
        self.experts = nn.ModuleList(FeedForward("") for _ in range(2))

    def forward(self, x):
        scores = self.router(x)
        if "router temperature" in self.fault:
            scores = scores * 2
        share = scores.softmax(-1)
        if "experts swapped" in self.fault:
            share = share.flip(-1)
        first = self.experts[0](x) * share[..., :1]
        if "one expert" in self.fault:
            return first
        return first + self.experts[1](x) * share[..., 1:]


class Block(nn.Module):
    def __init__(self, fault, design):
        super().__init__()
        self.fault, self.design = fault, design
        mean = "layer norm" in design
        self.norm1, self.norm2 = Norm(fault, mean), Norm(fault, mean)
        groups, bias = (2 if "gqa" in design else 1), "bias" in design
        self.attention = Attention(fault, groups, bias, "qk" in design)
        ungated = "gelu" in design
        moe = "moe" in design
        self.ffn = Experts(fault) if moe else FeedForward(fault, not ungated, bias)

    def forward(self, x):
        fault = self.fault
        if "post-norm" in self.design:
            x = self.norm1(x + self.attention(x))
            if "no second residual" in fault:
                return self.norm2(self.ffn(x))
            return self.norm2(x + self.ffn(x))
        if "parallel" in self.design:
            if "ffn first" in fault:
                h = self.ffn(self.norm2(x))
                return x + self.attention(self.norm1(x)) + h
            branches = self.attention(self.norm1(x)) + self.ffn(self.norm2(x))
            if "sum in other order" in fault:
                return x + self.attention(self.norm1(x)) + self.ffn(self.norm2(x))
            return branches if "no residual" in fault else x + branches
        if "sequential order" in fault:
            x = x + self.ffn(self.norm2(x))
            return x + self.attention(self.norm1(x))
        if "norms swapped" in fault:
            x = x + self.attention(self.norm2(x))
            return x + self.ffn(self.norm1(x))
        h = self.attention(self.norm1(x))
        x = x + h * 0.9 if "branch scaled" in fault else x + h
        if "residual from the norm" in fault:
            n = self.norm2(x)
            return n + self.ffn(n)
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    """Two blocks, the fault in the second; `fault` of the head and the residual sum are here."""

    def __init__(self, design="", fault=""):
        super().__init__()
        self.design, self.fault = design, fault
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(f, design) for f in ("", fault, ""))
        self.norm = Norm("")
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        draw_weights(self, 7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(8 if parameter.dim() > 1 else 0.01)  # a bias is drawn as ones
        if "tied" in design:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        x = x * (4.1 if "embedding scale" in self.fault else 4.0)
        for number, block in enumerate(self.blocks):
            if "block skipped" in self.fault and number == 1:
                continue
            x = block(x)
            if "rounded stream" in self.fault and number == 1:
                x = x.bfloat16().float()
        if "no final norm" in self.fault:
            return self.head(x)
        logits = self.head(self.norm(x))
        return logits * 0.5 if "logits scaled" in self.fault else logits


IDS = torch.arange(2 * 7).reshape(2, 7).mul(5) % VOCAB


@cache
def plain(design):
    return record(Model(design), IDS)


def both(design, fault="", change=None):
    changed = Model(design, fault)
    if change is not None:
        with torch.no_grad():
            change(changed)
    return compare(plain(design), record(changed, IDS))


# design, fault, module and op of the first difference, and its cause
FAULTS = [
    ("", "norm of half", "blocks.1.norm1", "aten.pow", "aten._to_copy of blocks.1.norm1, which B"),
    ("", "eps", "blocks.1.norm1", "aten.add", "other=1e-05 in A, other=0.001 in B"),
    ("", "times a bit", "blocks.1.norm1", "aten.mul", "which B alone has"),
    ("", "weight plus one", "blocks.1.norm1", "aten.mul", ""),
    ("", "norm without weight", "blocks.1.attention.query", "aten.mm", "norm1, which A alone has"),
    ("", "key for value", "blocks.1.attention", "aten.mul", "attention.value in B"),
    ("", "head permuted", "blocks.1.attention", "aten.bmm", "aten.flip of blocks.1.attention"),
    ("", "no rope on keys", "blocks.1.attention", "aten.bmm", "aten.cat of blocks.1.attention"),
    ("", "scores in bf16", "blocks.1.attention", "aten.bmm", "aten._to_copy of"),
    ("", "other scale", "blocks.1.attention", "aten.mul", "other=0.5 in A, other=0.4 in B"),
    ("", "mask off by one", "blocks.1.attention", "aten.triu", "all that it reads is equal"),
    ("", "mask of a number", "blocks.1.attention", "aten.masked_fill", ""),
    ("", "weights in bf16", "blocks.1.attention", "aten.bmm", "aten._to_copy of"),
    ("", "output scaled", "blocks.1.attention.output", "aten.mm", "aten.mul of blocks.1.attention"),
    ("", "rope base", "blocks.1.attention", "aten.pow", ""),
    ("", "positions from one", "blocks.1.attention", "aten.arange", ""),
    ("", "rope turned", "blocks.1.attention", "aten.mul", "which B alone has"),
    ("", "up clamped", "blocks.1.ffn", "aten.mul", "aten.clamp of blocks.1.ffn, which B"),
    ("", "relu", "blocks.1.ffn", "aten.mul", "which A alone has"),
    ("", "gate on the other", "blocks.1.ffn", "aten.mul", ""),
    ("", "norms swapped", "blocks.1.norm1", "aten.pow", "aten.add of blocks.1 in B"),
    ("", "sequential order", "blocks.1.norm1", "aten.pow", "aten.add of blocks.1 in B"),
    ("", "branch scaled", "blocks.1", "aten.add", "aten.mul of blocks.1, which B alone has"),
    ("", "residual from the norm", "blocks.1", "aten.add", "aten.mul of blocks.1.norm2 in B"),
    ("", "embedding scale", "", "aten.mul", "other=4.0 in A, other=4.1 in B"),
    ("", "block skipped", "blocks.2.norm1", "aten.pow", "aten.add of blocks.1, which A alone has"),
    ("", "rounded stream", "blocks.2.norm1", "aten.pow", "aten._to_copy of the model"),
    ("", "no final norm", "head", "aten.mm", "aten.mul of norm, which A alone has"),
    ("", "logits scaled", "", "logits", ""),
    ("layer norm bias gelu", "eps", "blocks.1.norm1", "aten.native_layer_norm", "eps=0.001 in B"),
    ("layer norm bias gelu", "gelu tanh", "blocks.1.ffn", "aten.gelu", "approximate=tanh in B"),
    ("layer norm bias gelu", "relu", "blocks.1.ffn.down", "aten.addmm", "which A alone has"),
    (
        "layer norm bias gelu",
        "norm of half",
        "blocks.1.norm1",
        "aten.native_layer_norm",
        "_to_copy",
    ),
    ("layer norm bias gelu", "branch scaled", "blocks.1", "aten.add", "which B alone has"),
    ("layer norm bias gelu", "key for value", "blocks.1.attention", "aten.mul", "value in B"),
    ("gqa", "head permuted", "blocks.1.attention", "aten.bmm", "aten.flip of"),
    ("gqa", "rope turned", "blocks.1.attention", "aten.mul", "which B alone has"),
    ("gqa", "key for value", "blocks.1.attention", "aten.mul", "attention.value in B"),
    ("gqa", "other scale", "blocks.1.attention", "aten.mul", "other=0.4 in B"),
    ("qk", "soft cap", "blocks.1.attention", "aten.mul", "which B alone has"),
    ("qk", "mask off by one", "blocks.1.attention", "aten.triu", "all that it reads is equal"),
    ("moe", "router temperature", "blocks.1.ffn", "aten._softmax", "aten.mul of blocks.1.ffn"),
    ("moe", "experts swapped", "blocks.1.ffn", "aten.mul", "aten.flip of blocks.1.ffn"),
    ("moe", "one expert", "blocks.1", "aten.add", "aten.add of blocks.1.ffn, which A alone has"),
    (
        "post-norm",
        "no second residual",
        "blocks.1.norm2",
        "aten.pow",
        "of blocks.1, which A",
    ),
    ("post-norm", "eps", "blocks.1.norm1", "aten.add", "other=0.001 in B"),
    ("parallel", "no residual", "blocks.1", "output", ""),
    ("parallel", "sum in other order", "blocks.1", "aten.add", ""),
    ("tied", "embedding scale", "", "aten.mul", "other=4.1 in B"),
    ("tied", "no final norm", "head", "aten.mm", "aten.mul of norm, which A alone has"),
    ("tied", "logits scaled", "", "logits", ""),
]


@pytest.mark.parametrize(("design", "fault", "path", "op", "cause"), FAULTS)
def test_the_op_behind_a_planted_fault_is_named(design, fault, path, op, cause):
    found = both(design, fault)
    assert found.exit_code in (1, 2, 3) and tuple(found.first_divergence) == (path, op)
    assert cause in found.first_divergence.cause


@pytest.mark.parametrize(
    ("design", "fault", "alone"),
    [
        ("", "hidden plus zero", {"aten.add"}),
        ("", "scores plus zero", {"aten.add"}),
        ("", "times one", {"aten.mul"}),
        ("", "other order", set()),
        ("", "up split", {"aten.mm", "aten.cat"}),
        ("qk", "scores plus zero", {"aten.add"}),
        ("post-norm", "times one", {"aten.mul"}),
        ("parallel", "hidden plus zero", {"aten.add"}),
        ("tied", "hidden plus zero", {"aten.add"}),
        ("gqa", "", set()),
        ("layer norm bias gelu", "", set()),
    ],
)
def test_what_changes_no_bit_is_listed_and_no_difference(design, fault, alone):
    found = both(design, fault)
    assert found.exit_code == 0 and found.first_divergence is None
    assert {item.op for item in found.unmatched} == alone
    assert {item.record for item in found.unmatched} == ({"b"} if alone else set())
    assert ("ops without partner" in as_text(found)) == bool(alone)


@pytest.mark.parametrize(
    ("design", "weight", "path", "op"),
    [
        ("", "embedding.weight", "embedding", "aten.embedding"),
        ("", "blocks.1.norm1.weight", "blocks.1.norm1", "aten.mul"),
        ("", "blocks.1.ffn.gate.weight", "blocks.1.ffn.gate", "aten.mm"),
        ("", "norm.weight", "norm", "aten.mul"),
        ("bias layer norm", "blocks.1.ffn.down.bias", "blocks.1.ffn.down", "aten.addmm"),
        (
            "bias layer norm",
            "blocks.1.attention.query.bias",
            "blocks.1.attention.query",
            "aten.addmm",
        ),
    ],
)
def test_a_changed_weight_is_named_with_the_exact_size(design, weight, path, op):
    found = both(design, change=lambda m: m.get_parameter(weight).view(-1)[0].add_(0.25))
    first = found.first_divergence
    assert tuple(first) == (path, op) and first.cause == f"it reads {weight}, which differs"
    assert first.distance.exact
    if weight.endswith("bias") or "embedding" in weight:
        assert first.distance.max_abs == pytest.approx(0.25, rel=1e-5)


class Sums(nn.Module):
    """Residual adds in the root module, all of one name."""

    def __init__(self, dropped=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.head, self.dropped = nn.Linear(DIM, VOCAB, bias=False), dropped
        draw_weights(self, 3)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == self.dropped else x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("dropped", range(4))
def test_a_dropped_residual_add_is_found_among_others_of_its_name(dropped):
    found = compare(record(Sums(), IDS), record(Sums(dropped), IDS))
    behind = f"layers.{dropped + 1}" if dropped < 3 else "head"
    assert tuple(found.first_divergence) == (behind, "aten.mm")
    assert {(item.record, item.op) for item in found.unmatched} == {("a", "aten.add")}
    assert "aten.add of the model, which A alone has" in found.first_divergence.cause


class Factors(nn.Module):
    """A chain of products by numbers in one module."""

    def __init__(self, *factors):
        super().__init__()
        self.embedding, self.factors = nn.Embedding(VOCAB, VOCAB), factors
        draw_weights(self, 5)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for factor in self.factors:
            x = x * factor
        return x


@pytest.mark.parametrize("at", range(4))
def test_an_extra_product_among_products_is_listed_whatever_its_factor(at):
    plain = (1.5, 2.5, 0.75)
    more = (*plain[:at], 1.25, *plain[at:])
    for sides, alone in (((plain, more), "b"), ((more, plain), "a")):
        found = compare(*(record(Factors(*factors), IDS) for factors in sides))
        assert [(u.record, u.op) for u in found.unmatched] == [(alone, "aten.mul")]
        first = found.first_divergence
        where = f"it reads aten.mul of the model, which {alone.upper()} alone has"
        assert first.op == "logits" if at == 3 else first.cause == where
    changed = compare(record(Factors(*plain), IDS), record(Factors(1.5, 2.25, 0.75), IDS))
    assert not changed.unmatched and "other=2.25 in B" in changed.first_divergence.cause


class Wrapped(nn.Module):
    """A model behind a prefix, as data parallelism puts it."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, input_ids):
        return self.module(input_ids)


def test_weights_behind_a_prefix_are_the_same_model():
    found = compare(record(Model(), IDS), record(Wrapped(Model()), IDS))
    assert found.exit_code == 0 and ("module.norm.weight", "norm.weight") in found.renamed
    assert "weights have other names" in as_text(found)


class Renamed(Sums):
    def __init__(self):
        super().__init__()
        self.projections = self.layers
        del self.layers

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.projections:
            x = x + layer(x)
        return self.head(x)


def test_renamed_modules_are_found_by_bits_and_by_flag():
    plain, renamed = record(Sums(), IDS), record(Renamed(), IDS)
    assert compare(plain, renamed).exit_code == 0
    assert compare(plain, renamed, names={"projections": "layers"}).exit_code == 0
    with pytest.raises(DriftError, match="neither record has a name with 'nothing'"):
        compare(plain, renamed, names={"nothing": "layers"})


def test_where_weights_lie_in_memory_is_recorded_and_named():
    plain, moved = Sums(), Sums()
    weight = moved.head.weight
    memory = torch.empty(weight.numel() + 64)
    start = next(n for n in range(64) if memory[n:].data_ptr() % 64 == 8 * 4)
    piece = memory[start : start + weight.numel()].view_as(weight)
    weight.data = piece.copy_(weight.data)
    found = compare(record(plain, IDS), record(moved, IDS))
    changed = {change.name: change for change in found.changes}
    assert "head.weight 32" in changed["weights.address_mod_64"].b
