"""Swap act(gate) * up for one of the gated ops; the passes of the families say what act is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.passes.account import Account
from xtrain.passes.forms import Forms, check_same_form, emit_cast, emit_op, values_of
from xtrain.passes.fx_utils import tensor_meta
from xtrain.passes.match import (
    Refused,
    known_dtype,
    mul_of,
    part_of_last_dim,
    rounds_to,
    uncast,
    unwidened,
)
from xtrain.passes.result import PassResult
from xtrain.passes.swap import swap_each


@dataclass
class Activation:
    """An activation as found: what it is of, and the options of its op."""

    gate: fx.Node
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Gated:
    gate: fx.Node
    up: fx.Node
    activation: Activation


def swap_gated(
    graph: fx.Graph,
    family: str,
    activation_of: Callable[[Any], Activation | None],
    forms: Forms,
) -> PassResult:
    """Swap the products with an activation, in a graph and its bodies, for the ops of a family."""

    def swap(node: fx.Node, account: Account) -> str | None:
        found = _match(node, activation_of)
        return None if found is None else _swap(node, found, family, forms, account)

    return swap_each(graph, swap)


def _match(node: fx.Node, activation_of: Callable[[Any], Activation | None]) -> _Gated | None:
    """Find the gate and what it multiplies when a node is act(gate) * up."""
    factors = mul_of(node)
    if factors is None:
        return None
    for rounded, up in (factors, factors[::-1]):
        activated = uncast(rounded)
        activation = activation_of(activated)
        if activation is None or tensor_meta(up) is None:
            continue
        if activated is up or _is_between(up, activated, activation.gate):
            continue  # a square; an inner product of an activation that is spelt out
        if rounded is not activated:
            raise Refused("the activation changes dtype before the product")
        if len(activated.users) > 1:
            raise Refused("the activation has other readers than the product")
        a, b = tensor_meta(activation.gate), tensor_meta(up)
        assert a is not None and b is not None
        if a.shape != b.shape:
            raise Refused("gate and up differ in shape")
        return _Gated(activation.gate, up, activation)
    return None


def _is_between(value: fx.Node, activated: fx.Node, gate: fx.Node) -> bool:
    """Whether an activation is computed from its gate by way of a value."""
    pending, seen = [activated], {gate, unwidened(gate)}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        if node is value:
            return True
        seen.add(node)
        pending += node.all_input_nodes
    return False


def _swap(node: fx.Node, found: _Gated, family: str, forms: Forms, account: Account) -> str:
    gate, up = found.gate, found.up
    graph, options = node.graph, dict(found.activation.options)
    dtype = torch.promote_types(known_dtype(gate), known_dtype(up))
    # An activation that is spelt out may be wider than its gate: autocast computes powers in fp32.
    wider = known_dtype(node) != dtype and rounds_to(node) != dtype
    packed = None if wider else _packed(gate, up)
    op = OPS[family]
    inputs: tuple[fx.Node, ...] = (gate, up)
    with graph.inserting_before(node):
        if packed is not None:
            op, inputs = OPS[f"{family}_packed"], packed[:1]
            options = {"order": packed[1], **options}
        elif wider:
            dtype = known_dtype(node)
            inputs = (emit_cast(graph, gate, dtype, node), up)
        opaque, form = forms.choose(op, *values_of(inputs), **options)
        y = emit_op(graph, op, (*inputs, *options.values()), node, opaque=opaque)
    check_same_form(y, node, dtype=dtype)
    account.settle({node: y})
    return form


def _packed(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, str] | None:
    """Return (whole, order) when gate and up are the two halves of one tensor."""
    a, b = part_of_last_dim(gate), part_of_last_dim(up)
    if a is None or b is None or a[0] is not b[0]:
        return None
    value = tensor_meta(a[0])
    assert value is not None
    half, odd = divmod(value.shape[-1], 2)
    if odd:
        return None
    cuts = {(0, half, half, 2 * half): "gate_up", (half, 2 * half, 0, half): "up_gate"}
    order = cuts.get((a[1], a[2], b[1], b[2]))
    return None if order is None else (a[0], order)
