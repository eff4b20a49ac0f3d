"""Every sum that could carry a stream: dropped as the oracle has it, left by a rule, or refused.

One model for each kind that a list of known spellings once lost without a word, or refused although
all of it was plain.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter

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
from residual_grammar import Form, Step, model_class
from torch import nn

import xtrain
from xtrain.compiler import SiteError
from xtrain.passes.sites.ways import Ways

ATTENTION = Step(branch="attention")


# --- one form among plain ones -------------------------------------------------------------------

FORMS = {
    "film": Step(around="film"),
    "a gate on the sum": Step(around="gate"),
    "gru": Step(branch="gru"),
    "a library op": Step(branch="library op"),
    "the add in a library op": Step(sum="library op"),
    "the add in an autograd.Function": Step(sum="autograd.Function"),
    "a pooled branch": Step(branch="pooled"),
    "a projected skip": Step(skip="projected"),
    "a pooled skip": Step(skip="pooled"),
    "a spectrum": Step(branch="spectrum"),
    "a complex skip": Step(skip="complex"),
    "flip": Step(skip="flip"),
    "turned": Step(skip="turned"),
    "softmax": Step(skip="softmax"),
    "clamp": Step(skip="clamp"),
    "affine": Step(skip="affine"),
    "unbind": Step(sum="stack.unbind"),
    "cumsum": Step(sum="stack.cumsum"),
}


def inputs_of_a_form():
    return torch.arange(8).view(2, 4), x(4), x(5)


@both
@pytest.mark.parametrize("name", FORMS)
def test_a_second_site_is_dropped_or_refused(name, compile_it):
    hold(
        model_class(Form((ATTENTION, FORMS[name]))),
        compile_it,
        inputs=inputs_of_a_form(),
        must_run=False,
    )


@both
@pytest.mark.parametrize("branch", ["messages by index_add", "messages by scatter_add"])
def test_messages_are_dropped_once_they_are_summed(branch, compile_it):
    """One mask on the sum that joins the stream, however many messages an element takes."""
    form = Form((ATTENTION, Step(branch=branch)))
    hold(model_class(form), compile_it, inputs=inputs_of_a_form())


@both
@pytest.mark.parametrize("branch", ["attention", "two experts"])
def test_a_branch_that_addcmul_gates_is_whole(branch, compile_it):
    """Its kind is its own, not the gate's, and what lies inside it is no other site."""
    form = Form((Step(branch=branch, sum="addcmul"), Step()))
    hold(model_class(form), compile_it, inputs=inputs_of_a_form())


PRODUCTS_THAT_ADD = {
    "a form of the stream": (Step(skip="tanh", sum="addmm"), Step(skip="clamp")),
    "a projected skip": (Step(), Step(skip="projected", sum="addmm")),
    "a projected skip, by batches": (Step(), Step(skip="projected", sum="baddbmm")),
}


@both
@pytest.mark.parametrize("name", PRODUCTS_THAT_ADD)
def test_a_product_that_adds_what_it_does_not_carry(name, compile_it):
    form = Form(PRODUCTS_THAT_ADD[name])
    hold(model_class(form), compile_it, inputs=inputs_of_a_form(), must_run=False)


MEETS_THE_FIRST_AGAIN = {
    "behind positions": Form((Step(),), beginning="positions", joins_first=True),
    "behind a running mean": Form((Step(),), beginning="running mean", joins_first=True),
    "behind a gate": Form((ATTENTION, Step(around="gate")), joins_first=True),
    "behind a film": Form((ATTENTION, Step(around="film")), joins_first=True),
    "behind a projected skip": Form((Step(skip="convolved"), Step()), joins_first=True),
    "behind projected skips alone": Form((Step(skip="convolved"),), "bias", joins_first=True),
    "behind an average": Form((Step(sum="stack.mean", around="gate"),), "bias", joins_first=True),
    "turned, with the first in each block": Form((Step(), Step(skip="turned")), "embedding again"),
    "a condition, behind a running sum": Form(
        (Step(skip="convolved", sum="stack.cumsum"), Step(sum="stack.cumsum")),
        beginning="condition",
        joins_first=True,
    ),
    "a condition, with what the last block handed on": Form(
        (Step(skip="roll", branch="einsum"), Step()), beginning="condition", handed_on=True
    ),
    "sorted, and summed with the branch along a stack": Form(
        (ATTENTION, Step(skip="sorted", sum="stack.cumsum"))
    ),
    "a gate in each block": Form((Step(around="gate"),), beginning="embedding again"),
    "its own gate in each block": Form(
        (Step(around="gate of itself"),), beginning="embedding again"
    ),
    "clamped, and a condition in each block": Form(
        (Step(around="clamped"),), beginning="condition"
    ),
}


@both
@pytest.mark.parametrize("name", MEETS_THE_FIRST_AGAIN)
def test_a_stream_that_meets_the_first_one_again_is_no_branch(name, compile_it):
    """Shifted, gated or scaled, it carries the embedding on: the branches keep their masks."""
    form = MEETS_THE_FIRST_AGAIN[name]
    hold(model_class(form), compile_it, inputs=inputs_of_a_form(), must_run=False)


@both
def test_a_blend_beside_an_earlier_value_runs(compile_it):
    """The earlier value's sum, on the skip of the blend, is no sum inside of its branch."""
    steps = (ATTENTION, Step(skip="scaled by a number", sum="blend"))
    hold(model_class(Form(steps, "embedding again")), compile_it, inputs=inputs_of_a_form())


@both
def test_blocks_may_differ_in_their_sites(compile_it):
    form = Form((ATTENTION, Step()), in_last_only=True)
    hold(model_class(form), compile_it, inputs=inputs_of_a_form())


class ComplexStream(nn.Module):
    """z = x + ix; z + (f + if); what goes on is the real part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ComplexBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ComplexBlock(Block):
    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        f = drop(self.mlp(self.norm2(x)), self)
        return (torch.complex(x, x) + torch.complex(f, f)).real


@both
def test_a_sum_of_complex_values(compile_it):
    hold(ComplexStream, compile_it, must_run=False)


# --- code that no graph holds --------------------------------------------------------------------


def names_code(error, function, cause):
    """The refusal names a function, one of its lines, and why no graph holds it."""
    text = str(error)
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    file = function.__code__.co_filename.rpartition("/")[2]
    named = [int(n) for n in re.findall(rf"{re.escape(file)}:(\d+)", text)]
    assert any(first <= line < first + len(lines) for line in named), (first, text)
    assert function.__name__ in text and re.search(cause, text), text


class Mlp(Block):
    def forward(self, x):
        return self.mlp(self.norm(x))


class PrintingLoop(nn.Module):
    """An encoder of plain blocks; the decoder's adds stand in a loop that a print breaks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            x = x + drop(block(x), block)
            if x.abs().max() > 1e9:
                print("overflow")
        return x


def of_both_lists(model):
    return {block: layer for layer, block in enumerate([*model.encoder, *model.decoder])}


@both
def test_a_loop_left_to_eager_by_a_print_is_named(compile_it):
    error = hold(PrintingLoop, compile_it, layers=of_both_lists, must_run=False)
    if error is not None:
        names_code(error, PrintingLoop.forward, r"break|print|eager|outside")


class DisabledBlock(Block):
    @torch.compiler.disable
    def forward(self, x):
        return x + drop(self.mlp(self.norm(x)), self)


class DisabledStep(Block):
    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        return self.step(x)

    @torch.compiler.disable(recursive=False)
    def step(self, x):
        return x + drop(self.mlp(self.norm2(x)), self)


class Hybrid(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), second(), Block(), second()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@both
def test_a_block_kept_from_the_compiler_is_named(compile_it):
    error = hold(Hybrid, compile_it, DisabledBlock, must_run=False)
    assert error is not None
    names_code(error, DisabledBlock.forward, "compiler.disable")


@both
def test_a_method_kept_from_the_compiler_is_named(compile_it):
    error = hold(Hybrid, compile_it, DisabledStep, must_run=False)
    if error is not None:
        names_code(error, DisabledStep.step, "compiler.disable")


SEEN = []


@torch.compiler.disable
def log(value):
    SEEN.append(value.detach().mean().item())


class Logging(Block):
    def forward(self, x):
        x = super().forward(x)
        log(x)
        return x


@both
def test_code_outside_graphs_that_adds_nothing_is_no_fault(compile_it):
    hold(Stack, compile_it, Logging)


class Refined(Stack):
    """A last step in the model's own forward, outside the blocks."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = super().forward(x)
        return x + drop(self.down(F.gelu(self.up(self.norm(x)))), self)


def test_a_step_outside_the_blocks():
    """In the whole it is a site; block by block no graph holds it."""
    hold(Refined, xtrain.compile)
    error = hold(Refined, xtrain.compile_blocks, must_run=False)
    if error is not None:
        names_code(error, Refined.forward, "block")


class TorchLayer(nn.TransformerEncoderLayer):
    """torch's own layer, with its dropouts at 0."""

    def __init__(self):
        super().__init__(D, 2, 2 * D, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        if not marking():
            return super().forward(x)
        x = x + drop(self._sa_block(self.norm1(x), None, None), self, "attention")
        return x + drop(self._ff_block(self.norm2(x)), self)


@both
def test_torchs_own_layer(compile_it):
    hold(Stack, compile_it, TorchLayer)


class Residual(nn.Module):
    """The add in a wrapper around any module."""

    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), inner

    def forward(self, x, block):
        return x + drop(self.inner(self.norm(x)), block)


class Wrapped(Block):
    def __init__(self):
        super().__init__()
        self.first, self.second = Residual(nn.Linear(D, D)), Residual(nn.Linear(D, D))

    def forward(self, x):
        return self.second(self.first(x, self), self)


class Hooked(Block):
    """A hook of the user's adds what a module was given to what it returns."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(D, D)
        self.mixed.register_forward_hook(lambda _, given, made: given[0] + drop(made, self))

    def forward(self, x):
        return self.mixed(x + drop(self.attention(self.norm(x)), self, "attention"))


class Conditional(Block):
    """torch.cond, one of whose bodies holds the add."""

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        if marking():
            return x + drop(self.mlp(x), self)
        return torch.cond(x.sum() > -1e9, lambda x: x + self.mlp(x), lambda x: x * 1.0, (x,))


class Vmapped(Block):
    """The step is written for one sample."""

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        if marking():
            return x + drop(self.mlp(x), self)
        return torch.vmap(lambda x: x + self.mlp(x))(x)


@both
@pytest.mark.parametrize("block", [Wrapped, Hooked])
def test_an_add_in_another_module_or_in_a_hook(block, compile_it):
    hold(Stack, compile_it, block)


@both
@pytest.mark.parametrize("block", [Conditional, Vmapped])
def test_an_add_in_the_body_of_a_higher_order_op(block, compile_it):
    hold(Stack, compile_it, block, must_run=False)


# --- streams that gate themselves -----------------------------------------------------------------


class GatedBesideABranch(Block):
    """One sum takes the stream, which gates itself, its first value and a branch."""

    def forward(self, x, first):
        gated = x * torch.sigmoid(self.o(x))
        return gated + first + drop(self.mlp(self.norm(x)), self)


class WithItsFirst(Hybrid):
    def __init__(self):
        super().__init__(GatedBesideABranch)

    def forward(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first) if isinstance(block, GatedBesideABranch) else block(x)
        return x


@both
def test_of_one_sum_the_stream_is_kept_and_the_branch_dropped(compile_it):
    hold(WithItsFirst, compile_it, must_run=False)


# --- branches that are added elsewhere -----------------------------------------------------------


class Handing(Block):
    """mamba_ssm: a block is handed the last branch and the stream, and hands on its own branch."""

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return drop(self.mlp(self.norm(residual)), self), residual


class HandingTwice(Block):
    """flash-attn: two adds a block, the first of them of the block before."""

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        hidden = drop(self.attention(self.norm(residual)), self, "attention")
        residual = hidden + residual
        return drop(self.mlp(self.norm2(residual)), self), residual


class HandingWide(HandingTwice):
    """The stream is kept in another dtype than the branches."""

    def forward(self, hidden, residual):
        residual = hidden.double() if residual is None else hidden + residual
        hidden = drop(self.attention(self.norm(residual.float())), self, "attention")
        residual = hidden + residual
        return drop(self.mlp(self.norm2(residual.float())), self), residual


class Handed(nn.Module):
    def __init__(self, block, depth=3):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(block() for _ in range(depth)), nn.LayerNorm(D)

    def forward(self, x):
        hidden, residual = x, None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.norm((hidden + residual).float())


class LinearHanding(Handing):
    """The branch is one op, an attention as opaque kernels have it."""

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return drop(self.attention(self.norm(residual)), self, "attention"), residual


@pytest.mark.parametrize("block", [Handing, LinearHanding, HandingTwice, HandingWide])
def test_a_branch_that_the_next_block_adds(block):
    """Its site is named after the block whose branch it is."""
    hold(Handed, xtrain.compile, block)


@pytest.mark.parametrize("block", [Handing, LinearHanding])
def test_a_branch_that_the_next_block_adds_by_blocks(block):
    """The first block returns its input as it is: its graph does not show that a stream goes on."""
    hold(Handed, xtrain.compile_blocks, block, must_run=False)


@pytest.mark.parametrize("block", [HandingTwice, HandingWide])
def test_two_adds_a_block_run_by_blocks(block):
    """The branch is dropped where the block returns it beside its stream."""
    hold(Handed, xtrain.compile_blocks, block)


class Telling(Block):
    """A block that returns its last branch beside the stream that holds it already."""

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        return x, self.mlp(self.norm2(x))


class Told(nn.Module):
    """Hands the second result on as something else than a branch."""

    def __init__(self, use):
        super().__init__()
        self.blocks, self.use = nn.ModuleList(Telling() for _ in range(2)), use

    def forward(self, x):
        told = []
        for block in self.blocks:
            x, more = block(x)
            told.append(more)
        return (x, *told) if self.use == "returned" else x * torch.sigmoid(told[-1])


@pytest.mark.parametrize("use", ["returned", "gates"])
def test_a_second_result_that_nobody_adds_is_never_dropped_in_silence(use):
    hold(Told, xtrain.compile, use)
    error = hold(Told, xtrain.compile_blocks, use, must_run=False)
    assert error is None or "no code adds it to that stream" in str(error)


def test_sites_are_named_after_the_branchs_block():
    compiled = xtrain.compile(made(Handed, Handing)(), dropout=P, seed=SEED, backend="eager")
    compiled(x())
    assert [s.name for s in compiled.report().sites] == [
        f"blocks.{i}.feed_forward" for i in range(3)
    ]


def test_the_oracle_draws_what_it_is_asked_for():
    """A mark in another place gives other values: the comparison is no formality."""
    model = made(Stack, Block)()
    plain = model(x())
    with Oracle(layers_of_blocks(model)) as oracle:
        dropped = model(x())
    assert oracle.sites == [(i, s) for i in range(2) for s in ("attention", "feed_forward")]
    assert (plain - dropped).abs().max() > 0.1
    with pytest.raises(SiteError, match="no residual site"):
        xtrain.compile(nn.Sequential(nn.Linear(D, D)), dropout=P, seed=0, backend="eager")(x())


def test_the_work_on_a_site_does_not_grow_with_the_layers_before_it(monkeypatch):
    """What the account asks of a graph, a further layer as the ones before."""
    calls = Counter()
    for name in ("labels", "between", "beside", "reading"):
        real = getattr(Ways, name)

        def counted(self, *args, real=real):
            calls["all"] += 1
            return real(self, *args)

        monkeypatch.setattr(Ways, name, counted)
    asked = []
    for num_layers in (2, 4, 6):
        calls.clear()
        model = nn.Sequential(*(Block() for _ in range(num_layers)))
        xtrain.compile(model, dropout=P, seed=SEED, backend="eager")(x())
        asked.append(calls["all"])
    assert asked[1] - asked[0] == asked[2] - asked[1] > 0
