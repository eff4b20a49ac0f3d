"""Training that goes past the dropout which was asked for, said once: no error, and no silence."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from xtrain import torch_compat
from xtrain.blocks import Blocks


class Bypasses:
    """What one compiled model has warned of.

    Args:     dropout: what was asked for; is_running: whether a compiled forward runs now.
    """

    def __init__(
        self, model: nn.Module, blocks: Blocks, dropout: float, is_running: Callable[[], bool]
    ):
        self._model = model
        self._blocks = blocks
        self._dropout = dropout
        self._is_running = is_running
        self._said: set[str] = set()

    def warn_of_evaluation(self, training: bool) -> None:
        """Take note of a forward without dropout: from_pretrained hands out models in eval mode."""
        if training or not self._is_asked_for() or torch_compat.in_backward():
            return
        if any(parameter.requires_grad for parameter in self._model.parameters()):
            name = type(self._model).__name__
            self._warn(
                "evaluation",
                f"{name} ran with gradients in eval mode, so without the dropout of "
                f"{self._dropout} that was asked for: call model.train() before "
                "training, or evaluate under torch.no_grad()",
            )

    def watched(self, name: str, method: MethodType) -> MethodType:
        """Return a method of the model's own that warns where it trains past our forward.

        Its `self` is the model itself, whose forward has no dropout.
        """
        if not self._model.training or not self._is_asked_for() or name in self._said:
            return method

        @functools.wraps(method.__func__)
        def watch(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._watching(name):
                return method(*args, **kwargs)

        return MethodType(watch, self._model)

    def _is_asked_for(self) -> bool:
        return self._dropout > 0 and torch.is_grad_enabled()

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        parts = {self._model, *self._blocks.modules.values()}

        def before(module: nn.Module, args: Any) -> None:
            if module in parts and module.training and not self._is_running():
                if self._is_asked_for():
                    self._warn(
                        name,
                        f"{type(self._model).__name__}.{name} called the model past its compiled "
                        "forward in training, so without dropout: call the compiled model and "
                        f"compute what {name} does of its output, or let {name} take the output",
                    )

        hook: Callable[..., Any] = nn.modules.module.register_module_forward_pre_hook
        handle = hook(before)
        try:
            yield
        finally:
            handle.remove()

    def _warn(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, stacklevel=2)
