"""The whole transformer in plain PyTorch: a Llama-style decoder that knows no op of ours.

Token embedding; n_layers x (RMSNorm, causal attention with RoPE, residual; RMSNorm, SwiGLU,
residual); RMSNorm; head; cross-entropy. Linear weights are [in, out] and used as `x @ W`.

B batch, T sequence, D model dim, N query heads, M KV heads, H head dim, F ffn dim, V vocabulary.

The model draws no random number after initialisation, never reads `self.training` and never reads
`config.dropout`: xtrain.compile puts dropout on the two residual branches of each block.
Nothing in `Block` differs from layer to layer, so one compiled block serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100  # a target that does not count, as in torch and transformers
_DERIVED: Any = None  # Any, so that the fields with this default are plain ints for every reader


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a Transformer. Fields are checked; a wrong one raises a ValueError naming it.

    vocab_size: rows of the embedding, V.
    dim: width of the residual stream, D.
    n_layers: number of blocks.
    n_heads: query heads, N.
    ffn_hidden: width of the SwiGLU layer, F.
    n_kv_heads: key and value heads, M, a divisor of n_heads; None = n_heads.
    head_dim: H, even; None = dim // n_heads. n_heads * head_dim need not equal dim.
    max_seq_len: the longest sequence that forward takes, T.
    rope_base: base of the rotary frequencies.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: the head uses the embedding's tensor.
    recompute: activations to compute again in backward: "none", "full", or the first N layers.
    dropout: residual dropout for xtrain.compile(dropout=None); the model itself never reads it.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    ffn_hidden: int
    n_kv_heads: int = _DERIVED
    head_dim: int = _DERIVED
    max_seq_len: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    recompute: str | int = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "ffn_hidden", "max_seq_len"):
            self._set(name, _positive_int(name, getattr(self, name)))
        self._set_heads()
        for name in ("rope_base", "norm_eps", "dropout"):
            self._set(name, _finite(name, getattr(self, name)))
        _require(self.rope_base > 0, f"rope_base must be above 0, got {self.rope_base}")
        _require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")
        _require(0 <= self.dropout <= 1, f"dropout must be in [0, 1], got {self.dropout}")
        tie = self.tie_embeddings
        _require(isinstance(tie, bool), f"tie_embeddings must be True or False, got {tie!r}")
        if self.recompute not in ("none", "full"):
            hint = f'recompute must be "none", "full" or 1..n_layers = {self.n_layers}'
            _require(not isinstance(self.recompute, str), f"{hint}, got {self.recompute!r}")
            self._set("recompute", _positive_int("recompute", self.recompute))
            _require(self.num_recomputed_layers <= self.n_layers, f"{hint}, got {self.recompute}")

    def _set_heads(self) -> None:
        if self.n_kv_heads is None:
            self._set("n_kv_heads", self.n_heads)
        if self.head_dim is None:
            needed = f"dim must be a multiple of n_heads = {self.n_heads} unless head_dim is given"
            _require(self.dim % self.n_heads == 0, f"{needed}, got {self.dim}")
            self._set("head_dim", self.dim // self.n_heads)
        for name in ("n_kv_heads", "head_dim"):
            self._set(name, _positive_int(name, getattr(self, name)))
        grouping = f"n_kv_heads must divide n_heads = {self.n_heads}"
        _require(self.n_heads % self.n_kv_heads == 0, f"{grouping}, got {self.n_kv_heads}")
        _require(self.head_dim % 2 == 0, f"head_dim must be even for RoPE, got {self.head_dim}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone but __post_init__

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Config:
        """Return a named configuration with some fields replaced.

        n_kv_heads and head_dim follow an overridden n_heads or dim unless they are given too.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Return what `to_dict` wrote; ValueError names an unknown or missing field."""
        try:
            return cls(**values)
        except TypeError as error:  # Python's own message names the field
            known = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{error}; Config's fields: {known}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain Python values, ready for JSON or TOML."""
        return asdict(self)

    @property
    def num_recomputed_layers(self) -> int:
        """Number of layers whose activations are computed again in backward."""
        named = {"none": 0, "full": self.n_layers}
        return named[self.recompute] if isinstance(self.recompute, str) else self.recompute

    def num_parameters(self) -> int:
        """Return how many numbers the model holds, a tied embedding counted once."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        feed_forward = 3 * self.dim * self.ffn_hidden
        blocks = self.n_layers * (attention + feed_forward + 2 * self.dim)
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return blocks + self.dim + tables


_REQUIRED = ("vocab_size", "dim", "n_layers", "n_heads", "ffn_hidden")


def _shape(*required: int, **others: Any) -> dict[str, Any]:
    return {**dict(zip(_REQUIRED, required, strict=True)), **others}


# The required fields in order, then what differs from Config's defaults.
# vocab_size is that of the tokenizer usually met at each size; the trainer overrides it.
PRESETS: dict[str, dict[str, Any]] = {
    # For tests: 21 tensors, 21,664 numbers.
    "tiny": _shape(16, 32, 2, 2, 64),
    # The CPU default, 3.3 M numbers: bytes as tokens, so that the head is 2% of the work, and as
    # deep as keeps a step of 2048 tokens (47 GFLOP) below half a second on two cores.
    "small": _shape(256, 256, 4, 4, 704, max_seq_len=256),
    # GPT-2's two smaller shapes; ffn_hidden = 8/3 dim gives SwiGLU the size of its 4 dim MLP.
    "124m": _shape(50304, 768, 12, 12, 2048, tie_embeddings=True),
    "350m": _shape(50304, 1024, 24, 16, 2688, tie_embeddings=True),
    # The shapes of TinyLlama-1.1B and Llama-3-8B.
    "1b": _shape(32000, 2048, 22, 32, 5632, n_kv_heads=4, max_seq_len=2048, norm_eps=1e-5),
    "8b": _shape(
        128256, 4096, 32, 32, 14336, n_kv_heads=8, max_seq_len=8192, rope_base=5e5, norm_eps=1e-5
    ),
}


def rope_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * base^(-2 i / head_dim) for i = 0 .. head_dim / 2 - 1.

    Shapes:   positions (...), any integer or float dtype; results [..., head_dim / 2].
    Numerics: fp32 whatever the default dtype or autocast: bf16 cannot tell position 256 from 257.
              Elementwise ops on explicit fp32 tensors only, which autocast never touches.
    Source:   Su et al. 2021 (RoFormer).
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / base ** (pair / head_dim)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, N * H] -> [B, T, N, H], a view."""
    return x.unflatten(-1, (-1, head_dim))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + H/2]) by its angle: the rotate-half layout.

    Shapes:   x [B, T, N, H]; cos, sin [T, H/2], fp32; result like x, contiguous: attention keeps
              that order of heads and tokens, so that merge_heads need not copy.
    Numerics: computed in fp32 (fp64 for fp64), as the tables promote it, and rounded once.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def merge_heads(x: Tensor) -> Tensor:
    """[B, N, T, H] -> [B, T, N * H]."""
    return x.transpose(1, 2).flatten(-2)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that are not IGNORE_INDEX; 0 when there are none.

    Shapes:   logits [..., V]; targets [...], int64, already shifted; result ().
    Numerics: fp32 (fp64 for fp64) whatever the autocast. With no target that counts the loss is
              exactly 0 and so is every gradient, where reduction="mean" would give NaN.
    """
    logits = logits.flatten(0, -2).to(_compute_dtype(logits))
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


class Linear(nn.Module):
    """x @ W with W [in, out] and no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return x @ self.weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in Llama's order: normalise in fp32, cast, multiply."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        c = x.to(_compute_dtype(x))
        normalised = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + self.eps)
        return normalised.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention with RoPE; query head n reads KV head n // (N / M)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_kv_heads != config.n_heads
        query_dim = config.n_heads * config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.query = Linear(config.dim, query_dim)
        self.key = Linear(config.dim, kv_dim)
        self.value = Linear(config.dim, kv_dim)
        self.output = Linear(query_dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; cos, sin [T, H/2]."""
        q = apply_rope(split_heads(self.query(x), self.head_dim), cos, sin)  # [B, T, N, H]
        k = apply_rope(split_heads(self.key(x), self.head_dim), cos, sin)  # [B, T, M, H]
        v = split_heads(self.value(x), self.head_dim)  # [B, T, M, H]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.output(merge_heads(y))


class FeedForward(nn.Module):
    """SwiGLU: (silu(x @ gate) * (x @ up)) @ down."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_hidden)
        self.up = Linear(config.dim, config.ffn_hidden)
        self.down = Linear(config.ffn_hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: two pre-norm residual branches, the sites of dropout."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; cos, sin [T, H/2]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model.

    Built under torch.device("meta") it has no storage: `to_empty`, then `reset_parameters`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # from_pretrained only spares nn.Embedding's own initialisation, which would be overwritten.
        table = torch.empty(config.vocab_size, config.dim)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)
        self.reset_parameters()
        self._build_rope()  # again after load_state_dict(assign=True), which may bring a device
        self.register_load_state_dict_post_hook(Transformer._build_rope)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices and embedding from normal(0, 0.02), in parameter order; norms become 1."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)

    def _build_rope(self, *_: Any) -> None:
        """Compute the rows of all positions on the device of the weights.

        No buffers: those are rounded by to(bfloat16), left empty by to_empty(), sent round by DDP.
        Not in forward: inductor would compute pow, cos and sin again in each layer's kernels, a
        quarter of the 124m step on an H200.
        """
        positions = torch.arange(self.config.max_seq_len, device=self.embedding.weight.device)
        self._rope = rope_tables(positions, self.config.head_dim, self.config.rope_base)

    def _apply(self, *args: Any, **kwargs: Any) -> Transformer:
        """Have the tables follow what to(), cuda(), bfloat16(), to_empty() do to parameters."""
        super()._apply(*args, **kwargs)
        self._build_rope()
        return self

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, return_logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, loss); each None when it was not asked for.

        Shapes:   tokens [B, T], int; targets [B, T], int64, already shifted (targets[b, t] is the
                  token after tokens[b, t]); logits [B, T, V]; loss (), fp32.
        Args:     targets: -100 does not count; the loss is the mean over the others, 0 when none.
                  return_logits: False gives None for them, so that they need not outlive the loss.
        Raises:   ValueError for a sequence longer than max_seq_len or shapes that do not fit.
        """
        self._check_inputs(tokens, targets)
        x = self._hidden(tokens)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        loss = None if targets is None else cross_entropy(logits, targets)
        return (logits if return_logits else None), loss

    def _hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D], what the head reads."""
        cos, sin = (table[: tokens.shape[1]] for table in self._rope)
        # Without gradients there is no backward to recompute for.
        num_recomputed = self.config.num_recomputed_layers if torch.is_grad_enabled() else 0
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            if layer < num_recomputed:
                # The model draws nothing, so there is no random state to keep.
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        return self.norm(x)

    def _check_inputs(self, tokens: Tensor, targets: Tensor | None) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [batch, sequence], got {tuple(tokens.shape)}")
        length, limit = tokens.shape[1], self.config.max_seq_len
        if length > limit:
            raise ValueError(f"{length} tokens exceed max_seq_len = {limit}: cut them or raise it")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets must have tokens' shape {tuple(tokens.shape)}, got {tuple(targets.shape)}"
            )


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic on x: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive_int(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else index(value)  # takes NumPy's ints, no float
    except TypeError:
        number = 0
    _require(number > 0, f"{name} must be a positive int, got {value!r}")
    return number


def _finite(name: str, value: Any) -> float:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_real and abs(value) < 2**1000  # which a whole number may pass
    _require(fits, f"{name} must be a finite number, got {value!r}")
    return float(value)
