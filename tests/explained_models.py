"""Models and passes that the tests of xtrain.explain name as module:function."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, broken: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.broken = broken

    def forward(self, x):
        h = self.up(x)
        if self.broken:
            torch._dynamo.graph_break()  # the break
        return x + self.down(h.relu())


class Fused(Block):
    """Its product adds the stream: the branch is no value of its own."""

    def forward(self, x):
        h = self.up(x).relu().view(-1, 16)
        return torch.addmm(x.view(-1, 8), h, self.down.weight.t()).view(x.shape)


def fused():
    return nn.Sequential(Fused(), Fused()), torch.randn(2, 4, 8)


def _model(*flags):
    return nn.Sequential(*map(Block, flags)), torch.randn(2, 4, 8)


def whole():
    return _model(False, False)


def broken():
    return _model(True, True)


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)


def guess():
    return nn.Sequential(nn.Embedding(32, 8), Block(), Block())


def no_inputs():
    return nn.Linear(8, 8)


def wrong_inputs():
    return _model(False)[0], torch.randn(2, 7)


def nothing():
    return 3


def raises():
    raise RuntimeError("no\nweights")


def keep(graph):
    pass


def spoil(graph):
    raise RuntimeError("spoilt")


number = 3
