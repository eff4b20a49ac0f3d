"""xtrain.compile on a GPU: masks, modes, swaps."""

from __future__ import annotations

import pytest
import torch
from mask_oracle import keep_mask
from probe_model import P, ProbeModel, decode_masks, gradient_masks

import xtrain
from xtrain.model import Config, Transformer
from xtrain.rng import site_seed

pytestmark = pytest.mark.gpu

SEED = 1234
SHAPE = (4, 37, 72)  # odd length, a row that is no multiple of a block


def expected(step, first_sample=0):
    offset = first_sample * SHAPE[1] * SHAPE[2]
    return [
        torch.from_numpy(keep_mask(SHAPE, P, site_seed(SEED, step, layer, site), offset))
        for layer in range(2)
        for site in ("attention", "feed_forward")
    ]


def tokens():
    return torch.zeros(SHAPE[:2], dtype=torch.long, device="cuda")


def check(model, compiled, step, first_sample=0):
    model.zero_grad(set_to_none=True)
    out = compiled(tokens())
    out.sum().backward()
    for found in (decode_masks(out.cpu(), 2), gradient_masks(model)):
        for a, b in zip(found, expected(step, first_sample), strict=True):
            assert torch.equal(a.cpu(), b)


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


def trained(kernels, backend="inductor", dtype=torch.float32, autocast=True):
    """(compiled, [loss, every gradient]) of one step with dropout."""
    torch.manual_seed(0)
    config = Config.preset("tiny", vocab_size=512, dim=256, n_heads=4, n_kv_heads=2, ffn_hidden=512)
    model = Transformer(config).to(dtype).to(DEVICE)
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
