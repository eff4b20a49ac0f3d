"""Adds of a graph piece whose stream and branch lie in other pieces: a break cut the site."""

from __future__ import annotations

import itertools

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.sum_readers import is_no_stream
from xtrain.passes.sums import is_sum, sum_operands
from xtrain.passes.values import is_parameter, peel


def find_cut_adds(graph: fx.Graph) -> list[fx.Node]:
    """Return adds of a graph piece that look like sites whose other half lies in another piece.

    One operand is an activation that enters the piece, the other is or comes from another one and
    not from the first: after a graph break inside a branch, that is what its residual add is.
    """
    found = []
    for add in graph.nodes:
        if not is_sum(add):
            continue
        for residual, branch in itertools.permutations(sum_operands(add), 2):
            root = peel(residual)
            is_cut = _is_activation_input(root) and _depends_on_other_input(branch, root)
            if is_cut and not is_no_stream(add, root):
                found.append(add)
                break
    return found


def _is_activation_input(node: fx.Node) -> bool:
    meta = fx_utils.tensor_meta(node)
    return (
        node.op == "placeholder"
        and meta is not None
        and meta.dtype.is_floating_point
        and meta.ndim >= 2
        and not is_parameter(node)
    )


def _depends_on_other_input(branch: fx.Node, root: fx.Node) -> bool:
    seen, pending = {branch}, [branch]
    others = False
    while pending:
        node = pending.pop()
        if node is root:
            return False
        others |= _is_activation_input(node)
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return others
