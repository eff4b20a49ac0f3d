"""The kernels that hold whole rows: interpreted, compiled for four architectures, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ahead_of_time import (
    ARCHITECTURES,
    Resources,
    compile_launches,
    far_rows,
    meta,
    seed_and_offset,
)
from interpreter import (  # noqa: F401
    INTERPRETING,
    bf16_rounds_to_nearest,
    loop_bounds_are_scalars,
    run_interpreted,
)
from mask_oracle import keep_mask
from test_dropout_add_rms_norm import (
    EPS,
    OFFSET,
    SEED,
    assert_accurate,
    draw,
    masked,
    ours,
    plain,
    truth,
    with_grads,
)
from tolerances import assert_no_worse_than_plain
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.ops import OPS, dropout_add_rms_norm, dropout_mask, rms_norm
from xtrain.ops import launch as replay
from xtrain.ops.dropout.op import scale_of, threshold_of
from xtrain.ops.rms_norm import kernel as norm
from xtrain.ops.rms_norm.op import norm_dtype
from xtrain.ops.shared import rows
from xtrain.ops.shared.layout import in_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PURE, AUTOCAST = (BF16, BF16, BF16, BF16), (BF16, FP32, FP32, BF16)  # x, residual, weight, y


def test_under_the_interpreter():
    run_interpreted(__file__)


# --- ahead of time ------------------------------------------------------------------------------


# Forward and backward, behind a sum with a branch that drops, and alone.
VARIANTS = ("fused_fwd", "fused_bwd", "norm_fwd", "norm_bwd")
TAKES_STRIDES = [name for name in VARIANTS if name != "fused_bwd"]
SMS = 3  # that num_programs counts where there is no GPU


def compiled(
    variant: str, dtypes, n_cols: int, arch: int, *, strided=False, n_rows=4096, alone=True
) -> Resources:
    """Compile as the launcher does for aligned tensors; strided: of rows at three distances."""

    def rows_of(dtype: torch.dtype) -> Tensor:
        return far_rows(n_cols, dtype) if strided else meta(n_rows, n_cols, dtype=dtype)

    x, residual, y = (rows_of(dtypes[i]) for i in (0, 1, 3))
    weight, drops = meta(n_cols, dtype=dtypes[2]), (1000, 1.1, *seed_and_offset())
    rounds_to = torch.promote_types(dtypes[1], dtypes[2]), dtypes[3]
    same, like = (EPS, True), (dtypes[0], dtypes[1])
    launch = {
        "fused_fwd": lambda: norm.norm_fwd(x, residual, weight, drops, *same, *rounds_to),
        "fused_bwd": lambda: norm.norm_bwd(residual, [y], residual, weight, drops, *same, *like),
        "norm_fwd": lambda: norm.norm_fwd(residual, None, weight, None, *same, *rounds_to),
        "norm_bwd": lambda: norm.norm_bwd(
            None, [y], residual, weight, None, *same, None, dtypes[1], alone=alone
        ),
    }[variant]
    return compile_launches(launch, arch)[0]  # before the sum over programs


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda sm: f"sm_{sm}")
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_spills(variant, arch):
    shapes = [(4096, PURE), (768, PURE), (128, PURE)] if arch == 90 else []
    for n_cols, dtypes in [*shapes, (768, AUTOCAST)]:
        usage = compiled(variant, dtypes, n_cols, arch)
        assert_fits(usage, variant, n_cols)
        assert usage.shared_bytes <= 99 << 10, (n_cols, usage)


def assert_fits(usage: Resources, variant: str, n_cols: int) -> None:
    """No spills; 16 warps at least share the 65536 registers of a multiprocessor, and the programs
    that walk the rows are all there at once.
    """
    assert usage.spills == 0, (n_cols, usage)
    programs = 65536 // (usage.registers * 32 * usage.num_warps)
    at_once = 16 // usage.num_warps if "fwd" in variant else usage.grid[0] // SMS
    assert programs >= at_once, (n_cols, usage)


@pytest.mark.parametrize("variant", TAKES_STRIDES)
def test_rows_at_three_distances(variant):
    """No spills on any GPU; accesses as wide, and as many programs at once, as without strides."""
    shapes = {80: [(128, PURE)], 90: [(128, PURE), (4096, PURE)], 100: [(256, PURE)]}
    for arch in ARCHITECTURES:
        for n_cols, dtypes in shapes.get(arch, [(768, AUTOCAST)]):
            usage = compiled(variant, dtypes, n_cols, arch, strided=True)
            assert_fits(usage, variant, n_cols)
            plain = compiled(variant, dtypes, n_cols, arch, alone=False)  # sizes of strided rows
            for access in ("LDG", "LDGSTS", "STG"):
                assert usage.count(access, "128") == plain.count(access, "128"), (n_cols, access)


@pytest.mark.parametrize("dtypes", [PURE, AUTOCAST], ids=["pure", "autocast"])
def test_accesses_are_wide_and_stay_in_registers(dtypes):
    """No tensor changes its layout between a load and a store: that would cost shared memory."""
    for n_cols in (768, 4096):
        sizes = rows.forward_block_sizes(n_cols, dtypes)
        usage = compiled("fused_fwd", dtypes, n_cols, 90)
        lanes = sizes["num_warps"] * 32
        per_thread = sizes["BLOCK_ROWS"] * sizes["CHUNK"] * sizes["NUM_CHUNKS"] // lanes
        accesses = per_thread // sizes["VEC"]  # of a thread to each tensor
        narrow = 0 if dtypes == PURE else accesses  # x and y, where the residual takes 16 bytes
        assert usage.count("STG", "128") == 2 * accesses - narrow
        assert usage.count("STG", "64") == narrow
        assert usage.count("LDG", "128") >= 2 * accesses - narrow
        # row sums alone go through shared memory: a few words, no vectors of data
        assert usage.count("STS", "128") == usage.count("STSM") == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_for_a_single_element(variant):
    """One row of one column: Triton makes n_rows a constant, and tiles are as small as they get."""
    assert compiled(variant, PURE, 1, 90, n_rows=1).spills == 0


def test_row_tiles():
    for n_cols in (*range(1, 300), 768, 1000, 1536, 3072, 5120, 7168, 8192):
        chunk, num_chunks = rows.row_tile(n_cols)
        assert chunk & (chunk - 1) == 0 and 1 <= num_chunks <= 8
        assert n_cols <= chunk * num_chunks < max(2 * n_cols, 17)
    assert rows.row_tile(768) == (256, 3) and rows.row_tile(4096) == (4096, 1)


def test_block_sizes():
    """What a launch needs of the sizes, for every length of row and every mix of dtypes."""
    for n_cols in (1, 2, 3, 33, 64, 80, 128, 257, 768, 1000, 1280, 2048, 3584, 5120, 8192):
        for dtypes in ((BF16,), (FP32,), (BF16, FP32)):
            for users in (1, 3):
                loaded = [dtypes[-1], *[dtypes[0]] * users, dtypes[-1]]
                for sizes in (
                    rows.forward_block_sizes(n_cols, dtypes),
                    rows.backward_block_sizes(n_cols, dtypes, loaded),
                ):
                    lanes = sizes["num_warps"] * 32
                    width = sizes["BLOCK_ROWS"] * sizes["CHUNK"]
                    for name in ("num_warps", "BLOCK_ROWS", "CHUNK", "VEC"):
                        assert sizes[name] & (sizes[name] - 1) == 0, (n_cols, name, sizes)
                    # no lane holds what another holds too, and none more than registers can take
                    assert lanes * sizes["VEC"] <= max(width, lanes), (n_cols, sizes)
                    assert width * sizes["NUM_CHUNKS"] <= 24 * lanes, (n_cols, sizes)
                    assert sizes.get("NUM_STAGES", 1) <= 4


# --- on a GPU -----------------------------------------------------------------------------------


def poison() -> None:
    """Fill the allocator's free memory with NaN: what a kernel forgets to write shows."""
    torch.full((1 << 26,), float("nan"), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtypes", "cast"),
    [
        (PURE[:3], "llama"),
        (AUTOCAST[:3], "llama"),
        ((FP16,) * 3, "llama"),
        ((FP32,) * 3, "gemma"),
        (PURE[:3], "gemma"),
    ],
    ids=str,
)
def test_values_on_awkward_shapes(dtypes, cast):
    """1, odd, prime, just over a block, one row, many rows: values, gradients, no stray writes."""
    for seed, shape in enumerate(
        [(1, 1), (1, 7), (3, 127), (1, 1025), (33, 768), (5, 1000), (2, 8192), (100003, 3)]
    ):
        torch.manual_seed(seed)
        inputs = draw(shape, dtypes, "cuda")
        before = [t.clone() for t in inputs]
        poison()
        results = with_grads(ours, inputs, 0.1, cast)
        assert_accurate(results, inputs, 0.1, cast)
        for now, was in zip(inputs, before, strict=True):
            assert torch.equal(now, was)
        again = with_grads(ours, inputs, 0.1, cast)
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(7, 64), (300, 128), (4096, 80), (1031, 256)], ids=str)
def test_query_and_key_norms(shape):
    """Short rows, several to a program, and more rows than programs."""
    for dtype in (BF16, FP32):
        x, _, weight, _, dy = draw(shape, (dtype,) * 3, "cuda")
        poison()
        leaves = [t.requires_grad_() for t in (x, weight)]
        grads = torch.autograd.grad(rms_norm(*leaves, EPS), leaves, dy)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        y = torch.nn.functional.rms_norm(exact[0], shape[-1:], exact[1], EPS)
        right = torch.autograd.grad(y, exact, dy.double())
        plain = [t.detach().requires_grad_() for t in leaves]
        h = plain[0].float()
        normalised = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
        in_dtype = torch.autograd.grad(plain[1] * normalised, plain, dy)
        for grad, rounded, exact in zip(grads, in_dtype, right, strict=True):
            assert_no_worse_than_plain(grad, rounded, exact)


@pytest.mark.gpu
def test_mask_of_every_tile():
    """The fused mask is the oracle's for every length of row, at offsets past 2^31 and 2^32."""
    for n_cols in (1, 5, 64, 96, 257, 768, 1536, 4096):
        for offset in (0, OFFSET, 2**32 + 1):
            x = torch.ones(9, n_cols, device="cuda")
            h, _ = dropout_add_rms_norm(
                x, torch.zeros_like(x), torch.ones(n_cols, device="cuda"), 0.3, SEED, offset
            )
            right = keep_mask((9, n_cols), 0.3, SEED, offset)
            assert ((h != 0).cpu().numpy() == right).all(), (n_cols, offset)


@pytest.mark.gpu
def test_past_2_to_the_31_elements():
    """Row C10: the last rows of a tensor past 2^31 elements equal the same rows alone."""
    n_rows, cols = 524289, 4096
    x = torch.randn(n_rows, cols, dtype=BF16, device="cuda")
    weight = torch.randn(cols, dtype=BF16, device="cuda")
    last = x[-4:]
    assert torch.equal(rms_norm(x, weight)[-4:], rms_norm(last, weight))
    half = weight[2048:]
    assert torch.equal(rms_norm(x[:, 2048:], half)[-4:], rms_norm(last[:, 2048:], half))
    backward = OPS["rms_norm"].backward
    grad_x, _ = backward(x, x, weight, EPS, "llama")
    assert torch.equal(grad_x[-4:], backward(last, last, weight, EPS, "llama")[0])
    del grad_x
    h, y = dropout_add_rms_norm(x, x, weight, 0.1, SEED)
    alone = dropout_add_rms_norm(last, last, weight, 0.1, SEED, offset=(n_rows - 4) * cols)
    assert torch.equal(h[-4:], alone[0]) and torch.equal(y[-4:], alone[1])
    del y
    fused_backward = OPS["dropout_add_rms_norm"].backward

    def grads(h: Tensor, offset: int) -> Tensor:
        random = 0.1, torch.tensor(SEED, device="cuda"), torch.tensor(offset, device="cuda")
        return fused_backward(h, weight, None, [h], *random, EPS, "llama", BF16, BF16)[0]

    whole = grads(h, 0)[-4:].clone()
    assert torch.equal(whole, grads(h[-4:], (n_rows - 4) * cols))


@pytest.mark.gpu
def test_kernels_are_what_runs(monkeypatch):
    """Eager on CUDA takes the kernels, and the decomposition for what they refuse."""
    launches: list[str] = []
    launch = norm.norm_fwd
    monkeypatch.setattr(norm, "norm_fwd", lambda *a: launches.append("fwd") or launch(*a))
    for n_cols, taken in ((64, True), (8193, False)):
        x, weight = torch.ones(2, n_cols, device="cuda"), torch.ones(n_cols, device="cuda")
        launches.clear()
        dropout_add_rms_norm(x, x, weight, 0.1, 1)
        rms_norm(x, weight)
        assert len(launches) == 2 * taken
        refusal = OPS["rms_norm"].supports(x, weight)
        assert refusal is None if taken else "the kernel takes up to 8192" in refusal


# --- interpreted ---------------------------------------------------------------------------------


CASES = [
    # dtypes of x, residual and weight; cast order
    ((BF16, BF16, BF16), "llama"),
    ((BF16, FP32, FP32), "llama"),
    ((FP32, FP32, FP32), "gemma"),
    ((FP16, FP16, FP32), "gemma"),
    ((FP32, BF16, FP32), "llama"),
]


@pytest.fixture(autouse=INTERPRETING)
def poisoned_memory(monkeypatch):
    """Every result starts as NaN: what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def random(p: float, offset: int = OFFSET):
    """What kernels that drop are told."""
    if p == 0:
        return None
    return threshold_of(p), scale_of(p), torch.tensor(SEED), torch.tensor(offset)


def forward(inputs: list[Tensor], p: float, cast: str, y_dtype=None) -> tuple[Tensor, Tensor]:
    x, residual, weight = inputs[:3]
    rounds_to = norm_dtype(torch.promote_types(x.dtype, residual.dtype), weight.dtype, cast)
    dtypes = rounds_to, y_dtype or rounds_to
    return norm.norm_fwd(x, residual, weight, random(p), EPS, cast == "llama", *dtypes)


def backward(h: Tensor, inputs: list[Tensor], p: float, cast: str, has_grad_h: bool = True):
    x, residual, weight, dh, dy = inputs
    shared = p == 0 and x.dtype == residual.dtype
    rest = random(p), EPS, cast == "llama", None if shared else x.dtype, residual.dtype
    grad_x, grad_residual, grad_weight = norm.norm_bwd(
        dh if has_grad_h else None, [dy], h, weight, *rest
    )
    return grad_residual if shared else grad_x, grad_residual, grad_weight


def norm_alone(x: Tensor, weight: Tensor, llama: bool = True, dtype=None) -> Tensor:
    dtype = dtype or x.dtype
    return norm.norm_fwd(x, None, weight, None, EPS, llama, dtype, dtype)[1]


def norm_alone_bwd(dy: Tensor, x: Tensor, weight: Tensor, eps=EPS, llama=True) -> list[Tensor]:
    rest = None, eps, llama, None, x.dtype
    grad_x, *grads = norm.norm_bwd(None, [dy], x, weight, *rest, alone=True)
    assert grad_x is None
    return grads


def with_grads_of(function, inputs: list[Tensor], p: float, cast: str, has_grad_h: bool = True):
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    h, y = function(*leaves, p, cast)
    dh = inputs[3] if has_grad_h else torch.zeros_like(inputs[3])
    grads = [dh.to(h.dtype), inputs[4].to(y.dtype)]
    return [h, y, *torch.autograd.grad([h, y], leaves, grads)]


@pytest.mark.parametrize(("dtypes", "cast"), CASES, ids=str)
def interpreted_fused(dtypes, cast):
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
        exact = with_grads_of(truth, in_fp64, p, cast, has_grad_h)
        in_dtype = with_grads_of(plain, inputs, p, cast, has_grad_h)
        for result, rounded, right in zip(results, in_dtype, exact, strict=True):
            assert_no_worse_than_plain(result, rounded, right)
        assert all(torch.equal(t, was) for t, was in zip(inputs, before, strict=True))


def interpreted_fused_mask_is_that_of_dropout():
    """At offsets past 2^32 and below 0, for rows of odd length and several tiles."""
    for shape in ((3, 5), (9, 130)):
        x, residual, weight = torch.ones(shape), torch.zeros(shape), torch.ones(shape[-1])
        for offset in (2**32 + 1, -9):
            rest = random(0.3, offset), EPS, True, FP32, FP32
            h, _ = norm.norm_fwd(x, residual, weight, *rest)
            keep = torch.from_numpy(keep_mask(shape, 0.3, SEED, offset))
            assert torch.equal(h != 0, keep)
            grad_x, grad_residual, _ = norm.norm_bwd(x, [residual + 1e-3], h, weight, *rest)
            assert torch.equal(grad_x != 0, keep) and (grad_residual != 0).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
def interpreted_fused_rows_at_several_distances(order):
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


def interpreted_gradients_of_several_users():
    x, residual, weight, dh, _ = inputs = draw((7, 33), (BF16, FP32, FP32))
    h, _ = forward(inputs, 0.3, "llama")
    rest = h, weight, random(0.3), EPS, True, BF16, FP32
    users = [torch.randn(h.shape).to(BF16) for _ in range(3)]
    for number in (2, 3):
        outs = norm.norm_bwd(dh, users[:number], *rest)
        total = sum(user.float() for user in users[:number])
        right = norm.norm_bwd(dh, [total], *rest)
        assert all(torch.equal(out, expected) for out, expected in zip(outs, right, strict=True))


TILES = [
    dict(CHUNK=64, NUM_CHUNKS=1, BLOCK_ROWS=1),
    dict(CHUNK=16, NUM_CHUNKS=3, BLOCK_ROWS=4),
    dict(CHUNK=32, NUM_CHUNKS=2, BLOCK_ROWS=2),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def interpreted_results_do_not_depend_on_the_tiling(tile, monkeypatch):
    inputs = draw((6, 48), (BF16, FP32, FP32))
    x, _, weight, dh, dy = inputs
    h, y = forward(inputs, 0.3, "llama")
    grads = backward(h, inputs, 0.3, "llama")
    alone, norm_grads = norm_alone(h, weight), norm_alone_bwd(dy, h, weight)
    sizes = tile | dict(VEC=4, num_warps=4)
    walk = dict(NUM_STAGES=1, per_sm=1, maxnreg=128)
    monkeypatch.setattr(norm, "forward_block_sizes", lambda *_: sizes.copy())
    monkeypatch.setattr(norm, "backward_block_sizes", lambda *_: sizes | walk)
    other_h, other_y = forward(inputs, 0.3, "llama")
    assert torch.equal(other_h, h)
    torch.testing.assert_close(other_y, y, rtol=1e-6, atol=1e-6)
    others = backward(h, inputs, 0.3, "llama")
    assert torch.equal(others[0] != 0, grads[0] != 0)
    torch.testing.assert_close(norm_alone(h, weight), alone, rtol=1e-6, atol=1e-6)
    others, grads = [*others[1:], *norm_alone_bwd(dy, h, weight)], [*grads[1:], *norm_grads]
    for other, grad in zip(others, grads, strict=True):
        torch.testing.assert_close(other, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtypes", "cast"), CASES, ids=str)
def interpreted_norm(dtypes, cast):
    for shape in ((1, 1), (3, 40), (5, 257), (2, 3, 96)):
        x, _, weight, _, dy = draw(shape, dtypes)
        dy = dy.to(norm_dtype(x.dtype, weight.dtype, cast))
        y = norm_alone(x, weight, cast == "llama", dy.dtype)
        results = [y, *norm_alone_bwd(dy, x, weight, EPS, cast == "llama")]

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
def interpreted_norm_of_rows_at_several_distances(order):
    """Bits are those of contiguous tensors; each tensor has strides of its own."""
    for dtype, shape in ((BF16, (2, 3, 2, 40)), (FP32, (1, 2, 3, 24))):
        x, dy = parts(shape, order, dtype)
        weight = torch.rand(shape[-1]).to(dtype)
        dense = x.contiguous()
        right = norm_alone(dense, weight), *norm_alone_bwd(dy.contiguous(), dense, weight)
        turned = dy.transpose(1, 2).contiguous().transpose(1, 2)
        for grad in (dy, dy.contiguous(), turned):
            assert all(a is b for a, b in zip(in_rows(grad, x), (grad, x), strict=True))
            results = [norm_alone(x, weight), *norm_alone_bwd(grad, x, weight)]
            for result, expected in zip(results, right, strict=True):
                assert torch.equal(result, expected) and result.is_contiguous()


class NoCopies(TorchDispatchMode):
    """Refuses what contiguous() calls; the interpreter's own copies go by copy_."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._opname != "clone"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def interpreted_heads_are_not_copied(order):
    """What a GPU runs copies neither x nor gradients, and gives the strides of the op anywhere."""
    x, dy = parts((2, 3, 4, 40), order, FP32)
    weight, seed, offset = torch.rand(40), torch.tensor(SEED), torch.tensor(OFFSET)
    for name, args in (
        ("rms_norm", (x, weight, EPS, "gemma")),
        ("rms_norm_backward", (dy, x, weight, EPS, "gemma")),
        ("dropout_add_rms_norm", (x, dy, weight, 0.3, seed, offset, EPS, "llama")),
    ):
        with NoCopies():
            results = pytree.tree_leaves(replay.CALLS[name]._implementation(*args))
        right = pytree.tree_leaves(getattr(torch.ops.xtrain, name)(*args))
        for result, expected in zip(results, right, strict=True):
            assert result.stride() == expected.stride(), name
            torch.testing.assert_close(result, expected)


def interpreted_norm_of_zeros_and_of_nan():
    x = torch.zeros(4, 40)
    x[1, 3] = float("nan")
    y = norm_alone(x, torch.ones(40))
    assert y[1].isnan().all() and y[[0, 2, 3]].abs().sum() == 0
    grad_x, grad_weight = norm_alone_bwd(torch.ones(4, 40), x, torch.ones(40))
    assert grad_x[1].isnan().all() and grad_x[[0, 2, 3]].isfinite().all()
    assert grad_weight.isnan().all()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # in the rows past the last
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def interpreted_weight_gradient_is_accumulated_in_fp32():
    """Row C28's sum over rows, within a program and between programs; eps = 0 shows in no tail."""
    x, weight = torch.ones(257, 8, dtype=BF16), torch.ones(8, dtype=BF16)
    dy = torch.full((257, 8), 1 / 256, dtype=BF16)
    dy[0] = 1.0
    assert norm_alone_bwd(dy, x, weight, 0.0)[1].tolist() == [2.0] * 8
