"""The kernels of swiglu and geglu without a GPU, interpreted and compiled for four architectures,
and on one (marked `gpu`): what test_swiglu.py and test_geglu.py do not ask of a kernel.
"""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import compile_kernel
from gated_activations import ACTIVATIONS
from interpreter import run_interpreted
from test_swiglu import packed_with_grads, with_grads
from test_triton_pointwise import (
    BUILDS,
    ITEMSIZE,
    assert_allocates,
    assert_compiled_call_is_the_kernel,
    compute_dtype,
    cuda,  # noqa: F401
    run_twice,
)
from torch import Tensor

from xtrain.ops.gated.kernel import _gated_bwd_kernel, _gated_fwd_kernel, gated_block_sizes
from xtrain.ops.gated.op import halves

EACH = pytest.mark.parametrize("name", ACTIVATIONS)


def test_under_the_interpreter():
    run_interpreted("interpreted_gated.py")


def test_kernels_know_each_activation():
    for name, activation in ACTIVATIONS.items():
        assert activation.ops.activation(*activation.options) == name


# --- ahead of time ------------------------------------------------------------------------------

TENSORS = {
    _gated_fwd_kernel: (("gate", "up"), ("out",)),
    _gated_bwd_kernel: (("grad_out", "gate", "up"), ("grad_gate", "grad_up")),
}
# SASS instructions an element in bf16. An H200 issues about 40 forward and 65 backward while it
# moves the element's bytes.
INSTRUCTIONS = {
    "silu": {_gated_fwd_kernel: 30, _gated_bwd_kernel: 40},
    "gelu": {_gated_fwd_kernel: 43, _gated_bwd_kernel: 52},
    "gelu_tanh": {_gated_fwd_kernel: 34, _gated_bwd_kernel: 46},
}


@pytest.mark.parametrize(("arch", "dtype"), BUILDS)
@pytest.mark.parametrize("kernel", TENSORS, ids=lambda kernel: kernel.__name__)
@EACH
def test_compiles_without_spills(name, kernel, arch, dtype):
    """As for rows of a packed projection."""
    inputs, outputs = TENSORS[kernel]
    block_rows, block_cols, num_warps = gated_block_sizes(16384, 5632, ITEMSIZE[dtype])
    usage = compile_kernel(
        kernel,
        {f"{tensor}_ptr": f"*{dtype}" for tensor in (*inputs, *outputs)}
        | {f"{tensor}_row_stride": "i32:16" for tensor in (*inputs, *outputs)}
        | {"n_rows": "i32:16", "n_cols": "i32:16", "n_col_blocks": "i32"},
        {
            "ACTIVATION": name,
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
    if dtype == "bf16":
        elements = block_rows * block_cols // (32 * num_warps)
        assert sum(usage.instructions.values()) <= INSTRUCTIONS[name][kernel] * elements, usage


# --- on a GPU -----------------------------------------------------------------------------------

SHAPES = [(1, 1), (3, 1021), (1025, 129), (100003,), (7, 11, 5632)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EACH
def test_apart_on_a_gpu(name, shape, dtype, cuda):  # noqa: F811
    activation = ACTIVATIONS[name]
    gate, up, dy = ((4 * torch.randn(shape, device=cuda)).to(dtype) for _ in range(3))
    results = run_twice(lambda *t: with_grads(activation.apart, *t), gate, up, dy)
    activation.assert_accurate(results, gate, up, dy)
    ones = torch.ones((), dtype=dtype, device=cuda).expand(shape)
    activation.assert_accurate(with_grads(activation.apart, gate, up, ones), gate, up, ones)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("shape", [(1, 2), (33, 2 * 127), (5, 7, 2 * 2048)], ids=str)
@EACH
def test_packed_on_a_gpu(name, shape, order, cuda):  # noqa: F811
    activation = ACTIVATIONS[name]
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.randn(shape, device=cuda).to(dtype)
        dy = torch.randn(*shape[:-1], shape[-1] // 2, device=cuda).to(dtype)

        def packed(gate_up: Tensor, dy: Tensor) -> list[Tensor]:
            return packed_with_grads(gate_up, dy, order, activation.packed)

        results = run_twice(packed, gate_up, dy)
        gate, up = (half.contiguous() for half in halves(gate_up, order))
        for a, b in zip(results, with_grads(activation.apart, gate, up, dy), strict=True):
            assert torch.equal(a, b)
        activation.assert_accurate(results, gate, up, dy)


@pytest.mark.gpu
@EACH
def test_strided_inputs_are_not_copied(name, cuda):  # noqa: F811
    """Nothing but the results is allocated for halves of a packed projection."""
    ops, options = ACTIVATIONS[name].ops, ACTIVATIONS[name].options
    gate_up = torch.randn(4096, 2 * 2048, device=cuda, dtype=torch.bfloat16)
    dy = torch.randn(4096, 2048, device=cuda, dtype=torch.bfloat16)
    apart = gate_up.chunk(2, -1)
    assert_allocates(dy.nbytes, ops.forward, *apart, *options)
    assert_allocates(2 * dy.nbytes, ops.backward, dy, *apart, *options)
    assert_allocates(dy.nbytes, ops.forward_packed, gate_up, "gate_up", *options)
    assert_allocates(2 * dy.nbytes, ops.backward_packed, dy, gate_up, "gate_up", *options)


@pytest.mark.gpu
@EACH
def test_compiled_opaque_call_is_the_kernel(name, cuda):  # noqa: F811
    ops, options = ACTIVATIONS[name].ops, ACTIVATIONS[name].options
    gate_up = torch.randn(65, 2 * 96, device=cuda, dtype=torch.bfloat16)

    def function(gate_up):
        apart = ops.forward(*gate_up.chunk(2, -1), *options, True)
        return apart, ops.forward_packed(gate_up, "up_gate", *options, True)

    assert_compiled_call_is_the_kernel(function, gate_up)


@pytest.mark.gpu
@EACH
def test_past_2_to_the_31_elements(name):
    """Row C10: the last rows of tensors past 2^31 elements equal the same rows alone."""
    ops, options = ACTIVATIONS[name].ops, ACTIVATIONS[name].options
    rows, cols = 524289, 4096
    x = torch.randn(4, cols, device="cuda").to(torch.bfloat16).repeat(rows // 4 + 1, 1)[:rows]
    for order in ("gate_up", "up_gate"):
        out = ops.forward_packed(x, order, *options)
        assert torch.equal(out[-4:], ops.forward_packed(x[-4:], order, *options))
        grad = ops.backward_packed(out, x, order, *options)
        alone = ops.backward_packed(out[-4:], x[-4:], order, *options)
        assert torch.equal(grad[-4:], alone)
        del out, grad
    out = ops.forward(x, x, *options)
    assert torch.equal(out[-4:], ops.forward(x[-4:], x[-4:], *options))
