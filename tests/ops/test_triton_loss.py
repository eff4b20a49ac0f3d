"""The loss kernels: interpreted, compiled for four architectures, and on a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import triton
from ahead_of_time import ARCHITECTURES, Resources, compile_launches, meta
from interpreter import INTERPRETING, bf16_rounds_to_nearest, run_interpreted  # noqa: F401
from loss_oracle import IGNORE, head_and_targets, plain_linear_cross_entropy
from tolerances import assert_close, assert_no_worse_than_plain
from torch import Tensor

from xtrain.ops import cross_entropy, linear_cross_entropy
from xtrain.ops.core import FLOATS
from xtrain.ops.cross_entropy import kernel as kernels
from xtrain.ops.cross_entropy.kernel import cross_entropy_block_sizes, cross_entropy_rows
from xtrain.ops.cross_entropy.op import Options, rows_by_kernel
from xtrain.ops.linear_cross_entropy import chunks
from xtrain.ops.linear_cross_entropy.kernel import scale

PLAIN = Options(IGNORE)
ALL = Options(IGNORE, label_smoothing=0.1, z_loss=1e-4, softcap=30.0)


def test_under_the_interpreter():
    run_interpreted(__file__)


def compile_rows(arch: int, dtype: torch.dtype, V: int, options: Options) -> Resources:
    """As linear_cross_entropy launches them: in padded rows, in place."""
    c = torch.float64 if dtype == torch.float64 else torch.float32
    logits = meta(512, triton.cdiv(V, 64) * 64, dtype=dtype)[:, :V]
    targets, scale = meta(512, dtype=torch.int64), meta(512, dtype=c)
    rest = targets, scale, scale, scale, options
    (usage,) = compile_launches(
        lambda: cross_entropy_rows(logits, logits, *rest, padded=True), arch
    )
    return usage


@pytest.mark.parametrize(
    "arch,dtype",
    [(arch, torch.bfloat16) for arch in ARCHITECTURES]
    + [(90, torch.float64), (90, torch.float32), (90, torch.float16)],
    ids=str,
)
def test_rows_compile_without_spills(arch, dtype):
    """With all options, at the widest program: 512 threads get 128 registers each, alone on an SM.

    Without options two programs run on one at rows up to 128 KiB.
    """
    usage = compile_rows(arch, dtype, 128256, ALL)
    assert usage.spills == 0 and usage.registers <= 128, usage
    usage = compile_rows(arch, dtype, 50304, PLAIN)
    assert usage.spills == 0 and usage.registers <= 64, usage


def test_rows_move_vectors_of_16_bytes():
    """Also where V is odd: the buffer's rows are padded. Seven instructions a logit and walk."""
    for V in (50304, 50257):
        usage = compile_rows(90, torch.bfloat16, V, PLAIN)
        wide = usage.count("LDG", "128"), usage.count("STG", "128")
        assert min(wide) >= 4, usage  # two walks, each with a last tile apart
        assert usage.count("LDG") - wide[0] <= 3  # target, scale, the target's logit
        assert usage.count("STG") - wide[1] <= 5  # loss, lse (twice), the target's gradient
        assert usage.count("MUFU", "EX2") <= 4 * wide[0] * 8


@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS], ids=str)
def test_scale_compiles_without_spills(dtype):
    x, factor = meta(1 << 24, dtype=dtype), meta(dtype=torch.promote_types(dtype, torch.float32))
    (usage,) = compile_launches(lambda: scale(x, factor, x), 90)
    assert usage.spills == 0 and usage.registers <= 64, usage
    assert usage.count("LDG", "128") == usage.count("STG", "128") == 2, usage


def test_block_sizes():
    for itemsize in (2, 4, 8):
        for V in (1, 3, 1000, 50257, 128256, 1 << 20):
            tile_rows, vector, num_warps = cross_entropy_block_sizes(V, itemsize)
            assert vector * itemsize == 16 and tile_rows in [32 * num_warps * n for n in (1, 2, 4)]
            assert num_warps in (1, 2, 4, 8, 16)
            assert num_warps == 1 or num_warps * 16 * vector < V, "a smaller program would do"


@pytest.mark.parametrize(
    "V,wide,limit_gib",
    [(50304, True, 0.70), (128256, True, 1.65)] + [(50304, False, 0.40), (128256, False, 0.75)],
)
def test_chunks_fit_the_memory_promised(V, wide, limit_gib):
    """Bytes in bf16 at 16384 tokens of 2048: while chunks are processed, and at the end."""
    n, D = 16384, 2048

    def rows_at(start: int) -> int:
        to_come = 0 if wide else 2 * (n - start) * D
        return chunks.chunk_rows(V, D, 2, "cuda", wide=wide, bytes_to_come=to_come)

    parts = chunks.token_chunks(n, rows_at, 256)
    assert all((part.stop - part.start) % 256 == 0 for part in parts)
    returned = 2 * V * D + 2 * n * D
    peak = returned + (4 * V * D if wide else 2 * n * D)  # rounded, or put together
    for part in parts:
        of_hidden = 2 * (n if wide else part.stop) * D
        during = (4 if wide else 2) * V * D + of_hidden + 2 * (part.stop - part.start) * V
        peak = max(peak, during)
    assert peak <= limit_gib * 2**30 - (1 << 19)  # 0.3 MiB for the loss of each token and such


def test_token_chunks_cover_every_token_once():
    few = [(n, 7, 1) for n in (0, 1, 7, 8, 100)]
    many = [(n, 2560, 256) for n in (300, 2561, 16384, 16385)]
    for n, most, unit in few + many:
        parts = chunks.token_chunks(n, lambda start, most=most: most, unit)
        sizes = [part.stop - part.start for part in parts]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))
        assert all(0 < size <= most for size in sizes) and len(sizes) == -(-n // most)
        assert all(part.start % unit == 0 for part in parts)
        assert not sizes or max(sizes) - min(sizes) < 2 * unit


def test_token_chunks_are_the_fewest_that_a_falling_limit_allows():
    """Against the greedy cut, which is the fewest: a limit that falls is best used at once."""
    for n in (1, 5, 64, 65, 300):
        for top, bottom in ((64, 16), (40, 8), (17, 16)):

            def limit(start, n=n, top=top, bottom=bottom):
                return top - (top - bottom) * start // n // 8 * 8

            parts = chunks.token_chunks(n, limit, 8)
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))
            assert all(part.stop - part.start <= limit(part.start) for part in parts)
            fewest, start = 0, 0
            while start < n:
                fewest, start = fewest + 1, start + limit(start)
            assert len(parts) == fewest


# --- on a GPU -------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def example(n: int, D: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(n, D, device="cuda").to(dtype)
    weight = (3 / math.sqrt(D) * torch.randn(V, D, device="cuda")).to(dtype)
    targets = torch.randint(0, V, (n,), device="cuda")
    targets[1::4] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def poison(num_bytes: int = 1 << 28) -> None:
    """Leave NaN in the memory that the next allocations will get."""
    torch.full((num_bytes // 4,), math.nan, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("V", [3, 1000, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_worse_than_plain(reduction, dtype, V, monkeypatch):
    """Three chunks, poisoned memory, upstream numbers that are not 1, inputs left alone, twice."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args, **kwargs: 128)
    hidden, weight, targets = example(300, 64, V, dtype)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0, "reduction": reduction}
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    before = [x.detach().clone() for x in (hidden, weight, targets)]
    truth = plain_linear_cross_entropy(*exact, targets, **options)
    plain = plain_linear_cross_entropy(hidden, weight, targets, **options)
    dy = torch.full_like(plain, 3.7 * 225) if plain.dim() == 0 else torch.rand_like(plain)
    truths = (truth, *torch.autograd.grad(truth, exact, dy.double()))
    plains = (plain, *torch.autograd.grad(plain, (hidden, weight), dy))

    def run() -> tuple[Tensor, ...]:
        poison()
        loss = linear_cross_entropy(hidden, weight, targets, **options)
        return loss, *torch.autograd.grad(loss, (hidden, weight), dy)

    first, second = run(), run()
    for ours, again, other, true in zip(first, second, plains, truths, strict=True):
        assert_no_worse_than_plain(ours, other, true)
        assert torch.equal(ours, again), "two runs differ"
    for x, was in zip((hidden, weight, targets), before, strict=True):
        assert torch.equal(x, was)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_kernel(dtype):
    """The op on whole logits: shifted views, V innermost or not, expanded gradients, odd V."""
    for V in (1, 1000, 50257):
        whole = 3 * torch.randn(2, 9, V, device="cuda").to(dtype)
        targets = torch.randint(0, V, (2, 8), device="cuda")
        targets[0, 3] = IGNORE
        transposed = whole.transpose(1, 2).contiguous().transpose(1, 2)
        results = []
        for x in (whole, transposed):
            leaf = x.detach().requires_grad_()
            loss = cross_entropy(leaf[:, :-1], targets, reduction="none", label_smoothing=0.1)
            dy = torch.ones((), device="cuda").expand(2, 8)
            results.append((loss, torch.autograd.grad(loss, leaf, dy)[0]))
        exact = whole.double().requires_grad_()
        options = {"reduction": "none", "label_smoothing": 0.1}
        truth = torch.nn.functional.cross_entropy(
            exact[:, :-1].flatten(0, 1), targets.flatten(), **options
        )
        (true,) = torch.autograd.grad(truth.sum(), exact)
        for loss, grad in results:
            assert_close(loss, truth.view(2, 8), dtype=torch.float32)
            assert_close(grad, true, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["fp32", "same"])
def test_peak_memory(accumulation):
    """Both gradients, eager and compiled: the sum, one chunk of logits, the results; no more."""
    n, D, V = 8192, 1024, 32768
    hidden, weight, targets = example(n, D, V, torch.bfloat16)

    def head(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, weight_grad_accumulation=accumulation)

    wide = accumulation == "fp32"
    rows = chunks.chunk_rows(V, D, 2, "cuda", wide=wide)  # and no more in all where they vary
    results = 2 * n * D + 2 * V * D
    during = 2 * n * D + (4 if wide else 2) * V * D + 2 * rows * V
    at_the_end = results + (4 * V * D if wide else 0)
    peaks = []
    for function in (head, torch.compile(head, fullgraph=True)):
        torch.autograd.grad(function(hidden, weight), (hidden, weight))  # workspaces, compilation
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(function(hidden, weight), (hidden, weight))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert torch.cuda.memory_allocated() - before <= results + (4 << 20)
        del grads
    bound = max(during, at_the_end) + (4 << 20)
    assert peaks[0] <= bound < 2 * n * V + results, peaks
    assert peaks[1] <= bound, peaks


@pytest.mark.gpu
def test_no_grad_does_no_gradient_work():
    hidden, weight, targets = example(4096, 256, 32768, torch.bfloat16)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(hidden, weight, targets)
        rows = chunks.chunk_rows(32768, 256, 2, "cuda", wide=False)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2 * rows * 32768 + (4 << 20)


@pytest.mark.gpu
def test_logits_past_2_to_the_31():
    """Row C10: more logits than 31 bits count; the last tokens equal the same ones alone."""
    n, D, V = 45000, 64, 50304
    assert n * V > 2**31
    hidden, weight, targets = example(n, D, V, torch.bfloat16)
    alone = hidden.detach()[-4:].clone().requires_grad_()
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    expected = linear_cross_entropy(alone, weight, targets[-4:], reduction="none")
    assert_close(losses[-4:], expected, dtype=torch.bfloat16)  # another product, other roundings
    (grad,) = torch.autograd.grad(losses.sum(), hidden)
    (want,) = torch.autograd.grad(expected.sum(), alone)
    assert_close(grad[-4:], want)


@pytest.mark.gpu
def test_cross_entropy_past_2_to_the_31():
    """Row C10 for whole logits, [524289, 4096] in bf16, and for one row's offset in one launch."""
    n, V = 524289, 4096
    logits = torch.randn(n, V, dtype=torch.bfloat16, device="cuda").requires_grad_()
    targets = torch.randint(0, V, (n,), device="cuda")
    loss = cross_entropy(logits, targets, reduction="none")
    alone = logits.detach()[-4:].clone().requires_grad_()
    expected = cross_entropy(alone, targets[-4:], reduction="none")
    assert torch.equal(loss[-4:], expected)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    (want,) = torch.autograd.grad(expected.sum(), alone)
    assert torch.equal(grad[-4:], want)
    far = logits.detach().as_strided((2, V), (2**31 + 8 - V, 1))
    assert torch.equal(
        cross_entropy(far, targets[:2], reduction="none")[1],
        cross_entropy(far[1].clone(), targets[1], reduction="none"),
    )


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    """Nothing is read back to the host, forward or backward."""
    hidden, weight, targets = example(1000, 64, 5000, torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, targets)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
def test_a_target_that_is_no_class_gives_nan():
    """A look at the targets would stall the GPU; plain PyTorch asserts and ends the process."""
    hidden, weight, targets = example(8, 16, 50, torch.bfloat16)
    targets[0] = 50
    assert linear_cross_entropy(hidden, weight, targets).isnan()


# --- interpreted ---------------------------------------------------------------------------------


SMALL_PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
SMALL_ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}


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


def small_example(n: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in padded rows, targets of which one is ignored, weights of which one is 0."""
    logits = in_padded_rows(3 * torch.randn(n, V, dtype=torch.float64).to(dtype))
    targets = torch.randint(0, V, (n,))
    targets[n // 2] = IGNORE
    weights = torch.rand(n, dtype=torch.promote_types(dtype, torch.float32)) + 0.5
    weights[n // 3] = 0.0
    return logits, targets, weights


def launch(logits: Tensor, grad, targets, weights, losses, lse, options, *, padded=True) -> None:
    cross_entropy_rows(
        logits, grad, targets, weights, losses, lse, Options(IGNORE, **options), padded=padded
    )


@pytest.mark.parametrize("options", [SMALL_PLAIN, SMALL_ALL], ids=["plain", "all"])
@pytest.mark.parametrize("V", [1, 3, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def interpreted_rows(dtype, V, options):
    """Loss and gradient, in place and apart, with lse found and given; outputs poisoned."""
    n = 1 if V == 4097 else 5
    logits, targets, weights = small_example(n, V, dtype)
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
def interpreted_the_whole_op(reduction, monkeypatch):
    """Chunk after chunk in one buffer, padded rows, odd V: loss and both gradients."""
    monkeypatch.setattr(chunks, "row_function", lambda hidden: partial(rows_by_kernel, padded=True))
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
def interpreted_tiles_do_not_matter(tile_rows, vector, monkeypatch):
    """Fewer logits than a tile, whole tiles, and a remainder."""
    monkeypatch.setattr(kernels, "cross_entropy_block_sizes", lambda *args: (tile_rows, vector, 1))
    for V in (31, 1024, 1500):
        logits, targets, weights = small_example(3, V, torch.float64)
        truth = loss_and_gradient(logits, targets, weights, SMALL_ALL)
        losses, lse = torch.empty_like(weights), torch.empty_like(weights)
        launch(logits, logits, targets, weights, losses, lse, SMALL_ALL)
        assert_close(losses * weights, truth[0])
        assert_close(logits, truth[1])


def interpreted_rows_of_special_values():
    """As in plain PyTorch: masked classes, a class of infinite logit, NaN, nothing but -inf."""
    inf = math.inf
    logits = torch.tensor(
        [[1.0, -inf, 2.0], [0.0, inf, 1.0], [math.nan, 0.0, 1.0], [-inf, -inf, -inf], [9e4, 0, 1]]
    )
    targets, weights = torch.tensor([2, 1, 1, 0, 0]), torch.ones(5)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    losses, lse = torch.empty(5), torch.empty(5)
    grad = torch.empty(5, 3)
    launch(logits, grad, targets, weights, losses, lse, SMALL_PLAIN, padded=False)
    assert_close(losses[[0, 4]], expected[[0, 4]])
    assert losses[1:4].isnan().all() and expected[1:4].isnan().all()
    assert grad[0, 1] == 0 and grad[[0, 4]].isfinite().all()
    assert grad[1:4].isnan().any(-1).all()


def interpreted_small_losses_of_large_logits():
    """log(sum exp(x - max)) and max - x are added, not lse and -x, which would cancel."""
    logits = torch.tensor([[1000.0, 990.0], [-2000.0, -2008.0]])
    targets, weights = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    losses, lse = torch.empty(2), torch.empty(2)
    launch(logits, None, targets, weights, losses, lse, SMALL_PLAIN, padded=False)
    expected = torch.tensor([math.log1p(math.exp(-10)), math.log1p(math.exp(-8))])
    assert_close(losses, expected)


def interpreted_a_target_that_is_no_class_gives_nan():
    """And reads no memory that is not its own: here the row before."""
    logits = torch.zeros(3, 4)
    targets, weights = torch.tensor([0, -3, 4]), torch.ones(3)
    losses, lse = torch.zeros(3), torch.empty(3)
    launch(logits, logits, targets, weights, losses, lse, SMALL_PLAIN, padded=False)
    assert losses.isnan().tolist() == [False, True, True]


def interpreted_int32_targets():
    logits, targets, weights = small_example(4, 10, torch.float32)
    outs = []
    for t in (targets, targets.int()):
        losses, lse = torch.empty(4), torch.empty(4)
        launch(logits, None, t, weights, losses, lse, SMALL_PLAIN)
        outs.append(losses)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def interpreted_scale(dtype):
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


def interpreted_scale_into_a_narrower_dtype():
    x = torch.randn(100)
    out = scale(x, torch.tensor(65536.0), torch.empty(100, dtype=torch.float16))
    assert torch.equal(out, (x * 65536.0).half())
