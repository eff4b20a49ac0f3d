"""Adds to one stream of a block whose branch reads another: a block's graph does not tie them."""

from __future__ import annotations

import itertools

from torch import fx

from xtrain.passes.residual_sites import find_residual_sites
from xtrain.passes.sums import is_sum, sum_operands
from xtrain.passes.values import depends_on_contraction, is_activation_input, peel


def find_crossed_adds(graph: fx.Graph) -> list[fx.Node]:
    """Return adds to a stream that enters a block, of a branch that reads another such one alone.

    A reversible block that takes its halves apart: a + f(b), b + g(a). Whether a comes from b is
    seen in the whole model only. What is no stream (an encoder's states, a condition) has no site.
    """
    streams = {peel(site.residual) for site in find_residual_sites(graph)}
    found = []
    for add in filter(is_sum, graph.nodes):
        for residual, branch in itertools.permutations(sum_operands(add), 2):
            root = peel(residual)
            if not is_activation_input(root) or not depends_on_contraction(branch):
                continue
            inputs = _inputs_of(branch)
            if root not in inputs and not inputs.isdisjoint(streams):
                found.append(add)
                break
    return found


def _inputs_of(value: fx.Node) -> set[fx.Node]:
    """The activations that enter a graph and that a value comes from."""
    seen, pending = {value}, [value]
    for node in pending:
        pending += (new := [n for n in node.all_input_nodes if n not in seen])
        seen.update(new)
    return set(filter(is_activation_input, seen))
