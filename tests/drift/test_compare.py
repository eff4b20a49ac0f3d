"""Two records against each other: where the difference starts, and the verdict."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from drift_models import Rowwise, decoder, next_up, prompts, subject, tokens

from xtrain.drift import compare, flip_verdict, record
from xtrain.drift.comparison.differences import align
from xtrain.drift.comparison.drift_report import as_json, as_text
from xtrain.drift.comparison.flip import find_loop
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.recording.record_format import OpKey
from xtrain.drift.settings import Run

NAMES = [name.removeprefix("blocks.3.") for name, _ in decoder(4).blocks[3].named_parameters()]


@cache
def plain_of_four():
    return record(decoder(4), tokens(batch=2, length=12))


@pytest.mark.parametrize("name", NAMES)
def test_one_ulp_in_layer_3_starts_at_the_op_that_reads_it(name):
    """Row C54; of a product the reader is the matmul, of a norm the multiplication."""
    changed = decoder(4)
    path, _, _ = f"blocks.3.{name}".rpartition(".")
    next_up(changed.get_parameter(f"blocks.3.{name}"))
    x = tokens(batch=2, length=12)
    for tensors in (False, True):
        found = compare(plain_of_four(), record(changed, x, tensors=tensors))
        op = "aten.mul" if "norm" in name else "aten.mm"
        assert tuple(found.first_divergence) == (path, op)
        assert found.exit_code == 4 and found.reason == f"other weights: blocks.3.{name}"
        assert [layer.max_abs for layer in found.growth[:3]] == [0, 0, 0]


def test_the_size_of_a_small_result_is_exact_with_and_without_tensors():
    plain, changed = decoder(), decoder()
    weight = changed.blocks[1].feed_forward.up.weight
    with torch.no_grad():
        weight[:, 5] *= 1.5
    x = tokens(length=16)
    outputs = []
    for model in (plain, changed):
        module = model.blocks[1].feed_forward.up
        module.register_forward_hook(lambda m, i, out: outputs.append(out.detach().double()))
    samples = compare(record(plain, x), record(changed, x)).first_divergence.distance
    exact = compare(record(plain, x, tensors=True), record(changed, x, tensors=True))
    size = exact.first_divergence.distance
    truth = (outputs[1] - outputs[0]).abs()
    assert size.exact and size.max_abs == float(truth.max())
    assert size.num_different == int((truth > 0).sum()) == 16
    assert samples == size


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_growth_by_layer_is_the_difference_of_block_outputs(order):
    """Over all prompts, whichever of them has the largest."""
    plain, changed = decoder(3), decoder(3)
    with torch.no_grad():
        changed.blocks[1].attention.value.weight.mul_(1.01)
    x, outputs = tokens(batch=3)[[1, 2]], []  # no token in common where they begin
    x = x[list(order)]
    for model in (plain, changed):
        for block in model.blocks:
            block.register_forward_hook(lambda m, i, out: outputs.append(out.detach().double()))
    found = compare(record(plain, x), record(changed, x))
    for layer, (a, b) in zip(found.growth, zip(outputs[:3], outputs[3:], strict=True), strict=True):
        assert layer.max_abs == float((a - b).abs().max())
        assert layer.num_compared == 18
        assert layer.num_different == int((a != b).any(-1).sum())
    assert [layer.path for layer in found.growth] == ["blocks.0", "blocks.1", "blocks.2"]


class Shifted(Rowwise):
    """Adds `amount` to the logits that `where` selects: what another environment might do."""

    def __init__(self, amount=0.0, where=slice(None), bias=None):
        super().__init__()
        self.amount, self.where = amount, where
        self.bias = torch.zeros(16) if bias is None else bias

    def forward(self, input_ids):
        shift = torch.zeros(16)
        shift[self.where] = self.amount
        return super().forward(input_ids) + self.bias + shift


def pair(a, b, x=None):
    x = tokens(length=5) if x is None else x
    return compare(record(a, x), record(b, x))


def test_the_verdicts():
    base = torch.zeros(16)
    base[3], base[7] = 100.0, 99.0
    same = pair(Shifted(bias=base), Shifted(bias=base))
    assert (same.exit_code, same.first_divergence, same.environment_changes) == (0, None, [])
    assert "identical" in same.verdict
    moved = pair(Shifted(bias=base), Shifted(0.25, slice(0, 1), bias=base))
    assert moved.exit_code == 1 and tuple(moved.first_divergence) == ("", "aten.add")
    assert not any(position.can_flip for position in moved.positions)
    near = pair(Shifted(bias=base), Shifted(-3.0, slice(7, 8), bias=base))
    assert near.exit_code == 2  # moved the other way, but as far as the margin
    assert all(p.can_flip and not p.flipped for p in near.positions)
    flipped = pair(Shifted(bias=base), Shifted(3.0, slice(7, 8), bias=base))
    assert flipped.exit_code == 3
    assert {(p.token_a, p.token_b) for p in flipped.positions} == {(3, 7)}
    # Integers in fp32: a constant for all is exact and moves no pair.
    whole = torch.arange(16.0) * 8
    zero = Shifted(0.0, bias=whole)
    zero.head.data.zero_()
    constant = Shifted(64.0, bias=whole)
    constant.head.data.zero_()
    found = pair(zero, constant)
    assert found.exit_code == 1 and found.max_shift == 0.0


def test_ties_flip_when_bits_differ_and_count_as_identical_when_not():
    base = torch.zeros(16)
    base[[3, 7]] = 100.0
    a = Shifted(bias=base)
    a.head.data.zero_()
    b = Shifted(0.5, slice(0, 1), bias=base)
    b.head.data.zero_()
    assert pair(a, a).exit_code == 0
    assert pair(a, b).exit_code == 2


def test_nan_in_the_same_place_is_equal_and_in_one_it_differs():
    nan = torch.zeros(16)
    nan[4] = torch.nan
    assert pair(Shifted(bias=nan), Shifted(bias=nan)).exit_code == 0
    found = pair(Shifted(bias=torch.zeros(16)), Shifted(bias=nan))
    assert found.exit_code == 3 and found.first_divergence.op == "aten.add"
    assert found.first_divergence.distance.max_abs == np.inf
    json.dumps(as_json(found), allow_nan=False)


def test_zeros_of_two_signs_are_two_logits():
    class Scaled(Rowwise):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, input_ids):
            return super().forward(input_ids) * self.by

    found = pair(Scaled(0.0), Scaled(-0.0))
    assert found.prompts[0].words == ("differ", "differ", "same")
    assert not any(position.equal for position in found.positions)


def test_two_dtypes_are_compared_in_the_wider():
    plain, narrow = decoder(), decoder().bfloat16()
    x = tokens()
    found = compare(record(plain, x), record(narrow, x))
    assert found.reason is None  # each weight is the other's, rounded
    assert found.exit_code in (1, 2, 3)
    first = found.first_divergence
    assert tuple(first) == ("embedding", "aten.embedding") and first.dtypes == ("F32", "BF16")
    assert 0 < first.distance.max_abs < 2.0**-8 * float(plain.embedding.weight.detach().abs().max())
    assert "the dtypes differ" in as_text(found)
    exact = decoder()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    same = compare(record(exact, x), record(narrow, x))
    assert same.first_divergence.op != "aten.embedding"  # equal numbers in two dtypes
    other = decoder().bfloat16()
    with torch.no_grad():
        other.blocks[0].attention.query.weight.mul_(2)
    assert compare(record(plain, x), record(other, x)).exit_code == 4


def test_ops_without_a_partner_are_no_divergence():
    class Fused(Rowwise):
        """Computes the same bits by other ops in its first layer."""

        def __init__(self):
            super().__init__()
            self.layers[0].inner.forward = lambda x: (x * self.layers[0].inner.weight) * 30 + 0

    found = pair(Rowwise(), Fused())
    assert found.exit_code == 0 and found.first_divergence is None
    assert {(u.record, u.path, u.op) for u in found.unmatched} == {
        ("b", "layers.0.inner", "aten.add")
    }
    assert "B alone" in as_text(found)


def test_a_difference_behind_an_unmatched_op_is_named_by_the_block():
    class Other(Rowwise):
        def __init__(self):
            super().__init__()
            inner = self.layers[0].inner
            inner.forward = lambda x: torch.sin(x)

    assert tuple(pair(Rowwise(), Other()).first_divergence) == ("layers.0", "aten.mul")


def test_alignment_keeps_the_order():
    a = tuple(
        OpKey(p, o, "F32") for p, o in [("x", "mm"), ("x", "add"), ("y", "mm"), ("y", "silu")]
    )
    b = tuple(
        OpKey(p, o, "BF16") for p, o in [("x", "mm"), ("y", "mm"), ("y", "cast"), ("y", "silu")]
    )
    found = align(a, b)
    assert found.pairs.tolist() == [[0, 0], [2, 1], [3, 3]]
    assert (found.only_a, found.only_b) == ((1,), (2,))


def test_the_comparison_of_a_prompt_ends_where_its_tokens_part():
    base = torch.zeros(16)
    base[3], base[7] = 10.0, 9.0

    class Later(Shifted):
        def forward(self, input_ids):
            self.amount = 5.0 if input_ids.shape[1] >= 4 else 0.0
            return super().forward(input_ids)

    lists = prompts([1, 2], [5])
    a = record_prompts(subject(Shifted(bias=base)), lists, Run(num_tokens=6))
    b = record_prompts(subject(Later(0.0, slice(7, 8), bias=base)), lists, Run(num_tokens=6))
    found = compare(a, b)
    assert found.exit_code == 3
    assert [p.num_steps for p in found.prompts] == [3, 4]
    assert found.first_divergence.step == 2 and found.first_divergence.prompt == 0
    text = as_text(found)
    assert "step 2" in text and text.endswith("verdict 3: the tokens differ\n")


def test_not_comparable(tmp_path):
    x = tokens(length=5)
    base = record(decoder(), x)
    for other, reason in (
        (record(decoder(), tokens(length=6)), "other prompts: the tokens of prompt 0 differ"),
        (record(decoder(), tokens(batch=2, length=5)), "other prompts: A has 1, B has 2"),
        (record(decoder(3), x), "other models: A has no weight blocks.2"),
        (record(decoder(ffn_hidden=32), x), "other models: blocks.0.feed_forward.gate.weight is"),
    ):
        found = compare(base, other)
        assert found.exit_code == 4 and reason in found.verdict, found.verdict
        assert found.first_divergence is None and not found.positions
        assert reason in as_text(found)
        assert as_json(found)["exit_code"] == 4


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], None),
        ([9, 9, 5] + [1, 2, 3] * 4, (3, 3)),
        ([7] * 12, (0, 1)),
        ([1, 2, 7, 7, 7], None),  # too short to be called a loop
        (list(range(10)) * 2, (0, 10)),
        (list(range(10)) * 2 + [77], None),
        ([], None),
    ],
)
def test_loops(tokens, expected):
    assert find_loop(tokens) == expected


def test_reading_and_comparing_need_no_torch(tmp_path):
    """bf16 records, read by NumPy alone."""
    for name, scale in (("a", 1.0), ("b", 1.5)):
        model = decoder()
        with torch.no_grad():
            model.blocks[1].attention.output.weight.mul_(scale)
        record(model.bfloat16(), tokens(), out=tmp_path / f"{name}.drift", tensors=True)
    code = """
import sys
for name in ("torch", "transformers", "safetensors", "triton"):
    sys.modules[name] = None
import xtrain.drift as drift
from xtrain.drift.cli import main
a = drift.Record(sys.argv[1])
print(a.cases[0].steps[0].logits()[1], float(a.cases[0].steps[0].logits_float64()[0, 0]))
sys.exit(main(["compare", *sys.argv[1:]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.drift", tmp_path / "b.drift"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    assert "first difference: aten.mm in blocks.1.attention.output" in done.stdout
    with torch.no_grad():
        logits, _ = decoder().bfloat16()(tokens())
    assert done.stdout.splitlines()[0] == f"BF16 {float(logits[0, 0, 0])}"


@pytest.mark.parametrize("which", ["one row", "all"])
def test_of_a_large_result_a_size_is_near_or_none_is_given(which):
    """128 rows of 64 are too many to be kept: 16 samples see all that differs, or hardly any."""
    plain, changed = torch.nn.Embedding(256, 64), torch.nn.Embedding(256, 64)
    x = torch.arange(128)[None]
    with torch.no_grad():
        changed.weight.copy_(plain.weight)
        rows = slice(77, 78) if which == "one row" else slice(None)
        changed.weight[rows] += 0.25 + torch.rand(64) / 8
    size = compare(record(plain, x), record(changed, x)).first_divergence.distance
    truth = float((plain(x) - changed(x)).detach().abs().max())
    if which == "all":
        assert not size.exact and truth / 2 <= size.max_abs <= truth
    else:
        assert (size.max_abs, size.exact) == (0.0, False)


# --- the flip rule against a double loop in Python's own floats, and what it must say by reason


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
