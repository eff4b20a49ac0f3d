"""The loss kernels under Triton's interpreter; run by test_triton_loss.py."""

from __future__ import annotations

import math

import pytest
import torch
import triton
from interpreter import bf16_rounds_to_nearest  # noqa: F401
from loss_oracle import IGNORE, head_and_targets, plain_linear_cross_entropy
from tolerances import assert_close, assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import linear_cross_entropy
from xtrain.ops.cross_entropy import kernel as kernels
from xtrain.ops.cross_entropy.kernel import cross_entropy_rows
from xtrain.ops.linear_cross_entropy import chunks
from xtrain.ops.linear_cross_entropy.kernel import scale

pytestmark = pytest.mark.usefixtures("bf16_rounds_to_nearest")

PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}


def loss_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor, options) -> tuple:
    """(w l [n], dx [n, V]) in plain PyTorch; an identity makes a linear layer give the logits."""
    leaf = logits.detach().clone().requires_grad_()
    identity = torch.eye(logits.shape[1], dtype=logits.dtype)
    losses = plain_linear_cross_entropy(
        leaf, identity, targets, token_weights=weights, reduction="none", **options
    )
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def in_padded_rows(x: Tensor) -> Tensor:
    """A copy of x [n, V] whose rows go on, with NaN, to a multiple of 64."""
    n, V = x.shape
    padded = torch.full((n, triton.cdiv(V, 64) * 64), math.nan, dtype=x.dtype)
    padded[:, :V] = x
    return padded[:, :V]


def example(n: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in padded rows, targets of which one is ignored, weights of which one is 0."""
    logits = in_padded_rows(3 * torch.randn(n, V, dtype=torch.float64).to(dtype))
    targets = torch.randint(0, V, (n,))
    targets[n // 2] = IGNORE
    weights = torch.rand(n, dtype=torch.promote_types(dtype, torch.float32)) + 0.5
    weights[n // 3] = 0.0
    return logits, targets, weights


def launch(logits: Tensor, grad, targets, weights, losses, lse, options, *, padded=True) -> None:
    cross_entropy_rows(
        logits, grad, targets, weights, losses, lse, ignore_index=IGNORE, padded=padded, **options
    )


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("V", [1, 3, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows(dtype, V, options):
    """Loss and gradient, in place and apart, with lse found and given; outputs poisoned."""
    n = 1 if V == 4097 else 5
    logits, targets, weights = example(n, V, dtype)
    if n == 1:
        targets[0], weights[0] = V - 1, 2.0
    before = in_padded_rows(logits)
    truth = loss_and_gradient(before.double(), targets, weights.double(), options)
    plain = loss_and_gradient(before, targets, weights, options)
    losses, lse = torch.full_like(weights, math.nan), torch.full_like(weights, math.nan)
    apart = in_padded_rows(torch.full((n, V), math.nan, dtype=dtype))
    launch(logits, apart, targets, weights, losses, lse, options)
    assert torch.equal(logits, before)
    assert_no_worse_than_plain(losses * weights, plain[0], truth[0])
    assert_no_worse_than_plain(apart, plain[1], truth[1])
    silent = (targets == IGNORE) | (weights == 0)
    assert (apart[silent] == 0).all() and (losses[silent] == 0).all()
    again = torch.full((n, V), math.nan, dtype=dtype)
    launch(logits, again, targets, weights, None, lse, options, padded=False)
    assert torch.equal(again, apart)
    launch(logits, logits, targets, weights, losses.fill_(math.nan), lse, options)
    assert torch.equal(logits, apart)
    without = torch.full_like(weights, math.nan)
    launch(before, None, targets, weights, without, torch.empty_like(lse), options)
    assert torch.equal(without, losses)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_whole_op(reduction, monkeypatch):
    """Chunk after chunk in one buffer, padded rows, odd V: loss and both gradients."""
    monkeypatch.setattr(chunks, "row_function", lambda hidden: chunks.rows_by_kernel)
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args, **kwargs: 4)
    hidden, weight, targets = head_and_targets((2, 5), 6, 101)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    expected = plain_linear_cross_entropy(hidden, weight, targets, **options)
    assert_close(loss, expected)
    dy = torch.rand_like(loss)
    grads = torch.autograd.grad(loss, (hidden, weight), dy)
    wants = torch.autograd.grad(expected, (hidden, weight), dy)
    for grad, want in zip(grads, wants, strict=True):
        assert_close(grad, want)


@pytest.mark.parametrize("tile_rows,vector", [(32, 1), (64, 8), (256, 4)])
def test_tiles_do_not_matter(tile_rows, vector, monkeypatch):
    """Fewer logits than a tile, whole tiles, and a remainder."""
    monkeypatch.setattr(kernels, "cross_entropy_block_sizes", lambda *args: (tile_rows, vector, 1))
    for V in (31, 1024, 1500):
        logits, targets, weights = example(3, V, torch.float64)
        truth = loss_and_gradient(logits, targets, weights, ALL)
        losses, lse = torch.empty_like(weights), torch.empty_like(weights)
        launch(logits, logits, targets, weights, losses, lse, ALL)
        assert_close(losses * weights, truth[0])
        assert_close(logits, truth[1])


def test_rows_of_special_values():
    """As in plain PyTorch: masked classes, a class of infinite logit, NaN, nothing but -inf."""
    inf = math.inf
    logits = torch.tensor(
        [[1.0, -inf, 2.0], [0.0, inf, 1.0], [math.nan, 0.0, 1.0], [-inf, -inf, -inf], [9e4, 0, 1]]
    )
    targets, weights = torch.tensor([2, 1, 1, 0, 0]), torch.ones(5)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    losses, lse = torch.empty(5), torch.empty(5)
    grad = torch.empty(5, 3)
    launch(logits, grad, targets, weights, losses, lse, PLAIN, padded=False)
    assert_close(losses[[0, 4]], expected[[0, 4]])
    assert losses[1:4].isnan().all() and expected[1:4].isnan().all()
    assert grad[0, 1] == 0 and grad[[0, 4]].isfinite().all()
    assert grad[1:4].isnan().any(-1).all()


def test_small_losses_of_large_logits():
    """log(sum exp(x - max)) and max - x are added, not lse and -x, which would cancel."""
    logits = torch.tensor([[1000.0, 990.0], [-2000.0, -2008.0]])
    targets, weights = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    losses, lse = torch.empty(2), torch.empty(2)
    launch(logits, None, targets, weights, losses, lse, PLAIN, padded=False)
    expected = torch.tensor([math.log1p(math.exp(-10)), math.log1p(math.exp(-8))])
    assert_close(losses, expected)


def test_a_target_that_is_no_class_gives_nan():
    """And reads no memory that is not its own: here the row before."""
    logits = torch.zeros(3, 4)
    targets, weights = torch.tensor([0, -3, 4]), torch.ones(3)
    losses, lse = torch.zeros(3), torch.empty(3)
    launch(logits, logits, targets, weights, losses, lse, PLAIN, padded=False)
    assert losses.isnan().tolist() == [False, True, True]


def test_int32_targets():
    logits, targets, weights = example(4, 10, torch.float32)
    outs = []
    for t in (targets, targets.int()):
        losses, lse = torch.empty(4), torch.empty(4)
        launch(logits, None, t, weights, losses, lse, PLAIN)
        outs.append(losses)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scale(dtype):
    for n in (0, 1, 1000, 10007):
        x = torch.randn(n, dtype=torch.float64).to(dtype)
        before = x.clone()
        for value in (3.7, 1.0, 0.0):
            factor = torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32))
            expected = (before.to(factor.dtype) * factor).to(dtype)
            out = scale(x, factor, torch.full_like(x, math.nan))
            assert torch.equal(out, expected) and torch.equal(x, before)
            own = before.clone()
            assert scale(own, factor, own) is own and torch.equal(own, expected)


def test_scale_into_a_narrower_dtype():
    x = torch.randn(100)
    out = scale(x, torch.tensor(65536.0), torch.empty(100, dtype=torch.float16))
    assert torch.equal(out, (x * 65536.0).half())
