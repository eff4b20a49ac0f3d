"""The gated swaps: every way in which models write a gate, and what looks like one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, c_of, run

from xtrain.passes.swaps.use_triton_glu import use_triton_geglu, use_triton_swiglu

# for the random programs of test_fuzz_swaps.py, a line a step
FORMULAS = {
    "swiglu": """
        gate = F.silu(x)
        out = gate * y
    """,
    "swiglu_spelt_out": """
        gate = torch.sigmoid(x)
        gate = x * gate
        out = y * gate
    """,
    "swiglu_packed": """
        gate = x[..., : D // 2]
        up = x[..., D // 2 :]
        gate = F.silu(gate)
        out = gate * up
    """,
    "geglu_erf": """
        gate = F.gelu(x)
        out = gate * y
    """,
    "geglu_tanh": """
        gate = F.gelu(x, approximate="tanh")
        out = y * gate
    """,
    "geglu_spelt_out": """
        cube = x + 0.044715 * x**3
        bent = torch.tanh(math.sqrt(2 / math.pi) * cube)
        gate = 0.5 * x * (1 + bent)
        out = gate * y
    """,
}

D, H = 6, 10
K = math.sqrt(2 / math.pi)
SWAPS = {"swiglu": use_triton_swiglu, "geglu": use_triton_geglu}


def x_and_weights(dtype=torch.float32):
    return tuple(t.to(dtype) for t in (torch.randn(3, D), torch.randn(H, D), torch.randn(H, D)))


def gated_by(activation, up_first=False):
    """A gated layer of three matrices."""

    def gated(x, g, u):
        if up_first:
            return F.linear(x, u) * activation(F.linear(x, g))
        return activation(F.linear(x, g)) * F.linear(x, u)

    return gated


# --- activations: transformers' names for them, and other people's spellings --------------------


def silu_spelt_out(g):
    return g * torch.sigmoid(g)


def sigmoid_first(g):
    return g.sigmoid() * g


def gelu(g):
    return F.gelu(g)


def gelu_pytorch_tanh(g):
    return F.gelu(g, approximate="tanh")


def gelu_new(g):
    return (
        0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))))
    )


def gelu_fast(g):
    return 0.5 * g * (1.0 + torch.tanh(g * 0.7978845608 * (1.0 + 0.044715 * g * g)))


def gelu_python(g):
    return g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0)))


def distribution_function(g):
    cdf = (torch.tanh((g**3 * 0.044715 + g) * K) + 1) / 2
    return cdf * g


def halved_last(g):
    return (g * (1 + torch.erf(g * 0.5**0.5))) * 0.5


# activation -> its family and the further arguments of its op
ACTIVATIONS = {
    F.silu: ("swiglu", ()),
    silu_spelt_out: ("swiglu", ()),
    sigmoid_first: ("swiglu", ()),
    gelu: ("geglu", ("none",)),
    gelu_pytorch_tanh: ("geglu", ("tanh",)),
    gelu_new: ("geglu", ("tanh",)),
    gelu_fast: ("geglu", ("tanh",)),
    gelu_python: ("geglu", ("none",)),
    distribution_function: ("geglu", ("tanh",)),
    halved_last: ("geglu", ("none",)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_every_spelling_in_both_orders(activation, dtype):
    if dtype == torch.float16 and ACTIVATIONS[activation][0] == "swiglu":
        dtype = torch.float64
    family, options = ACTIVATIONS[activation]
    for up_first in (False, True):
        gated = gated_by(activation, up_first)
        module = assert_swapped(SWAPS[family], gated, *x_and_weights(dtype))
        (call,) = calls(module, family)
        assert call.args[2:] == options
        assert call.args[0].args[1].meta["example_value"].shape == (H, D)
        for left in ("silu", "sigmoid", "gelu", "tanh", "erf", "pow", "mul", "add"):
            assert not calls(module, left), left


def chunked(act, x, g, u):
    gate, up = F.linear(x, torch.cat((g, u))).chunk(2, dim=-1)
    return up * act(gate)


def split_up_first(act, x, g, u):
    up, gate = F.linear(x, torch.cat((u, g))).split(H, dim=1)
    return act(gate) * up


def sliced(act, x, g, u):
    both = F.linear(x, torch.cat((g, u)))
    return act(both[..., :H]) * both[:, H:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "activation", [F.silu, gelu_pytorch_tanh, gelu_new], ids=lambda a: a.__name__
)
@pytest.mark.parametrize("layer", [chunked, split_up_first, sliced])
def test_packed(layer, activation, dtype):
    family, options = ACTIVATIONS[activation]

    def gated(x, g, u):
        return layer(activation, x, g, u)

    module = assert_swapped(SWAPS[family], gated, *x_and_weights(dtype))
    (call,) = calls(module, f"{family}_packed")
    order = "up_gate" if layer is split_up_first else "gate_up"
    assert call.args[1:] == (order, *options) and not calls(module, family)
    assert not any(calls(module, left) for left in ("chunk", "split", "getitem"))


def test_unequal_parts_and_other_halves_are_swapped_separately():
    def shifted(x, g, u):
        both = F.linear(x, torch.cat((g, u)))
        return F.silu(both[:, 1 : H + 1]) * both[:, H:]

    def wide(x, g, u):
        gate, up, _ = F.linear(x, torch.cat((g, u, u))).chunk(3, dim=-1)
        return F.silu(gate) * up

    for function in (shifted, wide):
        module = assert_swapped(use_triton_swiglu, function, *x_and_weights())
        assert calls(module, "swiglu") and not calls(module, "swiglu_packed")


@pytest.mark.parametrize(
    ("activation", "known"),
    [(F.silu, [1.462117, 0.731059, 1.855341]), (F.gelu, [1.682689, 0.841345, 2.166631])],
)
def test_known_values(activation, known):
    """Row C29: gate 1, up 2; the gradients are not exchanged."""

    def gated(g, u):
        return activation(g) * u

    g, u = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[2.0]], requires_grad=True)
    swap = use_triton_swiglu if activation is F.silu else use_triton_geglu
    y = run(assert_swapped(swap, gated, g.detach(), u.detach()), g, u)[0]
    y.backward()
    assert [y.item(), u.grad.item(), g.grad.item()] == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize(
    "activation", [F.silu, gelu_pytorch_tanh, gelu_new], ids=lambda a: a.__name__
)
def test_under_autocast(activation):
    family, _ = ACTIVATIONS[activation]
    module = assert_swapped(SWAPS[family], gated_by(activation), *x_and_weights(), autocast=True)
    assert calls(module, family)[0].meta["example_value"].dtype == torch.bfloat16


# --- powers in fp32: what autocast makes of gelu_new on a GPU ------------------------------------


def wide_power(g):
    return 0.5 * g * (1.0 + torch.tanh(K * (g + 0.044715 * torch.pow(g.to(c_of(g)), 3.0))))


def test_a_wider_result_stays_wide():
    module = assert_swapped(use_triton_geglu, gated_by(wide_power), *x_and_weights(torch.bfloat16))
    (call,) = calls(module, "geglu")
    dtypes = [n.meta["example_value"].dtype for n in (call, *call.args[:2])]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]


def test_a_wider_result_that_is_rounded_again_is_rounded_at_once():
    def gated(x, g, u):
        return (wide_power(F.linear(x, g)) * F.linear(x, u)).to(x.dtype)

    def packed(x, g, u):
        gate, up = F.linear(x, torch.cat((g, u))).chunk(2, dim=-1)
        return (wide_power(gate) * up).to(x.dtype)

    for function, name in ((gated, "geglu"), (packed, "geglu_packed")):
        module = assert_swapped(use_triton_geglu, function, *x_and_weights(torch.bfloat16))
        (call,) = calls(module, name)
        assert call.meta["example_value"].dtype == torch.bfloat16
        assert call.args[0].meta["example_value"].dtype == torch.bfloat16


# --- what must stay -----------------------------------------------------------------------------


def activation_is_read_again(act, x, g, u):
    a = act(F.linear(x, g))
    return a * F.linear(x, u) + a


def broadcast_gate(act, x, g, u):
    return act(F.linear(x, g[:1])) * F.linear(x, u)


def scaled_by_a_vector(act, x, g, u):
    return act(F.linear(x, g)) * u[:, 0]


def cast_between(act, x, g, u):
    return act(F.linear(x, g)).double() * F.linear(x, u).double()


def gate_is_written(act, x, g, u):
    gate = F.linear(x, g)
    y = act(gate) * F.linear(x, u)
    gate.mul_(2)
    return y, gate


@pytest.mark.parametrize("activation", [F.silu, gelu, gelu_new], ids=lambda a: a.__name__)
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (activation_is_read_again, "other readers than the product"),
        (broadcast_gate, "gate and up differ in shape"),
        (scaled_by_a_vector, "gate and up differ in shape"),
        (cast_between, "changes dtype before the product"),
        (gate_is_written, "writes in place"),
    ],
)
def test_what_is_refused_with_its_reason(layer, reason, activation):
    swap = SWAPS[ACTIVATIONS[activation][0]]
    assert_left_alone(swap, partial(layer, activation), *x_and_weights(), reason=reason)


def test_a_gate_with_other_readers_is_swapped():
    """Nothing changes for them: the gate stays what it was."""

    def gate_is_read_again(x, g, u):
        gate = F.linear(x, g)
        return gelu_new(gate) * F.linear(x, u), gate.sum()

    assert_swapped(use_triton_geglu, gate_is_read_again, *x_and_weights())


def quick_gelu(g):
    return g * torch.sigmoid(1.702 * g)


def other_cubic(g):
    return 0.5 * g * (1.0 + torch.tanh(K * (g + 0.0447 * g**3)))


def rounded_constant(g):
    return 0.5 * g * (1.0 + torch.tanh(0.7979 * (g + 0.044715 * g**3)))


def not_halved(g):
    return g * (1.0 + torch.erf(g / math.sqrt(2.0)))


def of_two_values(g):
    return 0.5 * g * (1.0 + torch.erf(torch.flip(g, (0,)) / math.sqrt(2.0)))


def minus(g):
    return 0.5 * g * (1.0 - torch.erf(g / math.sqrt(2.0)))


def square(g):
    return 0.5 * g * (1.0 + torch.tanh(K * (g + 0.044715 * g**2)))


def clipped(g):
    return F.gelu(g).clamp(-10, 10)


OTHERS = [quick_gelu, other_cubic, rounded_constant, not_halved, of_two_values, minus, square]


@pytest.mark.parametrize(
    ("family", "activation"),
    [*(("geglu", other) for other in (*OTHERS, clipped, F.silu)), ("swiglu", gelu)]
    + [("swiglu", torch.sigmoid)],
)
def test_other_activations_are_no_match(family, activation):
    assert_left_alone(SWAPS[family], gated_by(activation), *x_and_weights())


def alone(act, x, g, u):
    return F.linear(act(F.linear(x, g)), u.t())


def summed(act, x, g, u):
    return act(F.linear(x, g)) + F.linear(x, u)


def times_a_constant(act, x, g, u):
    return act(F.linear(x, g)) * 1.7 + F.linear(x, u)


def squared(act, x, g, u):
    a = act(F.linear(x, g))
    return a * a


@pytest.mark.parametrize("activation", [F.silu, gelu, gelu_new], ids=lambda a: a.__name__)
@pytest.mark.parametrize("function", [alone, summed, times_a_constant, squared])
def test_look_alikes_are_no_match(function, activation):
    swap = SWAPS[ACTIVATIONS[activation][0]]
    assert_left_alone(swap, partial(function, activation), *x_and_weights())


def test_constants_of_ten_digits_are_another_function_in_fp64():
    inputs = x_and_weights(torch.float64)
    assert_left_alone(use_triton_geglu, gated_by(gelu_fast), *inputs)
    assert_swapped(use_triton_geglu, gated_by(gelu_new), *inputs)
