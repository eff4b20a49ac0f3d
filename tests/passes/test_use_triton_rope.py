"""use_triton_rope: rotate-half, interleaved and partial rotations as models spell them."""

from __future__ import annotations

import pytest
import torch
from harness import calls
from swapping import assert_left_alone, assert_swapped, c_of, run
from torch.utils.checkpoint import checkpoint

from xtrain.passes.swaps.use_triton_rope import use_triton_rope as swap

B, N, M, T, H = 2, 4, 2, 6, 8
POSITIONS = torch.arange(T)
DTYPES = [torch.float32, torch.bfloat16]


def angles_like(x, width):
    """[T, width / 2], in the dtype of arithmetic on x."""
    c = c_of(x)
    frequencies = 100.0 ** -(torch.arange(0, width, 2).to(c) / width)
    return torch.arange(T).to(c)[:, None] * frequencies


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def tables(x, width=None):
    f = angles_like(x, width or x.shape[-1])
    emb = torch.cat((f, f), dim=-1)
    return emb.cos(), emb.sin()


def half_tables(x):
    f = angles_like(x, H)
    return f.cos(), f.sin()


def hugging_face(q, k):
    """[B, N, T, H]; tables [1, T, H], unsqueezed over heads."""
    cos, sin = (t[None].to(q.dtype if q.dtype == torch.float64 else torch.float32) for t in
                tables(q))  # fmt: skip
    cos, sin = (cos * 1.0).unsqueeze(1), (sin * 1.0).unsqueeze(1)
    return (
        ((q * cos) + (rotate_half(q) * sin)).to(q.dtype),
        ((k * cos) + (rotate_half(k) * sin)).to(k.dtype),
    )


def operands_swapped(q, k):
    cos, sin = tables(q)
    return tuple((sin * rotate_half(x) + cos * x).type_as(x) for x in (q, k))


def in_parts(q, k):
    """Our own: [B, T, N, H] with tables [T, 1, H / 2]."""

    def turn(x, cos, sin):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    cos, sin = half_tables(q)
    return turn(q.transpose(1, 2), cos, sin), turn(k.transpose(1, 2), cos, sin)


def turned_back(q, k):
    """The sign of some nanoGPT descendants: y2 = x1 * (-sin) + x2 * cos."""

    def turn(x, cos, sin):
        a, b = x.split(H // 2, dim=3)
        return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), 3).to(x.dtype)

    cos, sin = half_tables(q)
    return turn(q, cos, sin), turn(k, cos, sin)


def nanochats(q, k):
    """rotate(x) = cat(x2, -x1): turned back."""
    cos, sin = tables(q)
    return tuple(
        (x * cos + torch.cat((x[..., H // 2 :], -x[..., : H // 2]), dim=-1) * sin).type_as(x)
        for x in (q, k)
    )


def complex_table(x, width=None):
    f = angles_like(x, width or x.shape[-1])
    return torch.polar(torch.ones_like(f), f)


def llama_4(q, k):
    """Complex numbers, tokens first; a scale on the table."""
    freqs = (complex_table(q) * 1.5).unsqueeze(0)
    xs = q.transpose(1, 2), k.transpose(1, 2)
    numbers = [torch.view_as_complex(x.to(c_of(x)).reshape(*x.shape[:-1], -1, 2)) for x in xs]
    turned = [torch.view_as_real(n * freqs[:, :, None, :]).flatten(3) for n in numbers]
    return turned[0].type_as(q), turned[1].type_as(k)


def llama_1(q, k):
    """As Llama was first published, heads first; one view of the table for both."""
    freqs = complex_table(q).view(1, 1, T, H // 2)

    def turn(x):
        numbers = torch.view_as_complex(x.to(c_of(x)).unflatten(-1, (-1, 2)))
        return torch.view_as_real(freqs * numbers).flatten(-2).type_as(x)

    return turn(q), turn(k)


def complex_in_part(q, k):
    """DeepSeek's: the last columns alone turn."""
    freqs = complex_table(q, H // 2)[None, None]
    (q, q_pe), (k, k_pe) = (x.split(H // 2, dim=-1) for x in (q, k))

    def turn(x):
        numbers = torch.view_as_complex(x.to(c_of(x)).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * freqs).flatten(3).type_as(x)

    q_pe, k_pe = turn(q_pe), turn(k_pe)
    return torch.cat((q, q_pe), dim=-1), torch.cat((k, k_pe), dim=-1)


def interleaved(q, k):
    """GPT-J: every two, tables repeated."""
    f = angles_like(q, H)
    cos, sin = (t.repeat_interleave(2, dim=-1)[None, None] for t in (f.cos(), f.sin()))
    return tuple((x * cos + rotate_every_two(x) * sin).to(x.dtype) for x in (q, k))


def interleaved_in_parts(q, k):
    """Llama's own code without complex numbers."""

    def turn(x, cos, sin):
        a, b = x.to(c_of(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(3).type_as(x)

    cos, sin = half_tables(q)
    return turn(q, cos, sin), turn(k, cos, sin)


def partial(q, k):
    """GPT-NeoX, Phi: the first half of a head turns, the rest passes."""
    R = H // 2
    cos, sin = tables(q, R)

    def turn(x):
        turning, passing = x[..., :R], x[..., R:]
        turned = (turning * cos + rotate_half(turning) * sin).to(x.dtype)
        return torch.cat((turned, passing), dim=-1)

    return turn(q), turn(k)


ALL = [hugging_face, operands_swapped, in_parts, turned_back, interleaved, interleaved_in_parts]
ALL += [partial, nanochats, llama_4, llama_1, complex_in_part]
COMPLEX = (llama_4, llama_1, complex_in_part)


def q_and_k(dtype=torch.float32, **shape):
    return torch.randn(B, N, T, H).to(dtype), torch.randn(B, M, T, H).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotation", ALL)
def test_queries_and_keys_turn_in_one_call(rotation, dtype):
    module = assert_swapped(swap, rotation, *q_and_k(dtype), count=2)
    (call,) = calls(module, "rope_qk")
    by_twos = rotation in (interleaved, interleaved_in_parts, *COMPLEX)
    assert call.args[4] == ("interleaved" if by_twos else "half")
    R = H // 2 if rotation in (partial, complex_in_part) else H
    assert call.args[2].meta["example_value"].shape == (T, R // 2)
    assert call.args[0].meta["example_value"].dtype == dtype
    has_others = rotation in (hugging_face, operands_swapped, partial, nanochats, complex_in_part)
    assert not calls(module, "cat") or has_others
    assert not calls(module, "view_as_complex")


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: x.tile(2),
        lambda x: torch.tile(x, dims=(1, 2)),
        lambda x: x[None].repeat(1, 1, 2),
        lambda x: x.repeat([1, 2]),
    ],
    ids=["tile", "tile by name", "repeat", "repeat by list"],
)
def test_tables_made_by_tile_and_repeat(twice):
    """Vision models' (DINOv3, V-JEPA): both halves of the angles are one tensor, laid out twice."""

    def rotation(q, k):
        angles = twice(angles_like(q, H))
        cos, sin = angles.cos(), angles.sin()
        return tuple((x * cos + rotate_half(x) * sin).to(x.dtype) for x in (q, k))

    module = assert_swapped(swap, rotation, *q_and_k(), count=2)
    (call,) = calls(module, "rope_qk")
    assert call.args[2].meta["example_value"].shape == (T, H // 2)


def test_known_values():
    """Row C21: position 1, angle 1 for pair 0."""

    def first_columns(rotation):
        q = torch.zeros(1, 1, T, H)
        q[0, 0, 1, 0] = 1.0
        module = assert_swapped(swap, rotation, q, q.clone(), count=2)
        return run(module, q, q)[0][0, 0, 1]

    half, every_two = first_columns(hugging_face), first_columns(interleaved)
    assert half[[0, 1, H // 2]].tolist() == pytest.approx([0.540302, 0, 0.841471], abs=1e-6)
    assert every_two[:3].tolist() == pytest.approx([0.540302, 0.841471, 0], abs=1e-6)


def test_one_rotation_alone_and_different_tables():
    def only_q(q, k):
        cos, sin = tables(q)
        return q * cos + rotate_half(q) * sin, 2 * k

    module = assert_swapped(swap, only_q, *q_and_k())
    assert len(calls(module, "rope")) == 1 and not calls(module, "rope_qk")

    def own_angles(q, k):
        (cos, sin), (other_cos, other_sin) = tables(q), tables(k)
        return q * cos + rotate_half(q) * sin, k * other_cos + rotate_half(k) * other_sin

    module = assert_swapped(swap, own_angles, *q_and_k(), count=2)
    assert len(calls(module, "rope")) == 2


def test_wide_results_stay_wide_unless_attention_rounds_them():
    """Under autocast q is bf16 and q * cos fp32; attention reads it as bf16, a sum would not."""

    def scores(q, k, rounding):
        q, k = q.bfloat16() if rounding else q, k.bfloat16() if rounding else k
        cos, sin = (t.float() for t in tables(q))
        return [x * cos + rotate_half(x) * sin for x in (q, k.repeat_interleave(2, 1))]

    def attention(q, k):
        wide = scores(q, k, q.dtype != torch.float64)
        return torch.nn.functional.scaled_dot_product_attention(*wide, wide[1])

    module = assert_swapped(swap, attention, *q_and_k(), count=2, autocast=True)
    (call,) = calls(module, "rope_qk")
    assert call.args[0].meta["example_value"].dtype == torch.bfloat16

    def summed(q, k):
        return sum(scores(q, k, q.dtype != torch.float64))

    module = assert_swapped(swap, summed, *q_and_k(), count=2, autocast=True)
    (call,) = calls(module, "rope_qk")
    assert call.args[0].meta["example_value"].dtype == torch.float32


def test_tables_reach_a_checkpointed_block_from_outside():
    def block(q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    def model(q, k):
        cos, sin = (t[None] for t in tables(q))
        q, k = checkpoint(block, q, k, cos, sin, use_reentrant=False)
        return checkpoint(block, q, k, cos, sin, use_reentrant=False)

    module = assert_swapped(swap, model, *q_and_k(), count=4)
    assert len(calls(module, "rope_qk")) == 2


# --- what must stay -----------------------------------------------------------------------------


def unproved_tables(q, k):
    cos, sin = torch.randn(T, H), torch.randn(T, H)
    return q * cos + rotate_half(q) * sin


def pairs_of_unequal_angles(q, k):
    f = angles_like(q, H)
    emb = torch.cat((f, 2 * f), dim=-1)
    return q * emb.cos() + rotate_half(q) * emb.sin()


def tokens_laid_out_twice(q, k):
    angles = torch.randn(T // 2, H).repeat(2, 1)
    return q * angles.cos() + rotate_half(q) * angles.sin()


def tables_by_head(q, k):
    cos, sin = (t.expand(B, N, T, H // 2) for t in half_tables(q))
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def three_dims(q, k):
    x, (cos, sin) = q[0], tables(q)
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize(
    ("rotation", "reason"),
    [
        (unproved_tables, "nothing shows that cos gives both members of a pair one angle"),
        (pairs_of_unequal_angles, "nothing shows that cos"),
        (tokens_laid_out_twice, "nothing shows that cos"),
        (tables_by_head, "do not tell heads from tokens"),
        (three_dims, "x is not"),
    ],
)
def test_what_is_refused_with_its_reason(rotation, reason):
    assert_left_alone(swap, rotation, *q_and_k(), reason=reason)


def test_tables_from_outside_are_refused_as_such():
    def given(q, cos, sin):
        return q * cos[None].float() + rotate_half(q) * sin[None].float()

    cos, sin = (f(torch.randn(T, H // 2).repeat(1, 2)) for f in (torch.cos, torch.sin))
    reason = "one angle: it is made outside of this graph"
    assert_left_alone(swap, given, q_and_k()[0], cos, sin, reason=reason)
    with pytest.raises(AssertionError):
        assert_left_alone(swap, unproved_tables, *q_and_k(), reason="made outside of this graph")


def test_learnt_angles_keep_their_gradient():
    f = torch.randn(T, H // 2, requires_grad=True)

    def learnt(q, f):
        cos, sin = f.cos(), f.sin()
        a, b = q.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    assert_left_alone(swap, learnt, q_and_k()[0], f, reason="its angles are learnt")


def other_sign(q, k):
    """A reflection, no rotation."""
    cos, sin = tables(q)
    return q * cos + torch.cat((q[..., H // 2 :], q[..., : H // 2]), -1) * sin


def both_plus(q, k):
    cos, sin = half_tables(q)
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def other_value_turned(q, k):
    cos, sin = tables(q)
    return q * cos + rotate_half(q + 1) * sin


def cut_at_a_third(q, k):
    cos, sin = tables(q)
    return q * cos + torch.cat((-q[..., 3:], q[..., :3]), -1) * sin


def complex_without_pairs(q, k):
    """Complex numbers of columns half a head apart, as no op of ours pairs them."""
    x = torch.complex(q[..., : H // 2], q[..., H // 2 :])
    return torch.view_as_real(x * complex_table(q)).flatten(-2)


def conjugated(q, k):
    x = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x.conj() * complex_table(q)).flatten(-2)


def complex_scale(q, k):
    """The pairs are not put back into a head."""
    x = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x * complex_table(q)).sum(-1)


@pytest.mark.parametrize("function", [complex_without_pairs, conjugated, complex_scale])
def test_other_complex_products_are_no_match(function):
    assert_left_alone(swap, function, *q_and_k())


def test_learnt_complex_angles_keep_their_gradient():
    f = torch.randn(T, H // 2, requires_grad=True)

    def learnt(q, f):
        x = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
        return torch.view_as_real(x * torch.polar(torch.ones_like(f), f)).flatten(-2)

    assert_left_alone(swap, learnt, q_and_k()[0], f, reason="its angles are learnt")


@pytest.mark.parametrize("function", [other_sign, both_plus, other_value_turned, cut_at_a_third])
def test_look_alikes_are_no_match(function):
    assert_left_alone(swap, function, *q_and_k())
