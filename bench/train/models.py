"""The models of a comparison and how each variant runs them; a decoder that shows its masks.

Of xtrain.model.Transformer: what a user without xtrain can do best is the same model with F.dropout
on both residual branches, through torch.compile: DropoutBlock. GPT2 drops out by itself, in modules
that xtrain.compile replaces. A Llama is that of transformers, as it is or patched by Liger-Kernel.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xtrain
from bench.train.variants import Setting, Variant
from xtrain import ops
from xtrain.model import Block, Config, Transformer
from xtrain.rng import site_seed


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
    """Return the variant's model before any compiler sees it, in fp32 on the default device.

    Variants of one setting start from equal weights, except that of a Llama's build "own".
    """
    torch.manual_seed(setting.seed)
    if setting.model == "llama" and variant.build != "own":
        return _llama(setting, patched=variant.build == "liger")
    config = build_config(setting)
    if setting.model == "gpt2":
        return GPT2(config, setting.dropout if variant.dropout else 0.0)
    model = Transformer(config)
    return with_f_dropout(model, setting.dropout) if variant.dropout == "F.dropout" else model


def _llama(setting: Setting, *, patched: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert setting.shape is not None
    config = LlamaConfig(**setting.shape.sizes, max_position_embeddings=setting.seq)
    model = LlamaForCausalLM(config)
    if patched:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    return model


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
    if (shape := setting.shape) is not None:
        return Config(
            dim=shape.hidden_size,
            n_layers=shape.num_hidden_layers,
            n_heads=shape.num_attention_heads,
            n_kv_heads=shape.num_key_value_heads,
            ffn_hidden=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            max_seq_len=setting.seq,
        )
    known = Config.preset(setting.preset)
    return Config.preset(
        setting.preset,
        vocab_size=setting.vocab,
        max_seq_len=max(setting.seq, known.max_seq_len),
        recompute=setting.recompute,
    )


def wrap(model: nn.Module, variant: Variant, dropout: float, seed: int) -> Any:
    """Return model as the variant runs it."""
    if variant.compiler == "torch":
        return torch.compile(model)
    if not variant.compiler:
        return model
    compilers = {"xtrain": xtrain.compile, "xtrain-blocks": xtrain.compile_blocks}
    options = {"existing": "replace"} if isinstance(model, GPT2) else {}
    p = dropout if variant.dropout == "xtrain" else 0.0
    return compilers[variant.compiler](model, dropout=p, seed=seed, **options, **variant.options)


def autocast(setting: Setting) -> AbstractContextManager:
    """Return the context that forwards run in."""
    if setting.dtype == "bf16":
        return torch.autocast(setting.device_type, dtype=torch.bfloat16)
    return nullcontext()


# --- masks ---------------------------------------------------------------------------------------

PROBE_SHAPE = (3, 37, 21)  # 2331 elements: no multiple of a vector's length
PROBE_LAYERS = 2
PROBE_STEPS = 2
PROBE_SITES = ("attention", "feed_forward")


class ProbeBranch(nn.Module):
    def __init__(self, k: int):
        super().__init__()
        D = PROBE_SHAPE[-1]
        self.mix, self.out = (nn.Parameter(torch.zeros(D, D)) for _ in range(2))
        self.constant = nn.Parameter(torch.full(PROBE_SHAPE, 2.0**k))
        self.attends = k % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.mix
        if self.attends:
            q = h.unsqueeze(1)
            h = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        return h @ self.out + self.constant.to(h.dtype)


class ProbeLayer(nn.Module):
    """Two residual branches, each through F.dropout when f_dropout is above 0."""

    def __init__(self, layer: int, f_dropout: float):
        super().__init__()
        self.attention = ProbeBranch(2 * layer)
        self.feed_forward = ProbeBranch(2 * layer + 1)
        self.f_dropout = f_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attention(x))
        return x + self._dropped(self.feed_forward(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.f_dropout, self.training) if self.f_dropout else x


class Probe(nn.Module):
    """tokens [B, T] -> stream [B, T, D], which shows the dropout masks of a variant.

    Branch k adds the constant 2^k to each element of a stream that starts at zero; what it computes
    besides is multiplied by zero. A kept element becomes 2^k / (1 - p), so that the output times
    1 - p, rounded, is a sum of powers of two whose digits are the forward masks (in bf16 too, for
    four branches), and the gradient of a constant, 1 / (1 - p) or 0 element by element, is the mask
    of the backward.
    """

    def __init__(self, f_dropout: float, *, recomputed: bool):
        super().__init__()
        self.embedding = nn.Embedding(2, PROBE_SHAPE[-1])
        nn.init.zeros_(self.embedding.weight)
        self.blocks = nn.ModuleList(ProbeLayer(i, f_dropout) for i in range(PROBE_LAYERS))
        self.recomputed = recomputed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


def read_masks(variant: Variant, setting: Setting) -> dict[str, Any]:
    """Return the hashes of a variant's masks, and of those that the seed contract names.

    Each list has one entry per step, layer and site, in this order. torch's generator starts from
    the same seed in every variant.
    """
    f_dropout = setting.dropout if variant.dropout == "F.dropout" else 0.0
    model = Probe(f_dropout, recomputed=setting.recompute != "none").to(setting.device)
    runner = wrap(model, variant, setting.dropout, setting.seed)
    tokens = torch.zeros(PROBE_SHAPE[:2], dtype=torch.long, device=setting.device)
    torch.manual_seed(setting.seed)
    forward, backward, expected = [], [], []
    for step in range(PROBE_STEPS):
        model.zero_grad(set_to_none=True)
        with autocast(setting):
            stream = runner(tokens)
        stream.sum().backward()
        digits = (stream.detach().double() * (1 - setting.dropout)).round().long()
        for layer, block in enumerate(model.blocks):
            for k, site in enumerate(PROBE_SITES):
                forward.append(_hash((digits >> (2 * layer + k)) & 1 == 1))
                backward.append(_hash(getattr(block, site).constant.grad != 0))
                seed = site_seed(setting.seed, step, layer, site)
                expected.append(_hash(ops.dropout_mask(PROBE_SHAPE, setting.dropout, seed)))
    return {"forward": forward, "backward": backward, "expected": expected}


def _hash(mask: Tensor) -> str:
    return hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()[:16]
