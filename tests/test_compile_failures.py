"""A backend that fails on an op: strict mode says so at once, with the op's place and the cause."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from probe_model import P, ProbeModel
from test_compile_moe import build, labelled
from torch import nn

import xtrain
from xtrain import torch_compat
from xtrain.compiler import SiteError
from xtrain.compiler.backend import Backend


@torch.library.custom_op("xtrain_test::rows", mutates_args=())
def rows(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The identity; its backward reads numbers on the host, as loops over experts do."""
    return x.clone()


@rows.register_fake
def _(x, lengths):
    return torch.empty_like(x)


def read_lengths(ctx, grad):
    for length in ctx.lengths.tolist():
        if length:
            continue
    return grad, None


rows.register_autograd(
    read_lengths, setup_context=lambda ctx, inputs, output: setattr(ctx, "lengths", inputs[1])
)


class Rows(nn.Module):
    def forward(self, x):
        return rows(x, torch.arange(3))  # the place of the failure


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that our backend is called with."""
    torch._dynamo.reset()
    seen = []
    call = Backend.__call__
    monkeypatch.setattr(
        Backend, "__call__", lambda self, m, inputs: seen.append(m) or call(self, m, inputs)
    )
    return seen


def place_in_this_file(text):
    line = re.search(r"on the op at \S*test_compile_failures.py:(\d+)", text)
    with open(__file__) as source:
        return source.read().splitlines()[int(line[1]) - 1]


def tokens():
    return torch.zeros(4, 5, dtype=torch.long)


@pytest.mark.parametrize("compile_it", [xtrain.compile, xtrain.compile_blocks])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_op_in_a_branch_that_cannot_be_traced_is_refused_at_once(graphs, backend, compile_it):
    model = ProbeModel()
    model.blocks[1].mlp = nn.Sequential(model.blocks[1].mlp, Rows())
    compiled = compile_it(model, dropout=P, seed=0, backend=backend)
    with pytest.raises(SiteError) as error:
        compiled(tokens())
    text = str(error.value)
    assert f"the backend '{backend}' failed with DataDependentOutputException: aten." in text
    assert "# the place of the failure" in place_in_this_file(text) and "in its backward" in text
    assert "graph broke" not in text and "batched_mm" in text and "strict=False" in text
    assert len(graphs) <= 2, "one for the first block, where blocks are compiled one by one"


def test_an_op_behind_the_stream_costs_no_site(graphs):
    """Dynamo traces one function less, and what it leaves to eager holds no add."""

    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = ProbeModel(), Rows()

        def forward(self, tokens):
            return self.head(self.body(tokens))

    compiled = xtrain.compile(Headed(), dropout=P, seed=0, backend="aot_eager")
    compiled(tokens()).sum().backward()
    assert len(compiled.last_executed_sites) == 4 and compiled.report().uncovered == []
    assert len(graphs) > 1


def test_what_a_failure_leaves_to_eager_is_named_by_later_refusals(graphs):
    """The op lies between two layers: no branch holds it, and the function of both adds is lost."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(4))
            self.rows = Rows()

        def forward(self, x):
            first, second, third, fourth = self.weights
            x = x + (x @ first).relu() @ second
            x = self.rows(x)
            return x + (x @ third).relu() @ fourth

    compiled = xtrain.compile(Between(), dropout=P, seed=0, backend="aot_eager")
    with pytest.raises(SiteError) as error:
        compiled(torch.ones(2, 3, 8))
    text = str(error.value)
    assert "It began with this: the backend 'aot_eager' failed with DataDependentOutput" in text
    assert "# the place of the failure" in place_in_this_file(text)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_grouped_experts_on_fp32_weights(graphs, family):
    """Their fallback's backward reads the experts' offsets; batched_mm trains."""
    compiled = xtrain.compile(build(family, "grouped_mm"), dropout=P, seed=1, backend="aot_eager")
    with pytest.raises(SiteError, match=r"transformers/integrations/moe.py:\d+, in its backward"):
        compiled(**labelled())
    assert len(graphs) == 1
    other = xtrain.compile(build(family, "batched_mm"), dropout=P, seed=1, backend="aot_eager")
    other(**labelled()).loss.backward()
    assert len(other.last_executed_sites) == 4


def test_errors_of_a_backward_name_the_op_in_the_forward():
    found = []

    def backend(module, inputs):
        with torch_compat.noting_backward_errors() as stacks:
            warnings.warn("another", UserWarning, stacklevel=1)
            try:
                return torch_compat.inner_backend("aot_eager", mode=None, options={}, dynamic=None)(
                    module, inputs
                )
            except Exception as error:
                assert torch_compat.leaves_code_to_eager(error)
                found.append(torch_compat.frames(torch_compat.forward_stack(error, stacks))[-1])
                raise

    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(lambda x: Rows()(x).sin(), backend=backend)(x)
    assert "# the place of the failure" in open(__file__).read().splitlines()[int(found[0][1]) - 1]
    texts = [str(w.message) for w in caught]
    assert "another" in texts and not any("Error detected" in text for text in texts)
    assert not torch_compat.leaves_code_to_eager(ValueError("rows"))
    assert torch_compat.forward_stack(ValueError("rows"), []) == ""
