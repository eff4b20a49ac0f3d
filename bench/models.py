"""The models of a comparison and how each variant runs them.

The model is xtrain.model.Transformer throughout. What a user without xtrain can do best is the same
model with F.dropout on both residual branches, through torch.compile: DropoutBlock.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

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
        options = {"options": dict(variant.options)} if variant.options else {}
        return xtrain.compile(model, dropout=p, seed=seed, backend=variant.backend, **options)
    return model


def autocast(setting: Setting) -> AbstractContextManager:
    """Return the context that forwards run in."""
    if setting.dtype == "bf16":
        return torch.autocast(setting.device_type, dtype=torch.bfloat16)
    return nullcontext()
