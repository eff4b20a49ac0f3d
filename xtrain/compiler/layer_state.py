"""What layers keep side by side in one object, shown to each layer so that they share a graph.

transformers hands every layer the whole key-value cache, and layer i reads `cache.layers[i]`.
Dynamo guards an entry by its place in the list, so the graph of one layer would serve no other.
While a layer runs, such a list (or dict by layer number) is replaced by a view in which the layer's
own entry has a place that all layers have in common. Nothing else changes: what is read or written
through the view is the list's own entry, and an entry of another layer is looked up in the list,
and guarded there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_INDEX = "xtrain_layer_index"


class LayerView:
    """A list with one entry per layer, as the layer that runs sees it; Dynamo traces its methods.

    Or a dict whose keys are the numbers of the layers: DictView.

    The comparison of two symbols, the index that the layer asks for and the layer's own, is all
    that a graph guards: not the number.
    """

    def __init__(self, entries: Any, index: int):
        self.entries = entries
        self.own = entries[index]
        self.is_written = False
        self.is_shared = True
        setattr(self, _INDEX, index)

    def __getitem__(self, index: Any) -> Any:
        if self.is_shared and index == self.xtrain_layer_index:
            return self.own
        return self.listed()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.is_shared and index == self.xtrain_layer_index:
            self.own = value
            self.is_written = True
        else:
            self.listed()[index] = value

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.listed())

    def __getattr__(self, name: str) -> Any:
        self.is_shared = False  # the method may move entries about
        return getattr(self.listed(), name)

    def listed(self) -> Any:
        """Return the list or dict itself, with what the layer has written to its own entry."""
        if self.is_written:
            self.entries[self.xtrain_layer_index] = self.own
            self.is_written = False
        return self.entries


class DictView(LayerView):
    """The same of a dict from layer number to entry."""

    def get(self, index: Any, default: Any = None) -> Any:
        """Return a layer's entry, or `default`."""
        if self.is_shared and index == self.xtrain_layer_index:
            return self.own
        return self.listed().get(index, default)

    def __contains__(self, index: Any) -> bool:
        return index in self.listed()


@contextmanager
def shown_to_layer(place: tuple[int, int], arguments: Sequence[Any]) -> Iterator[None]:
    """Replace the lists of layers' entries in these arguments of a layer by its view of them.

    Args:     place: the layer's index among its like and their number.
    """
    index, num_layers = place
    views: list[tuple[dict[str, Any], str, LayerView]] = []
    for argument in arguments:
        for fields, name in list(_lists_of_entries(argument, num_layers, depth=1)):
            view = (DictView if type(fields[name]) is dict else LayerView)(fields[name], index)
            fields[name] = view
            views.append((fields, name, view))
    try:
        yield
    finally:
        for fields, name, view in views:
            if fields.get(name) is view:  # else the layer has put something else there
                fields[name] = view.listed()


def _lists_of_entries(
    value: Any, num_layers: int, depth: int
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (fields of an object, name) of each list or dict that keeps one entry per layer."""
    if not _has_fields(value):
        return
    for name, field in vars(value).items():
        is_list = type(field) is list and len(field) == num_layers and all(map(_is_entry, field))
        if is_list or (type(field) is dict and list(field) == list(range(num_layers))):
            yield vars(value), name
        elif depth:  # an encoder-decoder's cache holds two
            yield from _lists_of_entries(field, num_layers, depth - 1)


def _has_fields(value: Any) -> bool:
    is_code = isinstance(value, torch.Tensor | nn.Module | type) or callable(value)
    return hasattr(value, "__dict__") and not is_code


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor) or _has_fields(value)


def numbers_of_layers(blocks: Sequence[nn.Module]) -> set[str]:
    """Return the attributes in which the layers of a list are numbered: ints that go up by 1.

    They are traced as symbols from the first layer on; else layer 0 had a graph to itself.
    """
    if len(blocks) < 2:
        return set()
    parts = [dict(block.named_modules()) for block in blocks]
    names = set()
    for path, part in parts[0].items():
        for name, value in vars(part).items():
            if type(value) is int:
                values = [getattr(other.get(path), name, None) for other in parts]
                if all(type(v) is int and v == value + i for i, v in enumerate(values)):
                    names.add(name)
    return names


def floats_of_layer(block: nn.Module, siblings: Sequence[nn.Module]) -> tuple[float, ...]:
    """Return the floats of a block that differ between the layers of its list, in a fixed order."""
    parts = [dict(other.named_modules()) for other in siblings]
    floats = []
    for path, part in block.named_modules():
        for name, value in vars(part).items():
            if type(value) is float:
                values = [getattr(other.get(path), name, value) for other in parts]
                floats += [value] if any(v != value for v in values) else []
    return tuple(floats)


def symbols(root: str, names: Sequence[str]) -> list[str]:
    """Return patterns of the sources that are traced as symbols, for modules that lie in `root`."""
    return [rf"{re.escape(root)}\.(.+\.)?{name}$" for name in names] + [rf".+\.{_INDEX}$"]
