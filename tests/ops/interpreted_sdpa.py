"""The attention kernels under Triton's interpreter, on CPU tensors; run by test_triton_sdpa.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from sdpa_truth import attention, plain_attention
from tolerances import assert_no_worse_than_plain

from xtrain.ops.sdpa.backward_kernel import sdpa_bwd_kv, sdpa_bwd_q
from xtrain.ops.sdpa.kernel import sdpa_fwd
from xtrain.ops.sdpa.op import as_options
from xtrain.ops.sdpa.tiles import Blocks, dense_rows, document_ranges

pytestmark = [
    pytest.mark.usefixtures("bf16_rounds_to_nearest"),
    # a row that sees nothing divides 0 by 0, and drops the result
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
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


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch):
    """Triton 3.6 reads them by int() of an array of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


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


def inputs(B, N, M, T, S, H, HV=None, dtype=torch.float32):
    """q, k, v as models make them, [B, T, N, H] transposed, and a gradient that is contiguous."""
    HV = HV or H
    shapes = ((B, T, N, H), (B, S, M, H), (B, S, M, HV))
    q, k, v = (torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v, torch.randn(B, N, T, HV).to(dtype)


def check(q, k, v, grad_out, documents=None, blocks=(32, 16), tma=False, **options):
    options = {"causal": True, "scale": 0.3, "documents": documents} | options
    what = as_options(q, **options).within(k.shape[2])
    results = kernels(q, k, v, grad_out, what, blocks, tma)
    truths = attention(q, k, v, grad_out, **options)
    plains = plain_attention(q, k, v, grad_out, **options)
    for result, plain, truth in zip(results, plains, truths, strict=True):
        assert_no_worse_than_plain(result, plain, truth)
    return results


CASES = {
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


@pytest.mark.parametrize("shape,options", CASES.values(), ids=CASES.keys())
def test_no_worse_than_plain(shape, options):
    check(*inputs(*shape), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    check(*inputs(1, 2, 1, 40, 40, 16, dtype=dtype), softcap=2.0, window=20)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (64, 16), (32, 64)], ids=str)
def test_any_blocks(blocks):
    check(*inputs(1, 2, 1, 40, 50, 16), window=23, blocks=blocks)


@pytest.mark.parametrize("head_dim", [16, 24])
def test_descriptors(head_dim):
    """What the copy engine of sm_90 is told: tiles past the end, head dims below the tile's."""
    check(*inputs(2, 2, 1, 40, 33, head_dim), tma=True)


DOCUMENTS = {
    "packed": [0] * 10 + [1] * 25 + [2] * 3 + [7] * 12,
    "one": [3] * 50,
    "out of order": [5, 5, 1, 9, 1] * 10,
    "returning": [0] * 20 + [1] * 18 + [0] * 12,
    "huge": [2**40] * 23 + [2**40 + 1] * 27,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name):
    ids = torch.tensor([DOCUMENTS[name]])
    ids = ids if name == "huge" else ids.int()
    check(*inputs(1, 2, 1, 50, 50, 16), documents=ids, causal=name != "returning")


def test_documents_with_window():
    ids = torch.tensor([DOCUMENTS["packed"]]).int().expand(2, -1)
    check(*inputs(2, 1, 1, 50, 50, 16), documents=ids, window=9, blocks=(16, 16))


def test_document_ranges():
    """For rows of a block: where their numbers first and last stand, and whether gaplessly."""
    ids = torch.tensor([[0] * 16 + [1] * 20 + [2] * 4, [4] * 8 + [6] * 8 + [4] * 24])
    ranges = document_ranges(ids, 16)
    # the last block of row 0 spans two numbers, those of row 1 between them find a gap
    expected = [[[0, 16, 1], [16, 36, 1], [16, 40, 0]], [[0, 40, 0], [0, 40, 0], [0, 40, 0]]]
    assert ranges.tolist() == expected


def test_rows_that_see_nothing():
    """Row C30: with 33 keys, the first 17 of 50 queries see none: zeros, whatever is in memory."""
    out, grad_q, *_ = check(*inputs(1, 2, 1, 50, 33, 16))
    assert (out[:, :, :17] == 0).all() and (grad_q[:, :, :17] == 0).all()


def test_inputs_are_only_read_and_runs_agree():
    tensors = inputs(1, 2, 1, 40, 40, 20)
    before = [t.clone() for t in tensors]
    options = as_options(tensors[0], causal=True, scale=0.3)
    first, second = kernels(*tensors, options), kernels(*tensors, options)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def packed(layout, B, N, M, T, H):
    """Views of one projection's rows; a gradient that is a view of the merged heads."""
    if layout == "q | k | v":
        row = torch.randn(B, T, (N + 2 * M) * H)
        parts = row.split([N * H, M * H, M * H], -1)
        q, k, v = (t.unflatten(-1, (-1, H)).transpose(1, 2) for t in parts)
    elif layout == "by head":
        q, k, v = torch.randn(B, T, N, 3 * H).transpose(1, 2).chunk(3, -1)
    elif layout == "by group":
        groups = torch.randn(B, T, M, N // M + 2, H)
        q = groups[..., :-2, :].flatten(2, 3).transpose(1, 2)
        k, v = (groups[..., i, :].transpose(1, 2) for i in (-2, -1))
    else:
        q, k, v = torch.randn(T, B, 3, N, H).permute(2, 1, 3, 0, 4)
    return q, k, v, torch.randn(B, T, N, H).transpose(1, 2)


@pytest.mark.parametrize("layout", ["q | k | v", "by head", "by group", "sequence first"])
def test_parts_of_a_row(layout):
    """Read in place: no copy of the row's parts is made on the way to the kernels."""
    M = 2 if layout in ("q | k | v", "by group") else 4
    q, k, v, grad_out = packed(layout, 2, 4, M, 33, 16)
    assert all(dense_rows(t) is t for t in (k, v, grad_out))
    check(q, k, v, grad_out)


def test_strided_inputs_and_expanded_gradient():
    q, k, v, _ = inputs(2, 2, 1, 40, 40, 16)
    wide = torch.randn(2, 1, 40, 32)
    check(q, wide[..., ::2], v, torch.ones(1, 1, 1, 1).expand(2, 2, 40, 16))
    check(q, k[:, :1].expand(2, 2, 40, 16), v.expand(2, 2, 40, 16), torch.ones(2, 2, 40, 16))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_infinity_propagate(where):
    """To the rows that see them, and to no others."""
    for value in (float("nan"), float("inf")):
        q, k, v, grad_out = inputs(1, 1, 1, 40, 40, 16)
        {"q": q, "k": k, "v": v}[where][0, 0, 20, 3] = value
        out = kernels(q, k, v, grad_out, as_options(q, causal=True, scale=0.3))[0]
        truth = attention(q, k, v, grad_out, causal=True, scale=0.3)[0]
        assert torch.equal(out.isnan(), truth.isnan()), (where, value)
        assert torch.equal(out.isinf(), truth.isinf()), (where, value)
