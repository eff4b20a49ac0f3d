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
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.passes.fx_utils import op_name, operand, tensor_meta
from xtrain.passes.match import (
    Refused,
    cast_source,
    div_of,
    is_number,
    known_dtype,
    mul_of,
    unary_of,
)
from xtrain.passes.result import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.forms import (
    Forms,
    check_same_form,
    emit,
    emit_cast,
    emit_getitem,
    emit_op,
    values_of,
)
from xtrain.passes.swaps.swap import swap_each

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
    chain: list[fx.Node]
    softcap: float | None = None
    scale: float = 1.0
    indices: list[Any] = field(default_factory=list)  # taken of [.., V], in running order


def use_triton_linear_cross_entropy(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor", logits: str = "keep"
) -> PassResult:
    """Swap heads with their losses in a graph and its bodies; logits: "keep" | "drop" outputs."""
    forms = Forms(kernels, backend)

    def swap(node: fx.Node, account: Account) -> str | None:
        if op_name(node) not in ("cross_entropy", "cross_entropy_loss"):
            return None
        found = _head_of(operand(node, 0, "input", "self"))
        hidden, weight = _operands(found.head)
        targets, reduction = _arguments(node)
        outputs = _outputs(found, node, drop=logits == "drop")
        form, result = _emit(node, found, hidden, weight, targets, reduction, forms, account)
        account.prove({node: result})
        for output, dropped in outputs.items():
            output.args = fx.node.map_arg(output.args, lambda n, d=dropped: None if n in d else n)  # type: ignore[misc]
        account.settle({node: result})
        return form

    return swap_each(graph, swap)


def _head_of(logits: Any) -> _Head:
    """Walk from what the loss reads up to the head. Raises Refused where something else is met."""
    chain: list[fx.Node] = []
    softcap: float | None = None
    scale = 1.0
    indices: list[Any] = []
    node = logits
    while isinstance(node, fx.Node):
        if op_name(node) in ("linear", "matmul", "mm"):
            return _Head(node, chain, softcap, scale, indices[::-1])
        inner: Any = cast_source(node)
        if inner is None:
            inner = unary_of(node, *_RESHAPES)
        if inner is None and (capped := _capped(node)) is not None and softcap is None:
            inner, softcap, between = capped
            chain += between
            if scale != 1.0:
                raise Refused("its logits are scaled behind the soft-cap")
        if inner is None and (scaled := _scaled(node)) is not None:
            inner, scale = scaled[0], scale * scaled[1]
        if inner is None and op_name(node) == "getitem" and _keeps_classes(node):
            inner = node.args[0]
            indices.append(node.args[1])
        if inner is None:
            break
        if indices and unary_of(node, "view", "reshape", "flatten", "_unsafe_view") is not None:
            raise Refused("tokens are taken from logits that were reshaped")
        chain.append(node)
        node = inner
    raise Refused("its logits do not come from a linear head alone")


def _capped(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Return (x, cap, inner nodes) when a node is cap * tanh(x / cap)."""
    for bent, cap in _both_ways(mul_of(node)):
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
        pairs = [pair for pair in _both_ways(mul_of(node)) if is_number(pair[1])]
        if not pairs:
            return None
        value, scale = pairs[0]
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise Refused("its logits are scaled by a number that is no power of two")
    return (value, float(scale)) if isinstance(value, fx.Node) else None


def _both_ways(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    return () if pair is None else (pair, pair[::-1])


def _keeps_classes(node: fx.Node) -> bool:
    """Whether an index takes tokens and leaves the last dim whole."""
    source, index = node.args
    value = tensor_meta(source)
    if value is None or not isinstance(index, tuple):
        return False
    if any(p is not Ellipsis and not isinstance(p, slice) for p in index):
        return False
    if Ellipsis in index:
        return index[-1] in (Ellipsis, slice(None))
    return len(index) < value.ndim or index[-1] == slice(None)


def _operands(head: fx.Node) -> tuple[fx.Node, fx.Node]:
    hidden, weight = operand(head, 0, "input", "self"), operand(head, 1, "weight", "other", "mat2")
    value = tensor_meta(weight)
    if value is None or tensor_meta(hidden) is None or value.ndim != 2:
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
    loss: fx.Node,
    found: _Head,
    hidden: fx.Node,
    weight: fx.Node,
    targets: fx.Node,
    reduction: str,
    forms: Forms,
    account: Account,
) -> tuple[str, fx.Node]:
    graph, dtype = loss.graph, known_dtype(found.head)
    ignore_index, label_smoothing = _options(loss)
    with graph.inserting_before(loss):
        if op_name(found.head) != "linear":
            weight = emit(graph, torch.ops.aten.t.default, (weight,), loss)
        needs_grad = account.state(loss).grad and reduction != "none"
        needs = needs_grad, needs_grad and _requires_grad(weight)
        hidden, weight = (emit_cast(graph, x, dtype, loss) for x in (hidden, weight))
        if found.scale != 1.0:
            hidden = emit(graph, torch.mul, (hidden, found.scale), loss)
        hidden = _rows(hidden, found, targets, loss)
        opaque, form = forms.choose(OP, *values_of((hidden, weight, targets)))
        options = (ignore_index, label_smoothing, 0.0, found.softcap, reduction, *needs, "fp32")
        call = emit_op(graph, OP, (hidden, weight, targets, None, *options), loss, opaque=opaque)
        result = emit_getitem(graph, call, 0, loss)
        result = emit_cast(graph, result, known_dtype(loss), loss)
    check_same_form(result, loss)
    return form, result


def _requires_grad(weight: fx.Node) -> bool:
    """Whether a head's weight wants a gradient; what is computed from others counts as wanting."""
    while (source := unary_of(weight, "t", "transpose")) is not None:
        weight = source
    value = tensor_meta(weight)
    return weight.op != "placeholder" or value is None or value.requires_grad


def _rows(hidden: fx.Node, found: _Head, targets: fx.Node, like: fx.Node) -> fx.Node:
    """Take of the hidden states what the model takes of the logits: [targets' shape, D]."""
    graph = like.graph
    for index in found.indices:
        hidden = emit(graph, operator.getitem, (hidden, index), like)
    value, wanted = tensor_meta(hidden), tensor_meta(targets)
    assert value is not None and wanted is not None
    if value.shape[:-1] == wanted.shape:
        return hidden
    if wanted.ndim != 1:
        raise Refused("its targets are shaped otherwise than its logits")
    flat = (hidden, 0, value.ndim - 2)
    return emit(graph, torch.ops.aten.flatten.using_ints, flat, like)
