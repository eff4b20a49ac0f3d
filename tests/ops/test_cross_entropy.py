"""xtrain.ops.cross_entropy: the loss formulas, ignored tokens, gradients, compilation, errors."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from loss_oracle import IGNORE, numpy_cross_entropy
from tolerances import assert_close, assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import cross_entropy
from xtrain.ops.cross_entropy import op
from xtrain.ops.cross_entropy.op import cross_entropy_reference


def example(shape=(3, 5), V=11, dtype=torch.float64, device="cpu") -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(*shape, V, dtype=torch.float64)
    targets = torch.randint(0, V, shape)
    targets.view(-1)[1::4] = IGNORE
    return logits.to(device, dtype).requires_grad_(), targets.to(device)


OPTIONS = [
    {"label_smoothing": s, "z_loss": z, "reduction": r}
    for r, s, z in product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 0.01))
]


@pytest.fixture(params=["whole", "row blocks"])
def chunks(request, monkeypatch):
    """Eager kernels over all rows at once, and cut after every two."""
    if request.param == "row blocks":
        small = {"cpu": 2 * 11, "cuda": 2 * 11}
        monkeypatch.setattr(op, "CHUNK_ELEMENTS", small)


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward(options, weighted, chunks):
    logits, targets = example()
    weights = torch.rand(3, 5, dtype=torch.float64) if weighted else None
    arrays = [None if t is None else t.detach().numpy() for t in (logits, targets, weights)]
    expected = numpy_cross_entropy(*arrays[:2], weights=arrays[2], **options)
    for function in (cross_entropy, cross_entropy_reference):
        loss = function(logits, targets, token_weights=weights, **options)
        assert_close(loss, torch.as_tensor(expected))
        assert loss.dtype == torch.float64


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward(options, chunks, device):
    """Finite differences, and autograd through the reference, on a view that models shift."""
    whole, targets = example((3, 6), device=device)
    weights = torch.rand(3, 5, device=device, dtype=torch.float64)
    for token_weights in (None, weights):
        options = dict(options, token_weights=token_weights)

        def shifted(function, x, options=options):
            return function(x[:, :-1], targets[:, 1:], **options)

        assert torch.autograd.gradcheck(
            lambda x: shifted(cross_entropy, x), (whole,), fast_mode=True
        )
        loss = shifted(cross_entropy, whole)
        dy = torch.randn_like(loss)
        (grad,) = torch.autograd.grad(loss, whole, dy)
        (expected,) = torch.autograd.grad(shifted(cross_entropy_reference, whole), whole, dy)
        assert_close(grad, expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_forward_equals_torch(reduction, label_smoothing):
    logits, targets = example()
    ours = cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)
    torchs = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    assert_close(ours, torchs.view(ours.shape))


def assert_no_worse_than_torch(function, logits: Tensor, targets: Tensor) -> None:
    """fp32 inside whatever the logits: the loss is fp32, gradients are rounded once."""
    exact = logits.detach().double().requires_grad_()
    truth = cross_entropy_reference(exact, targets, label_smoothing=0.1)
    plain = F.cross_entropy(logits.float(), targets, label_smoothing=0.1)
    loss = function(logits)
    assert loss.dtype == torch.float32
    assert_no_worse_than_plain(loss, plain, truth)
    # per-token weights of the mean are about 1/48: compare gradients at the size of 1
    (true,) = torch.autograd.grad(truth * 48, exact)
    (other,) = torch.autograd.grad(plain * 48, logits)
    assert_no_worse_than_plain(torch.autograd.grad(loss * 48, logits)[0], other, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_worse_than_torch(dtype, device):
    logits, targets = example((64,), 1000, dtype, device)
    assert_no_worse_than_torch(
        lambda x: cross_entropy(x, targets, label_smoothing=0.1), logits, targets
    )


# --- tokens that do not count ---------------------------------------------------------------------


def test_all_ignored_is_zero_with_zero_gradients(device):
    """Row C24: no token counts, the loss is 0 and finite, and so is its gradient."""
    logits, _ = example(dtype=torch.float32, device=device)
    targets = torch.full((3, 5), IGNORE, device=device)
    loss = cross_entropy(logits, targets, z_loss=0.1, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0 and (grad == 0).all()


def test_accumulation_with_an_ignored_batch():
    """Row C24: [all ignored, normal] gives the gradients of [normal] alone."""
    weight = torch.randn(8, 11, requires_grad=True)
    x = torch.randn(2, 5, 8)
    targets = torch.randint(0, 11, (2, 5))
    targets[0] = IGNORE
    cross_entropy(x[1] @ weight, targets[1]).backward()
    alone, weight.grad = weight.grad, None
    for i in (0, 1):
        cross_entropy(x[i] @ weight, targets[i]).backward()
    assert torch.equal(weight.grad, alone)


def test_ignored_rows_may_hold_anything(device):
    """Not a number in an ignored or weightless row reaches neither the loss nor the gradient."""
    logits, targets = example(dtype=torch.float32, device=device)
    bad = logits.detach().clone()
    bad[targets == IGNORE] = math.nan
    weights = torch.ones(3, 5, device=device)
    weights[2, 4] = 0.0
    bad[2, 4] = math.inf
    bad.requires_grad_()
    loss = cross_entropy(bad, targets, token_weights=weights)
    assert_close(loss, cross_entropy(logits, targets, token_weights=weights))
    (grad,) = torch.autograd.grad(loss, bad)
    assert grad.isfinite().all()
    assert (grad[(targets == IGNORE) | (weights == 0)] == 0).all()


def test_masked_vocabulary(device):
    """Logits of -inf, as for padded vocabulary rows, have probability 0 and gradient 0."""
    logits, targets = example(dtype=torch.float32, device=device)
    padded = F.pad(logits.detach(), (0, 5), value=-math.inf).requires_grad_()
    loss = cross_entropy(padded, targets)
    assert_close(loss, cross_entropy(logits, targets))
    (grad,) = torch.autograd.grad(loss, padded)
    assert (grad[..., 11:] == 0).all() and grad.isfinite().all()


# --- hygiene, memory, compilation, edges, errors --------------------------------------------------


def test_two_losses_on_the_same_logits():
    """Row C20: the gradient of a sum is the sum of the gradients; the logits are left alone."""
    logits, targets = example(dtype=torch.float32)
    before = logits.detach().clone()
    (both,) = torch.autograd.grad(cross_entropy(logits, targets) + 0.1 * (logits**2).mean(), logits)
    (first,) = torch.autograd.grad(cross_entropy(logits, targets), logits)
    (second,) = torch.autograd.grad(0.1 * (logits**2).mean(), logits)
    assert_close(both, first + second)
    assert torch.equal(logits, before)


def test_fused_by_inductor(device):
    """Forward and backward are loops of inductor's own: no torch kernel, no copy of the logits."""
    from torch._inductor.utils import run_and_get_code

    logits, targets = example((64,), 1000, torch.bfloat16, device)
    compiled = torch.compile(
        lambda x: cross_entropy(x, targets, label_smoothing=0.1), fullgraph=True
    )
    _, codes = run_and_get_code(assert_no_worse_than_torch, compiled, logits, targets)
    assert len(codes) == 2  # forward and backward
    calls = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.(xtrain|aten)\.\w+\.\w+\(")
    assert not any(calls.search(code) for code in codes)


def test_compiled_equals_eager(device):
    """Of dynamic shapes; once with no token that counts."""
    weights = torch.rand(3, 5, device=device)
    variants = [{"label_smoothing": 0.1, "z_loss": 0.01, "token_weights": weights}]
    variants.append({"reduction": "none"})
    compiled = torch.compile(
        lambda x, t: [cross_entropy(x, t, **options) for options in variants],
        fullgraph=True,
        dynamic=True,
    )
    logits, targets = example(dtype=torch.float32, device=device)
    for given in (targets, torch.full_like(targets, IGNORE)):
        outs = compiled(logits, given)
        wants = [cross_entropy(logits, given, **options) for options in variants]
        dys = [torch.rand_like(want) for want in wants]
        for out, want in zip(outs, wants, strict=True):
            assert_close(out, want)
        (grad,) = torch.autograd.grad(outs, logits, dys)
        assert_close(grad, torch.autograd.grad(wants, logits, dys)[0])
    assert (grad == 0).all()


@pytest.mark.parametrize("shape,V", [((), 7), ((1,), 1), ((0,), 5), ((2, 0), 3), ((1023,), 131)])
def test_edge_shapes(shape, V, device):
    logits = torch.randn(*shape, V, device=device, requires_grad=True)
    targets = torch.randint(0, V, shape, device=device)
    for reduction in ("mean", "sum", "none"):
        loss = cross_entropy(logits, targets, reduction=reduction)
        expected = cross_entropy_reference(logits, targets, reduction=reduction)
        assert_close(loss, expected)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0])


def test_int32_targets_and_another_ignore_index():
    logits, targets = example()
    expected = cross_entropy(logits, targets)
    other = torch.where(targets == IGNORE, 3, targets + 100).int()
    shifted = F.pad(logits, (100, 0), value=-math.inf)
    assert_close(cross_entropy(shifted, other, ignore_index=3), expected)


def test_errors():
    logits, targets = example()
    outside = targets.clone()
    outside[1, 2] = 11
    negative = targets.clone()
    negative[0, 3] = -1
    weights = torch.ones(3, 5, requires_grad=True)
    cases = [
        ((logits, outside), {}, r"target 11 at \(1, 2\) is outside \[0, 11\) and is not ignore"),
        ((logits, negative), {}, r"target -1 at \(0, 3\) is outside"),
        ((logits, targets[0]), {}, r"got \(3, 5, 11\) and targets \(5,\)"),
        ((logits[..., :0], targets), {}, r"got \(3, 5, 0\)"),
        ((logits.int(), targets), {}, "logits must be floats, got torch.int32"),
        ((logits, targets.float()), {}, "targets must be integers, got torch.float32"),
        (
            (logits, targets),
            {"label_smoothing": 1.5},
            r"label_smoothing must be in \[0, 1\], got 1.5",
        ),
        ((logits, targets), {"z_loss": -1.0}, "z_loss must be finite and not negative, got -1.0"),
        ((logits, targets), {"z_loss": math.nan}, "z_loss must be finite"),
        ((logits, targets), {"reduction": "avg"}, r"reduction must be one of .* got 'avg'"),
        ((logits, targets), {"token_weights": weights[0]}, r"floats of targets' shape \(3, 5\)"),
        ((logits, targets), {"token_weights": weights}, "token_weights are constants"),
    ]
    for args, options, message in cases:
        with pytest.raises(ValueError, match=message):
            cross_entropy(*args, **options)
