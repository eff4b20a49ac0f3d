"""xtrain.ops.linear_cross_entropy under torch.compile, autocast and activation checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_oracle import IGNORE, SHAPE, head_and_targets
from tolerances import assert_close, max_error
from torch import Tensor

from xtrain.ops import OPS, linear_cross_entropy

OP = OPS["linear_cross_entropy"]


def captured(function, *args) -> tuple[list[Tensor], list[torch.fx.GraphModule]]:
    """Results and gradients of a compiled function, and the graphs that AOTAutograd made."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graphs.append(graph) or graph),
        bw_compiler=lambda graph, _: make_boxed_func(graphs.append(graph) or graph),
    )
    out = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return [out, *torch.autograd.grad(out.sum(), args)], graphs


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_node_in_each_graph(reduction, device):
    """AOTAutograd keeps both ops whole: what it saves is no larger than the weight."""
    hidden, weight, targets = head_and_targets((64,), 4, 100, torch.float32, device)

    def head(h, w):
        return linear_cross_entropy(torch.sin(h), w, targets, reduction=reduction) * 2

    results, (forward, backward) = captured(head, hidden, weight)
    for graph, op in ((forward, OP.forward), (backward, OP.backward)):
        assert [node.target for node in graph.graph.nodes].count(op) == 1
        sizes = [
            n.meta["val"].numel() for n in graph.graph.nodes if hasattr(n.meta.get("val"), "numel")
        ]
        assert max(sizes) == 400 < 64 * 100
    expected = head(hidden, weight)
    wants = [expected, *torch.autograd.grad(expected.sum(), (hidden, weight))]
    for result, want in zip(results, wants, strict=True):
        assert_close(result, want)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(dynamic, device):
    weights = torch.rand(SHAPE, device=device)
    variants = [{"label_smoothing": 0.1, "z_loss": 0.01, "token_weights": weights, "softcap": 4.0}]
    variants.append({"reduction": "none"})
    compiled = torch.compile(
        lambda h, w, t: [linear_cross_entropy(h, w, t, **options) for options in variants],
        fullgraph=True,
        dynamic=dynamic,
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


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_decomposition_in_inductor(reduction, device):
    """The see-through form, which public calls do not take."""
    hidden, weight, targets = head_and_targets((5,), dtype=torch.float32, device=device)
    made = reduction != "none"
    options = (IGNORE, 0.1, 0.01, 4.0, reduction, made, made, "fp32")

    def loss(h, w):
        return OP.forward(h, w, targets, None, *options)[0]

    out, want = torch.compile(loss, fullgraph=True)(hidden, weight), loss(hidden, weight)
    assert_close(out, want)
    dy = torch.rand_like(out)
    grads = torch.autograd.grad(out, (hidden, weight), dy)
    for grad, expected in zip(grads, torch.autograd.grad(want, (hidden, weight), dy), strict=True):
        assert_close(grad, expected)


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
