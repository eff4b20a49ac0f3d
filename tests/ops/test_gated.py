"""xtrain.ops.swiglu and geglu: values, gradients, strides, packed operands, compilation, errors."""

from __future__ import annotations

import pytest
import torch
from gated_activations import ACTIVATIONS, draw, packed_with_grads, with_grads
from tolerances import assert_no_worse_than_plain
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, geglu, swiglu
from xtrain.ops.gated.op import geglu_packed, halves, swiglu_packed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=ACTIVATIONS)
def act(request):
    return ACTIVATIONS[request.param]


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, act, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    right = act.truth(gate, up, dy)[0]
    for out in (act.apart(gate, up), act.reference(gate, up)):
        assert out.dtype == dtype and out.is_contiguous()
        assert_no_worse_than_plain(out, act.plain(gate, up), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_rounds_once(dtype, act, device):
    """Within half an ulp, where an activation rounded first is not: gates that are no tail."""
    gate, up, dy = draw((64, 129), dtype, device)
    gate = gate if act is ACTIVATIONS["silu"] else gate.clamp(-2, 8)
    out, rounded_twice = act.apart(gate, up).double(), act.plain(gate, up).double()
    right = act.truth(gate, up, dy)[0]
    # Half the distance between neighbours of this size, and what fp32 adds to it: a last digit of
    # the gate's factor, which is a sum of about 1 (in a tail, 1 + erf cancels).
    half_ulp = torch.finfo(dtype).eps / 2 * torch.exp2(right.abs().log2().floor())
    limit = half_ulp.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2)
    limit = limit * 1.001 + torch.finfo(torch.float32).eps * (gate.double() * up.double()).abs()
    assert ((out - right).abs() <= limit).all()
    assert ((rounded_twice - right).abs() > limit).any()


def test_forward_mixed_dtypes(act):
    gate, up, dy = draw((4, 16), torch.bfloat16)
    out = act.apart(gate, up.float())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, act.truth(gate, up, dy)[0].float())
    grads = with_grads(act.apart, gate, up.float(), dy.float())[1:]
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", (1.462117, 0.731059, 1.855341)),
        ("gelu", (1.682689, 0.841345, 2.166631)),
        ("gelu_tanh", (1.682384, 0.841192, 2.165928)),
    ],
)
def test_backward_by_hand(name, expected, device):
    """gate 1, up 2: y = 2 P(1), grad_up = P(1), grad_gate = 2 (P(1) + P'(1))."""
    gate = torch.ones(1, device=device, requires_grad=True)
    up = torch.full((1,), 2.0, device=device, requires_grad=True)
    out = ACTIVATIONS[name].apart(gate, up)
    out.backward()
    found = [out.item(), up.grad.item(), gate.grad.item()]
    assert found == pytest.approx(expected, abs=1e-6)


def test_backward_rows_are_distinct_and_finite(act, device):
    """A kernel that writes every row to row 0, or overflows in the tails, fails here."""
    gate = torch.tensor([-20.0, 0.0, 20.0], device=device)[:, None].expand(3, 5)
    up, dy = torch.full((3, 5), 2.0, device=device), torch.ones(3, 5, device=device)
    results = with_grads(act.apart, gate, up, dy)
    for result, right in zip(results, act.truth(gate, up, dy), strict=True):
        assert result.isfinite().all()
        torch.testing.assert_close(result, right.float(), rtol=1e-6, atol=1e-7)
    assert len(results[1][:, 0].unique()) == 3


def test_backward_finite_differences(act, device):
    gate = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    up = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(act.apart, (gate, up), fast_mode=True)
    both = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    for order in ("gate_up", "up_gate"):
        assert torch.autograd.gradcheck(
            lambda x, o=order: act.packed(x, o), (both,), fast_mode=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, act, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    results = with_grads(act.apart, gate, up, dy)
    assert [t.dtype for t in results] == [dtype] * 3
    act.assert_accurate(results, gate, up, dy)


# --- strides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_packed_equals_separate(order, act, device):
    """Bit for bit, in every layout of the input and of the gradient; the halves are as named."""
    base = torch.randn(6, 5, 40, device=device)
    for view in (base, base[..., ::2], base.transpose(0, 2), base[:1].expand(6, 5, 40)):
        for gate_up in (view, view.to(torch.bfloat16)):
            first, second = (half.contiguous() for half in gate_up.chunk(2, -1))
            gate, up = (first, second) if order == "gate_up" else (second, first)
            dense = torch.randn(gate.shape, device=device).to(gate.dtype)
            for dy in (dense, dense[:1].expand(gate.shape)):
                results = packed_with_grads(gate_up, dy, order, act.packed)
                for a, b in zip(results, with_grads(act.apart, gate, up, dy), strict=True):
                    assert torch.equal(a, b)
                act.assert_accurate(results, gate, up, dy)
            reference = act.ops.reference_packed(gate_up, order=order, **act.keywords)
            torch.testing.assert_close(reference, act.reference(gate, up))


# --- compiled -----------------------------------------------------------------------------------


def test_compiled_equals_eager(device):
    """All six ops in one graph, each on leaves of its own."""
    acts = list(ACTIVATIONS.values())

    def all_six(*leaves):
        apart, both = leaves[:6], leaves[6:]
        outs = [act.apart(*apart[2 * i : 2 * i + 2]) for i, act in enumerate(acts)]
        return outs + [act.packed(both[i], "up_gate") for i, act in enumerate(acts)]

    compiled = torch.compile(all_six, fullgraph=True, dynamic=True)
    for rows in (7, 12):
        gate, up, dy = draw((rows, 129), torch.bfloat16, device)
        leaves = [gate, up] * 3 + [torch.cat((up, gate), -1)] * 3
        leaves = [t.detach().requires_grad_() for t in leaves]
        outs, eager = compiled(*leaves), all_six(*leaves)
        grads = torch.autograd.grad(outs, leaves, [dy] * 6)
        for result, like in zip((*outs, *grads), (*eager, *leaves), strict=True):
            assert result.dtype == like.dtype and result.stride() == like.stride()
        for i, act in enumerate(acts):
            act.assert_accurate([outs[i], *grads[2 * i : 2 * i + 2]], gate, up, dy)
            packed = [outs[3 + i], *halves(grads[6 + i], "up_gate")]
            act.assert_accurate(packed, gate, up, dy)


# --- edges and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (3, 0), (127,), (1, 1025)], ids=str)
def test_edge_shapes(shape, act, device):
    gate, up, dy = (torch.randn(shape, device=device) for _ in range(3))
    results = with_grads(act.apart, gate, up, dy)
    for result, right in zip(results, act.truth(gate, up, dy), strict=True):
        assert result.shape == shape
        torch.testing.assert_close(result, right.float().view(shape), rtol=1e-5, atol=1e-6)


def test_errors():
    functions = {f.__name__: f for f in (swiglu, swiglu_packed, geglu, geglu_packed)}
    ones, wrong = torch.ones(2, 4), {"approximate": "erf"}
    for name, args, keywords, message in (
        ("swiglu", (ones, torch.ones(2, 1)), {}, r"gate and up must have one shape, got \(2, 4\)"),
        ("geglu", (ones, torch.ones(2, 1)), {}, r"gate and up must have one shape, got \(2, 4\)"),
        ("swiglu", (ones.long(), ones), {}, "gate and up must hold floats, got torch.int64"),
        ("geglu", (ones.long(), ones), {}, "gate and up must hold floats, got torch.int64"),
        ("geglu", (ones, ones), wrong, 'approximate must be "none" or "tanh", got \'erf\''),
        ("geglu_packed", (ones,), wrong, 'approximate must be "none" or "tanh", got \'erf\''),
        ("swiglu_packed", (torch.ones(2, 3),), {}, r"gate_up must be \[..., 2 F\], got \(2, 3\)"),
        ("geglu_packed", (torch.ones(2, 3),), {}, r"gate_up must be \[..., 2 F\], got \(2, 3\)"),
        ("swiglu_packed", (torch.ones(()),), {}, r"gate_up must be \[..., 2 F\], got \(\)"),
        ("swiglu_packed", (ones,), {"order": "gate"}, r"order must be \"gate_up\" or \"up_gate\""),
        ("swiglu_packed", (ones.long(),), {}, "gate_up must hold floats, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            functions[name](*args, **keywords)


def test_supports_says_why_not(act):
    """float8 has no arithmetic; on GPUs inductor keeps the packed op, and erf, as a call."""
    half, eighth = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4).to(torch.float8_e4m3fn)
    name, options = act.ops.name, act.keywords
    apart, packed = OPS[name], OPS[f"{name}_packed"]
    assert apart.supports(half, half.float(), **options) is None
    assert packed.supports(half, order="up_gate", **options) is None
    assert apart.supports(half, eighth).startswith("up is torch.float8_e4m3fn; the kernel takes")
    assert packed.supports(eighth).startswith("gate_up is torch.float8_e4m3fn; the kernel takes")
    assert not packed.prefers_kernel(half) and not apart.prefers_kernel(half, half)
    with FakeTensorMode():
        half = torch.empty(2, 4, dtype=torch.bfloat16, device="cuda")
        assert packed.prefers_kernel(half, order="up_gate", **options)
        assert apart.prefers_kernel(half, half, **options) == (act is ACTIVATIONS["gelu"])
