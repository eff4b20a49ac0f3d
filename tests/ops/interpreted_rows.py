"""The kernels of rms_norm and dropout_add_rms_norm under Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from mask_oracle import keep_mask
from test_dropout_add_rms_norm import EPS, OFFSET, SEED, draw, masked, plain, truth
from tolerances import assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import dropout_mask
from xtrain.ops.dropout.op import scale_of, threshold_of
from xtrain.ops.dropout_add_rms_norm import kernel as fused
from xtrain.ops.rms_norm import kernel as norm
from xtrain.ops.rms_norm.op import norm_dtype
from xtrain.ops.shared.layout import in_rows

pytestmark = pytest.mark.usefixtures(
    "bf16_rounds_to_nearest", "loop_bounds_are_scalars", "poisoned_memory"
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    # dtypes of x, residual and weight; cast order
    ((BF16, BF16, BF16), "llama"),
    ((BF16, FP32, FP32), "llama"),
    ((FP32, FP32, FP32), "gemma"),
    ((FP16, FP16, FP32), "gemma"),
    ((FP32, BF16, FP32), "llama"),
]


@pytest.fixture
def loop_bounds_are_scalars(monkeypatch):
    """Triton 3.6's interpreter makes ints of one-element arrays, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every result starts as NaN: what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def forward(inputs: list[Tensor], p: float, cast: str, y_dtype=None) -> tuple[Tensor, Tensor]:
    x, residual, weight = inputs[:3]
    rounds_to = norm_dtype(torch.promote_types(x.dtype, residual.dtype), weight.dtype, cast)
    random = threshold_of(p), scale_of(p), torch.tensor(SEED), torch.tensor(OFFSET)
    launch = fused.dropout_add_rms_norm_fwd
    return launch(
        x, residual, weight, *random, EPS, cast == "llama", rounds_to, y_dtype or rounds_to
    )


def backward(h: Tensor, inputs: list[Tensor], p: float, cast: str, has_grad_h: bool = True):
    x, residual, weight, dh, dy = inputs
    random = threshold_of(p), scale_of(p), torch.tensor(SEED), torch.tensor(OFFSET)
    grad_x, grad_residual, grad_weight = fused.dropout_add_rms_norm_bwd(
        dh if has_grad_h else None,
        [dy],
        h,
        weight,
        *random,
        EPS,
        cast == "llama",
        x.dtype,
        residual.dtype,
    )
    shared = p == 0 and x.dtype == residual.dtype
    assert grad_x.numel() == (0 if shared else x.numel())
    return grad_residual if shared else grad_x, grad_residual, grad_weight


def with_grads(function, inputs: list[Tensor], p: float, cast: str, has_grad_h: bool = True):
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    h, y = function(*leaves, p, cast)
    dh = inputs[3] if has_grad_h else torch.zeros_like(inputs[3])
    grads = [dh.to(h.dtype), inputs[4].to(y.dtype)]
    return [h, y, *torch.autograd.grad([h, y], leaves, grads)]


@pytest.mark.parametrize(("dtypes", "cast"), CASES, ids=str)
def test_fused(dtypes, cast):
    for shape, p, has_grad_h in (
        ((1, 1), 0.5, True),
        ((3, 40), 0.0, True),
        ((5, 257), 0.1, True),
        ((2, 3, 96), 0.5, False),
        ((7, 33), 1.0, True),
    ):
        inputs = draw(shape, dtypes)
        before = [t.clone() for t in inputs]
        h, y = forward(inputs, p, cast)
        results = [h, y, *backward(h, inputs, p, cast, has_grad_h)]
        assert torch.equal(h, inputs[1] + masked(inputs[0], p))
        in_fp64 = [t.double() for t in inputs]
        exact = with_grads(truth, in_fp64, p, cast, has_grad_h)
        in_dtype = with_grads(plain, inputs, p, cast, has_grad_h)
        for result, rounded, right in zip(results, in_dtype, exact, strict=True):
            assert_no_worse_than_plain(result, rounded, right)
        assert all(torch.equal(t, was) for t, was in zip(inputs, before, strict=True))


def test_fused_mask_is_that_of_dropout():
    """At offsets past 2^32 and below 0, for rows of odd length and several tiles."""
    for shape in ((3, 5), (9, 130)):
        x, residual, weight = torch.ones(shape), torch.zeros(shape), torch.ones(shape[-1])
        for offset in (2**32 + 1, -9):
            random = threshold_of(0.3), scale_of(0.3), torch.tensor(SEED), torch.tensor(offset)
            h, _ = fused.dropout_add_rms_norm_fwd(
                x, residual, weight, *random, EPS, True, FP32, FP32
            )
            keep = torch.from_numpy(keep_mask(shape, 0.3, SEED, offset))
            assert torch.equal(h != 0, keep)
            grad_x, grad_residual, _ = fused.dropout_add_rms_norm_bwd(
                x, [residual + 1e-3], h, weight, *random, EPS, True, FP32, FP32
            )
            assert torch.equal(grad_x != 0, keep) and (grad_residual != 0).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
def test_fused_rows_at_several_distances(order):
    """Bits and masks are those of contiguous tensors: the index is the logical one."""
    packed = torch.randn(3, 5, 2 * 48)
    for dtypes, cast in CASES[:2]:
        x = packed[..., 48:].to(dtypes[0]).permute(order)
        residual = packed[..., :48].to(dtypes[1]).permute(order)
        turned = residual.transpose(0, 1).contiguous().transpose(0, 1)
        weight = torch.rand(48).to(dtypes[2])
        right = forward([x.contiguous(), residual.contiguous(), weight], 0.3, cast)
        for other in (residual, residual.contiguous(), turned):
            assert all(a is b for a, b in zip(in_rows(x, other), (x, other), strict=True))
            results = forward([x, other, weight], 0.3, cast)
            for result, expected in zip(results, right, strict=True):
                assert torch.equal(result, expected) and result.is_contiguous()
        ones, zeros = torch.ones_like(x), torch.zeros_like(x)
        h, _ = forward([ones, zeros, weight], 0.3, cast)
        assert torch.equal(h != 0, dropout_mask(x.shape, 0.3, SEED, OFFSET))


def test_gradients_of_several_users():
    x, residual, weight, dh, _ = inputs = draw((7, 33), (BF16, FP32, FP32))
    h, _ = forward(inputs, 0.3, "llama")
    random = threshold_of(0.3), scale_of(0.3), torch.tensor(SEED), torch.tensor(OFFSET)
    rest = h, weight, *random, EPS, True, BF16, FP32
    users = [torch.randn(h.shape).to(BF16) for _ in range(3)]
    for number in (2, 3):
        outs = fused.dropout_add_rms_norm_bwd(dh, users[:number], *rest)
        total = sum(user.float() for user in users[:number])
        right = fused.dropout_add_rms_norm_bwd(dh, [total], *rest)
        assert all(torch.equal(out, expected) for out, expected in zip(outs, right, strict=True))


def test_y_dtype():
    inputs = draw((5, 48), (BF16, FP32, FP32))
    y = forward(inputs, 0.1, "llama")[1]
    assert torch.equal(forward(inputs, 0.1, "llama", BF16)[1], y.to(BF16))


TILES = [
    dict(CHUNK=64, NUM_CHUNKS=1, BLOCK_ROWS=1),
    dict(CHUNK=16, NUM_CHUNKS=3, BLOCK_ROWS=4),
    dict(CHUNK=32, NUM_CHUNKS=2, BLOCK_ROWS=2),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_results_do_not_depend_on_the_tiling(tile, monkeypatch):
    inputs = draw((6, 48), (BF16, FP32, FP32))
    x, _, weight, dh, dy = inputs
    h, y = forward(inputs, 0.3, "llama")
    grads = backward(h, inputs, 0.3, "llama")
    alone = norm.rms_norm_fwd(h, weight, EPS, True, FP32, BF16)
    norm_grads = norm.rms_norm_bwd(dy, h, weight, EPS, True)
    for module, name in (
        (fused, "dropout_add_rms_norm_block_sizes"),
        (norm, "rms_norm_block_sizes"),
    ):

        def block_sizes(*_: Any, backward: bool) -> dict[str, Any]:
            walk = dict(NUM_STAGES=1, per_sm=1, maxnreg=128) if backward else {}
            return tile | dict(VEC=4, num_warps=4) | walk

        monkeypatch.setattr(module, name, block_sizes)
    other_h, other_y = forward(inputs, 0.3, "llama")
    assert torch.equal(other_h, h)
    torch.testing.assert_close(other_y, y, rtol=1e-6, atol=1e-6)
    close = dict(rtol=1e-5, atol=1e-5)
    others = backward(h, inputs, 0.3, "llama")
    assert torch.equal(others[0] != 0, grads[0] != 0)
    for other, grad in zip(others[1:], grads[1:], strict=True):
        torch.testing.assert_close(other, grad, **close)
    torch.testing.assert_close(
        norm.rms_norm_fwd(h, weight, EPS, True, FP32, BF16), alone, rtol=8e-3, atol=1e-6
    )
    for other, grad in zip(norm.rms_norm_bwd(dy, h, weight, EPS, True), norm_grads, strict=True):
        torch.testing.assert_close(other, grad, **close)


@pytest.mark.parametrize(("dtypes", "cast"), CASES, ids=str)
def test_norm(dtypes, cast):
    for shape in ((1, 1), (3, 40), (5, 257), (2, 3, 96)):
        x, _, weight, _, dy = draw(shape, dtypes)
        dy = dy.to(norm_dtype(x.dtype, weight.dtype, cast))
        y = norm.rms_norm_fwd(x, weight, EPS, cast == "llama", dy.dtype, dy.dtype)
        results = [y, *norm.rms_norm_bwd(dy, x, weight, EPS, cast == "llama")]

        def grads(function, x, weight, dy, cast=cast):
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = function(torch.zeros_like(x), x, weight, 0.0, cast)[1]
            return [y, *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))]

        exact = grads(truth, x.double(), weight.double(), dy.double())
        for result, rounded, right in zip(results, grads(plain, x, weight, dy), exact, strict=True):
            assert_no_worse_than_plain(result, rounded, right)


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 1, 0, 3)]


def parts(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Two tensors whose rows lie apart: heads [B, T, N, H] of one projection, in another order."""
    B, T, N, H = shape
    packed = torch.randn(B, T, 2 * N * H + 16).to(dtype)
    halves = packed[..., : N * H], packed[..., N * H : 2 * N * H]
    return [half.unflatten(-1, (N, H)).permute(order) for half in halves]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_norm_of_rows_at_several_distances(order):
    """Bits are those of contiguous tensors; each tensor has strides of its own."""
    for dtype, shape in ((BF16, (2, 3, 4, 40)), (FP32, (1, 5, 3, 24)), (FP32, (3, 2, 1, 40))):
        x, dy = parts(shape, order, dtype)
        weight = torch.rand(shape[-1]).to(dtype)
        y = norm.rms_norm_fwd(x.contiguous(), weight, EPS, True, dtype, dtype)
        right = y, *norm.rms_norm_bwd(dy.contiguous(), x.contiguous(), weight, EPS, True)
        turned = dy.transpose(1, 2).contiguous().transpose(1, 2)
        for grad in (dy, dy.contiguous(), turned):
            assert all(a is b for a, b in zip(in_rows(grad, x), (grad, x), strict=True))
            results = [norm.rms_norm_fwd(x, weight, EPS, True, dtype, dtype)]
            results += norm.rms_norm_bwd(grad, x, weight, EPS, True)
            for result, expected in zip(results, right, strict=True):
                assert torch.equal(result, expected) and result.is_contiguous()


def test_norm_of_rows_at_one_distance():
    x, dy = torch.randn(2, 3, 56)[..., 8:48], torch.randn(2, 3, 41)[..., :40]
    weight = torch.rand(40)
    y = norm.rms_norm_fwd(x, weight, EPS, False, FP32, FP32)
    assert torch.equal(y, norm.rms_norm_fwd(x.contiguous(), weight, EPS, False, FP32, FP32))
    grads = norm.rms_norm_bwd(dy, x, weight, EPS, False)
    right = norm.rms_norm_bwd(dy.contiguous(), x.contiguous(), weight, EPS, False)
    assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


def test_norm_of_zeros_and_of_nan():
    x = torch.zeros(4, 40)
    x[1, 3] = float("nan")
    y = norm.rms_norm_fwd(x, torch.ones(40), EPS, True, FP32, FP32)
    assert y[1].isnan().all() and y[[0, 2, 3]].abs().sum() == 0
    grad_x, grad_weight = norm.rms_norm_bwd(torch.ones(4, 40), x, torch.ones(40), EPS, True)
    assert grad_x[1].isnan().all() and grad_x[[0, 2, 3]].isfinite().all()
    assert grad_weight.isnan().all()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # in the rows past the last
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weight_gradient_is_accumulated_in_fp32():
    """Row C28's sum over rows, within a program and between programs; eps = 0 shows in no tail."""
    x, weight = torch.ones(257, 8, dtype=BF16), torch.ones(8, dtype=BF16)
    dy = torch.full((257, 8), 1 / 256, dtype=BF16)
    dy[0] = 1.0
    assert norm.rms_norm_bwd(dy, x, weight, 0.0, True)[1].tolist() == [2.0] * 8
