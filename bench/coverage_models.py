"""Causal language models of transformers, shrunk to two layers of hidden size 64.

A configuration is shrunk by the names of its fields, not by its class: `_SIZES` says what a field
of that name becomes wherever it stands (sub-configurations too), and what a type needs beyond that
is in coverage_configs.toml. Dropout of the models' own is off, so that two runs can be compared
bit for bit. Lists with one entry a layer keep the first layer and the first that differs from it:
a hybrid shows both of its blocks.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS, HIDDEN, HEADS, VOCAB = 2, 64, 4, 128
HERE = Path(__file__).resolve().parent

# What a field becomes, and the names of the fields that become it.
_SIZES: list[tuple[int, str]] = [
    (
        NUM_LAYERS,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
        num_encoder_layers num_decoder_layers num_layers_per_stack num_blocks num_global_layers
        conf_num_hidden_layers num_experts_per_tok moe_topk moe_k moe_top_k top_k
        num_experts_per_token hc_mult hc_count""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
        attention_heads n_mamba_heads swa_num_attention_heads linear_num_heads
        conf_num_attention_heads linear_num_value_heads num_experts num_local_experts
        n_routed_experts moe_num_experts zero_expert_num o_groups heads_per_ngram""",
    ),
    (2, "kv_n_heads num_kv_heads linear_num_key_heads index_n_heads"),
    (2, "swa_num_key_value_heads num_global_key_value_heads"),
    (1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace"),
    (
        HIDDEN,
        """hidden_size d_model n_embd dim embedding_size word_embed_proj_dim hidden_size_global
        attention_hidden_size out_hidden_size mlp_dim q_lora_rank lru_width emb_dim hidden_dim
        backbone_hidden_size ple_embed_dim embedding_dim cross_attention_hidden_size""",
    ),
    (
        HIDDEN // HEADS,
        """head_dim swa_head_dim dim_head kv_channels d_kv qk_nope_head_dim v_head_dim
        index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim
        mamba_d_state state_size ssm_state_size mamba_head_dim mamba_chunk_size index_topk
        laurel_rank hidden_size_per_layer_input hc_lowrank gated_norm_rank d_rel o_lora_rank""",
    ),
    (8, "qk_rope_head_dim rotary_dim mamba_dt_rank time_step_rank"),
    (24, "qk_head_dim"),
    (32, "kv_lora_rank moe_intermediate_size expert_ffn_hidden_size block_size"),
    (
        2 * HIDDEN,
        """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dff
        dim_ff shared_intermediate_size shared_expert_intermediate_size intermediate_size_mlp
        moe_shared_expert_intermediate_size dense_intermediate_size mamba_intermediate_size
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length prompt_mid_dim
        original_max_position_embeddings""",
    ),
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size ngram_vocab_size_base"),
    (4, "sliding_window sliding_window_size local_attention attention_chunk_size"),
]
_SIZE_OF = {name: value for value, names in _SIZES for name in names.split()}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def model_types() -> dict[str, str]:
    """Return type -> class name of every causal language model that transformers maps."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        kind: name if isinstance(name, str) else name[0]
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


def build(model_type: str) -> nn.Module:
    """Return the shrunk model of a type, in training mode, seeded. Raises what building raises."""
    import transformers

    model_class = getattr(transformers, model_types()[model_type])
    config = shrunk_config(model_type, model_class.config_class)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "batched_mm"  # traces whole on a CPU, unlike the default
    torch.manual_seed(0)
    return model_class(config).train()


def inputs(model: nn.Module) -> dict[str, Any]:
    """Return token ids and labels: two samples of nine tokens, no padding."""
    # Tokens from 3 on: 0 to 2 pad, begin and end.
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    call: dict[str, Any] = dict(input_ids=ids, labels=ids.clone())
    if "use_cache" in inspect.signature(model.forward).parameters:
        call["use_cache"] = False
    return call


def shrunk_config(model_type: str, config_class: type) -> Any:
    """Return the small configuration of a type."""
    with (HERE / "coverage_configs.toml").open("rb") as file:
        extra = tomllib.load(file).get(model_type, {})
    try:
        default = config_class().to_dict()
    except Exception:  # no defaults of its own: everything comes from coverage_configs.toml
        default = {}
    values = _shrunk(default)
    if values.get("is_encoder_decoder"):
        values["is_encoder_decoder"] = False
    if "is_decoder" in default:
        values["is_decoder"] = True
    return config_class(**_merged(values, extra))


def _shrunk(default: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    depth = next((default[n] for n in _LAYER_COUNTS if isinstance(default.get(n), int)), 0)
    lists = {k: v for k, v in default.items() if _is_per_layer(v, depth)}
    kept = _kept_layers(list(lists.values()))
    for name, value in default.items():
        if name in ("model_type", "transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, dict) and name.endswith("config"):
            values[name] = _shrunk(value)
            if "model_type" in value:
                values[name]["model_type"] = value["model_type"]
        elif name in lists:
            values[name] = [value[i] for i in kept]
        elif name in _TOKENS:
            values[name] = _TOKENS[name]
        elif _is_dropout(name, value):
            values[name] = type(value)(0)
        elif name == "num_key_value_heads" and isinstance(value, int):
            heads = default.get("num_attention_heads", value)
            values[name] = HEADS if value == heads else 1 if value == 1 else HEADS // 2
        elif name == "head_dim" and "qk_rope_head_dim" in default:
            values[name] = _SIZE_OF["qk_rope_head_dim"]  # latent attention rotates that part alone
        elif name in _SIZE_OF and isinstance(value, int):
            values[name] = _SIZE_OF[name]
    return values


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers")


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and depth > NUM_LAYERS and len(value) == depth


def _kept_layers(lists: list[list[Any]]) -> list[int]:
    """The first layer, and the one that differs from it in most of the lists."""
    if not lists:
        return []
    differing = [sum(values[i] != values[0] for values in lists) for i in range(len(lists[0]))]
    second = differing.index(max(differing)) or 1
    return [0, second]


def _is_dropout(name: str, value: Any) -> bool:
    drops = "drop" in name or name.endswith("pdrop") or "jitter" in name
    return drops and isinstance(value, float | int) and not isinstance(value, bool)


def _merged(values: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        elif value == "__absent__":
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output."""
    return output.loss if hasattr(output, "loss") else output[0]
