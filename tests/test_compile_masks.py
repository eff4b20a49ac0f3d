"""Masks follow the samples and the modules: where the batch lies, which modules train, what calls.

Where a model keeps its samples outermost, rows 2 and 3 of a batch of 4 named by first_sample=2 are
rows 2 and 3 of the whole batch; where that cannot be shown, ValueError. Never other masks.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import both
from torch import nn
from torch.utils.checkpoint import checkpoint

import xtrain
from xtrain.compiler import SiteError


class Block(nn.Module):
    """x + attention over dim 1 (if asked for) + feed-forward."""

    def __init__(self, attends=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.attends = attends

    def forward(self, x):
        h = self.norm(x)
        if self.attends:
            h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return x + self.down(torch.tanh(self.up(h)))


class Model(nn.Module):
    """Blocks between two functions: what a model does with its batch before and after them."""

    def __init__(self, before=lambda x: x, after=lambda x: x, attends=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(attends) for _ in range(2))
        self.before, self.after = before, after

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def cut(compiled, x, at=2, **more):
    """Whether the two parts of a batch are equal to the whole."""
    compiled.set_step(2, 0)
    whole = compiled(x, **more)
    compiled.set_step(2, 0)
    first = compiled(x[:at], **more)
    compiled.set_step(2, at)
    return torch.equal(torch.cat((first, compiled(x[at:], **more))), whole)


def made(model, compile_it=xtrain.compile, **keywords):
    torch.manual_seed(0)
    return compile_it(
        model.train(),
        **{"dropout": 0.5, "seed": 0, "backend": "eager", "dynamic": False, **keywords},
    )


def windows_first(x):  # [B, 2 W, D] -> [W * B, 2, D]
    return x.unflatten(1, (-1, 2)).permute(1, 0, 2, 3).flatten(0, 1)


def sorted_by_length(x):
    return x[x.abs().sum((1, 2)).argsort()]


NOT_OUTERMOST = {
    "length first": lambda x: x.transpose(0, 1),
    "length first, flat": lambda x: x.transpose(0, 1).reshape(-1, 16),
    "windows first": windows_first,
    "heads first": lambda x: x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1),
    "two views of a batch": lambda x: torch.cat((x, x.flip(1))),
    "two views stacked": lambda x: torch.stack((x, -x)).flatten(0, 1),
    "beams tiled": lambda x: x.repeat(3, 1, 1),
    "beams expanded in front": lambda x: x.expand(3, *x.shape).reshape(-1, *x.shape[1:]),
    "sorted": sorted_by_length,
    "turned round": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "by einsum": lambda x: torch.einsum("btd->tbd", x),
}
OUTERMOST = {
    "as it is": lambda x: x,
    "there and back": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "flat": lambda x: x.reshape(-1, 16),
    "windows behind": lambda x: x.unflatten(1, (-1, 2)).flatten(0, 1),
    "beams of each sample": lambda x: x.repeat_interleave(3, 0),
    "beams expanded behind": lambda x: x[:, None].expand(-1, 3, -1, -1).flatten(0, 1),
    "a token in front": lambda x: torch.cat(
        (x.new_ones(1, 1, 16).expand(x.shape[0], -1, -1), x), 1
    ),
    "shifted": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "into a buffer": lambda x: _into_buffer(x),
    "by einsum": lambda x: torch.einsum("btd,de->bte", x, torch.eye(16)),
}


def _into_buffer(x):
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1]
    return shifted


@pytest.mark.parametrize("name", NOT_OUTERMOST)
def test_samples_that_are_not_outermost_are_refused(name):
    """Leading sizes are multiples of the batch here, and say nothing."""
    said = r"site layers\.0\.feed_forward.*shape \(.*batch of 2.*first_sample=2"
    with pytest.raises(ValueError, match=said):
        cut(made(Model(NOT_OUTERMOST[name])), torch.randn(4, 8, 16))


@pytest.mark.parametrize("name", OUTERMOST)
def test_samples_that_stay_outermost_keep_their_masks(name):
    assert cut(made(Model(OUTERMOST[name])), torch.randn(4, 6, 16))


class Conditioned(Model):
    """A stream that begins as the sum of two arguments, one of which may lie turned."""

    def forward(self, x, condition, turned):
        return super().forward(x + (condition.transpose(0, 1) if turned else condition))


@pytest.mark.parametrize("turned", [False, True])
def test_arguments_that_disagree_on_where_the_samples_lie_are_refused(turned):
    """One is [4, 6, D] and the other [6, 4, D]: the leading size of either could be the batch."""
    compiled = made(Conditioned())
    compiled.set_step(2, 2)
    condition = torch.randn(6, 4, 16) if turned else torch.randn(4, 6, 16)
    if not turned:
        compiled(torch.randn(4, 6, 16), condition, turned)
        return
    with pytest.raises(ValueError, match="first_sample=2"):
        compiled(torch.randn(4, 6, 16), condition, turned)


def test_attention_over_the_leading_dimension_shows_that_it_holds_no_samples():
    """A model that takes [T, B, D]: what attends to one another is no batch."""
    model = Model(lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1), attends=True)
    with pytest.raises(ValueError, match="first_sample=2"):
        cut(made(model), torch.randn(4, 6, 16))


class Breaking(Model):
    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Checkpointed(Model):
    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("kind", [Breaking, Checkpointed])
def test_pieces_and_checkpointed_bodies_know_where_the_samples_are(kind):
    x = torch.randn(4, 6, 16)
    assert cut(made(kind()), x)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="first_sample=2"):
        cut(made(kind(NOT_OUTERMOST["length first"])), x)


class Between(Model):
    """What happens to the batch happens between two blocks."""

    def forward(self, x):
        return self.after(self.layers[1](self.before(self.layers[0](x))))


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


TURNED = (3, 2, 1, 0)


def _perm(x):
    return torch.tensor(TURNED[4 - x.shape[0] :]) % x.shape[0]


def _index(x):
    return _perm(x)[:, None, None].expand_as(x)


def _rows_set(x):
    y = x.clone()
    y[_perm(x)] = x
    return y


def _rows_behind(x):
    y = x.clone()
    y[1:] = x[:-1]
    return y


def _rows_behind_by_a_view(x):
    y = x.clone()
    y[1:].copy_(x[:-1])
    return y


REORDERED = {
    "roll": lambda x: x.roll(1, 0),
    "roll of the whole": lambda x: x.roll(5 * 16),
    "flip": lambda x: x.flip(0),
    "flipud": torch.flipud,
    "x[perm]": lambda x: x[_perm(x)],
    "index_select": lambda x: x.index_select(0, _perm(x)),
    "gather": lambda x: x.gather(0, _index(x)),
    "take_along_dim": lambda x: torch.take_along_dim(x, _index(x), 0),
    "sort": lambda x: x.sort(0)[0],
    "sorted by length": sorted_by_length,
    "halves": lambda x: torch.cat(x.chunk(2)[::-1]),
    "row by row": lambda x: torch.stack(x.unbind()[::-1]),
    "view of a stack": lambda x: torch.stack((x, x.flip(0)))[1],
    "unbound stack": lambda x: torch.stack((x.flip(0), x)).unbind()[0],
    "part of a cat": lambda x: torch.cat((x, x.flip(0)), -1)[..., 16:],
    "where": lambda x: torch.where(x.new_ones(1) > 0, x.flip(0), x),
    "index_copy": lambda x: x.index_copy(0, _perm(x), x),
    "index_put": lambda x: x.index_put((_perm(x),), x),
    "scatter": lambda x: x.scatter(0, _index(x), x),
    "rows set": _rows_set,
    "rows behind": _rows_behind,
    "rows behind, by a view": _rows_behind_by_a_view,
    "padded and cut": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "autograd.Function": Flip.apply,
}
IN_ORDER = {
    **OUTERMOST,
    "in slices": lambda x: torch.stack(x.unbind(1), 1),
    "roll inside": lambda x: x.roll(1, 1),
    "gather inside": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
    "stack": lambda x: torch.stack((x, -x)).unbind()[1],
    "padded": lambda x: F.pad(x, (0, 0, 1, -1)),
    "normed": lambda x: F.layer_norm(x, (16,)) * x.softmax(-1),
    "masked": lambda x: x.masked_fill(x > 1, 0.0).where(x > -1, 0.0),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", REORDERED)
def test_a_batch_that_a_graph_reorders_is_refused(name):
    with pytest.raises(ValueError, match=r"site layers\.1\.feed_forward.*first_sample=2"):
        cut(made(Between(REORDERED[name])), torch.randn(4, 6, 16))


@pytest.mark.parametrize("name", sorted(IN_ORDER.keys() - OUTERMOST.keys()))
def test_a_batch_that_a_graph_keeps_in_order_keeps_its_masks(name):
    assert cut(made(Between(IN_ORDER[name])), torch.randn(4, 6, 16))


def placed(kind):
    """A model that applies `set_to[0]` in code that no graph holds, between its blocks.

    Both kinds of code are followed in the same way: behind a graph break some functions will do.
    """
    set_to = []

    def apply(x):
        return set_to[0](x)

    if kind == "between blocks":
        return made(Between(apply), xtrain.compile_blocks, dynamic=True), set_to
    return made(Between(torch.compiler.disable(apply)), dynamic=True), set_to


EAGER = pytest.mark.parametrize("kind", ["between blocks", "behind a graph break"])


@EAGER
def test_a_batch_that_code_beside_graphs_reorders_is_refused(kind):
    def past_torch(x):
        return torch.from_numpy(x.detach().numpy()[::-1].copy())

    compiled, set_to = placed(kind)
    functions = {**NOT_OUTERMOST, **REORDERED, "past torch": past_torch}
    for name, function in list(functions.items())[:: 1 if kind == "between blocks" else 4]:
        set_to[:] = [function]
        try:
            cut(compiled, torch.randn(4, 8, 16))
        except ValueError as error:
            assert "site layers.1.feed_forward" in str(error), (name, error)
            assert "first_sample=2" in str(error), (name, error)
        else:
            pytest.fail(f"{name} was not refused")


@EAGER
def test_a_batch_that_code_beside_graphs_keeps_in_order_keeps_its_masks(kind):
    compiled, set_to = placed(kind)
    for name, function in list(IN_ORDER.items())[:: 1 if kind == "between blocks" else 4]:
        set_to[:] = [function]
        assert cut(compiled, torch.randn(4, 6, 16)), name


class Positions(nn.Module):
    """Tokens and positions, in any order of arguments."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(16, 16), nn.Embedding(16, 16)
        self.layers = nn.ModuleList(Block(attends=True) for _ in range(2))

    def forward(self, x, places=None, table=None):
        h = self.embed(x)
        h = h if places is None else h + self.positions(places)
        h = h if table is None else h * table
        for layer in self.layers:
            h = layer(h)
        return h


@pytest.mark.parametrize("length", [4, 8])
@pytest.mark.parametrize("what", ["one row", "no rows", "table"])
def test_the_order_of_arguments_does_not_say_which_is_the_batch(what, length):
    more = {
        "one row": {"places": torch.arange(length)[None]},
        "no rows": {"places": torch.arange(length)},
        "table": {"table": torch.randn(length, 16)},
    }[what]
    x = torch.randint(16, (4, length))
    compiled = made(Positions())
    compiled.set_step(2, 0)
    whole = compiled(x, **more)
    for arguments in ({"x": x[2:], **more}, {**more, "x": x[2:]}):
        compiled.set_step(2, 2)
        assert torch.equal(compiled(**arguments), whole[2:])


@both
def test_transformers_keep_their_masks_when_a_batch_is_cut(compile_it):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    ids = torch.randint(32, (4, 8))
    compiled = made(transformers.GPT2LMHeadModel(config), compile_it)
    results = []
    for start, stop in ((0, 4), (0, 1), (1, 4)):
        compiled.set_step(1, start)
        results.append(compiled(input_ids=ids[start:stop]).logits)
    assert torch.allclose(torch.cat(results[1:]), results[0], atol=1e-6)


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


class Inner(nn.Module):
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
        self.model, self.head = Inner(), nn.Linear(16, 16)

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
    compiled = made(Top(), compile_it)
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
    compiled = made(Top(), backend="aot_eager")
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
    compiled = made(Model(), compile_it)
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
    compiled = made(WithLoss(), compile_it)
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
    compiled = made(Model(), compile_it)
    x = torch.randn(2, 4, 16)
    want = compiled(x)
    compiled.set_step(0)
    assert torch.equal(torch.compile(compiled, backend="eager")(x), want)
    assert len(compiled.last_executed_sites) == 2
    compiled.compile(backend="eager")
    compiled.set_step(0)
    assert torch.equal(compiled(x), want)
    assert "Exception ignored" not in capsys.readouterr().err


@both
def test_function_transforms_nested_tensors_and_meta_are_refused_by_name(compile_it):
    compiled = made(Model(), compile_it)
    x = torch.randn(2, 4, 16)
    for transform in (torch.func.vmap(compiled), lambda t: torch.func.jvp(compiled, (t,), (t,))):
        with pytest.raises(RuntimeError, match=r"compiled Model.*function transform.*whole batch"):
            transform(x)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"compiled Model was given a nested tensor.*pad its rows"):
        compiled(nested)
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(RuntimeError, match=r"layers\.0\.norm\.weight of Model is on the meta dev"):
        made(empty, compile_it)(x)


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
        made(Jagged(), compile_it)(torch.randn(2, 4, 16))
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
        compiled = made(model, compile_it)
        compiled(torch.randn(2, 3, 8))
        assert len(compiled.last_executed_sites) == 2
