"""Which sizes to trace as symbols: batch and length together, once either has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xtrain import torch_compat


class ShapeWatch:
    """Notes the batch and length of each forward, and marks both dynamic after the first change.

    Left alone, Dynamo makes a symbol of the one that changed first and compiles a third time when
    the other does. The graphs of single blocks take activations, which are marked by size: a
    dimension as long as the batch or the sequence.
    """

    def __init__(self, dynamic: bool | None):
        self._enabled = dynamic is not False
        self._leading: tuple[int, ...] = ()
        self._changed = False

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take batch and length from the first tensor argument of a forward."""
        if tensors:
            leading = tuple(tensors[0].shape[:2])
            self._changed |= self._leading not in ((), leading)
            self._leading = leading

    def mark(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark these inputs of a graph, once batch or length has changed."""
        if not (self._enabled and self._changed):
            return
        for tensor in tensors:
            dims = [d for d, size in enumerate(tensor.shape) if size in self._leading and size > 1]
            torch_compat.mark_dynamic(tensor, dims)
