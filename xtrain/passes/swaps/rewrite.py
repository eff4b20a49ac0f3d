"""The frame of a swap: offer nodes to a matcher, emit xtrain's op in their place, count.

An op that inductor sees through is its decomposition, fused with the neighbours; an opaque one
stays a call of its Triton kernel. `kernels="auto"` takes the kernel where the op's `prefers_kernel`
says that it won, "triton" wherever `supports` allows it; a CPU has decompositions alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.ops.core import Op
from xtrain.passes.graph import (
    Refused,
    dtype_of,
    emit,
    is_call,
    known_tensor,
    op_name,
    values_of,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account, accounts_of
from xtrain.passes.swaps.match import name_of

# Takes a node; returns None where it is no anchor, else the form that the op took.
Swap = Callable[[fx.Node, Account], str | None]


def swap_each(graph: fx.Graph, swap: Swap) -> PassResult:
    """Offer each node of a graph and of its bodies to `swap`; a Refused match stays as it is.

    What a match emitted before it was refused is taken out again.
    """
    result = PassResult()
    module = graph.owning_module
    assert module is not None
    for part, account in accounts_of(module):
        for node in list(part.graph.nodes):
            if torch_compat.is_erased(node) or not is_call(node):
                continue
            try:
                form = swap(node, account)
            except Refused as refusal:
                result.num_matched += 1
                result.skip(str(refusal))
                account.erase_unknown()
                continue
            if form is not None:
                result.num_matched += 1
                result.replaced(form)
    return result


@dataclass(frozen=True)
class Forms:
    """How swapped ops are to run: the `kernels` and `backend` keywords of xtrain.compile."""

    kernels: str = "auto"
    backend: str = "inductor"

    def choose(self, op: Op, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Return (opaque, what the report says) for a call of an op's public function.

        Tensors are the fake ones of the graph.
        """
        device = next(a for a in args if isinstance(a, torch.Tensor)).device
        if device.type != "cuda":
            return False, f"decomposition on {device.type}"
        if (reason := op.supports(*args, **kwargs)) is not None:
            return False, f"decomposition: {reason}"
        if self.backend != "inductor":
            return False, "kernel"
        if self.kernels == "triton":
            return True, "kernel"
        prefers = getattr(op, "prefers_kernel", None)
        if prefers is not None and prefers(*args, **kwargs):
            return True, "kernel"
        return False, "decomposition: inductor fuses it with its neighbours"


class Place:
    """Emits nodes in front of a node, with the module path and source line of what they replace.

    form: what the report says of the op that was emitted last.
    """

    def __init__(self, before: fx.Node, forms: Forms, like: fx.Node | None = None):
        self.before = before
        self.forms = forms
        self.like = before if like is None else like
        self.form = ""

    def emit(self, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """Return a new call. Raises Refused if the op does not take these operands."""
        graph = self.before.graph
        with graph.inserting_before(self.before):
            return emit(graph, target, args, like or self.like, **kwargs)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a node of this dtype: the node itself, or a new cast."""
        if dtype_of(node) == dtype:
            return node
        return self.emit(torch.ops.aten.to.dtype, node, dtype)

    def item(self, node: fx.Node, index: Any, like: fx.Node | None = None) -> fx.Node:
        """Return one result of a node that has several, or a part of a tensor."""
        return self.emit(operator.getitem, node, index, like=like)

    def op(
        self,
        op: Op,
        inputs: Iterable[Any],
        shown: dict[str, Any],
        rest: Iterable[Any] | None = None,
        **options: Any,
    ) -> fx.Node:
        """Return a new call of one of xtrain's ops, by its registered overload.

        Args:     inputs, shown: the arguments of its public function that its form depends on.
                  rest: what follows `inputs` in its schema, where that is not `shown`.
                  options: its arguments with defaults.
        """
        opaque, self.form = self.forms.choose(op, *values_of(tuple(inputs)), **shown)
        if opaque:
            options["opaque"] = True
        return self.emit(
            op.forward, *inputs, *(shown.values() if rest is None else rest), **options
        )


def check_same_form(new: fx.Node, old: fx.Node, *, dtype: torch.dtype | None = None) -> None:
    """Raise Refused if new cannot take old's place: shape, dtype or layout differ.

    dtype: what new is to be, where its readers round it anyway; None: as old.
    """
    a, b = known_tensor(new), known_tensor(old)
    dtype = dtype or b.dtype
    if a.dtype != dtype:
        reason = f"the op would give {name_of(a.dtype)}, the model has {name_of(dtype)}"
    elif a.shape != b.shape or a.device != b.device:
        reason = f"the op would give shape {tuple(a.shape)}, the model has {tuple(b.shape)}"
    elif a.stride() != b.stride() and _is_viewed(old):
        reason = "the model views the result in a memory layout that the op does not give"
    else:
        return
    raise Refused(reason)


def _is_viewed(node: fx.Node) -> bool:
    """Whether a view that depends on strides reads a value, directly or transposed."""
    for user in node.users:
        name = op_name(user)
        if name in ("view", "as_strided", "view_as_complex"):
            return True
        if name in ("transpose", "permute", "to", "swapaxes", "movedim") and _is_viewed(user):
            return True
    return False
