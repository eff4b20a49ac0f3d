"""xtrain.ops.swiglu: values, gradients, strides, compilation, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_dropout_compiled import partitioned_graphs
from tolerances import assert_no_worse_than_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, swiglu
from xtrain.ops.gated.op import halves, swiglu_packed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def draw(shape, dtype, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and grad_out; gates far into both tails among them."""
    gate = torch.randn(shape) * 4
    gate.view(-1)[:3] = torch.tensor([-20.0, 0.0, 20.0])
    return tuple(t.to(device, dtype) for t in (gate, torch.randn(shape), torch.randn(shape)))


def with_grads(function, gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up)
    return [out, *torch.autograd.grad(out, (gate, up), dy)]


def truth(gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
    """y, grad_gate and grad_up in NumPy's doubles, derivative written out."""
    g, u, d = (t.detach().double().cpu().numpy() for t in (gate, up, dy))
    s = 1 / (1 + np.exp(-g))
    results = g * s * u, d * u * (s + g * s * (1 - s)), d * g * s
    return [torch.from_numpy(np.asarray(r)).to(gate.device) for r in results]


def assert_accurate(results, gate: Tensor, up: Tensor, dy: Tensor, plain=plain, truth=truth):
    """Hold y, grad_gate and grad_up to an activation's truth, by default silu's."""
    rounded = with_grads(plain, gate, up, dy)
    for result, in_dtype, right in zip(results, rounded, truth(gate, up, dy), strict=True):
        assert_no_worse_than_plain(result, in_dtype, right)


def packed_with_grads(gate_up: Tensor, dy: Tensor, order: str, function=swiglu_packed):
    """y, grad_gate and grad_up by a packed op, whose one gradient is taken apart."""
    gate_up = gate_up.detach().requires_grad_()
    out = function(gate_up, order=order)
    (grad,) = torch.autograd.grad(out, gate_up, dy)
    assert grad.is_contiguous() and grad.dtype == gate_up.dtype
    return [out, *halves(grad, order)]


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    right = truth(gate, up, dy)[0]
    for out in (swiglu(gate, up), OPS["swiglu"].reference(gate, up)):
        assert out.dtype == dtype and out.is_contiguous()
        assert_no_worse_than_plain(out, plain(gate, up), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_rounds_once(dtype, device):
    """The fp32 result rounded to dtype: within half an ulp, where silu rounded first is not."""
    gate, up, dy = draw((64, 129), dtype, device)
    out = swiglu(gate, up).double()
    right = truth(gate, up, dy)[0]
    # Half the distance between neighbours of this size, and what fp32 adds to it.
    half_ulp = torch.finfo(dtype).eps / 2 * torch.exp2(right.abs().log2().floor())
    limit = half_ulp.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2)
    assert ((out - right).abs() <= limit * 1.001).all()
    assert ((plain(gate, up).double() - right).abs() > limit * 1.001).any()


def test_forward_mixed_dtypes():
    gate, up, dy = draw((4, 16), torch.bfloat16)
    out = swiglu(gate, up.float())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, truth(gate, up, dy)[0].float())
    grads = with_grads(swiglu, gate, up.float(), dy.float())[1:]
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


# --- backward -----------------------------------------------------------------------------------


def test_backward_by_hand(device):
    """Row C29."""
    gate = torch.ones(1, device=device, requires_grad=True)
    up = torch.full((1,), 2.0, device=device, requires_grad=True)
    out = swiglu(gate, up)
    out.backward()
    assert abs(out.item() - 1.462117) < 1e-6
    assert abs(up.grad.item() - 0.731059) < 1e-6
    assert abs(gate.grad.item() - 1.855341) < 1e-6


def test_backward_rows_are_distinct_and_finite(device):
    """Row C29: a kernel that writes every row to row 0, or overflows in the tails, fails here."""
    gate = torch.tensor([-20.0, 0.0, 20.0], device=device)[:, None].expand(3, 5)
    up, dy = torch.full((3, 5), 2.0, device=device), torch.ones(3, 5, device=device)
    for result, right in zip(with_grads(swiglu, gate, up, dy), truth(gate, up, dy), strict=True):
        assert result.isfinite().all() and len(result[:, 0].unique()) == 3
        torch.testing.assert_close(result, right.float(), rtol=1e-6, atol=1e-7)


def test_backward_finite_differences(device):
    gate = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    up = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    results = with_grads(swiglu, gate, up, dy)
    assert [t.dtype for t in results] == [dtype] * 3
    assert_accurate(results, gate, up, dy)


def test_backward_saves_gate_and_up_alone(device):
    saved: list[Tensor] = []
    gate, up, _ = draw((6, 32), torch.bfloat16, device)
    gate.requires_grad_(), up.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}


# --- strides ------------------------------------------------------------------------------------


def test_opcheck_strided(device):
    """gate and up as halves of one matrix, as fused projections give them, and other views."""
    both = torch.randn(6, 4, 20, device=device)
    base = torch.randn(6, 4, 10, device=device)
    pairs = [both.chunk(2, -1), (both[..., ::2], both[..., 1::2]), (base.transpose(0, 2),) * 2]
    pairs += [(base[:1].expand(6, 4, 10), base)]
    for gate, up in pairs:
        dy = torch.randn(gate.shape, device=device).transpose(0, 2).contiguous().transpose(0, 2)
        strided = with_grads(swiglu, gate, up, dy)
        dense = with_grads(swiglu, gate.contiguous(), up.contiguous(), dy.contiguous())
        for a, b in zip(strided, dense, strict=True):
            assert torch.equal(a, b) and a.is_contiguous()
        arguments = gate.detach().requires_grad_(), up.detach().requires_grad_()
        torch.library.opcheck(OPS["swiglu"].forward, arguments)


# --- compiled -----------------------------------------------------------------------------------


def test_compiled_equals_eager(device):
    compiled = torch.compile(swiglu, fullgraph=True, dynamic=True)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (7, 12):
            gate, up, dy = draw((rows, 129), dtype, device)
            results = with_grads(compiled, gate, up, dy)
            assert_accurate(results, gate, up, dy)
            for result, eager in zip(results, with_grads(swiglu, gate, up, dy), strict=True):
                assert result.dtype == eager.dtype and result.stride() == eager.stride()


def test_single_nodes_and_inputs_saved():
    gate, up = (torch.randn(8, 32, requires_grad=True) for _ in range(2))
    forward, backward = partitioned_graphs(lambda g, u: swiglu(g * 2, u) * 3, gate, up)
    assert [n.target for n in forward.graph.nodes].count(OPS["swiglu"].forward) == 1
    assert [n.target for n in backward.graph.nodes].count(OPS["swiglu"].backward) == 1
    assert sum(n.op == "placeholder" for n in backward.graph.nodes) == 3  # gate, up, gradient


# --- packed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_packed_equals_separate(order, device):
    """Bit for bit, in every layout of the input and of the gradient; the halves are as named."""
    base = torch.randn(6, 5, 40, device=device)
    for view in (base, base[..., ::2], base.transpose(0, 2), base[:1].expand(6, 5, 40)):
        for gate_up in (view, view.to(torch.bfloat16)):
            first, second = (half.contiguous() for half in gate_up.chunk(2, -1))
            gate, up = (first, second) if order == "gate_up" else (second, first)
            dense = torch.randn(gate.shape, device=device).to(gate.dtype)
            for dy in (dense, dense[:1].expand(gate.shape)):
                results = packed_with_grads(gate_up, dy, order)
                for a, b in zip(results, with_grads(swiglu, gate, up, dy), strict=True):
                    assert torch.equal(a, b)
            reference = OPS["swiglu_packed"].reference(gate_up, order=order)
            torch.testing.assert_close(reference, OPS["swiglu"].reference(gate, up))


def test_packed_compiled_equals_eager(device):
    compiled = torch.compile(swiglu_packed, fullgraph=True, dynamic=True)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (7, 12):
            gate_up = torch.randn(rows, 2 * 129, device=device).to(dtype)
            dy = torch.randn(rows, 129, device=device).to(dtype)
            results = packed_with_grads(gate_up, dy, "up_gate", compiled)
            assert_accurate(results, *halves(gate_up, "up_gate"), dy)


def test_packed_is_a_single_node_and_saves_its_input_alone():
    gate_up = torch.randn(8, 64, requires_grad=True)
    forward, backward = partitioned_graphs(lambda x: swiglu_packed(x * 2) * 3, gate_up)
    assert [n.target for n in forward.graph.nodes].count(OPS["swiglu_packed"].forward) == 1
    assert [n.target for n in backward.graph.nodes].count(OPS["swiglu_packed"].backward) == 1
    assert sum(n.op == "placeholder" for n in backward.graph.nodes) == 2  # gate_up, gradient


def test_packed_finite_differences(device):
    gate_up = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    for order in ("gate_up", "up_gate"):
        assert torch.autograd.gradcheck(lambda x, o=order: swiglu_packed(x, order=o), (gate_up,))


# --- edges and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (3, 0), (127,), (1, 1025)], ids=str)
def test_edge_shapes(shape, device):
    gate, up, dy = (torch.randn(shape, device=device) for _ in range(3))
    results = with_grads(swiglu, gate, up, dy)
    for result, right in zip(results, truth(gate, up, dy), strict=True):
        assert result.shape == shape
        torch.testing.assert_close(result, right.float().view(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_errors(compiled):
    function = torch.compile(swiglu, fullgraph=True, backend="eager") if compiled else swiglu
    with pytest.raises(ValueError, match=r"one shape, got \(2, 4\) and \(2, 1\)"):
        function(torch.ones(2, 4), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"must hold floats, got torch.int64 and torch.float32"):
        function(torch.ones(4, dtype=torch.int64), torch.ones(4))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_errors(compiled):
    function = swiglu_packed
    if compiled:
        function = torch.compile(swiglu_packed, fullgraph=True, backend="eager")
    for gate_up, order, message in (
        (torch.ones(2, 3), "gate_up", r"gate_up must be \[..., 2 F\], got \(2, 3\)"),
        (torch.ones(()), "gate_up", r"gate_up must be \[..., 2 F\], got \(\)"),
        (torch.ones(4), "gate", r"order must be \"gate_up\" or \"up_gate\", got 'gate'"),
        (torch.ones(4, dtype=torch.int64), "up_gate", r"gate_up must hold floats, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=f"swiglu_packed: {message}"):
            function(gate_up, order=order)


def test_supports_says_why_not():
    """float8 has no arithmetic; on GPUs inductor keeps the packed op alone as a call."""
    half, eighth = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4).to(torch.float8_e4m3fn)
    separate, packed = OPS["swiglu"], OPS["swiglu_packed"]
    assert separate.supports(half, half.float()) is packed.supports(half) is None
    assert separate.supports(half, eighth).startswith("up is torch.float8_e4m3fn; the kernel takes")
    assert packed.supports(eighth).startswith("gate_up is torch.float8_e4m3fn; the kernel takes")
    assert not packed.prefers_kernel(half) and not separate.prefers_kernel(half, half)
    with FakeTensorMode():
        half = torch.empty(2, 4, dtype=torch.bfloat16, device="cuda")
        assert packed.prefers_kernel(half) and not separate.prefers_kernel(half, half)
