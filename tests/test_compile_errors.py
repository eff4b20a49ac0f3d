"""What is refused or fails, in one message that names the cause and what to do."""

from __future__ import annotations

import logging
import random
import re

import pytest
import torch
from branch_oracle import both
from probe_model import SHAPE, Block, P, ProbeModel, decode_masks, oracle_mask, probe, tokens
from test_compile_moe import build, labelled
from torch import nn

import xtrain
from xtrain.compiler import SiteError
from xtrain.compiler.backend import Backend
from xtrain.model import Config, Transformer


def tiny(**overrides):
    return Transformer(Config.preset("tiny", **overrides))


# --- arguments ----------------------------------------------------------------------------------

WRONG = {
    "not a module": (lambda: xtrain.compile(torch.sin), TypeError, "must be an nn.Module, got"),
    "backend": (lambda: probe(backend="cudagraphs"), ValueError,
                "backend must be one of inductor, aot_eager, eager, got 'cudagraphs'"),
    "kernels": (lambda: probe(kernels="on"), ValueError, "kernels must be one of auto, triton"),
    "existing": (lambda: probe(existing="both"), ValueError, "existing must be one of skip"),
    "logits": (lambda: probe(logits="none"), ValueError, "logits must be one of keep, drop, got"),
    "dropout NaN": (lambda: probe(dropout=float("nan")), ValueError, "in .0, 1., got nan"),
    "dropout negative": (lambda: probe(dropout=-0.1), ValueError, "in .0, 1., got -0.1"),
    "dropout above 1": (lambda: probe(dropout=1.5), ValueError, "in .0, 1., got 1.5"),
    "dropout bool": (lambda: probe(dropout=True), TypeError, "a number in .0, 1.* got True"),
    "dropout str": (lambda: probe(dropout="0.1"), TypeError, "a number in .* got '0.1'"),
    "seed float": (lambda: probe(seed=1.0), TypeError, "seed must be an int, got 1.0"),
    "seed bool": (lambda: probe(seed=False), TypeError, "seed must be an int, got the bool False"),
    "unknown keyword": (lambda: probe(drop=0.1), TypeError,
                        "unexpected keyword 'drop'.*mode, options, dynamic, fullgraph"),
    "unknown pass": (lambda: probe(disable_passes=["insert"]), ValueError,
                     "'insert'; the passes are insert_residual_dropout"),
    "no pass": (lambda: probe(passes=[3]), TypeError, "a pass must be a function with a name"),
    "no list of passes": (lambda: probe(passes=print), TypeError, "passes must be a list"),
    "a pass by our name": (lambda: probe(passes=[("normalise", print)]), ValueError,
                           "pass name 'normalise' belongs to xtrain; choose another"),
    "a pass named twice": (lambda: probe(passes=[("a", print), ("a", repr)]), ValueError,
                           "two passes are named 'a'"),
    "disable_passes int": (lambda: probe(disable_passes=3), TypeError,
                           "disable_passes must be a list of names, got 3"),
    "strict str": (lambda: probe(strict="no"), TypeError, "strict must be True or False, got 'no'"),
    "verify str": (lambda: probe(verify="yes"), TypeError,
                   "verify must be True or False, got 'yes'"),
    "fullgraph int": (lambda: probe(fullgraph=3), TypeError, "fullgraph must be True or False"),
    "dynamic str": (lambda: probe(dynamic="auto"), TypeError,
                    "dynamic must be True, False or None, got 'auto'"),
    "dump_graphs int": (lambda: probe(dump_graphs=3), TypeError,
                        "dump_graphs must be a folder's path, got 3"),
    "mode of no inductor": (lambda: probe(mode="max-autotune"), ValueError,
                            "mode is for backend='inductor', and backend is 'eager'"),
    "options of no inductor": (lambda: probe(options={"max_autotune": True}), ValueError,
                               "options is for backend='inductor', and backend is 'eager'"),
    "unknown mode": (lambda: probe(backend="inductor", mode="fast"), ValueError,
                     "mode or options: .*fast"),
    "unknown option": (lambda: probe(backend="inductor", options={"fast": 1}), ValueError,
                       "mode or options: .*fast"),
    "compiled twice": (lambda: probe(probe()), TypeError, "compiled already; pass compiled.inner"),
    "a compiled part": (lambda: probe(nn.Sequential(probe())), TypeError,
                        "a part of the model, '0', is compiled already"),
    "torch.compile's": (lambda: probe(torch.compile(ProbeModel())), TypeError,
                        "comes from torch.compile; pass the model itself"),
    "DataParallel": (lambda: probe(nn.DataParallel(ProbeModel())), TypeError,
                     r"compile the model inside DataParallel: DataParallel\(xtrain.compile"),
    "no blocks": (lambda: xtrain.compile_blocks(nn.Linear(2, 2), backend="eager"), ValueError,
                  "Linear has no blocks to compile one by one.*use xtrain.compile"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        call()


def test_ddp_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(ProbeModel())
        with pytest.raises(TypeError, match=r"DistributedDataParallel\(xtrain.compile\(model\)"):
            probe(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_dropout_none_takes_our_models_configuration_and_0_of_others():
    assert "dropout=0.25" in repr(xtrain.compile(tiny(dropout=0.25)))
    assert "dropout=0.0" in repr(xtrain.compile(tiny()))
    assert "dropout=0.5" in repr(xtrain.compile(tiny(dropout=0.25), dropout=0.5))
    assert "dropout=0.0" in repr(xtrain.compile(tiny(dropout=0.25), dropout=0))

    class Foreign(ProbeModel):
        config = Config.preset("tiny", dropout=0.25)

    compiled = xtrain.compile(Foreign(), backend="eager")
    assert compiled(tokens()).unique().tolist() == [15.0]
    report = compiled.report()
    assert (report.sites, report.num_train_graphs, report.num_eval_graphs) == ([], 1, 0)


# --- strict -------------------------------------------------------------------------------------


class Skipping(ProbeModel):
    """Layer drop: some blocks are left out of a forward."""

    left_out: tuple[int, ...] = ()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = x if i in self.left_out else block(x)
        return x


def test_a_model_without_a_site_is_an_error():
    compiled = probe(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8)))
    with pytest.raises(SiteError, match=r"ran no residual site.*dropout=0 trains without"):
        compiled(tokens())
    loose = probe(compiled.inner, strict=False)
    assert torch.equal(loose(tokens()), compiled.inner(tokens()))


@both
def test_fewer_sites_than_reported_are_an_error(compile_it):
    model = Skipping(num_layers=3)
    compiled = probe(model, compile_it)
    compiled(tokens())
    model.left_out = (1,)
    match = r"ran 4 residual sites of 6; missing: blocks.1.attention, blocks.1.feed_forward"
    with pytest.raises(SiteError, match=match):
        compiled(tokens())
    compiled.eval()
    compiled(tokens())  # evaluation has no sites to miss
    model.train()
    loose = probe(model, compile_it, strict=False)
    loose(tokens())
    model.left_out = (2,)
    loose.set_step(0)
    masks = decode_masks(loose(tokens()), 2)
    keep = oracle_mask(0, 0, 1, "attention")
    assert torch.equal(masks[2], keep), "a layer keeps its number"


def test_a_branch_that_a_break_cuts_trains_without_dropout_and_the_report_says_so():
    """The piece with the add sees two inputs alike: dropout on a guess could fall on the stream.

    Strict mode refuses it.
    """
    compiled = probe(ProbeModel(breaks="inside a branch"), strict=False)
    out = compiled(tokens())
    assert [s.name for s in compiled.last_executed_sites] == [
        "blocks.0.attention", "blocks.1.attention"
    ]  # fmt: skip
    masks = decode_masks(out - 2 - 8, 4)  # the feed-forwards add their constants undropped
    for layer in range(2):
        assert torch.equal(masks[2 * layer], oracle_mask(0, 0, layer, "attention"))
    (line,) = compiled.report().uncovered
    assert "gets a branch and a stream from different graphs" in line and "self.mlp(x)" in line
    assert f"places that train without dropout: 1\nuncovered: {line}" in str(compiled.report())
    with pytest.raises(SiteError, match=r"graph break.*strict=False"):
        probe(ProbeModel(breaks="inside a branch"))(tokens())


def test_blocks_may_differ_where_each_sum_is_accounted_for():
    class Forgetful(Block):
        def forward(self, x):
            return x + self.attn(x) if self.skips else super().forward(x)

    model = ProbeModel(num_layers=3)
    model.blocks = nn.ModuleList(Forgetful(SHAPE, i) for i in range(3))
    for i, block in enumerate(model.blocks):
        block.skips = i == 1
    compiled = probe(model)
    compiled(tokens())
    assert [s.name for s in compiled.last_executed_sites] == [
        "blocks.0.attention", "blocks.0.feed_forward", "blocks.1.attention",
        "blocks.2.attention", "blocks.2.feed_forward",
    ]  # fmt: skip
    assert [(s.verdict, s.count) for s in compiled.report().account] == [("site", 5)]


def test_layers_past_the_recompile_limit_are_an_error_that_says_so():
    """As with a key-value cache: each layer reads something of its own, and is compiled anew."""

    class Named(Block):
        def forward(self, x):
            return super().forward(x) if self.own_name else x

    model = ProbeModel(num_layers=3)
    model.blocks = nn.ModuleList(Named(SHAPE, i) for i in range(3))
    for i, block in enumerate(model.blocks):
        block.own_name = f"layer {i}"
    compiled = probe(model, xtrain.compile_blocks)
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.raises(SiteError, match=r"ran outside.*recompile_limit.*use_cache=False"):
            compiled(tokens())


def test_a_silent_fall_back_to_eager_is_an_error(caplog):
    """With suppress_errors Dynamo runs the model itself, without dropout, when a backend fails."""

    def broken(graph):
        raise KeyError("some node")

    caplog.set_level(logging.CRITICAL)
    compiled = probe(passes=[broken])
    with torch._dynamo.config.patch(suppress_errors=True):
        with pytest.raises(SiteError, match="Dynamo fell back to eager"):
            compiled(tokens())
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(SiteError, match="ran no residual site"):
            probe()(tokens())


def test_disabling_the_insertion_leaves_no_dropout():
    keywords = dict(disable_passes=["insert_residual_dropout"])
    with pytest.raises(SiteError, match="ran no residual site"):
        probe(**keywords)(tokens())
    assert probe(strict=False, **keywords)(tokens()).unique().tolist() == [15.0]


@both
def test_a_layer_that_was_not_there_is_an_error_that_says_so(compile_it):
    model = ProbeModel()
    compiled = probe(model, compile_it)
    compiled(tokens())
    model.blocks.append(Block(SHAPE, 2))
    with pytest.raises(
        SiteError, match="blocks holds 3 modules and held 2. Call xtrain.compile ag"
    ):
        compiled(tokens())
    loose = probe(model, compile_it, strict=False)
    loose(tokens())
    model.blocks.append(Block(SHAPE, 3))
    if compile_it is xtrain.compile:
        with pytest.raises(SiteError, match="blocks.3 is new. Call xtrain.compile again"):
            loose(tokens())
    del model.blocks[3]
    loose(tokens())


def test_blocks_compiled_anew_leave_the_first_compiled_model_with_an_error():
    """The blocks have one forward each, and it is the last one's."""
    model = ProbeModel()
    first, last = (
        xtrain.compile_blocks(model, dropout=P, seed=seed, backend="eager", strict=False)
        for seed in (0, 1)
    )
    last(tokens())
    assert len(last.last_executed_sites) == 4
    with pytest.raises(RuntimeError, match="compile_blocks was called on this ProbeModel again"):
        first(tokens())
    assert torch.equal(first.eval()(tokens()), last(tokens())), "evaluation needs no dropout"


# --- layers left out at random, and other breaks of a graph ---------------------------------------


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


@pytest.mark.parametrize("how", HOW)
def test_a_random_branch_is_named_with_what_to_do(how):
    """Each forward is accounted for by itself; one with fewer sites than before is an error."""
    compiled = probe(LayerDrop(how, 0.0))
    compiled(tokens())
    assert len(compiled.last_executed_sites) == 6, "probability 0 keeps every site"
    compiled.rate = 1.0
    with pytest.raises(SiteError) as error:
        compiled(tokens())
    text = str(error.value)
    assert "ran 4 residual sites of 6; missing: blocks.1.attention, blocks.1.feed_forward" in text
    assert re.search(r"The graph broke at \S*test_compile_errors.py:\d+ \(.*: `if ", text)
    assert "decided at random" in text and "layerdrop" in text and "strict=False" in text
    assert "experts" not in text
    loose = probe(LayerDrop(how, 1.0), strict=False)
    loose(tokens())
    assert [s.layer for s in loose.last_executed_sites] == [0, 0, 2, 2]


def test_a_block_that_did_not_run_is_named_where_blocks_are_compiled_one_by_one():
    compiled = probe(LayerDrop("python", 0.0), xtrain.compile_blocks)
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
        probe(model)(tokens())
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
        probe(model)(input_ids=ids, labels=ids)


def test_modules_of_a_piece_are_spelt_plainly():
    from xtrain.compiler.compile_report import ENTRY_ROOT, readable_path, without_locals

    assert readable_path("L['self'].self_attn") == "self.self_attn"
    assert readable_path(f"{ENTRY_ROOT}.layers.0") == "layers.0"
    assert readable_path(ENTRY_ROOT) == "the model's own forward"
    assert without_locals("dropout in L['self'].attn") == "dropout in self.attn"


# --- a backend that fails on an op ----------------------------------------------------------------


@torch.library.custom_op("xtrain_test::rows", mutates_args=())
def rows(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The identity; its backward reads numbers on the host, as loops over experts do."""
    return x.clone()


@rows.register_fake
def _(x, lengths):
    return torch.empty_like(x)


def read_lengths(ctx, grad):
    for length in ctx.lengths.tolist():
        if length:
            continue
    return grad, None


rows.register_autograd(
    read_lengths, setup_context=lambda ctx, inputs, output: setattr(ctx, "lengths", inputs[1])
)


class Rows(nn.Module):
    def forward(self, x):
        return rows(x, torch.arange(3))  # the place of the failure


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that our backend is called with."""
    torch._dynamo.reset()
    seen = []
    call = Backend.__call__
    monkeypatch.setattr(
        Backend, "__call__", lambda self, m, inputs: seen.append(m) or call(self, m, inputs)
    )
    return seen


def place_in_this_file(text):
    line = re.search(r"on the op at \S*test_compile_errors.py:(\d+)", text)
    with open(__file__) as source:
        return source.read().splitlines()[int(line[1]) - 1]


@pytest.mark.parametrize(
    ("compile_it", "backend"),
    [(xtrain.compile, "inductor"), (xtrain.compile_blocks, "aot_eager")],
)
def test_an_op_in_a_branch_that_cannot_be_traced_is_refused_at_once(graphs, backend, compile_it):
    model = ProbeModel()
    model.blocks[1].mlp = nn.Sequential(model.blocks[1].mlp, Rows())
    compiled = probe(model, compile_it, backend=backend)
    with pytest.raises(SiteError) as error:
        compiled(tokens())
    text = str(error.value)
    assert f"the backend '{backend}' failed with DataDependentOutputException: aten." in text
    assert "# the place of the failure" in place_in_this_file(text) and "in its backward" in text
    assert "graph broke" not in text and "batched_mm" in text and "strict=False" in text
    assert len(graphs) <= 2, "one for the first block, where blocks are compiled one by one"


def test_an_op_behind_the_stream_costs_no_site(graphs):
    """Dynamo traces one function less, and what it leaves to eager holds no add."""

    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = ProbeModel(), Rows()

        def forward(self, tokens):
            return self.head(self.body(tokens))

    compiled = probe(Headed(), backend="aot_eager")
    compiled(tokens()).sum().backward()
    assert len(compiled.last_executed_sites) == 4 and compiled.report().uncovered == []
    assert len(graphs) > 1


def test_what_a_failure_leaves_to_eager_is_named_by_later_refusals(graphs):
    """The op lies between two layers: no branch holds it, and the function of both adds is lost."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(4))
            self.rows = Rows()

        def forward(self, x):
            first, second, third, fourth = self.weights
            x = x + (x @ first).relu() @ second
            x = self.rows(x)
            return x + (x @ third).relu() @ fourth

    compiled = probe(Between(), backend="aot_eager")
    with pytest.raises(SiteError) as error:
        compiled(torch.ones(2, 3, 8))
    text = str(error.value)
    assert "It began with this: the backend 'aot_eager' failed with DataDependentOutput" in text
    assert "# the place of the failure" in place_in_this_file(text)


def test_transformers_grouped_experts_on_fp32_weights(graphs, family="mixtral"):
    """Their fallback's backward reads the experts' offsets; batched_mm trains."""
    compiled = probe(build(family, "grouped_mm"), backend="aot_eager")
    with pytest.raises(SiteError, match=r"transformers/integrations/moe.py:\d+, in its backward"):
        compiled(**labelled())
    assert len(graphs) == 1
    other = probe(build(family, "batched_mm"), backend="aot_eager")
    other(**labelled()).loss.backward()
    assert len(other.last_executed_sites) == 4
