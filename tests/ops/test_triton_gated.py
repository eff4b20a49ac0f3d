"""The kernels of swiglu and geglu without a GPU, interpreted and compiled for four architectures,
and on one (marked `gpu`): what test_gated.py does not ask of a kernel.
"""

from __future__ import annotations

import pytest
import torch
from ahead_of_time import compile_launches, meta
from gated_activations import ACTIVATIONS, Activation, packed_with_grads, with_grads
from interpreter import INTERPRETING, bf16_rounds_to_nearest, run_interpreted  # noqa: F401
from test_triton_pointwise import (  # noqa: F401
    BUILDS,
    assert_allocates,
    assert_compiled_call_is_the_kernel,
    cuda,  # noqa: F401
    far_apart,
    poisoned_outputs,
    run_twice,
)
from torch import Tensor

from xtrain.ops.gated import kernel as kernels
from xtrain.ops.gated.kernel import gated_block_sizes, gated_fwd, gated_packed_bwd
from xtrain.ops.gated.op import halves

EACH = pytest.mark.parametrize("name", ACTIVATIONS)


def test_under_the_interpreter():
    run_interpreted(__file__)


def test_kernels_know_each_activation():
    for name, activation in ACTIVATIONS.items():
        assert activation.ops.activation(*activation.options) == name


# --- ahead of time ------------------------------------------------------------------------------

# SASS instructions an element in bf16. An H200 issues about 40 forward and 65 backward while it
# moves the element's bytes.
INSTRUCTIONS = {
    "silu": {"fwd": 30, "bwd": 40},
    "gelu": {"fwd": 43, "bwd": 52},
    "gelu_tanh": {"fwd": 34, "bwd": 46},
}


@pytest.mark.parametrize(
    ("name", "arch", "dtype"),
    [("gelu", *build) for build in BUILDS]
    + [(name, 90, torch.bfloat16) for name in ("silu", "gelu_tanh")],
    ids=str,
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_compiles_without_spills(direction, name, arch, dtype):
    """As for rows of a packed projection; the activation of the most instructions everywhere."""
    packed, dy = meta(16384, 2 * 5632, dtype=dtype), meta(16384, 5632, dtype=dtype)
    if direction == "fwd":
        num_read, num_written = 2, 1
        launches = compile_launches(lambda: gated_fwd(*packed.chunk(2, -1), name), arch)
    else:
        num_read, num_written = 3, 2
        launches = compile_launches(
            lambda: gated_packed_bwd(dy, packed, name, gate_first=True), arch
        )
    (usage,) = launches
    block_rows, block_cols, num_warps = gated_block_sizes(16384, 5632, dtype.itemsize)
    assert usage.spills == usage.shared_bytes == 0, usage
    # 64 registers let 1024 threads share an SM: the bytes in flight that hide a memory's latency
    assert usage.registers <= 64, usage
    accesses = block_rows * block_cols * dtype.itemsize // (16 * 32 * num_warps)
    assert usage.count("LDG") == usage.count("LDG", "128") == num_read * accesses, usage
    assert usage.count("STG") == usage.count("STG", "128") == num_written * accesses, usage
    if dtype == torch.bfloat16:
        elements = block_rows * block_cols // (32 * num_warps)
        assert sum(usage.instructions.values()) <= INSTRUCTIONS[name][direction] * elements, usage


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


# --- interpreted ---------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(params=ACTIVATIONS)
def activation(request) -> Activation:
    return ACTIVATIONS[request.param]


def assert_dense(*results: Tensor) -> None:
    for t in results:
        assert t.stride() == torch.empty(t.shape).stride()


def apart(activation: Activation, gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
    ops, options = activation.ops, activation.options
    return [ops._cuda(gate, up, *options), *ops._backward_cuda(dy, gate, up, *options)]


def packed(activation: Activation, gate_up: Tensor, order: str, dy: Tensor) -> list[Tensor]:
    ops, options = activation.ops, activation.options
    grad = ops._packed_backward_cuda(dy, gate_up, order, *options)
    assert_dense(grad)
    return [ops._packed_cuda(gate_up, order, *options), *halves(grad, order)]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [(4 * torch.randn(shape)).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1025), (3, 2, 33)], ids=str)
def interpreted_apart(activation, shape, dtype):
    gate, up, dy = draw(shape, dtype)
    results = apart(activation, gate, up, dy)
    assert_dense(*results)
    activation.assert_accurate(results, gate, up, dy)


def interpreted_small_and_large_gates(activation):
    """A tanh from exponentials cancels near 0 where it is not written with care; tails stay 0."""
    sizes = torch.tensor([0.0, 1e-30, 1e-8, 1e-4, 3e-3, 0.1, 2.0, 5.0, 8.0, 13.0, 50.0, 1e4, 1e9])
    gate = torch.cat((-sizes.flip(0), sizes))
    up = dy = torch.ones_like(gate)
    results = apart(activation, gate, up, dy)
    size = gate.abs().double()
    scales = size, torch.ones_like(size), size  # y and grad_up are multiples of the gate
    for result, right, scale in zip(results, activation.truth(gate, up, dy), scales, strict=True):
        assert ((result.double() - right).abs() <= 5e-7 * scale).all()  # 4 ulp of 1


def interpreted_left_tail(activation):
    """Where 1 + erf and 1 + tanh have nothing left of gelu in fp32, the kernels have 4 digits."""
    gate = torch.linspace(-9, 0, 1801)
    y, _, grad_up = apart(activation, gate, torch.ones_like(gate), torch.ones_like(gate))
    right = activation.truth(gate, torch.ones_like(gate), torch.ones_like(gate))
    torch.testing.assert_close(y.double(), right[0], rtol=3e-5, atol=0)
    torch.testing.assert_close(grad_up.double(), right[2], rtol=3e-5, atol=0)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 254), (5, 2, 66), (2, 2100)], ids=str)
def interpreted_packed_equals_separate(activation, shape, order):
    for dtype in (torch.float32, torch.bfloat16):
        gate_up, _, dy = draw(shape, dtype)
        dy = dy[..., : shape[-1] // 2]
        gate, up = (half.contiguous() for half in halves(gate_up, order))
        results = packed(activation, gate_up, order, dy)
        for a, b in zip(results, apart(activation, gate, up, dy), strict=True):
            assert torch.equal(a, b)
        activation.assert_accurate(results, gate, up, dy)


def interpreted_mixed_dtypes(activation):
    gate, up, dy = draw((3, 40), torch.bfloat16)
    results = apart(activation, gate, up.float(), dy.float())
    assert [t.dtype for t in results] == [torch.float32, torch.bfloat16, torch.float32]
    activation.assert_accurate(results, gate, up.float(), dy.float())


@pytest.mark.parametrize("blocks", [(1, 64), (4, 16), (2, 256)], ids=str)
def interpreted_does_not_depend_on_the_tiling(activation, blocks, monkeypatch):
    gate_up, _, dy = draw((7, 2 * 67), torch.float32)
    expected = packed(activation, gate_up, "gate_up", dy[:, :67])
    monkeypatch.setattr(kernels, "gated_block_sizes", lambda *sizes: (*blocks, 4))
    results = packed(activation, gate_up, "gate_up", dy[:, :67])
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def interpreted_nan_and_infinity_as_in_the_reference(activation):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -200.0, 200.0, 1.0])
    gate, up = (t.contiguous() for t in torch.broadcast_tensors(special[:, None], special))
    ones, (ops, options) = torch.ones_like(gate), (activation.ops, activation.options)
    out, *grads = apart(activation, gate, up, ones)
    torch.testing.assert_close(out, activation.reference(gate, up), equal_nan=True)
    # torch's own gelu gives the gradient of an infinite gate as NaN or not, by its vector code
    compared = ~gate.isinf() if ops.name == "geglu" else torch.ones_like(gate, dtype=torch.bool)
    expected = ops.backward_decomposition(ones, gate, up, *options)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a[compared], b[compared], equal_nan=True)


def interpreted_rows_past_2_to_the_31_elements(activation):
    """Row C10: the product of row and row stride does not fit in 32 bits."""
    gate, up, dy = draw((3, 16), torch.bfloat16)
    results = apart(activation, far_apart(gate), up, dy)
    for a, b in zip(results, apart(activation, gate, up, dy), strict=True):
        assert torch.equal(a, b)
