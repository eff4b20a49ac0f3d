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
from xtrain.compiler.layer_state import numbers_of_layers, shown_to_layer, symbols
from xtrain.compiler.seeds import ENTRY_ROOT
from xtrain.compiler.session import Session


def call_module(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the whole model: what Dynamo traces, under the name that seeds.ENTRY_ROOT spells."""
    return _xtrain_model(*args, **kwargs)


def call_block(_xtrain_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call one block's own code, past the forward that `compile_each_block` put on it."""
    return type(_xtrain_model).forward(_xtrain_model, *args, **kwargs)


def compiled_entry(
    session: Session, training: bool, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` compiled for one mode, with a compile cache of its own."""
    name = f"xtrain_{type(session.model).__name__}_{'train' if training else 'eval'}"
    return torch.compile(
        torch_compat.fresh_entry(function, name),
        backend=Backend(session, training=training),
        dynamic=session.options.dynamic,
        fullgraph=session.options.fullgraph,
    )


def compile_each_block(session: Session) -> None:
    """Give each block a forward that runs the compiled graph of its class inside our forwards.

    It stays on the block, since a checkpoint around it calls it again in the backward; outside a
    forward of the compiled model it runs the block's own code.
    """
    blocks = {path: session.model.get_submodule(path) for path in session.blocks.paths}
    if not blocks:
        raise ValueError(
            f"{type(session.model).__name__} has no blocks to compile one by one (elements of a "
            "ModuleList, Sequential or ModuleDict with two matrices or more); use xtrain.compile"
        )
    for path, block in blocks.items():
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"{path} is a {type(block).__name__}, which has no forward to compile: the adds of "
                f"{type(session.model).__name__}'s blocks lie in its own code; use xtrain.compile"
            )
    entries: dict[tuple[type, bool], Callable[..., Any]] = {}
    for path, block in blocks.items():
        for training in (True, False):
            key = (type(block), training)
            if key not in entries:
                entries[key] = compiled_entry(session, training, call_block)
        by_mode = {mode: entries[type(block), mode] for mode in (True, False)}
        siblings = session.blocks.siblings(path)
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


class _BlockForward:
    """The forward of one block of a model that is compiled block by block."""

    def __init__(
        self,
        session: Session,
        path: str,
        place: tuple[int, int],
        block: nn.Module,
        entries: dict[bool, Callable[..., Any]],
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
        entry = functools.partial(self._entries[self._block.training], self._block)
        watch = session.shapes[session.model.training]
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
    return torch_compat.trace_config(session.symbols, **overrides)
