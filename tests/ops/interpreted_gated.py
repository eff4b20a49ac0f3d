"""The kernels of swiglu and geglu under Triton's interpreter, on CPU tensors.

Run by test_triton_gated.py. The ops' CUDA implementations are called as a GPU would call them: what
they copy before a launch, and what they leave to the kernel's strides, is tested along.
"""

from __future__ import annotations

import pytest
import torch
from gated_activations import ACTIVATIONS, Activation
from interpreted_pointwise import far_apart, poisoned_outputs  # noqa: F401
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from torch import Tensor

from xtrain.ops.gated.op import halves
from xtrain.ops.gated.op import kernel as kernels

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
def test_apart(activation, shape, dtype):
    gate, up, dy = draw(shape, dtype)
    results = apart(activation, gate, up, dy)
    assert_dense(*results)
    activation.assert_accurate(results, gate, up, dy)


def test_small_and_large_gates(activation):
    """A tanh from exponentials cancels near 0 where it is not written with care; tails stay 0."""
    sizes = torch.tensor([0.0, 1e-30, 1e-8, 1e-4, 3e-3, 0.1, 2.0, 5.0, 8.0, 13.0, 50.0, 1e4, 1e9])
    gate = torch.cat((-sizes.flip(0), sizes))
    up = dy = torch.ones_like(gate)
    results = apart(activation, gate, up, dy)
    size = gate.abs().double()
    scales = size, torch.ones_like(size), size  # y and grad_up are multiples of the gate
    for result, right, scale in zip(results, activation.truth(gate, up, dy), scales, strict=True):
        assert ((result.double() - right).abs() <= 5e-7 * scale).all()  # 4 ulp of 1


def test_left_tail(activation):
    """Where 1 + erf and 1 + tanh have nothing left of gelu in fp32, the kernels have 4 digits."""
    gate = torch.linspace(-9, 0, 1801)
    y, _, grad_up = apart(activation, gate, torch.ones_like(gate), torch.ones_like(gate))
    right = activation.truth(gate, torch.ones_like(gate), torch.ones_like(gate))
    torch.testing.assert_close(y.double(), right[0], rtol=3e-5, atol=0)
    torch.testing.assert_close(grad_up.double(), right[2], rtol=3e-5, atol=0)


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 254), (5, 2, 66), (2, 2100)], ids=str)
def test_packed_equals_separate(activation, shape, order):
    for dtype in (torch.float32, torch.bfloat16):
        gate_up, _, dy = draw(shape, dtype)
        dy = dy[..., : shape[-1] // 2]
        gate, up = (half.contiguous() for half in halves(gate_up, order))
        results = packed(activation, gate_up, order, dy)
        for a, b in zip(results, apart(activation, gate, up, dy), strict=True):
            assert torch.equal(a, b)
        activation.assert_accurate(results, gate, up, dy)


def test_strided(activation):
    """Views whose rows a kernel can walk, and views that it must not."""
    shape = (6, 4, 33)
    wide = torch.randn(6, 4, 100)
    views = {
        "halves": wide[..., :66].chunk(2, -1),
        "row strides differ": (wide[..., 5:38], torch.randn(shape)),
        "one row": (wide[:1, :1, :33].expand(shape), torch.randn(shape)),
        "one sample": (wide[:1, :, :33].expand(shape), wide[..., 50:83]),
        "steps of 3": (wide[..., :99:3], wide[..., 1:100:3]),
        "transposed": (torch.randn(33, 4, 6).transpose(0, 2),) * 2,
    }
    for name, (gate, up) in views.items():
        for dy in (torch.randn(shape), torch.ones(()).expand(shape), wide[..., 60:93]):
            before = [t.clone() for t in (gate, up, dy)]
            results = apart(activation, gate, up, dy)
            assert_dense(*results)
            for a, b in zip(results, apart(activation, *before), strict=True):
                assert torch.equal(a, b), name
            assert all(torch.equal(t, b) for t, b in zip((gate, up, dy), before, strict=True))


def test_mixed_dtypes(activation):
    gate, up, dy = draw((3, 40), torch.bfloat16)
    results = apart(activation, gate, up.float(), dy.float())
    assert [t.dtype for t in results] == [torch.float32, torch.bfloat16, torch.float32]
    activation.assert_accurate(results, gate, up.float(), dy.float())


@pytest.mark.parametrize("blocks", [(1, 64), (4, 16), (2, 256)], ids=str)
def test_does_not_depend_on_the_tiling(activation, blocks, monkeypatch):
    gate_up, _, dy = draw((7, 2 * 67), torch.float32)
    expected = packed(activation, gate_up, "gate_up", dy[:, :67])
    monkeypatch.setattr(kernels, "gated_block_sizes", lambda *sizes: (*blocks, 4))
    results = packed(activation, gate_up, "gate_up", dy[:, :67])
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def test_nan_and_infinity_as_in_the_reference(activation):
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


def test_rows_past_2_to_the_31_elements(activation):
    """Row C10: the product of row and row stride does not fit in 32 bits."""
    gate, up, dy = draw((3, 16), torch.bfloat16)
    results = apart(activation, far_apart(gate), up, dy)
    for a, b in zip(results, apart(activation, gate, up, dy), strict=True):
        assert torch.equal(a, b)
