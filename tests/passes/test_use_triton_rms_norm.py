"""use_triton_rms_norm: every order of casts and spelling, and the look-alikes that must stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, c_of, graph_of, run, run_swap

from xtrain.passes.graph import clone_graph
from xtrain.passes.swaps.use_triton_rms_norm import use_triton_rms_norm as swap

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def x_of(dtype=torch.float32, shape=(2, 5, 8)):
    return torch.randn(shape).to(dtype)


def weight_of(dtype=torch.float32, size=8):
    return (1 + torch.randn(size) / 4).to(dtype)


def llama(x, w):
    c = x.to(c_of(x))
    n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return w * n.to(x.dtype)


def llama_weight_last(x, w):
    c = x.to(c_of(x))
    n = torch.rsqrt((c * c).mean(-1, keepdim=True) + EPS) * c
    return n.type_as(x) * w


def t5(x, w):
    """The quotient reads x itself: promotion to fp32 does what the cast does."""
    variance = x.to(c_of(x)).square().mean(dim=[2], keepdim=True)
    n = x * torch.rsqrt(EPS + variance)
    return w * n.to(x.dtype)


def by_division(x, w):
    c = x.to(c_of(x))
    n = c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return n.to(x.dtype) * w


def by_power(x, w):
    c = x.to(c_of(x))
    n = c * torch.pow(c.pow(2).mean(-1, keepdim=True) + EPS, -0.5)
    return n.to(x.dtype) * w


def by_reciprocal(x, w):
    c = x.to(c_of(x))
    n = c * (1.0 / torch.sqrt(c.pow(2).mean(-1, True) + EPS))
    return n.to(x.dtype) * w


def gemma(x, w):
    c = x.to(c_of(x))
    n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return (n * (1.0 + w.to(c_of(x)))).type_as(x)


def olmo2(x, w):
    c = x.to(c_of(x))
    n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return (w * n).to(x.dtype)


def functional(x, w):
    return F.rms_norm(x, (8,), w, EPS)


def functional_default_eps(x, w):
    return F.rms_norm(x, [8], w)


ORDERS = [
    *(llama, llama_weight_last, t5, by_division, by_power, by_reciprocal),
    *(gemma, olmo2, functional),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ORDERS)
def test_every_order_and_spelling(norm, dtype):
    module = assert_swapped(swap, norm, x_of(dtype), weight_of(dtype))
    (call,) = calls(module, "rms_norm")
    assert call.args[2] == EPS
    assert call.args[3] == ("gemma" if norm is gemma else "llama")


def test_values_of_the_cast_orders_in_bf16():
    """Row C18: fp32 multiply and bf16 multiply differ in the last element."""
    x = torch.tensor([[1.0, 1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    w = torch.full((4,), 0.7, dtype=torch.bfloat16)
    cast_first = [0.361328125, 0.361328125, 0.72265625, 1.078125]
    for norm, expected in (
        (llama, cast_first),
        (olmo2, [0.361328125] * 2 + [0.72265625, 1.0859375]),
    ):
        module = graph_of(norm, x, w)
        assert run_swap(module, swap).num_replaced == 1
        assert run(module, x, w)[0].tolist() == [expected]
    small = torch.full((4,), 0.00390625, dtype=torch.bfloat16)  # 1 + w needs more than 8 bits
    module = graph_of(gemma, x, small)
    assert run_swap(module, swap).num_replaced == 1
    assert torch.equal(run(module, x, small)[0], gemma(x, small))
    assert not torch.equal(run(module, x, small)[0], gemma(x, torch.zeros_like(small)))


def test_mixed_dtypes():
    """A bf16 stream with fp32 weights, and the other way round."""
    assert_swapped(swap, llama, x_of(torch.bfloat16), weight_of())
    assert_swapped(swap, llama, x_of(), weight_of(torch.bfloat16))
    assert_swapped(swap, gemma, x_of(torch.bfloat16), weight_of())
    assert_swapped(swap, olmo2, x_of(), weight_of(torch.bfloat16))


def test_functional_with_torchs_default_eps():
    for dtype in DTYPES:
        module = assert_swapped(swap, functional_default_eps, x_of(dtype), weight_of(dtype))
        assert calls(module, "rms_norm")[0].args[2] == torch.finfo(torch.float32).eps


def test_under_autocast_the_result_is_rounded_as_its_readers_round_it():
    def block(x, w, a, b):
        y = llama(x, w)
        return F.linear(y, a), y @ b

    matrices = torch.randn(8, 8) / 3, torch.randn(8, 8) / 3
    module = assert_swapped(swap, block, x_of(), weight_of(), *matrices, autocast=True)
    (call,) = calls(module, "rms_norm")
    assert call.kwargs["out_dtype"] == torch.bfloat16

    def read_whole(x, w, a):
        y = llama(x, w)
        return F.linear(y, a), y

    module = assert_swapped(swap, read_whole, x_of(), weight_of(), matrices[0], autocast=True)
    assert "out_dtype" not in calls(module, "rms_norm")[0].kwargs


def test_first_final_and_head_norms_of_one_graph():
    def model(x, w1, w2, a):
        heads = llama(x, w1).unflatten(-1, (2, 4))
        y = gemma(heads, w2).flatten(-2) @ a
        return olmo2(x + y, w1)

    args = x_of(), weight_of(), weight_of(size=4), torch.randn(8, 8) / 3
    module = assert_swapped(swap, model, *args, count=3)
    assert not calls(module, "rsqrt") and not calls(module, "mean")


# --- no weight ----------------------------------------------------------------------------------


def bare(x, w):
    """A stream without norm weights, that a product reads which is no weight's."""
    c = x.to(c_of(x))
    n = (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return n * w[:5].unsqueeze(-1) + n


def bare_and_wide(x, w):
    """The result stays in the dtype of the statistics."""
    c = x.to(c_of(x))
    return c / torch.sqrt(c.square().mean(-1, keepdim=True) + EPS) + w


def bare_functional(x, w):
    return F.rms_norm(x, (8,), None, EPS) + w


def read_again_beside_its_weight(x, w):
    c = x.to(c_of(x))
    n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return n * w, n.sum()


def squared(x, w):
    c = x.to(c_of(x))
    n = (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return n * n + w


BARE = [bare, bare_and_wide, bare_functional, read_again_beside_its_weight, squared]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", BARE)
def test_without_weight(norm, dtype):
    """The weight is ones: it rounds nothing, and its gradient goes nowhere."""
    module = assert_swapped(swap, norm, x_of(dtype), weight_of(dtype))
    (call,) = calls(module, "rms_norm")
    weight = call.args[1]
    assert weight.target is torch.ops.aten.full.default and weight.args == ([8], 1.0)
    values = [n.meta["example_value"] for n in (call.args[0], weight)]
    assert values[0].dtype == values[1].dtype and not values[1].requires_grad
    assert not calls(module, "rsqrt") and not calls(module, "mean")


def test_a_rounding_before_the_statistics_stays():
    """Llama 4's norm of queries that a rotation in fp32 was rounded from: x is what was rounded."""

    def norm(x, w):
        rounded = (x * 3).to(torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
        c = rounded.to(c_of(x))
        return (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)).type_as(rounded) + w

    module = assert_swapped(swap, norm, x_of(), weight_of())
    (call,) = calls(module, "rms_norm")
    assert call.args[0].meta["example_value"].dtype == torch.bfloat16


def test_norms_without_weight_share_their_ones():
    def model(x, w, a):
        h = x + F.rms_norm(x, (8,), None, EPS) @ a
        heads = F.rms_norm((h @ a).unflatten(-1, (2, 4)), (4,), None, EPS).flatten(-2)
        return F.rms_norm(h + heads, (8,), None, EPS) * w

    args = x_of(), weight_of(), torch.randn(8, 8) / 3
    module = assert_swapped(swap, model, *args, count=3)
    assert [n.args[0] for n in calls(module, "full")] in ([[8], [4]], [[4], [8]])


def test_a_symbolic_width_needs_a_weight():
    compiled = []

    def backend(module, inputs):
        module = clone_graph(module)
        compiled.append(run_swap(module, swap))
        return module

    x = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(x, 1)
    function = torch.compile(lambda x: x / (x.pow(2).mean(-1, True) + EPS).sqrt(), backend=backend)
    torch.testing.assert_close(function(x), F.rms_norm(x, (8,), None, EPS))
    assert compiled[0].skipped == {"it has no weight, and a symbolic number of columns": 1}


# --- what must stay -----------------------------------------------------------------------------


def half_statistics(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def half_rstd(x, w):
    c = x.float()
    return x * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS).to(x.dtype) * w


def other_cast(x, w):
    c = x.float()
    n = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return n.half() * w


def layer_norm_spelt_out(x, w):
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS) * w


def written_in_place(x, w):
    n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    y = n * w
    x.add_(1)
    return y


def functional_over_two_dims(x, w):
    return F.rms_norm(x, (5, 8), w.expand(5, 8), EPS)


@pytest.mark.parametrize(
    ("norm", "dtype", "reason"),
    [
        (half_statistics, torch.bfloat16, "the mean square is formed in bfloat16"),
        (half_rstd, torch.bfloat16, "1 / rms is rounded to bfloat16"),
        (other_cast, torch.float32, "x / rms is rounded to float16"),
        (layer_norm_spelt_out, torch.float32, "layer norm"),
        (written_in_place, torch.float32, "writes in place"),
        (functional_over_two_dims, torch.float32, "several dims"),
    ],
)
def test_what_is_refused_with_its_reason(norm, dtype, reason):
    assert_left_alone(swap, norm, x_of(dtype), weight_of(dtype), reason=reason)


def eps_outside(x, w):
    return x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + EPS) * w


def eps_inside_the_mean(x, w):
    return x * torch.rsqrt((x.pow(2) + EPS).mean(-1, keepdim=True)) * w


def of_another_value(x, w):
    return w * x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + EPS)


def over_rows(x, w):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * w


def mean_of_cubes(x, w):
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS) * w


def layer_norm(x, w):
    return F.layer_norm(x, (8,), w, None, EPS)


def batch_scale(x, w):
    return x * torch.rsqrt(w.pow(2) + EPS)


@pytest.mark.parametrize(
    "norm",
    [
        *(eps_outside, eps_inside_the_mean, of_another_value, over_rows, mean_of_cubes),
        *(layer_norm, batch_scale),
    ],
)
def test_look_alikes_are_no_match(norm):
    assert_left_alone(swap, norm, x_of(), weight_of())
