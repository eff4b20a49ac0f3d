"""Masks follow the samples: where the batch lies in a model's values.

Where a model keeps its samples outermost, rows 2 and 3 of a batch of 4 named by first_sample=2 are
rows 2 and 3 of the whole batch; where that cannot be shown, ValueError. Never other masks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import both, in_training
from torch import nn
from torch.utils.checkpoint import checkpoint

import xtrain


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
        cut(in_training(Model(NOT_OUTERMOST[name])), torch.randn(4, 8, 16))


@pytest.mark.parametrize("name", OUTERMOST)
def test_samples_that_stay_outermost_keep_their_masks(name):
    assert cut(in_training(Model(OUTERMOST[name])), torch.randn(4, 6, 16))


class Conditioned(Model):
    """A stream that begins as the sum of two arguments, one of which may lie turned."""

    def forward(self, x, condition, turned):
        return super().forward(x + (condition.transpose(0, 1) if turned else condition))


@pytest.mark.parametrize("turned", [False, True])
def test_arguments_that_disagree_on_where_the_samples_lie_are_refused(turned):
    """One is [4, 6, D] and the other [6, 4, D]: the leading size of either could be the batch."""
    compiled = in_training(Conditioned())
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
        cut(in_training(model), torch.randn(4, 6, 16))


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
    assert cut(in_training(kind()), x)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="first_sample=2"):
        cut(in_training(kind(NOT_OUTERMOST["length first"])), x)


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
        cut(in_training(Between(REORDERED[name])), torch.randn(4, 6, 16))


@pytest.mark.parametrize("name", sorted(IN_ORDER.keys() - OUTERMOST.keys()))
def test_a_batch_that_a_graph_keeps_in_order_keeps_its_masks(name):
    assert cut(in_training(Between(IN_ORDER[name])), torch.randn(4, 6, 16))


def placed(kind):
    """A model that applies `set_to[0]` in code that no graph holds, between its blocks.

    Both kinds of code are followed in the same way: behind a graph break some functions will do.
    """
    set_to = []

    def apply(x):
        return set_to[0](x)

    if kind == "between blocks":
        return in_training(Between(apply), xtrain.compile_blocks, dynamic=True), set_to
    return in_training(Between(torch.compiler.disable(apply)), dynamic=True), set_to


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
    compiled = in_training(Positions())
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
    compiled = in_training(transformers.GPT2LMHeadModel(config), compile_it)
    results = []
    for start, stop in ((0, 4), (0, 1), (1, 4)):
        compiled.set_step(1, start)
        results.append(compiled(input_ids=ids[start:stop]).logits)
    assert torch.allclose(torch.cat(results[1:]), results[0], atol=1e-6)
