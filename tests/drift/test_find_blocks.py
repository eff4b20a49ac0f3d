"""Which modules are the layers: of mixed kinds, of several stacks, run twice or not at all."""

from __future__ import annotations

import pytest
from drift_models import Gate, Scale, next_up, tokens
from torch import nn

from xtrain.drift import compare, record
from xtrain.drift.recording.observe import find_blocks
from xtrain.drift.recording.recorded_model import draw_weights


class Other(nn.Module):
    """A layer of another kind than Gate."""

    def __init__(self, dim):
        super().__init__()
        self.inner = Scale(dim)

    def forward(self, x):
        return x - self.inner(x).tanh()


class Two(Gate):
    """A layer of two matrices."""

    def __init__(self, dim):
        super().__init__(dim)
        self.second = Scale(dim)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """Stacks called one after the other as `order` says."""

    def __init__(self, order=("first", "second"), **stacks):
        super().__init__()
        self.order = order
        self.embedding = nn.Embedding(16, 8)
        for name, stack in stacks.items():
            setattr(self, name, stack)
        self.head = nn.Linear(8, 16, bias=False)
        draw_weights(self, 1)

    def forward(self, input_ids):
        x = self.embedding(input_ids) * 50
        for name in self.order:
            x = getattr(self, name)(x)
        return self.head(x)


def test_layers_of_mixed_kinds():
    model = Model(("stack",), stack=Stack(Gate(8), Other(8), Gate(8)))
    assert list(find_blocks(model)) == [f"stack.layers.{n}" for n in range(3)]
    # stages of a whole are no layers, nor are lists of what has no parts
    model = Model(("stack",), stack=nn.Sequential(Stack(Two(8), Two(8)), Other(8)))
    model.norms = nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)])
    assert list(find_blocks(model)) == ["stack.0.layers.0", "stack.0.layers.1"]


ORDERS = {
    "f0 f1 s0": ("first", "second"),
    "s0 f0 f1": ("second", "first"),
    "s0": ("second",),
    "f0 f1 s0 f0 f1": ("first", "second", "first"),
}


@pytest.mark.parametrize(
    ("mode", "ran"),
    [
        *(("eager", ran) for ran in ORDERS),
        ("aot_eager", "s0 f0 f1"),  # both compiled modes have block outputs by the same means
        ("inductor", "s0"),
        ("inductor", "f0 f1 s0 f0 f1"),
    ],
)
def test_stacks_in_any_order_run_twice_or_not_at_all(mode, ran):
    names = {"f0": "first.layers.0", "f1": "first.layers.1", "s0": "second.layers.0"}

    def model():
        return Model(ORDERS[ran], first=Stack(Gate(8), Gate(8)), second=Stack(Other(8)))

    one, other = model(), model()
    assert list(find_blocks(one)) == list(names.values())
    next_up(other.second.layers[0].inner.weight)
    records = [record(m, tokens(), mode=mode) for m in (one, other)]
    keys = [key.path for key in records[0].cases[0].steps[0].keys("blocks")]
    assert keys == [names[word] for word in ran.split()]
    found = compare(*records)
    moved = {layer.path for layer in found.growth if layer.max_abs > 0}
    behind = ran.split()[ran.split().index("s0") :]
    assert moved == {names[word] for word in behind}
    assert {g.path for g in found.growth if g.num_compared} == {names[w] for w in ran.split()}
