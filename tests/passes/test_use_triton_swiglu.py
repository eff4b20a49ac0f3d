"""use_triton_swiglu: separate and packed gates in either order, and what looks like one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import calls
from swapping import assert_left_alone, assert_swapped, run

from xtrain.passes.swaps.use_triton_glu import use_triton_swiglu as swap

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
}

D, H = 6, 10


def x_and_weights(dtype=torch.float32):
    return tuple(t.to(dtype) for t in (torch.randn(3, D), torch.randn(H, D), torch.randn(H, D)))


def llama(x, g, u):
    return F.silu(F.linear(x, g)) * F.linear(x, u)


def up_first(x, g, u):
    return F.linear(x, u) * F.silu(F.linear(x, g))


def spelt_out(x, g, u):
    gate = F.linear(x, g)
    return (gate * torch.sigmoid(gate)) * F.linear(x, u)


def sigmoid_first(x, g, u):
    gate = F.linear(x, g)
    return F.linear(x, u).mul(gate.sigmoid() * gate)


def chunked(x, g, u):
    gate, up = F.linear(x, torch.cat((g, u))).chunk(2, dim=-1)
    return up * F.silu(gate)


def split_up_first(x, g, u):
    up, gate = F.linear(x, torch.cat((u, g))).split(H, dim=1)
    return F.silu(gate) * up


def sliced(x, g, u):
    both = F.linear(x, torch.cat((g, u)))
    return F.silu(both[..., :H]) * both[:, H:]


PACKED = {chunked: "gate_up", split_up_first: "up_gate", sliced: "gate_up"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [llama, up_first, spelt_out, sigmoid_first, *PACKED])
def test_every_spelling(gated, dtype):
    module = assert_swapped(swap, gated, *x_and_weights(dtype))
    assert not calls(module, "silu") and not calls(module, "sigmoid")
    packed = calls(module, "swiglu_packed")
    assert [call.args[1] for call in packed] == ([PACKED[gated]] if gated in PACKED else [])
    assert len(packed) + len(calls(module, "swiglu")) == 1


def test_known_values():
    """Row C29: gate 1, up 2; the gradients are not exchanged."""

    def gated(g, u):
        return F.silu(g) * u

    g, u = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[2.0]], requires_grad=True)
    module = assert_swapped(swap, gated, g.detach(), u.detach())
    y = run(module, g, u)[0]
    y.backward()
    found = [y.item(), u.grad.item(), g.grad.item()]
    assert found == pytest.approx([1.462117, 0.731059, 1.855341], abs=1e-6)


def test_under_autocast():
    module = assert_swapped(swap, llama, *x_and_weights(), autocast=True)
    assert calls(module, "swiglu")[0].meta["example_value"].dtype == torch.bfloat16


def test_unequal_parts_and_other_halves_are_swapped_separately():
    def shifted(x, g, u):
        both = F.linear(x, torch.cat((g, u)))
        return F.silu(both[:, 1 : H + 1]) * both[:, H:]

    def wide(x, g, u):
        gate, up, _ = F.linear(x, torch.cat((g, u, u))).chunk(3, dim=-1)
        return F.silu(gate) * up

    for function in (shifted, wide):
        module = assert_swapped(swap, function, *x_and_weights())
        assert calls(module, "swiglu") and not calls(module, "swiglu_packed")


# --- what must stay -----------------------------------------------------------------------------


def activation_is_read_again(x, g, u):
    a = F.silu(F.linear(x, g))
    return a * F.linear(x, u) + a


def broadcast_gate(x, g, u):
    return F.silu(F.linear(x, g[:1])) * F.linear(x, u)


def cast_between(x, g, u):
    return F.silu(F.linear(x, g)).double() * F.linear(x, u).double()


def gate_is_written(x, g, u):
    gate = F.linear(x, g)
    y = F.silu(gate) * F.linear(x, u)
    gate.mul_(2)
    return y, gate


@pytest.mark.parametrize(
    ("gated", "reason"),
    [
        (activation_is_read_again, "other readers than the product"),
        (broadcast_gate, "gate and up differ in shape"),
        (cast_between, "changes dtype before the product"),
        (gate_is_written, "writes in place"),
    ],
)
def test_what_is_refused_with_its_reason(gated, reason):
    assert_left_alone(swap, gated, *x_and_weights(), reason=reason)


def geglu(x, g, u):
    return F.gelu(F.linear(x, g)) * F.linear(x, u)


def gated_by_sigmoid(x, g, u):
    return torch.sigmoid(F.linear(x, g)) * F.linear(x, u)


def silu_alone(x, g, u):
    return F.silu(F.linear(x, g)) + F.linear(x, u)


def scaled_silu(x, g, u):
    return F.silu(F.linear(x, g)) * 2.0


@pytest.mark.parametrize("function", [geglu, gated_by_sigmoid, silu_alone, scaled_silu])
def test_look_alikes_are_no_match(function):
    assert_left_alone(swap, function, *x_and_weights())
