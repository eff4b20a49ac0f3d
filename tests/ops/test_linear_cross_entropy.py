"""xtrain.ops.linear_cross_entropy: values, gradients, upstream numbers, memory, compilation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loss_oracle import (
    IGNORE,
    SHAPE,
    V,
    head_and_targets,
    numpy_cross_entropy,
    plain_linear_cross_entropy,
)
from tolerances import assert_close, assert_no_worse_than_plain, max_error
from torch import Tensor

from xtrain.ops import OPS, linear_cross_entropy
from xtrain.ops.linear_cross_entropy import chunks
from xtrain.ops.linear_cross_entropy.op import linear_cross_entropy_reference

OP = OPS["linear_cross_entropy"]
OPTIONS = [
    {"label_smoothing": s, "z_loss": z, "softcap": cap, "reduction": r}
    for r, (s, z, cap) in product(
        ("mean", "sum", "none"), ((0.0, 0.0, None), (0.1, 0.01, None), (0.1, 0.01, 2.0))
    )
]


@pytest.fixture
def cut(monkeypatch):
    """cut(n): n tokens at a time."""
    return lambda rows: monkeypatch.setattr(chunks, "chunk_rows", lambda *args, **kwargs: rows)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward(options, cut):
    hidden, weight, targets = head_and_targets()
    plain = dict(options)
    softcap = plain.pop("softcap")
    logits = hidden.detach().numpy() @ weight.detach().numpy().T
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    for token_weights, rows in product((None, torch.rand(SHAPE, dtype=torch.float64)), (1000, 4)):
        cut(rows)
        weights = None if token_weights is None else token_weights.numpy()
        expected = numpy_cross_entropy(logits, targets.numpy(), weights=weights, **plain)
        for function in (linear_cross_entropy, linear_cross_entropy_reference):
            loss = function(hidden, weight, targets, token_weights=token_weights, **options)
            assert_close(loss, torch.as_tensor(expected))
            assert loss.dtype == torch.float64


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward(options, cut, device):
    """Finite differences, and autograd through plain PyTorch with other upstream numbers."""
    hidden, weight, targets = head_and_targets(device=device)
    weights = torch.rand(SHAPE, dtype=torch.float64, device=device)
    for token_weights, rows in product((None, weights), (1000, 4)):
        cut(rows)
        kwargs = dict(options, token_weights=token_weights)
        loss = linear_cross_entropy(hidden, weight, targets, **kwargs)
        expected = plain_linear_cross_entropy(hidden, weight, targets, **kwargs)
        dy = torch.full_like(loss, 3.7) if loss.dim() == 0 else torch.randn_like(loss)
        grads = torch.autograd.grad(loss, (hidden, weight), dy)
        wants = torch.autograd.grad(expected, (hidden, weight), dy)
        for grad, want in zip(grads, wants, strict=True):
            assert_close(grad, want)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, **kwargs),
        (hidden, weight),
        fast_mode=True,
    )


UPSTREAM = {"one": 1.0, "3.7": 3.7, "per token": None}


@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_worse_than_plain(dtype, upstream, device):
    """Whatever the upstream number, errors against fp64 as in the same dtype by plain PyTorch."""
    hidden, weight, targets = head_and_targets((8, 16), 48, 300, dtype, device)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0}
    options["reduction"] = "none" if UPSTREAM[upstream] is None else "mean"
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = plain_linear_cross_entropy(*exact, targets, **options)
    plain = plain_linear_cross_entropy(hidden, weight, targets, **options)
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    assert loss.dtype == torch.float32
    assert_no_worse_than_plain(loss, plain, truth)
    # a mean of 96 tokens: compare gradients at the size of 1
    dy = torch.rand(targets.shape, device=device)
    if UPSTREAM[upstream] is not None:
        dy = torch.tensor(96 * UPSTREAM[upstream], device=device)
    grads = torch.autograd.grad(loss, (hidden, weight), dy)
    plains = torch.autograd.grad(plain, (hidden, weight), dy)
    truths = torch.autograd.grad(truth, exact, dy.double())
    for grad, other, true in zip(grads, plains, truths, strict=True):
        assert_no_worse_than_plain(grad, other, true)


def test_fp16_gradients_survive_a_loss_scale(device):
    """Without the scale p / T is below fp16's smallest number: it must not be rounded before.

    Read where the wrong class's p alone stands: for the right class p - 1 cancels, to what fp32
    has left of 6e-6, in any formula that has p.
    """
    hidden = torch.full((512, 16), 0.5, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.zeros(2, 16, dtype=torch.float16, device=device)
    weight[1] = -1.5  # logits of 0 and -12: p of the wrong class is 6e-6
    weight.requires_grad_()
    targets = torch.zeros(512, dtype=torch.long, device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    scale = torch.tensor(65536.0, device=device)
    losses = [
        linear_cross_entropy(hidden, weight, targets),
        plain_linear_cross_entropy(hidden, weight, targets),
        plain_linear_cross_entropy(*exact, targets),
    ]
    inputs = [(hidden, weight), (hidden, weight), exact]
    ours, plain, truth = (
        torch.autograd.grad(loss, x, scale.to(loss.dtype))
        for loss, x in zip(losses, inputs, strict=True)
    )
    assert float(truth[0].abs().min()) > 1e-3 and float(truth[1][1].abs().min()) > 0.2
    # p waits for the scale in fp16, at steps of 2^-24 there: half of one is 0.5% of p
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=2.0**-25 / 6.1e-6, atol=0.0)
    assert_no_worse_than_plain(ours[1][1], plain[1][1], truth[1][1])


# --- the sum over chunks, row C28 -----------------------------------------------------------------


def test_a_sum_of_small_terms_needs_fp32(device):
    one, small = torch.ones(1, 1, device=device).bfloat16(), 1 / 256
    sums = {torch.float32: 2.0, torch.bfloat16: 1.0}
    for dtype, expected in sums.items():
        total = torch.ones(1, 1, dtype=dtype, device=device)
        for _ in range(256):
            chunks.product_into(total, one * small, one, add=True)
        assert total.item() == expected


def test_error_does_not_grow_with_the_number_of_chunks(monkeypatch, device):
    hidden, weight, targets = head_and_targets((1024,), 32, 64, torch.bfloat16, device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (truth,) = torch.autograd.grad(
        plain_linear_cross_entropy(*exact, targets, reduction="sum"), exact[1]
    )

    def error(num_chunks: int, accumulation: str) -> float:
        monkeypatch.setattr(chunks, "chunk_rows", lambda *a, **k: 1024 // num_chunks)
        loss = linear_cross_entropy(
            hidden, weight, targets, reduction="sum", weight_grad_accumulation=accumulation
        )
        (grad,) = torch.autograd.grad(loss, weight)
        return ((grad.double() - truth) ** 2).mean().sqrt().item()

    alone = error(1, "fp32")
    assert error(64, "fp32") <= 1.5 * alone
    assert 1.5 * alone < error(64, "same") <= 16 * alone  # what the option costs: measured 4.5


# --- work and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grad_mode,reduction,frozen,expected",
    [
        (True, "mean", None, (2, 0)),
        (True, "sum", "weight", (1, 0)),
        (True, "mean", "hidden", (1, 0)),
        (True, "none", None, (0, 2)),
        (False, "mean", None, (0, 0)),
    ],
)
def test_products(grad_mode, reduction, frozen, expected, monkeypatch):
    """How many gradients forward and backward make: none without grad mode or when frozen."""
    made: list[tuple[int, ...]] = []
    product_into = chunks.product_into
    monkeypatch.setattr(
        chunks, "product_into", lambda *a, **k: made.append(1) or product_into(*a, **k)
    )
    hidden, weight, targets = head_and_targets()
    if frozen is not None:
        (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with torch.set_grad_enabled(grad_mode):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    in_forward = len(made)
    if grad_mode:
        loss.sum().backward()
        for x in (hidden, weight):
            assert (x.grad is not None) == x.requires_grad
    assert (in_forward, len(made) - in_forward) == expected


def test_logits_are_never_whole_nor_saved(monkeypatch):
    monkeypatch.setattr(chunks, "CPU_CHUNK_ELEMENTS", 8 * 100)
    seen: list[int] = []
    rows_by_torch = chunks.rows_by_torch
    monkeypatch.setattr(
        chunks, "rows_by_torch", lambda x, *a: seen.append(x.shape[0]) or rows_by_torch(x, *a)
    )
    saved: list[Tensor] = []
    hidden, weight, targets = head_and_targets((30,), 4, 100)
    for reduction in ("mean", "none"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        loss.sum().backward()
    assert max(t.numel() for t in saved) == weight.numel()
    assert seen == [7, 8, 7, 8] * 3  # once for the mean, twice for the losses


def test_backward_leaves_everything_as_it_was(device):
    """Row C20: the same graph twice, other upstream numbers, and then the last time."""
    hidden, weight, targets = head_and_targets((16,), 8, 50, torch.bfloat16, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    one, other = torch.tensor(1.0, device=device), torch.tensor(-0.25, device=device)
    first = torch.autograd.grad(loss, (hidden, weight), one, retain_graph=True)
    kept = [grad.clone() for grad in first]
    scaled = torch.autograd.grad(loss, (hidden, weight), other, retain_graph=True)
    last = torch.autograd.grad(loss, (hidden, weight), other)
    for a, b, c, d in zip(first, kept, scaled, last, strict=True):
        assert torch.equal(a, b) and torch.equal(c, -0.25 * b) and torch.equal(c, d)
    assert other.item() == -0.25
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate_in_leaves(device):
    """A gradient that became weight.grad must not be memory that a later backward scales."""
    hidden, weight, targets = head_and_targets((16,), 8, 50, torch.float32, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    (2.0 * loss).backward(retain_graph=True)
    once = weight.grad.clone()
    (2.0 * loss).backward()
    assert torch.equal(weight.grad, 2 * once)


# --- tokens that do not count ---------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_zero_with_zero_gradients(reduction, device):
    """Row C24."""
    hidden, weight, _ = head_and_targets(dtype=torch.bfloat16, device=device)
    targets = torch.full(SHAPE, IGNORE, device=device)
    loss = linear_cross_entropy(
        hidden, weight, targets, z_loss=0.1, label_smoothing=0.1, reduction=reduction, softcap=3.0
    )
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert (loss == 0).all() and all((grad == 0).all() for grad in grads)


def test_ignored_and_weightless_tokens(device):
    """They change nothing, whatever index marks them and whatever their logits are."""
    hidden, weight, targets = head_and_targets((4, 4), device=device)
    weights = torch.rand(4, 4, dtype=torch.float64, device=device)
    weights[2, 3] = 0.0
    counts = (targets != IGNORE) & (weights != 0)
    expected = linear_cross_entropy(hidden[counts], weight, targets[counts])
    weighted = linear_cross_entropy(
        hidden, weight, targets, token_weights=(weights != 0).to(weights.dtype)
    )
    assert_close(weighted, expected)
    loss = linear_cross_entropy(
        hidden, weight, torch.where(counts, targets, V + 1), ignore_index=V + 1
    )
    assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert (grad[~counts] == 0).all() and (grad[counts] != 0).any(-1).all()


# --- shapes, layouts, errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape,D,V",
    [((), 4, 7), ((1,), 1, 1), ((0,), 3, 5), ((2, 0), 3, 3), ((3,), 0, 3), ((131,), 3, 3)]
    + [((3,), 2, 50257), ((2,), 7, 8193)],
)
def test_edge_shapes(shape, D, V, device):
    hidden, weight, targets = head_and_targets(shape, D, V, torch.float32, device)
    inputs = {
        "ours": (linear_cross_entropy, (hidden, weight)),
        "plain": (linear_cross_entropy_reference, (hidden, weight)),
        "truth": (linear_cross_entropy_reference, (hidden.double(), weight.double())),
    }
    for reduction in ("mean", "sum", "none"):
        results = []
        for function, (h, w) in inputs.values():
            loss = function(h, w, targets, reduction=reduction)
            results.append((loss, *torch.autograd.grad(loss.sum(), (h, w), retain_graph=True)))
        for ours, plain, truth in zip(*results, strict=True):
            assert_no_worse_than_plain(ours, plain, truth)


def test_errors():
    hidden, weight, targets = head_and_targets()
    outside = targets.clone()
    outside[1, 2] = V
    weights = torch.ones(SHAPE, requires_grad=True)
    cases = [
        ((hidden, weight, outside), {}, r"linear_cross_entropy: target 11 at \(1, 2\) is outside"),
        ((hidden, weight.float(), targets), {}, "one dtype, got torch.float64 and torch.float32"),
        ((hidden.int(), weight.int(), targets), {}, "must be floats of one dtype, got torch.int32"),
        ((hidden, weight[:, 1:], targets), {}, r"weight \[V, D\], got \(3, 5, 6\) and \(11, 5\)"),
        ((hidden, weight[0], targets), {}, r"weight \[V, D\], got \(3, 5, 6\) and \(6,\)"),
        ((hidden, weight[:0], targets), {}, r"at least one class, got .* weight \(0, 6\)"),
        ((hidden, weight, targets[0]), {}, r"got \(3, 5, 6\), targets \(5,\)"),
        ((hidden, weight, targets.float()), {}, "targets must be integers, got torch.float32"),
        ((hidden, weight, targets), {"softcap": 0.0}, "softcap must be finite and positive.*0.0"),
        ((hidden, weight, targets), {"softcap": math.nan}, "softcap must be finite"),
        ((hidden, weight, targets), {"z_loss": -1.0}, "linear_cross_entropy: z_loss must be"),
        ((hidden, weight, targets), {"reduction": "avg"}, "reduction must be one of"),
        ((hidden, weight, targets), {"token_weights": weights}, "token_weights are constants"),
        (
            (hidden, weight, targets),
            {"weight_grad_accumulation": "bf16"},
            r"must be one of \('fp32', 'same'\), got 'bf16'",
        ),
        ((hidden, weight, targets.to("meta")), {}, "on one device, got cpu, cpu and meta"),
    ]
    for args, options, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*args, **options)


# --- compiled, under autocast and checkpointed ----------------------------------------------------


def test_compiled_equals_eager(device):
    weights = torch.rand(SHAPE, device=device)
    variants = [{"label_smoothing": 0.1, "z_loss": 0.01, "token_weights": weights, "softcap": 4.0}]
    variants.append({"reduction": "none"})
    compiled = torch.compile(
        lambda h, w, t: [linear_cross_entropy(h, w, t, **options) for options in variants],
        fullgraph=True,
        dynamic=True,
    )
    hidden, weight, targets = head_and_targets(dtype=torch.float32, device=device)
    outs = compiled(hidden, weight, targets)
    wants = [linear_cross_entropy(hidden, weight, targets, **options) for options in variants]
    dys = [torch.rand_like(want) for want in wants]
    for out, want in zip(outs, wants, strict=True):
        assert_close(out, want)
    grads = torch.autograd.grad(outs, (hidden, weight), dys)
    expected = torch.autograd.grad(wants, (hidden, weight), dys)
    for grad, want in zip(grads, expected, strict=True):
        assert_close(grad, want)


def test_decomposition_in_inductor(device):
    """The see-through form, which public calls do not take: gradients made forward and backward."""
    hidden, weight, targets = head_and_targets((5,), dtype=torch.float32, device=device)

    def losses(h, w):
        options = (h, w, targets, None, IGNORE, 0.1, 0.01, 4.0)
        made, later = ("mean", True, True, "fp32"), ("none", False, False, "fp32")
        return [OP.forward(*options, *last)[0] for last in (made, later)]

    outs, wants = torch.compile(losses, fullgraph=True)(hidden, weight), losses(hidden, weight)
    dys = [torch.rand_like(want) for want in wants]
    grads = torch.autograd.grad(outs, (hidden, weight), dys)
    expected = torch.autograd.grad(wants, (hidden, weight), dys)
    for result, want in zip((*outs, *grads), (*wants, *expected), strict=True):
        assert_close(result, want)


def test_autocast_casts_as_linear(device):
    """Under autocast weights are fp32 and hidden may be either; F.linear makes both bf16."""
    hidden, weight, targets = head_and_targets((64,), 16, 100, torch.float32, device)
    for h in (hidden, hidden.bfloat16()):
        with torch.autocast(device.type, torch.bfloat16):
            loss = linear_cross_entropy(h, weight, targets)
            plain = F.cross_entropy(F.linear(h, weight).float(), targets)
        exact = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
        assert torch.equal(loss, exact)
        assert max_error(loss, plain) < 2e-2
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert [g.dtype for g in grads] == [torch.float32, torch.float32]
        wants = torch.autograd.grad(plain, (hidden, weight))
        for grad, want in zip(grads, wants, strict=True):
            assert max_error(grad, want) <= 2.0**-6 * float(want.abs().max())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_activation_checkpointing(reduction, device):
    """The saved tensors are made again in the backward, and handed out once."""
    from torch.utils.checkpoint import checkpoint

    hidden, weight, targets = head_and_targets((16,), 8, 50, torch.float32, device)

    def head(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(torch.sin(h), w, targets, reduction=reduction).sum()

    grads = torch.autograd.grad(
        checkpoint(head, hidden, weight, use_reentrant=False), (hidden, weight)
    )
    wants = torch.autograd.grad(head(hidden, weight), (hidden, weight))
    for grad, want in zip(grads, wants, strict=True):
        assert torch.equal(grad, want)
