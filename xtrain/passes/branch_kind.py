"""Name a residual branch by what it does: attention, cross-attention, or anything else."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import made_of_parameters
from xtrain.rng import ATTENTION, CROSS_ATTENTION, FEED_FORWARD


def branch_kind(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Return "attention", "cross_attention" or "feed_forward".

    Args:     members: the branch's nodes, nearest the add first.
              own: what depends on the residual stream. Keys that do not depend on it (an encoder's
              states) make it cross-attention.
    """
    for node in members:
        if fx_utils.op_name(node) in fx_utils.ATTENTION:
            return ATTENTION if fx_utils.operand(node, 1, "key") in own else CROSS_ATTENTION
        for body in fx_utils.called_bodies(node):
            kind = branch_kind(list(reversed(body.graph.nodes)), _own_inside(node, body, own))
            if kind != FEED_FORWARD:
                return kind
    return _kind_of_spelt_out_attention(members, own)


def _own_inside(call: fx.Node, body: fx.GraphModule, own: Container[fx.Node]) -> set[fx.Node]:
    """The nodes of a called body that depend on the residual stream outside it."""
    operands = fx_utils.body_operands(call)
    if not operands:  # control flow: what its body is given stays unknown
        return set(body.graph.nodes)
    found: set[fx.Node] = set()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            depends = operands.get(node) in own
        else:
            depends = any(source in found for source in node.all_input_nodes)
        if depends:
            found.add(node)
    return found


def _kind_of_spelt_out_attention(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Tell matmul + softmax + matmul from a router's softmax: attention multiplies two values.

    The product of two values before the softmax, neither of them a parameter, is queries x keys.
    Scores may be a sum of products: those with positions (XLNet) tell nothing of keys.
    """
    names = [fx_utils.op_name(n) for n in members]
    after = next((i for i, name in enumerate(names) if name in fx_utils.SOFTMAX), len(members))
    kind = FEED_FORWARD
    for node in members[after:]:
        if fx_utils.op_name(node) in fx_utils.CONTRACTION:
            added = fx_utils.operand(node, 0, "input") if _adds_its_first(node) else None
            values = [n for n in node.all_input_nodes if n is not added]
            values = [n for n in values if n in own or not made_of_parameters(n)]
            if len(values) >= 2:
                if all(n in own for n in values):
                    return ATTENTION
                kind = CROSS_ATTENTION
    return kind


def _adds_its_first(node: fx.Node) -> bool:
    """Whether a contraction adds its first operand to the product: a bias, such as ALiBi's."""
    return fx_utils.op_name(node) in ("baddbmm", "addbmm", "addmm")
