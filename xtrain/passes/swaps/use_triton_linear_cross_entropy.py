"""Swap the LM head and its loss for xtrain.linear_cross_entropy: logits are never whole.

Before:  logits = linear(h, w)                      After:  loss = xtrain.linear_cross_entropy(
         loss = F.cross_entropy(logits.float()                  h.flatten(0, -2), w, targets)
                                .flatten(0, -2), targets)
Stage:   normalised graph.     Changes numerics: within tolerance; a mean over no target is 0, not
         NaN.
Anchor:  cross_entropy; from there up through casts, a soft-cap, reshapes and shifts to the head.
Needs:   logits that nothing but the loss reads. Where they are an output of the graph,
         logits="drop" makes that output None and the swap possible.
Also:    logits scaled by a power of two: the hidden states are, which gives the same bits.
Skips:   heads with a bias, class weights, targets that are probabilities, other scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.passes.graph import (
    Refused,
    known_dtype,
    known_tensor,
    ndim_of,
    op_name,
    operand,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.match import both_orders, cast_source, div_of, is_number, mul_of, unary_of
from xtrain.passes.swaps.rewrite import Forms, Place, check_same_form, swap_each

OP = OPS["linear_cross_entropy"]
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "_unsafe_view")
IS_OUTPUT = (
    'the logits are an output of the graph: pass logits="drop", or return_logits=False to '
    "xtrain's Transformer"
)


@dataclass
class _Head:
    """What leads from the hidden states to the loss, nearest the loss first."""

    head: fx.Node
    chain: list[fx.Node] = field(default_factory=list)
    softcap: float | None = None
    scale: float = 1.0
    indices: list[Any] = field(default_factory=list)  # taken of [.., V], the last one first


def use_triton_linear_cross_entropy(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor", logits: str = "keep"
) -> PassResult:
    """Swap heads with their losses in a graph and its bodies; logits: "keep" | "drop" outputs."""

    def swap(node: fx.Node, account: Account) -> str | None:
        if op_name(node) not in ("cross_entropy", "cross_entropy_loss"):
            return None
        found = _head_of(operand(node, 0, "input", "self"))
        hidden, weight = _operands(found.head)
        targets, reduction = _arguments(node)
        outputs = _outputs(found, node, drop=logits == "drop")
        place = Place(node, Forms(kernels, backend))
        result = _emit(place, found, hidden, weight, targets, reduction, account)
        account.prove({node: result})
        for output, dropped in outputs.items():
            output.args = fx.node.map_arg(output.args, lambda n, d=dropped: None if n in d else n)  # type: ignore[misc]
        account.settle({node: result})
        return place.form

    return swap_each(graph, swap)


def _head_of(logits: Any) -> _Head:
    """Walk from what the loss reads up to the head. Raises Refused where something else is met."""
    found = _Head(logits)
    while isinstance(node := found.head, fx.Node):
        if op_name(node) in ("linear", "matmul", "mm"):
            return found
        is_view = unary_of(node, *_RESHAPES) is not None and op_name(node) != "contiguous"
        inner: Any = cast_source(node) or unary_of(node, *_RESHAPES)
        if inner is None and found.softcap is None and (capped := _capped(node)) is not None:
            inner, found.softcap, between = capped
            found.chain += between
            if found.scale != 1.0:
                raise Refused("its logits are scaled behind the soft-cap")
        if inner is None and (scaled := _scaled(node)) is not None:
            inner, scale = scaled
            found.scale *= scale
        if inner is None and op_name(node) == "getitem" and _keeps_classes(node):
            inner, index = node.args
            found.indices.append(index)
        if inner is None:
            break
        if found.indices and is_view:
            raise Refused("tokens are taken from logits that were reshaped")
        found.chain.append(node)
        found.head = inner
    raise Refused("its logits do not come from a linear head alone")


def _capped(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Return (x, cap, inner nodes) when a node is cap * tanh(x / cap)."""
    for bent, cap in both_orders(mul_of(node)):
        if not is_number(cap) or cap <= 0:
            continue
        scaled = unary_of(bent, "tanh")
        quotient = div_of(scaled)
        if quotient is not None and quotient[1] == cap and isinstance(quotient[0], fx.Node):
            return quotient[0], float(cap), [bent, scaled]
    return None


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (x, scale) when a node is x times a number."""
    quotient = div_of(node)
    if quotient is not None and is_number(quotient[1]) and quotient[1]:
        value, scale = quotient[0], 1.0 / quotient[1]
    else:
        pairs = [pair for pair in both_orders(mul_of(node)) if is_number(pair[1])]
        if not pairs:
            return None
        value, scale = pairs[0]
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise Refused("its logits are scaled by a number that is no power of two")
    return (value, float(scale)) if isinstance(value, fx.Node) else None


def _keeps_classes(node: fx.Node) -> bool:
    """Whether an index takes tokens and leaves the last dim whole."""
    source, index = node.args
    if tensor_meta(source) is None or not isinstance(index, tuple):
        return False
    if any(p is not Ellipsis and not isinstance(p, slice) for p in index):
        return False
    if Ellipsis in index:
        return index[-1] in (Ellipsis, slice(None))
    return len(index) < ndim_of(source) or index[-1] == slice(None)


def _operands(head: fx.Node) -> tuple[fx.Node, fx.Node]:
    hidden, weight = operand(head, 0, "input", "self"), operand(head, 1, "weight", "other", "mat2")
    if ndim_of(weight) != 2 or tensor_meta(hidden) is None:
        raise Refused("its head is no product with one matrix")
    if op_name(head) == "linear" and operand(head, 2, "bias") is not None:
        raise Refused("its head has a bias")
    return hidden, weight


def _arguments(loss: fx.Node) -> tuple[fx.Node, str]:
    targets, value = operand(loss, 1, "target"), tensor_meta(operand(loss, 1, "target"))
    if value is None or value.dtype.is_floating_point:
        raise Refused("its targets are no class indices")
    if operand(loss, 2, "weight") is not None:
        raise Refused("it weighs classes")
    if op_name(loss) == "cross_entropy":
        legacy = operand(loss, 3, "size_average"), operand(loss, 5, "reduce")
        reduction = operand(loss, 6, "reduction", default="mean")
    else:  # aten: an enumeration
        legacy = None, None
        reduction = ("none", "mean", "sum")[operand(loss, 3, "reduction", default=1)]
    if legacy != (None, None):
        raise Refused("it uses size_average or reduce")
    return targets, reduction


def _options(loss: fx.Node) -> tuple[Any, Any]:
    """(ignore_index, label_smoothing)."""
    first, second = (4, 7) if op_name(loss) == "cross_entropy" else (4, 5)
    return (
        operand(loss, first, "ignore_index", default=-100),
        operand(loss, second, "label_smoothing", default=0.0),
    )


def _outputs(found: _Head, loss: fx.Node, *, drop: bool) -> dict[fx.Node, set[fx.Node]]:
    """Return the logits by the output that they are to be dropped from.

    Raises Refused unless the loss alone reads them otherwise.
    """
    values = [found.head, *found.chain]
    outputs: dict[fx.Node, set[fx.Node]] = {}
    for value in values:
        for user in value.users:
            if user is loss or user in values:
                continue
            if user.op != "output":
                raise Refused("its logits have other readers than the loss")
            outputs.setdefault(user, set()).add(value)
    if outputs and not drop:
        raise Refused(IS_OUTPUT)
    return outputs


def _emit(
    place: Place,
    found: _Head,
    hidden: fx.Node,
    weight: fx.Node,
    targets: fx.Node,
    reduction: str,
    account: Account,
) -> fx.Node:
    loss, dtype = place.before, known_dtype(found.head)
    ignore_index, label_smoothing = _options(loss)
    if op_name(found.head) != "linear":
        weight = place.emit(torch.ops.aten.t.default, weight)
    needs_grad = account.state(loss).grad and reduction != "none"
    needs = needs_grad, needs_grad and _requires_grad(weight)
    hidden, weight = place.cast(hidden, dtype), place.cast(weight, dtype)
    if found.scale != 1.0:
        hidden = place.emit(torch.mul, hidden, found.scale)
    hidden = _rows(place, hidden, found, targets)
    options = ignore_index, label_smoothing, 0.0, found.softcap, reduction, *needs, "fp32"
    call = place.op(OP, (hidden, weight, targets), {}, (None, *options))
    result = place.cast(place.item(call, 0), known_dtype(loss))
    check_same_form(result, loss)
    return result


def _requires_grad(weight: fx.Node) -> bool:
    """Whether a head's weight wants a gradient; what is computed from others counts as wanting."""
    while (source := unary_of(weight, "t", "transpose")) is not None:
        weight = source
    value = tensor_meta(weight)
    return weight.op != "placeholder" or value is None or value.requires_grad


def _rows(place: Place, hidden: fx.Node, found: _Head, targets: fx.Node) -> fx.Node:
    """Take of the hidden states what the model takes of the logits: [targets' shape, D]."""
    for index in reversed(found.indices):
        hidden = place.item(hidden, index)
    wanted = known_tensor(targets).shape
    if known_tensor(hidden).shape[:-1] == wanted:
        return hidden
    if len(wanted) != 1:
        raise Refused("its targets are shaped otherwise than its logits")
    return place.emit(torch.ops.aten.flatten.using_ints, hidden, 0, ndim_of(hidden) - 2)
