"""What value a node is, seen through casts, views, dropout and scaling; what it is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain import torch_compat
from xtrain.passes import fx_utils

SUB = frozenset({"sub", "sub_", "isub", "subtract", "__sub__", "__isub__", "__rsub__"}) | {"rsub"}
_TRANSPOSED = frozenset({"T", "mT"})
_OF_A_MODULE = re.compile(r"L\['(_xtrain_model|self)'\]\.")
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
    """Return node, then what it is a form, a norm or a part of, down to what computes."""
    chain = [node]
    while (
        inner := form_or_norm_of(chain[-1]) or part_of(chain[-1]) or _shifted(chain[-1])
    ) is not None:
        chain.append(inner)
    return chain


def _shifted(node: fx.Node) -> fx.Node | None:
    """The value that a node adds a table of the model's own to: positions, a running mean."""
    if fx_utils.op_name(node) not in fx_utils.ADD | SUB:
        return None
    first, second = fx_utils.add_operands(node)
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if same_shape(first, node) and is_table(second):
        return None if is_table(first) else first
    if same_shape(second, node) and is_table(first):
        return second
    return None


def form_or_norm_of(node: fx.Node) -> fx.Node | None:
    """The value that a node shows in another form, or normed."""
    return _through(node) or _normed(node)


_CUTS = frozenset({"chunk", "split", "tensor_split", "split_with_sizes"})
_PARTS = frozenset({"slice", "narrow"})


def part_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a part of, of as many dims: a slice, a chunk.

    A row of stacked values (select, x[0]) is a value of its own.
    """
    name = fx_utils.op_name(node)
    source = fx_utils.operand(node, 0, "input", "self", "tensor")
    if name == "getitem" and isinstance(source, fx.Node) and fx_utils.op_name(source) in _CUTS:
        source = fx_utils.operand(source, 0, "input", "self", "tensor")
    elif name != "getitem" and name not in _PARTS:
        return None
    part, whole = fx_utils.tensor_meta(node), fx_utils.tensor_meta(source)
    return source if part is not None and whole is not None and part.ndim == whole.ndim else None


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
    is_view = name in fx_utils.VIEW_LIKE or (name == "getattr" and node.args[1] in _TRANSPOSED)
    is_view |= name == "getitem" and _keeps_all(node)
    if is_view or name in fx_utils.DROPOUT or name in _NEGATION:
        return value if isinstance(value, fx.Node) else None
    is_division = name in fx_utils.DIV and "rounding_mode" not in node.kwargs
    if is_division or name in fx_utils.MUL or name in fx_utils.ADD:
        other = fx_utils.operand(node, 1, "other")
        scaled = _scaled_operand(value, other)
        if scaled is None and not is_division:
            scaled = _scaled_operand(other, value)
        return scaled
    return None


def _keeps_all(getitem: fx.Node) -> bool:
    """Whether an index leaves a tensor whole: x[None], x[..., None], x[:, :]."""
    index = getitem.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is ... or (isinstance(part, slice) and part == slice(None))
        for part in parts
    )


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
    return first is not None and second is not None and same_sizes(first.shape, second.shape)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Compare sizes without adding a guard."""
    return len(a) == len(b) and all(
        statically_known_true(m == n) for m, n in zip(a, b, strict=True)
    )


def depends_on_contraction(node: fx.Node) -> bool:
    """Return whether a value comes from a product of matrices, however far back."""
    seen, pending = {node}, [node]
    for source in pending:
        if fx_utils.holds_contraction(source):
            return True
        pending += (new := [n for n in source.all_input_nodes if n not in seen])
        seen.update(new)
    return False


def is_active_dropout(node: fx.Node) -> bool:
    """Return whether a node drops elements in this graph; F.dropout with p = 0 counts as absent."""
    if fx_utils.op_name(node) not in fx_utils.DROPOUT:
        return False
    if is_xtrain_op(node):
        return True
    p = fx_utils.operand(node, 1, "p", default=0.5)
    by_default = "alpha" not in fx_utils.op_name(node)
    training = fx_utils.operand(node, 2, "training", "train", default=by_default)
    return bool(p) and training is not False


def is_models_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout of the model's, active or not, and hands on one tensor."""
    name = fx_utils.op_name(node)
    return name in fx_utils.DROPOUT - {"native_dropout"} and not is_xtrain_op(node)


def is_absent_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout that hands its operand on as it is (not in a pair)."""
    name = fx_utils.op_name(node)
    return name in fx_utils.DROPOUT - {"native_dropout"} and not is_active_dropout(node)


def is_xtrain_op(node: fx.Node) -> bool:
    """Return whether a node calls one of xtrain's own ops."""
    target = node.target
    return isinstance(target, torch_compat.OpOverload) and target.namespace == "xtrain"


def is_parameter(node: fx.Node) -> bool:
    """Return whether a node is a parameter that the graph takes as an input."""
    return isinstance(fx_utils.tensor_meta(node), torch.nn.Parameter) and node.op in (
        "placeholder",
        "get_attr",
    )


def is_activation_input(node: fx.Node) -> bool:
    """Return whether a node is a value of the model's that enters the graph: floats, no weights."""
    meta = fx_utils.tensor_meta(node)
    if node.op != "placeholder" or meta is None or is_parameter(node):
        return False
    return meta.dtype.is_floating_point and meta.ndim >= 2


def made_of_parameters(node: fx.Node, depth: int = 8) -> bool:
    """Return whether a node is a parameter or computed from parameters alone, in a few steps."""
    if is_parameter(node):
        return True
    if node.op in ("placeholder", "output") or depth == 0:
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(made_of_parameters(n, depth - 1) for n in inputs)


def is_table(node: fx.Node) -> bool:
    """Return whether a value holds no activation: angles, positions and decays of the model's own.

    Made of buffers, other tensors that a module keeps, integers and constants alone; an embedding
    reads a parameter, and is none.
    """
    pending = [node]
    seen = {node}
    for value in pending:
        if is_parameter(value) or (is_activation_input(value) and not _is_of_a_module(value)):
            return False
        pending += (new := [n for n in value.all_input_nodes if n not in seen])
        seen.update(new)
    return True


def _is_of_a_module(node: fx.Node) -> bool:
    """Whether an input is an attribute of the model, or of the block that a graph is made of."""
    return _OF_A_MODULE.match(torch_compat.source_name(node)) is not None


# Ops that ask their second operand for its form alone.
FORM_OF_SECOND = frozenset({"type_as", "view_as", "reshape_as", "expand_as"})


def reads_form_alone(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node asks an operand for its form alone: zeros_like(x), x.new_ones(3)."""
    name = fx_utils.op_name(node)
    if name in FORM_OF_SECOND:
        return bool(node.args) and node.args[0] is not source
    return name.endswith("_like") or name.startswith("new_") or name == "size"


UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
BUFFERS = UNFILLED | {"zeros", "zeros_like", "new_zeros"}


def filled_buffer(node: fx.Node) -> fx.Node | None:
    """The fresh buffer that a node writes into, None for any other node.

    out = zeros_like(x); out[mask] = f(x[mask]); out.index_add_(0, i, f(x[i])): no edge of the graph
    leads from the write to who reads `out` behind it.
    """
    name = fx_utils.op_name(node)
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    target = fx_utils.operand(node, 0, "input", "self") if writes else None
    is_fresh = isinstance(target, fx.Node) and fx_utils.op_name(target) in BUFFERS
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


def may_hold_floats(node: fx.Node) -> bool:
    """Whether a node may carry a gradient: integers, masks and sizes depend on no stream."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return True
    return value is None
