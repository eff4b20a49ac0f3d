"""Opaque ops in compiled code on a GPU: called without the dispatcher, to the same bits."""

from __future__ import annotations

import pytest
import torch

import xtrain
from xtrain import torch_compat
from xtrain.model import Config, Transformer
from xtrain.ops import launch as replay

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    """Otherwise inductor adds up the embedding's gradient by atomics, differently every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def steps(mode: str | None, num_steps: int = 4) -> list[torch.Tensor]:
    """Losses and gradients of some steps of a small model with dropout, bf16 autocast."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Config.preset("tiny", vocab_size=512, dim=256, n_heads=4, n_kv_heads=2, ffn_hidden=512)
    model = Transformer(config).cuda()
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
