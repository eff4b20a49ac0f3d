"""Rows C34, C52 and C55 of the cases with their own numbers, against plain torch; batches.

C54 is in test_compare.py and test_command.py, C58 in tests/test_train.py and test_training.py.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from drift_models import Rowwise, Scale, decoder, prompts, subject
from torch import nn

from xtrain import torch_compat
from xtrain.drift import compare, record
from xtrain.drift.comparison.drift_report import as_json, as_text
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run

# --- C34: what is left of eager against compiled is listed ----------------------------------------


class Cast(nn.Module):
    """A cast whose rounding a compiler may drop, then a table of logits."""

    def forward(self, x):
        return x.to(torch.bfloat16).float() * torch.arange(1.0, 5.0)


def test_a_cast_rounds_in_both_modes():
    x = torch.full((1, 1, 4), 1 + 2.0**-9)
    backend = torch_compat.inner_backend("inductor", mode=None, options={}, dynamic=None)
    compiled = torch.compile(Cast(), backend=backend, fullgraph=True)
    assert Cast()(x).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    # as strict as torch itself can be; on a CPU its own code generator drops an explicit cast,
    # whatever it is told, in versions before pytorch#185337 was mended (2.11, not 2.13)
    strict = torch.compile(Cast(), options={"emulate_precision_casts": True})(x)
    assert torch.equal(compiled(x), strict)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert compiled(x).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    eager, kernels = (record(Cast(), {"x": x}, mode=mode) for mode in ("eager", "inductor"))
    found = compare(eager, kernels)
    rounded = kernels.cases[0].steps[0].logits_float64()[0, 0] == 1.0
    assert found.exit_code == (0 if rounded else 1)
    assert ("run.mode", "eager", "inductor") in found.environment_changes
    # ops that only one side shows are said, and never called the difference
    assert {(u.record, u.op) for u in found.unmatched} == {
        ("a", "aten._to_copy"),
        ("a", "aten.arange"),
        ("a", "aten.mul"),
    }


# --- C52: the thread count ------------------------------------------------------------------------


def scan():
    """Return a linear layer and a vector whose product differs under 1 and 6 threads, if any."""
    draw = np.random.default_rng(0).standard_normal
    for width in range(48, 65):
        for out in range(440, 451):
            linear = nn.Linear(width, out)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(draw((out, width))))
                linear.bias.zero_()
            x = torch.from_numpy(draw(width)).float()
            results = []
            for threads in (1, 6):
                torch.set_num_threads(threads)
                results.append(linear(x).detach())
            if not torch.equal(*results):
                return linear, x, float((results[0] - results[1]).abs().max())
    return linear, x, 0.0


def test_one_against_six_threads_on_a_vector():
    linear, x, size = scan()
    with torch.no_grad():
        linear.bias[7] = 0.1 - float(linear(x)[7]) + float(linear(x).max())  # a margin of 0.1
    records = []
    for threads in (1, 1, 6):
        torch.set_num_threads(threads)
        records.append(record(linear, x, tensors=True))
    same = compare(*records[:2])
    assert (same.exit_code, same.first_divergence, same.environment_changes) == (0, None, [])
    found = compare(records[0], records[2])
    assert [change[:3] for change in found.environment_changes] == [("threads.intra", 1, 6)]
    assert found.positions[0].margin == pytest.approx(0.1, abs=1e-5)
    assert found.exit_code == (1 if size else 0) and not found.positions[0].can_flip
    if size:
        first = found.first_divergence
        assert (first.module_path, first.op) in {("", "aten.addmm"), ("", "aten.addmv")}
        # a few units in the last place of sums of 64 products of normal numbers
        assert first.distance.exact and 0 < first.distance.max_abs <= 64 * 2.0**-23
        assert "threads.intra" in as_text(found) and "no token can flip" in as_text(found)


@pytest.mark.parametrize("rows", [5, 6, 7, 9, 10, 11])
def test_threads_that_share_out_a_product(rows):
    """MKL divides these sizes otherwise for two threads; the truth is what torch itself gives."""
    draw = np.random.default_rng(rows).standard_normal
    linear = nn.Linear(256, 256)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(draw((256, 256))))
        linear.bias.zero_()
        linear.bias[7] = 200.0  # wins everywhere
    x = torch.from_numpy(draw((rows, 256))).float()
    results, records = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(linear(x).detach())
        records.append(record(linear, x, tensors=True))
    found = compare(*records)
    size = float((results[0] - results[1]).abs().max())
    assert found.exit_code == (1 if size else 0)
    assert not any(position.can_flip for position in found.positions)
    if size:
        assert found.first_divergence.op == "aten.addmm"
        assert 0 < found.first_divergence.distance.max_abs <= size


# --- C55: the same prompt alone, in a batch, and padded -------------------------------------------


LISTS = [[(7 * row + 3 * i) % 16 for i in range(5 + row % 4)] for row in range(16)]


@cache
def each_alone(make, num_tokens=1):
    return record_prompts(subject(make()), prompts(*LISTS), Run(num_tokens=num_tokens))


@pytest.mark.parametrize("pad_to", [None, 64, 128])
def test_a_fixed_order_of_sums_has_no_shift(pad_to):
    """The rows of this model cannot feed each other; its record must say the same."""
    model, alone = Rowwise(), each_alone(Rowwise, 2)
    for batch in (1, 2, 3, 8, 16):  # the last batch of three is filled up
        settings = Run(num_tokens=2, batch_size=batch, pad_to=pad_to)
        found = compare(alone, record_prompts(subject(model), prompts(*LISTS), settings))
        assert found.exit_code == 0 and found.max_shift == 0.0, batch
        assert found.first_divergence is None and not found.unmatched
        assert len(found.positions) == 32 and not any(p.can_flip for p in found.positions)
        assert found.num_matched > 100
        assert {change.name for change in found.changes} <= {"run.batch_size", "run.pad_to"}


@pytest.mark.parametrize(("batch", "pad_to"), [(2, None), (8, 64), (16, 128), (1, 128)])
def test_a_row_alone_against_its_batch(batch, pad_to):
    """Shifts and margins are those of plain forwards; the rest is the rule of the verdicts."""
    model, alone = decoder(), each_alone(decoder)
    settings = Run(num_tokens=1, batch_size=batch, pad_to=pad_to)
    found = compare(alone, record_prompts(subject(model), prompts(*LISTS), settings))
    shifts, margins = [], []
    for row, ids in enumerate(LISTS):
        start = row - row % batch
        rows = LISTS[start : start + batch]
        width = pad_to or max(map(len, rows))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
        with torch.no_grad():
            a = model(torch.tensor([ids]))[0][0, -1].double().numpy()
            b = model(padded)[0][row - start, len(ids) - 1].double().numpy()
        best = int(a.argmax())
        shifts.append(np.abs((b - a) - (b - a)[best]).max())
        margins.append(a[best] - np.delete(a, best).max())
    assert [p.shift for p in found.positions] == shifts and found.max_shift == max(shifts)
    assert [p.margin for p in found.positions] == margins
    assert found.smallest_margin.margin == min(margins)
    assert max(shifts) < 1e-5 < min(margins) and found.exit_code == (1 if max(shifts) else 0)
    assert (found.first_divergence is not None) == (found.exit_code == 1)
    names = {change.name for change in found.environment_changes}
    expected = {"run.batch_size": batch > 1, "run.pad_to": pad_to is not None}
    assert names == {name for name, there in expected.items() if there}


# --- rows in an order of their own: what a batch computes for all of its prompts at once ----------
# A mixture of experts sorts the tokens of the whole batch, other models put time first. Such a
# tensor's leading dimension is a multiple of the batch, and yet no part of it is one prompt's.


class Sorted(nn.Module):
    """Sorts the tokens by their first number, scales each, and puts them back."""

    def __init__(self, dim):
        super().__init__()
        self.inner = Scale(dim)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        order = flat[:, 0].argsort(stable=True)
        out = self.inner(flat[order]).abs()
        back = torch.empty_like(out)
        back[order] = out
        return x + back.view_as(x)


class TimeFirst(nn.Module):
    """Scales rows of [T * B, D], as recurrent models and torch's older attention have them."""

    def __init__(self, dim):
        super().__init__()
        self.inner = Scale(dim)

    def forward(self, x):
        turned = x.transpose(0, 1).contiguous()
        out = self.inner(turned.view(-1, x.shape[-1])).abs()
        return x + out.view_as(turned).transpose(0, 1)


class OfTheBatch(nn.Module):
    """Really computes otherwise in a batch: times a factor there."""

    def __init__(self, dim, factor):
        super().__init__()
        self.inner, self.factor = Scale(dim), factor

    def forward(self, x):
        return x + self.inner(x) * (self.factor if len(x) > 1 else 1.0)


def model(*layers):
    found = Rowwise(n_layers=0)
    found.layers = nn.ModuleList(nn.Sequential(layer) for layer in layers)
    with torch.no_grad():
        for number, layer in enumerate(found.layers):
            layer[0].inner.weight.copy_(torch.linspace(0.01, 0.1, 8)[None] * (number + 1))
    return found


FOUR_LISTS = [[5, 6, 7, 1, 2, 3], [8, 9, 1, 2, 11, 4], [1, 14, 3, 3, 9, 15], [2, 12, 13, 4, 6, 5]]


def both(found, lists=FOUR_LISTS, **changed):
    """Compare one prompt at a time with all of them at once."""
    settings = [Run(decode=None), Run(decode=None, **{"batch_size": 4, **changed})]
    return compare(*(record_prompts(subject(found), prompts(*lists), s) for s in settings))


@pytest.mark.parametrize("layer", [Sorted, TimeFirst])
def test_rows_of_the_whole_batch_are_no_divergence(layer):
    found = both(model(layer(8), layer(8)))
    assert found.exit_code == 0 and found.first_divergence is None
    aside = {(item.record, item.path, item.op) for item in found.unmatched}
    assert ("both", "layers.0.0.inner", "aten.mul") in aside
    assert ("both", "layers.1.0.inner", "aten.mul") in aside
    # what lies before and behind has a partner
    assert not {"layers.0", "layers.1", "embedding", ""} & {path for _, path, _ in aside}
    assert "rows of a whole batch" in as_text(found)


def test_lists_of_other_lengths():
    lists = [FOUR_LISTS[0], FOUR_LISTS[1][:3], FOUR_LISTS[2], FOUR_LISTS[3][:5]]
    for changed in ({}, {"batch_size": 2}, {"batch_size": 1, "pad_to": 8}):
        found = both(model(Sorted(8), TimeFirst(8)), lists, **changed)
        assert found.exit_code == 0, found.first_divergence


def test_a_rounding_behind_sorted_rows_is_named():
    """The first difference lies one layer after rows that only look other."""
    found = both(model(Sorted(8), OfTheBatch(8, 1 + 2.0**-20)))
    assert tuple(found.first_divergence) == ("layers.1.0", "aten.mul")
    assert found.first_divergence.distance.max_ulps <= 16 and found.exit_code in (1, 2)


@pytest.mark.parametrize("factor", [1.5, -30.0, float("nan")])
def test_a_batch_that_really_computes_otherwise_is_named(factor):
    """However large: the block's output, whose rows are the prompts' own, has it too."""
    found = both(model(Sorted(8), OfTheBatch(8, factor), Sorted(8)))
    assert tuple(found.first_divergence) == ("layers.1.0", "aten.mul")
    assert found.exit_code in (1, 2, 3)
    first = found.first_divergence.distance
    assert first.max_abs > 0.01 or first.max_abs != first.max_abs


def test_rows_of_one_layout_are_compared_as_ever():
    """Two runs of one batch: sorted rows belong together, and a difference there is one."""
    one, other = model(Sorted(8), Sorted(8)), model(Sorted(8), Sorted(8))
    with torch.no_grad():
        other.layers[0][0].inner.weight[0, 3] *= 2
    settings = Run(decode=None, batch_size=4)
    records = [record_prompts(subject(m), prompts(*FOUR_LISTS), settings) for m in (one, other)]
    assert tuple(compare(*records).first_divergence) == ("layers.0.0.inner", "aten.mul")


def test_a_mixture_of_experts():
    """Qwen3's: the experts' rows are those of all prompts, in the order of their experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=16, vocab_size=64)
    config = transformers.Qwen3MoeConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    found = transformers.Qwen3MoeForCausalLM(config).eval()
    lists = [[(7 * i + j) % 60 + 3 for j in range(16)] for i in range(8)]
    settings = [Run(decode=None), Run(decode=None, batch_size=8)]
    result = compare(*(record_prompts(subject(found, 64), prompts(*lists), s) for s in settings))
    assert result.exit_code in (0, 1) and result.max_shift < 1e-5
    sizes = [p.first_divergence.distance.max_abs for p in result.prompts if p.first_divergence]
    assert all(size < 1e-5 for size in sizes)
    assert as_json(result)["exit_code"] == result.exit_code
