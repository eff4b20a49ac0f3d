"""Rows C34, C52 and C55 of the cases with their own numbers, against plain torch.

C54 is in test_compare.py and test_command.py, C58 in tests/test_train.py and test_training.py.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from drift_models import Rowwise, decoder, prompts, subject
from torch import nn

from xtrain import torch_compat
from xtrain.drift import compare, record
from xtrain.drift.comparison.drift_report import as_text
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
def each_alone(make):
    return record_prompts(subject(make()), prompts(*LISTS), Run(num_tokens=1))


@pytest.mark.parametrize("pad_to", [None, 64, 128])
def test_a_fixed_order_of_sums_has_no_shift(pad_to):
    model, alone = Rowwise(), each_alone(Rowwise)
    for batch in (1, 2, 8, 16):
        settings = Run(num_tokens=1, batch_size=batch, pad_to=pad_to)
        found = compare(alone, record_prompts(subject(model), prompts(*LISTS), settings))
        assert found.exit_code == 0 and found.max_shift == 0.0, batch
        assert len(found.positions) == 16 and not any(p.can_flip for p in found.positions)


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
