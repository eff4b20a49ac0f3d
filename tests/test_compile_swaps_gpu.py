"""xtrain.compile with kernels on a GPU: forms as asked, nothing worse than plain PyTorch."""

from __future__ import annotations

import pytest
import torch

import xtrain
from xtrain.model import Config, Transformer

pytestmark = pytest.mark.gpu
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
