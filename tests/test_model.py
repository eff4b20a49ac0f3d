"""The whole model: initialisation, training, autocast, recompute, tracing."""

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


@pytest.mark.parametrize("recompute", ["none", "full", 1])
@pytest.mark.parametrize("autocast", [False, True])
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
