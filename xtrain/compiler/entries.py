"""The functions that torch.compile compiles: the whole model, or one block for all its layers.

What layers keep side by side in one object is shown to each layer so that they share a graph:
transformers hands every layer the whole key-value cache, and layer i reads `cache.layers[i]`.
Dynamo guards an entry by its place in the list, so the graph of one layer would serve no other.
While a layer runs, such a list (or dict by layer number) is replaced by a view in which the layer's
own entry has a place that all layers have in common. Nothing else changes: what is read or written
through the view is the list's own entry, and an entry of another layer is looked up in the list,
and guarded there.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xtrain import torch_compat
from xtrain.compiler.backend import Backend
from xtrain.compiler.compile_report import ENTRY_ROOT
from xtrain.compiler.compile_session import Session

_MODES = {True: "train", False: "eval", None: "train_in_part"}
# The first layer's float is a constant, the second makes it an input, the third finds it one.
_LAYERS_THAT_SHOW_SHARING = 3
_CHOICES_OF_MODULES = 128
_INDEX = "xtrain_layer_index"


def call_module(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the whole model: what Dynamo traces, under the name that ENTRY_ROOT spells."""
    return _xtrain_model(*args, **kwargs)


def call_block(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call one block's own code, past the forward that `compile_each_block` put on it."""
    return type(_xtrain_model).forward(_xtrain_model, *args, **kwargs)


def compiled_entry(
    session: Session, mode: bool | None, function: Callable[..., Any], module: nn.Module
) -> Callable[..., Any]:
    """Return `function` compiled for one mode, with a compile cache of its own.

    Args:     mode: whether it trains; None: some modules do and others do not.
              module: what the function calls.
    """
    name = f"xtrain_{type(session.model).__name__}_{_MODES[mode]}"
    return torch.compile(
        torch_compat.fresh_entry(function, name, module),
        backend=Backend(session, training=mode is not False, switchable=mode is None),
        dynamic=session.options.dynamic,
        fullgraph=session.options.fullgraph,
    )


def tensors_in(*arguments: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments, in order."""
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]


def trace_settings(session: Session) -> AbstractContextManager[Any]:
    """Return a context with the settings that a forward is traced under."""
    overrides = torch_compat.trace_overrides(shared_layers=session.per_block)
    if session.call is not None and session.call.is_mixed:
        # Code that reads `self.training` has a graph for each choice of modules, kept as any other.
        overrides["recompile_limit"] = _CHOICES_OF_MODULES
    return torch_compat.trace_config(session.symbols, **overrides)


# --- one block for all its layers -----------------------------------------------------------------


def compile_each_block(session: Session) -> None:
    """Give each block a forward that runs the compiled graph of its class inside our forwards.

    It stays on the block, since a checkpoint around it calls it again in the backward; outside a
    forward of the compiled model it runs the block's own code.
    """
    blocks = session.blocks.modules
    _check_can_run(session.model, blocks)
    entries: dict[tuple[type, bool | None], BlockEntries] = {}
    numbers: set[str] = set()
    for path, block in blocks.items():
        siblings = session.blocks.siblings(path)
        layers = [blocks[other] for other in siblings]
        floats = floats_of_layer(block, layers)
        by_mode: dict[bool | None, Callable[..., Any]] = {}
        for mode in _MODES:
            key = (type(block), mode)
            if key not in entries:
                entries[key] = BlockEntries(session, mode, block)
            by_mode[mode] = functools.partial(entries[key].run, floats)
        place = siblings.index(path), len(siblings)
        if isinstance(before := block.__dict__.get("forward"), _BlockForward):
            before.session.is_replaced = True
        block.forward = _BlockForward(session, path, place, block, by_mode)
        if path == siblings[0]:
            numbers |= numbers_of_layers(layers)
    root = re.escape(ENTRY_ROOT)
    inside = [rf"{root}\.(.+\.)?{name}$" for name in sorted(numbers)]
    session.symbols = (*inside, rf".+\.{_INDEX}$")


def _check_can_run(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Raise ValueError where a model has no blocks, or one that has no forward of its own."""
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no blocks to compile one by one (elements of a "
            "ModuleList, Sequential or ModuleDict with two matrices or more); use xtrain.compile"
        )
    for path, block in blocks.items():
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"{path} is a {type(block).__name__}, which has no forward to compile: the adds of "
                f"{type(model).__name__}'s blocks lie in its own code; use xtrain.compile"
            )


class BlockEntries:
    """The compiled code of one block class in one mode: one for all layers, where they can share.

    Layers that hold another float each (an attention scale by layer) share a graph where Dynamo
    makes the float an input; an op that takes it as a constant gives each layer a graph. Once a
    third layer shows that, those behind it get entries of their own, and so do not run into
    Dynamo's limit of graphs for one entry.
    """

    def __init__(self, session: Session, mode: bool | None, block: nn.Module):
        self._session = session
        self._training = mode is not False
        self._new_entry = functools.partial(compiled_entry, session, mode, call_block, block)
        self._shared = self._new_entry()
        self._by_numbers: dict[tuple[float, ...], Callable[..., Any]] = {}
        self._is_apart = False

    def run(self, numbers: tuple[float, ...], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block whose layer has these floats of its own."""
        entry = self._by_numbers.get(numbers)
        is_new = entry is None
        if entry is None:
            entry = self._shared
            if self._is_apart:
                entry = self._new_entry()
            self._by_numbers[numbers] = entry
        before = self._num_graphs()
        result = entry(block, *args, **kwargs)
        if is_new and len(self._by_numbers) >= _LAYERS_THAT_SHOW_SHARING:
            self._is_apart |= self._num_graphs() > before
        return result

    def _num_graphs(self) -> int:
        report = self._session.report
        return report.num_train_graphs if self._training else report.num_eval_graphs


class _BlockForward:
    """The forward of one block of a model that is compiled block by block."""

    def __init__(
        self,
        session: Session,
        path: str,
        place: tuple[int, int],
        block: nn.Module,
        entries: dict[bool | None, Callable[..., Any]],
    ):
        self.session = session
        self._path = path
        self._place = place
        self._block = block
        self._entries = entries
        self.__signature__ = inspect.signature(type(block).forward.__get__(block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        recomputing = not session.is_running and torch_compat.in_backward()
        if not session.is_running and not recomputing:
            return type(self._block).forward(self._block, *args, **kwargs)
        call = session.call
        is_mixed = session.training_mode() is None if call is None else call.is_mixed
        mode = None if is_mixed else self._block.training
        entry = functools.partial(self._entries[mode], self._block)
        watch = session.shapes[session.model.training if call is None else True]
        watch.mark(type(self._block), tensors_in(args, kwargs))
        with (
            session.running_block(self._path),
            shown_to_layer(self._place, (*args, *kwargs.values())),
            trace_settings(session) if recomputing else nullcontext(),
        ):
            return entry(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of the block run its own code: graphs and keys stay here."""
        return _own_forward, (self._block,)


def _own_forward(block: nn.Module) -> Callable[..., Any]:
    return type(block).forward.__get__(block)


# --- what layers keep side by side ----------------------------------------------------------------


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
