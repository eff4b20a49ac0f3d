"""A grammar of small models that add branches to a stream, as the source text of their classes.

A model is two blocks; a block is a few steps `stream = sum(skip(stream), drop(branch(norm)))`, each
part in one of many spellings, with something around it that is no residual sum. Text, so that each
model has code of its own, as a user's has, and a failing one can be read.

Each table: name -> (text, whether the form must run). What need not run may be refused by a
SiteError, and is never left without dropout in silence. B 2, T 4, D 16.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from dataclasses import dataclass

B, T, D = 2, 4, 16

# What a branch is added to, from the stream x.
SKIPS: dict[str, tuple[str, bool]] = {
    "plain": ("x", True),
    "cast": ("x.double().float()", True),
    "transposed and back": ("x.transpose(1, 2).contiguous().transpose(1, 2)", True),
    "flattened and back": ("x.reshape(-1, 16).view_as(x)", True),
    "scaled by a parameter": ("x * self.scale", True),
    "scaled by a number": ("x * 0.9", True),
    "affine": ("x * 2 - 0.3", False),
    "gated": ("x * (1 - torch.sigmoid(self.gate(x)))", False),
    "masked": ("x * (c > 0)", False),
    "chosen": ("torch.where(c > 0, x, 0.0)", False),
    "normed": ("self.norms[2](x)", False),
    "clamp": ("x.clamp(-2, 2)", False),
    "softmax": ("x.softmax(-1)", False),
    "tanh": ("torch.tanh(x)", False),
    "detached": ("x.detach()", False),
    "flip": ("x.flip(1)", False),
    "roll": ("torch.roll(x, 1, 1)", False),
    "shifted": ("torch.cat([x[:, :1], x[:, :-1]], 1)", False),
    "permuted": ("x[:, [2, 0, 3, 1]]", False),
    "sorted": ("x.sort(-1).values", False),
    "turned": ("x @ self.turn", False),
    "projected": ("self.proj(x)", False),
    "pooled": ("F.avg_pool1d(x.mT, 3, 1, 1).mT", False),
    "convolved": ("self.depthwise(x.mT).mT", False),
    "broadcast": ("x.mean(1, keepdim=True)", False),
    "cumulated": ("x.cumsum(1) / 4", False),
    "complex": (
        "times_i(x)",
        False,
    ),
    "spectrum": ("torch.fft.fft(x, dim=-1, norm='ortho').real", False),
}

# What reads the stream's norm n (and the condition c) and comes back to the stream.
BRANCHES: dict[str, tuple[str, bool]] = {
    "mlp": ("self.mlp(n)", True),
    "gated mlp": ("self.down(F.silu(self.up(n)) * self.up2(n))", True),
    "gelu spelt out": ("self.down(cubic_gelu(self.up(n)))", True),
    "attention": ("self.attention(n, n)", True),
    "attention spelt out": ("self.spelt_attention(n)", True),
    "rotated attention": ("self.attention(rotated(n), rotated(n))", True),
    "cross-attention": ("self.attention(n, memory)", True),
    "torch's attention": ("self.mha(n, n, n, need_weights=False)[0]", True),
    "two experts": ("self.experts(n)", True),
    "low-rank update": ("self.lora(n)", True),
    "shifted tokens": ("self.down(F.relu(self.up(n + self.scale * (n.roll(1, 1) - n))))", True),
    "gates inside": ("self.between(n)", True),
    "convolution": ("self.conv(n.mT).mT", True),
    "einsum": ("torch.einsum('btd,fd,fe->bte', n, self.up.weight, self.up2.weight)", True),
    "normed behind": ("self.norms[2](self.mlp(n))", True),
    "scaled behind": ("self.scale * self.mlp(n)", True),
    "checkpointed": ("recomputed(self.mlp, n)", True),
    "weighted by a sum": ("self.mlp(n) * torch.softmax(self.gate(n) + self.bias, -1)", True),
    "routed experts": ("self.routed(n)", True),
    "stacked experts": ("torch.bmm(torch.bmm(n, self.stacked), self.stacked.mT)", True),
    "messages by index_add": (
        "self.indexed_messages(n)",
        True,
    ),
    "messages by scatter_add": (
        "self.scattered_messages(n)",
        True,
    ),
    "gru": ("self.gru(n)[0]", False),
    "lstm": ("self.lstm(n)[0]", False),
    "rnn": ("self.rnn(n)[0]", False),
    "a scan": ("self.scan(n)", False),
    "pooled": ("self.mlp(n.mean(1, keepdim=True))", False),
    "last token": ("self.mlp(n[:, -1:])", False),
    "library op": ("library_mlp(n, self.up.weight, self.down.weight)", False),
    "autograd.Function": ("FunctionMlp.apply(n, self.up.weight, self.down.weight)", False),
    "left to eager": ("self.left_to_eager(n)", False),
    "print inside": ("self.printing(n)", False),
    "spectrum": ("torch.fft.fft2(n).real", False),
    "filtered": ("torch.fft.irfft(torch.fft.rfft(n, dim=1) * self.scale, n=4, dim=1)", False),
    "vmap": ("torch.vmap(self.mlp)(n)", False),
    "cond": ("torch.cond(n.sum() > 0, self.mlp, self.mlp, (n,))", False),
    "bilinear": ("F.bilinear(n, n, self.cube)", False),
}

# The sum of a skip s and a branch b.
SUMS: dict[str, tuple[str, bool]] = {
    "+": ("s + b", True),
    "+ reversed": ("b + s", True),
    "+=": ("s.clone().add_(b)", True),
    "into the branch": ("(1.0 * b).add_(s)", True),
    "alpha": ("torch.add(s, b, alpha=0.5)", True),
    "- of a negative": ("s - (-b)", True),
    "sum of a list": ("sum([s, b])", True),
    "lerp": ("torch.lerp(s, b, torch.sigmoid(self.gate(x)))", True),
    "blend": ("b + torch.sigmoid(self.gate(x)) * (s - b)", True),
    "highway": ("torch.sigmoid(self.gate(x)) * b + (1 - torch.sigmoid(self.gate(x))) * s", True),
    "addcmul": ("torch.addcmul(s, b, torch.sigmoid(self.gate(x)))", True),
    "addmm": ("s + drop(b @ self.square, self$) if marking() else self.addmm(s, b)", True),
    "baddbmm": (
        "s + drop(b @ self.square, self$) if marking() else self.baddbmm(s, b)",
        True,
    ),
    "stack.sum": ("torch.stack([s, b]).sum(0)", True),
    "stack.mean": ("torch.stack([b, s], -1).mean(-1)", True),
    "einsum": ("torch.einsum('k,kbtd->btd', self.pair, torch.stack([s, b]))", True),
    "_foreach_add": ("torch._foreach_add([s], [b])[0]", True),
    "stack.unbind": ("add_two(*torch.stack([s, b]).unbind())", False),
    "stack.cumsum": ("torch.stack([s, b]).cumsum(0)[-1]", False),
    "cat.view.sum": ("torch.cat([s, b]).view(2, *s.shape).sum(0)", False),
    "tokens by index_add": ("s.index_add(1, self.order, drop(b[:, self.order], self$))", False),
    "rows by scatter_add": (
        "s.scatter_add(1, self.rows(b), drop(b[:, self.order], self$))",
        False,
    ),
    "through a slice": ("added_in_slices(s, b)", False),
    "where": ("torch.where(c > 0, s + b, s)", False),
    "autograd.Function": ("FunctionAdd.apply(s, b)", False),
    "library op, branch and all": (
        "s + drop(self.step(n), self$) if marking() else self.step(n, s)",
        False,
    ),
    "library op": ("library_add(s, b)", False),
}

# What becomes of the sum y.
AROUND: dict[str, tuple[str, bool]] = {
    "nothing": ("y", True),
    "norm": ("self.norms[3](y)", True),
    "scaled": ("y * 0.7", True),
    "clamped": ("y.clamp(-9, 9)", False),
    "film": ("y * (1 + self.film(c)) + self.shift(c)", False),
    "gate": ("y * torch.sigmoid(self.film(c))", False),
    "gate of itself": ("y * torch.sigmoid(self.film(y))", False),
    "print": ("checked(y)", False),
}

# What else a block begins with; no residual sum, although some add.
BEGINNINGS: dict[str, tuple[str, bool]] = {
    "nothing": ("x", True),
    "embedding again": ("x * self.pair[0] + x0 * self.pair[1]", True),
    "bias": ("x + self.bias", True),
    "condition": ("x + c", True),
    "nearest code": ("x + F.embedding(x.argmax(-1), self.square)", True),
    "running mean": ("x - self.mean_of(x)", True),
    "positions": ("x + self.table[:4]", True),
}

_HEAD = """\
import torch, torch.nn as nn, torch.nn.functional as F
from torch import Tensor
from branch_oracle import drop, marking, recomputed

def cubic_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.0447 * x**3)))

def rotated(x):
    angles = torch.arange(4.0)[:, None] * torch.arange(8.0).repeat(2)
    return x * angles.cos() + torch.cat((-x[..., 8:], x[..., :8]), -1) * angles.sin()

def times_i(x):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * 1j).flatten(-2)

def add_two(a, b):
    return a + b

def added_in_slices(s, b):
    y = s.clone()
    y[:, :] += b
    return y

def checked(y):
    if y.abs().max() > 1e9:
        print("overflow")
    return y

@torch.library.custom_op("residual_grammar::mlp_{n}", mutates_args=())
def library_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up)), down)

@library_mlp.register_fake
def _(x, up, down):
    return torch.empty_like(x)

library_mlp.register_autograd(
    lambda ctx, grad: mlp_gradients(ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

def mlp_gradients(saved, grad):
    with torch.enable_grad():
        inputs = [v.detach().requires_grad_() for v in saved]
        y = F.linear(F.relu(F.linear(inputs[0], inputs[1])), inputs[2])
    return torch.autograd.grad(y, inputs, grad)

@torch.library.custom_op("residual_grammar::step_{n}", mutates_args=())
def library_step(s: Tensor, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return s + F.linear(F.relu(F.linear(x, up)), down)

library_step.register_fake(lambda s, x, up, down: torch.empty_like(s))
library_step.register_autograd(
    lambda ctx, grad: (grad, *mlp_gradients(ctx.saved_tensors, grad)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)

@torch.library.custom_op("residual_grammar::add_{n}", mutates_args=())
def library_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b

library_add.register_fake(lambda a, b: torch.empty_like(b))
library_add.register_autograd(lambda ctx, grad: (grad, grad))

class FunctionAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b
    @staticmethod
    def backward(ctx, grad):
        return grad, grad

class FunctionMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        return F.linear(F.relu(F.linear(x, up)), down)
    @staticmethod
    def backward(ctx, grad):
        x, up, down = ctx.saved_tensors
        h = F.linear(x, up)
        back = (grad @ down) * (h > 0)
        return (
            back @ up,
            back.flatten(0, 1).T @ x.flatten(0, 1),
            grad.flatten(0, 1).T @ h.relu().flatten(0, 1),
        )

class Mlp(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Mlp(), Mlp()
    def forward(self, x):
        return self.a(x) + self.b(x)

class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(2, 16)
    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 0.5

class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.g = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        g = torch.sigmoid(self.g(x))
        return g * self.a(x) + (1 - g) * self.b(x)

class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
    def forward(self, x):
        rows, out = x.reshape(-1, 16), torch.zeros_like(x).view(-1, 16)
        for i, expert in enumerate(self.experts):
            at = torch.arange(i, rows.shape[0], 2)
            out = out.index_add(0, at, expert(rows[at]))
        return out.view_as(x)

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.up2, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gate, self.film, self.shift, self.proj = (nn.Linear(16, 16) for _ in range(4))
        self.mlp = Mlp()
        self.scale = nn.Parameter(torch.rand(16) + 0.5)
        self.bias = nn.Parameter(torch.randn(16))
        self.square = nn.Parameter(torch.randn(16, 16) / 4)
        self.pair = nn.Parameter(torch.tensor([0.8, 0.6]))
        self.register_buffer("turn", torch.linalg.qr(torch.randn(16, 16))[0])
        self.register_buffer("table", torch.randn(8, 16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("senders", torch.tensor([0, 1, 2, 3, 1, 0]))
        self.register_buffer("receivers", torch.tensor([1, 2, 3, 0, 3, 2]))
        self.more()
    def more(self):
        pass
    def mean_of(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.mean
    def heads(self, x):
        return x.unflatten(-1, (2, 8)).transpose(1, 2)
    def attention(self, x, memory):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    def spelt_attention(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        scores = q @ k.mT / 3 + self.table[:4, :4]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    def addmm(self, s, b):
        return torch.addmm(s.reshape(-1, 16), b.reshape(-1, 16), self.square).view_as(s)
    def baddbmm(self, s, b):
        return torch.baddbmm(s, b, self.square.expand(2, 16, 16))
    def indexed_messages(self, x):
        return torch.zeros_like(x).index_add(1, self.receivers, self.gate(x)[:, self.senders])
    def scattered_messages(self, x):
        to = self.receivers[None, :, None].expand(2, 6, 16)
        return torch.zeros_like(x).scatter_add(1, to, self.gate(x)[:, self.senders])
    def rows(self, x):
        return self.order[None, :, None].expand_as(x)
    def step(self, n, stream=None):
        if stream is None:
            return library_mlp(n, self.up.weight, self.down.weight)
        return library_step(stream, n, self.up.weight, self.down.weight)
    def scan(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for i in range(4):
            state = torch.sigmoid(self.scale) * state + self.gate(x[:, i])
            states.append(state)
        return torch.stack(states, 1)
    @torch.compiler.disable
    def left_to_eager(self, x):
        return self.mlp(x)
    def printing(self, x):
        h = self.up(x)
        if h.abs().max() > 1e9:
            print("overflow")
        return self.down(F.relu(h))
"""

# Modules that few forms need, made where a block's text names them.
_MODULES = {
    "mha": "nn.MultiheadAttention(16, 2, batch_first=True)",
    "experts": "Experts()",
    "lora": "Lora()",
    "between": "Between()",
    "routed": "Routed()",
    "conv": "nn.Conv1d(16, 16, 3, padding=1)",
    "depthwise": "nn.Conv1d(16, 16, 3, padding=1, groups=16)",
    "gru": "nn.GRU(16, 16, batch_first=True)",
    "lstm": "nn.LSTM(16, 16, batch_first=True)",
    "rnn": "nn.RNN(16, 16, batch_first=True)",
    "stacked": "nn.Parameter(torch.randn(2, 16, 16) / 4)",
    "cube": "nn.Parameter(torch.randn(16, 16, 16) / 16)",
}


@dataclass(frozen=True)
class Step:
    """One sum of a block; `handed_on` leaves the add to the next block (mamba_ssm)."""

    skip: str = "plain"
    branch: str = "mlp"
    sum: str = "+"
    around: str = "nothing"


@dataclass(frozen=True)
class Form:
    """A model: the steps of its blocks, what they begin with, and what is put together how."""

    steps: tuple[Step, ...] = (Step(),)
    beginning: str = "nothing"
    handed_on: bool = False  # the last branch is added by the next block, as in mamba_ssm
    in_last_only: bool = False  # the last step is the last block's alone
    returns_sums: bool = False  # each block's stream is returned beside the last
    joins_first: bool = False  # the embedding is added to the last stream again: a U-net's skip

    @property
    def must_run(self) -> bool:
        """Whether no part of it may be refused."""
        parts = [
            table[name][1]
            for step in self.steps
            for table, name in (
                (SKIPS, step.skip),
                (BRANCHES, step.branch),
                (SUMS, step.sum),
                (AROUND, step.around),
            )
        ]
        return all(parts) and BEGINNINGS[self.beginning][1]

    def source(self) -> str:
        """The text of `Block` and `Model`."""
        lines = ["x = " + BEGINNINGS[self.beginning][0]]
        for number, step in enumerate(self.steps):
            lines += self._step(step, number)
        body = "\n        ".join(lines)
        named = [name for name in _MODULES if f"self.{name}" in body]
        made = [f"self.{name} = {_MODULES[name]}" for name in named] or ["pass"]
        more = "\n        ".join(made)
        takes, gives = ("x, branch", "x, branch") if self.handed_on else ("x", "x")
        start = "\n        x = x if branch is None else x + branch" if self.handed_on else ""
        loop = (
            "x, branch = block(x, branch, x0, c, memory)"
            if self.handed_on
            else ("x = block(x, x0, c, memory)")
        )
        end = ["x = x + branch"] if self.handed_on else []
        end += ["x = x + x0"] if self.joins_first else []
        end += ["return (x, *sums)" if self.returns_sums else "return x"]
        return (
            f"class Block(Base):\n    def more(self):\n        {more}\n"
            f"    def forward(self, {takes}, x0, c, memory):{start}\n"
            f"        {body}\n        return {gives}\n\n"
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.embedding = nn.Embedding(8, 16)\n"
            "        self.blocks = nn.ModuleList(Block() for _ in range(2))\n"
            "        self.blocks[1].is_last, self.blocks[0].is_last = True, False\n"
            "    def forward(self, tokens, c, memory):\n"
            "        x = x0 = self.embedding(tokens)\n        sums, branch = [], None\n"
            f"        for block in self.blocks:\n            {loop}\n            sums.append(x)\n"
            "        " + "\n        ".join(end) + "\n"
        )

    def _step(self, step: Step, number: int) -> list[str]:
        is_last = number == len(self.steps) - 1
        kind = "attention" if "attention" in step.branch else "feed_forward"
        kind = step.branch.replace("-", "_") if step.branch == "cross-attention" else kind
        skip, branch, total = SKIPS[step.skip][0], BRANCHES[step.branch][0], SUMS[step.sum][0]
        if step.sum not in _BROADCASTING:
            skip += ".expand_as(x)" * (step.skip in _SMALLER)
            branch += ".expand_as(x)" * (step.branch in _SMALLER)
        mark = f", self, {kind!r})"
        marked = branch if "drop(" in total else f"drop({branch}{mark}"
        lines = [f"n = self.norms[{number % 2}](x)"]
        if self.handed_on and is_last:
            return [*lines, f"branch = drop({branch}{mark}"]
        lines += [f"s, b = {skip}, {marked}", f"y = {total.replace(', self$)', mark)}"]
        lines += [f"x = {AROUND[step.around][0]}"]
        if self.in_last_only and is_last:
            lines = [f"if self.is_last: {'; '.join(lines)}"]
        return lines


# What broadcasts, and the sums that let it.
_SMALLER = {"broadcast", "pooled", "last token"}
_BROADCASTING = {"+", "+ reversed", "alpha", "- of a negative", "sum of a list"}

_numbers = itertools.count()


def model_class(form: Form) -> type:
    """Compile a form's text as a module of its own, where tracebacks and inspect find its lines."""
    name = f"residual_form_{next(_numbers)}"
    text = _HEAD.replace("{n}", name) + "\n" + form.source()
    module = types.ModuleType(name)
    sys.modules[name], module.__file__ = module, f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module.Model
