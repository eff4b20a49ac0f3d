"""Which sizes to trace as symbols: batch and length together, once either has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xtrain import torch_compat


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
