"""use_triton_sdpa: constant masks proved, repeated heads taken out, and what must stay torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, graph_of, run, run_swap
from torch.utils.checkpoint import checkpoint

from xtrain.passes.swaps.use_triton_sdpa import use_triton_sdpa as swap

B, N, M, T, H = 2, 4, 2, 6, 8
attend = F.scaled_dot_product_attention


def heads(dtype=torch.float32, kv=M, S=T):
    return tuple(torch.randn(B, n, t, H).to(dtype) for n, t in ((N, T), (kv, S), (kv, S)))


def repeat_kv(x, G=N // M):
    return x[:, :, None, :, :].expand(B, M, G, x.shape[2], H).reshape(B, M * G, x.shape[2], H)


def options_of(module):
    """(KV heads, causal, scale, window) of the one call."""
    (call,) = calls(module, "sdpa")
    _, k, _, mask, causal, scale, window, softcap = call.args
    assert mask is None and softcap is None
    return k.meta["example_value"].shape[1], causal, scale, window


def causal_flag(q, k, v):
    return attend(q, repeat_kv(k), repeat_kv(v), is_causal=True)


def grouped(q, k, v):
    return attend(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)


def interleaved_repeat(q, k, v):
    return attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, 1))


def bool_mask(q, k, v):
    i = torch.arange(T)
    return attend(q, k, v, (i[None, :] <= i[:, None])[None, None], enable_gqa=True)


def hugging_face_mask(q, k, v):
    """Indices, new_ones and expand, as transformers builds it."""
    i, j = torch.arange(T)[None, None, :, None], torch.arange(T)[None, None, None, :]
    mask = i.new_ones((), dtype=torch.bool) & (j <= i).to(q.device)
    return attend(q, repeat_kv(k), repeat_kv(v), attn_mask=mask.expand(B, -1, T, T), dropout_p=0.0)


def additive_mask(q, k, v):
    mask = torch.full((T, T), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return attend(q, k, v, mask, enable_gqa=True)


def sliding_mask(q, k, v):
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    return attend(q, k, v, (j <= i) & (j > i - 3), enable_gqa=True)


def open_mask(q, k, v):
    return attend(q, k, v, torch.ones(T, T, dtype=torch.bool), enable_gqa=True)


DEFAULT = H**-0.5
CASES = {
    causal_flag: (M, True, DEFAULT, None),
    grouped: (M, True, 0.3, None),
    interleaved_repeat: (M, False, DEFAULT, None),
    bool_mask: (M, True, DEFAULT, None),
    hugging_face_mask: (M, True, DEFAULT, None),
    additive_mask: (M, True, DEFAULT, None),
    sliding_mask: (M, True, DEFAULT, 3),
    open_mask: (M, False, DEFAULT, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", CASES)
def test_every_spelling(attention, dtype):
    module = assert_swapped(swap, attention, *heads(dtype))
    assert options_of(module) == CASES[attention]
    assert not calls(module, "scaled_dot_product_attention")


def test_query_heads_keep_their_key_heads():
    """Row C32: v of KV head j is j, so the output heads are 0, 0, 1, 1."""
    q, k = torch.randn(B, N, T, H), torch.randn(B, M, T, H)
    v = torch.arange(M).float()[None, :, None, None].expand(B, M, T, H).contiguous()
    module = graph_of(causal_flag, q, k, v)
    assert run_swap(module, swap).num_replaced == 1
    out = run(module, q, k, v)[0]
    assert torch.allclose(out[0, :, -1, 0], torch.tensor([0.0, 0, 1, 1]), atol=1e-6)


def test_unequal_lengths_align_at_the_bottom_right():
    def last_queries(q, k, v):
        i, j = torch.arange(T)[:, None] + 3, torch.arange(T + 3)[None, :]
        return attend(q, k, v, j <= i)

    assert options_of(assert_swapped(swap, last_queries, *heads(kv=N, S=T + 3)))[1] is True


def test_under_autocast_the_inputs_are_cast_as_torch_casts_them():
    def mixed(q, k, v):
        k = k if k.dtype == torch.float64 else k.bfloat16()
        return attend(q, k, v, is_causal=True)

    module = assert_swapped(swap, mixed, *heads(kv=N), autocast=True)
    (call,) = calls(module, "sdpa")
    assert {n.meta["example_value"].dtype for n in call.args[:3]} == {torch.bfloat16}


def test_a_mask_reaches_a_checkpointed_block_from_outside_and_is_computed_once(monkeypatch):
    from xtrain.passes.swaps import use_triton_sdpa as pass_file

    found = []
    real = pass_file.meaning_of
    monkeypatch.setattr(pass_file, "meaning_of", lambda m: found.append(m) or real(m))

    def block(q, k, v, mask):
        return attend(q, k, v, mask, enable_gqa=True)

    def model(q, k, v):
        i = torch.arange(T)
        mask = i[None, :] <= i[:, None]
        q = checkpoint(block, q, k, v, mask, use_reentrant=False)
        return checkpoint(block, q, k, v, mask, use_reentrant=False)

    module = graph_of(model, *heads())
    assert run_swap(module, swap).num_replaced == 2 and len(found) == 1
    assert [call.args[4] for call in calls(module, "sdpa")] == [True, True]


# --- what must stay -----------------------------------------------------------------------------


def drops_probabilities(q, k, v):
    return attend(q, k, v, dropout_p=0.1, enable_gqa=True)


def mask_from_an_input(q, k, v):
    return attend(q, k, v, q[0, 0, :, :T] > 0, enable_gqa=True)


def random_mask(q, k, v):
    return attend(q, k, v, torch.rand(T, T) > 0.5, enable_gqa=True)


def blind_row(q, k, v):
    i = torch.arange(T)
    return attend(q, k, v, i[None, :] < i[:, None], enable_gqa=True)


def mask_by_sample(q, k, v):
    i = torch.arange(T)
    mask = (i[None, :] <= i[:, None])[None] & (torch.arange(B)[:, None, None] >= 0)
    mask = mask | (torch.arange(B)[:, None, None] == 1)
    return attend(q, k, v, mask[:, None], enable_gqa=True)


def position_bias(q, k, v):
    i = torch.arange(T, dtype=q.dtype)
    return attend(q, k, v, -(i[:, None] - i[None, :]).abs(), enable_gqa=True)


def blocks_mask(q, k, v):
    i = torch.arange(T) // 3
    return attend(q, k, v, i[:, None] == i[None, :], enable_gqa=True)


def top_left(q, k, v):
    return attend(q[:, :, 2:], k, v, is_causal=True, enable_gqa=True)


def three_dims(q, k, v):
    return attend(q[0], k[0].repeat_interleave(2, 0), v[0].repeat_interleave(2, 0))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (drops_probabilities, "it drops attention probabilities"),
        (mask_from_an_input, "its mask depends on an input"),
        (random_mask, "its mask is random"),
        (blind_row, "its mask leaves a query nothing to see"),
        (mask_by_sample, "its mask differs between samples or heads"),
        (position_bias, "its mask adds other numbers than 0 and minus infinity"),
        (blocks_mask, "its mask is neither causal nor a sliding window"),
        (top_left, "it is causal with unequal lengths of queries and keys"),
        (three_dims, "q, k and v are not [batch, heads, tokens, head dim]"),
    ],
)
def test_what_is_refused_with_its_reason(attention, reason):
    assert_left_alone(swap, attention, *heads(), reason=reason)


def test_what_no_fused_kernel_takes_is_left_to_torch():
    def odd_values(q, k, v):
        return attend(q, k, v[..., :5])

    assert_left_alone(swap, odd_values, *heads(kv=N), reason="no fused kernel takes it")
