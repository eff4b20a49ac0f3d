"""xtrain.ops.geglu: values, gradients, strides, compilation, errors, by erf and by tanh."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import test_swiglu
import torch
import torch.nn.functional as F
from test_dropout_compiled import partitioned_graphs
from test_swiglu import draw, packed_with_grads, with_grads
from tolerances import assert_no_worse_than_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, geglu
from xtrain.ops.gated.op import geglu_packed, halves

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("approximate", ["none", "tanh"])
erfc = np.vectorize(math.erfc, otypes=[np.float64])


def plain(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def share_and_slope(g: np.ndarray, approximate: str) -> tuple[np.ndarray, np.ndarray]:
    """P and its derivative in NumPy's doubles; where P is small, nothing cancels."""
    if approximate == "none":
        return erfc(-g / np.sqrt(2)) / 2, np.exp(-(g**2) / 2) / np.sqrt(2 * np.pi)
    k = np.sqrt(2 / np.pi)
    e = np.exp(-2 * k * (g + 0.044715 * g**3))  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2 a))
    P = 1 / (1 + e)
    return P, P * (1 - P) * 2 * k * (1 + 3 * 0.044715 * g**2)


def truth(gate: Tensor, up: Tensor, dy: Tensor, approximate: str) -> list[Tensor]:
    """y, grad_gate and grad_up in NumPy's doubles, derivative written out."""
    g, u, d = (t.detach().double().cpu().numpy() for t in (gate, up, dy))
    with np.errstate(over="ignore"):
        P, slope = share_and_slope(g, approximate)
    results = g * P * u, d * u * (P + g * slope), d * g * P
    return [torch.from_numpy(np.asarray(r)).to(gate.device) for r in results]


def assert_accurate(results, gate: Tensor, up: Tensor, dy: Tensor, approximate: str) -> None:
    options = {"approximate": approximate}
    formulas = partial(plain, **options), partial(truth, **options)
    test_swiglu.assert_accurate(results, gate, up, dy, *formulas)


# --- forward ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, approximate, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    right = truth(gate, up, dy, approximate)[0]
    for function in (geglu, OPS["geglu"].reference):
        out = function(gate, up, approximate=approximate)
        assert out.dtype == dtype and out.is_contiguous()
        assert_no_worse_than_plain(out, plain(gate, up, approximate), right)


@BOTH
def test_forward_rounds_once(approximate, device):
    """Within half an ulp of bf16, where gelu rounded first is not: gates whose gelu is no tail."""
    gate, up, dy = draw((64, 129), torch.bfloat16, device)
    gate = gate.clamp(-2, 8)
    out, rounded_twice = geglu(gate, up, approximate=approximate), plain(gate, up, approximate)
    right = truth(gate, up, dy, approximate)[0]
    half_ulp = 2.0**-8 * torch.exp2(right.abs().log2().floor())
    limit = 1.001 * half_ulp
    assert ((out.double() - right).abs() <= limit).all()
    assert ((rounded_twice.double() - right).abs() > limit).any()


def test_forward_mixed_dtypes():
    gate, up, dy = draw((4, 16), torch.bfloat16)
    out = geglu(gate, up.float(), approximate="tanh")
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, truth(gate, up, dy, "tanh")[0].float())
    grads = with_grads(geglu, gate, up.float(), dy.float())[1:]
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("approximate", "expected"),
    [("none", (1.682689, 0.841345, 2.166631)), ("tanh", (1.682384, 0.841192, 2.165928))],
)
def test_backward_by_hand(approximate, expected, device):
    """gate 1, up 2: y = 2 P(1), grad_up = P(1), grad_gate = 2 (P(1) + P'(1))."""
    gate = torch.ones(1, device=device, requires_grad=True)
    up = torch.full((1,), 2.0, device=device, requires_grad=True)
    out = geglu(gate, up, approximate=approximate)
    out.backward()
    found = [out.item(), up.grad.item(), gate.grad.item()]
    assert found == pytest.approx(expected, abs=1e-6)


@BOTH
def test_backward_rows_are_distinct_and_finite(approximate, device):
    gate = torch.tensor([-20.0, 0.0, 20.0], device=device)[:, None].expand(3, 5)
    up, dy = torch.full((3, 5), 2.0, device=device), torch.ones(3, 5, device=device)
    results = with_grads(partial(geglu, approximate=approximate), gate, up, dy)
    for result, right in zip(results, truth(gate, up, dy, approximate), strict=True):
        assert result.isfinite().all()
        torch.testing.assert_close(result, right.float(), rtol=1e-6, atol=1e-7)
    assert len(results[1][:, 0].unique()) == 3


@BOTH
def test_backward_finite_differences(approximate, device):
    gate = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    up = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(partial(geglu, approximate=approximate), (gate, up))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, approximate, device):
    gate, up, dy = draw((6, 5, 129), dtype, device)
    results = with_grads(partial(geglu, approximate=approximate), gate, up, dy)
    assert [t.dtype for t in results] == [dtype] * 3
    assert_accurate(results, gate, up, dy, approximate)


def test_backward_saves_gate_and_up_alone(device):
    saved: list[Tensor] = []
    gate, up, _ = draw((6, 32), torch.bfloat16, device)
    gate.requires_grad_(), up.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        geglu(gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}


# --- strides ------------------------------------------------------------------------------------


@BOTH
def test_opcheck_strided(approximate, device):
    """gate and up as halves of one matrix, as fused projections give them, and other views."""
    both = torch.randn(6, 4, 20, device=device)
    base = torch.randn(6, 4, 10, device=device)
    pairs = [both.chunk(2, -1), (both[..., ::2], both[..., 1::2]), (base.transpose(0, 2),) * 2]
    pairs += [(base[:1].expand(6, 4, 10), base)]
    function = partial(geglu, approximate=approximate)
    for gate, up in pairs:
        dy = torch.randn(gate.shape, device=device).transpose(0, 2).contiguous().transpose(0, 2)
        strided = with_grads(function, gate, up, dy)
        dense = with_grads(function, gate.contiguous(), up.contiguous(), dy.contiguous())
        for a, b in zip(strided, dense, strict=True):
            assert torch.equal(a, b) and a.is_contiguous()
        arguments = gate.detach().requires_grad_(), up.detach().requires_grad_(), approximate
        torch.library.opcheck(OPS["geglu"].forward, arguments)


# --- compiled -----------------------------------------------------------------------------------


@BOTH
def test_compiled_equals_eager(approximate, device):
    function = partial(geglu, approximate=approximate)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (7, 12):
            gate, up, dy = draw((rows, 129), dtype, device)
            results = with_grads(compiled, gate, up, dy)
            assert_accurate(results, gate, up, dy, approximate)
            for result, eager in zip(results, with_grads(function, gate, up, dy), strict=True):
                assert result.dtype == eager.dtype and result.stride() == eager.stride()


def test_single_nodes_and_inputs_saved():
    gate, up = (torch.randn(8, 32, requires_grad=True) for _ in range(2))
    forward, backward = partitioned_graphs(lambda g, u: geglu(g * 2, u) * 3, gate, up)
    assert [n.target for n in forward.graph.nodes].count(OPS["geglu"].forward) == 1
    assert [n.target for n in backward.graph.nodes].count(OPS["geglu"].backward) == 1
    assert sum(n.op == "placeholder" for n in backward.graph.nodes) == 3  # gate, up, gradient


# --- packed -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_packed_equals_separate(order, approximate, device):
    """Bit for bit, in every layout of the input and of the gradient; the halves are as named."""
    base = torch.randn(6, 5, 40, device=device)
    packed, apart = (partial(f, approximate=approximate) for f in (geglu_packed, geglu))
    for view in (base, base[..., ::2], base.transpose(0, 2), base[:1].expand(6, 5, 40)):
        for gate_up in (view, view.to(torch.bfloat16)):
            gate, up = (half.contiguous() for half in halves(gate_up, order))
            dense = torch.randn(gate.shape, device=device).to(gate.dtype)
            for dy in (dense, dense[:1].expand(gate.shape)):
                results = packed_with_grads(gate_up, dy, order, packed)
                for a, b in zip(results, with_grads(apart, gate, up, dy), strict=True):
                    assert torch.equal(a, b)
                assert_accurate(results, gate, up, dy, approximate)
            options = {"order": order, "approximate": approximate}
            reference = OPS["geglu_packed"].reference(gate_up, **options)
            assert_no_worse_than_plain(
                reference, plain(gate, up, approximate), truth(gate, up, dense, approximate)[0]
            )


def test_packed_compiled_equals_eager(device):
    function = partial(geglu_packed, approximate="tanh")
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (7, 12):
            gate_up = torch.randn(rows, 2 * 129, device=device).to(dtype)
            dy = torch.randn(rows, 129, device=device).to(dtype)
            results = packed_with_grads(gate_up, dy, "up_gate", compiled)
            assert_accurate(results, *halves(gate_up, "up_gate"), dy, "tanh")


def test_packed_is_a_single_node_and_saves_its_input_alone():
    gate_up = torch.randn(8, 64, requires_grad=True)
    forward, backward = partitioned_graphs(lambda x: geglu_packed(x * 2) * 3, gate_up)
    assert [n.target for n in forward.graph.nodes].count(OPS["geglu_packed"].forward) == 1
    assert [n.target for n in backward.graph.nodes].count(OPS["geglu_packed"].backward) == 1
    assert sum(n.op == "placeholder" for n in backward.graph.nodes) == 2  # gate_up, gradient


# --- edges and errors ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (3, 0), (127,), (1, 1025)], ids=str)
def test_edge_shapes(shape, approximate, device):
    gate, up, dy = (torch.randn(shape, device=device) for _ in range(3))
    results = with_grads(partial(geglu, approximate=approximate), gate, up, dy)
    for result, right in zip(results, truth(gate, up, dy, approximate), strict=True):
        assert result.shape == shape
        torch.testing.assert_close(result, right.float().view(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_errors(compiled):
    apart, packed = geglu, geglu_packed
    if compiled:
        options = {"fullgraph": True, "backend": "eager", "dynamic": False}
        apart, packed = (torch.compile(f, **options) for f in (apart, packed))
    ones = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"geglu: gate and up must have one shape, got \(2, 4\)"):
        apart(ones, torch.ones(2, 1))
    with pytest.raises(ValueError, match="geglu: gate and up must hold floats, got torch.int64"):
        apart(ones.long(), ones)
    wrong = 'approximate must be "none" or "tanh", got \'erf\''
    with pytest.raises(ValueError, match=f"geglu: {wrong}"):
        apart(ones, ones, approximate="erf")
    with pytest.raises(ValueError, match=f"geglu_packed: {wrong}"):
        packed(ones, approximate="erf")
    with pytest.raises(
        ValueError, match=r"geglu_packed: gate_up must be \[..., 2 F\], got \(2, 3\)"
    ):
        packed(torch.ones(2, 3))


def test_supports_says_why_not():
    """float8 has no arithmetic; on GPUs inductor keeps the packed op, and erf, as a call."""
    half, eighth = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4).to(torch.float8_e4m3fn)
    apart, packed = OPS["geglu"], OPS["geglu_packed"]
    assert apart.supports(half, half, approximate="tanh") is None
    assert packed.supports(half, order="up_gate", approximate="none") is None
    assert apart.supports(half, eighth).startswith("up is torch.float8_e4m3fn; the kernel takes")
    assert packed.supports(eighth).startswith("gate_up is torch.float8_e4m3fn; the kernel takes")
    assert not packed.prefers_kernel(half) and not apart.prefers_kernel(half, half)
    with FakeTensorMode():
        half = torch.empty(2, 4, dtype=torch.bfloat16, device="cuda")
        assert packed.prefers_kernel(half, order="up_gate", approximate="tanh")
        assert not apart.prefers_kernel(half, half, approximate="tanh")
        assert apart.prefers_kernel(half, half, approximate="none")
