"""xtrain.ops.dropout: values, gradients, masks, compilation, errors."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from mask_oracle import keep_mask
from mask_oracle import splitmix64 as numpy_splitmix64
from test_contract import partitioned_graphs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xtrain import rng
from xtrain.ops import OPS, dropout, dropout_mask
from xtrain.ops.dropout.op import (
    counter,
    counter_by_fours,
    counter_key,
    dropout_decomposition,
    dropout_reference,
    mix_top_bits,
    scale_of,
    shift_right,
    splitmix64,
    threshold_of,
)
from xtrain.rng import GAMMA

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dropout_masks.json").read_text())
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SEED = -7046029254386353131


def scalar(value: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=device)


def mask_of(out: Tensor) -> np.ndarray:
    """The keep mask of an output whose input had no zeros."""
    return (out != 0).cpu().numpy()


def bits(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", GOLDEN["masks"], ids=lambda r: f"seed{r['seed']}-p{r['p']}")
def test_forward_golden_masks(row, device):
    mask = dropout_mask(row["n"], row["p"], row["seed"], device=device).cpu().numpy()
    packed = np.packbits(mask, bitorder="little").tobytes()
    assert int(mask.sum()) == row["kept"]
    assert hashlib.sha256(packed).hexdigest() == row["sha256"]


def test_forward_golden_windows(device):
    for row in GOLDEN["windows"]:
        mask = dropout_mask(row["n"], row["p"], row["seed"], row["first_index"], device=device)
        assert "".join("01"[int(b)] for b in mask.tolist()) == row["keep_bits"], row


@pytest.mark.parametrize("function", [dropout, dropout_reference, dropout_decomposition])
def test_forward_golden_outputs(function, device):
    x = torch.tensor([((i * 37) % 101 - 50) / 8 for i in range(48)], dtype=torch.float64)
    for row in GOLDEN["outputs"]["rows"]:
        typed = x.to(device, getattr(torch, row["dtype"]))
        out = function(typed, row["p"], scalar(row["seed"], device), scalar(0, device))
        assert out.dtype == typed.dtype
        assert out.double().tolist() == row["out"], row


@pytest.mark.parametrize("shape", [(7,), (11,), (3, 5, 7), (100003,), (1024, 1000)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_forward_mask_equals_oracle(shape, p, device):
    x = torch.ones(shape, device=device)
    for offset in (0, 5, 2**31 - 3, 2**32 + 1, -9, 2**63):
        expected = keep_mask(shape, p, SEED, offset)
        assert (mask_of(dropout(x, p, SEED, offset)) == expected).all()
    assert (dropout_mask(shape, p, SEED, 2**63, device=device).cpu().numpy() == expected).all()


@pytest.mark.parametrize(
    "p",
    [1e-50, 1e-9, 2**-25, 2**-24, 0.3, 1 - 2**-24, 1 - 2**-25, 1 - 2**-26, 1 - 1e-12],
    ids=lambda p: f"{p:.17g}",
)
def test_forward_float32_of_p_decides(p, device):
    """p is rounded to fp32 in the comparison alone: 1 - 2^-26 drops all, 1e-50 nothing."""
    expected = keep_mask(4096, p, 3)
    out = dropout(torch.ones(4096, dtype=torch.float64, device=device), p, 3)
    assert (mask_of(out) == expected).all()
    assert torch.equal(out, dropout_reference(torch.ones_like(out), p, 3))
    kept = out[torch.from_numpy(expected).to(device)]
    assert (kept == 1.0 / (1.0 - p)).all()


@pytest.mark.parametrize("p", [0.1, 0.15, 0.9])
def test_threshold_is_the_float_comparison(p):
    draws = np.arange(2**24, dtype=np.float32) * np.float32(2.0**-24)
    assert int((draws < np.float32(p)).sum()) == threshold_of(p)
    assert scale_of(p) == 1.0 / (1.0 - p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_selects_and_rounds_once(dtype, device):
    """A dropped NaN or infinity gives +0; kept values are the product in c, rounded once."""
    x = torch.randn(4096, dtype=torch.float64).to(dtype)
    x[::5], x[1::5], x[2::5] = math.nan, math.inf, -math.inf
    keep = torch.from_numpy(keep_mask(4096, 0.1, 1))
    out = dropout(x.to(device), 0.1, 1).cpu()
    c = torch.float64 if dtype == torch.float64 else torch.float32
    # NumPy has no bf16: the product in c is NumPy's, the last rounding torch's
    product = x.to(c).numpy() * c_scalar(1.0 / (1.0 - 0.1), c)
    expected = torch.from_numpy(product).to(dtype)
    assert torch.equal(out[keep].nan_to_num(7.0), expected[keep].nan_to_num(7.0))
    assert torch.equal(out[keep].isnan(), x[keep].isnan())
    assert set(bits(out[~keep])) == {0}


def c_scalar(value: float, dtype: torch.dtype) -> np.floating:
    return np.float64(value) if dtype == torch.float64 else np.float32(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_every_half_value(dtype, device):
    """All 65536 bit patterns: subnormals, ties, overflow to infinity."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for p in (0.1, 0.5, 0.75):
        keep = torch.from_numpy(keep_mask(2**16, p, 2))
        expected = torch.where(keep, x.float() * (1.0 / (1.0 - p)), 0.0).to(dtype)
        out = dropout(x.to(device), p, 2).cpu()
        assert torch.equal(out.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert bits(out[number]) == bits(expected[number])


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_backward_finite_differences(p, device):
    x = torch.randn(3, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, p, 11, 5), (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda t: dropout(t, p, 11, 5), (x,), fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_same_mask_and_bits_as_a_cached_mask(dtype, device):
    x = torch.randn(100, 33, device=device).to(dtype).requires_grad_()
    dy = torch.randn(100, 33, device=device).to(dtype)
    (dx,) = torch.autograd.grad(dropout(x, 0.1, SEED, 3), x, dy)
    (expected,) = torch.autograd.grad(dropout_reference(x, 0.1, SEED, 3), x, dy)
    assert bits(dx) == bits(expected)
    (ones,) = torch.autograd.grad(dropout(x, 0.1, SEED, 3), x, torch.ones_like(x))
    assert (mask_of(ones) == keep_mask((100, 33), 0.1, SEED, 3)).all()


# --- strides ------------------------------------------------------------------------------------


def test_opcheck_strided(device):
    """The index is the logical one: a view gives the mask of its values, in any layout."""
    base, packed = torch.randn(6, 4, 10, device=device), torch.randn(2, 5, 120, device=device)
    views = [base.transpose(0, 2), base[..., ::2], base[1:, :, 3:], base[:1].expand(6, 4, 10)]
    heads = packed[..., 40:80].unflatten(-1, (5, 8))
    views += [base.transpose(0, 1), heads, heads.transpose(1, 2), heads.permute(2, 1, 0, 3)]
    for view in views:
        x = view.detach().requires_grad_()
        dy = torch.randn(view.shape, device=device).transpose(0, 2).contiguous().transpose(0, 2)
        mask = dropout_mask(view.shape, 0.4, SEED, 1, device=device)
        assert torch.equal(dropout(x, 0.4, SEED, 1) != 0, mask & (view != 0))
        out = dropout(x, 0.4, SEED, 1)
        assert out.is_contiguous()
        assert bits(out) == bits(dropout(view.contiguous(), 0.4, SEED, 1))
        (dx,) = torch.autograd.grad(out, x, dy)
        assert bits(dx) == bits(dropout(dy.contiguous(), 0.4, SEED, 1))


# --- edges and statistics -----------------------------------------------------------------------


def one_and_zero(xs: list[Tensor], seed: Tensor) -> list[Tensor]:
    return [dropout(x, p, seed) for x, p in zip(xs, (1.0, 1.0, 0.0, 0.0), strict=True)]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_edge_p_one_and_zero(mode, device):
    """Row C5: p = 1 gives zeros and zero gradients; p = 0 a bitwise copy of x and of grad_out."""
    function = one_and_zero if mode == "eager" else torch.compile(one_and_zero, fullgraph=True)
    x = torch.tensor([1.0, -2.0, 3.0, math.inf, -0.0], device=device)
    dy = torch.tensor([0.5, math.nan, -0.0, math.inf, 7.0], device=device)
    dtypes = (torch.float32, torch.bfloat16) * 2
    xs = [x.to(dtype).clone().requires_grad_() for dtype in dtypes]
    dys = [dy.to(dtype) for dtype in dtypes]
    outs = function(xs, scalar(5, device))
    grads = torch.autograd.grad(outs, xs, dys)
    for i in (0, 1):
        assert set(bits(outs[i])) == set(bits(grads[i])) == {0}
    for i in (2, 3):
        assert bits(outs[i]) == bits(xs[i]) and bits(grads[i]) == bits(dys[i])
        assert outs[i].data_ptr() != xs[i].data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (4, 0), (0, 3), (1025,), (65537,), (300007,)])
def test_edge_shapes(shape, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    out = dropout(x, 0.25, SEED)
    assert out.shape == x.shape and (mask_of(out) == keep_mask(shape, 0.25, SEED)).all()
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert (mask_of(dx) == mask_of(out)).all()


def test_mask_depends_on_seed_value_and_offset_only(device):
    x = torch.ones(4096, device=device)
    a, b = scalar(77, device), torch.tensor([1, 77], device=device)[1]
    assert a.data_ptr() != b.data_ptr()
    assert torch.equal(dropout(x, 0.5, a), dropout(x, 0.5, b))
    assert torch.equal(dropout(x, 0.5, 77), dropout(x, 0.5, 77 + 2**64))
    assert not torch.equal(dropout(x, 0.5, 77), dropout(x, 0.5, 78))
    assert torch.equal(dropout(x, 0.5, 77)[1000:], dropout(x[1000:], 0.5, 77, offset=1000))
    assert torch.equal(dropout(x, 0.5, 77, -5)[5:], dropout(x, 0.5, 77)[:-5])


def test_mean_is_x_and_rate_is_p(device):
    x = torch.randn(500, dtype=torch.float64, device=device)
    num_seeds = 400
    for p in (0.1, 0.5):
        mean = torch.stack([dropout(x, p, seed) for seed in range(num_seeds)]).mean(0)
        sigma = x.abs() * math.sqrt(p / (1 - p) / num_seeds)
        assert ((mean - x).abs() <= 5 * sigma).all()
        n = 2**20
        kept = int(dropout_mask(n, p, 123, device=device).sum())
        assert abs(kept / n - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_errors_p(p):
    for function in (dropout, lambda x, p, seed: dropout_mask(x.shape, p, seed)):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got"):
            function(torch.ones(4), p, scalar(1))


@pytest.mark.parametrize("bad", [True, 1.5, None, "7", torch.tensor(1.0), torch.tensor([1])])
def test_errors_seed_and_offset(bad):
    with pytest.raises(TypeError, match="seed must be an int or a 0-d int64 tensor"):
        dropout(torch.ones(4), 0.5, bad)
    with pytest.raises(TypeError, match="offset must be an int or a 0-d int64 tensor"):
        dropout(torch.ones(4), 0.5, 1, bad)


def test_errors_integer_input():
    with pytest.raises(ValueError, match="x must be a tensor of floats, got torch.int64"):
        dropout(torch.ones(4, dtype=torch.int64), 0.5, 1)


# --- function transforms ------------------------------------------------------------------------


@pytest.mark.parametrize("randomness", ["error", "different"])
def test_vmap_draws_the_mask_of_all_rows_together(randomness, device):
    x = torch.rand(4, 6, 8, device=device)

    def mapped(function, **keywords):
        return torch.func.vmap(function, randomness=randomness, **keywords)

    def drop(t):
        return dropout(t, 0.5, seed=3)

    assert torch.equal(mapped(drop)(x), drop(x))
    assert torch.equal(mapped(mapped(drop))(x), drop(x))
    assert torch.equal(mapped(drop, in_dims=1)(x), drop(x.transpose(0, 1).contiguous()))
    with_grad = x.clone().requires_grad_()
    mapped(drop)(with_grad).sum().backward()
    assert torch.equal(with_grad.grad, drop(torch.ones_like(x)))


def test_vmap_over_seeds_or_offsets_is_the_op_row_by_row(device):
    x, rows = torch.rand(4, 8, device=device), torch.arange(4, device=device)
    of_rows = [dropout(x[0], 0.5, i) for i in range(4)]
    assert torch.equal(torch.vmap(lambda s: dropout(x[0], 0.5, s))(rows), torch.stack(of_rows))
    of_rows = [dropout(x[i], 0.5, 3, 8 * i) for i in range(4)]
    found = torch.vmap(lambda t, i: dropout(t, 0.5, 3, 8 * i))(x, rows)
    assert torch.equal(found, torch.stack(of_rows)) and torch.equal(found, dropout(x, 0.5, 3))
    masks = torch.vmap(lambda s: dropout_mask((8,), 0.5, s))(rows)
    of_rows = [dropout_mask((8,), 0.5, i, device=device) for i in range(4)]
    assert torch.equal(masks, torch.stack(of_rows))


def test_one_mask_for_all_rows_is_refused():
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match=r"under vmap draws a mask for each row.*dropout_mask"):
        torch.vmap(lambda t: dropout(t, 0.5, 3), randomness="same")(x)
    for function in (
        lambda t: t * dropout_mask(t.shape, 0.5, 3),
        lambda t: t * dropout(x[0], 0.5, 3),
    ):
        with pytest.raises(RuntimeError, match=r"neither x nor seed nor offset is mapped over"):
            torch.vmap(function)(x)


def test_forward_mode_is_refused_and_reverse_mode_is_not():
    """Below autograd a tangent would be lost without a word."""
    x = torch.ones(8)

    def drop(t):
        return dropout(t, 0.5, 3)

    for differentiate in (
        lambda: torch.func.jvp(drop, (x,), (x,)),
        lambda: torch.autograd.functional.jacobian(
            drop, x, strategy="forward-mode", vectorize=True
        ),
        lambda: torch.func.jacfwd(drop)(x),
    ):
        with pytest.raises(RuntimeError, match=r"forward-mode|mapped over"):
            differentiate()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"xtrain::dropout has no forward-mode deriv"):
            drop(dual)
    rows = torch.autograd.functional.jacobian(drop, x, vectorize=True)
    assert torch.equal(rows, torch.diag(drop(x)))


# --- compiled -------------------------------------------------------------------------------------


SEED, OFFSET = -987654321987654321, 2**31 - 4
FORWARD, BACKWARD = OPS["dropout"].forward, OPS["dropout"].backward


def branch(x: Tensor, weight: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return x + dropout(x @ weight, 0.1, seed, offset)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(dynamic, device):
    """Row C3. 11 and 100003 are no multiples of a vector's length: the tails are checked too."""
    shapes = [(7,), (11,), (3, 5, 7), (100003,), (1024, 1000)]
    xs = [torch.ones(shape, device=device) for shape in shapes]
    xs += [torch.ones(5, 33, device=device).t(), torch.ones(1, 9, device=device).expand(4, 9)]
    # 1.9921875 / 0.9 is 2.21875 in bf16; a scale rounded to bf16 first would give 2.203125
    xs += [torch.full((3, 11), 1.9921875, device=device, dtype=torch.bfloat16)]
    function = torch.compile(
        lambda *args: [dropout(x, p, *args[-2:]) for p in (0.1, 0.5) for x in args[:-2]],
        dynamic=dynamic,
        fullgraph=True,
    )
    seed, offset = scalar(SEED, device), scalar(OFFSET, device)
    outs = iter(function(*xs, seed, offset))
    for p in (0.1, 0.5):
        for x in xs:
            out = next(outs)
            assert ((out != 0).cpu().numpy() == keep_mask(tuple(x.shape), p, SEED, OFFSET)).all()
            assert torch.equal(out, dropout(x, p, seed, offset))
            assert out.stride() == dropout(x, p, seed, offset).stride()
            if p == 0.1 and x.dtype == torch.bfloat16:
                assert set(out.flatten().tolist()) == {0.0, 2.21875}


@pytest.mark.parametrize("form", [counter, counter_by_fours])
def test_counters_of_the_decomposition(form, device):
    """Both forms give index * GAMMA mod 2^64 on every device, at any offset and past 2^32."""
    sizes = (11, 100003)
    compiled = torch.compile(
        lambda offset: [
            form(torch.arange(n, dtype=torch.int64, device=device), offset) for n in sizes
        ],
        fullgraph=True,
    )
    for offset in (0, 2**31 - 3, 2**32 + 1, -9, 2**63 - 1):
        for n, keys in zip(sizes, compiled(scalar(offset, device)), strict=True):
            with np.errstate(over="ignore"):
                index = np.arange(n, dtype=np.uint64) + np.int64(offset).astype(np.uint64)
                right = index * np.uint64(GAMMA)
            assert (keys.cpu().numpy().astype(np.uint64) == right).all()


def test_fused_into_one_kernel(device):
    """x + dropout(linear) is the library's matmul and one loop; in the backward likewise."""
    from torch._inductor import config, metrics

    x = torch.randn(64, 32, device=device, requires_grad=True)
    w = torch.randn(32, 32, device=device, requires_grad=True)
    args = (x, w, scalar(1, device), scalar(0, device))
    with config.patch(force_disable_caches=True):  # a cached kernel is not generated, nor counted
        metrics.reset()
        out = torch.compile(branch, fullgraph=True)(*args)
        assert metrics.generated_kernel_count == 1
        out.sum().backward()
        assert metrics.generated_kernel_count <= 3  # dropout of the gradient; the sum of two
    torch.testing.assert_close(out, branch(*args))


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_single_nodes_and_nothing_saved(budget):
    """The partitioner sees one node each way, and saves nothing that the forward made."""
    x = torch.randn(64, 32, requires_grad=True)
    w = torch.randn(32, 32, requires_grad=True)
    forward, backward = partitioned_graphs(branch, x, w, scalar(1), scalar(0), budget=budget)
    assert [n.target for n in forward.graph.nodes].count(FORWARD) == 1
    assert [n.target for n in backward.graph.nodes].count(BACKWARD) == 1
    assert not [n for n in backward.graph.nodes if n.target is FORWARD]
    (results,) = (n.args[0] for n in forward.graph.nodes if n.op == "output")
    saved = results[1:]
    made = [n for n in saved if n.op != "placeholder" and n.meta["val"].numel() >= x.numel()]
    views_of_inputs = {torch.ops.aten.permute.default, torch.ops.aten.t.default}
    assert all(n.target in views_of_inputs for n in made), made


@pytest.mark.parametrize(
    ("budget", "recompute"), [(None, False), (None, True), (1.0, True), (0.5, False), (0.0, False)]
)
def test_backward_mask_equals_forward_mask(budget, recompute):
    """Row C1: recomputed or not, at any memory budget (None: eager), one mask and one gradient."""

    def function(x: Tensor, seed: Tensor) -> Tensor:
        if recompute:
            return checkpoint(dropout, x, 0.5, seed, use_reentrant=False)
        return dropout(x, 0.5, seed)

    run = function if budget is None else torch.compile(function, fullgraph=True)
    patch = nullcontext()
    if budget is not None:
        patch = torch._functorch.config.patch(activation_memory_budget=budget)
    x = torch.ones(65536, requires_grad=True)
    with patch:
        out = run(x, scalar(SEED))
        out.sum().backward()
    expected = torch.from_numpy(keep_mask(65536, 0.5, SEED))
    assert torch.equal(out == 2, expected)
    assert torch.equal(x.grad == 2, expected)
    assert torch.equal(x.grad != 0, expected)


def test_a_new_seed_step_or_size_does_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *args: dropout(args[0], 0.5, *args[1:]),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for seed, shape in enumerate(((4, 11), (3, 8), (33, 5))):
        out = compiled(torch.ones(shape), scalar(seed), scalar(seed * 100))
        assert ((out != 0).numpy() == keep_mask(shape, 0.5, seed, seed * 100)).all()
    assert counter.frame_count == 1


def test_p_and_int_seeds_may_change_between_calls():
    """Constants of the graph: Dynamo may try them as symbols, a new value recompiles."""
    compiled = torch.compile(dropout, backend="aot_eager", fullgraph=True)
    x = torch.ones(100)
    for p, seed in ((0.1, scalar(SEED)), (0.7, scalar(SEED)), (0.0, 5), (1.0, -6), (0.5, 2**62)):
        assert torch.equal(compiled(x, p, seed), dropout(x, p, seed))


# --- splitmix64 -----------------------------------------------------------------------------------


EDGES = [0, 1, -1, 2**31, 2**32, -(2**31), 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def unsigned(x: torch.Tensor) -> list[int]:
    return [v & rng.MASK64 for v in x.tolist()]


def test_known_answers():
    for row in GOLDEN["splitmix64"]:
        x, y = int(row["x"]), int(row["y"])
        assert unsigned(splitmix64(torch.tensor([rng.to_signed(x)]))) == [y]
        assert rng.splitmix64(x) == y
        assert int(numpy_splitmix64(np.array([x], np.uint64))[0]) == y


def test_equals_python_integers():
    x = torch.cat([torch.tensor(EDGES), torch.randint(-(2**63), 2**63 - 1, (1000,))])
    assert unsigned(splitmix64(x)) == [rng.splitmix64(v) for v in x.tolist()]


def test_mix_top_bits_leaves_only_the_low_bits_unfinished():
    x = torch.randint(-(2**63), 2**63 - 1, (1000,))
    assert torch.equal(shift_right(mix_top_bits(x), 33), shift_right(splitmix64(x), 33))


def test_shift_right_is_logical():
    x = torch.tensor(EDGES)
    for bits in (1, 27, 30, 31, 40, 63):
        assert unsigned(shift_right(x, bits)) == [(v & rng.MASK64) >> bits for v in EDGES]


def test_counter_key_wraps():
    seed, index = torch.tensor(-7), torch.tensor(EDGES)
    expected = [(-7 & rng.MASK64) ^ ((i * rng.GAMMA) & rng.MASK64) for i in EDGES]
    assert unsigned(counter_key(seed, index)) == expected
