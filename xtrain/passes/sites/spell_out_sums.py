"""Spell out residual adds that hide in another op, so that a branch is a value of its own.

Before:  y = torch.addmm(x, h, w)              After:  m = torch.mm(h, w)
                                                       y = torch.add(x, m)
         y = torch.addcmul(x, g, h)                     m = g * h; y = torch.add(x, m)
         a, b = torch._foreach_add([x, y], [h, k])     a = torch.add(x, h); b = torch.add(y, k)
         s = torch.stack((x, h)); y = s.sum(0)         s stays for its other readers, and y has a
         z = s[1]                                      stack of its own
Stage:   Dynamo's own graph, in front of the search for residual sites.     Changes numerics: a
         product is rounded before it is added; nothing else.
Skips:   addmm and the like whose first operand the product does not depend on: biases, ALiBi,
         attention scores, low-rank updates; addcmul of factors that no product of matrices made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from xtrain.passes.graph import (
    depends_on_contraction,
    holds_contraction,
    made_of_parameters,
    may_hold_floats,
    op_name,
    operand,
    reach,
    same_shape,
    tensor_meta,
    values_of,
)
from xtrain.passes.sites.sum_readers import is_read_by_softmax_alone
from xtrain.passes.sites.sums import chain_to_stack

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
        name = op_name(node)
        found: list[fx.Node] = []
        if name in _FOREACH:
            found = [_spell_out_addcmul(n) or n for n in _spell_out_foreach(node, _FOREACH[name])]
        elif (add := _spell_out_addcmul(node)) is not None:
            found = [add]
        elif _is_residual(node):
            is_linear = name == "linear"
            found = [_spell_out_linear(node) if is_linear else _spell_out_product(node, name)]
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
    values, named = values_of((args, kwargs))
    with torch.no_grad():
        if isinstance(target, str):
            out_of_place = getattr(values[0], target.removesuffix("_"))
            node.meta["example_value"] = out_of_place(*values[1:], **named)
        else:
            node.meta["example_value"] = target(*values, **named)
    return node


def _spell_out_foreach(node: fx.Node, name: str) -> list[fx.Node]:
    """One call for each tensor of the lists; scalars, and lists of them, go along."""
    targets = operand(node, 0, "self")
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
        if op_name(user) == "getitem" and isinstance(user.args[1], int):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs), lambda n: results if n is node else n
        )
    node.graph.erase_node(node)
    return results


def summand_of(node: fx.Node) -> fx.Node | None:
    """The activation of its own shape that a product of matrices adds, or None."""
    name = op_name(node)
    if name not in _PRODUCTS and name != "linear":
        return None
    value = operand(node, *((2, "bias") if name == "linear" else (0, "input", "self")))
    if not isinstance(value, fx.Node) or not same_shape(value, node):
        return None
    return None if made_of_parameters(value) else value


def _is_residual(node: fx.Node) -> bool:
    """Whether a product is added to a value that its own factors come from.

    The value may be any form of what they come from, but for a product of matrices.
    """
    summand = summand_of(node)
    if summand is None or is_read_by_softmax_alone(node):
        return False
    streams, pending = {summand}, [summand]
    for value in pending:
        if not holds_contraction(value):
            pending += (new := [n for n in value.all_input_nodes if n not in streams])
            streams.update(n for n in new if may_hold_floats(n) and not made_of_parameters(n))
    factors = [n for n in node.all_input_nodes if n is not summand]
    return any(source in streams for source in reach(factors))


def _spell_out_product(node: fx.Node, name: str) -> fx.Node:
    first, second, product = _PRODUCTS[name]
    factors = operand(node, *first), operand(node, *second)
    branch = _call(node, product, factors)
    if name.startswith("addbmm"):
        branch = _call(node, "sum", (branch, 0))
    beta = operand(node, 3, "beta", default=1)
    alpha = operand(node, 4, "alpha", default=1)
    return _add_instead(node, operand(node, 0, "input", "self"), branch, beta, alpha)


def _spell_out_linear(node: fx.Node) -> fx.Node:
    factors = operand(node, 0, "input"), operand(node, 1, "weight")
    branch = _call(node, torch.nn.functional.linear, factors)
    return _add_instead(node, operand(node, 2, "bias"), branch, 1, 1)


def _spell_out_addcmul(node: fx.Node) -> fx.Node | None:
    """The product of two factors is one branch, whichever of them gates the other.

    Dynamo writes the forms in place that have a value as fma(product, value, x).
    """
    name = op_name(node)
    if name in ("addcmul", "addcmul_"):
        stream = operand(node, 0, "input", "self")
        factors = [operand(node, 1, "tensor1"), operand(node, 2, "tensor2")]
        value = operand(node, 3, "value", default=1)
    elif name == "fma":
        *factors, stream = node.args
        value = 1
    else:
        return None
    made = [isinstance(f, fx.Node) and depends_on_contraction(f) for f in factors]
    if not any(made) or not isinstance(stream, fx.Node):
        return None
    if name == "fma" and not isinstance(factors[1], fx.Node):
        branch, value = factors
    else:
        branch = _call(node, torch.mul, tuple(factors))
    return _add_instead(node, stream, branch, 1, value)


def _add_instead(node: fx.Node, stream: fx.Node, branch: fx.Node, beta: Any, alpha: Any) -> fx.Node:
    """Put beta * stream + alpha * branch in a node's place, in the dtype of its result."""
    in_place = op_name(node).endswith("_")
    before, after = tensor_meta(stream), tensor_meta(node)
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
    links = chain if op_name(stack) == "stack" else [*chain, *stack.all_input_nodes]
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
