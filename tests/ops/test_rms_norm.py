"""xtrain.ops.rms_norm: values, both cast orders, gradients, strides, compilation, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_no_worse_than_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, rms_norm

CASTS = ("llama", "gemma")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


def plain(x: Tensor, weight: Tensor, eps: float, *, cast: str) -> Tensor:
    """What Llama's and Gemma's modules in transformers compute, op by op, in x's dtype."""
    c = x.double() if x.dtype == torch.float64 else x.float()
    normalised = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        return weight * normalised.to(x.dtype)
    return (normalised * (1.0 + weight.to(c.dtype))).type_as(x)


def truth(x: Tensor, weight: Tensor, eps: float, *, cast: str) -> Tensor:
    """torch's own kernel in fp64, which rounds nowhere between."""
    scale = weight.double() if cast == "llama" else 1.0 + weight.double()
    return F.rms_norm(x.double(), weight.shape, scale, eps)


def draw(shape, dtype, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and grad_out; rows of very different size."""
    x = torch.randn(shape) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    weight, dy = torch.rand(shape[-1]) + 0.5, torch.randn(shape)
    return tuple(t.to(device, dtype) for t in (x, weight, dy))


def with_grads(function, x: Tensor, weight: Tensor, dy: Tensor, cast: str) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(x, weight, EPS, cast=cast)
    return [out, *torch.autograd.grad(out, (x, weight), dy.to(out.dtype))]


def assert_accurate(results: list[Tensor], x: Tensor, weight: Tensor, dy: Tensor, cast: str):
    exact = with_grads(truth, x.double(), weight.double(), dy.double(), cast)
    rounded = with_grads(plain, x, weight, dy, cast)
    for result, in_dtype, right in zip(results, rounded, exact, strict=True):
        assert_no_worse_than_plain(result, in_dtype, right)


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS)
def test_forward_cast_order(cast, device):
    """Row C18: the last element tells the orders apart; 1 + w is formed in fp32."""
    x = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16, device=device)
    weight = torch.full((4,), 0.7, dtype=torch.bfloat16, device=device)
    if cast == "llama":
        expected = [0.361328125, 0.361328125, 0.72265625, 1.078125]
        assert rms_norm(x, weight).tolist() == expected
        assert rms_norm(x, weight, 1e-6, cast="llama").tolist() == expected
        return
    # 0.69921875 - 1 is exact in bf16, so that 1 + w is the same 0.69921875.
    expected = [0.361328125, 0.361328125, 0.72265625, 1.0859375]
    assert rms_norm(x, weight - 1, cast="gemma").tolist() == expected
    tiny = torch.full((256,), 0.00390625, dtype=torch.bfloat16, device=device)
    ones = torch.full((256,), 128.0, dtype=torch.bfloat16, device=device)
    # bf16 rounds 1.00390625 to 1, be it weight or result: fp32 x keeps what the weight acts as.
    out = rms_norm(ones.float(), tiny, 0.0, cast="gemma")
    assert set(out.tolist()) == {1.00390625}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_forward(cast, dtype, device):
    x, weight, dy = draw((6, 5, 257), dtype, device)
    out = rms_norm(x, weight, EPS, cast=cast)
    assert out.dtype == dtype and out.is_contiguous()
    assert_no_worse_than_plain(
        out, plain(x, weight, EPS, cast=cast), truth(x, weight, EPS, cast=cast)
    )
    reference = OPS["rms_norm"].reference(x, weight, EPS, cast=cast)
    assert_no_worse_than_plain(
        reference, plain(x, weight, EPS, cast=cast), truth(x, weight, EPS, cast=cast)
    )


@pytest.mark.parametrize("cast", CASTS)
def test_forward_mixed_dtypes(cast):
    x, weight, dy = draw((4, 64), torch.bfloat16)
    mixed = rms_norm(x, weight.float(), EPS, cast=cast)
    assert mixed.dtype == (torch.float32 if cast == "llama" else torch.bfloat16)
    assert torch.equal(mixed, plain(x, weight.float(), EPS, cast=cast).to(mixed.dtype))
    grads = with_grads(rms_norm, x, weight.float(), dy, cast)
    assert [g.dtype for g in grads[1:]] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("cast", CASTS)
def test_forward_out_dtype(cast, device):
    """The swallowed cast: the result rounded once more, and the gradient of what the cast gave."""
    forward = OPS["rms_norm"].forward
    x, weight, dy = draw((6, 96), torch.float32, device)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    plainly, cast_too = forward(*leaves, EPS, cast), forward(*leaves, EPS, cast, torch.bfloat16)
    assert cast_too.dtype == torch.bfloat16 and torch.equal(cast_too, plainly.bfloat16())
    dy = dy.bfloat16()
    grads = torch.autograd.grad(cast_too, leaves, dy)
    for grad, right in zip(grads, torch.autograd.grad(plainly, leaves, dy.float()), strict=True):
        assert torch.equal(grad, right)


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 4), (6,)], ids=str)
def test_backward_finite_differences(cast, shape, device):
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a, w: rms_norm(a, w, 1e-3, cast=cast), (x, weight), fast_mode=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_backward(cast, dtype, device):
    x, weight, dy = draw((6, 5, 257), dtype, device)
    results = with_grads(rms_norm, x, weight, dy, cast)
    assert [t.dtype for t in results] == [dtype] * 3
    assert_accurate(results, x, weight, dy, cast)


def test_backward_weight_gradient_is_accumulated_in_fp32(device):
    """Row C28's sum: 1 and 256 times 1/256 make 2; in bf16 the sum would stay at 1."""
    x = torch.ones(257, 8, dtype=torch.bfloat16, device=device)
    weight = torch.ones(8, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.full((257, 8), 1 / 256, dtype=torch.bfloat16, device=device)
    dy[0] = 1.0
    rms_norm(x, weight, 0.0).backward(dy)
    assert weight.grad.tolist() == [2.0] * 8


def test_backward_weight_gradient_is_of_the_norm_as_it_was_rounded(device):
    """A weight of fp32 ones shows what it was multiplied by: x / rms in bf16, bit for bit."""
    x = torch.randn(1, 37, device=device).bfloat16()
    weight = torch.ones(37, device=device, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert torch.equal(weight.grad, y[0].detach())


# --- strides ------------------------------------------------------------------------------------


def test_strided(device):
    """Results are dense and lie in the order of x: of [B, T, N, H] where x is its [B, N, T, H]."""
    base, heads = torch.randn(6, 4, 10, device=device), torch.randn(2, 5, 3 * 40, device=device)
    packed = heads[..., 40:80].unflatten(-1, (5, 8))
    views = [
        (base.transpose(0, 2), (6, 60, 1)),  # 10, 4, 6
        (base[..., ::2], (20, 5, 1)),
        (base[1:, :, 3:], (28, 7, 1)),
        (base[:1].expand(6, 4, 10), (40, 10, 1)),
        (base.transpose(0, 1), (10, 40, 1)),
        (packed, (200, 40, 8, 1)),
        (packed.transpose(1, 2), (200, 8, 40, 1)),
        (packed.permute(2, 0, 1, 3), (8, 200, 40, 1)),
        (packed[:, :, :1].expand(2, 5, 4, 8).transpose(1, 2), (160, 40, 8, 1)),
    ]
    for view, strides in views:
        weight = torch.randn(2 * view.shape[-1], device=device)[::2]
        dy = torch.randn(view.shape, device=device).transpose(0, 2).contiguous().transpose(0, 2)
        strided = with_grads(rms_norm, view, weight, dy, "llama")
        dense = [t.contiguous() for t in (view, weight, dy)]
        *of_rows, grad_weight = with_grads(rms_norm, *dense, "llama")
        for a, b in zip(strided[:2], of_rows, strict=True):
            assert torch.equal(a, b) and a.stride() == strides
        torch.testing.assert_close(strided[2], grad_weight)  # summed in the order of memory
        assert strided[2].is_contiguous()


# --- compiled -----------------------------------------------------------------------------------


def test_compiled_equals_eager(device):
    """Both cast orders in one graph, each in a dtype of its own."""

    def both(x, weight, x2, weight2):
        return rms_norm(x, weight, EPS, cast="llama"), rms_norm(x2, weight2, EPS, cast="gemma")

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows in (7, 12):
        drawn = [draw((rows, 257), dtype, device) for dtype in (torch.bfloat16, torch.float32)]
        leaves = [t.detach().requires_grad_() for x, weight, _ in drawn for t in (x, weight)]
        outs = compiled(*leaves)
        grads = torch.autograd.grad(outs, leaves, [dy for *_, dy in drawn])
        for given, cast, out, *found in zip(
            drawn, CASTS, outs, grads[::2], grads[1::2], strict=True
        ):
            assert_accurate([out, *found], *given, cast)
            for result, other in zip(
                (out, *found), with_grads(rms_norm, *given, cast), strict=True
            ):
                assert result.dtype == other.dtype and result.stride() == other.stride()


def test_kernel_is_preferred_for_the_rows_of_models_on_a_gpu():
    prefers = OPS["rms_norm"].prefers_kernel
    with FakeTensorMode():
        for n_cols, preferred in (
            (63, False),
            (64, True),
            (8192, True),
            (8193, False),
        ):
            x, weight = torch.empty(4, n_cols, device="cuda"), torch.empty(n_cols, device="cuda")
            assert prefers(x, weight) is preferred
            assert not prefers(x.double(), weight) and not prefers(x.cpu(), weight.cpu())


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (0, 8), (3, 0), (2, 0, 5), (3, 127), (1, 1025), (2, 3, 4, 5)], ids=str
)
def test_edge_shapes(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    out = rms_norm(x, weight, EPS)
    torch.testing.assert_close(out, plain(x, weight, EPS, cast="llama"))
    dy = torch.randn(shape, device=device)
    grads = torch.autograd.grad(out, (x, weight), dy)
    right = torch.autograd.grad(plain(x, weight, EPS, cast="llama"), (x, weight), dy)
    for grad, expected in zip(grads, right, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_edge_rows_of_zeros(device):
    x = torch.zeros(2, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    out = rms_norm(x, weight, 1e-6)
    out.backward(torch.ones_like(out))
    assert out.abs().max() == 0 and weight.grad.abs().max() == 0
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e3))  # 1 / sqrt(eps)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(cast="olmo"), r"cast must be \"llama\" or \"gemma\", got 'olmo'"),
        (dict(eps=-1e-6), r"eps must be finite and not negative, got -1e-06"),
        (dict(eps=math.nan), r"eps must be .* got nan"),
        (dict(weight=torch.ones(5)), r"weight \(5,\) for x \(2, 4\)"),
        (dict(weight=torch.ones(1, 4)), r"weight \(1, 4\) for x \(2, 4\)"),
        (dict(x=torch.tensor(1.0)), r"for x \(\)"),
        (dict(x=torch.ones(2, 4, dtype=torch.int64)), r"must hold floats, got torch.int64"),
    ],
    ids=str,
)
def test_errors(change, match):
    arguments = dict(x=torch.ones(2, 4), weight=torch.ones(4), eps=1e-6, cast="llama") | change
    with pytest.raises(ValueError, match=f"rms_norm: .*{match}"):
        rms_norm(**arguments)
