"""xtrain.ops.sdpa: masks, alignment, grouped heads, empty rows, gradients, compilation, errors."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close, assert_no_worse_than_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xtrain.ops import OPS, sdpa
from xtrain.ops.sdpa import decomposition, library
from xtrain.ops.sdpa.op import sdpa_backend, sdpa_reference

FP32_MIN = torch.finfo(torch.float32).min


def numpy_sdpa(
    q, k, v, *, mask=None, causal=False, scale=None, window=None, softcap=None, documents=None
):
    """Query by query, from the definition in docs/design.md, in fp64."""
    B, N, T, H = q.shape
    M, S = k.shape[1:3]
    out = np.zeros((B, N, T, v.shape[-1]))
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    full = None if mask is None else np.broadcast_to(mask, (B, N, T, S))
    for b, n, i in np.ndindex(B, N, T):
        scores = scale * (k[b, n // (N // M)] @ q[b, n, i])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sees = np.ones(S, bool)
        if causal:
            j = np.arange(S)
            sees &= (j <= i + S - T) & (j > i + S - T - (S + T if window is None else window))
        if documents is not None:
            sees &= documents[b] == documents[b, i]
        if full is not None and full.dtype == bool:
            sees &= full[b, n, i]
        elif full is not None:
            scores = scores + full[b, n, i].astype(np.float64)
            sees &= full[b, n, i] != -np.inf
        if sees.any():
            e = np.exp(np.where(sees, scores - scores[sees].max(), -np.inf))
            out[b, n, i] = (e / e.sum()) @ v[b, n // (N // M)]
    return out


def qkv(N=4, M=2, T=6, S=6, H=8, dtype=torch.float64, device="cpu", B=2) -> list[Tensor]:
    shapes = ((B, N, T, H), (B, M, S, H), (B, M, S, H))
    return [torch.randn(s, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def masks(B: int, N: int, T: int, S: int) -> dict[str, Tensor | None]:
    """One of each kind; `bool`, `minus inf` and `minima` hold a row without a True."""
    sees = torch.rand(B, 1, T, S) > 0.5
    sees[0, 0, T // 2] = False
    return {
        "none": None,
        "bool": sees,
        "keys": torch.rand(B, 1, 1, S) > 0.3,
        "minus inf": torch.zeros(T, S).masked_fill(~sees[0, 0], -math.inf),
        "minima": torch.zeros(B, 1, T, S).masked_fill(~sees, FP32_MIN),
        "bias bf16": torch.randn(1, N, T, S).bfloat16(),
    }


SHAPES = {
    "square": (4, 2, 6, 6, 8),
    "longer keys": (4, 1, 4, 9, 5),
    "longer queries": (2, 2, 9, 6, 8),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3, "scale": 0.7},
    "softcap": {"causal": True, "softcap": 1.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward(shape, options):
    """Reference and op against NumPy, for every kind of mask."""
    N, M, T, S, H = shape
    for mask in masks(2, N, T, S).values():
        q, k, v = (t.detach() for t in qkv(*shape))
        as_numpy = (
            None
            if mask is None
            else mask.float().numpy()
            if mask.is_floating_point()
            else mask.numpy()
        )
        expected = torch.from_numpy(
            numpy_sdpa(q.numpy(), k.numpy(), v.numpy(), mask=as_numpy, **options)
        )
        assert_close(sdpa_reference(q, k, v, mask=mask, **options), expected)
        assert_close(sdpa(q, k, v, mask=mask, **options), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_documents(options, dtype, device):
    """Values against NumPy, gradients against the reference, with a mask tensor and without."""
    ids = torch.tensor([[7, 7, 7, 0, 0, 2], [1, 5, 1, 5, 5, 1]], dtype=dtype, device=device)
    for mask in (None, torch.rand(6, 6, device=device) > 0.3):
        inputs = qkv(device=device)
        arrays = [t.detach().cpu().numpy() for t in inputs]
        as_numpy = None if mask is None else mask.cpu().numpy()
        expected = numpy_sdpa(*arrays, mask=as_numpy, documents=ids.cpu().numpy(), **options)
        out = sdpa(*inputs, mask=mask, documents=ids, **options)
        reference = sdpa_reference(*inputs, mask=mask, documents=ids, **options)
        assert_close(out.cpu(), torch.from_numpy(expected))
        assert_close(reference.cpu(), torch.from_numpy(expected))
        dy = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dy)
        for grad, true in zip(grads, torch.autograd.grad(reference, inputs, dy), strict=True):
            assert_close(grad, true)


def test_documents_are_rows_of_their_own():
    """Packed into one row, each text gives what it gives alone."""
    q, k, v = (t.detach() for t in qkv(B=1))
    ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
    packed = sdpa(q, k, v, causal=True, documents=ids)
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = sdpa(q[:, :, part], k[:, :, part], v[:, :, part], causal=True)
        assert_close(packed[:, :, part], alone)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_backward(shape, options, device):
    """Gradients against autograd through the reference, in fp64 and, with one order less, fp32."""
    N, M, T, S, H = shape
    for mask in masks(2, N, T, S).values():
        mask = None if mask is None else mask.to(device)
        inputs = qkv(*shape, device=device)
        dy = torch.randn(2, N, T, H, dtype=torch.float64, device=device)
        truth = torch.autograd.grad(sdpa_reference(*inputs, mask=mask, **options), inputs, dy)
        grads = torch.autograd.grad(sdpa(*inputs, mask=mask, **options), inputs, dy)
        single = [t.detach().float().requires_grad_() for t in inputs]
        grads32 = torch.autograd.grad(sdpa(*single, mask=mask, **options), single, dy.float())
        for grad, grad32, true in zip(grads, grads32, truth, strict=True):
            assert_close(grad, true)
            assert (grad32.double() - true).abs().max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_backward_finite_differences(options):
    q, k, v = qkv(N=4, M=2, T=3, S=4, H=2, B=1)
    sees = torch.rand(1, 1, 3, 4) > 0.4
    bias = torch.randn(4, 3, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: sdpa(*t, mask=sees, **options), (q, k, v), fast_mode=True
    )
    assert torch.autograd.gradcheck(
        lambda *t: sdpa(*t[:3], mask=t[3], **options), (q, k, v, bias), fast_mode=True
    ), "the float mask's own gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96])
def test_no_worse_than_torch(head_dim, dtype, device):
    """Row C32: any head dim; error at most twice that of F.scaled_dot_product_attention."""
    inputs = qkv(N=4, M=2, T=48, S=48, H=head_dim, dtype=dtype, device=device)
    dy = torch.randn(2, 4, 48, head_dim, dtype=torch.float64).to(device, dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    plain_inputs = [t.detach().clone().requires_grad_() for t in inputs]
    truth = sdpa_reference(*exact, causal=True)
    plain = F.scaled_dot_product_attention(*plain_inputs, is_causal=True, enable_gqa=True)
    out = sdpa(*inputs, causal=True)
    assert_no_worse_than_plain(out, plain, truth)
    truths = torch.autograd.grad(truth, exact, dy.double())
    plains = torch.autograd.grad(plain, plain_inputs, dy)
    for grad, other, true in zip(torch.autograd.grad(out, inputs, dy), plains, truths, strict=True):
        assert_no_worse_than_plain(grad, other, true)


# --- rows that see nothing, finite minima, grouped heads ------------------------------------------


@pytest.mark.parametrize(
    "mode,kind",
    [*(("eager", kind) for kind in ("bool", "float", "softcap", "causal"))]
    # one for a library kernel, one for the explicit form
    + [("compiled", "bool"), ("compiled", "softcap")],
)
def test_row_that_sees_nothing(kind, mode, device):
    """Row C30: exact zeros, zero and finite gradients, the other rows as if it were not there."""
    T = 7 if kind == "causal" else 5  # bottom-right: with 5 keys, queries 0 and 1 of 7 see nothing
    empty = [0, 1] if kind == "causal" else [2]
    sees = torch.ones(T, 5, dtype=torch.bool, device=device)
    sees[empty] = False
    options = {
        "bool": {"mask": sees},
        "float": {"mask": torch.zeros(T, 5, device=device).masked_fill(~sees, -math.inf)},
        "softcap": {"mask": sees, "softcap": 3.0},
        "causal": {"causal": True},
    }[kind]
    function = lambda q, k, v: sdpa(q, k, v, **options)  # noqa: E731
    function = torch.compile(function, fullgraph=True) if mode == "compiled" else function
    q, k, v = qkv(T=T, S=5, dtype=torch.float32, device=device)
    out = function(q, k, v)
    grads = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v))
    assert (out[:, :, empty] == 0).all() and (grads[0][:, :, empty] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    rest = [i for i in range(T) if i not in empty]
    others = dict(options, causal=False)
    if "mask" in options:
        others["mask"] = options["mask"][rest]
    else:
        others["mask"] = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    some = q[:, :, rest].detach().requires_grad_()
    k2, v2 = k.detach().requires_grad_(), v.detach().requires_grad_()
    without = sdpa(some, k2, v2, **others)
    expected = torch.autograd.grad(without.square().sum() + without.sum(), (some, k2, v2))
    assert_close(out[:, :, rest], without)
    for grad, want in zip((grads[0][:, :, rest], *grads[1:]), expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


def test_finite_minima_are_ordinary_numbers(device):
    """A row of equal huge minima attends evenly, as the sum in c says, and so does its gradient."""
    q, k, v = qkv(T=3, S=4, dtype=torch.float32, device=device)
    mask = torch.zeros(3, 4, device=device)
    mask[1] = FP32_MIN
    out = sdpa(q, k, v, mask=mask)
    assert_close(out[:, :, 1], v.mean(2).repeat_interleave(2, dim=1))
    (dv,) = torch.autograd.grad(out[:, :, 1].sum(), v)
    assert_close(dv, torch.full_like(dv, 2 / 4))
    assert_close(out, sdpa_reference(q, k, v, mask=mask))


def test_query_head_uses_its_group(device):
    """Row C32: with v of KV head j equal to j, heads give [0, 0, 1, 1]."""
    q, k, v = (t.detach() for t in qkv(N=4, M=2, dtype=torch.float32, device=device))
    v = torch.arange(2.0, device=device)[None, :, None, None].expand(v.shape)
    for options in OPTIONS.values():
        out = sdpa(q, k, v, **options)
        expected = torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)[None, :, None, None]
        assert_close(out, expected.expand(out.shape))


def test_causal_is_aligned_bottom_right():
    """One query against a cache of keys sees them all; of two, the first does not see the last."""
    q, k, v = (t.detach() for t in qkv(N=1, M=1, T=2, S=5))
    out = sdpa(q, k, v, causal=True)
    assert_close(out[:, :, 1:], sdpa(q[:, :, 1:], k, v))
    assert_close(out[:, :, :1], sdpa(q[:, :, :1], k[:, :, :4], v[:, :, :4]))
    window = sdpa(q, k, v, causal=True, window=2)
    assert_close(window[:, :, 1:], sdpa(q[:, :, 1:], k[:, :, 3:], v[:, :, 3:]))
    assert torch.equal(window, sdpa(q, k, v, window=2)), "a window is causal by itself"


# --- backends, notice, memory, layout -------------------------------------------------------------


def test_backend_is_reported():
    q, k, v = qkv(dtype=torch.float32)
    bias = torch.zeros(6, 6)
    assert sdpa_backend(q, k, v, causal=True) == "cpu_flash"
    assert sdpa_backend(q, k, v, mask=bias) == "cpu_flash"
    assert sdpa_backend(q, k, v, softcap=2.0) == "explicit: softcap is known to no library kernel"
    assert OPS["sdpa"].supports(q, k, v) is None
    assert "softcap" in OPS["sdpa"].supports(q, k, v, softcap=2.0)


def test_notice_when_grouped_heads_fall_to_the_explicit_form(caplog):
    """Row C32: said once for fp32 with grouped heads."""
    decomposition._notice.cache_clear()
    q, k, v = qkv(dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger="xtrain.ops.sdpa_decomposition"):
        sdpa(q, k, v, causal=True)
        assert not caplog.records
        sdpa(q, k, v, softcap=2.0)
        sdpa(q, k, v, softcap=2.0)
    (record,) = caplog.records
    assert "torch.float32, grouped heads" in record.getMessage()


def test_result_lies_as_q_does():
    q = torch.randn(2, 6, 4, 8).transpose(1, 2)
    k = torch.randn(2, 2, 6, 8)
    assert sdpa(q, k, k).transpose(1, 2).is_contiguous()
    assert sdpa(q.contiguous(), k, k).is_contiguous()


def falcon(row, N, M):
    q, k, v = row.unflatten(-1, (M, N // M + 2, -1)).split([N // M, 1, 1], -2)
    return [t.flatten(2, 3).transpose(1, 2) for t in (q, k, v)]


def sequence_first(row, N, M):
    return row.unflatten(-1, (3, N, -1)).permute(2, 1, 3, 0, 4).unbind()


# How one projection's rows hold queries, keys and values; row, N, M -> q, k, v [B, N, T, H]
PACKED = {
    "q | k | v": lambda row, N, M: [
        t.unflatten(-1, (heads, -1)).transpose(1, 2)
        for t, heads in zip(
            row.split([row.shape[-1] // (N + 2 * M) * n for n in (N, M, M)], -1),
            (N, M, M),
            strict=True,
        )
    ],
    "by head": lambda row, N, M: row.unflatten(-1, (N, -1)).transpose(1, 2).chunk(3, -1),
    "by group": falcon,
    "sequence first": sequence_first,
}
PACKINGS = [("q | k | v", 4, 4), ("q | k | v", 4, 2), ("by head", 4, 4), ("by group", 4, 1)]
PACKINGS += [("sequence first", 4, 4), ("q | k | v", 1, 1), ("by head", 3, 3)]


@pytest.mark.parametrize("packing,N,M", PACKINGS)
def test_parts_of_a_row_are_taken_in_place(packing, N, M, device):
    """Result and gradients lie in the order of the row's heads and tokens: nothing is turned."""
    B, T, H = 2, 5, 8
    row = torch.randn(B, T, (N + 2 * M) * H, device=device, requires_grad=True)
    if packing == "sequence first":
        row = row.detach().transpose(0, 1).contiguous().requires_grad_()
    q, k, v = PACKED[packing](row, N, M)
    out = sdpa(q, k, v, causal=True)
    to_memory = (2, 0, 1, 3) if packing == "sequence first" else (0, 2, 1, 3)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out), retain_graph=True)
    for result in (out, *grads):
        assert result.permute(to_memory).is_contiguous()
    reference = sdpa_reference(q, k, v, causal=True)
    assert_close(out, reference)
    dy = torch.randn_like(out)
    (grad,), (true,) = (torch.autograd.grad(y, row, dy) for y in (out, reference))
    torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing,N,M", PACKINGS)
def test_a_gpu_is_promised_the_order_of_the_row(packing, N, M):
    """Of a GPU that need not be there: what a graph knows of the op decides on its copies."""
    B, T, H = 2, 5, 8
    turned = packing == "sequence first"
    to_memory = (2, 0, 1, 3) if turned else (0, 2, 1, 3)
    with FakeTensorMode():
        row = torch.empty(*(T, B) if turned else (B, T), (N + 2 * M) * H, device="cuda")
        q, k, v = PACKED[packing](row, N, M)
        options = (True, 0.3, None, None)
        out, lse = OPS["sdpa"].forward(q, k, v, None, *options)
        grads = OPS["sdpa"].backward(out, q, k, v, None, out, lse, *options, False)
        for result in (out, *grads[:3]):
            assert result.permute(to_memory).is_contiguous()


# --- compilation, edges, errors -------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(dynamic, device):
    """Static: library kernels, with a mask too, and a learnt bias; dynamic: one kernel."""
    sees = torch.rand(2, 1, 6, 6, device=device) > 0.4
    bias = torch.randn(6, 6, device=device, requires_grad=True)

    def function(q, k, v, bias):
        if dynamic:
            return [sdpa(q, k, v, causal=True) + bias.sum()]
        masked = sdpa(q, k, v, causal=True, mask=sees)
        return [sdpa(q, k, v, causal=True), masked, sdpa(q, k, v, mask=bias)]

    inputs = [*qkv(dtype=torch.float32, device=device), bias]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    outs, expected = compiled(*inputs), function(*inputs)
    for out, want in zip(outs, expected, strict=True):
        assert_close(out, want)
        assert out.stride() == want.stride()
    dys = [torch.randn_like(t) for t in expected]
    grads = torch.autograd.grad(outs, inputs, dys)
    for grad, want in zip(grads, torch.autograd.grad(expected, inputs, dys), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T,S", [(1, 1), (1, 7), (7, 1), (33, 31), (0, 3), (3, 0), (65, 129)])
def test_edge_shapes(T, S, device):
    q, k, v = qkv(T=T, S=S, dtype=torch.float32, device=device)
    for options in OPTIONS.values():
        out = sdpa(q, k, v, **options)
        assert_close(out, sdpa_reference(q, k, v, **options))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        wants = torch.autograd.grad(sdpa_reference(q, k, v, **options).sum(), (q, k, v))
        for grad, want in zip(grads, wants, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


def test_value_head_dim_of_its_own():
    q, k, _ = qkv(H=6)
    v = torch.randn(2, 2, 6, 3, dtype=torch.float64, requires_grad=True)
    assert_close(sdpa(q, k, v, causal=True), sdpa_reference(q, k, v, causal=True))
    assert torch.autograd.gradcheck(lambda *t: sdpa(*t, causal=True), (q, k, v), fast_mode=True)


def test_errors():
    q, k, v = qkv(N=4, M=2)
    cases = [
        ((q[0], k, v), {}, r"must be \[batch, heads, length, head dim\], got q \(4, 6, 8\)"),
        ((q, k, v[:, :, :5]), {}, r"do not fit together: .*v \(2, 2, 5, 8\)"),
        ((q[:, :3], k, v), {}, "3 query heads cannot be shared out among 2 KV heads"),
        ((q, k, v.float()), {}, "one float dtype, got torch.float64, .*torch.float32"),
        ((q, k, v), {"window": -2}, "window must be at least 1, got -2"),
        ((q, k, v), {"window": 0, "causal": True}, "window must be at least 1"),
        ((q, k, v), {"softcap": 0.0}, "softcap must be positive, got 0.0"),
        ((q, k, v), {"mask": torch.ones(6, 6).int()}, r"mask must be bool .* got torch.int32"),
        ((q, k, v), {"documents": torch.zeros(2, 6)}, "documents must be int32 or int64, got"),
        (
            (q, k, v),
            {"documents": torch.zeros(2, 5, dtype=torch.int32)},
            r"documents \(2, 5\) must be \[batch, length\] .* got 6 queries and 6 keys of batch 2",
        ),
        ((q, k, v), {"mask": torch.ones(6, 5)}, r"mask \(6, 5\) does not broadcast to \(2, 4, 6"),
    ]
    for args, options, message in cases:
        with pytest.raises(ValueError, match=message):
            sdpa(*args, **options)


# --- torch's kernels behind one interface ---------------------------------------------------------


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
