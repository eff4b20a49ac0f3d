"""xtrain.compile with kernels on a CPU: what is swapped in which model, and nothing else is."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from mask_oracle import keep_mask
from probe_model import ProbeModel, decode_masks, gradient_masks
from test_compile_models import T5, assert_sites_of, build, labelled
from tolerances import assert_no_worse_than_plain
from torch import nn

import xtrain
from xtrain import ops, passes, torch_compat
from xtrain.compiler import backend
from xtrain.model import Config, Transformer
from xtrain.passes.graph import clone_graph
from xtrain.rng import site_seed

P = 0.1
SWAPS = [name for name in passes.PASSES if name.startswith(("use_triton", "fuse"))]


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", vocab_size=64, n_kv_heads=1, **overrides))


def tokens(length=9, size=2):
    ids = torch.randint(3, 64, (size, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def counts(compiled):
    """Swap -> how many it replaced, over all training graphs."""
    found = dict.fromkeys(SWAPS, 0)
    for result in compiled.report().passes:
        if result.name in found:
            found[result.name] += result.num_replaced
    return found


def skipped(compiled, name):
    results = [r for r in compiled.report().passes if r.name == name]
    return {reason: n for r in results for reason, n in r.skipped.items()}  # of the last graph


def loss_and_gradients(model, compiled, call, autocast=False, first="loss"):
    """[loss, or another output by its name, every gradient] of one training step."""
    model.zero_grad()
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context:
        out = compiled(**call) if isinstance(call, dict) else compiled(*call)
    loss = out.loss if isinstance(call, dict) else out[1]
    loss.backward()
    value = loss if first == "loss" else out[first]
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_as_good_as_plain(model, call, *, autocasts=(False,), first="loss", **options):
    """Hold a swapped model to fp64 against the plain one with the same masks; the compiled models.

    backend="eager" swaps nothing: it is plain PyTorch with our dropout.
    """
    results, compiled = {}, []
    for autocast in autocasts:
        compiled.append(xtrain.compile(model, dropout=P, seed=1, backend="aot_eager", **options))
        unswapped = xtrain.compile(model, dropout=P, seed=1, backend="eager")
        results[autocast] = [
            loss_and_gradients(model, m, call, autocast, first) for m in (compiled[-1], unswapped)
        ]
    exact = xtrain.compile(model.double(), dropout=P, seed=1, backend="eager")
    truth = loss_and_gradients(model, exact, call, first=first)
    model.float()
    for autocast, (found, plain) in results.items():
        for actual, reference, value in zip(found, plain, truth, strict=True):
            if autocast:
                # Every number carries bf16's error: the whole tensor's is what can be compared,
                # where the largest of a few elements is chance. A loss may be exact by chance: half
                # an ulp of its bf16 logits, averaged over 18 tokens, is 2^-11 of it (seen: 2^-18).
                slack = 2.0**-15 * float(value.norm()) if value.ndim == 0 else 0.0
                assert distance(actual, value) <= 2 * distance(reference, value) + slack
            else:
                # Scaled by its own size: that is what the rounding of a gradient is relative to.
                scale = float(value.abs().max())
                assert_no_worse_than_plain(actual, reference, value, scale=scale)
    return compiled


def distance(a, truth):
    return float((a.double() - truth).norm())


# --- counts: row C16 ----------------------------------------------------------------------------


def expected(norms, ropes, swiglus, attentions, heads, fused, geglus=0):
    values = norms, ropes, swiglus, geglus, attentions, heads, fused
    return dict(zip(SWAPS, values, strict=True))


# Two layers each. Norms: two a layer and the last; q/k norms, post and sandwich norms come on top.
FAMILIES = {
    "llama": expected(5, 4, 2, 2, 1, 4),
    "qwen3": expected(9, 4, 2, 2, 1, 4),
    "gemma": expected(5, 4, 0, 2, 1, 4, geglus=2),
    "gemma2": expected(9, 4, 0, 2, 1, 4, geglus=2),
    "gemma3_text": expected(13, 4, 0, 2, 1, 4, geglus=2),
    "olmo2": expected(9, 4, 2, 2, 1, 1),  # post norm: only the last norm reads a sum
    "phi3": expected(5, 4, 2, 2, 1, 4),
    "nanochat": expected(10, 4, 0, 2, 1, 4),  # one norm more, in front of the layers; MLPs of ReLUs
    "llama4_text": expected(9, 4, 4, 2, 1, 4),  # a shared expert beside the others
    "deepseek_v2": expected(9, 4, 2, 2, 1, 4),  # latent attention: keys are written into a buffer
    "gpt2": expected(0, 0, 0, 0, 1, 0),  # LayerNorm, attention dropout
    "gpt_neox": expected(0, 4, 0, 2, 1, 0),
}


FP32, BF16 = (False,), (True,)
PRECISIONS = {
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "nanochat", "llama4_text"], FP32 + BF16),
    **dict.fromkeys(["deepseek_v2", "olmo2", "phi3"], FP32),
    "qwen3": BF16,
}


@pytest.mark.parametrize("family", PRECISIONS)
def test_counts_values_and_gradients_of_a_family(family):
    """Each has something of its own: 1 + w and sandwich norms, post norm, packed gates.

    In fp32 and under bf16 autocast.
    """
    model, call = build(family)[0], labelled(family)
    for compiled in assert_as_good_as_plain(
        model, call, autocasts=PRECISIONS[family], logits="drop"
    ):
        assert counts(compiled) == FAMILIES[family]
        assert_sites_of(family, compiled.report())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_counts_of_a_family(family):
    model, _ = build(family)
    options = dict(backend="aot_eager", logits="drop", existing="replace")
    compiled = xtrain.compile(model, dropout=P, seed=1, **options)
    out = compiled(**labelled(family))
    assert out.loss.isfinite() and out.logits is None
    assert counts(compiled) == FAMILIES[family]
    assert_sites_of(family, compiled.report())


def test_an_encoder_decoder_with_gated_feed_forwards():
    """T5 1.1 writes its GELU out. A loss of bf16 logits may be exact by chance: these are held."""
    transformers = pytest.importorskip("transformers")
    options = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    config = transformers.AutoConfig.for_model("t5", **T5, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).train()
    options = dict(autocasts=FP32 + BF16, first="logits", strict=False)
    for compiled in assert_as_good_as_plain(model, labelled("t5"), **options):
        found = counts(compiled)
        assert (found["use_triton_geglu"], found["use_triton_swiglu"]) == (4, 0)
        assert found["use_triton_rms_norm"] == 12


@pytest.mark.parametrize("n_layers", [1, 4])
def test_counts_of_our_own_model(n_layers):
    L, autocasts = n_layers, FP32 + BF16 if n_layers == 1 else FP32
    found = assert_as_good_as_plain(tiny(n_layers=L), tokens(), autocasts=autocasts, logits="drop")
    for compiled in found:
        assert counts(compiled) == expected(2 * L + 1, 2 * L, L, L, 1, 2 * L)
    report = str(compiled.report())
    assert f"{2 * L + 1} x decomposition on cpu" in report and "left alone" in report


def test_checkpointed_blocks_are_swapped_inside():
    """Of each body the attention's branch fuses; the feed-forward's sum is read outside of it."""
    (compiled,) = assert_as_good_as_plain(tiny(recompute="full"), tokens())
    assert list(counts(compiled).values()) == [5, 4, 2, 0, 2, 0, 2]


def test_gradient_checkpointing_of_a_foreign_model():
    model, _ = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (compiled,) = assert_as_good_as_plain(model, labelled("llama"))
    assert list(counts(compiled).values())[:5] == [5, 4, 2, 0, 2]


def test_logits_are_dropped_only_in_training_with_labels():
    model, (ids, targets) = tiny(), tokens()
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager", logits="drop")
    logits, loss = compiled(ids, targets)
    assert logits is None and loss.isfinite()
    assert compiled(ids)[0] is not None
    compiled.eval()
    assert compiled(ids, targets)[0] is not None
    compiled.train()
    kept = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager")
    assert kept(ids, targets)[0] is not None
    assert 'pass logits="drop"' in str(kept.report())
    enough = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager")
    enough(ids, targets, return_logits=False)[1].backward()
    assert counts(enough)["use_triton_linear_cross_entropy"] == 1
    unswapped = xtrain.compile(model, dropout=P, backend="eager", logits="drop")
    assert unswapped(ids, targets)[0] is not None
    assert "logits are kept" in str(unswapped.report())


# --- masks --------------------------------------------------------------------------------------


class NormedProbe(ProbeModel):
    """The probe with a norm before each branch, so that every dropout is fused."""

    def __init__(self, **options):
        super().__init__(**options)
        self.weight = nn.Parameter(torch.ones(8))
        for block in self.blocks:
            for branch in (block.attn, block.mlp):
                plain = branch.forward
                branch.forward = lambda x, plain=plain: plain(
                    F.rms_norm(x, (8,), self.weight, 1e-6)
                )

    def forward(self, ids):
        stream = super().forward(ids)
        return F.rms_norm(stream, (8,), self.weight, 1e-6) * 0 + stream


@pytest.mark.parametrize(
    ("backend", "checkpointed"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_masks_after_fusing_are_the_oracles(backend, checkpointed):
    model = NormedProbe(checkpointed=checkpointed)
    compiled = xtrain.compile(model, dropout=0.5, seed=3, backend=backend)
    compiled.set_step(5, first_sample=0)
    out = compiled(torch.zeros(4, 5, dtype=torch.int64))
    out.sum().backward()
    assert counts(compiled)["fuse_dropout_add_rms_norm"] >= 2
    names = [(layer, site) for layer in (0, 1) for site in ("attention", "feed_forward")]
    oracle = [torch.from_numpy(keep_mask((4, 5, 8), 0.5, site_seed(3, 5, *n))) for n in names]
    assert all(map(torch.equal, decode_masks(out, 2), oracle))
    assert all(map(torch.equal, gradient_masks(model), oracle))


# --- shapes -------------------------------------------------------------------------------------


def test_dynamic_shapes_swap_and_compile_at_most_twice():
    model = tiny()
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager")
    eager = xtrain.compile(model, dropout=P, seed=1, backend="eager", dynamic=False)
    before = torch_compat.num_compiled_graphs()
    outs = []
    for step, (length, size) in enumerate([(9, 2), (12, 2), (7, 3), (16, 4)]):
        compiled.set_step(step)
        outs.append(compiled(*tokens(length, size))[1])
    assert torch_compat.num_compiled_graphs() - before <= 2
    num_graphs = compiled.report().num_train_graphs
    assert list(counts(compiled).values())[:5] == [n * num_graphs for n in (5, 4, 2, 0, 2)]
    for step, (length, size) in enumerate([(9, 2), (12, 2), (7, 3), (16, 4)]):
        eager.set_step(step)
        torch.testing.assert_close(outs[step], eager(*tokens(length, size))[1])


def test_a_mask_of_symbolic_size_is_left_with_its_reason():
    model, _ = build("llama")
    compiled = xtrain.compile(model, dropout=P, backend="aot_eager", dynamic=True, strict=False)
    compiled(**labelled("llama")).loss.backward()
    reason = "its mask has symbolic sizes, so that it cannot be computed here"
    assert skipped(compiled, "use_triton_sdpa") == {reason: 2}
    assert list(counts(compiled).values()) == [5, 4, 2, 0, 0, 0, 4]


def test_blocks_compiled_one_by_one():
    model = tiny(n_layers=3)
    compiled = xtrain.compile_blocks(model, dropout=P, seed=1, backend="aot_eager")
    whole = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    found, plain = (loss_and_gradients(model, m, tokens()) for m in (compiled, whole))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert list(counts(compiled).values()) == [2, 2, 1, 0, 1, 0, 1]  # of one graph for all layers


class Frozen(nn.Module):
    """Two blocks, the first under no_grad: the norm of the second reads the sum of the first."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[1](x)


def test_gradients_behind_a_frozen_layer_are_eagers():
    model, x = Frozen(), torch.randn(2, 6, 16)
    found = {}
    for name in ("aot_eager", "eager"):
        model.zero_grad()
        compiled = xtrain.compile(model, dropout=P, seed=1, backend=name)
        compiled(x).square().sum().backward()
        found[name] = {name: p.grad for name, p in model.named_parameters()}
        counted = counts(compiled)
    assert counted == dict.fromkeys(SWAPS, 0)
    for name, grad in found["eager"].items():
        assert (found["aot_eager"][name] is None) == (grad is None) == ("layers.0" in name)
        if grad is not None:
            torch.testing.assert_close(found["aot_eager"][name], grad)


# --- policy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [dict(kernels="off", backend="aot_eager"), dict(backend="eager")], ids=str
)
def test_without_kernels_nothing_is_normalised_or_swapped(options):
    model = tiny()
    compiled = xtrain.compile(model, dropout=P, seed=1, **options)
    plain = xtrain.compile(model, dropout=P, seed=1, backend="eager", kernels="off")
    found, expected_values = (loss_and_gradients(model, m, tokens()) for m in (compiled, plain))
    assert all(map(torch.equal, found, expected_values))
    assert [r.name for r in compiled.report().passes] == ["insert_residual_dropout"]


def test_a_swap_can_be_left_out_by_name():
    model = tiny()
    left_out = ["use_triton_rope", "fuse_dropout_add_rms_norm"]
    compiled = xtrain.compile(model, dropout=P, backend="aot_eager", disable_passes=left_out)
    compiled(*tokens())
    assert not set(left_out) & {r.name for r in compiled.report().passes}
    assert list(counts(compiled).values()) == [5, 0, 2, 0, 2, 0, 0]


@pytest.mark.parametrize("broken", ["normalise", "use_triton_rope", "remove_noop_views"])
def test_a_failing_pass_of_ours_costs_kernels_and_no_dropout(broken, monkeypatch, caplog):
    def fail(graph, **_):
        raise KeyError("something unforeseen")

    fail.__name__ = broken
    if broken in SWAPS:
        listed = [fail if s.__name__ == broken else s for s in backend._SWAPS]
        monkeypatch.setattr(backend, "_SWAPS", tuple(listed))
    else:
        monkeypatch.setattr(backend, broken, fail)
    model = tiny()
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager")
    with caplog.at_level(logging.WARNING, "xtrain.passes"):
        found = loss_and_gradients(model, compiled, tokens())
    assert "no kernels are swapped in, dropout stays as it is" in caplog.text
    report = compiled.report()
    assert any(broken in n and "something unforeseen" in n for n in report.notes)
    assert len(report.sites) == 4 and [r.name for r in report.passes] == ["insert_residual_dropout"]
    plain = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    assert all(map(torch.equal, found, loss_and_gradients(model, plain, tokens())))


def test_a_compiler_that_fails_on_the_swapped_graph_gets_the_graph_without(monkeypatch, caplog):
    real = backend.remove_noop_views

    def breaks(graph):
        result = real(graph)
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        with graph.inserting_before(output):
            graph.call_function(torch.ops.aten.mm.default, (output.args[0][1],) * 2)
        return result

    breaks.__name__ = "remove_noop_views"
    monkeypatch.setattr(backend, "remove_noop_views", breaks)
    model = tiny()
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="aot_eager")
    with caplog.at_level(logging.WARNING, "xtrain.passes"):
        found = loss_and_gradients(model, compiled, tokens())
    assert "no kernels are swapped in" in caplog.text and "no kernels" in str(compiled.report())
    plain = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    assert all(map(torch.equal, found, loss_and_gradients(model, plain, tokens())))


@pytest.fixture
def registry():
    yield
    for name in list(passes._registered):
        passes.unregister(name)


def test_a_pass_of_the_users_behind_a_swap_sees_its_ops_and_its_failure_is_raised(registry):
    seen = []

    def look(graph):
        seen.append(sum(n.target is ops.OPS["rms_norm"].forward for n in graph.nodes))

    passes.register("look", look, after="use_triton_rms_norm")
    model = tiny()
    compiled = xtrain.compile(model, dropout=P, backend="aot_eager")
    compiled(*tokens())
    assert seen == [5]
    off = xtrain.compile(model, dropout=P, backend="aot_eager", kernels="off")
    off(*tokens())
    assert seen == [5, 0]
    assert [r.name for r in off.report().passes] == ["insert_residual_dropout", "normalise", "look"]
    compiled.eval()
    compiled(*tokens())
    assert seen == [5, 0, 0]

    def fail(graph):
        raise KeyError("mine")

    passes.register("look", fail, after="use_triton_rms_norm")
    with pytest.raises(
        passes.PassError, match="the graph pass 'look' failed with KeyError: 'mine'"
    ):
        xtrain.compile(model, dropout=P, backend="aot_eager").train()(*tokens())


def test_dumps_are_numbered_through_both_graphs(tmp_path):
    model = tiny(n_layers=1)
    compiled = xtrain.compile(model, dropout=P, backend="aot_eager", dump_graphs=tmp_path)
    compiled(*tokens())
    folder = tmp_path / "train_graph_01"
    names = sorted(path.name for path in folder.glob("*.after.py"))
    ran = passes.PASSES[:-1]  # the last is inductor's
    assert names == [f"{i:02d}_{name}.after.py" for i, name in enumerate(ran, start=1)]
    text = (folder / names[-1]).read_text()
    assert "torch.ops.xtrain.dropout_add_rms_norm.default" in text


def test_parameters_and_dynamos_graph_are_shared_and_left_alone():
    """The swaps work on a copy: a second call of the backend finds what Dynamo made."""
    found = []
    real = clone_graph

    def watch(module):
        found.append((module, module.code))
        return real(module)

    model = tiny()
    compiled = xtrain.compile(model, dropout=P, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xtrain.compiler.backend.clone_graph", watch)
        compiled(*tokens())
    assert len(found) >= 2 and all(module.code == code for module, code in found[:1])
