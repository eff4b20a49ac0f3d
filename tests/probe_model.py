"""A decoder whose output shows every dropout mask, and whose gradients show the backward's masks.

Branch k of the model adds the constant 2^k on each element (its weights are zero), and the stream
starts at zero. With p = 0.5 a kept element is doubled, so the output is the sum of 2^(k + 1) over
the branches that kept it: its binary digits are the masks, exactly, also in bf16 up to 8 branches.
The constant is a parameter of the branch's own shape: its gradient is mask / (1 - p) element by
element, as the backward saw it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mask_oracle import keep_mask
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xtrain
from xtrain.rng import site_seed

P = 0.5
SHAPE = (4, 5, 8)
SITES = ("attention", "feed_forward")


class Branch(nn.Module):
    """linear(x) + constant, the linear weights zero."""

    def __init__(self, shape: tuple[int, int, int], k: int, attention: bool):
        super().__init__()
        self.proj = nn.Parameter(torch.zeros(shape[-1], shape[-1]))
        self.mix = nn.Parameter(torch.zeros(shape[-1], shape[-1]))
        self.constant = nn.Parameter(torch.full(shape, 2.0**k))
        self.attention = attention
        self.break_inside = False

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.mix
        if self.break_inside:
            torch._dynamo.graph_break()
        if self.attention:
            q = h.unsqueeze(1)
            h = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return h @ self.proj + self.constant[: x.shape[0], : x.shape[1]]


class Block(nn.Module):
    def __init__(self, shape: tuple[int, int, int], layer: int):
        super().__init__()
        self.attn = Branch(shape, 2 * layer, attention=True)
        self.mlp = Branch(shape, 2 * layer + 1, attention=False)
        self.break_between = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        if self.break_between:
            torch._dynamo.graph_break()
        return x + self.mlp(x)


class ProbeModel(nn.Module):
    """tokens [B, T] -> stream [B, T, D]; `constant`s are cut to the batch from their first rows."""

    def __init__(
        self,
        shape: tuple[int, int, int] = SHAPE,
        num_layers: int = 2,
        *,
        checkpointed: bool = False,
        breaks: str = "",
    ):
        super().__init__()
        self.embedding = nn.Embedding(16, shape[-1])
        nn.init.zeros_(self.embedding.weight)
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(num_layers))
        self.checkpointed = checkpointed
        self.use_reentrant = False
        self.breaks = breaks
        for block in self.blocks:
            block.break_between = breaks == "between the branches"
            block.mlp.break_inside = breaks == "inside a branch"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.breaks == "before the blocks":
            torch._dynamo.graph_break()
        if self.breaks == "between the blocks":
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            for block in self.blocks[1:]:
                x = block(x)
            return x
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            else:
                x = block(x)
        return x


def decode_masks(stream: Tensor, num_layers: int) -> list[Tensor]:
    """The masks that an output shows, in the order layer 0 attention, layer 0 feed-forward, ..."""
    digits = stream.detach().to(torch.float64).to(torch.int64) // 2
    return [(digits >> k) & 1 == 1 for k in range(2 * num_layers)]


def gradient_masks(model: nn.Module) -> list[Tensor]:
    """The masks that the gradients of stream.sum() show, in the same order."""
    masks = []
    for block in model.blocks:
        for branch in (block.attn, block.mlp):
            grad = branch.constant.grad
            assert set(grad.unique().tolist()) <= {0.0, 2.0}
            masks.append(grad == 2.0)
    return masks


def tokens(batch: int = 4, length: int = 5, device: str = "cpu") -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device=device)


def probe(model: nn.Module | None = None, compile_it=xtrain.compile, **keywords):
    """A compiled model, a ProbeModel unless another is given."""
    model = ProbeModel() if model is None else model
    return compile_it(model, **{"dropout": P, "seed": 0, "backend": "eager", **keywords})


def oracle_mask(seed, step, layer, site, shape=SHAPE, first_sample=0) -> Tensor:
    """NumPy's mask of one site."""
    offset = first_sample * shape[1] * shape[2]
    return torch.from_numpy(keep_mask(shape, P, site_seed(seed, step, layer, site), offset))


def oracle_masks(seed, step, shape=SHAPE, num_layers=2, first_sample=0) -> list[Tensor]:
    """NumPy's masks of all sites, in the order of `decode_masks`."""
    sites = [(layer, site) for layer in range(num_layers) for site in SITES]
    return [oracle_mask(seed, step, *site, shape, first_sample) for site in sites]


def assert_masks(found, wanted, where="") -> None:
    assert len(found) == len(wanted)
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a.cpu(), b), f"{where}: masks of branch {k} differ"
