"""The values that an addend may bring into a sum: whole, gated, or in part.

x * s + h                       x, scaled: as `peel` sees it
(1 - g) * x + g * h             x, gated: a highway; both factors are candidates
x * padding + h                 x, masked
a + f(b), a, b = x.chunk(2)     x, of which a is a part: a reversible block
"""

from __future__ import annotations

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import BUFFERS, part_of, peel, same_shape

_MAX_GATES = 4


def gated_roots(node: fx.Node) -> list[fx.Node]:
    """The values that an addend holds under gates and masks, none where it is no such product."""
    found: list[fx.Node] = []
    pending = [(peel(node), 0)]
    for value, depth in pending:
        if depth:
            found.append(value)
        if depth < _MAX_GATES:
            inner = [f for f in _factors(value) if same_shape(f, value)]
            pending += [(peel(f), depth + 1) for f in inner]
    return found


def _factors(node: fx.Node) -> list[fx.Node]:
    name = fx_utils.op_name(node)
    if name in fx_utils.MUL:
        operands = [fx_utils.operand(node, 0, "input", "self"), fx_utils.operand(node, 1, "other")]
    elif name in fx_utils.DIV or name in ("masked_fill", "masked_fill_"):
        operands = [fx_utils.operand(node, 0, "input", "self")]
    elif name == "where":
        operands = [fx_utils.operand(node, 1, "input"), fx_utils.operand(node, 2, "other")]
    else:
        return []
    return [o for o in operands if isinstance(o, fx.Node)]


def wholes(node: fx.Node) -> list[fx.Node]:
    """The values that an addend is a part of, none where it is whole.

    Parts of a projection are values of their own: queries and keys, the halves of a gate.
    """
    found = []
    value = peel(node)
    while (source := part_of(value)) is not None:
        value = peel(source)
        if fx_utils.holds_contraction(value):
            break
        found.append(value)
    return found


def is_fresh(node: fx.Node) -> bool:
    """Whether a value starts empty: the first state of a recurrence, a buffer."""
    return fx_utils.op_name(node) in BUFFERS
