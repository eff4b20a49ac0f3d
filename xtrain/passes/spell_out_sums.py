"""Spell out residual adds that hide in another op, so that a branch is a value of its own.

Before:  y = torch.addmm(x, h, w)              After:  m = torch.mm(h, w)
                                                       y = torch.add(x, m)
         a, b = torch._foreach_add([x, y], [h, k])     a = torch.add(x, h); b = torch.add(y, k)
         s = torch.stack((x, h)); y = s.sum(0)         s stays for its other readers, and y has a
         z = s[1]                                      stack of its own
Stage:   Dynamo's own graph, in front of the search for residual sites.     Changes numerics: a
         product is rounded before it is added; nothing else.
Skips:   addmm and the like whose first operand the product does not depend on: biases, ALiBi,
         attention scores, low-rank updates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.roots import gated_roots, wholes
from xtrain.passes.stacks import chain_to_stack
from xtrain.passes.sum_readers import is_read_by_softmax_alone
from xtrain.passes.values import made_of_parameters, peel, same_shape

# op -> (position of the summand, its name, positions and names of the factors, the product alone)
_PRODUCTS: dict[str, tuple[Any, ...]] = {
    "addmm": ((1, "mat1"), (2, "mat2"), torch.mm),
    "baddbmm": ((1, "batch1"), (2, "batch2"), torch.bmm),
    "addbmm": ((1, "batch1"), (2, "batch2"), torch.bmm),
}
_PRODUCTS |= {f"{name}_": entry for name, entry in _PRODUCTS.items()}
_FOREACH = {
    f"_foreach_{name}{end}": f"{name}{end}"
    for name in ("add", "sub", "lerp", "addcmul", "addcdiv")
    for end in ("", "_")
}


def spell_out_sums(graph: fx.Graph) -> dict[fx.Node, str]:
    """Rewrite the hidden adds of one graph, in place; each new add -> the name of the op it was."""
    adds: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        name = fx_utils.op_name(node)
        found: list[fx.Node] = []
        if name in _FOREACH:
            found = _spell_out_foreach(node, _FOREACH[name])
        elif name in _PRODUCTS and _is_residual(node):
            found = [_spell_out_product(node, name)]
        elif name == "linear" and _is_residual(node, 2):
            found = [_spell_out_linear(node)]
        elif chain := chain_to_stack(node):
            _give_own_stack(node, chain)
        adds |= dict.fromkeys(found, node.name)
    return adds


def _call(like: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """A call in front of a node, with the value that its operands give it."""
    graph = like.graph
    with graph.inserting_before(like):
        if isinstance(target, str):
            node = graph.call_method(target, args, kwargs)
        else:
            node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("example_value", "val")}
    values, named = fx.node.map_arg((args, kwargs), fx_utils.tensor_meta)
    with torch.no_grad():
        if isinstance(target, str):
            out_of_place = getattr(values[0], target.removesuffix("_"))
            node.meta["example_value"] = out_of_place(*values[1:], **named)
        else:
            node.meta["example_value"] = target(*values, **named)
    return node


def _spell_out_foreach(node: fx.Node, name: str) -> list[fx.Node]:
    """One call for each tensor of the lists; scalars, and lists of them, go along."""
    targets = fx_utils.operand(node, 0, "self")
    if not isinstance(targets, list | tuple) or not all(isinstance(t, fx.Node) for t in targets):
        return []

    def of(i: int, argument: Any) -> Any:
        return argument[i] if isinstance(argument, list | tuple) else argument

    results = []
    for i, target in enumerate(targets):
        args = [target, *(of(i, a) for a in node.args[1:])]
        named = {k: of(i, v) for k, v in node.kwargs.items() if k != "self"}
        if name.startswith("addc") and len(args) > 3:
            named["value"] = args.pop()
        spelt = name if name.endswith("_") else getattr(torch, name)
        results.append(_call(node, spelt, tuple(args), **named))
    for user in list(node.users):
        if fx_utils.op_name(user) == "getitem" and isinstance(user.args[1], int):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs), lambda n: results if n is node else n
        )
    node.graph.erase_node(node)
    return results


def _is_residual(node: fx.Node, position: int = 0) -> bool:
    """Whether a product is added to a value that its own factors come from."""
    summand = fx_utils.operand(node, position, "bias" if position else "input", "self")
    if not isinstance(summand, fx.Node) or not same_shape(summand, node):
        return False
    if made_of_parameters(summand) or is_read_by_softmax_alone(node):
        return False
    streams = {peel(summand), *gated_roots(summand), *wholes(summand)}
    seen = {n for n in node.all_input_nodes if n is not summand}
    pending = list(seen)
    for source in pending:
        if source in streams or peel(source) in streams:
            return True
        pending += (new := [n for n in source.all_input_nodes if n not in seen])
        seen.update(new)
    return False


def _spell_out_product(node: fx.Node, name: str) -> fx.Node:
    first, second, product = _PRODUCTS[name]
    factors = fx_utils.operand(node, *first), fx_utils.operand(node, *second)
    branch = _call(node, product, factors)
    if name.startswith("addbmm"):
        branch = _call(node, "sum", (branch, 0))
    beta = fx_utils.operand(node, 3, "beta", default=1)
    alpha = fx_utils.operand(node, 4, "alpha", default=1)
    return _add_instead(node, fx_utils.operand(node, 0, "input", "self"), branch, beta, alpha)


def _spell_out_linear(node: fx.Node) -> fx.Node:
    factors = fx_utils.operand(node, 0, "input"), fx_utils.operand(node, 1, "weight")
    branch = _call(node, torch.nn.functional.linear, factors)
    return _add_instead(node, fx_utils.operand(node, 2, "bias"), branch, 1, 1)


def _add_instead(node: fx.Node, stream: fx.Node, branch: fx.Node, beta: Any, alpha: Any) -> fx.Node:
    """Put beta * stream + alpha * branch in a node's place, in the dtype of its result."""
    in_place = fx_utils.op_name(node).endswith("_")
    before, after = fx_utils.tensor_meta(stream), fx_utils.tensor_meta(node)
    assert before is not None and after is not None
    if not in_place and before.dtype != after.dtype:  # autocast casts what it multiplies
        stream = _call(node, "to", (stream, after.dtype))
    if beta != 1:
        stream = _call(node, "mul_" if in_place else torch.mul, (stream, beta))
    named = {} if alpha == 1 else {"alpha": alpha}
    total = _call(node, "add_" if in_place else torch.add, (stream, branch), **named)
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)
    return total


def _give_own_stack(node: fx.Node, chain: list[fx.Node]) -> None:
    """Copy what lies between a sum and the stacked values where it is read by others too."""
    stack = chain[-1]
    links = chain if fx_utils.op_name(stack) == "stack" else [*chain, *stack.all_input_nodes]
    if all(len(link.users) == 1 for link in links):
        return
    copies: dict[fx.Node, fx.Node] = {}
    graph = node.graph
    for link in reversed(links):
        with graph.inserting_before(node):
            copies[link] = graph.node_copy(link, lambda n: copies.get(n, n))
    node.replace_input_with(chain[0], copies[chain[0]])
    for link in links:
        if not link.users:
            graph.erase_node(link)
