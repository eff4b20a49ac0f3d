"""One flat graph of a forward: bodies of checkpoints and library ops stand where they are called.

It is only read, by sum_account.py. What is written in place is a new value for whoever reads it
behind the write, so that edges alone tell what a value is made of. A graph is a program by
itself; compiler/forward_program.py joins those that graph breaks leave with what ran between them.

A body that no graph shows is recorded while it runs. That of another library's op runs by itself,
on tensors without memory: whatever it did past torch's ops would raise, so nothing stays unseen.
What is done past torch's ops elsewhere leaves traces: a Triton kernel is launched, memory is read
that no op has filled, an autograd.Function returns what no op has made.
"""

from __future__ import annotations

import linecache
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from xtrain import torch_compat
from xtrain.passes.graph import (
    BUFFERS,
    TRANSPARENT_CALLS,
    UNFILLED,
    base_of,
    body_operands,
    called_bodies,
    is_library_op,
    is_parameter,
    leaves,
    nodes_in,
    op_name,
    placeholders,
    reads_form_alone,
    short_place,
    tensor_meta,
    value_of,
    written_operands,
)

_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))

_PLACES = ("nn_module_stack", "stack_trace", "place")  # meta that says where code stands
LIBRARY_OP = "library_op"  # meta of what stands in the body of a library's op: its name
KERNEL = "triton_kernel"  # meta of a launch: the name of the kernel


class Program:
    """A flat graph of a forward, with where its nodes come from and which addends are branches.

    graph:    only read, never run; bodies of transparent calls are inlined.
    origin:   node of the flat graph -> the node of the graph, or body, that it stands for.
    branches: add -> its operands that a dropout covers; residuals: what carries the stream there.
    handed_on: results that a dropout covers where they are returned, for others to add.
    inside:   node that was recorded in the body of a library's op -> the call of that op.
    unseen:   call of a library's op whose body cannot be seen -> why not.
    returned: what an autograd.Function returned in eager code -> its name.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.origin: dict[fx.Node, fx.Node] = {}
        self.branches: dict[fx.Node, set[fx.Node]] = {}
        self.residuals: dict[fx.Node, fx.Node] = {}
        self.handed_on: set[fx.Node] = set()
        self.inside: dict[fx.Node, fx.Node] = {}
        self.unseen: dict[fx.Node, str] = {}
        self.returned: dict[fx.Node, str] = {}
        self._items: dict[tuple[fx.Node, int], fx.Node] = {}
        self._inside = ""  # the name, with a dot, of the body that is being inlined

    @classmethod
    def of(cls, module: fx.GraphModule) -> Program:
        """Return the program of one graph module."""
        program = cls()
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
            given = body_operands(node) or _of_autograd_function(node)
            if given:
                inside = {
                    p: fx.node.map_arg(value, lambda n: values[n]) for p, value in given.items()
                }
                outside, body = self._inside, next(a for a in node.args if _is_attribute(a))
                self._inside = f"{values[body].target}."
                inner = self.inline(next(iter(given)).graph, inside, copy)
                self._inside = outside
                is_function = op_name(node) not in TRANSPARENT_CALLS
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
                if is_library_op(copied.target) and copied not in self.unseen:
                    self._open(node, values)
                else:
                    self._write(node, values)
        return None

    def _open(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Put the body of a library's op in the place of its call."""
        given = fx.node.map_arg((node.args, node.kwargs), value_of)
        opened = self.open(values[node], *given)
        if opened is None:
            self._write(node, values)
            return
        values[node], written = opened
        for operand in node.all_input_nodes:
            if values[operand] in written:
                self._write_into(operand, written[values[operand]], values)

    def open(self, call: fx.Node, args: Any, kwargs: Any) -> tuple[Any, dict[fx.Node, Any]] | None:
        """Append the body of a library's op, and take its call out of the graph.

        Args:     args, kwargs: those of the call, with tensors and numbers for its operands.
        Returns:  its result, and operand -> what stands for it behind the op, which wrote into it;
                  None where the body cannot be seen, with the reason in `unseen`.
        """
        last = next(iter(reversed(self.graph.nodes)))
        operands = leaves((call.args, call.kwargs))
        recording = _LibraryOp(self, call)
        try:
            result, written = recording.run(zip(operands, leaves((args, kwargs)), strict=True))
        except Exception as error:  # whatever another library's code raises without memory
            while (node := next(iter(reversed(self.graph.nodes)))) is not last:
                self.graph.erase_node(node)
            text = str(error).strip().partition("\n")[0]
            said = f"run without data it raises {type(error).__name__}: {text}"
            self.unseen[call] = recording.hidden or said
            return None
        self.graph.erase_node(call)
        return result, written

    def take_over(
        self, other: Program, node: fx.Node, here: fx.Node, values: dict[fx.Node, Any]
    ) -> None:
        """Take down of a node's copy what another program says of the node."""
        self.origin[here] = other.origin.get(node, node)
        if node in other.inside:
            self.inside[here] = other.inside[node]
        if node in other.unseen:
            self.unseen[here] = other.unseen[node]
        if node in other.handed_on:
            self.handed_on.add(here)
        if branches := other.branches.get(node):
            found = {values[b] for b in branches if isinstance(values.get(b), fx.Node)}
            self.branches.setdefault(here, set()).update(found)

    def _write(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        """Make what a node writes in place the value of its targets, and of what those are part."""
        targets = written_operands(node)
        if kernel := torch_compat.launched_kernel(node):
            values[node].meta = {**values[node].meta, KERNEL: kernel}
            targets = filled_by_kernel({n: values[n] for n in node.all_input_nodes})
        for target in targets:
            if op_name(node) == "setitem":
                value = fx.node.map_arg(node.args[2], values.get)
                written = self.written(values[target], value)
            elif len(targets) > 1 or tensor_meta(node) is None:
                written = self.written(values[target], values[node])
            else:
                written = values[node]
            self._write_into(target, written, values)

    def _write_into(self, target: fx.Node, written: Any, values: dict[fx.Node, Any]) -> None:
        values[target] = written
        while (view := base_of(target)) is not None and isinstance(values.get(view), fx.Node):
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
        target = node.target
        if _is_attribute(node):  # bodies that are not inlined are looked up by their names
            target = f"{self._inside}{target}"
        copied = self.graph.create_node(node.op, target, args, kwargs, node.name)
        copied.meta = node.meta
        torch_compat.copy_source(node, copied)
        self.origin[copied] = node
        return copied

    def graph_of(self, node: fx.Node) -> fx.Graph:
        """Return the graph, or body, that a node stands in."""
        return self.origin[node].graph

    def operand_of(self, taker: fx.Node, operand: fx.Node) -> fx.Node:
        """Return what a taker's node in its graph has in the place of an operand here."""
        pairs = operands(self.origin[taker], taker)
        return next(there for there, here in pairs if here is operand)

    def finish(self, outputs: Any) -> None:
        """End the graph with what the forward returns."""
        self.graph.output(outputs)


def written_into(before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand in a flat graph for `before` with `value` written into it."""
    raise NotImplementedError("a flat graph is only read")


def kernel_launch(*tensors: torch.Tensor) -> None:
    """Stand in a flat graph for the launch of a Triton kernel on these tensors."""
    raise NotImplementedError("a flat graph is only read")


def filled_by_kernel(operands: dict[Any, fx.Node]) -> list[Any]:
    """Return which operands a kernel writes, given each with what stands for it before the launch.

    Those that were allocated and hold nothing yet; where there is none, any may be written.
    """
    buffers = [o for o, before in operands.items() if op_name(_memory(before)) in BUFFERS]
    return buffers or [o for o, before in operands.items() if not _is_parameter(before)]


def _is_parameter(node: fx.Node) -> bool:
    return node.meta.get("role") == "parameter" or is_parameter(node)


def _memory(node: fx.Node) -> fx.Node:
    """The value whose memory a view shows."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def is_read_unfilled(node: fx.Node) -> bool:
    """Whether memory is read, itself or a view of it, that no op has filled.

    What an op writes is a new value (`written_into`) for whoever reads it behind the write.
    """
    if op_name(_memory(node)) not in UNFILLED:
        return False
    for user in node.users:
        is_form = reads_form_alone(user, node) or user.target in (written_into, kernel_launch)
        if is_form or node in written_operands(user):
            continue
        if base_of(user) is not node or is_read_unfilled(user):
            return True
    return False


def _of_autograd_function(call: fx.Node) -> dict[fx.Node, Any]:
    """Placeholder of the forward of an autograd.Function -> operand, {} for any other node."""
    bodies = called_bodies(call)
    if op_name(call) != "autograd_function_apply" or not bodies:
        return {}
    inputs = placeholders(bodies[0].graph)
    given = [a for a in call.args if not _is_attribute(a)]
    return dict(zip(inputs[len(inputs) - len(given) :], given, strict=False))


def _is_attribute(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def operands(origin: fx.Node, copied: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each operand of a node with what stands for it in a flat graph."""
    sides = (nodes_in((node.args, node.kwargs)) for node in (origin, copied))
    yield from zip(*sides, strict=False)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one result of a call that has several, or one row."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


# --- what is recorded while it runs ---------------------------------------------------------------


class Recording(torch_compat.RecordingMode):
    """A dispatch mode that appends to a program the ops that run under it.

    What is written in place is a new value for whoever reads that memory behind the write.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        # An id means its tensor as long as that is alive.
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        self._writes: dict[int | None, fx.Node] = {}  # memory -> what was written into it last

    def called(self, func: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        """Append the call of an op that has run, up to its result and what it wrote (`ran`)."""
        mapped, named = fx.node.map_aggregate((args, kwargs), self.argument)
        node = self.program.graph.call_function(func, tuple(mapped), dict(named))
        node.meta = meta
        return node

    def ran(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a call returned and what it wrote."""
        node.meta = {**node.meta, "val": described(result)}
        tensors = self._operands(node, args, kwargs)
        for operand in written_operands(node):
            self.wrote(tensors[operand], node)
        if isinstance(result, torch.Tensor):
            self.stands_for(node, result)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    item = self.program.graph.call_function(operator.getitem, (node, i))
                    item.meta = {**node.meta, "val": described(part)}
                    self.stands_for(item, part)

    def open(self, call: fx.Node, args: Any, kwargs: Any, result: Any) -> bool:
        """Put what a library's op does in the place of its call, where that can be seen."""
        tensors = self._operands(call, args, kwargs)
        opened = self.program.open(call, args, kwargs)
        if opened is None:
            return False
        for operand, now in opened[1].items():
            self.wrote(tensors[operand], now)
        for node, value in zip(leaves(opened[0]), leaves(result), strict=True):
            if isinstance(value, torch.Tensor):
                self.stands_for(node, value)
        return True

    def launched(self, kernel: str, args: Iterable[Any], meta: dict[str, Any]) -> None:
        """Append the launch of a Triton kernel, and what it may have written."""
        tensors = {a: self.node(a) for a in args if isinstance(a, torch.Tensor)}
        call = self.program.graph.call_function(kernel_launch, tuple(tensors.values()))
        call.meta = {**meta, KERNEL: kernel}
        for tensor in filled_by_kernel(tensors):
            self.wrote(tensor, self.program.written(tensors[tensor], call))

    def _operands(self, call: fx.Node, args: Any, kwargs: Any) -> dict[fx.Node, torch.Tensor]:
        pairs = zip(leaves((call.args, call.kwargs)), leaves((args, kwargs)), strict=True)
        return {node: tensor for node, tensor in pairs if isinstance(tensor, torch.Tensor)}

    def argument(self, value: Any) -> Any:
        """Return what stands for an argument: a node for a tensor."""
        return self.node(value) if isinstance(value, torch.Tensor) else value

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an input, or was made by an op that has been seen."""
        known = self._nodes.get(id(tensor))
        return known is not None and known[0]() is tensor

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return what stands for a tensor now: behind writes into its memory, a new value."""
        known = self._nodes[id(tensor)][1] if self.knows(tensor) else None
        node = self.add_input(tensor, "table") if known is None else known
        if function := torch_compat.python_function(tensor):
            self.program.returned[node] = function
        write = self._writes.get(torch_compat.memory_of(tensor))
        if write is not None and write is not node and node < write:
            node = self.program.written(node, write)
            self.stands_for(node, tensor)
        return node

    def stands_for(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Take note of the node whose value a tensor is."""
        self._nodes[id(tensor)] = weakref.ref(tensor), node

    def wrote(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Take note that an op wrote into the memory of a tensor."""
        self._writes[torch_compat.memory_of(tensor)] = node
        self.stands_for(node, tensor)

    def add_input(self, tensor: torch.Tensor, role: str) -> fx.Node:
        """Append a tensor that no recorded op made: an input, a parameter, a buffer, a constant."""
        is_parameter = isinstance(tensor, nn.Parameter)
        if role == "table" and (is_parameter or (tensor.is_leaf and tensor.requires_grad)):
            role = "parameter"
        if role == "input" and not (tensor.is_floating_point() and tensor.ndim >= 2):
            role = "table"
        node = self.program.graph.placeholder(role)
        node.meta = {"val": tensor if is_parameter else described(tensor), "role": role}
        node.meta |= place_of_caller() if tensor.grad_fn is not None else {}
        self.stands_for(node, tensor)
        return node


class _LibraryOp(Recording):
    """Records the body of one call of a library's op; ops of libraries in it open as well."""

    def __init__(self, program: Program, call: fx.Node):
        super().__init__(program)
        self.call = call
        self.hidden = ""  # why the kernel of an op that was called is not seen
        self._device = "cpu"

    def run(self, operands: Iterable[tuple[Any, Any]]) -> tuple[Any, dict[fx.Node, Any]]:
        """Call the op on its operands: leaves of the call's arguments, and what each is given."""
        given = list(operands)
        tensors = {n: v for n, v in given if isinstance(v, torch.Tensor)}
        self._device = next((t.device.type for t in tensors.values()), "cpu")
        with torch_compat.without_memory(list(tensors.values())) as copies:
            shown = dict(zip(tensors, copies, strict=True))
            for operand, copy in shown.items():
                self.stands_for(operand, copy)
            values = iter([shown.get(n, v) if isinstance(n, fx.Node) else v for n, v in given])
            arguments = self.call.args, self.call.kwargs
            args, kwargs = fx.node.map_aggregate(arguments, lambda _: next(values))
            with self:
                result = self.call.target(*args, **kwargs)  # type: ignore[operator]
        written = {n: now for n, t in shown.items() if (now := self.node(t)) is not n}
        return fx.node.map_aggregate(result, self._result), written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note an op; of a library's run the kernel, if that is Python, and note what it does."""
        kwargs = kwargs or {}
        hidden = ""
        if is_library_op(func):
            hidden = torch_compat.hidden_kernel(func, self._device)
            if not hidden:
                with self:
                    return torch_compat.run_kernel(func, args, kwargs, self._device)
            self.hidden = hidden
        result = func(*args, **kwargs)
        meta = {key: self.call.meta[key] for key in _PLACES if key in self.call.meta}
        meta |= place_of_caller(_LibraryOp.run.__code__)
        meta[LIBRARY_OP] = str(self.call.target).removesuffix(".default")
        node = self.called(func, args, kwargs, meta)
        self.ran(node, args, kwargs, result)
        self.program.inside[node] = self.call
        if hidden:
            self.program.unseen[node] = hidden
        return result

    def _result(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not self.knows(value):
            raise RuntimeError("its result comes from no op that torch dispatches")
        return self.node(value) if isinstance(value, torch.Tensor) else value


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own: torch traces, or it wraps others."""
    return type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta


def described(value: Any) -> Any:
    """Return shape and dtype of a result, without its memory."""
    if isinstance(value, torch.Tensor):
        return value if is_fake(value) else torch.empty_like(value, device="meta")
    if isinstance(value, tuple | list):
        return tuple(described(part) for part in value)
    return value


def place_of_caller(end: Any = None) -> dict[str, str]:
    """Return file, line and function of the code outside torch and xtrain that calls an op.

    Args:     end: the code of a function that is not looked beyond.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not end:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FOLDERS) and not file.startswith("<"):
            code = linecache.getline(file, frame.f_lineno).strip()
            place = short_place(f"{file}:{frame.f_lineno}")
            return {"place": f"{place} in {frame.f_code.co_qualname}, `{code}`"}
        frame = frame.f_back  # type: ignore[assignment]
    return {}
