"""xtrain.ops.rope and rope_qk: layouts, positions, gradients, strides, compilation, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import assert_no_worse_than_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, rope, rope_qk

LAYOUTS = ("half", "interleaved")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def angles(*rows: int, pairs: int) -> np.ndarray:
    """Angles of Llama's frequencies at scattered positions, [*rows, pairs]."""
    positions = np.arange(np.prod(rows, dtype=int)).reshape(rows) * 37 % 4096
    return positions[..., None] * 10000.0 ** (-np.arange(pairs) / max(pairs, 1))


def tables(theta: np.ndarray, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    return tuple(torch.from_numpy(f(theta)).to(device, dtype) for f in (np.cos, np.sin))


def truth(x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int = 1) -> Tensor:
    """Each pair as one complex number, times cos + i sin, in NumPy's doubles."""
    out = x.detach().double().cpu().numpy().copy()
    turn = cos.double().cpu().numpy() + sign * 1j * sin.double().cpu().numpy()
    R = 2 * turn.shape[-1]
    first, second = (
        (slice(0, R // 2), slice(R // 2, R))
        if layout == "half"
        else (slice(0, R, 2), slice(1, R, 2))
    )
    z = (out[..., first] + 1j * out[..., second]) * turn[..., None, :, :]
    out[..., first], out[..., second] = z.real, z.imag
    return torch.from_numpy(out).to(x.device)


def plain(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x * cos + rotated * sin with the tables in x's dtype, as transformers' models do."""
    cos, sin = cos.to(x.dtype).unsqueeze(-3), sin.to(x.dtype).unsqueeze(-3)
    R = 2 * cos.shape[-1]
    turning, rest = x[..., :R], x[..., R:]
    if layout == "half":
        a, b = turning.chunk(2, -1)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        turned = turning * cos + torch.cat((-b, a), -1) * sin
    else:
        a, b = turning[..., ::2], turning[..., 1::2]
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        turned = turning * cos + torch.stack((-b, a), -1).flatten(-2) * sin
    return torch.cat((turned, rest), -1)


# --- forward ------------------------------------------------------------------------------------


def test_forward_layouts_by_hand(device):
    """Row C21: pair 0 turned by one radian, pair 1 not at all."""
    cos = torch.tensor([[math.cos(1.0), 1.0]], device=device)
    sin = torch.tensor([[math.sin(1.0), 0.0]], device=device)
    x = torch.tensor([1.0, 0, 0, 0], device=device).view(1, 1, 1, 4)
    half = rope(x, cos, sin, layout="half").flatten().tolist()
    interleaved = rope(x, cos, sin, layout="interleaved").flatten().tolist()
    assert np.allclose(half, [0.540302, 0, 0.841471, 0], rtol=0, atol=1e-6)
    assert np.allclose(interleaved, [0.540302, 0.841471, 0, 0], rtol=0, atol=1e-6)
    assert rope(x, cos, sin).flatten().tolist() == half  # the default


@pytest.mark.parametrize("autocast", [False, True])
def test_forward_far_positions_in_bf16(autocast, device):
    """Row C22: the tables stay fp32 inside the op, whatever x's dtype and the autocast."""
    theta = np.array([[257.0], [4095.0]])
    cos, sin = tables(theta, device=device)
    x = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = rope(x, cos, sin)
    # cos - sin, rounded once: of cos and sin in bf16 the second would be 0.9297
    expected = torch.tensor([1.39266, 0.93185]).to(torch.bfloat16)
    assert out[0, 0, :, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, layout, device):
    x = torch.randn(2, 3, 11, 16, device=device).to(dtype)
    for theta in (angles(11, pairs=8), angles(2, 11, pairs=8), angles(11, pairs=3)):
        for table_dtype in (torch.float32, torch.bfloat16, torch.float64):
            cos, sin = tables(theta, table_dtype, device)
            right = truth(x, cos, sin, layout)
            for out in (
                rope(x, cos, sin, layout=layout),
                OPS["rope"].reference(x, cos, sin, layout=layout),
            ):
                assert out.dtype == dtype and out.is_contiguous()
                assert_no_worse_than_plain(out, plain(x, cos, sin, layout), right)
            rest = x[..., 2 * cos.shape[-1] :]
            assert torch.equal(out[..., 2 * cos.shape[-1] :], rest)  # passes, bit for bit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_qk_is_rope_of_both(layout, device):
    q = torch.randn(2, 4, 11, 16, device=device).to(torch.bfloat16).requires_grad_()
    k = torch.randn(2, 2, 11, 16, device=device).to(torch.bfloat16).requires_grad_()
    cos, sin = tables(angles(2, 11, pairs=6), device=device)
    both = rope_qk(q, k, cos, sin, layout=layout)
    dys = [torch.randn_like(t) for t in both]
    grads = torch.autograd.grad(both, (q, k), dys)
    for x, out, dy, grad in zip((q, k), both, dys, grads, strict=True):
        single = rope(x, cos, sin, layout=layout)
        assert torch.equal(out, single)
        assert torch.equal(grad, torch.autograd.grad(single, x, dy)[0])


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [4, 1])
def test_backward_finite_differences(layout, pairs, device):
    def draw(heads):
        return torch.randn(2, heads, 3, 8, dtype=torch.float64, device=device, requires_grad=True)

    cos, sin = tables(angles(2, 3, pairs=pairs), torch.float64, device)
    q, k = draw(2), draw(1)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: rope(x, cos, sin, layout=layout), (q,), fast_mode=True)
        assert check(lambda q, k: rope_qk(q, k, cos, sin, layout=layout), (q, k), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, layout, device):
    x = torch.randn(2, 3, 11, 16, device=device).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, 11, 16, device=device).to(dtype)
    cos, sin = tables(angles(2, 11, pairs=6), device=device)
    (grad,) = torch.autograd.grad(rope(x, cos, sin, layout=layout), x, dy)
    (rounded,) = torch.autograd.grad(plain(x, cos, sin, layout), x, dy)
    assert_no_worse_than_plain(grad, rounded, truth(dy, cos, sin, layout, sign=-1))


def test_backward_of_one_result_alone(device):
    q, k = (torch.randn(1, 2, 3, 8, device=device, requires_grad=True) for _ in range(2))
    cos, sin = tables(angles(3, pairs=4), device=device)
    first, second = rope_qk(q, k, cos, sin)
    grad_q, grad_k = torch.autograd.grad(first.sum(), (q, k), retain_graph=True, allow_unused=True)
    expected = truth(torch.ones_like(q), cos, sin, "half", sign=-1)
    torch.testing.assert_close(grad_q.double(), expected, rtol=0, atol=1e-6)
    assert grad_k is None  # as if k were turned by a call of its own
    grad_q, grad_k = torch.autograd.grad(second.sum(), (q, k), allow_unused=True)
    assert grad_q is None and torch.allclose(grad_k.double(), expected, rtol=0, atol=1e-6)


# --- strides ------------------------------------------------------------------------------------


def token_major(batch: int, heads: int, length: int, head_dim: int, device) -> Tensor:
    """[B, N, T, H] as a projection gives it."""
    return torch.randn(batch, length, heads, head_dim, device=device).transpose(1, 2)


def test_result_keeps_the_order_of_heads_and_tokens(device):
    cos, sin = tables(angles(5, pairs=4), device=device)
    x = token_major(2, 3, 5, 8, device).requires_grad_()
    fused = torch.randn(2, 5, 4 * 8, device=device)[..., 8:].unflatten(-1, (3, 8)).transpose(1, 2)
    for view in (x, fused):
        out = rope(view, cos, sin)
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(out, rope(view.contiguous(), cos, sin))
    (grad,) = torch.autograd.grad(rope(x, cos, sin), x, token_major(2, 3, 5, 8, device))
    assert grad.transpose(1, 2).is_contiguous()
    assert rope(x.contiguous(), cos, sin).is_contiguous()


# --- compiled -----------------------------------------------------------------------------------


def test_compiled_equals_eager(device):
    """Row C34: bitwise on a CPU, bf16 included, as the op rounds once at its end in both modes."""

    def doubled(q, k, q2, k2, cos, sin):  # a neighbour that inductor fuses with
        half = rope_qk(q, k, cos, sin, layout="half")
        return [2 * out for out in (*half, *rope_qk(q2, k2, cos, sin, layout="interleaved"))]

    def run(function, tensors, cos, sin, dys):
        leaves = [t.detach().requires_grad_() for t in tensors]
        outs = function(*leaves, cos, sin)
        return [*outs, *torch.autograd.grad(outs, leaves, dys)]

    compiled = torch.compile(doubled, fullgraph=True, dynamic=True)
    for length in (11, 20):
        q, k = (token_major(2, heads, length, 16, device) for heads in (4, 2))
        tensors = [t.to(dtype) for dtype in (torch.bfloat16, torch.float32) for t in (q, k)]
        dys = [torch.randn_like(t) for t in tensors]
        cos, sin = tables(angles(length, pairs=6), device=device)
        found, eager = (run(f, tensors, cos, sin, dys) for f in (compiled, doubled))
        for i, (result, expected) in enumerate(zip(found, eager, strict=True)):
            assert result.dtype == tensors[i % 4].dtype
            assert result.stride() == expected.stride() or i >= 4  # gradients: autograd's
            if device.type == "cpu":
                assert torch.equal(result, expected)
            else:  # a GPU may round a product and a sum at once
                torch.testing.assert_close(result, expected)


# --- edges and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        ((1, 1, 1, 2), 1),
        ((2, 3, 1, 7), 3),
        ((0, 2, 3, 8), 4),
        ((2, 2, 0, 8), 4),
        ((2, 0, 3, 8), 4),
        ((1, 2, 3, 8), 0),
        ((1, 1, 129, 80), 40),
    ],
    ids=str,
)
def test_edge_shapes(shape, pairs, layout, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    dy = torch.randn(shape, device=device)
    cos, sin = tables(angles(shape[2], pairs=pairs), device=device)
    out = rope(x, cos, sin, layout=layout)
    (grad,) = torch.autograd.grad(out, x, dy)
    for result, source, sign in ((out, x, 1), (grad, dy, -1)):
        right = truth(source, cos, sin, layout, sign)
        assert result.shape == shape
        torch.testing.assert_close(result.double(), right, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(layout="neox"), r"layout must be \"half\" or \"interleaved\", got 'neox'"),
        (dict(x=torch.ones(3, 8)), r"x must be \[B, N, T, H\], got \(3, 8\)"),
        (dict(sin=torch.ones(3, 3)), r"one shape, got \(3, 4\) and \(3, 3\)"),
        (dict(both=torch.ones(4, 4)), r"\(2, 1, 3, 8\), got \(4, 4\)"),
        (dict(both=torch.ones(3, 5)), r"\(2, 1, 3, 8\), got \(3, 5\)"),
        (dict(both=torch.ones(1, 3, 4)), r"\(2, 1, 3, 8\), got \(1, 3, 4\)"),
        (dict(both=torch.ones(3, 4, dtype=torch.int64)), r"must hold floats, got torch.float32"),
    ],
    ids=str,
)
def test_errors(change, match):
    cos = change.get("both", torch.ones(3, 4))
    sin = change.get("both", change.get("sin", torch.ones(3, 4)))
    x, layout = change.get("x", torch.ones(2, 1, 3, 8)), change.get("layout", "half")
    for op, arguments in ((rope, (x,)), (rope_qk, (x, torch.ones(2, 1, 3, 8)))):
        with pytest.raises(ValueError, match=f"{op.__name__}: .*{match}"):
            op(*arguments, cos, sin, layout=layout)


def test_supports_says_why_not():
    """What one launch cannot take; on GPUs inductor keeps what it can as a call."""
    q, k, table = torch.ones(2, 4, 3, 8), torch.ones(2, 1, 3, 8), torch.ones(3, 4)
    single, both = OPS["rope"], OPS["rope_qk"]
    assert single.supports(q, table, table) is both.supports(q, k, table, table) is None
    eighth = table.to(torch.float8_e4m3fn)
    assert single.supports(q, table, eighth).startswith("sin is torch.float8_e4m3fn; the kernel")
    reason = both.supports(q, k.to(torch.bfloat16), table, table)
    assert reason.startswith("q is torch.float32 and k torch.bfloat16; the kernel takes")
    reason = both.supports(q, k[:1], table, table)
    assert reason.startswith("q is (2, 4, 3, 8) and k (1, 1, 3, 8); the kernel takes")
    assert not single.prefers_kernel(q, table, table)
    with FakeTensorMode():
        q, k, table = (torch.empty(t.shape, device="cuda") for t in (q, k, table))
        assert single.prefers_kernel(q, table, table) and both.prefers_kernel(q, k, table, table)
        assert not both.prefers_kernel(q, k.half(), table, table)
