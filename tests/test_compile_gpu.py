"""Class E0 on a GPU: the masks of xtrain.compile on CUDA are those of the CPU's oracle."""

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
