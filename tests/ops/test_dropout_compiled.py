"""Dropout under torch.compile: the same masks, one fused kernel, nothing saved, no recompiles."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mask_oracle import keep_mask
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xtrain.ops import OPS, dropout
from xtrain.ops.dropout.op import counter, counter_by_fours
from xtrain.rng import GAMMA

SEED, OFFSET = -987654321987654321, 2**31 - 4
FORWARD, BACKWARD = OPS["dropout"].forward, OPS["dropout"].backward


def scalar(value: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=device)


def branch(x: Tensor, weight: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return x + dropout(x @ weight, 0.1, seed, offset)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(backend, dynamic, device):
    """Row C3. 11 and 100003 are no multiples of a vector's length: the tails are checked too."""
    shapes = [(7,), (11,), (3, 5, 7), (100003,), (1024, 1000)]
    xs = [torch.ones(shape, device=device) for shape in shapes]
    xs += [torch.ones(5, 33, device=device).t(), torch.ones(1, 9, device=device).expand(4, 9)]
    xs += [torch.ones(3, 11, device=device, dtype=torch.bfloat16)]
    function = torch.compile(
        lambda *args: [dropout(x, p, *args[-2:]) for p in (0.1, 0.5) for x in args[:-2]],
        backend=backend,
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


def test_bf16_product_in_fp32():
    """Row C34: 1.9921875 / 0.9 is 2.21875 in bf16; a scale rounded to bf16 first gives 2.203125."""
    x = torch.full((64,), 1.9921875, dtype=torch.bfloat16)
    for function in (dropout, torch.compile(dropout, fullgraph=True)):
        assert set(function(x, 0.1, scalar(3)).tolist()) == {0.0, 2.21875}


def partitioned_graphs(function, *args, budget: float = 1.0) -> list[torch.fx.GraphModule]:
    """The forward and backward graphs as AOTAutograd hands them to a compiler."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph_module, _):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    with torch._functorch.config.patch(activation_memory_budget=budget):
        torch.compile(function, backend=backend, fullgraph=True)(*args).sum().backward()
    return graphs


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


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpoint"])
@pytest.mark.parametrize("budget", [None, 1.0, 0.5, 0.0], ids=lambda b: f"budget={b}")
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


def test_new_seed_or_step_does_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dropout, backend=counter, fullgraph=True)
    x = torch.ones(100)
    outs = [compiled(x, 0.5, scalar(seed), scalar(seed * 100)) for seed in range(5)]
    assert counter.frame_count == 1
    for seed, out in enumerate(outs):
        assert ((out != 0).numpy() == keep_mask(100, 0.5, seed, seed * 100)).all()


def test_changing_sizes_compile_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x, seed, offset: dropout(x, 0.5, seed, offset),
        backend=counter,
        dynamic=True,
        fullgraph=True,
    )
    for rows, cols in ((4, 11), (3, 8), (33, 5)):
        out = compiled(torch.ones(rows, cols), scalar(SEED), scalar(7))
        assert ((out != 0).numpy() == keep_mask((rows, cols), 0.5, SEED, 7)).all()
    assert counter.frame_count == 1


def test_p_may_change_between_calls():
    """p is a constant of the graph: Dynamo may try it as a symbol, a new value recompiles."""
    compiled = torch.compile(dropout, backend="aot_eager", fullgraph=True)
    x = torch.ones(100)
    for p in (0.1, 0.2, 0.7, 0.0, 1.0):
        assert torch.equal(compiled(x, p, scalar(SEED)), dropout(x, p, SEED))


def test_int_seed_may_change_between_calls():
    compiled = torch.compile(dropout, backend="aot_eager", fullgraph=True)
    x = torch.ones(100)
    for seed in (5, -6, 2**62):
        assert ((compiled(x, 0.5, seed) != 0).numpy() == keep_mask(100, 0.5, seed)).all()
