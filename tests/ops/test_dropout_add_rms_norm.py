"""xtrain.ops.dropout_add_rms_norm: roundings, masks, gradients, compilation, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from mask_oracle import keep_mask
from tolerances import assert_close, assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import OPS, dropout, dropout_add_rms_norm, rms_norm

CASTS = ("llama", "gemma")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# dtypes of x, residual and weight: pure, and as under autocast
DTYPES = [(FP64,) * 3, (FP32,) * 3, (BF16,) * 3, (FP16,) * 3, (BF16, FP32, FP32)]
EPS, SEED, OFFSET = 1e-5, -987654321987654321, 2**31 - 100
FORWARD, BACKWARD = OPS["dropout_add_rms_norm"].forward, OPS["dropout_add_rms_norm"].backward


def scalar(value: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=device)


def masked(x: Tensor, p: float) -> Tensor:
    """Dropout by the oracle's mask, op by op in x's dtype: product in fp32, one rounding."""
    keep = torch.from_numpy(keep_mask(tuple(x.shape), p, SEED, OFFSET)).to(x.device)
    c = FP64 if x.dtype == FP64 else FP32
    return torch.where(keep, x.to(c) * (0.0 if p == 1 else 1 / (1 - p)), 0.0).to(x.dtype)


def plain(x: Tensor, residual: Tensor, weight: Tensor, p: float, cast: str):
    """What the model's own ops compute, each rounding as its dtype says."""
    h = residual + masked(x, p)
    c = FP64 if h.dtype == FP64 else FP32
    normalised = h.to(c) * torch.rsqrt(h.to(c).pow(2).mean(-1, keepdim=True) + EPS)
    if cast == "llama":
        return h, weight * normalised.to(h.dtype)
    return h, (normalised * (1.0 + weight.to(c))).to(h.dtype)


def truth(x: Tensor, residual: Tensor, weight: Tensor, p: float, cast: str):
    """In fp64, rounded nowhere."""
    x, residual, weight = x.double(), residual.double(), weight.double()
    h = residual + masked(x, p)
    return h, F.rms_norm(h, weight.shape, weight if cast == "llama" else 1.0 + weight, EPS)


def ours(x: Tensor, residual: Tensor, weight: Tensor, p: float, cast: str):
    return dropout_add_rms_norm(x, residual, weight, p, SEED, OFFSET, EPS, cast=cast)


def draw(shape, dtypes, device="cpu") -> list[Tensor]:
    """x, residual, weight, and gradients of h and y."""
    shapes = [shape, shape, shape[-1:], shape, shape]
    x, residual, weight, dh, dy = (torch.randn(s) for s in shapes)
    tensors = [x, 3 * residual, weight.abs() + 0.5]
    h_dtype = torch.promote_types(dtypes[0], dtypes[1])
    dtypes = [*dtypes, h_dtype, torch.promote_types(h_dtype, dtypes[2])]
    return [t.to(device, d) for t, d in zip([*tensors, dh, dy], dtypes, strict=True)]


def with_grads(function, inputs: list[Tensor], p: float, cast: str) -> list[Tensor]:
    """h, y and the gradients of x, residual and weight."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    outs = function(*leaves, p, cast)
    grads = [g.to(out.dtype) for g, out in zip(inputs[3:], outs, strict=True)]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def assert_accurate(results: list[Tensor], inputs: list[Tensor], p: float, cast: str) -> None:
    in_fp64 = [t.double() for t in inputs]
    exact = with_grads(truth, in_fp64, p, cast)
    rounded = with_grads(plain, inputs, p, cast)
    for result, in_dtype, right in zip(results, rounded, exact, strict=True):
        assert_no_worse_than_plain(result, in_dtype, right)


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_forward(cast, dtypes, device):
    inputs = draw((6, 5, 129), dtypes, device)
    for p in (0.0, 0.1, 0.5):
        h, y = ours(*inputs[:3], p, cast)
        right_h, right_y = plain(*inputs[:3], p, cast)
        assert torch.equal(h, right_h) and h.is_contiguous() and y.is_contiguous()
        assert y.dtype == right_y.dtype
        exact = truth(*inputs[:3], p, cast)[1]
        assert_no_worse_than_plain(y, right_y, exact)
        reference = OPS["dropout_add_rms_norm"].reference(
            *inputs[:3], p, SEED, OFFSET, EPS, cast=cast
        )
        assert torch.equal(reference[0], right_h)
        assert_no_worse_than_plain(reference[1], right_y, exact)


def test_forward_rounds_the_branch_before_the_sum(device):
    """1.9921875 / 0.9 is 2.21354 in fp32 and 2.21875 in bf16: the sum must see the latter.

    In fp32 a fused multiply-add would skip the rounding of the product.
    """
    for dtype in (BF16, FP32):
        x = torch.full((4, 64), 1.9921875, dtype=dtype, device=device)
        residual = torch.full((4, 64), -2.2135417, device=device)
        h, _ = ours(x, residual, torch.ones(64, device=device), 0.1, "llama")
        kept = masked(x, 0.1)
        assert torch.equal(h, residual + kept.float())
    branch = (torch.tensor(1.9921875) * torch.tensor(1 / 0.9)).item()
    exact = torch.tensor(1.9921875, dtype=FP64) * torch.tensor(1 / 0.9).double()
    assert branch != exact.item()  # a fused multiply-add would have been seen


def test_forward_equals_its_parts(device):
    """Bit for bit what dropout, + and rms_norm give; a GPU's kernels sum a row in other orders."""
    for dtypes in DTYPES:
        x, residual, weight, *_ = draw((5, 96), dtypes, device)
        h, y = ours(x, residual, weight, 0.3, "llama")
        assert torch.equal(h, residual + dropout(x, 0.3, SEED, OFFSET))
        if device.type == "cpu":
            assert torch.equal(y, rms_norm(h, weight, EPS))
        assert_close(y, rms_norm(h, weight, EPS))


@pytest.mark.parametrize("dtypes", [(FP32,) * 3, (BF16, FP32, FP32)], ids=str)
def test_forward_y_dtype(dtypes, device):
    """The swallowed cast: y rounded once more, and the gradient of what the cast gave."""
    inputs = draw((5, 96), dtypes, device)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    arguments = 0.1, scalar(SEED, device), scalar(OFFSET, device), EPS, "llama"
    h, y = FORWARD(*leaves, *arguments)
    cast_h, cast_y = FORWARD(*leaves, *arguments, BF16)
    assert cast_y.dtype == BF16 and torch.equal(cast_y, y.to(BF16)) and torch.equal(cast_h, h)
    dy = torch.randn(y.shape, device=device).to(BF16)
    grads = torch.autograd.grad(cast_y, leaves, dy)
    for grad, right in zip(grads, torch.autograd.grad(y, leaves, dy.float()), strict=True):
        assert torch.equal(grad, right)


def test_forward_p_0_and_p_1(device):
    x, residual, weight, *_ = draw((4, 33), (BF16,) * 3, device)
    assert torch.equal(ours(x, residual, weight, 0.0, "llama")[0], residual + x)
    x[0, 0], x[1, 1] = math.nan, math.inf
    assert torch.equal(ours(x, residual, weight, 1.0, "llama")[0], residual)


def test_forward_dropped_nan_is_zero_and_kept_nan_stays_in_its_row(device):
    keep = torch.from_numpy(keep_mask((3, 65), 0.5, SEED, OFFSET))
    for kept in (False, True):
        x, residual, weight, *_ = draw((3, 65), (FP32,) * 3, device)
        x[1, int((keep[1] == kept).nonzero()[0])] = math.nan
        h, y = ours(x, residual, weight, 0.5, "llama")
        assert y[1].isnan().all().item() is kept and h[1].isnan().sum() == kept
        assert y[::2].isfinite().all()


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_backward_finite_differences(p, cast, device):
    inputs = [t.requires_grad_() for t in draw((3, 5), (FP64,) * 3, device)[:3]]
    assert torch.autograd.gradcheck(lambda *a: ours(*a, p, cast), inputs, fast_mode=True)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_backward(cast, dtypes, device):
    inputs = draw((6, 5, 129), dtypes, device)
    for p in (0.0, 0.1, 1.0):
        results = with_grads(ours, inputs, p, cast)
        assert [t.dtype for t in results[2:]] == list(dtypes)
        assert_accurate(results, inputs, p, cast)
        grad_x = results[2]
        dropped = ~torch.from_numpy(keep_mask((6, 5, 129), p, SEED, OFFSET)).to(device)
        assert grad_x[dropped].abs().sum() == 0


@pytest.mark.parametrize("missing", ["h", "y"])
def test_backward_of_one_output(missing, device):
    """A missing gradient counts as zero; the weight of a norm that nobody reads has none at all."""
    x, residual, weight, dh, dy = draw((7, 33), (BF16, FP32, FP32), device)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    h, y = ours(*leaves, 0.3, "llama")
    kept = (y, dy) if missing == "h" else (h, dh)
    grads = torch.autograd.grad([kept[0]], leaves, [kept[1]], allow_unused=True)
    zeros = [torch.zeros_like(dh), dy] if missing == "h" else [dh, torch.zeros_like(dy)]
    right = torch.autograd.grad(ours(*leaves, 0.3, "llama"), leaves, zeros)
    if missing == "y":
        assert grads[2] is None and right[2].abs().sum() == 0
        grads, right = grads[:2], right[:2]
    for grad, expected in zip(grads, right, strict=True):
        assert torch.equal(grad, expected)


def test_backward_of_no_gradient_is_zero(device):
    x, _, weight, *_ = draw((3, 8), (FP32,) * 3, device)
    random = 0.3, scalar(1, device), scalar(0, device)
    for grad in BACKWARD(x, weight, None, [], *random, EPS, "llama", BF16, FP32):
        assert grad.abs().sum() == 0


def test_backward_adds_the_gradients_of_several_users(device):
    """In fp32, not in the users' dtype, whatever their number."""
    x, residual, weight, dh, _ = draw((6, 5, 129), (BF16, FP32, FP32), device)
    h, _ = ours(x, residual, weight, 0.3, "llama")
    random = 0.3, scalar(SEED, device), scalar(OFFSET, device)
    for number in (1, 2, 3, 4):
        users = [torch.randn(h.shape, device=device).to(BF16) for _ in range(number)]
        outs = BACKWARD(h, weight, dh, users, *random, EPS, "llama", BF16, FP32)
        total = sum(user.float() for user in users)
        right = BACKWARD(h, weight, dh, [total], *random, EPS, "llama", BF16, FP32)
        for out, expected in zip(outs, right, strict=True):
            torch.testing.assert_close(
                out, expected, rtol=8e-3 if out.dtype == BF16 else 1e-5, atol=1e-5
            )


def test_backward_does_not_materialise_a_missing_gradient(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        calls: list[tuple] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is BACKWARD:
                self.calls.append(args)
            return func(*args, **(kwargs or {}))

    x, residual, weight, *_ = draw((3, 8), (FP32,) * 3, device)
    _, y = ours(x.requires_grad_(), residual, weight, 0.3, "llama")
    with Record() as record:
        y.sum().backward()
    ((_, _, grad_h, grad_y, *_),) = record.calls
    assert grad_h is None and len(grad_y) == 1


def test_backward_writes_a_shared_gradient_once(device):
    """p = 0 in one dtype makes grad_x grad_residual: one tensor, as for torch's own sum."""
    x, residual, weight, dh, dy = draw((4, 16), (FP32,) * 3, device)
    for p, x_dtype in ((0.0, FP32), (1e-60, FP32), (0.0, BF16), (0.5, FP32)):
        for grads in ((dh, [dy]), (dh, [])):
            random = p, scalar(1, device), scalar(0, device)
            outs = BACKWARD(x, weight, *grads, *random, EPS, "llama", x_dtype, FP32)
            assert len({t.data_ptr() for t in (*outs, x, weight, dh, dy)}) == 7
            shared = p < 0.5 and x_dtype == FP32
            assert outs[0].numel() == (0 if shared else x.numel())
    leaves = [t.requires_grad_() for t in (x, residual)]
    h, y = dropout_add_rms_norm(*leaves, weight, 0.0, 1)
    torch.autograd.backward([h, y], [dh, dy])
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()  # what the leaves keep is two tensors
    assert residual.grad.abs().min() > 0


def test_backward_weight_gradient_is_accumulated_in_fp32(device):
    """Row C28's sum: 1 and 256 times 1/256 make 2; in bf16 the sum would stay at 1."""
    x = torch.zeros(257, 8, dtype=BF16, device=device)
    residual = torch.ones(257, 8, dtype=BF16, device=device)
    weight = torch.ones(8, dtype=BF16, device=device, requires_grad=True)
    dy = torch.full((257, 8), 1 / 256, dtype=BF16, device=device)
    dy[0] = 1.0
    dropout_add_rms_norm(x, residual, weight, 0.1, 1, eps=0.0)[1].backward(dy)
    assert weight.grad.tolist() == [2.0] * 8


# --- compiled -----------------------------------------------------------------------------------


def test_compiled_equals_eager(device):
    """Both cast orders in one graph, in fp32 and as under autocast."""
    cases = [((FP32,) * 3, "gemma"), ((BF16, FP32, FP32), "llama")]

    def both(*leaves):
        parts = leaves[:3], leaves[3:]
        return [
            t for part, (_, cast) in zip(parts, cases, strict=True) for t in ours(*part, 0.1, cast)
        ]

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows in (7, 12):
        drawn = [draw((rows, 129), dtypes, device) for dtypes, _ in cases]
        leaves = [t.detach().requires_grad_() for inputs in drawn for t in inputs[:3]]
        outs = compiled(*leaves)
        grads = torch.autograd.grad(outs, leaves, [t for inputs in drawn for t in inputs[3:]])
        for i, (inputs, (_, cast)) in enumerate(zip(drawn, cases, strict=True)):
            results = [*outs[2 * i : 2 * i + 2], *grads[3 * i : 3 * i + 3]]
            assert_accurate(results, inputs, 0.1, cast)
            for result, eager in zip(results, with_grads(ours, inputs, 0.1, cast), strict=True):
                assert result.dtype == eager.dtype and result.stride() == eager.stride()


def test_compiled_leaves_keep_gradients_of_their_own(device):
    """p = 0: x and residual have one gradient; what they accumulate is two tensors, as eager."""
    inputs = draw((4, 16), (FP32,) * 3, device)
    x, residual, _ = leaves = [t.requires_grad_() for t in inputs[:3]]
    outs = torch.compile(ours, fullgraph=True)(*leaves, 0.0, "llama")
    torch.autograd.backward(outs, inputs[3:])
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().min() > 0


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (0, 8), (3, 0), (2, 0, 5), (3, 127), (1, 1025), (2, 3, 4, 5)], ids=str
)
def test_edge_shapes(shape, device):
    inputs = draw(shape, (FP32,) * 3, device)
    results = with_grads(ours, inputs, 0.3, "llama")
    for result, right in zip(results, with_grads(plain, inputs, 0.3, "llama"), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(p=1.5), r"p must be in \[0, 1\], got 1.5"),
        (dict(p=math.nan), r"p must be in \[0, 1\], got nan"),
        (dict(residual=torch.ones(2, 5)), r"got \(2, 5\) for \(2, 4\)"),
        (dict(residual=torch.ones(4)), r"got \(4,\) for \(2, 4\)"),
        (dict(residual=torch.ones(2, 4, dtype=torch.int64)), r"residual must hold floats"),
        (dict(weight=torch.ones(5)), r"weight \(5,\) for x \(2, 4\)"),
        (dict(cast="olmo"), r"cast must be \"llama\" or \"gemma\", got 'olmo'"),
        (dict(eps=-1e-6), r"eps must be finite and not negative, got -1e-06"),
    ],
    ids=str,
)
def test_errors(change, match):
    arguments = dict(x=torch.ones(2, 4), residual=torch.ones(2, 4), weight=torch.ones(4))
    arguments |= dict(p=0.1, seed=1, eps=1e-6, cast="llama") | change
    with pytest.raises(ValueError, match=match):
        dropout_add_rms_norm(**arguments)


@pytest.mark.parametrize("bad", [0.5, True, torch.tensor(1.0), torch.tensor([1])], ids=str)
def test_errors_seed(bad):
    with pytest.raises(TypeError, match="seed must be an int or a 0-d int64 tensor"):
        dropout_add_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 0.1, bad)


def test_vmap_draws_the_mask_of_all_rows_together():
    x, residual, weight = torch.rand(3, 4, 8), torch.rand(3, 4, 8), torch.rand(8)

    def fused(*tensors):
        return dropout_add_rms_norm(*tensors, 0.5, 3)

    whole = fused(x, residual, weight)
    for ours, theirs in zip(
        torch.vmap(fused, (0, 0, None))(x, residual, weight), whole, strict=True
    ):
        assert torch.equal(ours, theirs)
    h, _ = torch.vmap(fused, (None, 0, None))(x[0], residual, weight)
    assert torch.equal(h, fused(x[:1].expand(3, -1, -1), residual, weight)[0])
    h, _ = torch.vmap(fused)(x, residual, weight.expand(3, -1))
    assert torch.equal(h, whole[0])
