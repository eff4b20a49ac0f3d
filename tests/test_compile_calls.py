"""How a compiled model is called: with which modules training, past its forward, transformed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from branch_oracle import both, in_training
from torch import nn

import xtrain
from xtrain.compiler import SiteError

# --- modules that train and modules that do not -------------------------------------------------


class Parts(nn.Module):
    """A block whose two branches are modules, as transformers' are."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Parts() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = Model(), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.model(x))


def by_hooks(model, x, step, p=0.5, seed=0):
    """The output with dropout where a branch's module trains, by forward hooks on plain PyTorch."""
    handles = []
    for layer, block in enumerate(model.model.layers):
        for name, site in (("attn", "feed_forward"), ("mlp", "feed_forward_2")):

            def drop(module, inputs, output, key=(layer, site)):
                if not module.training:
                    return output
                return xtrain.ops.dropout(output, p, xtrain.rng.site_seed(seed, step, *key))

            handles.append(getattr(block, name).register_forward_hook(drop))
    out = model(x)
    for handle in handles:
        handle.remove()
    return out


def _frozen_block(c):
    c.model.layers[0].eval()


def _one_branch(c):
    c.model.layers[1].attn.eval()


def _all_blocks(c):
    c.model.eval()


def _top_alone(c):
    c.eval()
    c.model.train()


def _one_in_eval(c):
    c.eval()
    c.model.layers[1].train()


CHOICES = {
    _frozen_block: 4,
    _one_branch: 5,
    _all_blocks: 0,
    _top_alone: 6,
    _one_in_eval: 2,
}


@both
def test_a_modules_own_mode_decides_for_the_sites_inside_it(compile_it):
    """As for nn.Dropout in it; one graph more serves every choice, the ordinary one stays."""
    compiled = in_training(Top(), compile_it)
    x = torch.randn(2, 4, 16, requires_grad=True)  # as what later blocks are handed
    graphs = []
    for step, choose in enumerate([*CHOICES, nn.Module.train, *CHOICES]):
        compiled.train()
        choose(compiled)
        want = by_hooks(
            compiled.inner if compile_it is xtrain.compile else _plain(compiled), x, step
        )
        compiled.set_step(step)
        got = compiled(x)
        assert len(compiled.last_executed_sites) == CHOICES.get(choose, 6), choose.__name__
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=choose.__name__)
        graphs.append(compiled.report().num_train_graphs)
    assert graphs[len(CHOICES)] == graphs[-1] == 2, "no graph for each choice"
    with torch.no_grad():
        compiled.eval()(x)
    assert compiled.last_executed_sites == () and len(compiled.report().sites) == 6


def _plain(compiled):
    """A copy of the model whose blocks run their own code, in the modes of the original."""
    torch.manual_seed(0)
    plain = Top()
    plain.load_state_dict(compiled.state_dict())
    modes = {name: module.training for name, module in compiled.inner.named_modules()}
    for name, module in plain.named_modules():
        module.training = modes[name]
    return plain


def test_gradients_of_a_block_in_eval_mode_are_those_without_dropout():
    compiled = in_training(Top(), backend="aot_eager")
    compiled.model.layers[0].eval()
    x = torch.randn(2, 4, 16)
    compiled(x).sum().backward()
    plain = _plain(compiled)
    by_hooks(plain, x, 0).sum().backward()
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# --- what goes past the dropout -----------------------------------------------------------------


class WithLoss(Model):
    def loss(self, x):
        return self(x).sum()

    def names(self):
        return [name for name, _ in self.named_parameters()]


@both
def test_gradients_in_eval_mode_are_warned_of_once(compile_it, recwarn):
    compiled = in_training(Model(), compile_it)
    x = torch.randn(2, 4, 16)
    compiled.eval()
    with torch.no_grad():
        compiled(x)
    with torch.inference_mode():
        compiled(x)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"gradients in eval mode.*0\.5.*model\.train\(\)"):
        compiled(x)
    recwarn.clear()
    compiled(x)
    compiled.train()(x)
    assert not recwarn.list


@both
def test_a_method_that_trains_past_the_compiled_forward_is_warned_of_once(compile_it, recwarn):
    compiled = in_training(WithLoss(), compile_it)
    x = torch.randn(2, 4, 16)
    compiled(x)
    compiled.names()
    with torch.no_grad():
        compiled.loss(x)
    compiled.inner.loss(x)  # whoever asks for the inner model gets it
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"WithLoss\.loss called the model past its compiled forw"):
        compiled.loss(x)
    recwarn.clear()
    compiled.loss(x)
    compiled.eval()
    with torch.no_grad():
        compiled.loss(x)
    assert not recwarn.list


# --- what a compiled model cannot be called in, or can ------------------------------------------


@both
def test_a_torch_compile_around_a_compiled_model_runs_its_graphs(compile_it, capsys):
    compiled = in_training(Model(), compile_it)
    x = torch.randn(2, 4, 16)
    want = compiled(x)
    compiled.set_step(0)
    assert torch.equal(torch.compile(compiled, backend="eager")(x), want)
    assert len(compiled.last_executed_sites) == 6
    compiled.compile(backend="eager")
    compiled.set_step(0)
    assert torch.equal(compiled(x), want)
    assert "Exception ignored" not in capsys.readouterr().err


@both
def test_function_transforms_nested_tensors_and_meta_are_refused_by_name(compile_it):
    compiled = in_training(Model(), compile_it)
    x = torch.randn(2, 4, 16)
    for transform in (torch.func.vmap(compiled), lambda t: torch.func.jvp(compiled, (t,), (t,))):
        with pytest.raises(RuntimeError, match=r"compiled Model.*function transform.*whole batch"):
            transform(x)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"compiled Model was given a nested tensor.*pad its rows"):
        compiled(nested)
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(RuntimeError, match=r"layers\.0\.attn\.0\.weight of Model is on the meta"):
        in_training(empty, compile_it)(x)


class Jagged(Model):
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x[0, :3], x[1]], layout=torch.jagged)
        for layer in self.layers:
            rows = layer(rows)
        return rows.values()


@both
def test_a_nested_tensor_made_inside_a_model_is_refused_in_a_sentence(compile_it):
    with pytest.raises(
        SiteError, match=r"nested tensor that the model makes.*pad its rows"
    ) as told:
        in_training(Jagged(), compile_it)(torch.randn(2, 4, 16))
    assert "\n" not in str(told.value)


@both
def test_code_that_no_import_finds_compiles(compile_it, tmp_path):
    """Dynamo imports the module of what it traces by name; torch.compile runs such a model."""
    (tmp_path / "hidden.py").write_text(
        "import torch.nn as nn, torch.nn.functional as F\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "    def forward(self, x): return x + self.b(F.gelu(self.a(x)))\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layers = nn.ModuleList([Block(), Block()])\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = layer(x)\n"
        "        return F.silu(x)\n"
    )
    spec = importlib.util.spec_from_file_location("hidden_from_imports", tmp_path / "hidden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for model in (module.Model(), nn.Sequential(module.Block(), module.Block())):
        compiled = in_training(model, compile_it)
        compiled(torch.randn(2, 3, 8))
        assert len(compiled.last_executed_sites) == 2
