"""The values that an addend may bring into a sum: whole, gated, or in part.

x * s + h                       x, scaled: as `peel` sees it
(1 - g) * x + g * h             x, gated: a highway; both factors are candidates
x * padding + h                 x, masked
einsum("ij,jbtd->ibtd", a, x)   x, a stack of streams that coefficients mix
a + f(b), a, b = x.chunk(2)     x, of which a is a part: a reversible block
"""

from __future__ import annotations

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes import fx_utils
from xtrain.passes.values import (
    BUFFERS,
    form_or_norm_of,
    made_of_parameters,
    part_of,
    peel,
    same_shape,
)

_MAX_GATES = 4
_MAX_STREAMS = 16
_MOVED = frozenset({"permute", "transpose", "movedim", "swapaxes", "contiguous", "clone"})
_FLATTENED = _MOVED | {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze"}


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


def mixed_streams(node: fx.Node) -> fx.Node | None:
    """The stack of streams that a product mixes by a small square of coefficients, or None.

    H[n, B, T, D] -> sum_m a[m, n] H[m]: as many values as before, of streams that stand side by
    side (AltUp, hyper-connections). Heads, whose tokens attention mixes, are cut from one stream.
    Outside of graphs an einsum is a product of views of three dims.
    """
    result = fx_utils.tensor_meta(node)
    if fx_utils.op_name(node) not in _PRODUCTS or result is None or result.ndim < 3:
        return None
    for value in node.all_input_nodes:
        others = [n for n in node.all_input_nodes if n is not value]
        given = fx_utils.tensor_meta(value)
        if given is None or given.ndim != result.ndim or made_of_parameters(value):
            continue
        if len(others) == 1 and _is_small_square(others[0]) and _stands_side_by_side(value):
            if statically_known_true(given.numel() == result.numel()):
                return value
    return None


_PRODUCTS = frozenset({"einsum", "matmul", "bmm"})


def _is_small_square(node: fx.Node) -> bool:
    value = fx_utils.tensor_meta(node)
    if value is None or value.ndim < 2:
        return False
    rows, columns = value.shape[-2:]
    is_known = isinstance(rows, int) and isinstance(columns, int)
    return is_known and rows == columns and rows <= _MAX_STREAMS


def _stands_side_by_side(node: fx.Node) -> bool:
    """Whether a value of four dims is no other view of one of fewer, nor a projection."""
    given = fx_utils.tensor_meta(node)
    views = _MOVED if given is not None and given.ndim >= 4 else _FLATTENED
    value = node
    while fx_utils.op_name(value) in views:
        value = value.all_input_nodes[0]
    shown = fx_utils.tensor_meta(value)
    if fx_utils.holds_contraction(value) or shown is None or shown.ndim < 4:
        return False
    inner = form_or_norm_of(value)
    before, after = fx_utils.tensor_meta(inner), fx_utils.tensor_meta(value)
    return inner is None or before is None or after is None or before.ndim == after.ndim
