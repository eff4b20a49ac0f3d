"""Swap the gated activations of SwiGLU and GeGLU layers for xtrain.swiglu and xtrain.geglu.

Before:  g, u = linear(x, wg), linear(x, wu)       After:  y = xtrain.swiglu(g, u)
         y = silu(g) * u
         g, u = linear(x, w).chunk(2, -1)                  y = xtrain.swiglu_packed(gu, "gate_up")
         y = u * silu(g)
         y = gelu(g, approximate="tanh") * u               y = xtrain.geglu(g, u, "tanh")
         a = tanh(0.79788 * (g + 0.044715 * g**3))         y = xtrain.geglu(g, u, "tanh")
         y = 0.5 * g * (1 + a) * u                 or erf(g / sqrt(2)); any order of the operands
Stage:   normalised graph.     Changes numerics: within tolerance; nothing is rounded before the
         product is. Where the model widens a spelt out gelu to fp32, so is the result, unless all
         that read it round it again.
Anchor:  a product with silu(g), g * sigmoid(g), gelu(g) or g / 2 * (1 + a), in either order.
Skips:   an activation with other readers or a cast before the product, a gate of another shape,
         gates of other functions, other constants than gelu's (they would be another function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.passes.graph import (
    Refused,
    dtype_of,
    known_dtype,
    known_tensor,
    op_name,
    operand,
    reach,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.match import (
    add_of,
    both_orders,
    div_of,
    is_number,
    mul_of,
    part_of_last_dim,
    rounds_to,
    sub_of,
    unary_of,
    uncast,
    unwidened,
)
from xtrain.passes.swaps.rewrite import Forms, Place, check_same_form, swap_each


class Activation(NamedTuple):
    """An activation as found: what it is of, and the options of its op."""

    gate: fx.Node
    options: dict[str, Any]


ActivationOf = Callable[[Any], Activation | None]


def use_triton_swiglu(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the products with a silu of a graph and of its bodies."""
    return _swap_gated(graph, "swiglu", _silu, Forms(kernels, backend))


def use_triton_geglu(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the products with a gelu of a graph and of its bodies."""
    return _swap_gated(graph, "geglu", _gelu, Forms(kernels, backend))


def _silu(node: Any) -> Activation | None:
    if (gate := unary_of(node, "silu", "swish")) is not None:
        return Activation(gate, {})
    for gate, sigmoid in both_orders(mul_of(node)):
        if isinstance(gate, fx.Node) and unary_of(sigmoid, "sigmoid") is gate:
            return Activation(gate, {})
    return None


def _gelu(node: Any) -> Activation | None:
    if (gate := unary_of(node, "gelu")) is not None:
        return Activation(gate, {"approximate": node.kwargs.get("approximate", "none")})
    return _spelt_out_gelu(node)


def _swap_gated(
    graph: fx.Graph, family: str, activation_of: ActivationOf, forms: Forms
) -> PassResult:
    def swap(node: fx.Node, account: Account) -> str | None:
        found = _match(node, activation_of)
        return None if found is None else _swap(node, *found, family, forms, account)

    return swap_each(graph, swap)


def _match(node: fx.Node, activation_of: ActivationOf) -> tuple[Activation, fx.Node] | None:
    """Return (activation, up) when a node is act(gate) * up."""
    for rounded, up in both_orders(mul_of(node)):
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
        return activation, up
    return None


def _is_between(value: fx.Node, activated: fx.Node, gate: fx.Node) -> bool:
    """Whether an activation is computed from its gate by way of a value."""
    start = gate, unwidened(gate)
    between = reach([activated], lambda n: [m for m in n.all_input_nodes if m not in start])
    return value in between


def _swap(
    node: fx.Node,
    activation: Activation,
    up: fx.Node,
    family: str,
    forms: Forms,
    account: Account,
) -> str:
    gate, options = activation
    place = Place(node, forms)
    dtype = torch.promote_types(known_dtype(gate), known_dtype(up))
    # An activation that is spelt out may be wider than its gate: autocast computes powers in fp32.
    if known_dtype(node) != dtype and rounds_to(node) != dtype:
        dtype = known_dtype(node)
        y = place.op(OPS[family], (place.cast(gate, dtype), up), options)
    elif (packed := _packed(gate, up)) is not None:
        whole, order = packed
        y = place.op(OPS[f"{family}_packed"], (whole,), {"order": order, **options})
    else:
        y = place.op(OPS[family], (gate, up), options)
    check_same_form(y, node, dtype=dtype)
    account.settle({node: y})
    return place.form


def _packed(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, str] | None:
    """Return (whole, order) when gate and up are the two halves of one tensor."""
    a, b = part_of_last_dim(gate), part_of_last_dim(up)
    if a is None or b is None or a[0] is not b[0]:
        return None
    half, odd = divmod(known_tensor(a[0]).shape[-1], 2)
    if odd:
        return None
    cuts = {(0, half, half, 2 * half): "gate_up", (half, 2 * half, 0, half): "up_gate"}
    order = cuts.get((a[1], a[2], b[1], b[2]))
    return None if order is None else (a[0], order)


# --- gelu, spelt out: g / 2 * (1 + tanh(...)) or erf(...) -----------------------------------------

# What stands inside of the function is read as a polynomial in the gate, so that
# k * (g + c * g**3), g * k * (1 + c * g * g) and the like are one pattern.
Polynomial = dict[int, float]  # power of the gate -> coefficient

_K = math.sqrt(2 / math.pi)
# function of the spelt out gelu -> (approximate, what stands inside of it)
_INSIDE = {
    "tanh": ("tanh", {1: _K, 3: 0.044715 * _K}),
    "erf": ("none", {1: math.sqrt(0.5)}),
}


def _spelt_out_gelu(node: Any) -> Activation | None:
    scale, product = list(_scaled(node))[-1]
    for share, rest in both_orders(mul_of(product)):
        share_scale, one_plus = list(_scaled(share))[-1]
        for name, (approximate, inside) in _INSIDE.items():
            a = _one_plus(one_plus, name)
            if a is None:
                continue
            for gate_scale, gate in _scaled(rest):
                whole = {0: scale * share_scale * gate_scale}
                tight = dtype_of(node) == torch.float64
                if _equal(whole, {0: 0.5}, tight) and _equal(_polynomial(a, gate), inside, tight):
                    return Activation(gate, {"approximate": approximate})
    return None


def _scaled(node: Any) -> Iterator[tuple[float, Any]]:
    """Yield (c, x) with node = c * x for the node itself and behind each number that scales it."""
    scale = 1.0
    while True:
        yield scale, node
        factors, quotient = mul_of(node), div_of(node)
        if quotient is not None and is_number(quotient[1]) and quotient[1] != 0:
            node, scale = quotient[0], scale / quotient[1]
        elif factors is not None and any(map(is_number, factors)):
            number, node = factors if is_number(factors[0]) else factors[::-1]
            scale *= number
        else:
            return


def _one_plus(node: Any, name: str) -> Any:
    """Return a when a node is 1 + name(a), else None."""
    for one, function in both_orders(add_of(node)):
        if is_number(one) and one == 1 and (a := unary_of(unwidened(function), name)) is not None:
            return a
    return None


def _polynomial(node: Any, x: fx.Node, depth: int = 8) -> Polynomial:
    """Return a node as a polynomial in x of degree 3 at most, {} if it is none."""
    if is_number(node):
        return {0: float(node)}
    if not isinstance(node, fx.Node) or depth == 0:
        return {}
    if unwidened(node) is unwidened(x):
        return {1: 1.0}
    node = unwidened(node)

    def of(value: Any) -> Polynomial:
        return _polynomial(value, x, depth - 1)

    for pair, sign in ((add_of(node), 1), (sub_of(node), -1)):
        if pair is not None:
            a, b = of(pair[0]), of(pair[1])
            return {k: a.get(k, 0.0) + sign * b.get(k, 0.0) for k in a | b} if a and b else {}
    if (pair := mul_of(node)) is not None:
        return _times(of(pair[0]), of(pair[1]))
    if (pair := div_of(node)) is not None and is_number(pair[1]) and pair[1] != 0:
        return _times(of(pair[0]), {0: 1 / pair[1]})
    if op_name(node) in ("pow", "__pow__") and (power := operand(node, 1, "exponent")) in (2, 3):
        base = of(operand(node, 0, "input", "self"))
        square = _times(base, base)
        return square if power == 2 else _times(square, base)
    return {}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for i, p in a.items():
        for j, q in b.items():
            product[i + j] = product.get(i + j, 0.0) + p * q
    return product if all(power <= 3 for power in product) else {}


def _equal(a: Polynomial, b: Polynomial, tight: bool) -> bool:
    """Whether constants are gelu's, as written with ten digits, or in fp64 to the last but few."""
    tolerance = 1e-15 if tight else 1e-8
    return a.keys() == b.keys() and all(math.isclose(a[k], b[k], rel_tol=tolerance) for k in a)
