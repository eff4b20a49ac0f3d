"""What value a node is, seen through casts, views, dropout and scaling; what it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes import fx_utils

SUB = frozenset({"sub", "sub_", "isub", "subtract", "__sub__", "__isub__", "__rsub__"}) | {"rsub"}
_NEGATION = frozenset({"neg", "negative", "__neg__"})


def peel(node: fx.Node) -> fx.Node:
    """Return the value that a residual operand is, without casts, views, dropout and scaling."""
    return peeled_chain(node)[-1]


def peeled_chain(node: fx.Node) -> list[fx.Node]:
    """Return node, then what it is a cast, view, dropout or scaling of, down to what computes."""
    chain = [node]
    while (inner := _through(chain[-1])) is not None:
        chain.append(inner)
    return chain


def carried_chain(node: fx.Node) -> list[fx.Node]:
    """Return node, then what it is a form of, as `peeled_chain`, seen through norms besides."""
    chain = [node]
    while (inner := _through(chain[-1]) or _normed(chain[-1])) is not None:
        chain.append(inner)
    return chain


_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"})


def _normed(node: fx.Node) -> fx.Node | None:
    """The value that a norm is of, or one step of a spelt-out norm: one number for each token."""
    name = fx_utils.op_name(node)
    value = fx_utils.operand(node, 0, "input", "self")
    if name in _NORMS:
        return value if isinstance(value, fx.Node) else None
    if name in fx_utils.MUL or name in fx_utils.DIV or name in SUB:
        other = fx_utils.operand(node, 1, "other")
        if _is_one_a_token(other, value):
            return value
        if name in fx_utils.MUL and _is_one_a_token(value, other):
            return other
    return None


def _is_one_a_token(factor: object, value: object) -> bool:
    one, whole = fx_utils.tensor_meta(factor), fx_utils.tensor_meta(value)
    if one is None or whole is None or one.ndim != whole.ndim or one.ndim == 0:
        return False
    return statically_known_true(one.shape[-1] == 1) and not statically_known_true(
        whole.shape[-1] == 1
    )


def _through(node: fx.Node) -> fx.Node | None:
    """The one operand that a node passes on in another form, or None when it computes.

    A stream that is scaled by parameters may be shifted by some as well.
    """
    name = fx_utils.op_name(node)
    value = fx_utils.operand(node, 0, "input", "self")
    if name in fx_utils.VIEW_LIKE or name in fx_utils.DROPOUT or name in _NEGATION:
        return value if isinstance(value, fx.Node) else None
    is_division = name in fx_utils.DIV and "rounding_mode" not in node.kwargs
    if is_division or name in fx_utils.MUL or name in fx_utils.ADD:
        other = fx_utils.operand(node, 1, "other")
        scaled = _scaled_operand(value, other)
        if scaled is None and not is_division:
            scaled = _scaled_operand(other, value)
        return scaled
    return None


def _scaled_operand(value: object, factor: object) -> fx.Node | None:
    """`value` when `factor` is a number or scalar, a parameter or made of parameters only."""
    if not isinstance(value, fx.Node) or fx_utils.tensor_meta(value) is None:
        return None
    if isinstance(factor, fx.Node):
        meta = fx_utils.tensor_meta(factor)
        is_scalar = meta is None or meta.ndim == 0
        if not is_scalar and not made_of_parameters(factor):
            return None
    return None if made_of_parameters(value) else value


def same_shape(a: object, b: object) -> bool:
    """Compare shapes without adding a guard: symbols are equal where that is known already."""
    first, second = fx_utils.tensor_meta(a), fx_utils.tensor_meta(b)
    if first is None or second is None or first.ndim != second.ndim:
        return False
    pairs = zip(first.shape, second.shape, strict=True)
    return all(statically_known_true(m == n) for m, n in pairs)


def depends_on_contraction(node: fx.Node) -> bool:
    """Return whether a value comes from a product of matrices, however far back."""
    seen, pending = {node}, [node]
    for source in pending:
        if fx_utils.holds_contraction(source):
            return True
        pending += (new := [n for n in source.all_input_nodes if n not in seen])
        seen.update(new)
    return False


# What a dropped value stays on its way to the add, beside its forms and norms.
_KEEPS_DROPPED = fx_utils.MUL | fx_utils.DIV | {"getitem", "slice", "narrow", "chunk", "split"}
_KEEPS_DROPPED |= {"masked_fill", "masked_fill_", "where"}


def own_dropout(branch: fx.Node, residual: fx.Node) -> fx.Node | None:
    """Return the model's own active dropout on a branch, the nearest to its end, or None.

    A gate, a mask, a slice or a norm may follow it; no contraction and no stream lies between.
    """
    seen = {branch, *peeled_chain(residual)}
    pending = [branch]
    for node in pending:
        if is_active_dropout(node):
            return node
        inner = _through(node) or _normed(node)
        sources = [] if inner is None else [inner]
        if inner is None and fx_utils.op_name(node) in _KEEPS_DROPPED:
            sources = node.all_input_nodes
        pending += (new := [n for n in sources if n not in seen])
        seen.update(new)
    return None


def is_active_dropout(node: fx.Node) -> bool:
    """Return whether a node drops elements in this graph; F.dropout with p = 0 counts as absent."""
    if fx_utils.op_name(node) not in fx_utils.DROPOUT:
        return False
    if is_xtrain_op(node):
        return True
    p = fx_utils.operand(node, 1, "p", default=0.5)
    training = fx_utils.operand(node, 2, "training", "train", default=True)
    return bool(p) and training is not False


def is_absent_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout that hands its operand on as it is."""
    return fx_utils.op_name(node) in fx_utils.DROPOUT and not is_active_dropout(node)


def is_xtrain_op(node: fx.Node) -> bool:
    """Return whether a node calls one of xtrain's own ops."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "xtrain"


def is_parameter(node: fx.Node) -> bool:
    """Return whether a node is a parameter that the graph takes as an input."""
    return isinstance(fx_utils.tensor_meta(node), torch.nn.Parameter) and node.op in (
        "placeholder",
        "get_attr",
    )


def made_of_parameters(node: fx.Node, depth: int = 8) -> bool:
    """Return whether a node is a parameter or computed from parameters alone, in a few steps."""
    if is_parameter(node):
        return True
    if node.op in ("placeholder", "output") or depth == 0:
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(made_of_parameters(n, depth - 1) for n in inputs)


_BUFFERS = frozenset({"zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"})


def filled_buffer(node: fx.Node) -> fx.Node | None:
    """The fresh buffer that a node writes into, None for any other node.

    out = zeros_like(x); out[mask] = f(x[mask]); out.index_add_(0, i, f(x[i])): no edge of the graph
    leads from the write to who reads `out` behind it.
    """
    name = fx_utils.op_name(node)
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    target = fx_utils.operand(node, 0, "input", "self") if writes else None
    is_fresh = isinstance(target, fx.Node) and fx_utils.op_name(target) in _BUFFERS
    return target if is_fresh else None


def parameters_read_by(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the parameters that these nodes multiply by or add, in the nodes' order."""
    seen = set()
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in seen and made_of_parameters(source):
                seen.add(source)
                yield from _leaves(source)


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    if is_parameter(node):
        yield node
        return
    for source in node.all_input_nodes:
        yield from _leaves(source)
