"""The models of a comparison and how each variant runs them.

Of xtrain.model.Transformer: what a user without xtrain can do best is the same model with F.dropout
on both residual branches, through torch.compile: DropoutBlock. GPT2 drops out by itself, in modules
that xtrain.compile replaces.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xtrain
from bench.variants import Setting, Variant
from xtrain.model import Block, Config, Transformer


class DropoutBlock(nn.Module):
    """A Block whose two branches end in F.dropout: how dropout is written without xtrain."""

    def __init__(self, block: Block, p: float, *, recomputed: bool):
        super().__init__()
        self.block = block
        self.p = p
        self.recomputed = recomputed

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recomputed:  # with the generator's state kept, or the recompute draws other masks
            return checkpoint(self._run, x, cos, sin, use_reentrant=False)
        return self._run(x, cos, sin)

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        block, p = self.block, self.p
        attended = block.attention(block.attention_norm(x), cos, sin)
        x = x + F.dropout(attended, p, self.training)
        return x + F.dropout(block.feed_forward(block.feed_forward_norm(x)), p, self.training)


class GPT2Block(nn.Module):
    """A pre-norm block with biases: one projection for queries, keys and values, and GELU."""

    def __init__(self, config: Config, p: float):
        super().__init__()
        D = config.dim
        self.n_heads = config.n_heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.feed_forward_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        heads = (t.view(B, T, self.n_heads, -1).transpose(1, 2) for t in self.qkv(x).split(D, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).contiguous().view(B, T, D))


class GPT2(nn.Module):
    """GPT-2 as nanoGPT writes it: learnt positions, a tied head, dropout modules of its own."""

    def __init__(self, config: Config, p: float):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(p)
        self.blocks = nn.ModuleList(GPT2Block(config, p) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, tokens: Tensor, targets: Tensor, *, return_logits: bool = True
    ) -> tuple[Tensor | None, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        return logits if return_logits else None, loss


def build(setting: Setting, variant: Variant) -> nn.Module:
    """Return the variant's model before any compiler sees it, on the default device."""
    config = build_config(setting)
    if setting.model == "gpt2":
        return GPT2(config, setting.dropout if variant.dropout else 0.0)
    model = Transformer(config)
    return with_f_dropout(model, setting.dropout) if variant.dropout == "F.dropout" else model


def with_f_dropout(model: Transformer, p: float) -> Transformer:
    """Return a copy of model that calls F.dropout at its residual sites."""
    twin = copy.deepcopy(model)
    num_recomputed = model.config.num_recomputed_layers
    twin.config = replace(model.config, recompute="none")
    twin.blocks = nn.ModuleList(
        DropoutBlock(block, p, recomputed=layer < num_recomputed)  # type: ignore[arg-type]
        for layer, block in enumerate(twin.blocks)
    )
    return twin


def build_config(setting: Setting) -> Config:
    """Return the model's configuration; ValueError names what does not fit."""
    known = Config.preset(setting.preset)
    return Config.preset(
        setting.preset,
        vocab_size=setting.vocab,
        max_seq_len=max(setting.seq, known.max_seq_len),
        recompute=setting.recompute,
    )


def wrap(model: nn.Module, variant: Variant, dropout: float, seed: int) -> nn.Module:
    """Return model as the variant runs it."""
    if variant.compiler == "torch":
        return torch.compile(model)  # type: ignore[return-value]
    if variant.compiler == "xtrain":
        p = dropout if variant.dropout == "xtrain" else 0.0
        options: dict[str, Any] = {"logits": variant.logits, "backend": variant.backend}
        options["disable_passes"] = variant.disable_passes
        if isinstance(model, GPT2):
            options["existing"] = "replace"
        if variant.options:
            options["options"] = dict(variant.options)
        return xtrain.compile(model, dropout=p, seed=seed, **options)
    return model


def autocast(setting: Setting) -> AbstractContextManager:
    """Return the context that forwards run in."""
    if setting.dtype == "bf16":
        return torch.autocast(setting.device_type, dtype=torch.bfloat16)
    return nullcontext()
