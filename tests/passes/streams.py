"""Models whose stream meets earlier values again: skips, injected inputs, loops, convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from marked import B, D, Model, PreNorm, T
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ReadThroughAnotherSum(PreNorm):
    """Zamba: the feed-forward reads x + attention(x) and is added to x; it attends to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.marks[0](self.attention(F.rms_norm(x, (D,))))
        return x + self.marks[1](self.feed_forward(F.rms_norm(y, (D,))))


class Block(nn.Module):
    def __init__(self, mark: nn.Module) -> None:
        super().__init__()
        self.mark, self.linear = mark, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mark(self.linear(F.rms_norm(x, (D,))))


class UNet(Model):
    """stream + skip is no site, the blocks' own adds are. Checkpoints hide nothing."""

    kinds = ("feed_forward",) * 6
    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mark) for mark in self.marks)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.blocks):
            if i < 3:
                skips.append(x)
            else:
                x = x + skips.pop() if i % 2 else 0.5 * skips.pop() + x
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class CheckpointedUNet(UNet):
    checkpointed = True


class Injected(Model):
    """The first stream, and positions, are added again before each layer (x0 injection)."""

    kinds = ("feed_forward",) * 3
    num_linear = 3

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2))
        self.positions = nn.Embedding(T, D)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(T).expand(B, T))
        start = x = x + positions
        for i in range(3):
            x = self.weights[0] * x + self.weights[1] * start + positions
            x = x + self.marks[i](self.branch(x, i))
        return x


class InlinePositions(Model):
    """As above, in the same expression as the branch."""

    kinds = ("feed_forward",) * 3
    num_linear = 3

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for i in range(3):
            x = positions + x + self.marks[i](self.branch(x, i))
        return x


class Looped(Model):
    """HRM: a state that is a normed stream, into which the input is injected at each turn."""

    kinds = ("feed_forward",) * 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def norm(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for i in range(3):
            y = state + x
            y = y + self.marks[i](self.branch(y))
            state = self.norm(y) if i % 2 else F.layer_norm(y, (D,))
        return x + state


class ShortConvolution(nn.Module):
    """x + a depthwise convolution of x: a few taps a channel, no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 2, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT)[..., :T].mT


class ShortConvolutions(Model):
    """Inkling: keys, and the branch as a whole, pass short convolutions."""

    kinds = ("attention",)
    num_linear = 2

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ShortConvolution() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.linears[0](x), self.convs[0](self.linears[1](x))
        return x + self.marks[0](self.convs[1](F.scaled_dot_product_attention(q, k, k)))


class FilledBuffers(Model):
    """Experts and adapters that fill a buffer in place: no edge leads from the write to the add."""

    kinds = ("feed_forward", "feed_forward")
    num_linear = 2

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        out = torch.zeros_like(rows)
        out.index_add_(0, torch.arange(B * T), self.branch(rows))
        x = x + self.marks[0](out.view(B, T, D))
        out = torch.zeros_like(x)
        out[:, 1:] = self.branch(x[:, 1:], 1)
        return x + self.marks[1](out)
