"""Emit xtrain's ops into a graph, each in the form that was measured to be the faster.

An op that inductor sees through is its decomposition, fused with the neighbours; an opaque one
stays a call of its Triton kernel. `kernels="auto"` takes the kernel where the op's `prefers_kernel`
says that it won, "triton" wherever `supports` allows it; a CPU has decompositions alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.ops.core import Op
from xtrain.passes import fx_utils
from xtrain.passes.match import Refused, dtype_of, name_of

# What a node that takes another's place says of where it came from.
_INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "custom")


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


def values_of(arguments: Any) -> Any:
    """Return arguments with each node replaced by the fake value that describes it."""
    return fx.node.map_arg(arguments, lambda n: n.meta.get("example_value", n.meta.get("val")))


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Return a new node at the graph's insertion point that calls `target`, its value described.

    Args:     like: the node whose place it takes, for its module path and source line.
    Raises:   Refused if the op does not take these operands.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _INHERITED if key in like.meta}
    try:
        with torch.no_grad():
            node.meta["example_value"] = target(*values_of(args), **values_of(kwargs))
    except (ValueError, TypeError, RuntimeError) as error:
        graph.erase_node(node)
        reason = str(error).strip().partition("\n")[0]
        raise Refused(f"{target} does not take it: {reason}") from error
    return node


def emit_op(
    graph: fx.Graph,
    op: Op,
    args: tuple[Any, ...],
    like: fx.Node,
    *,
    opaque: bool,
    **options: Any,
) -> fx.Node:
    """Return a new node that calls one of xtrain's ops by its registered overload.

    args follow the schema; options are its arguments with defaults and are left out when None.
    """
    kwargs = {name: value for name, value in options.items() if value is not None}
    if opaque:
        kwargs["opaque"] = True
    return emit(graph, op.forward, args, like, **kwargs)


def emit_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Return a node of this dtype: the node itself, what it was cast from, or a new cast."""
    if dtype_of(node) == dtype:
        return node
    return emit(graph, torch.ops.aten.to.dtype, (node, dtype), like)


def emit_getitem(graph: fx.Graph, node: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """Return one result of a node that has several."""
    return emit(graph, operator.getitem, (node, index), like)


def check_same_form(new: fx.Node, old: fx.Node, *, dtype: torch.dtype | None = None) -> None:
    """Raise Refused if new cannot take old's place: shape, dtype or layout differ.

    dtype: what new is to be, where its readers round it anyway; None: as old.
    """
    a, b = fx_utils.tensor_meta(new), fx_utils.tensor_meta(old)
    assert a is not None and b is not None
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
        name = fx_utils.op_name(user)
        if name in ("view", "as_strided", "view_as_complex"):
            return True
        if name in ("transpose", "permute", "to", "swapaxes", "movedim") and _is_viewed(user):
            return True
    return False


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase those of these nodes that nothing reads, users first."""
    pending = set(nodes)
    while dead := [n for n in pending if not n.users]:
        for node in dead:
            pending.discard(node)
            if node.op in ("call_function", "call_method"):
                node.graph.erase_node(node)


# What only makes a value: it may go when nobody reads it.
_PURE = (
    fx_utils.VIEW_LIKE
    | fx_utils.MUL
    | fx_utils.ADD
    | {
        *("sub", "neg", "cat", "concat", "stack", "getitem", "chunk", "split", "unbind"),
        *("slice", "expand", "repeat_interleave", "squeeze", "select", "narrow"),
        *("view_as_complex", "view_as_real"),
    }
)
_PURE = _PURE - fx_utils.IN_PLACE_ADD - fx_utils.IN_PLACE_SCALING


def erase_dead(node: fx.Node) -> None:
    """Erase a node that nothing reads, then what only it read: arithmetic and views."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if torch_compat.is_erased(dead) or dead.users or fx_utils.op_name(dead) not in _PURE:
            continue
        pending += dead.all_input_nodes
        dead.graph.erase_node(dead)
