"""Small models with known residual sites, and the graphs that Dynamo makes of them.

How a model says where its sites are: marked.py. streams.py and spellings.py hold more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from marked import B, D, Mark, Model, N, PreNorm, T, sdpa_branch, stream
from merges import MERGES
from spellings import LOOK_ALIKES, SPELLINGS, BranchForm, LookAlike, Spelling
from streams import (
    CheckpointedUNet,
    FilledBuffers,
    Injected,
    InlinePositions,
    Looped,
    ReadThroughAnotherSum,
    ShortConvolutions,
    UNet,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LOOK_ALIKES", "SITES", "B", "D", "LookAlike", "Mark", "Model", "T", "stream"]


class SandwichNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(self.attention(F.rms_norm(x, (D,))), (D,))
        x = x + self.marks[0](h)
        h = F.rms_norm(self.feed_forward(F.rms_norm(x, (D,))), (D,))
        return x + self.marks[1](h)


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.marks[0](self.attention(x)), (D,))
        return F.layer_norm(x + self.marks[1](self.feed_forward(x)), (D,))


class ParallelResidual(PreNorm):
    """GPT-NeoX: two adds in one chain, each branch with a mask of its own."""

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(F.rms_norm(x, (D,)))
        feed_forward = self.feed_forward(F.layer_norm(x, (D,)))
        return x + self.marks[0](attention) + self.marks[1](feed_forward)


class ParallelSummedFirst(ParallelResidual):
    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(F.rms_norm(x, (D,)))
        feed_forward = self.feed_forward(F.layer_norm(x, (D,)))
        return (self.marks[0](attention) + self.marks[1](feed_forward)) + x


class ParallelUnderNoDropout(ParallelResidual):
    """Falcon: the sum of the branches goes through the model's own dropout, whose p is 0."""

    def forward(self, x: Tensor) -> Tensor:
        branches = self.marks[0](self.attention(F.rms_norm(x, (D,))))
        branches += self.marks[1](self.feed_forward(F.layer_norm(x, (D,))))
        return x + F.dropout(branches, 0.0, self.training)


class ScaledExperts(Model):
    """Granite: routed and shared experts are summed in the block, scaled, and are one branch."""

    kinds = ("feed_forward",)
    num_linear = 2

    def forward(self, x: Tensor) -> Tensor:
        return x + self.marks[0]((self.branch(x, 0) + self.branch(x, 1)) * 0.5)


class SpeltOutAttention(PreNorm):
    """matmul, softmax, matmul; the mask, the additive bias and the scores are no sites."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (N, D // N)).transpose(1, 2) for proj in self.linears[:3])
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // N)
        scores = scores + torch.full((T, T), -1e9).triu(1).expand(B, N, T, T)
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class AlibiAttention(SpeltOutAttention):
    """Bloom: the product of queries and keys is added to a bias that no layer computes."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x) for proj in self.linears[:3])
        bias = torch.arange(float(T)).expand(B, 1, T)
        scores = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
        return self.linears[3](torch.bmm(scores.softmax(-1), v))


class RelativeAttention(SpeltOutAttention):
    """XLNet: queries meet keys and, in a product that is added last, positions of no stream."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x) for proj in self.linears[:3])
        positions = torch.arange(float(T)).unsqueeze(-1).expand(B, T, D).cos()
        scores = q @ k.mT + (q + 1.0) @ positions.mT
        return self.linears[3](scores.softmax(-1) @ v)


class CrossAttention(Model):
    kinds = ("attention", "cross_attention", "feed_forward")
    num_linear = 5

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, kv, q2, kv2, up = self.linears
        x = x + self.marks[0](sdpa_branch(F.rms_norm(x, (D,)), q, kv))
        x = x + self.marks[1](sdpa_branch(F.rms_norm(x, (D,)), q2, kv2, memory))
        return x + self.marks[2](F.relu(up(x)))


class SharedBias(Model):
    """T5: one position bias, made by the first layer, is added to the scores of every layer."""

    kinds = ("attention",) * 3
    num_linear = 3

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        bias = bias * 2.0  # [B, 1, T, T], what the scores are too
        for i in range(3):
            h = self.branch(x, i).unsqueeze(1)
            scores = h @ h.transpose(-1, -2) + bias
            weights = scores.float().softmax(-1).type_as(scores)
            x = x + self.marks[i]((weights @ h).squeeze(1))
        return x


class Experts(nn.Module):
    """Routed and shared experts, summed inside: one branch of the block's add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.shared = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        routed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            routed = routed + gates[..., i : i + 1] * expert(x)
        return routed + self.shared(x)


class MixtureOfExperts(Model):
    kinds = ("feed_forward",)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.marks[0](self.mlp(F.rms_norm(x, (D,))))


class LoRALinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2), nn.Linear(2, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 0.5


class LoRA(Model):
    kinds = ("feed_forward",)

    def __init__(self) -> None:
        super().__init__()
        self.lora = LoRALinear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.marks[0](self.lora(F.rms_norm(x, (D,))))


class OwnDropout(PreNorm):
    """GPT-2: the model drops both branches itself, and probabilities and embeddings besides."""

    num_linear = 7
    p = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(self.p) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drops[2](x)
        x = x + self.drops[0](self.marks[0](self.attention(F.rms_norm(x, (D,)))))
        return x + self.drops[1](self.marks[1](self.feed_forward(F.rms_norm(x, (D,)))))


class ZeroDropout(OwnDropout):
    """F.dropout with p = 0 counts as absent."""

    p = 0.0


class OwnDropoutReadElsewhere(Model):
    """The dropped value, and a cast of it, have other readers, which keep them."""

    kinds = ("feed_forward",)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dropped = F.dropout(input=self.marks[0](self.branch(x)), p=0.25)
        scaled = dropped.double() * 0.5
        return x + scaled.float(), dropped.sum(), scaled.sum()


class ReadElsewhere(Model):
    """The undropped branch is read by others too; the stream has many readers."""

    kinds = ("feed_forward", "feed_forward")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.branch(x)
        return x + self.marks[0](h), x.relu() * 2, h.sum(), (x.double() + self.marks[1](h).double())


class Checkpointed(PreNorm):
    """One site inside a checkpoint, one around it, one behind it in a second call."""

    kinds = ("attention", "feed_forward", "feed_forward")

    def inner(self, x: Tensor) -> Tensor:
        return x + self.marks[0](self.attention(F.rms_norm(x, (D,))))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = x + self.marks[1](checkpoint(self.feed_forward, x, use_reentrant=False))
        return x + self.marks[2](x @ self.linears[0].weight)


class AddedInACheckpoint(PreNorm):
    """Zamba: a branch is computed outside of the checkpointed layers that add it, one in another.

    The first stream and what the layers skip enter as well, and are no branches.
    """

    kinds = ("attention", "feed_forward", "attention", "feed_forward")

    def added(self, i: int, x: Tensor, attention: Tensor, start: Tensor) -> Tensor:
        x = x + self.marks[i](attention) + start
        return x + self.marks[i + 1](self.feed_forward(F.rms_norm(x, (D,))))

    def inner(self, x: Tensor, start: Tensor) -> Tensor:
        attention = self.attention(F.rms_norm(x, (D,)))
        return checkpoint(self.added, 2, x, attention, start, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        start = x
        x = x * 0.5
        attention = self.attention(F.rms_norm(x, (D,)))
        x = checkpoint(self.added, 0, x, attention, start, use_reentrant=False)
        return checkpoint(self.inner, x, start, use_reentrant=False)


# name -> (model, inputs): every model above whose adds hold sites
SITES: dict[str, Callable[[], tuple[Model, tuple[Tensor, ...]]]] = {
    cls.__name__: (lambda cls=cls, extra=extra: (cls(), (stream(), *extra)))
    for cls, extra in (
        (PreNorm, ()),
        (SandwichNorm, ()),
        (PostNorm, ()),
        (ParallelResidual, ()),
        (ParallelSummedFirst, ()),
        (ParallelUnderNoDropout, ()),
        (ScaledExperts, ()),
        (ReadThroughAnotherSum, ()),
        (SpeltOutAttention, ()),
        (AlibiAttention, ()),
        (RelativeAttention, ()),
        (CrossAttention, (stream(1),)),
        (SharedBias, (torch.zeros(B, 1, T, T),)),
        (MixtureOfExperts, ()),
        (LoRA, ()),
        (UNet, ()),
        (CheckpointedUNet, ()),
        (Injected, ()),
        (InlinePositions, (stream(1),)),
        (Looped, ()),
        (FilledBuffers, ()),
        (ShortConvolutions, ()),
        (ZeroDropout, ()),
        (ReadElsewhere, ()),
        (Checkpointed, ()),
        (AddedInACheckpoint, ()),
    )
}
SITES |= {cls.__name__: (lambda cls=cls: (cls(), (stream(),))) for cls in MERGES}
SITES |= {name: (lambda add=add: (Spelling(add), (stream(),))) for name, add in SPELLINGS.items()}
SITES |= {
    f"branch {form}": (lambda form=form: (BranchForm(form), (stream(),)))
    for form in BranchForm.FORMS
}
