"""Read a variant's dropout masks off a small decoder that is built to show them.

Branch k of the probe adds the constant 2^k to each element of a stream that starts at zero; what it
computes besides is multiplied by zero. A kept element becomes 2^k / (1 - p), so that the output
times 1 - p, rounded, is a sum of powers of two whose digits are the forward masks (in bf16 too, for
four branches), and the gradient of a constant, 1 / (1 - p) or 0 element by element, is the mask of
the backward.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import models
from bench.variants import Setting, Variant
from xtrain import ops
from xtrain.rng import site_seed

SHAPE = (3, 37, 21)  # 2331 elements: no multiple of a vector's length
NUM_LAYERS = 2
NUM_STEPS = 2
SITES = ("attention", "feed_forward")


class Branch(nn.Module):
    def __init__(self, k: int):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(SHAPE[-1], SHAPE[-1]))
        self.out = nn.Parameter(torch.zeros(SHAPE[-1], SHAPE[-1]))
        self.constant = nn.Parameter(torch.full(SHAPE, 2.0**k))
        self.attends = k % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.mix
        if self.attends:
            q = h.unsqueeze(1)
            h = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return h @ self.out + self.constant.to(h.dtype)


class Layer(nn.Module):
    """Two residual branches, each through F.dropout when f_dropout is above 0."""

    def __init__(self, layer: int, f_dropout: float):
        super().__init__()
        self.attention = Branch(2 * layer)
        self.feed_forward = Branch(2 * layer + 1)
        self.f_dropout = f_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attention(x))
        return x + self._dropped(self.feed_forward(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.f_dropout, self.training) if self.f_dropout else x


class Probe(nn.Module):
    """tokens [B, T] -> stream [B, T, D]."""

    def __init__(self, f_dropout: float, *, recomputed: bool):
        super().__init__()
        self.embedding = nn.Embedding(2, SHAPE[-1])
        nn.init.zeros_(self.embedding.weight)
        self.blocks = nn.ModuleList(Layer(i, f_dropout) for i in range(NUM_LAYERS))
        self.recomputed = recomputed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recomputed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def read_masks(variant: Variant, setting: Setting) -> dict[str, Any]:
    """Return the hashes of a variant's masks, and of those that the seed contract names.

    Each list has one entry per step, layer and site, in this order. torch's generator starts from
    the same seed in every variant.
    """
    f_dropout = setting.dropout if variant.dropout == "F.dropout" else 0.0
    model = Probe(f_dropout, recomputed=setting.recompute != "none").to(setting.device)
    runner = models.wrap(model, variant, setting.dropout, setting.seed)
    tokens = torch.zeros(SHAPE[:2], dtype=torch.long, device=setting.device)
    torch.manual_seed(setting.seed)
    forward, backward, expected = [], [], []
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        with models.autocast(setting):
            stream = runner(tokens)
        stream.sum().backward()
        digits = (stream.detach().double() * (1 - setting.dropout)).round().long()
        for layer, block in enumerate(model.blocks):
            for k, site in enumerate(SITES):
                forward.append(_hash((digits >> (2 * layer + k)) & 1 == 1))
                backward.append(_hash(getattr(block, site).constant.grad != 0))
                seed = site_seed(setting.seed, step, layer, site)
                expected.append(_hash(ops.dropout_mask(SHAPE, setting.dropout, seed)))
    return {"forward": forward, "backward": backward, "expected": expected}


def _hash(mask: Tensor) -> str:
    return hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()[:16]
