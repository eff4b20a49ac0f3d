"""Swap the gated activation of GeGLU layers for xtrain.geglu or xtrain.geglu_packed.

Before:  y = gelu(g, approximate="tanh") * u       After:  y = xtrain.geglu(g, u, "tanh")
         g, u = linear(x, w).chunk(2, -1)                  y = xtrain.geglu_packed(gu, "gate_up",
         y = u * gelu(g)                                                           "none")
         a = tanh(0.79788 * (g + 0.044715 * g**3))         y = xtrain.geglu(g, u, "tanh")
         y = 0.5 * g * (1 + a) * u                 or erf(g / sqrt(2)); any order of the operands
Stage:   normalised graph.     Changes numerics: within tolerance; nothing is rounded before the
         product is. Where the model widens a spelt out gelu to fp32, so is the result, unless all
         that read it round it again.
Anchor:  a product with gelu(g), or with g / 2 * (1 + a), in either operand order.
Skips:   an activation with other readers or a cast before the product, a gate of another shape,
         other constants than gelu's (they would be another function).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from xtrain.passes.forms import Forms
from xtrain.passes.gated import Activation, swap_gated
from xtrain.passes.gelu_patterns import spelt_out_gelu
from xtrain.passes.match import unary_of
from xtrain.passes.result import PassResult


def use_triton_geglu(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the gated activations of a graph and of its bodies."""
    return swap_gated(graph, "geglu", _gelu, Forms(kernels, backend))


def _gelu(node: Any) -> Activation | None:
    if (gate := unary_of(node, "gelu")) is not None:
        return Activation(gate, {"approximate": node.kwargs.get("approximate", "none")})
    if (found := spelt_out_gelu(node)) is None:
        return None
    gate, approximate = found
    return Activation(gate, {"approximate": approximate})
