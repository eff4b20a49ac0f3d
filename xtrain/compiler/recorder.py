"""Record one training forward whole: its compiled graphs, and what runs in eager between them.

Dynamo leaves code to eager where a graph breaks, where a function is under torch.compiler.disable,
where it gives up a frame. No graph shows such code, so a sum in it would train without dropout in
silence. A dispatch mode sees each of its ops, in autograd.Function bodies too; graphs that ran join
them as they were before our passes. The result is one flat program of the forward, whose sums the
account judges (passes/sum_account.py). Recorded: the first training forward, and one behind each
that compiled something new; tensors are held until it ends.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import xtrain
from xtrain import torch_compat
from xtrain.compiler.backend_failures import short_place
from xtrain.compiler.seeds import SizeReader
from xtrain.passes.find_sites import Found
from xtrain.passes.program import Program, writes_in_place
from xtrain.passes.sum_account import Settled, SumAccount, SumEntry
from xtrain.passes.ways import Ways

_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(xtrain.__file__).parent))


class Recorder(torch_compat.RecordingMode):
    """A dispatch mode over one forward; `judge` returns the account of what it saw."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]):
        super().__init__()
        self.program = Program()
        self.num_graphs = 0
        self.num_eager_ops = 0
        self._is_paused = False
        self._kept: list[torch.Tensor] = []  # an id means its tensor as long as that is alive
        self._nodes: dict[int, fx.Node] = {}
        self._writes: dict[int, fx.Node] = {}  # memory -> what was written into it last
        self._order: dict[fx.Node, int] = {}
        self._parameters = {id(p) for p in model.parameters()}
        for tensor in inputs:
            self._add_input(tensor, "input")

    # --- what runs ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op as it is, and note it unless a compiled graph runs it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused and not any(map(_is_fake, _tensors((args, kwargs, result)))):
            self._note(func, args, kwargs, result)
        return result

    @contextmanager
    def inside_graph(self) -> Iterator[None]:
        """Suspend recording: a compiled graph runs, or is compiled."""
        outer, self._is_paused = self._is_paused, True
        try:
            with torch_compat.real_tensors():
                yield
        finally:
            self._is_paused = outer

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.num_eager_ops += 1
        mapped, named = fx.node.map_aggregate((args, kwargs), self._argument)
        node = self.program.graph.call_function(func, tuple(mapped), dict(named))
        node.meta = {"val": _described(result), "place": _place()}
        self._number(node)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in _tensors(written):
            self._wrote(tensor, node)
        if isinstance(result, torch.Tensor):
            self._is(result, node)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    item = self.program.graph.call_function(operator.getitem, (node, i))
                    item.meta = {"val": _described(part), "place": node.meta["place"]}
                    self._number(item)
                    self._is(part, item)

    def note_graph(self, found: Found, inputs: Sequence[Any], results: Any) -> None:
        """Append a compiled graph that has run on these inputs."""
        self.num_graphs += 1
        flat = found.program
        placeholders = [n for n in flat.graph.nodes if n.op == "placeholder"]
        values: dict[fx.Node, Any] = {
            node: self._argument(value) for node, value in zip(placeholders, inputs, strict=False)
        }
        tensors = dict(zip(placeholders, inputs, strict=False))
        sizes = SizeReader(placeholders)

        def copy(node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            here = self.program.graph.create_node(node.op, node.target, args, kwargs, node.name)
            here.meta = {**node.meta, "example_value": sizes.concrete(node, inputs)}
            self.program.origin[here] = flat.origin.get(node, node)
            self._number(here)
            if branches := flat.branches.get(node):
                found_here = {values[b] for b in branches if isinstance(values.get(b), fx.Node)}
                self.program.branches.setdefault(here, set()).update(found_here)
            if node in flat.handed_on:
                self.program.handed_on.add(here)
            if writes_in_place(node) and isinstance(tensors.get(node.args[0]), torch.Tensor):
                self._wrote(tensors[node.args[0]], here)
            return here

        outputs = self.program.inline(flat.graph, values, copy)
        for node, value in zip(_leaves(outputs), _leaves(results), strict=False):
            if isinstance(node, fx.Node) and isinstance(value, torch.Tensor):
                self._is(value, node)

    # --- values ---------------------------------------------------------------------------------

    def _number(self, node: fx.Node) -> None:
        self._order[node] = len(self._order)

    def _argument(self, value: Any) -> Any:
        return self._node(value) if isinstance(value, torch.Tensor) else value

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        """What stands for a tensor now: behind writes into its memory, a new value."""
        node = self._nodes.get(id(tensor))
        if node is None:
            node = self._add_input(tensor, "table")
        write = self._writes.get(_memory(tensor))
        if write is not None and write is not node and self._order[write] > self._order[node]:
            node = self.program.written(node, write)
            self._number(node)
            self._is(tensor, node)
        return node

    def _is(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _wrote(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._writes[_memory(tensor)] = node
        self._is(tensor, node)

    def _add_input(self, tensor: torch.Tensor, role: str) -> fx.Node:
        """A tensor that no op of the forward made: an input, a parameter, a buffer, a constant."""
        if id(tensor) in self._parameters or (tensor.is_leaf and tensor.requires_grad):
            role = "parameter" if role == "table" else role
        if role == "input" and not (tensor.is_floating_point() and tensor.ndim >= 2):
            role = "table"
        node = self.program.graph.placeholder(f"{role}_{len(self._order)}")
        parameter = isinstance(tensor, nn.Parameter)
        node.meta = {"val": tensor if parameter else _described(tensor), "role": role}
        self._number(node)
        self._is(tensor, node)
        return node

    def made(self, values: Iterable[torch.Tensor], streams: Iterable[torch.Tensor]) -> bool:
        """Whether some of these values come from what one of the streams has carried so far."""
        ends, begins = [self._node(v) for v in values], [self._node(s) for s in streams]
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
        nodes = [self._nodes[id(t)] for t in _tensors(result) if id(t) in self._nodes]
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


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta


def _described(value: Any) -> Any:
    """Shape and dtype of a result, without its memory."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return tuple(_described(part) for part in value)
    return value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place() -> str:
    """File, line and function of the code outside torch and xtrain that calls this op."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDERS) and not file.startswith("<"):
            code = linecache.getline(file, frame.f_lineno).strip()
            name = frame.f_code.co_qualname
            return f"{short_place(f'{file}:{frame.f_lineno}')} in {name}, `{code}`"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown place"
