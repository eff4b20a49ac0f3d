"""What trainers do to a model: ask for its class, inspect, wrap and unwrap its forward, adapt it.

Each test holds a CompiledModel against what the framework does with the plain model.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from branch_oracle import both
from peft import LoraConfig, PeftModel, get_peft_model
from probe_model import SITES, P, probe, tokens
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.generic import find_labels

import xtrain
from xtrain.compiler import CompiledModel, Site

IDS = torch.arange(18).view(2, 9)


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            **options,
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ).train()


def compiled_llama(model=None, **keywords):
    model = llama() if model is None else model
    return xtrain.compile(model, **{"dropout": P, "seed": 0, "backend": "eager", **keywords})


def names(sites):
    return [(s.layer, s.site) for s in sites]


# --- the sites that a forward executed ----------------------------------------------------------

ALL = [(layer, site) for layer in range(2) for site in SITES]


@both
def test_last_executed_sites_are_those_of_the_last_forward(compile_it):
    compiled = probe(None, compile_it)
    assert compiled.last_executed_sites == ()
    compiled(tokens())
    assert compiled.last_executed_sites[0] == Site("blocks.0.attention", 0, "attention")
    assert names(compiled.last_executed_sites) == ALL
    compiled.inner(tokens())
    assert names(compiled.last_executed_sites) == ALL, "the inner model's calls are not ours"
    compiled.eval()(tokens())
    assert compiled.last_executed_sites == ()
    compiled.train()(tokens())
    assert len(compiled.last_executed_sites) == 4
    with pytest.raises(IndexError):
        compiled(torch.full((4, 5), 99))
    assert compiled.last_executed_sites == (), "a forward that failed"


def test_without_dropout_no_site_is_executed():
    compiled = probe(dropout=0.0)
    compiled(tokens())
    assert compiled.last_executed_sites == ()


# --- the class ----------------------------------------------------------------------------------


def test_the_class_is_the_models_and_the_type_is_ours():
    compiled = compiled_llama()
    assert isinstance(compiled, CompiledModel) and type(compiled) is CompiledModel
    assert isinstance(compiled, PreTrainedModel) and isinstance(compiled, LlamaForCausalLM)
    assert not isinstance(compiled, PeftModel)
    assert find_labels(compiled.__class__) == find_labels(LlamaForCausalLM) == ["labels"]
    assert repr(compiled).startswith("CompiledModel(\n  LlamaForCausalLM, dropout=0.5")
    with pytest.raises(TypeError, match="compiled already"):
        xtrain.compile(compiled)


def test_a_new_class_goes_to_the_model():
    """FSDP2's fully_shard assigns module.__class__."""
    compiled = compiled_llama()
    sharded = type("Sharded", (LlamaForCausalLM,), {})
    compiled.__class__ = sharded
    assert type(compiled.inner) is sharded and compiled.__class__ is sharded
    assert type(compiled) is CompiledModel


# --- the forward --------------------------------------------------------------------------------


def test_the_forward_is_a_method_that_unwraps_to_itself():
    compiled = compiled_llama()
    assert inspect.signature(compiled.forward) == inspect.signature(compiled.inner.forward)
    assert inspect.unwrap(compiled.forward) == compiled.forward
    assert compiled.forward.__self__ is compiled


def test_accelerate_wraps_and_unwraps_the_forward():
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    compiled = compiled_llama()
    assert accelerator.prepare(compiled) is compiled
    masked = compiled(input_ids=IDS, labels=IDS)
    assert names(compiled.last_executed_sites) == ALL
    assert masked.logits.dtype == torch.float32, "accelerate casts outputs back"
    assert "_original_forward" not in compiled.inner.__dict__
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_fp32_wrapper=False) is compiled
    AcceleratorState._reset_state(reset_partial_state=True)

    compiled.set_step(0)
    unwrapped = compiled(input_ids=IDS, labels=IDS)
    assert names(compiled.last_executed_sites) == ALL
    expected = compiled_llama()(input_ids=IDS, labels=IDS)
    assert torch.equal(unwrapped.logits, expected.logits), "fp32 again, with the same masks"
    assert not torch.equal(unwrapped.logits, masked.logits)


# --- adapters -----------------------------------------------------------------------------------


def lora():
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def test_adapters_around_and_inside_give_the_same_loss():
    """get_peft_model before or after xtrain.compile: the same sites, masks and gradients."""
    outside = compiled_llama(get_peft_model(llama(), lora()))
    outside.train()
    torch.manual_seed(0)
    compiled = compiled_llama()
    inside = get_peft_model(compiled, lora()).train()
    adapters = {n: p for n, p in outside.named_parameters() if p.requires_grad}
    found = {n: p for n, p in inside.named_parameters() if p.requires_grad}
    assert list(found) == list(adapters) and all("lora_" in n for n in found)
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(adapters[name])
    losses = []
    for model, executed_by in ((outside, outside), (inside, compiled)):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss)
        assert names(executed_by.last_executed_sites) == ALL
    assert torch.equal(*losses)
    assert all(torch.equal(found[n].grad, adapters[n].grad) for n in adapters)
    assert all(p.grad is None for p in inside.parameters() if not p.requires_grad)


def test_adapters_are_saved_by_the_models_own_method(tmp_path):
    compiled = compiled_llama(get_peft_model(llama(), lora()))
    assert isinstance(compiled, PeftModel)
    compiled.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    state = compiled.state_dict()
    assert list(loaded.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert not (tmp_path / "model.safetensors").exists()


class TailedNet(torch.nn.Module):
    """Its last residual branch stands outside of any block."""

    def __init__(self):
        super().__init__()
        pairs = [[torch.nn.Linear(8, 8) for _ in range(2)] for _ in range(2)]
        self.layers = torch.nn.ModuleList(map(torch.nn.ModuleList, pairs))
        self.tail = torch.nn.Linear(8, 8)

    def forward(self, x):
        for up, down in self.layers:
            x = x + down(up(x).relu())
        return x + self.tail(x)


def test_sites_outside_of_blocks_keep_their_name_under_an_adapter():
    """PEFT reaches the model through __getattr__, and Dynamo names it by its __dict__."""
    config = LoraConfig(r=2, target_modules=["tail"], lora_dropout=0.25)
    compiled = compiled_llama(get_peft_model(TailedNet(), config).train())
    compiled(torch.randn(2, 3, 8)).sum().backward()
    report = compiled.report()
    blocks = [f"base_model.model.layers.{i}.feed_forward" for i in range(2)]
    assert [s.name for s in report.sites] == [*blocks, "base_model.model.feed_forward"]
    assert report.unseeded == ["dropout in base_model.model.tail.lora_dropout.default"]


# --- tied weights -------------------------------------------------------------------------------


def test_a_tied_head_stays_the_embedding(tmp_path):
    """Row C48: through wrap, step, save and load; gradients of both uses summed, decayed once."""
    model, plain = llama(tie_word_embeddings=True), llama(tie_word_embeddings=True)
    compiled = compiled_llama(model, dropout=0.0, backend="aot_eager")
    assert compiled.lm_head.weight is compiled.model.embed_tokens.weight
    for trained in (compiled, plain):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.5)
        trained(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    head, theirs = compiled.lm_head.weight, plain.lm_head.weight
    assert head is compiled.model.embed_tokens.weight and head is model.lm_head.weight
    torch.testing.assert_close(head.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head, theirs, rtol=1e-4, atol=1e-5)

    compiled.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, head)


def test_a_head_of_its_own_is_saved_beside_the_embedding(tmp_path):
    """Row C48, tie off: both tensors are there and differ."""
    compiled = compiled_llama(llama(tie_word_embeddings=False))
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    compiled.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        head, embedding = (
            file.get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight")
        )
    assert head.shape == embedding.shape and not torch.equal(head, embedding)
