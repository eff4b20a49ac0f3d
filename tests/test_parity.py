"""Parity with transformers' LlamaForCausalLM holding the same weights, transposed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from xtrain.model import Config, Transformer

transformers = pytest.importorskip("transformers")

CASES = {
    "tiny": dict(),
    "grouped heads": dict(n_heads=4, n_kv_heads=2, head_dim=8),
    "another rope base and eps": dict(rope_base=500000.0, norm_eps=1e-5),
    "head_dim apart from dim / n_heads": dict(head_dim=24),
}


def llama_like(config: Config):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_hidden,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=False,
        )
    )


def pairs(config: Config) -> dict[str, str]:
    """Our parameter names -> Llama's."""
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    parts = {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    for layer in range(config.n_layers):
        for ours, theirs in parts.items():
            names[f"blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return names


def as_ours(name: str, tensor: Tensor) -> Tensor:
    """Llama's layout -> ours: linear weights are [out, in] there, the embedding is the same."""
    return tensor.T if tensor.dim() == 2 and name != "embedding.weight" else tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_llama(case):
    config = Config.preset("tiny", **CASES[case])
    ours, llama = Transformer(config), llama_like(config)
    names = pairs(config)
    assert set(names) == {name for name, _ in ours.named_parameters()} and len(names) == 21
    theirs = dict(llama.named_parameters())
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for our_name, their_name in names.items():
            # Norm weights away from 1, so that a forgotten or misplaced one shows; matrices wide
            # enough that attention is far from uniform and positions matter.
            shape, is_norm = theirs[their_name].shape, theirs[their_name].dim() == 1
            draw = rng.uniform(0.5, 1.5, shape) if is_norm else rng.normal(0, 0.2, shape)
            theirs[their_name].copy_(torch.from_numpy(draw))
            ours.get_parameter(our_name).copy_(as_ours(our_name, theirs[their_name]))
    data = torch.from_numpy(rng.integers(config.vocab_size, size=(2, 301)))
    tokens, targets = data[:, :-1], data[:, 1:].clone()
    targets[0, 5:20] = -100

    logits, loss = ours(tokens, targets)
    expected = llama(tokens, labels=tokens, shift_labels=targets)
    loss.backward()
    expected.loss.backward()

    assert relative_error(logits, expected.logits) <= 1e-5
    assert abs(loss.item() - expected.loss.item()) <= 1e-5 * expected.loss.item()
    for our_name, their_name in names.items():
        right = as_ours(our_name, theirs[their_name].grad)
        assert relative_error(ours.get_parameter(our_name).grad, right) <= 1e-4, our_name
