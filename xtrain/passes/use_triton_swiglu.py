"""Swap the gated activation of SwiGLU layers for xtrain.swiglu or xtrain.swiglu_packed.

Before:  g, u = linear(x, wg), linear(x, wu)       After:  y = xtrain.swiglu(g, u)
         y = silu(g) * u
         g, u = linear(x, w).chunk(2, -1)                  y = xtrain.swiglu_packed(gu, "gate_up")
         y = u * silu(g)
Stage:   normalised graph.     Changes numerics: within tolerance; silu is not rounded before the
         product.
Anchor:  a product with silu(g), or with g * sigmoid(g), in either operand order.
Skips:   an activation with other readers or a cast before the product, a gate of another shape,
         gates of other functions (GeGLU).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from xtrain.ops import OPS
from xtrain.passes.forms import Forms, check_same_form, emit_op, replace, values_of
from xtrain.passes.fx_utils import tensor_meta
from xtrain.passes.match import (
    Refused,
    Writes,
    mul_of,
    part_of_last_dim,
    unary_of,
    uncast,
)
from xtrain.passes.result import PassResult
from xtrain.passes.swap import swap_each

OP, OP_PACKED = OPS["swiglu"], OPS["swiglu_packed"]


def use_triton_swiglu(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the gated activations of a graph and of its bodies."""
    forms = Forms(kernels, backend)

    def swap(node: fx.Node, writes: Writes) -> str | None:
        found = _match(node)
        if found is None:
            return None
        gate, up, inner = found
        writes.refuse(gate, up)
        return _swap(node, gate, up, inner, forms)

    return swap_each(graph, swap)


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, list[Any]] | None:
    """Return (gate, up, inner nodes) when a node is silu(gate) * up."""
    factors = mul_of(node)
    if factors is None:
        return None
    for activation, up in (factors, factors[::-1]):
        rounded, activation = activation, uncast(activation)
        gate, sigmoid = _gate_of(activation)
        if gate is None or tensor_meta(up) is None:
            continue
        if up is sigmoid or activation is up:
            continue  # the inner product of a spelt out silu; a square
        if rounded is not activation:
            raise Refused("the activation changes dtype before the product")
        if len(activation.users) > 1:
            raise Refused("the activation has other readers than the product")
        a, b = tensor_meta(gate), tensor_meta(up)
        assert a is not None and b is not None
        if a.shape != b.shape:
            raise Refused("gate and up differ in shape")
        return gate, up, [activation, sigmoid]
    return None


def _gate_of(activation: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Return (g, sigmoid node or None) when a node is silu(g), else (None, None)."""
    if (gate := unary_of(activation, "silu", "swish")) is not None:
        return gate, None
    factors = mul_of(activation)
    for gate, sigmoid in () if factors is None else (factors, factors[::-1]):
        if isinstance(gate, fx.Node) and unary_of(sigmoid, "sigmoid") is gate:
            return gate, sigmoid
    return None, None


def _swap(node: fx.Node, gate: fx.Node, up: fx.Node, inner: list[Any], forms: Forms) -> str:
    packed = _packed(gate, up)
    op, options = OP, {}
    inputs: tuple[fx.Node, ...] = (gate, up)
    if packed is not None:
        op, inputs, options = OP_PACKED, packed[:1], {"order": packed[1]}
    opaque, form = forms.choose(op, *values_of(inputs), **options)
    with node.graph.inserting_before(node):
        y = emit_op(node.graph, op, (*inputs, *options.values()), node, opaque=opaque)
    check_same_form(y, node)
    pieces = [] if packed is None else [gate, up, *gate.all_input_nodes, *up.all_input_nodes]
    replace(node, y, [n for n in (*inner, *pieces) if n is not None and n not in inputs])
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
