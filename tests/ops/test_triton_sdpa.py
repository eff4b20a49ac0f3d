"""The attention kernels: interpreted, compiled for four architectures, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from ahead_of_time import ARCHITECTURES, compile_launches, meta
from interpreter import (  # noqa: F401
    INTERPRETING,
    bf16_rounds_to_nearest,
    loop_bounds_are_scalars,
    run_interpreted,
)
from sdpa_truth import attention, plain_attention
from test_sdpa import PACKED, PACKINGS
from tolerances import assert_no_worse_than_plain

from xtrain.ops import sdpa
from xtrain.ops.sdpa import library
from xtrain.ops.sdpa.kernel import sdpa_bwd_kv, sdpa_bwd_q, sdpa_fwd
from xtrain.ops.sdpa.op import (
    as_options,
    backward_by_kernels,
    forward_by_kernel,
    sdpa_backend,
    triton_refuses,
)
from xtrain.ops.sdpa.tiles import Blocks, dense_rows, document_ranges, wants_tma

# a row that sees nothing divides 0 by 0 under the interpreter, and drops the result
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered:RuntimeWarning"
)

KERNELS = ("fwd", "bwd_q", "bwd_kv")
# What a program may use of an SM's shared memory; CUDA C++ programming guide, table of capabilities
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def test_under_the_interpreter():
    run_interpreted(__file__)


# --- ahead of time --------------------------------------------------------------------------------


def compiled(name, arch, dtype, head_dim, *, size=1024, documents=False, **options):
    """Compile as the launcher does for aligned tensors of this head dim; return the resources.

    size: of both lengths; 1 goes for batch and heads too, and Triton makes all of them constant.
    """
    B, N, M = (1, 1, 1) if size == 1 else (2, 4, 2)
    q, k = (meta(B, n, size, head_dim, dtype=dtype) for n in (N, M))
    lse, ids = meta(B, N, size, dtype=torch.float32), meta(B, size, dtype=torch.int32)
    what = as_options(q, causal=True, scale=0.1, documents=ids if documents else None, **options)
    how = {"tma": wants_tma(dtype, arch)}
    launch = {
        "fwd": lambda: sdpa_fwd(q, k, k, what, q, lse, **how),
        "bwd_q": lambda: sdpa_bwd_q(q, q, k, k, what, q, lse, q, **how),
        "bwd_kv": lambda: sdpa_bwd_kv(q, q, k, k, what, lse, lse, k, k, **how),
    }[name]
    return compile_launches(launch, arch)[-1]  # behind the ranges of documents


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda sm: f"sm_{sm}")
def test_compiles_for(arch, name):
    """At head dim 128 in bf16: shared memory fits, and nothing to speak of spills.

    The kernel of grad_k and grad_v keeps two results of [128, 128] in the registers of eight warps
    on sm_90: 96 bytes spill with Triton 3.7, 80 with 3.6; fetched by threads in place of TMA, 296.
    """
    usage = compiled(name, arch, torch.bfloat16, 128)
    assert usage.shared_bytes <= SHARED_BYTES[arch], usage
    assert usage.spills <= (100 if (name, arch) == ("bwd_kv", 90) else 16), usage
    if arch == 90:
        assert usage.count("HGMMA", "F32", "BF16") > 0 and usage.count("UTMALDG") > 0, usage
        assert usage.count("LDGSTS") == 0 or name == "bwd_kv", "tiles are fetched by threads"


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_every_specialisation(name):
    """Sizes of 1, fp32, wide and odd head dims, one kind of mask and all of them at once."""
    everything = {"window": 9, "softcap": 2.0, "documents": True}
    cases = [
        (torch.bfloat16, 80, {"size": 1, **everything}),
        (torch.float16, 256, {}),
        (torch.float32, 64, {"documents": True}),
    ]
    for dtype, head_dim, options in cases:
        usage = compiled(name, 90, dtype, head_dim, **options)
        assert usage.shared_bytes <= SHARED_BYTES[90], (dtype, head_dim, options, usage)
        assert usage.spills <= 400, (dtype, head_dim, options, usage)


@pytest.mark.parametrize("T", [1, 40])
def test_document_ranges_compile(T):
    ids = meta(2, T, dtype=torch.int64)
    (usage,) = compile_launches(lambda: document_ranges(ids, 64), 90)
    assert usage.spills == 0, usage


# --- on a GPU -------------------------------------------------------------------------------------


def ours(q, k, v, grad_out, *, causal=True, scale=0.1, **rest):
    """(out, grad_q, grad_k, grad_v) by our kernels, whatever `auto` would take."""
    options = as_options(q, causal=causal, scale=scale, **rest)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        out, lse = forward_by_kernel(q, k, v, options)
        grads = backward_by_kernels(grad_out, q, k, v, options, out, lse)
    finally:
        torch.use_deterministic_algorithms(False)
    return [out, *grads]


def inputs(B, N, M, T, S, H, HV=None, dtype=torch.bfloat16):
    """q, k, v as models make them, [B, T, N, H] transposed, and a contiguous gradient."""
    shapes = ((B, T, N, H), (B, S, M, H), (B, S, M, HV or H))
    q, k, v = (torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v, torch.randn(B, N, T, HV or H, device="cuda").to(dtype)


def check(tensors, **options):
    results = ours(*tensors, **options)
    options = {"causal": True, "scale": 0.1} | options
    truths, plains = attention(*tensors, **options), plain_attention(*tensors, **options)
    for result, plain, truth in zip(results, plains, truths, strict=True):
        assert_no_worse_than_plain(result, plain, truth)
    return results


def packed(T):
    """Two rows of documents: runs of many lengths; numbers that come back."""
    rows = torch.stack([torch.arange(T) ** 2 // (40 * T), torch.arange(T) // 50 % 3])
    return rows.int().cuda()


CASES = {
    "causal": ((2, 4, 2, 517, 517, 64), {}),
    "full": ((1, 4, 1, 300, 517, 64), {"causal": False}),
    "longer keys": ((1, 4, 1, 130, 517, 128), {}),
    "longer queries": ((1, 4, 1, 517, 130, 128), {}),
    "one query": ((2, 4, 2, 1, 777, 64), {}),
    "one key": ((2, 4, 2, 65, 1, 64), {}),
    "one": ((1, 1, 1, 1, 1, 64), {}),
    "just over a block": ((1, 2, 2, 129, 129, 64), {}),
    "window in a block": ((1, 4, 2, 517, 517, 64), {"window": 7}),
    "window of blocks": ((1, 4, 2, 517, 517, 128), {"window": 200}),
    "window past the keys": ((1, 4, 2, 130, 130, 64), {"window": 2**40}),
    "window, longer keys": ((1, 4, 2, 130, 517, 64), {"window": 100}),
    "window, longer queries": ((1, 4, 2, 517, 130, 64), {"window": 100}),
    "softcap": ((1, 4, 2, 300, 300, 64), {"softcap": 2.0, "scale": 0.5}),
    "softcap, window": ((1, 4, 2, 300, 300, 128), {"softcap": 2.0, "window": 70}),
    "negative scale": ((1, 2, 2, 257, 257, 64), {"scale": -0.2}),
    "value head dim": ((1, 2, 1, 257, 257, 192, 128), {}),
} | {f"head dim {H}": ((1, 4, 2, 257, 257, H), {}) for H in (5, 16, 40, 80, 96, 112, 160, 192, 256)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape,options", CASES.values(), ids=CASES.keys())
def test_no_worse_than_plain(shape, options):
    check(inputs(*shape), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_other_dtypes(head_dim, dtype):
    tensors = inputs(2, 4, 2, 300, 300, head_dim, dtype=dtype)
    check(tensors)
    check(tensors, window=70, softcap=2.0)
    check(tensors, documents=packed(300), causal=False)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 60}, {"softcap": 2.0}])
def test_documents(options):
    for ids in (packed(700), packed(700).long() + 2**40, torch.zeros_like(packed(700))):
        check(inputs(2, 4, 2, 700, 700, 64), documents=ids, **options)


@pytest.mark.gpu
def test_fresh_inputs_and_layouts():
    """Other draws; heads outermost, sliced, expanded, unaligned; gradients in any strides."""
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, dy = inputs(2, 4, 2, 200, 200, 64)
        check((q.contiguous(), k, v, dy.transpose(1, 2).contiguous().transpose(1, 2)))
        sliced = torch.randn(2, 2, 200, 128, device="cuda").bfloat16()[..., ::2]
        unaligned = torch.randn(2, 2, 200, 65, device="cuda").bfloat16()[..., 1:]
        check((q, sliced, unaligned, dy))
        one = torch.ones(1, 1, 1, 1, device="cuda", dtype=torch.bfloat16)
        check(
            (q, k[:, :1].expand(2, 4, 200, 64), v[:, :1].expand(2, 4, 200, 64), one.expand_as(dy))
        )


@pytest.mark.gpu
def test_runs_agree_and_inputs_are_only_read():
    tensors = inputs(2, 8, 2, 517, 517, 128)
    before = [t.clone() for t in tensors]
    for options in ({}, {"window": 100}, {"softcap": 2.0}, {"documents": packed(517)}):
        first, second = ours(*tensors, **options), ours(*tensors, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.gpu
def test_row_that_sees_nothing():
    """Row C30: exact zeros and zero gradients, the others as if the row were not there."""
    q, k, v, dy = inputs(1, 4, 2, 517, 130, 64)
    out, grad_q, grad_k, grad_v = ours(q, k, v, dy)
    assert (out[:, :, :387] == 0).all() and (grad_q[:, :, :387] == 0).all()
    rest = ours(q[:, :, 387:], k, v, dy[:, :, 387:])
    for result, alone in zip((out[:, :, 387:], grad_q[:, :, 387:]), rest[:2], strict=True):
        torch.testing.assert_close(result, alone)
    assert grad_k.isfinite().all() and grad_v.isfinite().all()


@pytest.mark.gpu
def test_backward_takes_the_lse_of_any_forward():
    """`auto` may pick for each direction by itself."""
    q, k, v, dy = inputs(2, 4, 2, 256, 256, 64)
    out, lse = library.forward("flash", q, k, v, None, True, 0.1)
    grads = backward_by_kernels(dy, q, k, v, as_options(q, causal=True, scale=0.1), out, lse)
    for grad, other in zip(grads, ours(q, k, v, dy)[1:], strict=True):
        torch.testing.assert_close(grad, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_auto_takes_ours_where_no_library_kernel_serves():
    q, k, v, _ = inputs(2, 4, 2, 130, 130, 80)
    for options in ({"window": 9}, {"softcap": 2.0}, {"documents": packed(130)}):
        assert sdpa_backend(q, k, v, causal=True, **options) == "triton"
    assert sdpa_backend(q[:, :, :9], k, v, causal=True) == "triton"
    assert sdpa_backend(q, k, v, causal=True, mask=torch.ones(130, 130).cuda()).startswith("expl")
    wide = inputs(1, 1, 1, 2, 2, 264)
    assert "up to 256" in triton_refuses(*wide[:2], as_options(wide[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(dynamic):
    """Inductor keeps the op, whose strides are what its fake promised."""
    ids = packed(200)

    def function(q, k, v):
        outs = [sdpa(q, k, v, window=70), sdpa(q, k, v, causal=True, softcap=2.0)]
        return [*outs, sdpa(q, k, v, documents=ids), sdpa(q, k, v, causal=True)]

    *leaves, _ = inputs(2, 4, 2, 200, 200, 80)
    leaves = [t.requires_grad_() for t in leaves]
    outs = torch.compile(function, fullgraph=True, dynamic=dynamic)(*leaves)
    wants = function(*leaves)
    grads, want_grads = (torch.autograd.grad([t.sum() for t in r], leaves) for r in (outs, wants))
    for out, want in zip((*outs, *grads), (*wants, *want_grads), strict=True):
        assert out.stride() == want.stride()
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost"])
def test_past_2_to_the_31_elements(layout):
    """Row C10: the last rows of tensors past 2^31 elements equal the same rows alone."""
    T, N, H, rows = 2**20 + 384, 16, 128, 256
    shape = (1, N, T, H) if layout == "heads outermost" else (1, T, N, H)
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if layout == "heads innermost":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    results = ours(q, k, k, q, window=64)  # each of 4 GiB: few of them
    alone = ours(*(t[:, :, -2 * rows :] for t in (q, k, k, q)), window=64)
    for result, last in zip(results, alone, strict=True):
        torch.testing.assert_close(result[:, :, -rows:], last[:, :, -rows:], rtol=2e-2, atol=2e-2)


# --- interpreted ---------------------------------------------------------------------------------


@pytest.fixture(autouse=INTERPRETING)
def bf16_products(monkeypatch):
    """The interpreter multiplies the bits of bf16 matrices as if they were integers."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def fp32_dot(self, a, b, *rest):
        a, b = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype == tl.bfloat16
            else x
            for x in (a, b)
        )
        return dot(self, a, b, *rest)

    monkeypatch.setattr(builder, "create_dot", fp32_dot)


def poisoned(like):
    return torch.full_like(like, float("nan"))


def kernels(q, k, v, grad_out, options, blocks=(32, 16), tma=False):
    """Launch all three kernels with the same blocks; return (out, grad_q, grad_k, grad_v)."""
    blocks = Blocks(*blocks, num_warps=4, num_stages=1)
    out, lse = poisoned(grad_out), torch.full(q.shape[:3], float("nan"))
    how = {"blocks": blocks, "tma": tma}
    sdpa_fwd(q, k, v, options, out, lse, **how)
    grad_q, grad_k, grad_v = map(poisoned, (q, k, v))
    args = (grad_out, q, k, v, options)
    delta = sdpa_bwd_q(*args, out, lse, grad_q, **how)
    sdpa_bwd_kv(*args, lse, delta, grad_k, grad_v, **how)
    return out, grad_q, grad_k, grad_v


def small_inputs(B, N, M, T, S, H, HV=None, dtype=torch.float32):
    """q, k, v as models make them, [B, T, N, H] transposed, and a gradient that is contiguous."""
    HV = HV or H
    shapes = ((B, T, N, H), (B, S, M, H), (B, S, M, HV))
    q, k, v = (torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v, torch.randn(B, N, T, HV).to(dtype)


def check_small(q, k, v, grad_out, documents=None, blocks=(32, 16), tma=False, **options):
    options = {"causal": True, "scale": 0.3, "documents": documents} | options
    what = as_options(q, **options).within(k.shape[2])
    results = kernels(q, k, v, grad_out, what, blocks, tma)
    truths = attention(q, k, v, grad_out, **options)
    plains = plain_attention(q, k, v, grad_out, **options)
    for result, plain, truth in zip(results, plains, truths, strict=True):
        assert_no_worse_than_plain(result, plain, truth)
    return results


SMALL_CASES = {
    "causal": ((1, 2, 2, 40, 40, 16), {}),
    "groups": ((2, 4, 2, 33, 33, 16), {}),
    "full": ((1, 2, 1, 33, 50, 16), {"causal": False}),
    "longer queries": ((1, 2, 1, 50, 33, 16), {}),
    "longer keys": ((1, 2, 1, 33, 50, 16), {}),
    "window in a block": ((1, 1, 1, 50, 50, 16), {"window": 7}),
    "window of blocks": ((1, 1, 1, 50, 50, 16), {"window": 40}),
    "window, longer keys": ((1, 1, 1, 20, 70, 16), {"window": 33}),
    "window of two": ((1, 1, 1, 40, 40, 16), {"window": 2}),
    "softcap": ((1, 2, 1, 40, 40, 16), {"softcap": 1.5}),
    "softcap, window": ((1, 2, 1, 40, 40, 16), {"softcap": 1.5, "window": 9}),
    "negative scale": ((1, 2, 1, 40, 40, 16), {"scale": -0.3}),
    "one": ((1, 1, 1, 1, 1, 16), {}),
    "one query": ((1, 2, 1, 1, 33, 16), {}),
    "one key": ((1, 2, 1, 9, 1, 16), {}),
    "head dim 5": ((1, 1, 1, 20, 20, 5), {}),
    "head dims 20, 12": ((1, 1, 1, 33, 33, 20, 12), {}),
    "head dim 80": ((1, 1, 1, 33, 33, 80), {}),
}


@pytest.mark.parametrize("shape,options", SMALL_CASES.values(), ids=SMALL_CASES.keys())
def interpreted_no_worse_than_plain(shape, options):
    check_small(*small_inputs(*shape), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def interpreted_half_precision(dtype):
    check_small(*small_inputs(1, 2, 1, 40, 40, 16, dtype=dtype), softcap=2.0, window=20)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (64, 16), (32, 64)], ids=str)
def interpreted_any_blocks(blocks):
    check_small(*small_inputs(1, 2, 1, 40, 50, 16), window=23, blocks=blocks)


@pytest.mark.parametrize("head_dim", [16, 24])
def interpreted_descriptors(head_dim):
    """What the copy engine of sm_90 is told: tiles past the end, head dims below the tile's."""
    check_small(*small_inputs(2, 2, 1, 40, 33, head_dim), tma=True)


DOCUMENTS = {
    "packed": [0] * 10 + [1] * 25 + [2] * 3 + [7] * 12,
    "one": [3] * 50,
    "out of order": [5, 5, 1, 9, 1] * 10,
    "returning": [0] * 20 + [1] * 18 + [0] * 12,
    "huge": [2**40] * 23 + [2**40 + 1] * 27,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def interpreted_documents(name):
    ids = torch.tensor([DOCUMENTS[name]])
    ids = ids if name == "huge" else ids.int()
    check_small(*small_inputs(1, 2, 1, 50, 50, 16), documents=ids, causal=name != "returning")


def interpreted_documents_with_window():
    ids = torch.tensor([DOCUMENTS["packed"]]).int().expand(2, -1)
    check_small(*small_inputs(2, 1, 1, 50, 50, 16), documents=ids, window=9, blocks=(16, 16))


def interpreted_document_ranges():
    """For rows of a block: where their numbers first and last stand, and whether gaplessly."""
    ids = torch.tensor([[0] * 16 + [1] * 20 + [2] * 4, [4] * 8 + [6] * 8 + [4] * 24])
    ranges = document_ranges(ids, 16)
    # the last block of row 0 spans two numbers, those of row 1 between them find a gap
    expected = [[[0, 16, 1], [16, 36, 1], [16, 40, 0]], [[0, 40, 0], [0, 40, 0], [0, 40, 0]]]
    assert ranges.tolist() == expected


def interpreted_rows_that_see_nothing():
    """Row C30: with 33 keys, the first 17 of 50 queries see none: zeros, whatever is in memory."""
    out, grad_q, *_ = check_small(*small_inputs(1, 2, 1, 50, 33, 16))
    assert (out[:, :, :17] == 0).all() and (grad_q[:, :, :17] == 0).all()


def interpreted_inputs_are_only_read_and_runs_agree():
    tensors = small_inputs(1, 2, 1, 40, 40, 20)
    before = [t.clone() for t in tensors]
    options = as_options(tensors[0], causal=True, scale=0.3)
    first, second = kernels(*tensors, options), kernels(*tensors, options)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("packing,N,M", PACKINGS[1:5])
def interpreted_parts_of_a_row(packing, N, M):
    """Read in place: no copy of the row's parts is made on the way to the kernels."""
    row = torch.randn(2, 33, (N + 2 * M) * 16)
    q, k, v = PACKED[packing](row.transpose(0, 1) if packing == "sequence first" else row, N, M)
    grad_out = torch.randn(2, 33, N, 16).transpose(1, 2)
    assert all(dense_rows(t) is t for t in (k, v, grad_out))
    check_small(q, k, v, grad_out)


def interpreted_strided_inputs_and_expanded_gradient():
    q, k, v, _ = small_inputs(2, 2, 1, 40, 40, 16)
    wide = torch.randn(2, 1, 40, 32)
    check_small(q, wide[..., ::2], v, torch.ones(1, 1, 1, 1).expand(2, 2, 40, 16))
    check_small(q, k[:, :1].expand(2, 2, 40, 16), v.expand(2, 2, 40, 16), torch.ones(2, 2, 40, 16))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def interpreted_nan_and_infinity_propagate(where):
    """To the rows that see them, and to no others."""
    for value in (float("nan"), float("inf")):
        q, k, v, grad_out = small_inputs(1, 1, 1, 40, 40, 16)
        {"q": q, "k": k, "v": v}[where][0, 0, 20, 3] = value
        out = kernels(q, k, v, grad_out, as_options(q, causal=True, scale=0.3))[0]
        truth = attention(q, k, v, grad_out, causal=True, scale=0.3)[0]
        assert torch.equal(out.isnan(), truth.isnan()), (where, value)
        assert torch.equal(out.isinf(), truth.isinf()), (where, value)
