"""use_triton_geglu: every way in which models write a gated GELU, and what looks like one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, c_of, run

from xtrain.passes.swaps.use_triton_glu import use_triton_geglu as swap

# for the random programs of test_fuzz_swaps.py, a line a step
FORMULAS = {
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


def x_and_weights(dtype=torch.float32):
    return tuple(t.to(dtype) for t in (torch.randn(3, D), torch.randn(H, D), torch.randn(H, D)))


# --- activations: transformers' names for them, and other people's spellings --------------------


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


SPELT_OUT = {
    gelu_new: "tanh",
    gelu_fast: "tanh",
    gelu_python: "none",
    distribution_function: "tanh",
    halved_last: "none",
}
ACTIVATIONS = {gelu: "none", gelu_pytorch_tanh: "tanh", **SPELT_OUT}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_every_spelling_in_both_orders(activation, dtype):
    def gate_first(x, g, u):
        return activation(F.linear(x, g)) * F.linear(x, u)

    def up_first(x, g, u):
        return F.linear(x, u) * activation(F.linear(x, g))

    for gated in (gate_first, up_first):
        module = assert_swapped(swap, gated, *x_and_weights(dtype))
        (call,) = calls(module, "geglu")
        assert call.args[2] == ACTIVATIONS[activation]
        assert call.args[0].args[1].meta["example_value"].shape == (H, D)
        for left in ("gelu", "tanh", "erf", "pow", "mul", "add"):
            assert not calls(module, left), left


def chunked(x, g, u):
    gate, up = F.linear(x, torch.cat((g, u))).chunk(2, dim=-1)
    return up * F.gelu(gate, approximate="tanh")


def split_up_first(x, g, u):
    up, gate = F.linear(x, torch.cat((u, g))).split(H, dim=1)
    return gelu_new(gate) * up


def sliced(x, g, u):
    both = F.linear(x, torch.cat((g, u)))
    return F.gelu(both[..., :H]) * both[:, H:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("gated", "options"),
    [
        (chunked, ("gate_up", "tanh")),
        (split_up_first, ("up_gate", "tanh")),
        (sliced, ("gate_up", "none")),
    ],
)
def test_packed(gated, options, dtype):
    module = assert_swapped(swap, gated, *x_and_weights(dtype))
    (call,) = calls(module, "geglu_packed")
    assert call.args[1:] == options and not calls(module, "geglu")
    assert (
        not calls(module, "chunk") and not calls(module, "split") and not calls(module, "getitem")
    )


def test_known_values():
    """gate 1, up 2; the gradients are not exchanged."""

    def gated(g, u):
        return F.gelu(g) * u

    g, u = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[2.0]], requires_grad=True)
    module = assert_swapped(swap, gated, g.detach(), u.detach())
    y = run(module, g, u)[0]
    y.backward()
    found = [y.item(), u.grad.item(), g.grad.item()]
    assert found == pytest.approx([1.682689, 0.841345, 2.166631], abs=1e-6)


@pytest.mark.parametrize("activation", [gelu_pytorch_tanh, gelu_new], ids=lambda a: a.__name__)
def test_under_autocast(activation):
    def gated(x, g, u):
        return activation(F.linear(x, g)) * F.linear(x, u)

    module = assert_swapped(swap, gated, *x_and_weights(), autocast=True)
    assert calls(module, "geglu")[0].meta["example_value"].dtype == torch.bfloat16


# --- powers in fp32: what autocast makes of gelu_new on a GPU ------------------------------------


def wide_power(g):
    return 0.5 * g * (1.0 + torch.tanh(K * (g + 0.044715 * torch.pow(g.to(c_of(g)), 3.0))))


def test_a_wider_result_stays_wide():
    def gated(x, g, u):
        return wide_power(F.linear(x, g)) * F.linear(x, u)

    module = assert_swapped(swap, gated, *x_and_weights(torch.bfloat16))
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
        module = assert_swapped(swap, function, *x_and_weights(torch.bfloat16))
        (call,) = calls(module, name)
        assert call.meta["example_value"].dtype == torch.bfloat16
        assert call.args[0].meta["example_value"].dtype == torch.bfloat16


# --- what must stay -----------------------------------------------------------------------------


def activation_is_read_again(x, g, u):
    a = F.gelu(F.linear(x, g))
    return a * F.linear(x, u) + a


def broadcast_gate(x, g, u):
    return F.gelu(F.linear(x, g[:1])) * F.linear(x, u)


def scaled_by_a_vector(x, g, u):
    return F.gelu(F.linear(x, g)) * u[:, 0]


def cast_between(x, g, u):
    return F.gelu(F.linear(x, g)).double() * F.linear(x, u).double()


def gate_is_written(x, g, u):
    gate = F.linear(x, g)
    y = gelu_new(gate) * F.linear(x, u)
    gate.mul_(2)
    return y, gate


@pytest.mark.parametrize(
    ("gated", "reason"),
    [
        (activation_is_read_again, "other readers than the product"),
        (broadcast_gate, "gate and up differ in shape"),
        (scaled_by_a_vector, "gate and up differ in shape"),
        (cast_between, "changes dtype before the product"),
        (gate_is_written, "writes in place"),
    ],
)
def test_what_is_refused_with_its_reason(gated, reason):
    assert_left_alone(swap, gated, *x_and_weights(), reason=reason)


def gate_is_read_again(x, g, u):
    gate = F.linear(x, g)
    return gelu_new(gate) * F.linear(x, u), gate.sum()


def test_a_gate_with_other_readers_is_swapped():
    """Nothing changes for them: the gate stays what it was."""
    assert_swapped(swap, gate_is_read_again, *x_and_weights())


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


@pytest.mark.parametrize(
    "activation",
    [
        quick_gelu,
        other_cubic,
        rounded_constant,
        not_halved,
        of_two_values,
        minus,
        square,
        clipped,
        F.silu,
    ],
    ids=lambda a: a.__name__,
)
def test_other_activations_are_no_match(activation):
    assert_left_alone(
        swap, lambda x, g, u: activation(F.linear(x, g)) * F.linear(x, u), *x_and_weights()
    )


def alone(x, g, u):
    return F.linear(F.gelu(F.linear(x, g)), u.t())


def spelt_out_alone(x, g, u):
    return F.linear(gelu_new(F.linear(x, g)), u.t())


def summed(x, g, u):
    return F.gelu(F.linear(x, g)) + F.linear(x, u)


def times_a_constant(x, g, u):
    return gelu_new(F.linear(x, g)) * 1.7 + F.linear(x, u)


def squared(x, g, u):
    a = F.gelu(F.linear(x, g))
    return a * a


@pytest.mark.parametrize("function", [alone, spelt_out_alone, summed, times_a_constant, squared])
def test_look_alikes_are_no_match(function):
    assert_left_alone(swap, function, *x_and_weights())


def test_constants_of_ten_digits_are_another_function_in_fp64():
    def gated(x, g, u):
        return gelu_fast(F.linear(x, g)) * F.linear(x, u)

    def exact(x, g, u):
        return gelu_new(F.linear(x, g)) * F.linear(x, u)

    assert_left_alone(swap, gated, *x_and_weights(torch.float64))
    assert_swapped(swap, exact, *x_and_weights(torch.float64))
