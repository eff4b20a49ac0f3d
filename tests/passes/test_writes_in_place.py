"""Writes in place: a swap where they are over before a value is read, else a refusal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, graph_of, run_swap
from torch.utils.checkpoint import checkpoint

from xtrain.passes.use_triton_rms_norm import use_triton_rms_norm
from xtrain.passes.use_triton_rope import use_triton_rope
from xtrain.passes.use_triton_sdpa import use_triton_sdpa

B, N, M, T, H = 2, 4, 2, 6, 8
attend = F.scaled_dot_product_attention


def heads(dtype=torch.float32, kv=N):
    return tuple(torch.randn(B, n, T, H).to(dtype) for n in (N, kv, kv))


# --- what attention reads -----------------------------------------------------------------------


def buffer(q, k, v):
    """Latent attention: keys of two parts are copied into a fresh tensor."""
    keys = k.new_empty(B, N, T, H)
    keys[..., :6].copy_(k[..., :6])
    keys[..., 6:].copy_(k[..., :1, :, 6:].expand(-1, N, -1, -1))
    return attend(q, keys, v, is_causal=True)


def buffer_by_index(q, k, v):
    keys = torch.zeros_like(k)
    keys[..., :6] = k[..., :6]
    keys[..., 6:] = 2 * k[..., 6:]
    return attend(q, keys, v, is_causal=True)


def clipped(q, k, v):
    q, k, v = 3 * q, 3 * k, 3 * v
    q.clamp_(min=-1, max=1)
    k.clamp_(min=-1, max=1)
    v.clamp_(min=-1, max=1)
    return attend(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [buffer, buffer_by_index, clipped])
def test_attention_reads_what_was_written_before(attention, dtype):
    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads(dtype)), "sdpa")
    assert call.args[4] is True


@pytest.mark.parametrize("writes_before", [True, False])
def test_heads_that_are_written_behind_their_repeat_are_read_repeated(writes_before):
    def attention(q, k, v):
        k = 2 * k
        if writes_before:
            k.mul_(3)
        wide = k[:, :, None].expand(B, M, 2, T, H).reshape(B, N, T, H)
        if not writes_before:
            k.mul_(3)
        return attend(q, wide, v.repeat_interleave(2, 1)), k

    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads(kv=M)), "sdpa")
    assert call.args[1].meta["example_value"].shape[1] == (M if writes_before else N)


# --- masks ------------------------------------------------------------------------------------


def by_triu(q, k, v):
    return attend(q, k, v, torch.full((T, T), -math.inf).triu_(1).to(q.dtype))


def by_or(q, k, v):
    i = torch.arange(T)
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask |= i[None, :] <= i[:, None]
    return attend(q, k, v, mask)


def by_fill(q, k, v):
    i = torch.arange(T)
    mask = torch.full((T, T), -math.inf)
    mask.masked_fill_(i[None, :] <= i[:, None], 0.0)
    return attend(q, k, v, mask[None, None].to(q.dtype))


def outside_a_body(q, k, v):
    def block(q, k, v, mask):
        return attend(q, k, v, mask[None])

    mask = torch.ones(T, T, dtype=torch.bool)
    mask.tril_()
    return checkpoint(block, q, k, v, mask[None], use_reentrant=False)


@pytest.mark.parametrize("attention", [by_triu, by_or, by_fill, outside_a_body])
def test_a_mask_that_is_made_in_place_is_proved(attention):
    (call,) = calls(assert_swapped(use_triton_sdpa, attention, *heads()), "sdpa")
    assert call.args[4] is True


def hole(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3, 1] = False
    return attend(q, k, v, mask[None, None])


def written_behind_a_body(q, k, v):
    def block(q, k, v, mask):
        return attend(q, k, v, mask)

    mask = torch.ones(T, T, dtype=torch.bool)
    first = checkpoint(block, q, k, v, mask, use_reentrant=False)
    mask.tril_()
    return first + q * mask.sum()


def hole_in_itself(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3, 1] = False
    return attend(q, k, v, mask)


def filled_from_an_input(q, k, v):
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[3] = q[0, 0, :, 0].detach()[:T] > 0
    return attend(q, k, v, mask[None, None])


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (hole, "its mask is neither causal nor a sliding window"),
        (written_behind_a_body, "its mask is written in place"),
        (hole_in_itself, "its mask is written in place"),
        (filled_from_an_input, "its mask depends on an input"),
    ],
)
def test_a_write_into_a_mask_is_no_secret(attention, reason):
    assert_left_alone(use_triton_sdpa, attention, *heads(), reason=reason)


# --- patterns of several ops ----------------------------------------------------------------------


def rotate(x, late=lambda x: None):
    angles = torch.arange(T)[:, None] / 10.0 ** torch.arange(H // 2)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    straight = x * cos
    late(x)
    return straight + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin


def clip(x):
    x.clamp_(min=-1, max=1)


def test_a_rotation_of_values_that_were_clipped_before_is_swapped():
    def model(x):
        x = (3 * x).view(B, T, N, H)
        clip(x)
        return rotate(x.transpose(1, 2))

    assert_swapped(use_triton_rope, model, torch.randn(B, T, N * H))


def test_a_write_between_the_reads_of_a_rotation_is_refused():
    def model(x):
        return rotate(3 * x, clip)

    module = graph_of(model, torch.randn(B, N, T, H))
    result = run_swap(module, use_triton_rope)
    assert result.num_replaced == 0
    assert result.skipped == {"an op writes in place into what it reads": 1}


def norm(x, weight, late=lambda x: None):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    late(x)
    return x * rstd * weight


def test_norms_of_what_is_written_before_and_between():
    def before(x, weight):
        x = 3 * x
        clip(x)
        return norm(x.view(B, T, N * H), weight)

    def between(x, weight):
        return norm((3 * x).view(B, T, N * H), weight, clip)

    inputs = torch.randn(B, T, N, H), torch.randn(N * H)
    assert_swapped(use_triton_rms_norm, before, *inputs)
    result = run_swap(graph_of(between, *inputs), use_triton_rms_norm)
    assert result.num_replaced == 0
    assert result.skipped == {"an op writes in place into what it reads": 1}
