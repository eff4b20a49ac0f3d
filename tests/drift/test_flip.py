"""The flip rule against a double loop in Python's own floats, and what it must say by reason."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from xtrain.drift import flip_verdict


def by_hand(a: list[float], b: list[float]) -> tuple[float, float, bool, bool]:
    """The issue's words, one position, finite numbers."""
    i = max(range(len(a)), key=lambda j: (a[j], -j))
    others = [j for j in range(len(a)) if j != i]
    d = [y - x for x, y in zip(a, b, strict=True)]
    margin = min((a[i] - a[j] for j in others), default=math.inf)
    shift = max((abs(d[j] - d[i]) for j in others), default=0.0)
    can_flip = any(abs(d[j] - d[i]) >= a[i] - a[j] for j in others)
    return margin, shift, can_flip, max(range(len(b)), key=lambda j: (b[j], -j)) != i


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("vocab", [1, 2, 3, 17])
def test_against_the_double_loop(scale, vocab):
    rng = np.random.default_rng([vocab, int(scale * 1e9)])
    a = rng.standard_normal((200, vocab)).astype(np.float32)
    a[::3] = np.round(a[::3], 1)  # ties and pairs that the shift meets exactly
    b = a + scale * rng.standard_normal(a.shape).astype(np.float32)
    b[::3] = np.round(b[::3], 1)
    verdict = flip_verdict(a, b)
    for position, row in enumerate(verdict):
        expected = by_hand(a[position].astype(float).tolist(), b[position].astype(float).tolist())
        assert (row.margin, row.shift, row.can_flip, row.flipped) == expected
    if vocab > 1:  # the cases above do exercise both answers
        assert verdict.can_flip.any() and (scale > 1 or not verdict.can_flip.all())


def test_a_constant_for_all_cannot_flip_and_the_same_shift_of_one_can():
    a = np.array([[1.0, 0.5, -2.0]])
    moved = flip_verdict(a, a + 1000.0)
    assert (moved.shift[0], moved.can_flip[0], moved.margin[0]) == (0.0, False, 0.5)
    for direction in (0.5, -0.5):  # its size counts, not the way it went
        assert flip_verdict(a, a + [0, direction, 0]).can_flip[0]
    assert not flip_verdict(a, a + [0, 0.49, 0]).can_flip[0]
    assert not flip_verdict(a, a + [0, 0, 2.9]).can_flip[0]  # a far token may move far
    assert flip_verdict(a, a + [0.25, -0.25, 0]).can_flip[0]  # two half steps


def test_ties_can_flip_and_the_lowest_index_is_chosen():
    a = np.array([[0.0, 2.0, 2.0]])
    same = flip_verdict(a, a)
    assert (same.token[0], same.runner_up[0], same.margin[0]) == (1, 2, 0.0)
    assert same.can_flip[0] and not same.flipped[0]


def test_the_rule_is_sharper_than_twice_the_largest_shift_and_never_weaker():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((500, 9))
    b = a + 0.1 * rng.standard_normal(a.shape)
    verdict = flip_verdict(a, b)
    survives = verdict.margin > 2 * np.abs(b - a).max(axis=1)
    assert survives.any() and not verdict.can_flip[survives].any()
    assert (verdict.can_flip | ~verdict.flipped).all()
    assert (~verdict.can_flip & ~survives).any()


def test_what_is_not_finite():
    nan, inf = math.nan, math.inf
    rows = [
        # a, b, can it flip
        ([3.0, 1.0, -inf], [3.0, 1.5, -inf], False),  # masked tokens stay masked
        ([3.0, 1.0, -inf], [3.0, 1.0, 0.0], True),  # one is masked no more: an infinite shift
        ([3.0, nan, 0.0], [3.0, nan, 0.0], False),  # NaN in the same place is no difference
        ([3.0, 1.0, 0.0], [3.0, nan, 0.0], True),
        ([3.0, 1.0, 0.0], [nan, nan, nan], True),
        ([inf, inf, 0.0], [inf, inf, 0.0], True),  # a tie
    ]
    for a, b, can_flip in rows:
        verdict = flip_verdict([a], [b])[0]
        assert verdict.can_flip is can_flip, (a, b)
        assert not math.isnan(verdict.margin) and not math.isnan(verdict.shift)
    assert flip_verdict([[3.0, nan, 0.0]], [[3.0, nan, 0.0]]).token[0] == 1  # as torch's argmax


def test_tensors_of_any_dtype_in_fp64():
    """1 + 2^-24 is no fp32 number; of the differences nothing may be lost."""
    a = torch.tensor([[1.0, 1.0 - 2.0**-24]], dtype=torch.float32)
    b = torch.tensor([[1.0, 1.0 - 2.0**-23]], dtype=torch.float32)
    verdict = flip_verdict(a, b)
    assert verdict.margin[0] == 2.0**-24 and verdict.shift[0] == 2.0**-24 and verdict.can_flip[0]
    half = flip_verdict(a.bfloat16(), b.bfloat16().requires_grad_())
    assert half.margin[0] == 0.0 and half.can_flip[0]
    mixed = flip_verdict(a.double(), a.bfloat16())
    assert mixed.shift[0] == 2.0**-24  # bf16 rounds the second to 1


def test_many_positions_in_pieces_and_none():
    rng = np.random.default_rng(3)
    a = rng.standard_normal((70_000, 64)).astype(np.float32)  # more than one piece
    b = a.copy()
    b[-1] = b[-1, ::-1]
    verdict = flip_verdict(a, b)
    assert len(verdict) == len(a) and not verdict.shift[:-1].any() and verdict.shift[-1] > 0
    assert len(flip_verdict(np.zeros((0, 5)), np.zeros((0, 5)))) == 0


@pytest.mark.parametrize("b", [np.zeros((2, 4)), np.zeros((3,)), np.zeros((2, 0))])
def test_shapes_that_do_not_fit(b):
    a = np.zeros((2, 0)) if b.size == 0 else np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"must be two \[positions, V\] of one shape"):
        flip_verdict(a, b)


def test_no_runner_up_beside_minus_infinity_and_no_warning_for_huge_logits():
    masked = np.array([[0.0, -np.inf, -np.inf]])
    assert flip_verdict(masked, masked)[0].runner_up == -1
    huge = np.array([[1.7e308, -1.7e308, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = flip_verdict(huge, -huge)[0]
    assert verdict.flipped and verdict.can_flip and verdict.runner_up == 2
