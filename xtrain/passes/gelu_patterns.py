"""How a GELU is spelt out: g / 2 * (1 + tanh(...)) or erf(...), in any order of the operands.

What stands inside of the function is read as a polynomial in the gate, so that k * (g + c * g**3),
g * k * (1 + c * g * g) and the like are one pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from xtrain.passes.fx_utils import op_name, operand
from xtrain.passes.match import (
    add_of,
    div_of,
    dtype_of,
    is_number,
    mul_of,
    sub_of,
    unary_of,
    unwidened,
)

Polynomial = dict[int, float]  # power of the gate -> coefficient

_K = math.sqrt(2 / math.pi)
# function of the spelt out gelu -> (approximate, what stands inside of it)
_INSIDE = {
    "tanh": ("tanh", {1: _K, 3: 0.044715 * _K}),
    "erf": ("none", {1: math.sqrt(0.5)}),
}


def spelt_out_gelu(node: Any) -> tuple[fx.Node, str] | None:
    """Return (gate, approximate) when a node is a gelu that is written out, else None."""
    scale, product = list(_scaled(node))[-1]
    factors = mul_of(product)
    for share, rest in () if factors is None else (factors, factors[::-1]):
        share_scale, one_plus = list(_scaled(share))[-1]
        for name, (approximate, inside) in _INSIDE.items():
            a = _one_plus(one_plus, name)
            if a is None:
                continue
            for gate_scale, gate in _scaled(rest):
                whole = {0: scale * share_scale * gate_scale}
                tight = dtype_of(node) == torch.float64
                if _equal(whole, {0: 0.5}, tight) and _equal(_polynomial(a, gate), inside, tight):
                    return gate, approximate
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
    addends = add_of(node)
    for one, function in () if addends is None else (addends, addends[::-1]):
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

    if (pair := add_of(node)) is not None:
        a, b = of(pair[0]), of(pair[1])
        return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in a | b} if a and b else {}
    if (pair := sub_of(node)) is not None:
        a, b = of(pair[0]), of(pair[1])
        return {k: a.get(k, 0.0) - b.get(k, 0.0) for k in a | b} if a and b else {}
    if (pair := mul_of(node)) is not None:
        return _times(of(pair[0]), of(pair[1]))
    if (pair := div_of(node)) is not None and is_number(pair[1]) and pair[1] != 0:
        return _times(of(pair[0]), {0: 1 / pair[1]})
    if op_name(node) in ("pow", "__pow__") and operand(node, 1, "exponent") in (2, 3):
        base = of(operand(node, 0, "input", "self"))
        square = _times(base, base)
        return square if operand(node, 1, "exponent") == 2 else _times(square, base)
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
