"""Sizes of a call: which to trace as symbols, what symbols are, and where the samples lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import is_parameter
from xtrain.passes.sites.program import Program, Recording, is_fake, leaves
from xtrain.passes.sites.sample_places import MIXED, UNKNOWN, Place, Source, State, Walk

# source -> (its place in a site's value, whether that is outermost)
Places = dict[Source, tuple[Any, bool]]


class ShapeWatch:
    """Notes the batch and length of each forward, and marks both dynamic after the first change.

    Left alone, Dynamo makes a symbol of the one that changed first and compiles a third time when
    the other does. The graphs of single blocks take activations; there, what is marked are the
    dimensions that were as long as the batch or the sequence in every call so far: a width that is
    so by chance, once the graph is there, would be a new mark, and that is a compile of its own.
    Under dynamic=True every size is a symbol from the first trace on, and nothing is marked.
    """

    def __init__(self, dynamic: bool | None):
        self._enabled = dynamic is None
        self._leading: tuple[int, ...] = ()
        self._changed = False
        # (scope, which is hashable, number of tensors, position, ndim) -> dimensions
        self._dims: dict[tuple[object, int, int, int], frozenset[int]] = {}

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take batch and length from the first tensor argument of a forward."""
        if tensors:
            leading = tuple(tensors[0].shape[:2])
            self._changed |= self._leading not in ((), leading)
            self._leading = leading

    def mark(self, scope: object, tensors: Sequence[torch.Tensor]) -> None:
        """Mark these inputs of a graph, once batch or length has changed; `scope`: whose inputs."""
        if not self._enabled:
            return
        for position, tensor in enumerate(tensors):
            dims = frozenset(d for d, size in enumerate(tensor.shape) if size in self._leading)
            key = (scope, len(tensors), position, tensor.ndim)
            self._dims[key] = dims = dims & self._dims.get(key, dims)
            if self._changed:
                torch_compat.mark_dynamic(tensor, [d for d in sorted(dims) if tensor.shape[d] > 1])


class SizeReader:
    """Evaluate sizes that were symbols at trace time from the inputs of a call."""

    def __init__(self, placeholders: Sequence[fx.Node]):
        self._where: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for position, node in enumerate(placeholders):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                self._where.setdefault(value.node.expr, (position, None))
            elif isinstance(value, torch.Tensor) and not is_parameter(node):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._where.setdefault(size.node.expr, (position, dim))

    def evaluate(self, shape: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the sizes that a shape has in a call with these inputs."""
        return tuple(self._size(size, inputs) for size in shape)

    def concrete(self, node: fx.Node, inputs: Sequence[Any]) -> Any:
        """Return a node's value as described at trace time, its sizes those of a call.

        A tensor without memory; as it was where a size depends on data.
        """
        value = node.meta.get("example_value", node.meta.get("val"))
        if not isinstance(value, torch.Tensor) or is_parameter(node):
            return value
        try:
            shape = self.evaluate(value.shape, inputs)
        except (KeyError, TypeError):
            return value
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def _size(self, size: Any, inputs: Sequence[Any]) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        values = {}
        for symbol in expression.free_symbols:
            position, dim = self._where[symbol]
            value = inputs[position]
            values[symbol] = int(value) if dim is None else value.shape[dim]
        return int(expression.subs(values))


class Samples:
    """Where the samples of one forward's arguments lie in each tensor that a graph is handed.

    The leading dimension of an argument holds them. An argument is the same tensor in every graph
    that reads it; graphs say where the samples lie in what they make (`note`), and what code
    between graphs makes is followed op by op while it runs (`watching`). A tensor of which nothing
    is known holds none: no site's value gets a batch from it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._between = _Between()
        self.is_watching = False
        for position, tensor in enumerate(tensors):
            if tensor.ndim:
                state = {(position, 0): Place(0, 1, tensor.shape[0], 1)}
                self._between.add(tensor, state)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the samples through the code outside of graphs that runs inside."""
        self.is_watching = True
        try:
            with self._between:
                yield
        finally:
            self.is_watching = False

    def note(self, inputs: Sequence[Any], outputs: Sequence[Any], found: Sequence[State]) -> None:
        """Take down where the samples lie in what a graph has made of its inputs.

        Args:     found: of each output, the places of the inputs' dimensions.
        """
        given = {position: state for position, state in self._states(inputs) if state}
        states = [_through(given, state) for state in found]
        for output, state in zip(outputs, states, strict=False):
            if isinstance(output, torch.Tensor):
                self._between.add(output, state)

    def dims(self, inputs: Sequence[Any]) -> list[tuple[int, int, int]]:
        """Return (position of an input, dimension that samples go along, how many), where known."""
        return [
            (position, place.dim, place.size)
            for position, state in self._states(inputs)
            for place in state.values()
            if _fills_a_dimension(place)
        ]

    def _states(self, inputs: Sequence[Any]) -> Iterator[tuple[int, State]]:
        for position, tensor in enumerate(inputs):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
                yield position, self._between.state(tensor)

    @staticmethod
    def batch(dims: list[tuple[int, int, int]], places: Places) -> int | None:
        """Return the number of samples of a site's value, None where they are not shown outermost.

        A size of 1 beside others is no batch. What is known to lie elsewhere than outermost could
        be the samples as well.
        """
        seen = [
            (size, *places[position, dim])
            for position, dim, size in dims
            if (position, dim) in places
        ]
        if any(size > 1 for size, _, _ in seen):
            seen = [known for known in seen if known[0] > 1]
        outermost = {size for size, _, is_outermost in seen if is_outermost}
        elsewhere = any(isinstance(p, Place) and not is_out for _, p, is_out in seen)
        return outermost.pop() if len(outermost) == 1 and not elsewhere else None


class _Between(Recording):
    """Records what runs between graphs, and where the samples lie in it."""

    def __init__(self) -> None:
        super().__init__(Program())
        self._walk = Walk({})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op as it is, and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        seen = [x for x in leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if not any(map(is_fake, seen)):
            self.ran(self.called(func, args, kwargs, {}), args, kwargs, result)
        return result

    def add(self, tensor: torch.Tensor, state: State) -> None:
        """Take down the state of a tensor that no op between graphs made."""
        self._walk.states[self.add_input(tensor, "input")] = state

    def state(self, tensor: torch.Tensor) -> State:
        """Return the places of the arguments' samples in a tensor."""
        if not self.knows(tensor):
            return {}
        node = self.node(tensor)
        self._walk.go_on(self.program.graph)
        return self._walk.of(node)


def _fills_a_dimension(place: Any) -> bool:
    """Whether a dimension is the samples one after the other, each in as many steps."""
    return isinstance(place, Place) and place.before == 1


def _through(given: dict[int, State], found: State) -> State:
    """The state of a graph's output from its inputs', and the places of their dimensions in it."""
    result: State = {}
    for position, state in given.items():
        for source, place in state.items():
            if _fills_a_dimension(place):
                there = found.get((position, place.dim))
                if isinstance(there, Place):
                    there = there._replace(size=place.size, after=there.after * place.after)
            else:
                there = UNKNOWN if any(at == position for at, _ in found) else None
            if there is not None:
                known = result.setdefault(source, there)
                if known != there:
                    result[source] = MIXED if MIXED in (known, there) else UNKNOWN
    return result
