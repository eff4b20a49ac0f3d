"""A compiled training graph copies no more than plain torch.compile's, however q, k and v lie.

Inductor is stopped once it has planned its kernels: what is copied is known then, and its C++ need
not be compiled. A copy is a kernel's part that loads and stores and computes nothing.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config, ir

import xtrain
from xtrain.passes.swaps.rewrite import Forms

V = 97
SIZES = dict(vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=0)
GROUPED = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)
MODELS = {
    # [B, T, 3, N, H]
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.0, **SIZES),
    # [B, T, N, 3, H], a quarter of H rotated
    "gpt_neox": transformers.GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, **SIZES
    ),
    # q, k and v one after the other, k and v with fewer heads
    "phi3": transformers.Phi3Config(**GROUPED, **SIZES),
    # [B, T, M, N / M + 2, H]
    "falcon": transformers.FalconConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        **SIZES,
    ),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, **SIZES),
    # three projections, queries scaled before
    "opt": transformers.OPTConfig(
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=64,
        attention_dropout=0.0,
        **SIZES,
    ),
    # three projections, fewer heads of keys and values
    "llama": transformers.LlamaConfig(**GROUPED, **SIZES),
    # the same, queries and keys normed as [B, T, N, H]
    "qwen3": transformers.Qwen3Config(head_dim=8, **GROUPED, **SIZES),
    # the same, normed as [B, N, T, H]: a transposed view
    "gemma3": transformers.Gemma3TextConfig(head_dim=8, **GROUPED, **SIZES),
}


class Planned(Exception):
    """Inductor has planned a graph: all that these tests want of it."""


def copies(step) -> list[tuple[str, bool]]:
    """Return (what is copied, whether into a concatenation) in what one training step compiles."""
    found = []

    def look(nodes):
        for node in (inner.node for fused in nodes for inner in fused.get_nodes()):
            if isinstance(node, ir.ComputedBuffer) and isinstance(node.data, ir.Pointwise):
                operators = set(node.data.inner_fn_opcount().used_ops)
                if operators <= {"load"} and len(node.get_size()) > 0:
                    origins = sorted(origin.name for origin in node.origins)
                    into_part = isinstance(node.layout, ir.NonOwningLayout)
                    found.append((f"{list(node.get_size())} {origins}", into_part))
        raise Planned

    def plan_only(module, inputs, **options):
        with pytest.raises(Exception, match="Planned"):
            compile_fx.compile_fx_inner(module, inputs, **options)
        return make_boxed_func(module.forward)

    plan = functools.partial(compile_fx.compile_fx, inner_compile=plan_only)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx", plan)
        with config.patch(_post_fusion_custom_pass=look, force_disable_caches=True):
            step()
    return found


def assert_no_more_copies(plain, model, run, *, swapped) -> None:
    """plain: copies of torch.compile; run: model -> loss; swapped: how many calls of attention."""
    ours = xtrain.compile(model, dropout=0.1, seed=1, existing="replace")
    found = copies(lambda: run(ours).backward())
    assert swapped == sum(
        r.num_replaced for r in ours.report().passes if r.name == "use_triton_sdpa"
    )
    for into_part in (False, True):
        few, many = ([what for what, part in x if part <= into_part] for x in (plain, found))
        assert len(many) <= len(few), "\n".join(["plain:", *few, "ours:", *many])


def transformers_model(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]).train()


def loss(model):
    ids = torch.arange(32).view(2, 16)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@functools.cache
def copies_of_plain(name) -> list[tuple[str, bool]]:
    return copies(lambda: loss(torch.compile(transformers_model(name))).backward())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_model(name):
    """BLOOM adds a bias to its scores, OPT's graph breaks behind its mask: both keep torch's op."""
    swapped = 0 if name in ("bloom", "opt") else 1
    assert_no_more_copies(copies_of_plain(name), transformers_model(name), loss, swapped=swapped)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_transformers_model_as_kernels(name, monkeypatch):
    """Each op is one call, as on a GPU: what they hand on lies as the next one reads it."""
    monkeypatch.setattr(Forms, "choose", lambda self, op, *args, **kwargs: (True, "kernel"))
    test_transformers_model(name)


class Layouts(nn.Module):
    """Attention whose queries, keys and values lie in other ways, one residual branch each."""

    def __init__(self, D=32, N=4):
        super().__init__()
        self.N = N
        self.norm = nn.LayerNorm(D)
        self.row, self.turned_row = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.query, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.out1, self.out2, self.out3, self.out4 = (nn.Linear(D, D) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.N, -1)).transpose(1, 2)

    def merged(self, y):
        return y.transpose(1, 2).flatten(2)

    def nano_gpt(self, x):
        q, k, v = map(self.heads, self.row(x).chunk(3, -1))
        return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def opt(self, x):
        q, k, v = map(self.heads, (self.q(x) * 0.3, self.k(x), self.v(x)))
        return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))

    def cross(self, x, memory):
        k, v = map(self.heads, self.kv(memory).chunk(2, -1))
        return self.merged(F.scaled_dot_product_attention(self.heads(self.query(x)), k, v))

    def sequence_first(self, x):
        packed = self.turned_row(x.transpose(0, 1)).unflatten(-1, (self.N, 3, -1))  # T, B, N, 3, H
        q, k, v = packed.permute(3, 1, 2, 0, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2).transpose(0, 1)

    def forward(self, x, memory):
        x = x + self.out1(self.nano_gpt(self.norm(x)))
        x = x + self.out2(self.opt(self.norm(x)))
        x = x + self.out3(self.cross(self.norm(x), memory))
        return x + self.out4(self.sequence_first(self.norm(x)))


def test_layouts():
    torch.manual_seed(0)
    x, memory = torch.randn(2, 16, 32), torch.randn(2, 11, 32)
    model = Layouts()

    def run(m):
        return m(x, memory).square().sum()

    plain = copies(lambda: run(torch.compile(model)).backward())
    assert_no_more_copies(plain, model, run, swapped=4)
