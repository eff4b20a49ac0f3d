"""Rows in an order of their own: what a batch computes for all of its prompts at once.

A mixture of experts sorts the tokens of the whole batch, other models put time first. Such a
tensor's leading dimension is a multiple of the batch, and yet no part of it is one prompt's.
"""

from __future__ import annotations

import pytest
import torch
from drift_models import Rowwise, Scale, prompts, subject
from torch import nn

from xtrain.drift import compare
from xtrain.drift.comparison.drift_report import as_json, as_text
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run


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


LISTS = [[5, 6, 7, 1, 2, 3], [8, 9, 1, 2, 11, 4], [1, 14, 3, 3, 9, 15], [2, 12, 13, 4, 6, 5]]


def both(found, lists=LISTS, **changed):
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
    lists = [LISTS[0], LISTS[1][:3], LISTS[2], LISTS[3][:5]]
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
    records = [record_prompts(subject(m), prompts(*LISTS), settings) for m in (one, other)]
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
