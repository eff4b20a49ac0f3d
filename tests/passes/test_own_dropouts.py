"""The model's own dropout: on a branch, on its parts, over several branches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import B, D, Model, ParallelResidual, T, stream
from harness import calls, capture, code_of, insert, masked_eagerly, seeds_tensor
from torch import Tensor, nn

OWN_P = 0.25
KEEP = 1 - OWN_P

# Dropout by an op of torch's, as Dynamo shows it.
BY_OP = {
    "F.dropout": lambda h: F.dropout(h, OWN_P),
    "torch.dropout": lambda h: torch.dropout(h, OWN_P, True),
    "native_dropout": lambda h: torch.native_dropout(h, OWN_P, True)[0],
    "F.alpha_dropout": lambda h: F.alpha_dropout(h, OWN_P, training=True),
    "F.feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, OWN_P, training=True),
    "F.dropout1d": lambda h: F.dropout1d(h, OWN_P),
    "nn.Dropout1d": lambda h: nn.Dropout1d(OWN_P)(h.mT).mT,
    "nn.Dropout2d": lambda h: nn.Dropout2d(OWN_P)(h[None])[0],
    "nn.Dropout3d": lambda h: nn.Dropout3d(OWN_P)(h[None, None])[0, 0],
    "nn.AlphaDropout": lambda h: nn.AlphaDropout(OWN_P)(h),
    "torch.feature_dropout": lambda h: torch.feature_dropout(h, OWN_P, True),
    "one mask for all tokens": lambda h: h * F.dropout(torch.ones(B, 1, D), OWN_P),
}


def stochastic_depth(h):
    keep = KEEP + torch.rand((h.shape[0], 1, 1), dtype=h.dtype, device=h.device)
    keep.floor_()
    return h.div(KEEP) * keep


def stochastic_depth_by_bernoulli(h):
    keep = h.new_empty((h.shape[0], 1, 1)).bernoulli_(KEEP)
    return h * keep.div_(KEEP)


def written_by_index(h):
    h[torch.rand_like(h) < OWN_P] = 0
    return h / KEEP


def written_by_factor(h):
    h.mul_(torch.rand_like(h) >= OWN_P)
    return h / KEEP


def filled_in_place(h):
    h.masked_fill_(torch.rand_like(h) < OWN_P, 0.0)
    return h / KEEP


# Dropout by a mask that the model makes itself.
BY_HAND = {
    "rand_like, above": lambda h: h * (torch.rand_like(h) > OWN_P) / KEEP,
    "rand, as numbers, first": lambda h: (torch.rand(h.shape) >= OWN_P).float() * h * (1 / KEEP),
    "uniform_": lambda h: h * (torch.empty_like(h).uniform_() < KEEP) / KEEP,
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(KEEP) / KEEP,
    "bernoulli": lambda h: h / KEEP * torch.bernoulli(torch.full_like(h, KEEP)),
    "distribution": lambda h: h * torch.distributions.Bernoulli(KEEP).sample(h.shape) / KEEP,
    "randint": lambda h: 2 * h * torch.randint(0, 2, (B, T, 1)),
    "where": lambda h: torch.where(torch.rand_like(h) > OWN_P, h / KEEP, 0.0),
    "where, the other way": lambda h: torch.where(
        torch.rand_like(h) < OWN_P, torch.zeros_like(h), h
    ),
    "masked_fill": lambda h: h.masked_fill(torch.rand(B, T, D) < OWN_P, 0.0) / KEEP,
    "stochastic depth": stochastic_depth,
    "stochastic depth by bernoulli_": stochastic_depth_by_bernoulli,
    "written by index": written_by_index,
    "written by factor": written_by_factor,
    "filled in place": filled_in_place,
    "scaled and normed behind": lambda h: F.layer_norm(
        h * (torch.rand_like(h) > OWN_P) * 0.5, (D,)
    ),
}

# What draws numbers and drops nothing, or draws them for something else.
NO_DROPOUT = {
    "noise that scales": lambda h: h * (1 + 0.1 * torch.randn_like(h)),
    "jitter": lambda h: h * torch.empty_like(h).uniform_(0.9, 1.1),
    "a gate of the stream": lambda h: h * (h.sin() > 0),
    "p = 0": lambda h: F.alpha_dropout(h, 0.0, True),
    "alpha_dropout, which is off by default": lambda h: F.alpha_dropout(h, OWN_P),
    "evaluation": lambda h: F.dropout2d(h[None], OWN_P, training=False)[0],
    "chosen by what the model computes": lambda h: h * (torch.rand_like(h) < h.sigmoid()),
}


class Own(Model):
    kinds = ("feed_forward",)

    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def forward(self, x):
        return x + self.marks[0](self.drop(self.branch(x)))


@pytest.mark.parametrize("name", [*BY_OP, *BY_HAND])
def test_is_left_and_no_second_is_added(name):
    captured = capture(Own((BY_OP | BY_HAND)[name]), stream())
    module, result = insert(captured, "skip")
    assert [slot.covered_by for slot in result.slots] == ["model"]
    assert result.skipped == {"the model's own dropout stays": 1} and result.unseeded == []
    assert code_of(module) == code_of(captured.module)


@pytest.mark.parametrize("name", BY_OP)
def test_an_op_is_replaced_whole(name):
    """Nothing of it is left: generators stand still, and the values are those under our mask."""
    model = Own(BY_OP[name])
    module, result = insert(capture(model, stream()), "replace")
    assert [slot.covered_by for slot in result.slots] == ["xtrain"] and result.unseeded == []
    state = torch.get_rng_state()
    (found,) = module(stream(), *model.parameters(), seeds_tensor([(3, 0)]))
    assert torch.equal(torch.get_rng_state(), state)
    model.drop = lambda h: h
    assert torch.equal(found, masked_eagerly(model, (stream(),), [(3, 0)]))


def test_an_op_in_place_whose_operand_is_read_behind_it_is_left():
    def dropped(h):
        F.dropout(h, OWN_P, inplace=True)
        return h

    captured = capture(Own(dropped), stream())
    for existing, covered_by in (("skip", "model"), ("replace", "")):
        module, result = insert(captured, existing)
        (slot,) = result.slots
        assert slot.covered_by == covered_by and code_of(module) == code_of(captured.module)
    assert "changed in place" in slot.reason


@pytest.mark.parametrize("name", BY_HAND)
def test_a_mask_by_hand_is_not_replaced_and_the_reason_says_what_to_do(name):
    captured = capture(Own(BY_HAND[name]), stream())
    module, result = insert(captured, "replace")
    (slot,) = result.slots
    assert slot.covered_by == "" and result.num_replaced == 0
    assert "mask written by hand" in slot.reason and "existing='skip'" in slot.reason
    assert code_of(module) == code_of(captured.module)


@pytest.mark.parametrize("name", NO_DROPOUT)
def test_what_drops_nothing_is_no_dropout(name):
    _, result = insert(capture(Own(NO_DROPOUT[name]), stream()), "skip")
    assert [slot.covered_by for slot in result.slots] == ["xtrain"] and result.unseeded == []


def test_a_mask_by_hand_that_is_no_sites_is_listed():
    class Embedded(Own):
        def forward(self, x):
            return super().forward(x * (torch.rand_like(x) > OWN_P) / KEEP)

    module, result = insert(capture(Embedded(lambda h: h), stream()), "skip")
    assert [slot.covered_by for slot in result.slots] == ["xtrain"]
    assert len(result.unseeded) == 1 and "a mask written by hand (mul) in" in result.unseeded[0]
    assert len(calls(module, "dropout")) == 1


def test_an_op_under_a_mask_by_hand_is_left_whole():
    """Stochastic depth on what dropout has dropped: neither alone can be taken away."""
    captured = capture(Own(lambda h: stochastic_depth(F.dropout(h, OWN_P))), stream())
    module, result = insert(captured, "replace")
    assert [slot.covered_by for slot in result.slots] == [""]
    assert code_of(module) == code_of(captured.module)
    assert [s.covered_by for s in insert(captured, "skip")[1].slots] == ["model"]


PARTS = {
    "half of the channels": lambda h, drop: torch.cat([drop(h[..., :4]), h[..., 4:]], -1),
    "one of two addends": lambda h, drop: F.layer_norm(drop(h) + h.sin(), (D,)),
    "one of two experts, scaled": lambda h, drop: 0.5 * (h.cos() - drop(h)),
    "one of two that are stacked and cut": lambda h, drop: torch.stack([drop(h), h.sin()])[1],
}
WHOLE = {
    "both halves": lambda h, drop: torch.cat([drop(h[..., :4]), drop(h[..., 4:])], -1),
    "both addends": lambda h, drop: (drop(h) + drop(h.sin())) * 0.5,
    "the sum of a part and the rest": lambda h, drop: drop(drop(h) + h.sin()) * 0.5,
}


def part(name):
    function = (PARTS | WHOLE)[name]
    return Own(lambda h: function(h, lambda v: F.dropout(v, OWN_P)))


@pytest.mark.parametrize("name", PARTS)
def test_a_branch_that_is_dropped_in_part_is_refused_or_replaced_whole(name):
    captured = capture(part(name), stream())
    module, result = insert(captured, "skip")
    assert [slot.covered_by for slot in result.slots] == [""]
    assert "drops a part of this branch" in result.slots[0].reason
    assert "existing='replace'" in result.slots[0].reason and result.unseeded == []
    assert code_of(module) == code_of(captured.module)


@pytest.mark.parametrize("name", [*PARTS, *WHOLE])
def test_parts_that_are_dropped_are_replaced_together(name):
    model = part(name)
    module, result = insert(capture(model, stream()), "replace")
    assert [slot.covered_by for slot in result.slots] == ["xtrain"] and result.unseeded == []
    (found,) = module(stream(), *model.parameters(), seeds_tensor([(3, 0)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda v, p: v)
        expected = masked_eagerly(model, (stream(),), [(3, 0)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", WHOLE)
def test_parts_that_are_all_dropped_are_left(name):
    _, result = insert(capture(part(name), stream()), "skip")
    assert [slot.covered_by for slot in result.slots] == ["model"] and result.unseeded == []


@pytest.mark.parametrize("existing", ["skip", "replace"])
def test_the_dropout_of_a_site_inside_a_branch_is_that_sites(existing):
    class Nested(Model):
        kinds = ("feed_forward", "feed_forward")
        num_linear = 2

        def forward(self, x):
            z = self.branch(x)
            z = z + self.marks[0](F.dropout(self.branch(z, 1), OWN_P))
            return x + self.marks[1](F.layer_norm(z, (D,)))

    _, result = insert(capture(Nested(), stream()), existing)
    first = "model" if existing == "skip" else "xtrain"
    assert [slot.covered_by for slot in result.slots] == [first, "xtrain"]


# --- over the sum of several branches (Falcon): they stay branches --------------------------------


SEEDS = [(11, 0), (12, 0), (13, 0)]


class OneDropout(ParallelResidual):
    """x + dropout(attention + feed-forward)."""

    kinds = ("attention", "feed_forward")

    def __init__(self, p: float = OWN_P) -> None:
        super().__init__()
        self.p = p

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.marks[0](self.attention(F.rms_norm(x, (D,))))
        return attended, self.marks[1](self.feed_forward(F.layer_norm(x, (D,))))

    def drop(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.p, self.training)

    def forward(self, x: Tensor) -> Tensor:
        attended, fed = self.branches(x)
        return x + self.drop(attended + fed)


class InPlace(OneDropout):
    """As Falcon writes it."""

    def forward(self, x: Tensor) -> Tensor:
        attended, fed = self.branches(x)
        fed += attended
        return x + F.dropout(fed, self.p, self.training, inplace=True)


class TwoLevels(OneDropout):
    """One of the branches has a dropout of its own below the shared one."""

    def forward(self, x: Tensor) -> Tensor:
        attended, fed = self.branches(x)
        return self.drop(self.drop(attended) + fed) + x


class ReadTwice(OneDropout):
    """What another reads as well is a value of its own, and one branch."""

    kinds = ("attention",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.attention(F.rms_norm(x, (D,))) + self.feed_forward(F.layer_norm(x, (D,)))
        return x + self.drop(self.marks[0](h)), h.sum()


ALL = [OneDropout, InPlace, TwoLevels, ReadTwice]


@pytest.mark.parametrize("cls", ALL)
def test_replaced_each_branch_has_a_mask(cls):
    """The truth: the model without its own dropout, NumPy's masks on the marked values."""
    model = cls()
    captured = capture(model, stream())
    module, result = insert(captured, existing="replace")
    assert sorted(s.kind for s in result.slots) == list(cls.kinds)
    assert {s.covered_by for s in result.slots} == {"xtrain"} and result.unseeded == []
    dropouts = calls(module, "dropout")
    assert len(dropouts) == len(cls.kinds), "the model's own is gone"
    model.p = 0.0
    by_mark = SEEDS[: len(cls.kinds)]
    by_row = by_mark if cls in (OneDropout, TwoLevels, ReadTwice) else by_mark[::-1]
    expected = masked_eagerly(model, (stream(),), by_mark)
    found = module(*captured.inputs, seeds_tensor(by_row))
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("cls", ALL)
def test_skipped_the_models_own_covers_each_branch(cls):
    captured = capture(cls(), stream())
    module, result = insert(captured)
    assert [s.covered_by for s in result.slots] == ["model"] * len(cls.kinds)
    assert result.unseeded == [] and code_of(module) == code_of(captured.module)


def test_the_sites_do_not_depend_on_the_models_p():
    kinds = [[s.kind for s in insert(capture(OneDropout(p), stream()))[1].slots] for p in (0, 0.25)]
    assert kinds[0] == kinds[1]


class OnTheStream(OneDropout):
    """A dropout of the sum with the stream in it is no branch's: it stays, ours comes besides."""

    kinds = ("attention", "feed_forward")

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        attended, fed = self.branches(x)
        return self.drop(x + attended) + fed


@pytest.mark.parametrize("existing", ["skip", "replace"])
def test_a_dropout_of_the_stream_stays(existing):
    module, result = insert(capture(OnTheStream(), stream()), existing)
    assert [s.covered_by for s in result.slots] == ["xtrain"] * 2
    assert len(result.unseeded) == 1 and len(calls(module, "dropout")) == 3


def test_a_stream_that_a_chain_adds_twice():
    def block(x: Tensor, w: nn.Parameter) -> Tensor:
        return x + F.dropout(F.linear(F.rms_norm(x, (D,)), w), OWN_P) + x

    _, result = insert(capture(block, stream(), nn.Parameter(torch.eye(D))))
    assert [s.covered_by for s in result.slots] == ["model"]
