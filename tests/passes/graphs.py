"""Small models with known residual sites, and the graphs that Dynamo makes of them.

Each model calls `self.marks[i](value)` on the value that dropout i belongs on, in the order in
which the branches are added. A mark is an identity, so no graph shows it; in eager a hook on it
multiplies by the mask that NumPy draws. That run is the truth for a transformed graph: it names the
operand as well as the number of sites.

B batch, T sequence, D model dim, N heads; x [B, T, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B, T, D, N = 2, 3, 8, 2


class Mark(nn.Module):
    """The identity; says where a dropout belongs."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    """A model with marks, one for each kind in `kinds`, and `num_linear` projections."""

    kinds: tuple[str, ...] = ()
    num_linear = 1

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.ModuleList(Mark() for _ in self.kinds)
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(self.num_linear))

    def branch(self, x: Tensor, i: int = 0) -> Tensor:
        return self.linears[i](F.rms_norm(x, (D,)))


def sdpa_branch(x: Tensor, q: nn.Linear, kv: nn.Linear, memory: Tensor | None = None) -> Tensor:
    keys = x if memory is None else memory
    heads = [t.unflatten(-1, (N, D // N)).transpose(1, 2) for t in (q(x), kv(keys), kv(keys))]
    y = F.scaled_dot_product_attention(*heads, is_causal=memory is None)
    return y.transpose(1, 2).flatten(-2)


class PreNorm(Model):
    """Llama: RMSNorm, RoPE, SDPA, SwiGLU."""

    kinds = ("attention", "feed_forward")
    num_linear = 7

    def rope(self, x: Tensor) -> Tensor:
        angles = torch.arange(T).unsqueeze(-1) * torch.ones(x.shape[-1])
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (N, D // N)).transpose(1, 2) for proj in self.linears[:3])
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        return self.linears[3](y.transpose(1, 2).flatten(-2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linears[6](F.silu(self.linears[4](x)) * self.linears[5](x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.marks[0](self.attention(F.rms_norm(x, (D,))))
        return x + self.marks[1](self.feed_forward(F.rms_norm(x, (D,))))


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


class ReadThroughAnotherSum(PreNorm):
    """Zamba: the feed-forward reads x + attention(x) and is added to x; it attends to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.marks[0](self.attention(F.rms_norm(x, (D,))))
        return x + self.marks[1](self.feed_forward(F.rms_norm(y, (D,))))


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


# One residual add in many spellings: (stream x, branch h, model) -> sum.
SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x + h": lambda x, h, s: x + h,
    "h + x": lambda x, h, s: h + x,
    "torch.add": lambda x, h, s: torch.add(x, h),
    "torch.add, named": lambda x, h, s: torch.add(input=x, other=h),
    "torch.add, alpha": lambda x, h, s: torch.add(x, h, alpha=0.5),
    "torch.add, branch first, alpha": lambda x, h, s: torch.add(h, x, alpha=0.5),
    "x.add": lambda x, h, s: x.add(h),
    "x.add, named": lambda x, h, s: x.add(other=h, alpha=2),
    "x += h": lambda x, h, s: x.__iadd__(h),
    "h += x": lambda x, h, s: h.__iadd__(x),
    "x.add_(h)": lambda x, h, s: x.add_(h),
    "x + h as fp64": lambda x, h, s: x.double() + h.double(),
    "x + h reshaped": lambda x, h, s: (x.view(-1, D) + h.reshape(-1, D)).view(B, T, D),
    "x * 0.5 + h": lambda x, h, s: x * 0.5 + h,
    "0.5 * x + h": lambda x, h, s: 0.5 * x + h,
    "x / 2 + h": lambda x, h, s: x / 2 + h,
    "torch.mul(x, 0.5) + h": lambda x, h, s: torch.mul(x, 0.5) + h,
    "x * s + h": lambda x, h, s: x * s + h,
    "s * x + h": lambda x, h, s: s * x + h,
    "(x + b) * s + h + b": lambda x, h, s: (x + s.expand(D)) * s + h + s.expand(D),
    "(x + h) * 0.7": lambda x, h, s: (x + h) * 0.7,
    "x + (h + h)": lambda x, h, s: x + (h + h),
    "x - h": lambda x, h, s: x - h,
    "h - x": lambda x, h, s: h - x,
    "torch.sub, alpha": lambda x, h, s: torch.sub(x, h, alpha=0.5),
    "x -= h": lambda x, h, s: x.__isub__(h),
    "h.add_(x), then h": lambda x, h, s: (h.add_(x), h * 2)[1],
    "h.add_(x) of a view, then h": lambda x, h, s: ((h := h.view(B, T, D)).add_(x), h.sin())[1],
    "h.sub_(x), then h": lambda x, h, s: (h.sub_(x), h)[1],
    "(x + h) * padding": lambda x, h, s: (x + h) * torch.ones(B, T, 1),
    "x + h, gated and normed": lambda x, h, s: (
        (y := x + h) * (y @ y.mT @ y) + F.layer_norm(y, (D,))
    ),
}


class Spelling(Model):
    kinds = ("feed_forward",)

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()  # some spellings write into it
        return self.add(x, self.marks[0](self.branch(x)), self.scale)


class BranchForm(Model):
    """x + f(h): what dropout goes on is f(h), the value that joins the stream."""

    kinds = ("feed_forward",)
    FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "scaled": lambda h, x, s: 0.5 * h,
        "layer scale": lambda h, x, s: h * s,
        "gated by a parameter": lambda h, x, s: s.tanh() * h,
        "gated by the stream": lambda h, x, s: x.sigmoid() * h,
        "negated": lambda h, x, s: -h,
    }

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = self.FORMS[form]
        self.scale = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.marks[0](self.form(self.branch(x), x, self.scale))


def state_space(x: Tensor, m: Model, sign: float = 1.0) -> Tensor:
    """Mamba's mixer: a scan, here a product, plus the scaled input, gated, cut and projected."""
    u, gate, out = (linear.weight for linear in m.linears)
    u = F.silu(x @ u)
    scanned = (u @ u.mT).tril() @ u + u * (sign * m.linears[0].bias)
    return (scanned.float()[:, :T] * F.silu(x @ gate)) @ out


# Adds that are no residual sites: (x, model) -> anything.
LOOK_ALIKES: dict[str, Callable[[Tensor, Model], object]] = {
    "rope": lambda x, m: PreNorm.rope(m, m.branch(x)),
    "embedding sum": lambda x, m: F.embedding(x.argmax(-1), m.linears[0].weight) + x,
    "additive mask": lambda x, m: m.branch(x) + torch.zeros(B, T, D),
    "bias": lambda x, m: x @ m.linears[0].weight + m.linears[0].bias.expand(B, T, D),
    "eps": lambda x, m: x * torch.rsqrt(m.branch(x) + 1e-6),
    "gelu_new": lambda x, m: x + 0.044715 * torch.pow(x, 3.0),
    "no contraction": lambda x, m: x + F.layer_norm(x, (D,)),
    "doubled": lambda x, m: x + x,
    "auxiliary loss": lambda x, m: m.branch(x).mean() + m.linears[1](m.branch(x)).square().mean(),
    "loss per token": lambda x, m: m.branch(x).sum(-1) + m.linears[1](x).logsumexp(-1) ** 2,
    "two projections": lambda x, m: m.linears[0](x) + m.linears[1](x),
    "adapter": lambda x, m: m.linears[0](x) + 0.5 * m.linears[1](m.linears[2](x)),
    "other shape": lambda x, m: x + m.branch(x)[:, :1],
    "reduced": lambda x, m: x.mean(0) + m.branch(x.mean(0, keepdim=True))[:, 0],
    "integers": lambda x, m: x.long() + (m.branch(x) > 0).long(),
    "state space": lambda x, m: state_space(x, m),
    "state space of a difference": lambda x, m: state_space(x, m, -1.0),
    "subtraction": lambda x, m: x - F.layer_norm(x, (D,)),
}


class LookAlike(Model):
    num_linear = 3

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = LOOK_ALIKES[name]

    def forward(self, x: Tensor) -> object:
        return self.function(x, self)


def stream(seed: int = 0) -> Tensor:
    """x [B, T, D]"""
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))


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
        (ShortConvolutions, ()),
        (ZeroDropout, ()),
        (ReadElsewhere, ()),
        (Checkpointed, ()),
    )
}
SITES |= {name: (lambda add=add: (Spelling(add), (stream(),))) for name, add in SPELLINGS.items()}
SITES |= {
    f"branch {form}": (lambda form=form: (BranchForm(form), (stream(),)))
    for form in BranchForm.FORMS
}
