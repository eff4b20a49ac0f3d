"""One flat graph of a forward: bodies of checkpoints stand where they are called.

It is only read, by passes/sum_account.py. What is written in place is a new value for whoever reads
it behind the write, so that edges alone tell what a value is made of. A graph is a program by
itself; compiler/recorder.py joins those that graph breaks leave with what ran between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.residual_sites import ResidualSite
from xtrain.passes.sums import IN_PLACE_SUM


class Program:
    """A flat graph of a forward, with where its nodes come from and which addends are branches.

    graph:    only read, never run; bodies of transparent calls are inlined.
    origin:   node of the flat graph -> the node of the graph, or body, that it stands for.
    branches: add -> its operands that a dropout covers; residuals: its operand that none covers.
    handed_on: results that a dropout covers where they are returned, for others to add.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.origin: dict[fx.Node, fx.Node] = {}
        self.branches: dict[fx.Node, set[fx.Node]] = {}
        self.residuals: dict[fx.Node, fx.Node] = {}
        self.handed_on: set[fx.Node] = set()
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}

    @classmethod
    def of(cls, module: fx.GraphModule) -> Program:
        """Return the program of one graph module."""
        program = cls()
        # Bodies that are not inlined are looked up by their names.
        program.graph.owning_module = module
        program.finish(program.inline(module.graph, {}, program.copy_of))
        return program

    def inline(
        self,
        graph: fx.Graph,
        values: dict[fx.Node, Any],
        copy: Callable[[fx.Node, dict[fx.Node, Any]], fx.Node],
    ) -> Any:
        """Append a graph's nodes; return what its output is in the flat graph.

        What is written in place is a new value for whoever reads it behind the write.

        Args:     values: node of `graph` -> value here, of its placeholders to begin with.
                  copy: appends one node.
        """
        for node in graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], lambda n: values[n])
            if node in values:
                continue
            given = fx_utils.body_operands(node) or _of_autograd_function(node)
            if given:
                inside = {
                    p: fx.node.map_arg(value, lambda n: values[n]) for p, value in given.items()
                }
                inner = self.inline(next(iter(given)).graph, inside, copy)
                is_function = fx_utils.op_name(node) not in fx_utils.TRANSPARENT_CALLS
                if is_function and isinstance(inner[0], tuple | list):
                    inner = inner[0]  # behind the results stands what the backward reads
                values[node] = inner
            elif is_item(node) and isinstance(values[node.args[0]], tuple | list):
                values[node] = values[node.args[0]][node.args[1]]
            elif is_item(node) and (values[node.args[0]], node.args[1]) in self._items:
                values[node] = self._items[values[node.args[0]], node.args[1]]
            else:
                values[node] = copied = copy(node, values)
                if is_item(node):  # one value, however often code takes it
                    self._items[values[node.args[0]], node.args[1]] = copied
                self._write(node, values)
        return None

    def _write(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Make what a node writes in place the value of its target, and of what that is a part."""
        if not writes_in_place(node) or not isinstance(target := node.args[0], fx.Node):
            return
        written = values[node]
        if fx_utils.op_name(node) == "setitem":
            written = self.written(values[target], fx.node.map_arg(node.args[2], values.get))
        values[target] = written
        while (view := _base(target)) is not None and isinstance(values.get(view), fx.Node):
            values[view] = self.written(values[view], written)
            target = view

    def written(self, before: Any, value: Any) -> Any:
        """Append the value that a tensor has once another was written into it."""
        if not isinstance(before, fx.Node) or not isinstance(value, fx.Node):
            return before
        node = self.graph.call_function(written_into, (before, value))
        node.meta = before.meta
        return node

    def copy_of(self, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
        """Append a copy of a node, with its meta."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copied.meta = node.meta
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
        self.origin[copied] = node
        return copied

    def cover(self, sites: Iterable[ResidualSite]) -> None:
        """Note the branches of sites that were found in the graphs this program was made of."""
        takers: dict[fx.Node, set[fx.Node]] = {}
        residuals = {}
        for site in sites:
            residuals[site.add] = site.residual
            for taker in site.takers:
                takers.setdefault(taker, set()).add(site.branch)
        for node, origin in self.origin.items():
            if origin in takers:
                found = {here for there, here in operands(origin, node) if there in takers[origin]}
                self.branches.setdefault(node, set()).update(found)
                for there, here in operands(origin, node):
                    if there is residuals.get(origin):
                        self.residuals[node] = here

    def finish(self, outputs: Any) -> None:
        """End the graph with what the forward returns."""
        self.graph.output(outputs)


def written_into(before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand in a flat graph for `before` with `value` written into it."""
    raise NotImplementedError("a flat graph is only read")


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node changes its first operand."""
    name = fx_utils.op_name(node)
    in_place = name in fx_utils.IN_PLACE_SCALING or name in IN_PLACE_SUM or name == "setitem"
    return in_place or (name.endswith("_") and not name.endswith("__"))


def _of_autograd_function(call: fx.Node) -> dict[fx.Node, Any]:
    """Placeholder of the forward of an autograd.Function -> operand, {} for any other node."""
    bodies = fx_utils.called_bodies(call)
    if fx_utils.op_name(call) != "autograd_function_apply" or not bodies:
        return {}
    placeholders = [n for n in bodies[0].graph.nodes if n.op == "placeholder"]
    given = [a for a in call.args if not (isinstance(a, fx.Node) and a.op == "get_attr")]
    return dict(zip(placeholders[len(placeholders) - len(given) :], given, strict=False))


def _base(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory a node shows another view of."""
    name = fx_utils.op_name(node)
    is_view = name in fx_utils.VIEW_LIKE or name in ("getitem", "slice", "select", "narrow")
    source = node.args[0] if is_view and node.args else None
    return source if isinstance(source, fx.Node) else None


def operands(origin: fx.Node, copied: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each operand of a node with what stands for it in a flat graph."""
    sides: list[list[fx.Node]] = []
    for node in (origin, copied):
        leaves: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), leaves.append)
        sides.append(leaves)
    yield from zip(*sides, strict=False)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one result of a call that has several, or one row."""
    return node.target is operator.getitem and isinstance(node.args[1], int)
