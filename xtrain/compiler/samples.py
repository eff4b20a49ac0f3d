"""Which dimension of a graph's inputs holds the samples of a forward, and how many there are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from xtrain import torch_compat
from xtrain.passes.sample_places import Place, Source

# What can put the rows of a batch in another order.
_REORDERS = frozenset(
    "__getitem__ getitem index_select gather take_along_dim flip roll sort flipud rot90".split()
)
# source -> (its place in a site's value, whether that is outermost)
Places = dict[Source, tuple[Any, bool]]


class Samples:
    """What one forward knows of its batch: the leading sizes of its arguments, and what follows.

    An argument is the same tensor in every graph that reads it, and so is what one graph hands the
    next. A tensor that code outside of the graphs made is taken by its shape: its leading size is
    an argument's, and no other dimension but its width could be mistaken for it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._arguments = {id(tensor) for tensor in tensors if tensor.ndim}
        self._sizes = {tensor.shape[0] for tensor in tensors if tensor.ndim}
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}

    def note(self, tensor: torch.Tensor, places: Iterable[Any]) -> None:
        """Take down where the samples lie in what a graph has made, as far as it shows."""
        places = list(places)
        dim = None
        if len(places) == 1 and isinstance(places[0], Place):
            place = places[0]
            dim = place.dim if place.before == place.after == 1 else None
        elif not places and id(tensor) in self._arguments:
            return
        self._made[id(tensor)] = weakref.ref(tensor), dim

    def watching(self) -> torch_compat.FunctionWatch:
        """Return a context for code outside of graphs: samples that it reorders have no place."""
        return torch_compat.FunctionWatch(self._follow)

    def _follow(self, name: str, arguments: Sequence[torch.Tensor], result: Any) -> None:
        if not isinstance(result, torch.Tensor) or not result.ndim or not arguments:
            return
        lost = any(self._is_lost(tensor) for tensor in arguments)
        if name in _REORDERS and len(arguments) > (name in ("__getitem__", "getitem")):
            lost |= result.shape[0] in self._sizes and arguments[0].shape[:1] == result.shape[:1]
        if lost:
            self._made[id(result)] = weakref.ref(result), None

    def _is_lost(self, tensor: torch.Tensor) -> bool:
        made, dim = self._made.get(id(tensor), (None, None))
        return made is not None and made() is tensor and dim is None

    def dims(self, inputs: Sequence[Any]) -> dict[int, int]:
        """Return position of an input -> the dimension of it that the samples go along."""
        found = {}
        for position, tensor in enumerate(inputs):
            if isinstance(tensor, torch.nn.Parameter):
                continue
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                dim = self._dim(tensor)
                if dim is not None:
                    found[position] = dim
        return found

    def _dim(self, tensor: torch.Tensor) -> int | None:
        made, dim = self._made.get(id(tensor), (None, None))
        if made is not None and made() is tensor:
            return dim
        if id(tensor) in self._arguments:
            return 0
        leading, *others = tensor.shape
        return 0 if leading in self._sizes and leading not in others[:-1] else None

    @staticmethod
    def batch(inputs: Sequence[Any], dims: dict[int, int], places: Places) -> int | None:
        """Return the number of samples of a site's value, None where they are not shown outermost.

        A size of 1 beside others is no batch. What is known to lie elsewhere than outermost could
        be the samples as well.
        """
        seen = [
            (inputs[position].shape[dim], *places[position, dim])
            for position, dim in dims.items()
            if (position, dim) in places
        ]
        if any(size > 1 for size, _, _ in seen):
            seen = [known for known in seen if known[0] > 1]
        outermost = {size for size, _, is_outermost in seen if is_outermost}
        elsewhere = any(isinstance(p, Place) and not is_out for _, p, is_out in seen)
        return outermost.pop() if len(outermost) == 1 and not elsewhere else None
