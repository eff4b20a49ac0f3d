"""Models whose streams meet their branches in parts, in several sums at once, or under gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from marked import B, D, Model, PreNorm, T
from torch import Tensor, nn


class GatedByBoth(Model):
    """A gate that reads stream and branch: each of the two addends depends on the other's value."""

    kinds = ("feed_forward", "feed_forward")
    num_linear = 4

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            h = self.branch(x, i)
            g = (self.linears[2](x) + self.linears[3](h)).sigmoid()
            x = self.marks[i](g * h) + (1 - g) * x
        return x


class HighwayBehindExperts(Model):
    """The first sum adds a buffer that experts fill; the stream that it makes is no state."""

    kinds = ("feed_forward", "feed_forward")
    num_linear = 3

    def forward(self, x: Tensor) -> Tensor:
        routed = torch.zeros_like(x)
        routed = routed * 0.5 + self.branch(x)
        x = x + self.marks[0](routed)
        g = self.linears[2](x).sigmoid()
        return g * self.marks[1](self.branch(x, 1)) + (1 - g) * x


class Reversible(PreNorm):
    """Two halves of a stream, each with a branch that reads the other; in chunks, then slices."""

    kinds = ("feed_forward", "attention", "feed_forward", "attention")

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(D // 2, D // 2) for _ in range(4))

    def attend(self, x: Tensor, i: int) -> Tensor:
        q = F.rms_norm(x, (D // 2,))
        return self.narrow[i](F.scaled_dot_product_attention(q, q, q))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a + self.marks[0](self.narrow[0](b))
        b = b + self.marks[1](self.attend(a, 1))
        x = torch.cat([a, b], -1)
        a, b = x[..., : D // 2], x[..., D // 2 :]
        a = a + self.marks[2](self.narrow[2](b))
        return torch.cat([a, b + self.marks[3](self.attend(a, 3))], -1)


class Halves(Reversible):
    """Each half has a branch of its own, and a sum of its own."""

    kinds = ("feed_forward", "attention")

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(D // 2, -1)
        h = self.marks[0](self.narrow[0](a))
        return torch.cat([a + h, b + self.marks[1](self.attend(b, 1))], -1)


class AddedTogether(Halves):
    """The same by one call."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        branches = [self.marks[0](self.narrow[0](a)), self.marks[1](self.attend(b, 1))]
        return torch.cat(torch._foreach_add([a, b], branches), -1)


class AddedToRows(Model):
    """A branch of the later tokens alone, added to their rows, in place and by copies."""

    kinds = ("feed_forward", "feed_forward", "feed_forward")
    num_linear = 3

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 1:] += self.marks[0](self.branch(x[:, 1:]))
        z = y.clone()
        z[:, 1:] = y[:, 1:] + self.marks[1](self.branch(y[:, 1:], 1))
        rows = z.view(-1, D)
        chosen = torch.arange(0, B * T, 2)
        return rows.index_add(0, chosen, self.marks[2](self.branch(rows[chosen], 2)))


class AddedTransposed(Model):
    """Channels first, as convolutions have them: the mask is drawn over the value that is added."""

    kinds = ("feed_forward", "feed_forward")
    num_linear = 2

    def forward(self, x: Tensor) -> Tensor:
        x = (x.mT + self.marks[0](self.branch(x).mT)).mT
        return x.movedim(1, 2) + self.marks[1](torch.swapaxes(self.branch(x, 1), 1, 2))


class StackedParallel(PreNorm):
    """Three addends in one stack: the stream and two branches of it."""

    kinds = ("attention", "feed_forward", "feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        attention = self.marks[0](self.attention(F.rms_norm(x, (D,))))
        feed_forward = self.marks[1](self.feed_forward(F.rms_norm(x, (D,))))
        x = torch.stack([attention, x, feed_forward]).mean(0)
        return x + self.marks[2](torch.stack([self.linears[4](x), self.linears[5](x)]).sum(0))


MERGES = (
    GatedByBoth,
    HighwayBehindExperts,
    Reversible,
    Halves,
    AddedTogether,
    AddedToRows,
    AddedTransposed,
    StackedParallel,
)
