"""Capture a model's graph as Dynamo makes it, transform it, and run it beside the eager truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from graphs import SITES, Mark, Model
from mask_oracle import keep_mask
from torch import Tensor, fx

from xtrain.passes.graph import clone_graph, op_name, walk_graphs
from xtrain.passes.sites.find_sites import find_sites
from xtrain.passes.sites.insert_residual_dropout import InsertResult, insert_residual_dropout
from xtrain.passes.sites.residual_sites import ResidualSite

P = 0.5


@dataclass
class Captured:
    """Dynamo's own graph module of a model, and what it was called with."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]


def _call(_xtrain_model: Callable[..., Any], *args: Any) -> Any:
    return _xtrain_model(*args)


def capture(model: Callable[..., Any], *args: Any) -> Captured:
    """Trace a call as xtrain.compile does; the model must make one graph."""
    found: list[Captured] = []

    def backend(module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            found.append(Captured(module, inputs))
            return module(*inputs)

        return run

    torch._dynamo.reset()
    torch.compile(_call, backend=backend, fullgraph=True)(model, *args)
    assert len(found) == 1
    return found[0]


@cache
def captured_case(name: str) -> tuple[Model, tuple[Tensor, ...], Captured]:
    """Return a case of SITES with its graph, which no test may change."""
    model, args = SITES[name]()
    return model, args, capture(model, *args)


def plain_sites(graph: fx.Graph) -> list[ResidualSite]:
    """Return the sites that the plain search finds in a graph and in the bodies that it calls."""
    assert graph.owning_module is not None
    found = find_sites(graph.owning_module, general="none").sites
    return [site for sites in found.values() for site in sites]


def hand_built(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """Return the graph of a few torch calls with a value on each node, without Dynamo."""
    module = fx.symbolic_trace(function)

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            node.meta["example_value"] = super().run_node(node)
            return node.meta["example_value"]

    Recorder(module).run(*args)
    return module


def insert(captured: Captured, existing: str = "skip") -> tuple[fx.GraphModule, InsertResult]:
    """Run the pass on a clone of a captured graph."""
    module = clone_graph(captured.module)
    return module, insert_into(module, existing)


def insert_into(module: fx.GraphModule, existing: str = "skip") -> InsertResult:
    """Run the pass on a graph module and make the module runnable again."""
    result = insert_residual_dropout(module.graph, p=P, existing=existing)
    for part in walk_graphs(module):
        part.graph.lint()
        part.recompile()
    return result


def code_of(module: fx.GraphModule) -> str:
    """The code of a graph and of all its bodies."""
    return "\n".join(part.code for part in walk_graphs(module))


def calls(module: fx.GraphModule, name: str) -> list[fx.Node]:
    """The nodes of a graph and its bodies whose op has this name."""
    graphs = [part.graph for part in walk_graphs(module)]
    return [n for graph in graphs for n in graph.nodes if op_name(n) == name]


def seeds_tensor(seeds: list[tuple[int, int]]) -> Tensor:
    """(seed, offset) rows as the graph takes them."""
    return torch.tensor(seeds, dtype=torch.int64).flatten()


def masked_eagerly(model: Model, args: tuple[Any, ...], seeds: list[tuple[int, int]]) -> Any:
    """Run a model in eager with NumPy's mask on the value of mark i for each (seed, offset)."""
    handles = []
    assert len(model.marks) == len(seeds)
    for mark, (seed, offset) in zip(model.marks, seeds, strict=True):

        def drop(_: Mark, __: Any, value: Tensor, seed: int = seed, offset: int = offset) -> Tensor:
            keep = torch.from_numpy(keep_mask(tuple(value.shape), P, seed, offset))
            return torch.where(keep, value * (1 / (1 - P)), 0.0)

        handles.append(mark.register_forward_hook(drop))
    try:
        return model(*args)
    finally:
        for handle in handles:
            handle.remove()
