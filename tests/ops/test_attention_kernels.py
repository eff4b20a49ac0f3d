"""The contract with torch's attention kernels, per torch version: shapes, lse, gradients."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from xtrain.ops.sdpa import library

GPU_KERNELS = ("flash", "cudnn", "efficient")


def explicit(q, k, v, bias, scale):
    groups = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(groups, dim=1)
    scores = q @ keys.transpose(-1, -2) * scale + bias
    return torch.softmax(scores, -1) @ v.repeat_interleave(groups, dim=1), scores.logsumexp(-1)


def bias_of(kind: str, T: int) -> torch.Tensor:
    rows = torch.zeros(T, T, dtype=torch.float64)
    if kind == "none":
        return rows
    sees = torch.ones(T, T, dtype=torch.bool).tril() if kind == "causal" else torch.rand(T, T) > 0.4
    return rows.masked_fill(~sees, -torch.inf).index_fill(1, torch.tensor([0]), 0.0)


@pytest.mark.parametrize("kind", ["none", "causal", "mask"])
def test_cpu_flash(kind):
    """Grouped heads, any head dim, top-left causal, a mask by broadcasting, lse as a logarithm."""
    q, k, v = (torch.randn(2, n, 9, 5, dtype=torch.float64) for n in (4, 2, 2))
    bias = bias_of(kind, 9)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected, lse = explicit(*leaves, bias, 0.3)
    passed = bias[None, None] if kind == "mask" else None
    out, got_lse = library.forward("cpu_flash", q, k, v, passed, kind == "causal", 0.3)
    assert_close(out, expected.detach())
    assert_close(got_lse, lse.detach())
    dy = torch.randn_like(out)
    grads = library.backward("cpu_flash", dy, q, k, v, passed, out, got_lse, kind == "causal", 0.3)
    for grad, want in zip(grads, torch.autograd.grad(expected, leaves, dy), strict=True):
        assert_close(grad, want)


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_gpu_kernels_take_our_arguments(kernel, head_dim):
    """On meta tensors, so without a GPU: what a compile sees of the kernels' shapes."""
    q, k = (torch.empty(2, n, 33, head_dim, dtype=torch.bfloat16, device="meta") for n in (4, 2))
    bias = torch.empty(2, 1, 33, 33, device="meta") if kernel == "efficient" else None
    out, lse = library.forward(kernel, q, k, k, bias, bias is None, 0.1)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    grads = library.backward(kernel, out, q, k, k, bias, out, lse, bias is None, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 40, 128])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_gpu_kernels(kernel, groups, head_dim):
    """Values, lse, and gradients from an incoming gradient in either order of heads and tokens."""
    shapes = ((2, 4, 65, head_dim), *[(2, 4 // groups, 65, head_dim)] * 2)
    q, k, v = (torch.randn(s, device="cuda").bfloat16() for s in shapes)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    bias = bias_of("causal", 65).to("cuda")
    expected, expected_lse = explicit(*leaves, bias, 0.1)
    dy = torch.randn_like(q)
    wants = torch.autograd.grad(expected, leaves, dy.double())
    out, lse = library.forward(kernel, q, k, v, None, True, 0.1)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    for grad_out in (dy, dy.transpose(1, 2).contiguous().transpose(1, 2)):
        grads = library.backward(kernel, grad_out, q, k, v, None, out, lse, True, 0.1)
        for grad, want in zip(grads, wants, strict=True):
            # gradients sum 65 products of values rounded to bf16; measured error up to 0.024
            torch.testing.assert_close(grad.double(), want, rtol=4e-2, atol=4e-2)


@pytest.mark.gpu
def test_gpu_choice():
    """The first of the ranking that serves; torch's switches and its deterministic mode count."""
    q, k = (torch.randn(2, n, 64, 64, device="cuda") for n in (4, 2))
    half, half_k = q.bfloat16(), k.bfloat16()
    bias = torch.zeros(64, 64, device="cuda")
    choose = library.choose
    assert choose(half, half_k, half_k, None, True) in ("flash", "cudnn")
    assert choose(half, half_k, half_k, bias, False) == "efficient"
    assert choose(q, k, k, None, True) == "efficient"  # fp32, grouped heads repeated
    assert choose(q.double(), k.double(), k.double(), None, True) is None
    backends = torch.nn.attention.SDPBackend
    for name, backend in (("flash", backends.FLASH_ATTENTION), ("cudnn", backends.CUDNN_ATTENTION)):
        with torch.nn.attention.sdpa_kernel(backend):
            assert choose(half, half_k, half_k, None, True) == name
