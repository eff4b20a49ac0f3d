"""The rope kernels without a GPU, interpreted and compiled for four architectures, and on one
(marked `gpu`): what test_rope.py does not ask of a kernel.
"""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import ARCHITECTURES, Resources, compile_launches, meta
from interpreter import INTERPRETING, bf16_rounds_to_nearest, run_interpreted  # noqa: F401
from test_rope import angles, plain, tables, token_major, truth
from tolerances import assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import OPS, rope_qk
from xtrain.ops.rope import kernel as rope_kernels
from xtrain.ops.rope.kernel import rope_rows
from xtrain.ops.rope.op import _Turn

BUILDS = [(arch, torch.bfloat16) for arch in ARCHITECTURES]
BUILDS += [(90, dtype) for dtype in (torch.float16, torch.float32, torch.float64)]


def test_under_the_interpreter():
    run_interpreted(__file__)


# --- ahead of time ------------------------------------------------------------------------------


def compile_rope(
    dtype: torch.dtype, arch: int, head_dim: int, pairs: int, layout: str = "half", has_k=True
) -> Resources:
    """As for parts of a projection, with tables of each token."""
    heads = [meta(2, 4096, n, head_dim, dtype=dtype).transpose(1, 2) for n in (32, 8)]
    tables = [meta(4096, pairs, dtype=torch.float32) for _ in range(2)]
    rows = heads if has_k else heads[:1]
    (usage,) = compile_launches(lambda: rope_rows(rows, *tables, layout, inverse=True), arch)
    return usage


@pytest.mark.parametrize(("arch", "dtype"), BUILDS, ids=str)
def test_rope_compiles_without_spills(arch, dtype):
    usage = compile_rope(dtype, arch, 128, 64)
    assert usage.spills == 0, usage
    assert usage.registers <= 64, usage
    assert usage.count("STG") == usage.count("STG", "128") > 0, usage
    assert usage.count("LDG", "128") >= usage.count("STG"), usage


@pytest.mark.parametrize(("head_dim", "has_k"), [(64, True), (80, True), (128, False)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_partial_rope_compiles_without_spills(layout, head_dim, has_k):
    usage = compile_rope(torch.bfloat16, 90, head_dim, head_dim // 4, layout, has_k)
    assert usage.spills == 0, usage
    assert usage.registers <= 64, usage


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    """The GPU; what a kernel leaves unwritten on it is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)


def run_twice(function, *inputs: Tensor) -> list[Tensor]:
    """Return function(*inputs); it must give the same bits again and leave its inputs alone."""
    before = [t.clone() for t in inputs]
    first, second = function(*inputs), function(*inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for t, b in zip(inputs, before, strict=True):
        assert torch.equal(t, b)
    return first


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rope_on_a_gpu(dtype, layout, cuda):
    for (B, N, M, T, H), pairs in (
        ((2, 4, 4, 129, 64), 32),
        ((1, 9, 3, 1021, 96), 24),
        ((3, 7, 1, 1, 80), 40),
        ((2, 32, 8, 257, 128), 32),
        ((1, 1, 1, 5, 7), 3),
    ):
        packed = torch.randn(B, T, (N + M) * H, device=cuda).to(dtype).unflatten(-1, (N + M, H))
        q, k = packed[:, :, :N].transpose(1, 2), packed[:, :, N:].transpose(1, 2)
        dq = torch.randn(B, N, T, H, device=cuda).to(dtype)
        dk = torch.ones((), dtype=dtype, device=cuda).expand(B, M, T, H)
        cos, sin = tables(angles(B, T, pairs=pairs), device=cuda)

        def both(q, k, dq, dk, cos=cos, sin=sin) -> list[Tensor]:
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            outs = rope_qk(q, k, cos, sin, layout=layout)
            return [*outs, *torch.autograd.grad(outs, (q, k), (dq, dk))]

        results = run_twice(both, q, k, dq, dk)
        for out, x, sign in zip(results, (q, k, dq, dk), (1, 1, -1, -1), strict=True):
            rounded = plain(x, cos, sign * sin, layout)
            assert_no_worse_than_plain(out, rounded, truth(x, cos, sin, layout, sign))
            assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


def assert_allocates(num_bytes: int, op: torch._ops.OpOverload, *args: object) -> None:
    """Assert that a warm call takes this much memory at its peak, results included."""
    op(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    op(*args)
    assert torch.cuda.max_memory_allocated() - before == num_bytes, op


@pytest.mark.gpu
def test_strided_inputs_are_not_copied(cuda):
    """Nothing but the results is allocated for halves of a packed projection."""
    tokens, width = 4096, 2048
    packed = torch.randn(1, tokens, 2 * width, device=cuda, dtype=torch.bfloat16)
    q, k = packed.unflatten(-1, (2, 16, 128)).permute(2, 0, 3, 1, 4)
    cos, sin = tables(angles(tokens, pairs=64), device=cuda)
    for op in (OPS["rope_qk"].forward, OPS["rope_qk"].backward):
        assert_allocates(packed.nbytes, op, q, k, cos, sin, "half")


def assert_compiled_call_is_the_kernel(function, *inputs: Tensor) -> None:
    """Assert that results and gradients are those of eager, bit for bit and stride for stride."""

    def run(f) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = f(*leaves)
        return [*outs, *torch.autograd.grad([t.float().square().sum() for t in outs], leaves)]

    for a, b in zip(run(torch.compile(function, fullgraph=True)), run(function), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.gpu
def test_compiled_opaque_call_is_the_kernel(cuda):
    q, k = (torch.randn(2, n, 257, 64, device=cuda, dtype=torch.bfloat16) for n in (6, 2))
    cos, sin = tables(angles(257, pairs=32), device=cuda)
    assert_compiled_call_is_the_kernel(
        lambda q, k: OPS["rope_qk"].forward(q, k, cos, sin, "half", True), q, k
    )


@pytest.mark.gpu
def test_past_2_to_the_31_elements():
    """Row C10: the last rows of tensors past 2^31 elements equal the same rows alone."""
    rows, cols = 524289, 4096
    x = torch.randn(4, cols, device="cuda").to(torch.bfloat16).repeat(rows // 4 + 1, 1)[:rows]
    q = x.view(1, rows, 32, 128).transpose(1, 2)
    cos, sin = tables(angles(rows, pairs=64), device="cuda")
    for heads in (q, q.contiguous()):  # tokens, then heads outermost
        for op in (OPS["rope"].forward, OPS["rope"].backward):
            out = op(heads, cos, sin, "half")[:, :, -4:]
            assert torch.equal(out, op(heads[:, :, -4:], cos[-4:], sin[-4:], "half"))
            del out


# --- interpreted ---------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("half", "interleaved")
PAST_INT32 = 2**30 + 16  # a stride that fits in 32 bits, twice of which does not


@pytest.fixture(autouse=INTERPRETING)
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


def launched(x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int = 1) -> Tensor:
    return without_decomposition("rope", sign).cuda(x, cos, sin, layout)


def launched_qk(q, k, cos, sin, layout, sign: int = 1) -> tuple[Tensor, Tensor]:
    return without_decomposition("rope_qk", sign).cuda(q, k, cos, sin, layout)


def without_decomposition(name: str, sign: int):
    class Launched(_Turn):
        def decomposition(self, *args: object) -> Tensor:
            raise AssertionError("the decomposition ran, not the kernel")

    return Launched(name, sign == -1)


def assert_turned(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int) -> None:
    """Values against fp64, strides against the fake, and what passes bit for bit."""
    assert_no_worse_than_plain(
        out,
        plain(x, cos, sign * sin, layout),
        truth(x, cos, sin, layout, sign),
    )
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    assert (
        out.stride()
        == _Turn("rope", False).fake(meta, cos.to("meta"), sin.to("meta"), layout).stride()
    )
    R = 2 * cos.shape[-1]
    assert torch.equal(out[..., R:], x[..., R:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def interpreted_rope_qk(dtype, layout):
    for N, M, H, pairs in ((4, 2, 16, 8), (7, 1, 16, 5), (3, 3, 10, 3), (9, 4, 7, 1)):
        q = token_major(2, N, 5, H, "cpu").to(dtype)
        k = torch.randn(2, M, 5, H).to(dtype)
        for theta, sign in ((angles(5, pairs=pairs), 1), (angles(2, 5, pairs=pairs), -1)):
            cos, sin = tables(theta)
            outs = launched_qk(q, k, cos, sin, layout, sign)
            for out, x in zip(outs, (q, k), strict=True):
                assert_turned(out, x, cos, sin, layout, sign)
            assert torch.equal(launched(q, cos, sin, layout, sign), outs[0])


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
def interpreted_rope_table_dtypes(table_dtype):
    x = token_major(1, 3, 5, 8, "cpu").to(torch.bfloat16)
    cos, sin = tables(angles(5, pairs=4), table_dtype)
    out = launched(x, cos, sin, "half")
    assert_turned(out, x, cos, sin, "half", 1)
    assert torch.equal(out, launched(x, cos.float(), sin.float(), "half"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 2), (2, 16), (1, 4)], ids=str)
def interpreted_rope_does_not_depend_on_the_tiling(blocks, layout, monkeypatch):
    q, k = token_major(2, 5, 7, 10, "cpu"), token_major(2, 2, 7, 10, "cpu")
    cos, sin = tables(angles(2, 7, pairs=3))
    expected = launched_qk(q, k, cos, sin, layout)
    monkeypatch.setattr(rope_kernels, "rope_block_sizes", lambda *sizes: (*blocks, 4))
    for a, b in zip(launched_qk(q, k, cos, sin, layout), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def interpreted_rope_nan_stays_in_its_pair(layout):
    x = torch.randn(1, 2, 3, 9)
    x[0, 1, 2, 3] = float("nan")
    cos, sin = tables(angles(3, pairs=4))
    pair = (3, 7) if layout == "half" else (2, 3)
    expected = torch.zeros(x.shape, dtype=torch.bool)
    expected[0, 1, 2, pair] = True
    assert torch.equal(launched(x, cos, sin, layout).isnan(), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def interpreted_rope_rows_past_2_to_the_31_elements(dim):
    """Row C10: batch, head and token times their strides do not fit in 32 bits."""
    rows = torch.randn(3, 8).to(torch.bfloat16)
    shape = [1, 1, 1, 8]
    shape[dim] = 3
    x, far = rows.view(shape), far_apart(rows).view(shape)
    cos, sin = tables(angles(shape[2], pairs=4))
    assert torch.equal(launched(far, cos, sin, "half"), launched(x, cos, sin, "half"))
