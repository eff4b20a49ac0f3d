"""Mixtures of experts: dense, by loops that break the graph, and transformers' own."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import both, hook_masks, hook_masks_of_llama
from torch import nn

import xtrain
from xtrain.compiler import SiteError

P, D, EXPERTS, LAYERS = 0.5, 8, 4, 3


class Mark(nn.Module):
    """The identity, which leaves no trace in a graph."""

    def forward(self, x):
        return x


class Experts(nn.Module):
    """Two experts of four a token, from router to sum."""

    def __init__(self, how):
        super().__init__()
        self.how, self.router = how, nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        return HOW[self.how](self.experts, rows, weights, chosen).view(x.shape)


def dense(experts, rows, weights, chosen):
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        share = (weights * (chosen == i)).sum(-1, keepdim=True)
        out.index_add_(0, torch.arange(rows.shape[0]), expert(rows) * share)
    return out


def stacked(experts, rows, weights, chosen):
    shares = (F.one_hot(chosen, EXPERTS) * weights[..., None]).sum(1)
    return torch.einsum("ne,end->nd", shares, torch.stack([e(rows) for e in experts]))


def selected(experts, rows, weights, chosen):
    """one_hot and where, every expert on every token."""
    mask = F.one_hot(chosen, EXPERTS).amax(1)
    shares = weights.new_zeros(rows.shape[0], EXPERTS).scatter(1, chosen, weights)
    parts = [torch.where(mask[:, i : i + 1] > 0, e(rows), 0.0) for i, e in enumerate(experts)]
    return sum(part * shares[:, i : i + 1] for i, part in enumerate(parts))


def by_where(experts, rows, weights, chosen):
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        token, slot = torch.where(chosen == i)  # the place of the break
        out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
    return out


def by_one_hot(experts, rows, weights, chosen):
    out = torch.zeros_like(rows)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for i in mask.sum((-1, -2)).nonzero():  # the place of the break
        slot, token = torch.where(mask[i[0]])
        out.index_add_(0, token, experts[i[0]](rows[token]) * weights[token, slot, None])
    return out


def by_item(experts, rows, weights, chosen):
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        if (chosen == i).any().item():  # the place of the break
            out = out + expert(rows) * (weights * (chosen == i)).sum(-1, keepdim=True)
    return out


HOW = {f.__name__: f for f in (dense, stacked, selected, by_where, by_one_hot, by_item)}
WHOLE, BROKEN = list(HOW)[:3], list(HOW)[3:]


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.mixer, self.out, self.experts = nn.Linear(D, D), nn.Linear(D, D), Experts(how)
        self.attention, self.feed_forward = Mark(), Mark()

    def forward(self, x):
        q = self.mixer(self.norms[0](x))
        x = x + self.attention(self.out(F.scaled_dot_product_attention(q, q, q)))
        return x + self.feed_forward(self.experts(self.norms[1](x)))


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.embedding = nn.Embedding(16, D)
        self.blocks = nn.ModuleList(Block(how) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def check(how, sites, compile_it, **keywords):
    """Compile a model, train one step, and hold it to the plain model under the sites' masks."""
    torch.manual_seed(0)
    model, truth = Model(how), Model(how)
    truth.load_state_dict(model.state_dict())
    for layer, block in enumerate(truth.blocks):
        hook_masks({getattr(block, site): (layer, site) for site in sites})
    tokens = torch.arange(12).view(2, 6)
    compiled = compile_it(model, dropout=P, seed=1, **keywords)
    found, wanted = compiled(tokens), truth(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    report = compiled.report()
    assert [s.name for s in report.sites] == [
        f"blocks.{i}.{s}" for i in range(LAYERS) for s in sites
    ]
    assert [s.name for s in compiled.last_executed_sites] == [s.name for s in report.sites]
    return report


@both
@pytest.mark.parametrize("how", WHOLE)
def test_experts_in_one_graph(how, compile_it):
    report = check(how, ["attention", "feed_forward"], compile_it, backend="eager")
    assert report.uncovered == [] and report.num_train_graphs == 1


@both
@pytest.mark.parametrize("how", BROKEN)
def test_a_break_in_the_experts_names_its_place_and_what_to_do(how, compile_it):
    compiled = compile_it(Model(how), dropout=P, seed=1, backend="eager")
    with pytest.raises(SiteError) as error:
        compiled(torch.arange(12).view(2, 6))
    text = str(error.value)
    assert re.search(r"the add at \S*test_compile_moe.py:\d+, `return x \+ self.feed_forward", text)
    line = re.search(r"The graph broke at \S*test_compile_moe.py:(\d+) \(", text)
    with open(__file__) as source:
        assert "# the place of the break" in source.read().splitlines()[int(line[1]) - 1]
    assert "grouped or batched products" in text and "strict=False" in text


@pytest.mark.parametrize("how", BROKEN)
def test_a_break_leaves_the_sites_of_both_sides_their_masks(how):
    """Attention lies before the break of its layer and behind those of the layers before."""
    backend = "aot_eager" if how == "by_where" else "eager"
    report = check(how, ["attention"], xtrain.compile, backend=backend, strict=False)
    assert len(report.uncovered) == 1 and report.num_train_graphs > 1
    assert re.search(r"the add at \S*test_compile_moe.py:\d+", report.uncovered[0])


# --- transformers' ------------------------------------------------------------------------------

SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=64,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def build(family, implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SMALL)
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, experts_implementation=implementation).train()


def labelled():
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids, use_cache=False)


@pytest.mark.parametrize(
    ("family", "implementation"), [("mixtral", "batched_mm"), ("qwen3_moe", "grouped_mm")]
)
def test_transformers_experts_as_products(family, implementation):
    model = build(family, implementation)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    found = compiled(**labelled())
    sites = [s.name for s in compiled.report().sites]
    kinds = ("attention", "feed_forward")
    assert sites == [f"model.layers.{i}.{kind}" for i in range(2) for kind in kinds]
    hook_masks_of_llama(model)
    assert torch.equal(found.logits, model(**labelled()).logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_experts_as_loops(family):
    """Each layer breaks: refused with the line of the add, and with strict=False listed."""
    with pytest.raises(SiteError, match=rf"modeling_{family}.py:\d+, `.*experts_implementation="):
        xtrain.compile(build(family, "eager"), dropout=P, seed=1, backend="eager")(**labelled())
    loose = xtrain.compile(build(family, "eager"), dropout=P, seed=1, backend="eager", strict=False)
    assert loose(**labelled()).loss.isfinite()
    assert all(f"modeling_{family}.py:" in line for line in loose.report().uncovered)
    assert len(loose.report().uncovered) >= 1
