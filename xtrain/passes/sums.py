"""What counts as a sum of two addends: adds, differences, and the fused forms lerp and addcmul.

torch.lerp(x, h, w)            x + w * (h - x)      addends x and h
torch.addcmul(x, g, h)         x + value * g * h    addends x and the computed factor
torch.rsub(h, x)               x - h                addends h and x
"""

from __future__ import annotations

from typing import Any

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import SUB, depends_on_contraction, own_dropout, same_shape

_LERP = frozenset({"lerp", "lerp_"})
_ADDCMUL = frozenset({"addcmul", "addcmul_"})
# x - f(x) is a residual sum too.
SUM = fx_utils.ADD | SUB | _LERP | _ADDCMUL
IN_PLACE_SUM = fx_utils.IN_PLACE_ADD | {"sub_", "isub", "__isub__", "lerp_", "addcmul_"}


def sum_operands(node: fx.Node) -> tuple[Any, Any]:
    """Return the two operands of a sum that may be stream and branch.

    A factor of addcmul stands for the product: a dropped factor drops the product. None in the
    place of an operand that the node takes twice, since it cannot be replaced by itself.
    """
    name = fx_utils.op_name(node)
    if name in _ADDCMUL:
        first = fx_utils.operand(node, 0, "input", "self")
        second = _product_operand(node, first)
    elif name in _LERP:
        first, second = fx_utils.operand(node, 0, "input", "self"), fx_utils.operand(node, 1, "end")
        weight = fx_utils.operand(node, 2, "weight")
        if isinstance(weight, fx.Node) and weight in (first, second):
            return None, None
    else:
        first, second = fx_utils.add_operands(node)
    return first, second


def _product_operand(node: fx.Node, residual: fx.Node) -> fx.Node | None:
    """The factor of addcmul that has the sum's shape and holds a contraction.

    Of two, the one that the model drops itself: a dropout on the other would be a second.
    """
    factors = [fx_utils.operand(node, 1, "tensor1"), fx_utils.operand(node, 2, "tensor2")]
    if factors[0] is factors[1]:
        return None
    whole = [f for f in factors[::-1] if isinstance(f, fx.Node) and same_shape(f, node)]
    whole = [f for f in whole if depends_on_contraction(f)]
    dropped = [f for f in whole if own_dropout(f, residual) is not None]
    return next(iter(dropped + whole), None)
