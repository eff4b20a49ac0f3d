"""Sizes that change: which to trace as symbols, and what symbols are in a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import is_parameter


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
