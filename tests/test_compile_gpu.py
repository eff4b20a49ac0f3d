"""xtrain.compile on a GPU: masks, modes, swaps, opaque ops called without the dispatcher."""

from __future__ import annotations

import pytest
import torch
from probe_model import (
    P,
    ProbeModel,
    assert_masks,
    decode_masks,
    gradient_masks,
    oracle_masks,
    tokens,
)

import xtrain
from xtrain import torch_compat
from xtrain.model import Config, Transformer
from xtrain.ops import launch as replay

pytestmark = pytest.mark.gpu

SEED = 1234
SHAPE = (4, 37, 72)  # odd length, a row that is no multiple of a block


def check(model, compiled, step, first_sample=0):
    model.zero_grad(set_to_none=True)
    out = compiled(tokens(*SHAPE[:2], "cuda"))
    out.sum().backward()
    for found in (decode_masks(out.cpu(), 2), gradient_masks(model)):
        assert_masks(found, oracle_masks(SEED, step, SHAPE, first_sample=first_sample))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_equal_the_oracle(backend, checkpointed, dtype):
    model = ProbeModel(SHAPE, checkpointed=checkpointed).to("cuda", dtype)
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend=backend)
    check(model, compiled, 0)
    check(model, compiled, 1)
    compiled.set_step(9, first_sample=5)
    check(model, compiled, 9, first_sample=5)


def test_masks_block_by_block():
    model = ProbeModel(SHAPE).to("cuda")
    compiled = xtrain.compile_blocks(model, dropout=P, seed=SEED)
    check(model, compiled, 0)
    check(model, compiled, 1)


def test_masks_under_cuda_graphs():
    model = ProbeModel(SHAPE).to("cuda")
    compiled = xtrain.compile(model, dropout=P, seed=SEED, mode="reduce-overhead")
    for step in range(4):  # warm-up, recording and replays
        torch.compiler.cudagraph_mark_step_begin()
        check(model, compiled, step)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_runs_are_bitwise_equal(recompute):
    """bf16 autocast, inductor, deterministic algorithms: losses of five steps, twice."""

    def losses():
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = Config.preset("tiny", dim=128, n_heads=4, head_dim=32, recompute=recompute)
        model = Transformer(config).cuda()
        compiled = xtrain.compile(model, dropout=0.1, seed=SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x = torch.randint(16, (4, 129), device="cuda")
        result = []
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                _, loss = compiled(x[:, :-1], x[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = losses(), losses()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second
    assert first[-1] < first[0]


# --- swaps: forms as asked, nothing worse than plain PyTorch --------------------------------------


DEVICE = torch.device("cuda")
WIDE = Config.preset("tiny", vocab_size=512, dim=256, n_heads=4, n_kv_heads=2, ffn_hidden=512)


def trained(kernels, backend="inductor", dtype=torch.float32, autocast=True):
    """(compiled, [loss, every gradient]) of one step with dropout."""
    torch.manual_seed(0)
    model = Transformer(WIDE).to(dtype).to(DEVICE)
    ids = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    compiled = xtrain.compile(model, dropout=0.1, seed=1, backend=backend, kernels=kernels)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = compiled(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), return_logits=False)[1]
    loss.backward()
    return compiled, [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture(scope="module")
def truth():
    """fp64 with the same masks, and bf16 autocast without swaps."""
    exact = trained("off", "eager", torch.float64, autocast=False)[1]
    plain = trained("off", "eager")[1]
    return exact, plain


@pytest.mark.parametrize(
    ("kernels", "backend"), [("auto", "inductor"), ("triton", "inductor"), ("auto", "aot_eager")]
)
def test_values_and_gradients_by_form(kernels, backend, truth):
    compiled, found = trained(kernels, backend)
    for actual, exact, plain in zip(found, *truth, strict=True):
        # A loss may be exact by chance: 512 bf16 logits' half ulps average to 2^-13 of it.
        slack = 2.0**-13 * float(exact.norm()) if exact.ndim == 0 else 0.0
        error = float((actual.double() - exact).norm())
        assert error <= 2 * float((plain.double() - exact).norm()) + slack
    results = {r.name: r for r in compiled.report().passes}
    swapped = {name: r.num_replaced for name, r in results.items() if name.startswith("use_triton")}
    assert list(swapped.values()) == [5, 4, 2, 0, 2, 1], swapped
    assert results["fuse_dropout_add_rms_norm"].num_replaced == 4
    if kernels == "triton" or backend == "aot_eager":
        assert set(results["fuse_dropout_add_rms_norm"].forms) == {"kernel"}
        assert set(results["use_triton_swiglu"].forms) == {"kernel"}


# --- opaque ops in compiled code, to the same bits ------------------------------------------------


@pytest.fixture(scope="module")
def deterministic():
    """Otherwise inductor adds up the embedding's gradient by atomics, differently every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def steps(mode: str | None, num_steps: int = 4) -> list[torch.Tensor]:
    """Losses and gradients of some steps of a small model with dropout, bf16 autocast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(WIDE).cuda()
    ids = torch.randint(512, (num_steps, 4, 129), device="cuda")
    compiled = xtrain.compile(model, dropout=0.1, seed=1, mode=mode)
    found = []
    for batch in ids:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(
                batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), return_logits=False
            )
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.fixture(scope="module")
def by_the_op(deterministic) -> list[torch.Tensor]:
    """The same steps where inductor's code calls the ops, which give one set of bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_compat.lowering, "_calls_directly", lambda node: False)
        with torch._inductor.utils.fresh_cache():
            found, again = steps(None), steps(None)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return found


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_bits_are_those_of_the_ops(mode, by_the_op):
    for call in replay.CALLS.values():
        call._plans.clear()
    replay.SITES.clear()  # another test's compile of the same shapes may have left its plans there
    with torch._inductor.utils.fresh_cache():
        found = steps(mode)
    for a, b in zip(found, by_the_op, strict=True):
        assert torch.equal(a, b)
    plans = {name: list(call._plans.values()) for name, call in replay.CALLS.items()}
    used = [name for name, found in plans.items() if found]
    for name in ("dropout_add_rms_norm", "rope_qk", "sdpa"):
        assert name in used and f"{name}_backward" in used
    assert not [name for name in used if None in plans[name]]


def test_a_cached_graph_finds_the_calls(by_the_op):
    """The second compile loads the code from disk."""
    from torch._dynamo.utils import counters

    with torch._inductor.utils.fresh_cache():
        steps(None, 1)
        counters.clear()
        found = steps(None)
        hits = counters["inductor"]["fxgraph_cache_hit"]
        assert hits or counters["aot_autograd"]["autograd_cache_hit"]
    for a, b in zip(found, by_the_op, strict=True):
        assert torch.equal(a, b)
