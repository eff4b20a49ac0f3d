"""One dropout of the model's over the sum of several branches (Falcon): they stay branches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graphs import D, ParallelResidual, stream
from harness import calls, capture, code_of, insert, masked_eagerly, seeds_tensor
from torch import Tensor, nn

OWN_P = 0.25
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
