"""insert_residual_dropout: on the right operand, with rows of its own, and nowhere else."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import (
    SITES,
    B,
    D,
    Model,
    OwnDropout,
    OwnDropoutReadElsewhere,
    T,
    stream,
)
from harness import (
    P,
    calls,
    capture,
    captured_case,
    code_of,
    hand_built,
    insert,
    insert_into,
    masked_eagerly,
    seeds_tensor,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import xtrain.ops
from xtrain.passes.sites.insert_residual_dropout import SEEDS


def rows(count):
    return [(100 + i, 1000 * i) for i in range(count)]


def assert_equal(found, expected):
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", SITES)
def test_outputs_equal_the_masked_reference(name):
    """Each site takes its own row, in the order of the slots, on the operand that is marked."""
    model, args, captured = captured_case(name)
    module, result = insert(captured)
    assert [slot.kind for slot in result.slots] == list(model.kinds)
    assert result.num_matched == result.num_replaced == len(model.kinds)
    assert result.skipped == {} and result.unseeded == []
    seeds = rows(len(model.kinds))
    found = module(*captured.inputs, seeds_tensor(seeds))
    assert_equal(found, masked_eagerly(model, args, seeds))


@pytest.mark.parametrize("name", ["Checkpointed", "AddedInACheckpoint"])
def test_gradients_equal_the_masked_reference(name):
    model, args, captured = captured_case(name)
    module, _ = insert(captured)
    seeds = rows(len(model.kinds))
    parameters = [p for p in model.parameters()]
    (found,) = module(*captured.inputs, seeds_tensor(seeds))
    expected = masked_eagerly(model, args, seeds)
    # The eager recompute would run without the hooks' masks: gradients of an uncheckpointed run.
    assert torch.equal(found, expected)
    found = torch.autograd.grad(found.square().sum(), parameters, allow_unused=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphs.checkpoint", lambda function, *args, **_: function(*args))
        expected = masked_eagerly(model, args, seeds)
    expected = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_exact_nodes_and_metadata():
    """A row is two reads and a dropout; the seeds are one more input, behind the others."""
    _, _, captured = captured_case("PreNorm")
    before = len(captured.module.graph.nodes)
    module, _ = insert(captured)
    assert len(module.graph.nodes) == before + 1 + 2 * 3
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert placeholders[-1].target == SEEDS and placeholders[-1]._dynamo_source is None
    assert [n.target for n in placeholders].count(SEEDS) == 1
    assert placeholders[-1].meta["example_value"].dtype == torch.int64
    dropped = calls(module, "dropout")
    assert [n.args[1] for n in dropped] == [P, P]
    indices = [(n.args[2].args, n.args[3].args) for n in dropped]
    seeds = placeholders[-1]
    assert indices == [((seeds, 0), (seeds, 1)), ((seeds, 2), (seeds, 3))]
    for node in dropped:
        (add,) = node.users
        assert add.target is operator.add
        assert node.meta["nn_module_stack"] == add.meta["nn_module_stack"]
        assert node.meta["example_value"].shape == (B, T, D)


def test_look_alikes_leave_the_graph_as_it_is():
    positions = torch.arange(float(D)).expand(B, T, D)  # added to a projection: no value in common
    weight = nn.Parameter(torch.eye(D))
    module = hand_built(lambda x, w, p: F.linear(x, w) + p.cos(), stream(), weight, positions)
    before = code_of(module)
    result = insert_into(module)
    assert (result.num_matched, result.num_replaced, result.slots) == (0, 0, [])
    assert code_of(module) == before


@pytest.mark.parametrize("existing", ["skip", "replace"])
@pytest.mark.parametrize("name", ["PreNorm", "ParallelSummedFirst", "Checkpointed"])
def test_a_second_run_changes_nothing(name, existing):
    module, first = insert(captured_case(name)[2])
    before = code_of(module)
    second = insert_into(module, existing)
    assert (second.num_matched, second.num_replaced) == (first.num_matched, 0)
    assert code_of(module) == before


def own_dropout():
    """A GPT-2-like model whose embedding dropout is off, so that its output can be foretold."""
    model = OwnDropout()
    model.drops[2].p = 0.0
    return model


def test_own_dropout_is_skipped():
    model = OwnDropout()
    captured = capture(model, stream())
    module, result = insert(captured, "skip")
    assert [slot.covered_by for slot in result.slots] == ["model", "model"]
    assert (result.num_matched, result.num_replaced) == (2, 0)
    assert result.skipped == {"the model's own dropout stays": 2}
    assert code_of(module) == code_of(captured.module)
    assert len(result.unseeded) == 1 and "drops.2" in result.unseeded[0]


def test_own_dropout_is_replaced_and_draws_no_more():
    model = own_dropout()
    captured = capture(model, stream())
    module, result = insert(captured, "replace")
    assert [slot.covered_by for slot in result.slots] == ["xtrain", "xtrain"]
    active = [n for n in calls(module, "dropout") if n.target is F.dropout and n.args[1] > 0]
    assert active == [], "a dropout that nothing reads would still advance torch's generator"
    state = torch.get_rng_state()
    found = module(*captured.inputs, seeds_tensor(rows(2)))
    assert torch.equal(torch.get_rng_state(), state)
    for drop in model.drops:
        drop.p = 0.0
    assert_equal(found, masked_eagerly(model, (stream(),), rows(2)))


def test_own_dropout_read_elsewhere_stays_there():
    model = OwnDropoutReadElsewhere()
    captured = capture(model, stream())
    module, result = insert(captured, "replace")
    assert result.num_replaced == 1
    torch.manual_seed(3)
    found = module(*captured.inputs, seeds_tensor(rows(1)))
    torch.manual_seed(3)
    _, dropped, scaled = model(stream())
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda input, p: input)
        expected = masked_eagerly(model, (stream(),), rows(1))[0]
    # The mark lies below a cast and a scaling by 0.5, exact both: the masked sums are equal.
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], dropped) and torch.equal(found[2], scaled)


BEHIND_OWN = {
    "twice": lambda h, x: F.dropout(h, 0.25),
    "negated": lambda h, x: -h,
    "gated by the stream": lambda h, x: x.sigmoid() * h,
    "gated by a projection": lambda h, x: h * (x @ x.mT @ x).sigmoid(),
    "gated by itself": lambda h, x: h * (h @ h.mT @ h).sigmoid(),
    "normed": lambda h, x: F.layer_norm(h, (D,)),
    "normed, spelt out": lambda h, x: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6),
    "masked": lambda h, x: h.masked_fill(x[..., :1] > 0, 0.0),
    "selected": lambda h, x: torch.where(x[..., :1] > 0, h, 0.0),
    "cut": lambda h, x: h[:, :T],
}


@pytest.mark.parametrize("behind", BEHIND_OWN)
def test_own_dropout_behind_which_the_branch_is_changed_is_still_the_branchs(behind):
    class Changed(Model):
        kinds = ("feed_forward",)

        def forward(self, x):
            h = F.dropout(self.branch(x), 0.25)
            return x + self.marks[0](BEHIND_OWN[behind](h, x))

    model = Changed()
    captured = capture(model, stream())
    module, result = insert(captured, "skip")
    assert [slot.covered_by for slot in result.slots] == ["model"], "one dropout, not two"
    assert code_of(module) == code_of(captured.module)

    module, result = insert(captured, "replace")
    assert [slot.covered_by for slot in result.slots] == ["xtrain"] and result.unseeded == []
    assert [n for n in calls(module, "dropout") if n.target is F.dropout] == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda input, p: input)
        expected = masked_eagerly(model, (stream(),), rows(1))
    found = module(*captured.inputs, seeds_tensor(rows(1)))[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("swapped", [False, True])
def test_own_dropout_on_either_factor_of_addcmul_is_the_branchs(swapped):
    def block(x, w, gate):
        factors = [F.dropout(F.linear(x, w), 0.25), F.linear(x, gate).sigmoid()]
        return torch.addcmul(x, *(factors[::-1] if swapped else factors))

    module = hand_built(block, stream(), nn.Parameter(torch.eye(D)), nn.Parameter(torch.eye(D)))
    assert [slot.covered_by for slot in insert_into(module, "skip").slots] == ["model"]


@pytest.mark.parametrize(
    ("p", "training", "active"), [(0.1, True, True), (0.0, True, False), (0.1, False, False)]
)
def test_what_counts_as_own_dropout(p, training, active):
    def block(x, w):
        return x + F.dropout(F.linear(x, w), p=p, training=training)

    module = hand_built(block, stream(), nn.Parameter(torch.eye(D)))
    (slot,) = insert_into(module, "skip").slots
    assert slot.covered_by == ("model" if active else "xtrain")


def attention_with_p(p):
    """Probabilities dropped by SDPA, twice by torch's whole attention: in training, and not."""

    def block(x, w):
        s = F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        wide = torch.cat((w, w, w))
        kwargs = dict(embed_dim_to_check=D, num_heads=2, in_proj_weight=wide, in_proj_bias=None)
        kwargs |= dict(bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=p)
        kwargs |= dict(out_proj_weight=w, out_proj_bias=None)
        on = F.multi_head_attention_forward(x, x, x, **kwargs)[0]
        off = F.multi_head_attention_forward(x, x, x, **kwargs, training=False)[0]
        return F.dropout(x, 0.3), s, on, off

    return block


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_unseeded_dropout_is_listed(p):
    module = hand_built(attention_with_p(p), stream(), nn.Parameter(torch.eye(D)))
    attention = [] if p == 0 else [f"attention probabilities (p = {p}) in the model"] * 2
    assert sorted(insert_into(module).unseeded) == [*attention, "dropout in the model"]


@pytest.mark.parametrize("of", ["the branch", "what the branch is a view of"])
def test_a_branch_that_the_add_writes_into_and_a_view_shows_is_left_with_the_reason(of):
    class Aliased(Model):
        kinds = ("feed_forward",)

        def forward(self, x):
            first = self.branch(x)
            second = first.view(-1, D)
            if of == "the branch":
                first.add_(x)
                return second
            second.add_(x.view(-1, D))
            return first

    captured = capture(Aliased(), stream())
    module, result = insert(captured)
    assert [(s.covered_by, s.reason) for s in result.slots] == [
        ("", "the add writes into the branch, which others see through a view")
    ]
    assert result.skipped == {result.slots[0].reason: 1}
    assert code_of(module) == code_of(captured.module)


def test_own_dropout_that_is_scaled_in_place_is_left_with_the_reason():
    def block(x, w):
        return x + F.dropout(F.linear(x, w), 0.1).mul_(0.5)

    module = hand_built(block, stream(), nn.Parameter(torch.eye(D)))
    (slot,) = insert_into(module, "replace").slots
    assert slot.covered_by == "" and "in place" in slot.reason


def test_a_site_in_a_control_flow_body_is_left_with_the_reason():
    class Conditional(Model):
        kinds = ("feed_forward", "feed_forward")
        num_linear = 2

        def forward(self, x):
            def one(x):
                return x + self.branch(x, 0)

            return torch.cond(x.sum() > 0, one, lambda x: x * 2.0, (x,)) + 0.0

    module, result = insert(capture(Conditional(), stream()))
    assert [s.reason for s in result.slots] == ["inside a cond body, which takes no seeds"]
    assert calls(module, "dropout") == []


def test_nested_checkpoints_hand_their_rows_down():
    class Nested(Model):
        kinds = ("feed_forward",) * 4
        num_linear = 4

        def add(self, x, i):
            return x + self.marks[i](self.branch(x, i))

        def middle(self, x):
            x = self.add(x, 1)
            return checkpoint(self.add, x, 2, use_reentrant=False)

        def forward(self, x):
            x = checkpoint(self.middle, self.add(x, 0), use_reentrant=False)
            return self.add(x, 3)

    model = Nested()
    captured = capture(model, stream())
    module, result = insert(captured)
    firsts = [n.args[2].args[1] for n in calls(module, "dropout")]
    assert firsts == [0, 6, 0, 0], "rows 1 and 2 are handed down, row 2 once more"
    found = module(*captured.inputs, seeds_tensor(rows(4)))
    assert_equal(found, masked_eagerly(model, (stream(),), rows(4)))
    assert len(result.slots) == 4 and all(s.witnesses for s in result.slots)
    outer = {n for n in module.graph.nodes}
    assert all(w in outer for s in result.slots for w in s.witnesses)


def test_once_through_torch_compile_with_two_layers():
    """aot_eager derives the backward; masks of both passes are held in test_compile_modes."""
    model = OwnDropout()
    compiled = xtrain.compile(model, dropout=P, seed=0, backend="aot_eager", existing="replace")
    compiled(stream()).sum().backward()
    assert [s.site for s in compiled.report().sites] == ["attention", "feed_forward"]
    result = compiled.report().passes[0]
    assert (result.num_matched, result.num_replaced) == (2, 2)
