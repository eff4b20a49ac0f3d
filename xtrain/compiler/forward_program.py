"""One training forward as one flat program: its compiled graphs, and the eager code between them.

Dynamo leaves code to eager where a graph breaks, where a function is under torch.compiler.disable,
where it gives up a frame. No graph shows such code, so a sum in it would train without dropout in
silence. A dispatch mode sees each of its ops, in autograd.Function bodies too; graphs that ran join
them as they were before our passes. The account judges its sums
(passes/sites/sum_account.py). Recorded: the first training forward, and one behind each
that compiled something new; tensors are held until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from xtrain.compiler.sizes import SizeReader
from xtrain.passes.graph import is_library_op, written_operands
from xtrain.passes.sites.find_sites import Found
from xtrain.passes.sites.program import (
    Program,
    Recording,
    is_fake,
    leaves,
    place_of_caller,
    written_into,
)
from xtrain.passes.sites.sum_account import Settled, SumAccount, SumEntry
from xtrain.passes.sites.ways import Ways


class ForwardProgram(Recording):
    """A dispatch mode over one forward; `judge` returns the account of what it saw."""

    def __init__(self, inputs: Iterable[torch.Tensor]):
        super().__init__(Program())
        self.num_graphs = 0
        self.num_eager_ops = 0
        for tensor in inputs:
            self.add_input(tensor, "input")

    # --- what runs ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op as it is, and note it unless a compiled graph runs it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not any(map(is_fake, _tensors((args, kwargs, result)))):
            self.num_eager_ops += 1
            place = place_of_caller() or {"place": "an unknown place"}
            call = self.called(func, args, kwargs, place)
            if not is_library_op(func) or not self.open(call, args, kwargs, result):
                self.ran(call, args, kwargs, result)
        return result

    def note_launch(self, kernel: str, args: list[Any]) -> None:
        """Append the launch of a Triton kernel by code that no graph holds."""
        if not any(map(is_fake, _tensors(args))):
            self.num_eager_ops += 1
            self.launched(kernel, args, place_of_caller() or {"place": "an unknown place"})

    def note_graph(self, found: Found, inputs: Sequence[Any], results: Any) -> None:
        """Append a compiled graph that has run on these inputs."""
        self.num_graphs += 1
        flat = found.program
        placeholders = [n for n in flat.graph.nodes if n.op == "placeholder"]
        values: dict[fx.Node, Any] = {
            node: self.argument(value) for node, value in zip(placeholders, inputs, strict=False)
        }
        tensors = {
            node: value
            for node, value in zip(placeholders, inputs, strict=False)
            if isinstance(value, torch.Tensor)
        }  # and the nodes that stand for them once something has been written into them
        sizes = SizeReader(placeholders)

        def copy(node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            here = self.program.graph.create_node(node.op, node.target, args, kwargs, node.name)
            here.meta = {**node.meta, "example_value": sizes.concrete(node, inputs)}
            self.program.take_over(flat, node, here, values)
            is_written = node.target is written_into
            for target in node.args[:1] if is_written else written_operands(node):
                if target in tensors:
                    tensors[node] = tensors[target]
                    self.wrote(tensors[target], here)
            return here

        outputs = self.program.inline(flat.graph, values, copy)
        for node, value in zip(leaves(outputs), leaves(results), strict=False):
            if isinstance(node, fx.Node) and isinstance(value, torch.Tensor):
                self.stands_for(node, value)

    def made(self, values: Iterable[torch.Tensor], streams: Iterable[torch.Tensor]) -> bool:
        """Whether some of these values come from what one of the streams has carried so far."""
        ends, begins = [self.node(v) for v in values], [self.node(s) for s in streams]
        ways = Ways(self.program)
        carried = {node for begin in begins for node in ways.carried(begin)}
        return any(not carried.isdisjoint(ways.ancestors(end)) for end in ends)

    # --- the account ----------------------------------------------------------------------------

    @property
    def is_one_graph(self) -> bool:
        """Whether a single compiled graph was the whole forward: its own account says all."""
        return self.num_graphs == 1 and not self.num_eager_ops

    def judge(self, result: Any, settled: Settled) -> tuple[SumAccount, list[SumEntry]]:
        """End the program with the forward's result; return its account and what it leaves open.

        That is each sum that is unexplained, or would be a site and had no dropout.
        """
        nodes = [self.node(t) for t in _tensors(result) if self.knows(t)]
        if not nodes:  # a result of no kind that is known: whatever nobody reads is one
            nodes = [n for n in self.program.graph.nodes if not n.users]
        self.program.finish(tuple(nodes))
        origin = self.program.origin
        account = SumAccount(self.program, lambda node: settled(origin.get(node, node)))
        entries = account.run()
        without = {site.add for site in account.general}
        return account, [e for e in entries if e.verdict == "unexplained" or e.add in without]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments and results, dataclasses and mappings included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list | set):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for part in vars(value).values():
            if isinstance(part, torch.Tensor | tuple | list | dict):
                yield from _tensors(part)
