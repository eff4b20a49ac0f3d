"""What counts as a sum of addends: adds and differences, fused forms, sums over stacked values.

torch.lerp(x, h, w)            x + w * (h - x)      addends x and h
torch.addcdiv(x, h, g)         x + value * h / g    addends x and h
torch.rsub(h, x)               x - h                addends h and x
x.index_add(0, i, h)           x[i] += h            addends x and h, also of other shapes
torch.stack((x, h)).sum(0)     x + h                addends x and h; mean, weights and einsum too
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.sites.stacks import stack_summed_by, stacked_values
from xtrain.passes.values import BUFFERS, SUB, is_table, same_shape

_LERP = frozenset({"lerp", "lerp_"})
_ADDCDIV = frozenset({"addcdiv", "addcdiv_"})
# Where an op that adds to parts of its first operand takes what it adds.
_SCATTERED = {"index_add": (3, "source"), "scatter_add": (3, "src"), "index_put": (2, "values")}
_SCATTERED |= {f"{name}_": where for name, where in _SCATTERED.items()}
# x - f(x) is a residual sum too.
_PAIR = fx_utils.ADD | SUB | _LERP | _ADDCDIV
IN_PLACE_SUM = fx_utils.IN_PLACE_ADD | {"sub_", "isub", "__isub__", "lerp_", "addcmul_", "addcdiv_"}
IN_PLACE_SUM |= {name for name in _SCATTERED if name.endswith("_")}


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds tensors of its own shape, floating point, of two dimensions or more.

    What is stacked has one shape, and a sum over it may keep a dim of size 1 in the stack's place.
    """
    result = fx_utils.tensor_meta(node)
    if result is None or not result.dtype.is_floating_point or result.ndim < 2:
        return False
    held = held_operands(node)
    scattered = [a for _, a in held[1:]] if fx_utils.op_name(node) in _SCATTERED else []
    return len(held) > 1 and all(
        (o := fx_utils.tensor_meta(a)) is not None
        and o.dtype.is_floating_point
        and (same_shape(a, node) or a in scattered or holder is not node)
        for holder, a in held
    )


def sum_operands(node: fx.Node) -> tuple[Any, ...]:
    """Return the operands of a sum that may be stream and branches, () for any other node.

    None in the place of one that the node takes twice, since it cannot be replaced by itself.
    """
    return tuple(operand for _, operand in held_operands(node))


def held_operands(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Return the operands of a sum, each with the node that takes it: a stack, or the sum."""
    name = fx_utils.op_name(node)
    if name in _PAIR:
        return [(node, operand) for operand in _pair(node, name)]
    if name in _SCATTERED:
        return [(node, operand) for operand in _scattered_pair(node, name)]
    stack = stack_summed_by(node)
    return [] if stack is None else stacked_values(stack)


def _pair(node: fx.Node, name: str) -> tuple[Any, Any]:
    if name in _ADDCDIV:
        first, second = (
            fx_utils.operand(node, 0, "input", "self"),
            fx_utils.operand(node, 1, "tensor1"),
        )
        return first, None if second is fx_utils.operand(node, 2, "tensor2") else second
    if name in _LERP:
        first, second = fx_utils.operand(node, 0, "input", "self"), fx_utils.operand(node, 1, "end")
        weight = fx_utils.operand(node, 2, "weight")
        if isinstance(weight, fx.Node) and weight in (first, second):
            return None, None
        return first, second
    return fx_utils.add_operands(node)


def _scattered_pair(node: fx.Node, name: str) -> tuple[Any, ...]:
    if name.startswith("index_put") and not fx_utils.operand(node, 3, "accumulate", default=False):
        return ()
    position, named = _SCATTERED[name]
    return fx_utils.operand(node, 0, "input", "self"), fx_utils.operand(node, position, named)


def is_gathered(node: fx.Node) -> bool:
    """Whether a node adds rows to a buffer that held no activation: messages, routed experts.

    Such a sum is one value, not several addends: elements of several rows meet in one of it.
    """
    if fx_utils.op_name(node) not in _SCATTERED:
        return False
    base = fx_utils.operand(node, 0, "input", "self")
    if not isinstance(base, fx.Node):
        return False
    return fx_utils.op_name(base) in BUFFERS or is_table(base) or is_gathered(base)


class Blend(NamedTuple):
    """h + c * (x - h), which is lerp(h, x, c): h stands in the sum and in a difference."""

    twice: fx.Node
    other: fx.Node
    inner: fx.Node


def blend(node: fx.Node) -> Blend | None:
    """Read a sum as a blend, None where it is none or where others read its parts."""
    if fx_utils.op_name(node) not in fx_utils.ADD | SUB:
        return None
    first, second = fx_utils.add_operands(node)
    for value, product in ((first, second), (second, first)):
        if not isinstance(product, fx.Node) or len(product.users) != 1:
            continue
        if fx_utils.op_name(product) not in fx_utils.MUL | fx_utils.DIV:
            continue
        for inner in product.all_input_nodes:
            if fx_utils.op_name(inner) not in SUB or len(inner.users) != 1:
                continue
            one, two = fx_utils.add_operands(inner)
            if one is not two and value in (one, two) and is_sum(node) and is_sum(inner):
                return Blend(value, two if one is value else one, inner)
    return None
