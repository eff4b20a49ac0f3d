"""Run one swap on the graph of a few torch calls, and hold its values and gradients to the truth.

Functions under test compute in `c_of(x)`: fp64 for fp64, so that the function itself, run in fp64,
is the truth for every other dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from harness import capture, code_of
from tolerances import assert_no_worse_than_plain
from torch import Tensor, fx

from xtrain.passes import PassResult
from xtrain.passes.graph import clone_graph, walk_graphs
from xtrain.passes.swaps.normalise import normalise


def c_of(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic on x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def graph_of(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """The normalised graph that Dynamo makes of a few torch calls; see `run` for its inputs."""
    captured = capture(function, *args)
    module = clone_graph(captured.module)
    module.meta["positions"] = [
        next(i for i, a in enumerate(args) if a is value) for value in captured.inputs
    ]
    normalise(module.graph)
    module.recompile()
    return module


def run(module: fx.GraphModule, *args: Tensor) -> tuple[Any, ...]:
    """Call a graph: Dynamo takes the arguments that are used, in the order of their first use."""
    return module(*(args[i] for i in module.meta["positions"]))


def run_swap(module: fx.GraphModule, swap: Callable[..., PassResult], **options: Any) -> PassResult:
    """Run a pass; the graph must stay sound, and a second run must find nothing more to do."""
    result = swap(module.graph, **options)
    for part in walk_graphs(module):
        part.graph.lint()
        part.recompile()
    code = code_of(module)
    again = swap(module.graph, **options)
    module.recompile()
    assert again.num_replaced == 0 and code_of(module) == code
    return result


def assert_left_alone(
    swap: Callable[..., PassResult], function: Callable[..., Any], *args: Tensor, reason: str = ""
) -> None:
    """Assert that a swap changes nothing: for that reason, or "" without seeing a match at all."""
    module = graph_of(function, *args)
    code = module.code
    result = run_swap(module, swap)
    assert result.num_replaced == 0 and module.code == code
    if not reason:
        assert (result.num_matched, result.skipped) == (0, {})
        return
    assert result.num_matched == 1 and any(reason in r for r in result.skipped), result.skipped


def differentiated(
    function: Callable[..., Any], args: tuple[Tensor, ...], *, autocast: bool = False
) -> list[Tensor]:
    """The results of a call and the gradients of their weighted sum, on leaves of their own."""
    leaves = [a.detach().clone().requires_grad_() if a.dtype.is_floating_point else a for a in args]
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context:
        results = function(*leaves)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    total = torch.zeros((), dtype=torch.float64)
    for i, result in enumerate(results):
        ramp = torch.linspace(-1, 1, max(1, result.numel()), dtype=torch.float64)
        weights = torch.cos(5 * ramp + i).view(result.shape)
        total = total + (result.double() * weights).sum()
    total.backward()
    gradients = [leaf.grad for leaf in leaves if leaf.requires_grad and leaf.grad is not None]
    return [*(r.detach() for r in results), *gradients]


def assert_swapped(
    swap: Callable[..., PassResult],
    function: Callable[..., Any],
    *args: Tensor,
    count: int = 1,
    autocast: bool = False,
    **options: Any,
) -> fx.GraphModule:
    """Assert that a swap replaces `count` matches and that nothing got worse than plain PyTorch."""
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        module = graph_of(function, *args)
    result = run_swap(module, swap, **options)
    assert (result.num_replaced, result.skipped) == (count, {}), result
    assert sum(result.forms.values()) == count
    exact = tuple(a.double() if a.dtype.is_floating_point else a for a in args)
    truth = differentiated(function, exact)
    plain = differentiated(function, args, autocast=autocast)
    found = differentiated(partial(run, module), args, autocast=autocast)
    assert len(found) == len(plain) == len(truth)
    for actual, reference, value in zip(found, plain, truth, strict=True):
        assert_no_worse_than_plain(actual, reference, value)
    return module
