"""The functions that torch.compile compiles: the whole model, or one block for all its layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xtrain import torch_compat
from xtrain.compiler.backend import Backend
from xtrain.compiler.layer_state import (
    floats_of_layer,
    numbers_of_layers,
    shown_to_layer,
    symbols,
)
from xtrain.compiler.seeds import ENTRY_ROOT
from xtrain.compiler.session import Session

_MODES = {True: "train", False: "eval", None: "train_in_part"}
# The first layer's float is a constant, the second makes it an input, the third finds it one.
_LAYERS_THAT_SHOW_SHARING = 3
_CHOICES_OF_MODULES = 128


def call_module(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the whole model: what Dynamo traces, under the name that seeds.ENTRY_ROOT spells."""
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


def compile_each_block(session: Session) -> None:
    """Give each block a forward that runs the compiled graph of its class inside our forwards.

    It stays on the block, since a checkpoint around it calls it again in the backward; outside a
    forward of the compiled model it runs the block's own code.
    """
    blocks = session.blocks.modules
    _check_can_run(session.model, blocks)
    entries: dict[tuple[type, bool | None], BlockEntries] = {}
    for path, block in blocks.items():
        siblings = session.blocks.siblings(path)
        floats = floats_of_layer(block, [blocks[other] for other in siblings])
        for mode in _MODES:
            key = (type(block), mode)
            if key not in entries:
                entries[key] = BlockEntries(session, mode, block)
        by_mode: dict[bool | None, Callable[..., Any]] = {
            mode: functools.partial(entries[type(block), mode].run, floats) for mode in _MODES
        }
        place = siblings.index(path), len(siblings)
        if isinstance(before := block.__dict__.get("forward"), _BlockForward):
            before.session.is_replaced = True
        block.forward = _BlockForward(session, path, place, block, by_mode)
    numbers = {
        name
        for siblings in {tuple(session.blocks.siblings(path)) for path in blocks}
        for name in numbers_of_layers([blocks[path] for path in siblings])
    }
    session.symbols = tuple(symbols(ENTRY_ROOT, sorted(numbers)))


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
