"""Sums whose addends read one another and that are no residual stream: losses, mixed values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import capture, plain_sites
from marked import B, D, Model, N, PreNorm, T, stream
from torch import Tensor, nn

ERRORS = {
    "squared": lambda e: e.pow(2).mean(),
    "square": lambda e: torch.square(e).sum(-1).mean(),
    "multiplied by itself": lambda e: (e * e).mean() + e.abs().mean(),
    "weighted": lambda e: (e * torch.arange(1.0, D + 1)).float().abs().mean(),
    "norm": lambda e: e.flatten(1).norm(dim=-1).mean(),
    "huber": lambda e: torch.where(e.abs() < 1, 0.5 * e**2, e.abs() - 0.5).mean(),
}


class Autoencoder(PreNorm):
    """What it predicts comes from what it is compared with."""

    def __init__(self, error: str, swapped: bool = False) -> None:
        super().__init__()
        self.head, self.error, self.swapped = nn.Linear(D, D), ERRORS[error], swapped

    def forward(self, x: Tensor) -> Tensor:
        prediction = self.head(super().forward(x * 0.5))
        return self.error(x - prediction if self.swapped else prediction - x)


class Codebook(PreNorm):
    """VQ: the straight-through sum, its inner difference, and two losses of the codes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        code = F.embedding((h @ self.codes.T).argmax(-1), self.codes)
        loss = F.mse_loss(code, h.detach()) + (code.detach() - h).pow(2).mean()
        return F.rms_norm(h + (code - h).detach(), (D,)), loss


class MixedValues(PreNorm):
    """ResFormer: each layer's values are mixed with the first one's."""

    kinds = ("attention", "feed_forward") * 3
    spelt_out = False

    def attend(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (proj(x).unflatten(-1, (N, D // N)).transpose(1, 2) for proj in self.linears[:3])
        first = v if first is None else first
        v = 0.25 * v + 0.75 * first
        if self.spelt_out:
            y = (q @ k.mT).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linears[3](y.transpose(1, 2).flatten(-2)), first

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for _ in range(3):
            h, first = self.attend(F.rms_norm(x, (D,)), first)
            x = x + h
            x = x + self.feed_forward(F.rms_norm(x, (D,)))
        return x


class MixedValuesSpeltOut(MixedValues):
    spelt_out = True


class DeltaRule(Model):
    """The state of a linear attention is read by products with queries and keys alone."""

    kinds = ("feed_forward",)
    num_linear = 4

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (D,))
        q, k, v = (proj(h) for proj in self.linears[:3])
        state, outs = x.new_zeros(B, D, D), []
        for t in range(T):
            seen = torch.einsum("bij,bi->bj", state, k[:, t])
            state = state + torch.einsum("bi,bj->bij", k[:, t], v[:, t] - seen)
            outs.append(torch.einsum("bij,bi->bj", state, q[:, t]))
        return x + self.linears[3](torch.stack(outs, 1))


class SharedTable(Model):
    """A parameter that two layers add to a projection: the second reads it through the first."""

    kinds = ("feed_forward",) * 2
    num_linear = 2
    rows = slice(None)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(B, T if self.rows == slice(None) else 2 * T, D))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            table = self.table if self.rows == slice(None) else self.table[:, self.rows]
            x = x + (self.branch(x, i) + table).relu()
        return x


class SharedTableInPart(SharedTable):
    rows = slice(T)


MODELS = {f"error {name}": lambda name=name: Autoencoder(name) for name in ERRORS}
MODELS["error of the other sign"] = lambda: Autoencoder("squared", swapped=True)
MODELS |= {
    cls.__name__: cls
    for cls in (
        Codebook,
        MixedValues,
        MixedValuesSpeltOut,
        DeltaRule,
        SharedTable,
        SharedTableInPart,
    )
}


@pytest.mark.parametrize("name", MODELS)
def test_only_the_streams_own_sums_are_sites(name):
    model = MODELS[name]()
    sites = plain_sites(capture(model, stream()).module.graph)
    assert [site.kind for site in sites] == list(model.kinds)


class LastDifference(Model):
    """x - f(x) that is normed, projected or returned is a stream, whatever else squares it."""

    kinds = ("feed_forward",)
    num_linear = 2

    def __init__(self, read) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x - self.branch(x), self.linears[1])


@pytest.mark.parametrize(
    "read",
    [
        lambda h, _: h,
        lambda h, _: (h, h.pow(2).mean()),
        lambda h, linear: linear(h),
        lambda h, _: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda h, _: h.mean(1),
    ],
)
def test_a_difference_that_is_read_otherwise_is_a_stream(read):
    sites = plain_sites(capture(LastDifference(read), stream()).module.graph)
    assert [site.kind for site in sites] == ["feed_forward"]


class LateInteraction(PreNorm):
    """Two towers whose last sums meet in a product, with no projection between (ColBERT)."""

    kinds = ("attention", "feed_forward") * 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) @ super().forward(y).transpose(-1, -2)


class AttendsToItself(Model):
    kinds = ("feed_forward",)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.branch(x)
        return F.scaled_dot_product_attention(x, x, x) + torch.bmm(y, x.transpose(1, 2)).mean()


@pytest.mark.parametrize("cls", [LateInteraction, AttendsToItself])
def test_a_stream_that_is_multiplied_as_it_is(cls):
    """Its root is normed or projected somewhere: that tells it from mixed values."""
    sites = plain_sites(capture(cls(), stream(), stream(1)).module.graph)
    assert [site.kind for site in sites] == list(cls.kinds)


class PickedWeights(Model):
    """Experts picked by a token's number: a product with parameters, not with another value."""

    kinds = ("feed_forward",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, D, D))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.branch(x)
        return (x.unsqueeze(-2) @ self.experts[tokens]).squeeze(-2)


def test_a_stream_that_only_picked_experts_read():
    tokens = torch.arange(T).expand(B, T)
    graph = capture(PickedWeights(), stream(), tokens).module.graph
    assert len(plain_sites(graph)) == 1


def test_what_depends_on_a_size_alone_is_no_branch():
    """Symbolic sizes are values of the graph; what is made from them holds nothing of x."""

    def positions(x, w):
        rows = torch.arange(x.shape[1]).float()[:, None]
        return x + F.linear(rows.expand(x.shape[0], -1, D), w)

    torch._dynamo.reset()
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module

    weight = nn.Parameter(torch.eye(D))
    torch.compile(positions, backend=backend, dynamic=True, fullgraph=True)(stream(), weight)
    assert plain_sites(graphs[0]) == []
