"""One residual add in many spellings, a branch in many forms, and adds that are no sites."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from marked import B, D, Model, PreNorm, T
from torch import Tensor, nn


def gate(x: Tensor) -> Tensor:
    """[.., D] in 0..1, computed from the stream."""
    return (x @ x.mT @ x).sigmoid()


def own_rows(x: Tensor) -> Tensor:
    """An index of every element's row, as scatter_add takes it."""
    return torch.arange(T)[:, None].expand(B, T, D)


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
    "x + h with a dim more": lambda x, h, s: (x[None] + h[None, ..., :])[0],
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
    "torch.rsub": lambda x, h, s: torch.rsub(h, x),
    "-(-x - h)": lambda x, h, s: -(-x - h),
    "torch.lerp": lambda x, h, s: torch.lerp(x, h, 0.25),
    "torch.lerp, named": lambda x, h, s: torch.lerp(input=x, end=h, weight=s),
    "torch.lerp, branch first, gated": lambda x, h, s: torch.lerp(
        h, x, (x @ x.mT).sum(-1)[..., None]
    ),
    "x.lerp_": lambda x, h, s: x.lerp_(h, 0.25),
    "h.lerp_, then h": lambda x, h, s: (h.lerp_(x, 0.25), h)[1],
    "torch.addcdiv": lambda x, h, s: torch.addcdiv(x, h, x.exp(), value=2),
    "highway": lambda x, h, s: (g := gate(x)) * h + (1 - g) * x,
    "highway, stream first": lambda x, h, s: x * (1 - (g := gate(x))) + h * g,
    "highway, two gates": lambda x, h, s: gate(x) * h + gate(-x) * x,
    "highway, one gate a token": lambda x, h, s: (g := gate(x)[..., :1]) * h + (1 - g) * x,
    "x + g (h - x)": lambda x, h, s: x + 0.25 * (h - x),
    "h + g (x - h)": lambda x, h, s: h + gate(x) * (x - h),
    "h - g (h - x)": lambda x, h, s: h - 0.25 * (h - x),
    "h + (x - h) / n": lambda x, h, s: (x - h) / 4 + h,
    "x * padding + h": lambda x, h, s: x * (x[..., :1] > -9).float() + h,
    "masked x + h": lambda x, h, s: x.masked_fill(x > 9, 0.0) + h,
    "selected x + h": lambda x, h, s: torch.where(x > 9, 0.0, x) + h,
    "stack.sum": lambda x, h, s: torch.stack([x, h]).sum(0),
    "stack.sum, last dim": lambda x, h, s: torch.stack((h, x), -1).sum(dim=-1),
    "torch.sum(stack)": lambda x, h, s: torch.sum(torch.stack([x, h], dim=1), dim=(1,)),
    "stack.mean": lambda x, h, s: torch.stack([x, h]).mean(0),
    "stack, weighted": lambda x, h, s: (torch.stack([x, h]) * s.expand(2, 1, 1, 1)).sum(0),
    "stack, weighted, einsum": lambda x, h, s: torch.einsum(
        "k,kbtd->btd", s.expand(2), torch.stack([x, h])
    ),
    "stack, weighted, einsum, any dims": lambda x, h, s: torch.einsum(
        "...k, k -> ...", torch.stack([x, h], -1), s.expand(2)
    ),
    "stack, weighted by token": lambda x, h, s: torch.einsum(
        "btk,btkd->btd", gate(x)[..., :2], torch.stack([x, h], 2)
    ),
    "stack, weighted, matmul": lambda x, h, s: torch.stack([x, h], -1) @ s.expand(2),
    "stack, weighted, linear": lambda x, h, s: F.linear(
        torch.stack([x, h], -1), s.expand(1, 2)
    ).squeeze(-1),
    "stack.sum, dim kept": lambda x, h, s: torch.stack([x, h]).sum(0, keepdim=True)[0],
    "stack, weighted, tensordot": lambda x, h, s: torch.tensordot(
        s.expand(2), torch.stack([x, h]), dims=1
    ),
    "cat.sum": lambda x, h, s: torch.cat([x[None], h.unsqueeze(0)]).sum(0),
    "sum of a list": lambda x, h, s: sum([x, h]),
    "_foreach_add": lambda x, h, s: torch._foreach_add([s, x], [s, h], alpha=0.5)[1],
    "_foreach_sub": lambda x, h, s: torch._foreach_sub([x], [h]),
    "_foreach_lerp": lambda x, h, s: torch._foreach_lerp([x], [h], 0.25)[0],
    "_foreach_add_": lambda x, h, s: (torch._foreach_add_([x], [h]), x * 2)[1],
    "index_add": lambda x, h, s: x.view(-1, D).index_add(0, torch.arange(B * T), h.view(-1, D)),
    "index_add_": lambda x, h, s: x.index_add_(1, torch.arange(T), h),
    "scatter_add": lambda x, h, s: x.scatter_add(1, own_rows(x), h),
    "index_put, accumulate": lambda x, h, s: x.index_put((torch.arange(B),), h, accumulate=True),
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


def recurrence(x: Tensor, m: Model) -> Tensor:
    """A delta rule: a state that starts empty is decayed, and what it predicts is taken off."""
    state, keys, values = torch.zeros(B, D, D), m.linears[0](x), m.linears[1](x)
    for t in range(T):
        k, v = keys[:, t, :, None], values[:, t, :, None]
        state = state * gate(k) + k @ (v - state @ k).mT
    return state


def recurrent_cell(x: Tensor, m: Model) -> Tensor:
    """A GRU that runs over tokens."""
    h = x.new_zeros(B, D)
    for t in range(T):
        z = (m.linears[0](x[:, t]) + m.linears[1](h)).sigmoid()
        h = (1 - z) * (m.linears[2](x[:, t]) + m.linears[1](h)).tanh() + z * h
    return h


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
    "recurrence": lambda x, m: recurrence(x, m),
    "recurrent cell": lambda x, m: recurrent_cell(x, m),
    "halves of a projection": lambda x, m: (
        (y := m.branch(x).chunk(2, -1))[0] + y[1] @ y[1].mT @ y[1]
    ),
    "stacked experts": lambda x, m: torch.stack([m.linears[i](x) for i in range(3)]).sum(0),
    "stacked states": lambda x, m: torch.stack([x, m.branch(x)]),
    "stacked states, projected": lambda x, m: m.linears[2](torch.stack([x, m.branch(x)], 1)),
    "stacked states, mixed": lambda x, m: F.linear(
        torch.stack([x, m.branch(x)], -1), m.linears[0].weight[:, :2]
    ),
    "a norm of stacked states": lambda x, m: torch.stack([x, m.branch(x)]).square().sum(0),
    "stacked states, summed over tokens": lambda x, m: torch.stack([x, m.branch(x)]).sum(2),
    "streams read out": lambda x, m: torch.stack(
        [(y := torch.stack([x, x.sin()]))[0], m.branch(y[1])]
    ).mean(0),
    "buffer of rows": lambda x, m: torch.zeros_like(x).index_add(1, torch.arange(T), m.branch(x)),
    "rows replaced": lambda x, m: x.index_put((torch.arange(B),), m.branch(x)),
}


class LookAlike(Model):
    num_linear = 3

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = LOOK_ALIKES[name]

    def forward(self, x: Tensor) -> object:
        return self.function(x, self)
