"""The rope kernels under Triton's interpreter, on CPU tensors.

Run by test_triton_pointwise.py. The ops' CUDA implementations are called as a GPU would call them:
what they copy before a launch, and what they leave to the kernel's strides, is tested along.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from test_rope import angles, plain, tables, token_major, truth
from tolerances import assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops.rope import kernel as rope_kernels

ROPE = import_module("xtrain.ops.rope.op")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("half", "interleaved")
PAST_INT32 = 2**30 + 16  # a stride that fits in 32 bits, twice of which does not


@pytest.fixture(autouse=True)
def poisoned_outputs(bf16_rounds_to_nearest):  # noqa: F811
    """What a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def far_apart(rows: Tensor) -> Tensor:
    """The same rows at a distance past 2^31 elements together; most of the memory is never used."""
    torch.use_deterministic_algorithms(False)  # which would fill it
    memory = torch.empty(PAST_INT32 * (rows.shape[0] - 1) + rows.shape[-1], dtype=rows.dtype)
    torch.use_deterministic_algorithms(True)
    return memory.as_strided(rows.shape, (PAST_INT32, 1)).copy_(rows)


# --- rope ---------------------------------------------------------------------------------------


def rope(x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int = 1) -> Tensor:
    launcher = "rope_fwd" if sign == 1 else "rope_bwd"
    return ROPE._cuda(launcher, refuse)(x, cos, sin, layout)


def rope_qk(q, k, cos, sin, layout, sign: int = 1) -> tuple[Tensor, Tensor]:
    launcher = "rope_qk_fwd" if sign == 1 else "rope_qk_bwd"
    return ROPE._cuda_qk(launcher, refuse)(q, k, cos, sin, layout)


def refuse(*args: object) -> Tensor:
    raise AssertionError("the decomposition ran, not the kernel")


def assert_turned(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int) -> None:
    """Values against fp64, strides against the fake, and what passes bit for bit."""
    assert_no_worse_than_plain(
        out,
        plain(x, cos, sign * sin, layout),
        truth(x, cos, sin, layout, sign),
    )
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    assert out.stride() == ROPE._fake(meta, cos.to("meta"), sin.to("meta"), layout).stride()
    R = 2 * cos.shape[-1]
    assert torch.equal(out[..., R:], x[..., R:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_qk(dtype, layout):
    for N, M, H, pairs in ((4, 2, 16, 8), (7, 1, 16, 5), (3, 3, 10, 3), (9, 4, 7, 1)):
        q = token_major(2, N, 5, H, "cpu").to(dtype)
        k = torch.randn(2, M, 5, H).to(dtype)
        for theta, sign in ((angles(5, pairs=pairs), 1), (angles(2, 5, pairs=pairs), -1)):
            cos, sin = tables(theta)
            outs = rope_qk(q, k, cos, sin, layout, sign)
            for out, x in zip(outs, (q, k), strict=True):
                assert_turned(out, x, cos, sin, layout, sign)
            assert torch.equal(rope(q, cos, sin, layout, sign), outs[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [((1, 1, 1, 2), 1), ((2, 3, 1, 7), 3), ((1, 1, 9, 80), 40), ((2, 33, 2, 8), 2)],
    ids=str,
)
def test_rope_edge_shapes(shape, pairs, layout):
    x = torch.randn(shape)
    cos, sin = tables(angles(shape[2], pairs=pairs))
    assert_turned(rope(x, cos, sin, layout), x, cos, sin, layout, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_strided(layout):
    """q and k as a packed projection gives them, and views with other strides."""
    packed = torch.randn(2, 5, (4 + 2 + 2) * 8).unflatten(-1, (8, 8)).transpose(1, 2)
    base = torch.randn(2, 4, 5, 16)
    expanded = torch.randn(1, 4, 5, 8).expand(2, -1, -1, -1)
    views = [
        (packed[:, :4], packed[:, 4:6]),
        (packed[:, :1], packed[:, 4:5]),  # one head: its stride may be anything
        (base[..., ::2], base[..., 1::2]),
        (base[..., :8], base[:, :2, :, 8:]),
        (expanded, torch.ones(()).expand(2, 3, 5, 8)),
        (torch.randn(2, 4, 5, 5).transpose(2, 3), base[:, :1, :, 3:8]),
    ]
    for q, k in views:
        cos, sin = tables(angles(5, pairs=q.shape[-1] // 2))
        columns = [t.t().contiguous().t() for t in (cos, sin)]  # tables with other strides
        before = [t.clone() for t in (q, k)]
        for c, s in ((cos, sin), columns, (columns[0], sin)):
            for out, x in zip(rope_qk(q, k, c, s, layout), (q, k), strict=True):
                assert_turned(out, x, cos, sin, layout, 1)
        assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
def test_rope_table_dtypes(table_dtype):
    x = token_major(1, 3, 5, 8, "cpu").to(torch.bfloat16)
    cos, sin = tables(angles(5, pairs=4), table_dtype)
    out = rope(x, cos, sin, "half")
    assert_turned(out, x, cos, sin, "half", 1)
    assert torch.equal(out, rope(x, cos.float(), sin.float(), "half"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 2), (2, 16), (1, 4)], ids=str)
def test_rope_does_not_depend_on_the_tiling(blocks, layout, monkeypatch):
    q, k = token_major(2, 5, 7, 10, "cpu"), token_major(2, 2, 7, 10, "cpu")
    cos, sin = tables(angles(2, 7, pairs=3))
    expected = rope_qk(q, k, cos, sin, layout)
    monkeypatch.setattr(rope_kernels, "rope_block_sizes", lambda *sizes: (*blocks, 4))
    for a, b in zip(rope_qk(q, k, cos, sin, layout), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_nan_stays_in_its_pair(layout):
    x = torch.randn(1, 2, 3, 9)
    x[0, 1, 2, 3] = float("nan")
    cos, sin = tables(angles(3, pairs=4))
    pair = (3, 7) if layout == "half" else (2, 3)
    expected = torch.zeros(x.shape, dtype=torch.bool)
    expected[0, 1, 2, pair] = True
    assert torch.equal(rope(x, cos, sin, layout).isnan(), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rope_rows_past_2_to_the_31_elements(dim):
    """Row C10: batch, head and token times their strides do not fit in 32 bits."""
    rows = torch.randn(3, 8).to(torch.bfloat16)
    shape = [1, 1, 1, 8]
    shape[dim] = 3
    x, far = rows.view(shape), far_apart(rows).view(shape)
    cos, sin = tables(angles(shape[2], pairs=4))
    assert torch.equal(rope(far, cos, sin, "half"), rope(x, cos, sin, "half"))
