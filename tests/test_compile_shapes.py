"""How many graphs are compiled when sizes, layers, their numbers and modes change.

Row C36, on our own model and on unchanged models of transformers with their default settings.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import SEED, both, hook_masks_of_llama
from torch import nn

import xtrain
from xtrain.compiler.entries import DictView, LayerView, floats_of_layer, numbers_of_layers
from xtrain.model import Config, Transformer

VOCAB = 64
SIZES = [(4, 128), (4, 96), (4, 64), (4, 32), (4, 33), (3, 33), (3, 128)]
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2)
GPT2 = dict(n_embd=32, n_head=2, vocab_size=VOCAB, bos_token_id=1, eos_token_id=1)
FAMILIES = {"llama": dict(SMALL, num_key_value_heads=1), "gpt2": GPT2}


def build(family, n_layers=2):
    torch.manual_seed(0)
    if family == "ours":
        return Transformer(Config.preset("tiny", n_layers=n_layers, vocab_size=VOCAB))
    transformers = pytest.importorskip("transformers")
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": n_layers}
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], **depth)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch(size, length):
    return torch.randint(VOCAB, (size, length), generator=torch.Generator().manual_seed(length))


def losses(model, sizes):
    """The loss at each size; in training with a backward behind each."""
    found = []
    for size in sizes:
        ids = batch(*size)
        if isinstance(model, Transformer):
            loss = model(ids, ids)[1]
        else:
            loss = model(input_ids=ids, labels=ids).loss
        if model.training:
            loss.backward()
        found.append(loss.detach())
    return torch.stack(found)


def compiled_with(compile_it, model, **options):
    options = {"dropout": 0.5, "seed": SEED, "backend": "eager", "existing": "replace", **options}
    return compile_it(model, **options)


def num_graphs(compiled):
    return compiled.report().num_train_graphs, compiled.report().num_eval_graphs


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dynamic", "number"),
    [("ours", None, 2), ("llama", True, 1), ("gpt2", None, 2)],
)
def test_graphs_over_changing_lengths_and_batches(family, dynamic, number):
    """In training and in evaluation; a batch of 1 is a case of its own to torch: one more."""
    model = build(family)
    compiled = compiled_with(xtrain.compile, model, dynamic=dynamic)
    losses(compiled, SIZES)
    assert num_graphs(compiled) == (number, 0)
    found = losses(compiled.eval(), SIZES)
    assert num_graphs(compiled) == (number, number)
    torch.testing.assert_close(found, losses(model, SIZES))
    losses(compiled.train(), [(1, 40), (1, 50), (2, 50)])
    assert num_graphs(compiled) == (number + 1, number)


@both
def test_an_evaluation_at_other_sizes_leaves_the_training_graph_alone(compile_it):
    compiled = compiled_with(compile_it, build("ours"))
    for _ in range(3):
        losses(compiled.train(), [(4, 16)])
        losses(compiled.eval(), [(2, 16), (2, 24), (3, 20)])
    assert num_graphs(compiled) == (1, 2)


@pytest.mark.parametrize(
    ("compile_it", "dynamic"),
    [(xtrain.compile, None), (xtrain.compile, True), (xtrain.compile_blocks, None)],
)
def test_sizes_that_happen_to_be_equal_are_not_taken_for_one(compile_it, dynamic):
    """Batch = length, and length = width of the model (32 of Llama's hidden size here)."""
    compiled = compiled_with(compile_it, build("llama"), dynamic=dynamic)
    losses(compiled, [(4, 16), (8, 32), (6, 6), (3, 32), (5, 17)])
    assert num_graphs(compiled)[0] <= 2
    other = compiled_with(compile_it, build("llama"), dynamic=dynamic)
    losses(other, [(32, 32), (8, 32), (6, 6), (3, 32), (5, 17)])
    assert num_graphs(other)[0] <= 2


# --- one compile for all layers -----------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_twelve_layers_of_transformers_share_one_graph(family, caplog):
    """With use_cache=True, which is the default: each layer reads its own entry of the cache."""
    model = build(family, n_layers=12)
    compiled = compiled_with(xtrain.compile_blocks, model, backend="aot_eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    losses(compiled, SIZES[:1])
    assert counters["aot_autograd"]["ok"] == 1, "one forward and one backward"
    losses(compiled, SIZES[1:])
    assert num_graphs(compiled) == (2, 0) and counters["aot_autograd"]["ok"] == 2
    sites = [(s.layer, s.site) for s in compiled.last_executed_sites]
    assert sites == [(layer, s) for layer in range(12) for s in ("attention", "feed_forward")]
    found = losses(compiled.eval(), SIZES)
    assert num_graphs(compiled) == (2, 2)
    torch.testing.assert_close(found, losses(model, SIZES))
    assert "recompile_limit" not in caplog.text and "cache_size_limit" not in caplog.text


def test_layers_of_an_encoder_and_a_decoder_share_graphs():
    """T5's first layers compute the position bias, the others are given it: two graphs a list."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=VOCAB, dropout_rate=0.0)
    torch.manual_seed(0)
    config = transformers.T5Config(num_layers=4, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    compiled = compiled_with(xtrain.compile_blocks, model)
    losses(compiled, [(2, 9)])
    assert num_graphs(compiled) == (4, 0) and len(compiled.last_executed_sites) == 4 * 5
    torch.testing.assert_close(losses(compiled.eval(), [(2, 9)]), losses(model, [(2, 9)]))


def test_the_cache_and_the_masks_of_layers_that_share_a_graph():
    """Logits, cache and gradients; the truth is the plain model with NumPy's masks in hooks."""
    model = build("llama", n_layers=3)
    plain = copy.deepcopy(model)
    hook_masks_of_llama(plain)
    ids = batch(2, 9)
    compiled = compiled_with(xtrain.compile_blocks, model)
    found, expected = (m(input_ids=ids, labels=ids) for m in (compiled, plain))
    assert torch.equal(found.logits, expected.logits)
    assert type(found.past_key_values.layers) is list
    assert found.past_key_values.get_seq_length() == 9
    for ours, theirs in zip(
        found.past_key_values.layers, expected.past_key_values.layers, strict=True
    ):
        assert type(ours) is type(theirs) and ours.is_initialized
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    for out in (found, expected):  # the cache is differentiable, as it was
        (
            out.loss + sum(layer.keys.square().sum() for layer in out.past_key_values.layers)
        ).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_decoding_token_by_token_with_a_cache():
    """Prompt, first token, tokens behind it: graphs for all layers, not for each of them."""
    model = build("llama", n_layers=5).eval()
    compiled = compiled_with(xtrain.compile_blocks, model)
    prompt = batch(2, 7)

    def decode(model, steps=8):
        ids, cache = prompt, None
        found = []
        for _ in range(steps):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            found.append(ids)
        return torch.cat(found, 1)

    with torch.no_grad():
        expected = decode(model)
        assert torch.equal(decode(compiled), expected)
        assert num_graphs(compiled) == (0, 3)
        for _ in range(2):  # the prompt's length is a symbol from now on
            assert torch.equal(decode(compiled), expected)
            assert num_graphs(compiled)[1] <= 4
    generated = compiled.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(generated[:, 7:], expected), "generate() calls the model itself"


def test_two_forwards_before_two_backwards_of_shared_graphs():
    gradients = []
    for compile_it in (xtrain.compile, xtrain.compile_blocks):
        model = build("llama", n_layers=3)
        compiled = compiled_with(compile_it, model, backend="aot_eager")
        first, second = (compiled(input_ids=x, labels=x).loss for x in (batch(2, 8), batch(2, 9)))
        second.backward()
        first.backward()
        gradients.append([p.grad for p in model.parameters()])
    rope = [r.skipped for r in compiled.report().passes if r.name == "use_triton_rope"]
    assert rope and all("nothing shows that cos gives both" in " ".join(r) for r in rope)
    assert all("it is made outside of this graph" in " ".join(r) for r in rope)
    torch.testing.assert_close(*gradients)


# --- the view of a layer ------------------------------------------------------------------------


class Store:
    def __init__(self, number):
        self.entries = [None] * number
        self.seen = dict.fromkeys(range(number), 0)


class Reader(nn.Module):
    """Keeps its input, and reads other layers' entries in whatever way `rule` says."""

    def __init__(self, index, rule):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.index, self.rule = index, rule

    def forward(self, x, store):
        store.entries[self.index] = x
        store.seen[self.index] = store.seen.get(self.index) + 1
        return x + self.down(self.up(x + self.rule(store.entries, self.index)))


RULES = {
    "own": lambda entries, i: entries[i],
    "first": lambda entries, i: entries[0],
    "last": lambda entries, i: 0 if entries[-1] is None else entries[-1],
    "the one before": lambda entries, i: entries[max(i - 1, 0)],
    "all": lambda entries, i: sum(e for e in entries if e is not None),
    "number": lambda entries, i: len(entries),
    "slice": lambda entries, i: sum(entries[: i + 1]),
}


class Readers(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.layers = nn.ModuleList(Reader(i, rule) for i in range(4))

    def forward(self, x):
        store = Store(4)
        for layer in self.layers:
            x = layer(x, store)
        return x, store


@pytest.mark.parametrize("rule", RULES)
def test_whatever_a_layer_reads_is_what_the_list_holds(rule):
    torch.manual_seed(0)
    model = Readers(RULES[rule])
    x = torch.randn(2, 3, 4, requires_grad=True)  # as the layers behind the first see it
    expected, store = model(x)
    compiled = xtrain.compile_blocks(model, dropout=0.0, backend="eager")
    for _ in range(2):
        found, kept = compiled(x)
        assert torch.equal(found, expected) and type(kept.entries) is list
        assert all(map(torch.equal, kept.entries, store.entries))
        assert type(kept.seen) is dict and kept.seen == dict.fromkeys(range(4), 1)
    if rule in ("own", "number"):
        assert compiled.report().num_train_graphs == 1


def test_a_view_is_the_list():
    entries = [[], {}, None]
    view = LayerView(entries, 1)
    assert view[1] is entries[1] and view[0] is entries[0] and view[-1] is None
    view[1], view[2] = "own", "other"
    assert entries == [[], "own", "other"] and view[1] == "own"
    assert len(view) == 3 and list(view) == entries and view.index("own") == 1
    with pytest.raises(IndexError):
        view[3]


def test_a_view_of_a_dict_is_the_dict():
    entries = {0: "a", 1: "b", 2: "c"}
    view = DictView(entries, 1)
    assert (view[1], view[0], view.get(1), view.get(2), view.get(5)) == ("b", "a", "b", "c", None)
    view[1] = "own"
    assert 1 in view and 5 not in view and list(view.values()) == ["a", "own", "c"]
    assert entries[1] == "own" and view[1] == "own"
    with pytest.raises(KeyError):
        view[3]


def test_numbers_of_layers():
    layers = [Reader(i, None) for i in range(3)]
    for i, layer in enumerate(layers):
        layer.up.number, layer.up.width, layer.even, layer.step = i + 5, 8, i % 2 == 0, 2 * i
    assert numbers_of_layers(layers) == {"index", "number"}
    assert numbers_of_layers(layers[:1]) == set()


# --- layers that hold another float each ----------------------------------------------------------


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


def test_floats_of_a_layer_are_those_that_differ():
    layers = Model("product").layers
    assert floats_of_layer(layers[1], layers) == (layers[1].scale,)
    assert floats_of_layer(layers[1], layers[1:2]) == ()
