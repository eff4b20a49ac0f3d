"""Swap the gated activation of SwiGLU layers for xtrain.swiglu or xtrain.swiglu_packed.

Before:  g, u = linear(x, wg), linear(x, wu)       After:  y = xtrain.swiglu(g, u)
         y = silu(g) * u
         g, u = linear(x, w).chunk(2, -1)                  y = xtrain.swiglu_packed(gu, "gate_up")
         y = u * silu(g)
Stage:   normalised graph.     Changes numerics: within tolerance; silu is not rounded before the
         product.
Anchor:  a product with silu(g), or with g * sigmoid(g), in either operand order.
Skips:   an activation with other readers or a cast before the product, a gate of another shape,
         gates of other functions.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from xtrain.passes.forms import Forms
from xtrain.passes.gated import Activation, swap_gated
from xtrain.passes.match import mul_of, unary_of
from xtrain.passes.result import PassResult


def use_triton_swiglu(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the gated activations of a graph and of its bodies."""
    return swap_gated(graph, "swiglu", _silu, Forms(kernels, backend))


def _silu(node: Any) -> Activation | None:
    if (gate := unary_of(node, "silu", "swish")) is not None:
        return Activation(gate)
    factors = mul_of(node)
    for gate, sigmoid in () if factors is None else (factors, factors[::-1]):
        if isinstance(gate, fx.Node) and unary_of(sigmoid, "sigmoid") is gate:
            return Activation(gate)
    return None
