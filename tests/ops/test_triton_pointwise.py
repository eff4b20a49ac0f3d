"""The swiglu and rope kernels without a GPU, interpreted and compiled for four architectures, and
on one (marked `gpu`): what test_swiglu.py and test_rope.py do not ask of a kernel.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import ARCHITECTURES, Resources, compile_kernel
from interpreter import run_interpreted
from test_rope import angles, plain, tables, truth
from test_swiglu import assert_accurate, with_grads
from tolerances import assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import OPS, rope_qk, swiglu
from xtrain.ops.swiglu import halves, swiglu_packed
from xtrain.ops.triton.rope import _rope_fwd_kernel, rope_block_sizes
from xtrain.ops.triton.swiglu import (
    _swiglu_bwd_kernel,
    _swiglu_fwd_kernel,
    swiglu_block_sizes,
)

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
BUILDS = [(arch, "bf16") for arch in ARCHITECTURES] + [(90, d) for d in ("fp16", "fp32", "fp64")]


def test_under_the_interpreter():
    run_interpreted("interpreted_pointwise.py")


# --- ahead of time ------------------------------------------------------------------------------

SWIGLU_TENSORS = {
    _swiglu_fwd_kernel: (("gate", "up"), ("out",)),
    _swiglu_bwd_kernel: (("grad_out", "gate", "up"), ("grad_gate", "grad_up")),
}


def compute_dtype(dtype: str) -> tl.dtype:
    return tl.float64 if dtype == "fp64" else tl.float32


@pytest.mark.parametrize(("arch", "dtype"), BUILDS)
@pytest.mark.parametrize("kernel", SWIGLU_TENSORS, ids=lambda kernel: kernel.__name__)
def test_swiglu_compiles_without_spills(kernel, arch, dtype):
    """As for rows of a packed projection."""
    inputs, outputs = SWIGLU_TENSORS[kernel]
    block_rows, block_cols, num_warps = swiglu_block_sizes(16384, 5632, ITEMSIZE[dtype])
    usage = compile_kernel(
        kernel,
        {f"{name}_ptr": f"*{dtype}" for name in (*inputs, *outputs)}
        | {f"{name}_row_stride": "i32:16" for name in (*inputs, *outputs)}
        | {"n_rows": "i32:16", "n_cols": "i32:16", "n_col_blocks": "i32"},
        {
            "COMPUTE_DTYPE": compute_dtype(dtype),
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLS": block_cols,
        },
        arch=arch,
        num_warps=num_warps,
    )
    assert usage.spills == usage.shared_bytes == 0, usage
    # 64 registers let 1024 threads share an SM: the bytes in flight that hide a memory's latency
    assert usage.registers <= 64, usage
    accesses = block_rows * block_cols * ITEMSIZE[dtype] // (16 * 32 * num_warps)
    assert usage.count("LDG") == usage.count("LDG", "128") == len(inputs) * accesses, usage
    assert usage.count("STG") == usage.count("STG", "128") == len(outputs) * accesses, usage


def compile_rope(
    dtype: str,
    arch: int,
    heads: int,
    head_dim: int,
    pairs: int,
    interleaved: bool = False,
    has_k: bool = True,
) -> Resources:
    block_tokens, block_heads, num_warps = rope_block_sizes(heads, head_dim, ITEMSIZE[dtype])
    constants = {
        "HAS_K": has_k,
        "PAIRS": pairs,
        "REST": head_dim - 2 * pairs,
        "INTERLEAVED": interleaved,
        "INVERSE": True,
        "COMPUTE_DTYPE": compute_dtype(dtype),
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADS": block_heads,
        "BLOCK_PAIRS": triton.next_power_of_2(pairs),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - 2 * pairs, 1)),
    }
    signature = {}
    for name in _rope_fwd_kernel.arg_names:
        if name in ("cos_ptr", "sin_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype}"
        elif name not in constants:
            aligned = name.endswith("_stride") or name == "n_tokens"
            signature[name] = "i32:16" if aligned else "i32"
    return compile_kernel(_rope_fwd_kernel, signature, constants, arch=arch, num_warps=num_warps)


@pytest.mark.parametrize(("arch", "dtype"), BUILDS)
def test_rope_compiles_without_spills(arch, dtype):
    usage = compile_rope(dtype, arch, 40, 128, 64)
    assert usage.spills == 0, usage
    assert usage.registers <= 64, usage
    assert usage.count("STG") == usage.count("STG", "128") > 0, usage
    assert usage.count("LDG", "128") >= usage.count("STG"), usage


@pytest.mark.parametrize(("head_dim", "has_k"), [(64, True), (80, True), (128, False)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_compiles_without_spills(interleaved, head_dim, has_k):
    usage = compile_rope("bf16", 90, 24, head_dim, head_dim // 4, interleaved, has_k)
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


SHAPES = [(1, 1), (3, 1021), (1025, 129), (100003,), (7, 11, 5632)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_on_a_gpu(shape, dtype, cuda):
    gate, up, dy = ((4 * torch.randn(shape, device=cuda)).to(dtype) for _ in range(3))
    results = run_twice(lambda *t: with_grads(swiglu, *t), gate, up, dy)
    assert_accurate(results, gate, up, dy)
    ones = torch.ones((), dtype=dtype, device=cuda).expand(shape)
    assert_accurate(with_grads(swiglu, gate, up, ones), gate, up, ones)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("shape", [(1, 2), (33, 2 * 127), (5, 7, 2 * 2048)], ids=str)
def test_swiglu_packed_on_a_gpu(shape, order, cuda):
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.randn(shape, device=cuda).to(dtype)
        dy = torch.randn(*shape[:-1], shape[-1] // 2, device=cuda).to(dtype)

        def packed(gate_up: Tensor, dy: Tensor, dtype=dtype) -> list[Tensor]:
            gate_up = gate_up.detach().requires_grad_()
            out = swiglu_packed(gate_up, order=order)
            return [out, torch.autograd.grad(out, gate_up, dy)[0]]

        out, grad = run_twice(packed, gate_up, dy)
        gate, up = (half.contiguous() for half in halves(gate_up, order))
        results = [out, *halves(grad, order)]
        for a, b in zip(results, with_grads(swiglu, gate, up, dy), strict=True):
            assert torch.equal(a, b)
        assert_accurate(results, gate, up, dy)


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


@pytest.mark.gpu
def test_strided_inputs_are_not_copied(cuda):
    """Nothing but the results is allocated for halves of a packed projection."""
    tokens, width = 4096, 2048
    packed = torch.randn(1, tokens, 2 * width, device=cuda, dtype=torch.bfloat16)
    q, k = packed.unflatten(-1, (2, 16, 128)).permute(2, 0, 3, 1, 4)
    cos, sin = tables(angles(tokens, pairs=64), device=cuda)
    gate_up, dy = packed[0], torch.randn(tokens, width, device=cuda, dtype=torch.bfloat16)
    calls = {
        "swiglu": (OPS["swiglu"].forward, (*gate_up.chunk(2, -1),), 1),
        "swiglu_backward": (OPS["swiglu"].backward, (dy, *gate_up.chunk(2, -1)), 2),
        "swiglu_packed": (OPS["swiglu_packed"].forward, (gate_up, "gate_up"), 1),
        "swiglu_packed_backward": (OPS["swiglu_packed"].backward, (dy, gate_up, "gate_up"), 2),
        "rope_qk": (OPS["rope_qk"].forward, (q, k, cos, sin, "half"), 2),
        "rope_qk_backward": (OPS["rope_qk"].backward, (q, k, cos, sin, "half"), 2),
    }
    for name, (op, args, num_results) in calls.items():
        op(*args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        op(*args)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak == num_results * dy.nbytes, name


@pytest.mark.gpu
def test_compiled_opaque_call_is_the_kernel(cuda):
    q, k = (torch.randn(2, n, 257, 64, device=cuda, dtype=torch.bfloat16) for n in (6, 2))
    cos, sin = tables(angles(257, pairs=32), device=cuda)
    gate_up = torch.randn(65, 2 * 96, device=cuda, dtype=torch.bfloat16)

    def function(q, k, gate_up):
        turned = OPS["rope_qk"].forward(q, k, cos, sin, "half", True)
        separate = OPS["swiglu"].forward(*gate_up.chunk(2, -1), True)
        return *turned, separate, OPS["swiglu_packed"].forward(gate_up, "up_gate", True)

    def run(f):
        leaves = [t.detach().requires_grad_() for t in (q, k, gate_up)]
        outs = f(*leaves)
        return [*outs, *torch.autograd.grad([t.float().square().sum() for t in outs], leaves)]

    for a, b in zip(run(torch.compile(function, fullgraph=True)), run(function), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.gpu
def test_past_2_to_the_31_elements():
    """Row C10: the last rows of tensors past 2^31 elements equal the same rows alone."""
    rows, cols = 524289, 4096
    x = torch.randn(4, cols, device="cuda").to(torch.bfloat16).repeat(rows // 4 + 1, 1)[:rows]
    for order in ("gate_up", "up_gate"):
        out = OPS["swiglu_packed"].forward(x, order)
        assert torch.equal(out[-4:], OPS["swiglu_packed"].forward(x[-4:], order))
        grad = OPS["swiglu_packed"].backward(out, x, order)
        assert torch.equal(grad[-4:], OPS["swiglu_packed"].backward(out[-4:], x[-4:], order))
        del out, grad
    out = OPS["swiglu"].forward(x, x)
    assert torch.equal(out[-4:], OPS["swiglu"].forward(x[-4:], x[-4:]))
    del out
    q = x.view(1, rows, 32, 128).transpose(1, 2)
    cos, sin = tables(angles(rows, pairs=64), device="cuda")
    for heads in (q, q.contiguous()):  # tokens, then heads outermost
        for op in (OPS["rope"].forward, OPS["rope"].backward):
            out = op(heads, cos, sin, "half")[:, :, -4:]
            assert torch.equal(out, op(heads[:, :, -4:], cos[-4:], sin[-4:], "half"))
            del out
