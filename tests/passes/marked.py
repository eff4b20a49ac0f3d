"""What the models of graphs.py, streams.py and spellings.py are made of.

Each model calls `self.marks[i](value)` on the value that dropout i belongs on, in the order in
which the branches are added. A mark is an identity, so no graph shows it; in eager a hook on it
multiplies by the mask that NumPy draws. That run is the truth for a transformed graph: it names the
operand as well as the number of sites.

B batch, T sequence, D model dim, N heads; x [B, T, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, D, N = 2, 3, 8, 2


def stream(seed: int = 0) -> Tensor:
    """x [B, T, D]"""
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))


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
