"""Models whose every number is known to be the same in each test and process."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from xtrain.drift.recording.recorded_model import RecordedModel, draw_weights, hash_weights
from xtrain.model import Config, Transformer


def decoder(n_layers: int = 2, **overrides) -> Transformer:
    """The tiny preset, its weights drawn by NumPy."""
    model = Transformer(Config.preset("tiny", n_layers=n_layers, **overrides))
    draw_weights(model, 0)
    return model.eval()


def tokens(batch: int = 1, length: int = 9, vocab: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab, (batch, length)))


def next_up(parameter: nn.Parameter, index: int | None = None) -> None:
    """Move one element, the largest unless said, by one unit in the last place."""
    with torch.no_grad():
        flat = parameter.view(-1)
        index = int(flat.abs().argmax()) if index is None else index
        flat[index] = torch.nextafter(flat[index], torch.tensor(torch.inf))


class Rowwise(nn.Module):
    """A language model without sums over anything but a token's own numbers, in a fixed order.

    Its rows cannot depend on the batch: what a record says of them must not either.
    """

    def __init__(self, vocab: int = 16, dim: int = 8, n_layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Gate(dim) for _ in range(n_layers))
        self.head = nn.Parameter(torch.empty(dim, vocab))
        draw_weights(self, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) * 50
        for layer in self.layers:
            x = layer(x)
        logits = torch.zeros(*x.shape[:-1], self.head.shape[1])
        for d in range(x.shape[-1]):
            logits = logits + x[..., d : d + 1] * self.head[d]
        return logits


class Gate(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.inner = Scale(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * x.clamp(-1, 1)


class Scale(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 30


def subject(model, vocab=16, max_length=None):
    return RecordedModel(model, {"kind": "test"}, vocab, max_length, weights=hash_weights(model))


def prompts(*lists):
    return [{"tokens": list(ids), "text": None} for ids in lists]


def llama(**overrides):
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **overrides
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()
