"""Our decoder: what it computes, part by part and as a whole, and transformers' Llama beside it."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import gradcheck

from xtrain import model as M
from xtrain.model import Config, Transformer


def make_model(seed: int = 0, **overrides) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(Config.preset("tiny", **overrides))


def make_tokens(batch: int, length: int, seed: int = 0, vocab_size: int = 16) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(vocab_size, size=(batch, length)))


def gradients(model: Transformer) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def test_initialisation_is_normal_0_02_and_ones():
    model = make_model(dim=256, ffn_hidden=512, n_heads=4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        n = parameter.numel()  # 5 sigma for the mean, and for the standard deviation
        assert abs(parameter.mean()) < 5 * 0.02 / math.sqrt(n), name
        assert abs(parameter.std() / 0.02 - 1) < 5 / math.sqrt(2 * n), name


def test_meta_to_empty_reset_equals_direct_construction():
    with torch.device("meta"):
        model = Transformer(Config.preset("tiny"))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    direct = make_model()
    for (name, a), (_, b) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    tokens = make_tokens(2, 9)
    assert torch.equal(model(tokens)[0], direct(tokens)[0])


def test_loading_onto_meta_by_assignment():
    source = make_model()
    with torch.device("meta"):
        model = Transformer(source.config)
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model(make_tokens(2, 9))[0], source(make_tokens(2, 9))[0])


def test_copies_and_pickles_are_whole():
    model, tokens = make_model(), make_tokens(2, 9)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(tokens)[0], model(tokens)[0])
        other.to(torch.float64).load_state_dict(model.double().state_dict())
        assert torch.equal(other(tokens)[0], model(tokens)[0])
        model.float()


def test_state_is_parameters_alone():
    model = make_model()
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.blocks[0].feed_forward.down.weight.shape == (64, 32)  # [in, out]


def test_overfit():
    """Compiled: test_compile_equality.py."""
    model = make_model()
    data = make_tokens(1, 28, seed=4)
    tokens, targets = data[:, :-1], data[:, 1:]
    losses = []
    for _ in range(200):
        _, loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
                p.grad = None
    assert abs(losses[0] - math.log(16)) < 0.1  # about 2.8: uniform over 16
    assert losses[-1] < 0.01
    with torch.no_grad():
        assert torch.equal(model(tokens)[0].argmax(-1), targets)


def test_causal_and_batch_independent():
    model = make_model(n_kv_heads=1)
    tokens = make_tokens(2, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 16
    a, b = model(tokens)[0], model(changed)[0]
    assert torch.equal(a[0, :7], b[0, :7]) and torch.equal(a[1], b[1])
    assert not torch.equal(a[0, 7], b[0, 7]) and not torch.equal(a[0, 11], b[0, 11])


def test_training_mode_and_dropout_are_never_read_and_nothing_is_drawn():
    tokens = make_tokens(2, 9)
    model = make_model()
    state = torch.get_rng_state()
    expected = model(tokens)[0]
    assert torch.equal(model.eval()(tokens)[0], expected)
    assert torch.equal(make_model(dropout=0.9).train()(tokens)[0], expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_tied_embeddings_are_one_tensor_with_summed_gradients():
    tied = make_model(tie_embeddings=True)
    untied = make_model()
    assert len(list(tied.parameters())) == 20 and "head.weight" not in tied.state_dict()
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach().T})
    tokens, targets = make_tokens(2, 9), make_tokens(2, 9, seed=1)
    tied_logits, tied_loss = tied(tokens, targets)
    logits, loss = untied(tokens, targets)
    torch.testing.assert_close(tied_logits, logits, rtol=1e-5, atol=1e-6)
    tied_loss.backward()
    loss.backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad.T
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", ["full", 1])
def test_recompute_changes_no_bit_in_20_steps(recompute):
    histories = []
    for setting in ("none", recompute):
        model = make_model(recompute=setting)
        history: list[Tensor] = []
        for step in range(20):
            data = make_tokens(2, 17, seed=step)
            _, loss = model(data[:, :-1], data[:, 1:])
            loss.backward()
            history += [loss.detach(), *gradients(model)]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        histories.append(history)
    assert all(torch.equal(a, b) for a, b in zip(*histories, strict=True))


def test_recompute_runs_the_first_n_blocks_again():
    model = make_model(n_layers=3, recompute=2)
    runs = [0, 0, 0]

    def count(layer):
        def hook(*_):
            runs[layer] += 1

        return hook

    for layer, block in enumerate(model.blocks):
        block.attention_norm.register_forward_pre_hook(count(layer))
    tokens = make_tokens(1, 5)
    model(tokens, tokens)[1].backward()
    assert runs == [2, 2, 1]
    with torch.no_grad():
        model(tokens)
    assert runs == [3, 3, 2]


def test_forward_errors():
    model = make_model(max_seq_len=8)
    assert model(make_tokens(1, 8))[0].shape == (1, 8, 16)
    with pytest.raises(ValueError, match=r"9 tokens .* max_seq_len = 8"):
        model(make_tokens(1, 9))
    with pytest.raises(ValueError, match=r"\[batch, sequence\], got \(8,\)"):
        model(make_tokens(1, 8)[0])
    with pytest.raises(ValueError, match=r"targets .*\(1, 8\), got \(1, 7\)"):
        model(make_tokens(1, 8), make_tokens(1, 7))


def test_all_targets_ignored_give_zero_loss_and_gradients():
    model, tokens = make_model(), make_tokens(2, 9)
    _, loss = model(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model))
    _, normal = model(tokens, tokens)
    normal.backward()  # accumulates onto the zeros
    alone = make_model()
    alone(tokens, tokens)[1].backward()
    for accumulated, right in zip(gradients(model), gradients(alone), strict=True):
        assert torch.equal(accumulated, right)


def test_loss_is_computed_in_fp32_under_autocast():
    model, tokens = make_model(), make_tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, tokens)
        hidden_loss = model(tokens, tokens, return_logits=False)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    z = logits.detach().double().numpy()
    lse = np.log(np.exp(z).sum(-1))
    picked = np.take_along_axis(z, tokens.numpy()[..., None], -1)[..., 0]
    assert abs(loss.item() - (lse - picked).mean()) < 1e-6
    assert hidden_loss[0] is None and torch.equal(hidden_loss[1], loss)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_gradcheck_whole_model(tie_embeddings):
    model = make_model(
        dim=4, n_heads=2, n_kv_heads=1, head_dim=2, ffn_hidden=3, vocab_size=5, n_layers=1,
        tie_embeddings=tie_embeddings,
    ).double()  # fmt: skip
    tokens, targets = make_tokens(1, 4, vocab_size=5), torch.tensor([[1, 0, -100, 4]])
    names = [name for name, _ in model.named_parameters()]

    def loss(*values):
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, named, (tokens, targets))[1]

    # Larger than the initialisation, so that no gradient hides below the tolerance.
    values = [
        (p.detach() * (20 if p.dim() > 1 else 1)).requires_grad_() for p in model.parameters()
    ]
    assert gradcheck(loss, values)


@pytest.mark.parametrize("mode", ["autocast", "bf16 weights"])
def test_blocks_get_fp32_tables_in_bf16(mode):
    model = make_model()
    if mode == "bf16 weights":
        model.to(torch.bfloat16)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[1:]))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        model(make_tokens(1, 300))
    expected = M.rope_tables(torch.arange(300), 16, 10000.0)
    for table, right in zip(seen[0], expected, strict=True):
        assert table.dtype == torch.float32 and torch.equal(table, right)


@pytest.mark.parametrize(("recompute", "autocast"), [("none", True), ("full", False), (1, True)])
def test_traces_as_one_graph_at_any_size(recompute, autocast):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = make_model(recompute=recompute, n_kv_heads=1)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for batch, length in ((4, 33), (3, 96), (2, 7)):
            data = make_tokens(batch, length + 1)
            tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
            for tensor in (tokens, targets):
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
            logits, loss = compiled(tokens, targets)
            loss.backward()
            expected = model(tokens, targets)
            assert torch.equal(logits, expected[0]) and torch.equal(loss, expected[1])
        assert counter.frame_count == 1
        model.eval()  # never read: no compile of its own
        compiled(tokens, targets)
        assert counter.frame_count == 1
        with torch.no_grad():
            assert torch.equal(compiled(tokens)[0], model(tokens)[0])
        assert counter.frame_count == 2


def test_one_compiled_block_serves_all_layers():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = make_model(n_layers=12)
    expected = model(make_tokens(2, 9))[0]
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    assert torch.equal(model(make_tokens(2, 9))[0], expected)
    assert counter.frame_count == 1


# --- its functions: RoPE, heads, RMSNorm, loss; values and gradients ------------------------------


def test_rope_is_rotate_half():
    cos, sin = torch.cos(torch.tensor([[1.0, 0.0]])), torch.sin(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    expected = torch.tensor([0.540302, 0, 0.841471, 0])
    torch.testing.assert_close(M.apply_rope(x, cos, sin).flatten(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16])
def test_rope_tables_stay_fp32(autocast, default_dtype):
    positions = torch.arange(4096)
    torch.set_default_dtype(default_dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cos, sin = M.rope_tables(positions, 128, 10000.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (4096, 64)
    assert abs(cos[4095, 0] - -0.06598) < 1e-5  # bf16 rounds 4095 to 4096: 0.80399
    assert abs(cos[257, 0] - 0.81931) < 1e-5  # bf16 rounds 257 to 256: -0.03979
    # fp32 rounds the frequency, then the angle: each half an ulp, 2^-24 of an angle of up to 4095;
    # the power itself is allowed two ulps.
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(0, 128, 2) / 128)
    bound = 4 * 2.0**-24 * np.maximum(angles, 1)
    assert (np.abs(cos.double().numpy() - np.cos(angles)) <= bound).all()
    assert (np.abs(sin.double().numpy() - np.sin(angles)) <= bound).all()


def test_rope_tables_take_any_positions():
    rows = torch.tensor([[5, 0, 7], [300, 4095, 1]])
    cos, sin = M.rope_tables(rows, 8, 500.0)
    all_cos, all_sin = M.rope_tables(torch.arange(4096), 8, 500.0)
    assert torch.equal(cos, all_cos[rows]) and torch.equal(sin, all_sin[rows])


def test_attention_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = torch.from_numpy(rng.standard_normal((2, 1, 1, 1, 16)))
    cos, sin = M.rope_tables(torch.arange(64), 16, 10000.0)
    turned_q = M.apply_rope(q.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
    turned_k = M.apply_rope(k.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-5
        )  # fp32 angles up to 64
    assert abs(scores[0, 0] - (q * k).sum()) < 1e-12


def test_rms_norm_casts_before_it_multiplies():
    norm = M.RMSNorm(4, 1e-6).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(0.7)
    x = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16)
    assert norm(x).tolist() == [0.361328125, 0.361328125, 0.72265625, 1.078125]


def test_loss_is_the_mean_over_targets_that_count():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 5)))
    targets = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    z = logits.numpy()
    rows = [(0, 0, 1), (0, 2, 4), (1, 2, 0)]
    expected = np.mean([np.log(np.exp(z[b, t]).sum()) - z[b, t, v] for b, t, v in rows])
    assert abs(M.cross_entropy(logits, targets).item() - expected) < 1e-12


def test_gradcheck_embedding_with_repeated_ids():
    ids = torch.tensor([[3, 0, 3], [3, 1, 0]])
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3)))
    embedding = torch.nn.Embedding.from_pretrained(table, freeze=False)

    def lookup(weight):
        return torch.func.functional_call(embedding, {"weight": weight}, (ids,))

    assert gradcheck(lookup, table.requires_grad_())


def test_gradcheck_parts():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).requires_grad_()

    cos, sin = (table.double() for table in M.rope_tables(torch.arange(3), 4, 10.0))
    assert gradcheck(lambda x: M.split_heads(x, 4), draw(2, 3, 8))
    assert gradcheck(M.merge_heads, draw(2, 2, 3, 4))
    assert gradcheck(lambda x: M.apply_rope(x, cos, sin), draw(1, 3, 2, 4))
    assert gradcheck(
        lambda x, w: torch.func.functional_call(M.RMSNorm(5, 1e-6), {"weight": w}, (x,)),
        (draw(2, 5), draw(5)),
    )
    targets = torch.tensor([[0, -100, 3]])
    assert gradcheck(lambda logits: M.cross_entropy(logits, targets), draw(1, 3, 4))


def test_split_and_merge_are_inverse_and_keep_order():
    x = torch.arange(24.0).reshape(1, 2, 12)
    heads = M.split_heads(x, 4)
    assert heads.shape == (1, 2, 3, 4) and heads[0, 1, 2].tolist() == [20, 21, 22, 23]
    merged = M.merge_heads(heads.transpose(1, 2))
    assert torch.equal(merged, x) and merged.data_ptr() == x.data_ptr()  # no copy either way


# --- parity with transformers' Llama holding the same weights, transposed -------------------------


CASES = {
    "tiny": dict(),
    "grouped heads": dict(n_heads=4, n_kv_heads=2, head_dim=8),
    "another rope base and eps": dict(rope_base=500000.0, norm_eps=1e-5),
    "head_dim apart from dim / n_heads": dict(head_dim=24),
}


def llama_like(config: Config):
    transformers = pytest.importorskip("transformers")
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
