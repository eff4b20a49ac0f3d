"""Models that xtrain has never seen: exact residual sites, also when ops are spelt another way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from branch_oracle import hook_masks_of_llama
from torch import Tensor, nn

import xtrain
from bench.coverage.check import masks_agree, recorded_dropout, spelt_sites
from xtrain.compiler import SiteError
from xtrain.model import Block, Config, RMSNorm, Transformer

P = 0.5
PAIR = ["attention", "feed_forward"]


# --- transformers' families ---------------------------------------------------------------------

SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=64,
    intermediate_size=48,
    max_position_embeddings=32,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GROUPED = dict(SMALL, num_key_value_heads=1, head_dim=16)
GPT2 = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
GPT2 |= dict(bos_token_id=1, eos_token_id=2)
MOE = dict(GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
MOE |= dict(output_router_logits=True)
LLAMA4 = dict(GROUPED, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48)
MLA = dict(SMALL, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8)
MLA |= dict(v_head_dim=16, first_k_dense_replace=2)
T5 = dict(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=64)
T5 |= dict(decoder_start_token_id=0)

# family -> (configuration, [(block, its sites in the order of their adds)])
FAMILIES = {
    name: (values, [("model.layers.0", PAIR), ("model.layers.1", PAIR)])
    for name, values in {
        "llama": GROUPED,
        "qwen3": GROUPED,
        "gemma": GROUPED,
        "gemma2": GROUPED,  # sandwich norm
        "gemma3_text": GROUPED,
        "nanochat": GROUPED,  # norms without weights
        "llama4_text": LLAMA4,  # rotations by complex numbers, a shared expert
        "deepseek_v2": MLA,  # latent attention
        "olmo2": dict(SMALL, num_key_value_heads=1),  # post norm
        "phi3": dict(SMALL, num_key_value_heads=1),
        "qwen3_moe": MOE,  # auxiliary router loss; graph breaks at the experts
    }.items()
}
FAMILIES["gpt2"] = (GPT2, [("transformer.h.0", PAIR), ("transformer.h.1", PAIR)])
FAMILIES["gpt_neox"] = (  # parallel residual: mlp + attention + stream
    SMALL,
    [("gpt_neox.layers.0", PAIR[::-1]), ("gpt_neox.layers.1", PAIR[::-1])],
)
FAMILIES["t5"] = (
    T5,
    [("encoder.block.0", PAIR), ("encoder.block.1", PAIR)]
    + [(f"decoder.block.{i}", ["attention", "cross_attention", "feed_forward"]) for i in range(2)],
)
OWN_DROPOUT = {"gpt2", "t5"}


def build(family):
    transformers = pytest.importorskip("transformers")
    values, blocks = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **values)
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else None
    torch.manual_seed(0)
    return (auto or transformers.AutoModelForCausalLM).from_config(config).train(), blocks


def labelled(family, padded=False):
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    call = dict(input_ids=ids, labels=ids)
    if padded:
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        call["attention_mask"] = mask
    return call if family == "t5" else dict(call, use_cache=False)


def assert_sites_of(family, report):
    """All of a family's sites, in order, and no dropout but ours."""
    expected = [
        (f"{path}.{site}", layer, site)
        for layer, (path, sites) in enumerate(FAMILIES[family][1])
        for site in sites
    ]
    assert [(s.name, s.layer, s.site) for s in report.sites] == expected
    assert {s.dropout for s in report.sites} == {"xtrain"}
    assert report.uncovered == []
    assert family in OWN_DROPOUT or report.unseeded == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", *sorted(OWN_DROPOUT)])
def test_sites_of_a_family(family):
    """The other families: test_compile_swaps.py, whose graphs have them too."""
    model, _ = build(family)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager", existing="replace")
    first = compiled(**labelled(family))
    first.loss.backward()
    assert_sites_of(family, compiled.report())
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if family not in OWN_DROPOUT:
        compiled.set_step(0)
        assert torch.equal(compiled(**labelled(family)).logits, first.logits)
        compiled.eval()
        without = compiled(**labelled(family)).logits
        assert torch.equal(without, model(**labelled(family)).logits)
        assert not torch.equal(without, first.logits)


@pytest.mark.parametrize("family", sorted(OWN_DROPOUT))
def test_dropout_of_the_models_own_is_left_by_default(family):
    model, blocks = build(family)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    torch.manual_seed(3)
    loss = compiled(**labelled(family)).loss
    torch.manual_seed(3)
    assert torch.equal(loss, model(**labelled(family)).loss), "nothing of ours was inserted"
    report = compiled.report()
    assert {s.dropout for s in report.sites} == {"model"}
    assert len(report.sites) == sum(len(sites) for _, sites in blocks)
    assert len(report.unseeded) > 0
    skipped = [count for result in report.passes for count in result.skipped.items()]
    assert {reason for reason, _ in skipped} == {"the model's own dropout stays"}
    assert sum(number for _, number in skipped) == len(report.sites)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_masks_and_position_biases_are_no_sites(implementation):
    """T5 adds one bias, with the mask in it, to the scores of every layer."""
    model, blocks = build("t5")
    model.set_attn_implementation(implementation)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager", existing="replace")
    compiled(**labelled("t5", padded=True))
    assert len(compiled.report().sites) == 10


def test_masks_of_a_foreign_model_are_the_oracles():
    """Llama's branches are modules: hooks with NumPy's masks on the plain model are the truth."""
    model, _ = build("llama")
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    found = compiled(**labelled("llama"))
    hook_masks_of_llama(model)
    expected = model(**labelled("llama"))
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)


def test_gradient_checkpointing_and_gpt_neox_masks():
    """The two branches of one add have masks of their own, recomputed or not."""
    outs = []
    for checkpointing in (False, True):
        model, _ = build("gpt_neox")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager")
        out = compiled(**labelled("gpt_neox"))
        out.loss.backward()
        outs.append([out.logits, *(p.grad for p in model.parameters())])
        assert len(compiled.report().sites) == 4
    assert all(map(torch.equal, *outs))


# --- row C16: numbers and spellings -------------------------------------------------------------


class AddFunction(Block):
    def forward(self, x, cos, sin):
        x = torch.add(self.attention(self.attention_norm(x), cos, sin), x)
        return torch.add(x, other=self.feed_forward(self.feed_forward_norm(x)), alpha=1)


class AddInPlace(Block):
    def forward(self, x, cos, sin):
        x = x.clone()
        x += self.attention(self.attention_norm(x), cos, sin)
        h = self.feed_forward(self.feed_forward_norm(x))
        h += x
        return h


class AddMethod(Block):
    def forward(self, x, cos, sin):
        x = x.add(self.attention(self.attention_norm(x), cos, sin))
        return 1.0 * x + self.feed_forward(self.feed_forward_norm(x))


class WeightFirst(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x, (x.shape[-1],), weight=None, eps=self.eps)


def spelt(n_layers, block=Block, norm=RMSNorm):
    torch.manual_seed(0)
    model = Transformer(Config.preset("tiny", n_layers=n_layers))
    for module in model.modules():
        if type(module) in (Block, RMSNorm):
            module.__class__ = block if type(module) is Block else norm
    return model


@pytest.mark.parametrize(
    ("n_layers", "block", "norm"),
    [
        (4, AddFunction, RMSNorm),
        (1, AddInPlace, RMSNorm),
        (1, AddMethod, RMSNorm),
        (4, AddMethod, WeightFirst),
    ],
)
def test_two_sites_a_layer_in_every_spelling(n_layers, block, norm):
    tokens = torch.arange(12).view(2, 6)
    compiled = xtrain.compile(spelt(n_layers, block, norm), dropout=P, seed=1, backend="eager")
    logits, _ = compiled(tokens)
    expected = [(f"blocks.{i}.{site}", i, site) for i in range(n_layers) for site in PAIR]
    assert [(s.name, s.layer, s.site) for s in compiled.report().sites] == expected
    usual = xtrain.compile(spelt(n_layers, norm=norm), dropout=P, seed=1, backend="eager")
    assert torch.equal(logits, usual(tokens)[0]), "another spelling, the same masks"


def test_a_spelling_that_is_not_understood_is_loud():
    class Lerp(Block):
        def forward(self, x, cos, sin):
            x = torch.lerp(x, x + self.attention_norm(x), 1.0)
            return torch.stack((x, self.feed_forward(x))).cumsum(0)[-1]

    with pytest.raises(SiteError, match="may be a residual site"):
        xtrain.compile(spelt(2, Lerp), dropout=P, seed=1, backend="eager")(torch.zeros(1, 3).long())

    class Half(Block):
        def forward(self, x, cos, sin):
            if self.odd:
                return torch.stack((x, self.feed_forward(x))).cumsum(0)[-1]
            return super().forward(x, cos, sin)

    model = spelt(2, Half)
    for i, layer in enumerate(model.blocks):
        layer.odd = bool(i % 2)
    with pytest.raises(SiteError, match=r"may be a residual site.*blocks.1.: .drop"):
        xtrain.compile(model, dropout=P, seed=1, backend="eager")(torch.zeros(1, 3).long())


# --- torch's own layers -------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_encoder_layers(norm_first):
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.1, batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager", existing="replace")
    compiled(torch.randn(2, 5, 16)).sum().backward()
    names = [(s.name, s.dropout) for s in compiled.report().sites]
    assert names == [(f"layers.{i}.{site}", "xtrain") for i in range(2) for site in PAIR]
    unseeded = compiled.report().unseeded
    assert sum("attention probabilities (p = 0.1)" in line for line in unseeded) == 2


# --- images and speech: masks by the oracle, p = 0 to the bit -------------------------------------


WIDTH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
IMAGE = dict(WIDTH, image_size=16, patch_size=4)
TEXT = dict(WIDTH, vocab_size=64, max_position_embeddings=16)
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1)
SPEECH = dict(TOKENS, d_model=32, vocab_size=64, dropout=0.0, num_mel_bins=8)
SPEECH |= {f"{side}_{name}": value for side in ("encoder", "decoder")
           for name, value in dict(layers=2, attention_heads=2, ffn_dim=48).items()}  # fmt: skip
SPEECH |= dict(max_source_positions=16, max_target_positions=32)

# class -> (model type, configuration, inputs by name, sites: a word a block)
MODALITIES = {
    "ViTForImageClassification": (
        "vit", dict(IMAGE, hidden_dropout_prob=0.0, num_labels=3), ("pixel_values",), "AF AF"
    ),
    "CLIPModel": (
        "clip", dict(text_config=TEXT, vision_config=IMAGE, projection_dim=16),
        ("input_ids", "pixel_values", "return_loss"), "AF AF AF AF",
    ),
    "WhisperForConditionalGeneration": (  # breaks at its random layer drop, of probability 0
        "whisper", SPEECH, ("input_features", "labels"), "AF AF ACF ACF"
    ),
}  # fmt: skip


def build_modality(name):
    transformers = pytest.importorskip("transformers")
    kind, values, wanted, sites = MODALITIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **values)).train()
    ids = torch.arange(3, 21).view(2, 9)
    given = dict(input_ids=ids, labels=ids, return_loss=True)
    given |= dict(pixel_values=torch.randn(2, 3, 16, 16), input_features=torch.randn(2, 8, 32))
    return model, {key: given[key] for key in wanted}, sites


def scalar(output):
    loss = getattr(output, "loss", None)
    return output.logits.square().mean() if loss is None else loss


def train(model, compiled, call):
    model.zero_grad(set_to_none=True)
    loss = scalar(compiled(**call))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODALITIES)
def test_sites_masks_and_p_0(name):
    model, call, sites = build_modality(name)
    compiled = xtrain.compile(model, dropout=P, seed=1, backend="eager")
    with recorded_dropout() as drops:
        train(model, compiled, call)
    report = compiled.report()
    assert spelt_sites(report.sites) == sites and report.uncovered == []
    assert len(compiled.last_executed_sites) == len(report.sites) == len(drops)
    assert masks_agree(report.sites, drops) is True
    plain = train(model, model, call)
    absent = train(model, xtrain.compile(model, dropout=0.0, backend="eager"), call)
    assert len(plain) == len(absent) and all(map(torch.equal, plain, absent))
