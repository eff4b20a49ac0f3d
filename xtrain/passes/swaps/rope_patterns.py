"""Recognise rotary position embedding in the spellings that models use.

    whole         x * cos + rotate(x) * sin           rotate(x) = cat(-x2, x1), or -odd and even
                                                      interleaved; cos and sin as wide as x
    in parts      cat(x1 * cos - x2 * sin,            or stacked and flattened for the interleaved
                      x2 * cos + x1 * sin)            layout; cos and sin half as wide
    turned back   + for - and - for +                 the same with -sin; rotate(x) = cat(x2, -x1)
    complex       view_as_real(view_as_complex(pairs of x) * table).flatten(-2)        interleaved

x may be the first columns of a head, the others handed on by a cat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes.fx_utils import op_name, operand, tensor_meta
from xtrain.passes.match import (
    NEG,
    add_of,
    cast_source,
    dtype_of,
    mul_of,
    only_user,
    part_of_last_dim,
    stride_of_last_dim,
    sub_of,
    unary_of,
)

HALF, INTERLEAVED = "half", "interleaved"


@dataclass
class Turn:
    """One rotation as found: last = x turned by the angles of cos and sin.

    Where the model multiplies complex numbers, both are its one table of cos + i sin.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    layout: str
    last: fx.Node
    width: int  # R, how many of x's columns turn
    backwards: bool = False  # turned by minus the angle
    whole_tables: bool = False  # cos and sin have R columns, two for each pair
    is_complex: bool = False
    table_dims: list[str] = field(default_factory=list)


def match_turn(node: fx.Node) -> Turn | None:
    """Return the rotation that ends in this node, a cast and a cat behind it included."""
    turn = _whole(node) or _in_parts(node) or _as_complex(node)
    if turn is None:
        return None
    user = only_user(turn.last)
    if user is not None and cast_source(user) is turn.last:
        narrow = cast_source(turn.x)
        if dtype_of(user) == dtype_of(turn.x):
            turn.last = user
        elif narrow is not None and dtype_of(user) == dtype_of(narrow):
            turn.x, turn.last = narrow, user
    return _with_rest(turn)


def _with_rest(turn: Turn) -> Turn:
    """Take x whole where its other columns are handed on: cat((turned, x[..., R:]), -1)."""
    cut = part_of_last_dim(turn.x) or (turn.x, 0, turn.width)
    user = only_user(turn.last)
    if cut[1] != 0 or user is None:
        return turn
    pieces = _joined(user)
    if pieces is None or len(pieces) != 2 or pieces[0] is not turn.last:
        return turn
    rest, whole = part_of_last_dim(pieces[1]), tensor_meta(cut[0])
    assert whole is not None
    if rest is None or rest[0] is not cut[0] or rest[1:] != (turn.width, whole.shape[-1]):
        return turn
    turn.x, turn.last = cut[0], user
    return turn


# --- x * cos + rotate(x) * sin ----------------------------------------------------------------


def _whole(node: fx.Node) -> Turn | None:
    products, backwards = add_of(node), False
    if products is None:
        products, backwards = sub_of(node), True
    if products is None:
        return None
    for straight, turned in (products,) if backwards else (products, products[::-1]):
        for rotated, sin in _factors(turned):
            found = _rotated(rotated)
            if found is None:
                continue
            x, layout, flipped = found
            for same, cos in _factors(straight):
                width = _width(x)
                if same is x and width is not None and isinstance(cos, fx.Node):
                    back = backwards != flipped
                    return Turn(x, cos, sin, layout, node, width, back, whole_tables=True)
    return None


def _rotated(node: Any) -> tuple[fx.Node, str, bool] | None:
    """Return (x, layout, flipped) when a node holds (-b, a) in the places of x's pairs (a, b).

    flipped: it holds (b, -a).
    """
    pieces = _joined(node)
    layout = HALF
    if pieces is None:
        pieces, layout = _interleaved(node), INTERLEAVED
    if pieces is None or len(pieces) != 2:
        return None
    first, second = pieces
    readings = (second, unary_of(first, *NEG), False), (unary_of(second, *NEG), first, True)
    for a, b, flipped in readings:
        if (x := _pair(a, b, layout)) is not None:
            return x, layout, flipped
    return None


# --- (a cos - b sin, b cos + a sin) -----------------------------------------------------------


def _in_parts(node: fx.Node) -> Turn | None:
    pieces, layout = _joined(node), HALF
    if pieces is None:
        pieces, layout = _interleaved(node), INTERLEAVED
    if pieces is None or len(pieces) != 2:
        return None
    first, second = (_combination(piece) for piece in pieces)
    for a_cos in first:
        for b_cos in second:
            turn = _from_combinations(node, a_cos, b_cos, layout)
            if turn is not None:
                return turn
    return None


# (value, table, sign of the other), (other value, other table)
_Combination = tuple[tuple[Any, Any], int, tuple[Any, Any]]


def _combination(node: Any) -> list[_Combination]:
    """The readings of a node as v * t + sign * w * u, with a negated table folded into sign."""
    readings: list[_Combination] = []
    sign = 1
    products = add_of(node)
    if products is None:
        products, sign = sub_of(node), -1
    if products is None:
        return readings
    orders = [(products, sign)] + ([(products[::-1], 1)] if sign == 1 else [])
    for (one, other), s in orders:
        for v in _factors(one):
            for w, table in _factors(other):
                negated = unary_of(table, *NEG)
                u = (w, table) if negated is None else (w, negated)
                readings.append((v, s if negated is None else -s, u))
    return readings


def _from_combinations(
    node: fx.Node, first: _Combination, second: _Combination, layout: str
) -> Turn | None:
    (a, cos), sign_a, (b, sin) = first
    (b2, cos2), sign_b, (a2, sin2) = second
    if a is not a2 or b is not b2 or cos is not cos2 or sin is not sin2 or sign_a == sign_b:
        return None
    x = _pair(a, b, layout)
    if x is None or not isinstance(cos, fx.Node) or not isinstance(sin, fx.Node):
        return None
    width = _width(x)
    if width is None:
        return None
    return Turn(x, cos, sin, layout, node, width, backwards=sign_a == 1)


# --- (a + i b) * (cos + i sin) ----------------------------------------------------------------


def _as_complex(node: fx.Node) -> Turn | None:
    pairs = unary_of(node, "flatten", "reshape", "view", "_unsafe_view")
    for value, table in _factors(unary_of(pairs, "view_as_real")):
        x = _whole_of_pairs(unary_of(value, "view_as_complex"))
        width = None if x is None else _width(x)
        numbers, turned, flat = tensor_meta(table), tensor_meta(pairs), tensor_meta(node)
        if x is None or width is None or numbers is None or not numbers.is_complex():
            continue
        assert turned is not None and flat is not None
        if turned.ndim == flat.ndim + 1 and _same_sizes(flat.shape[:-1], turned.shape[:-2]):
            return Turn(x, table, table, INTERLEAVED, node, width, is_complex=True)
    return None


# --- pieces -----------------------------------------------------------------------------------


def _factors(node: Any) -> tuple[tuple[Any, Any], ...]:
    factors = mul_of(node)
    return () if factors is None else (factors, factors[::-1])


def _width(x: fx.Node) -> int | None:
    value = tensor_meta(x)
    size = None if value is None or value.ndim == 0 else value.shape[-1]
    return size if isinstance(size, int) else None


def _joined(node: Any) -> list[Any] | None:
    """The pieces of a cat along the last dim."""
    return _pieces(node, ("cat", "concat", "concatenate"))


def _pieces(node: Any, names: tuple[str, ...]) -> list[Any] | None:
    if not isinstance(node, fx.Node) or op_name(node) not in names:
        return None
    value = tensor_meta(node)
    pieces, dim = operand(node, 0, "tensors"), operand(node, 1, "dim", "axis", default=0)
    if value is None or dim not in (-1, value.ndim - 1) or not isinstance(pieces, tuple | list):
        return None
    return list(pieces)


def _interleaved(node: Any) -> list[Any] | None:
    """The pieces of stack(pieces, -1).flatten(-2), in any spelling of that flatten."""
    stack = unary_of(node, "flatten", "reshape", "view", "_unsafe_view")
    pieces = _pieces(stack, ("stack",))
    value, stacked = tensor_meta(node), tensor_meta(stack)
    if pieces is None or value is None or stacked is None or value.ndim != stacked.ndim - 1:
        return None
    return pieces if _same_sizes(value.shape[:-1], stacked.shape[:-2]) else None


def _pair(a: Any, b: Any, layout: str) -> fx.Node | None:
    """Return x when a and b are the members of its pairs, in order."""
    if layout == HALF:
        first, second = part_of_last_dim(a), part_of_last_dim(b)
        if first is None or second is None or first[0] is not second[0]:
            return None
        x = first[0]
        width = _width(x)
        if width is None or width % 2:
            return None
        halves = (0, width // 2), (width // 2, width)
        return x if (first[1:], second[1:]) == halves else None
    even, odd = stride_of_last_dim(a), stride_of_last_dim(b)
    if even is not None and odd is not None and even[0] is odd[0]:
        return even[0] if (even[1:], odd[1:]) == ((0, 2), (1, 2)) else None
    return _unbound_pair(a, b)


def _unbound_pair(a: Any, b: Any) -> fx.Node | None:
    """Return x when a, b = x.unflatten(-1, (-1, 2)).unbind(-1), or [..., 0] and [..., 1] of it."""
    sources = []
    for node, position in ((a, 0), (b, 1)):
        if not isinstance(node, fx.Node) or op_name(node) != "getitem":
            return None
        source, index = node.args
        if isinstance(source, fx.Node) and op_name(source) == "unbind":
            pairs = operand(source, 0, "input", "self")
            value = tensor_meta(pairs)
            dim = operand(source, 1, "dim", default=0)
            if value is None or dim not in (-1, value.ndim - 1) or index != position:
                return None
            sources.append(pairs)
        elif isinstance(index, tuple) and index == (Ellipsis, position):
            sources.append(source)
        else:
            return None
    if sources[0] is not sources[1]:
        return None
    return _whole_of_pairs(sources[0])


def _whole_of_pairs(node: Any) -> fx.Node | None:
    """Return x when a node is x.unflatten(-1, (-1, 2)), in any of its spellings."""
    x = unary_of(node, "unflatten", "reshape", "view", "_unsafe_view")
    pairs, value = tensor_meta(node), tensor_meta(x)
    if pairs is None or value is None or pairs.ndim != value.ndim + 1 or pairs.shape[-1] != 2:
        return None
    return x if _same_sizes(value.shape[:-1], pairs.shape[:-2]) else None


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        statically_known_true(m == n) for m, n in zip(a, b, strict=True)
    )


# --- tables -----------------------------------------------------------------------------------

# Ops that act on each element, or on leading dims alone: what holds for halves of the last dim of
# their operand holds for their result.
_KEEPS_COLUMNS = frozenset({"cos", "sin", "to", "_to_copy", "float", "type_as", "bfloat16", "half"})
_KEEPS_COLUMNS |= {"contiguous", "clone", "detach", "unsqueeze", "expand", "neg", "double"}


def columns_come_in_pairs(node: Any, layout: str, outer: Mapping[fx.Node, Any]) -> bool:
    """Whether the graph shows that a table gives both members of each pair the same number.

    outer: placeholder of a called body -> what the caller hands it.
    """
    for _ in range(64):
        if not isinstance(node, fx.Node):
            return False
        name = op_name(node)
        if node.op == "placeholder" and node in outer:
            node = outer[node]
        elif _repeats_columns(node, layout):
            return True
        elif name in _KEEPS_COLUMNS and tensor_meta(operand(node, 0, "input", "self")) is not None:
            node = operand(node, 0, "input", "self")
        elif name == "getitem" and _keeps_last_dim(node):
            node = node.args[0]
        elif (factors := mul_of(node)) is not None:
            scalars = [not isinstance(f, fx.Node) for f in factors]
            if not any(scalars):
                return False
            node = factors[scalars.index(False)] if not all(scalars) else None
        elif name == "index_select" and operand(node, 1, "dim") == 0:
            node = operand(node, 0, "input", "self")
        elif name == "embedding":
            node = operand(node, 1, "weight")
        else:
            return False
    return False


def _repeats_columns(node: fx.Node, layout: str) -> bool:
    value = tensor_meta(node)
    if layout == HALF:
        pieces = _joined(node)
        twice = pieces is not None and len(pieces) == 2 and pieces[0] is pieces[1]
        return twice or _is_laid_out_twice(node)
    if op_name(node) == "repeat_interleave" and value is not None:
        dim = operand(node, 2, "dim")
        return operand(node, 1, "repeats") == 2 and dim in (-1, value.ndim - 1)
    pieces = _interleaved(node)
    return pieces is not None and len(pieces) == 2 and pieces[0] is pieces[1]


def _is_laid_out_twice(node: fx.Node) -> bool:
    """Whether a node is x.tile(2) or x.repeat(1, 1, 2): its last dim twice, the others once."""
    if op_name(node) not in ("tile", "repeat"):
        return False
    counts = node.args[1:] or (operand(node, 1, "dims", "repeats"),)
    if isinstance(counts[0], tuple | list):
        counts = tuple(counts[0])
    return counts[-1:] == (2,) and all(count == 1 for count in counts[:-1])


def _keeps_last_dim(node: fx.Node) -> bool:
    """Whether an index leaves the last dim whole: x[:, None], x[positions], x[:, :T]."""
    source, index = node.args
    value, result = tensor_meta(source), tensor_meta(node)
    if value is None or result is None:
        return False
    parts = index if isinstance(index, tuple) else (index,)
    if any(p is Ellipsis for p in parts):
        return parts[-1] is Ellipsis or parts[-1] == slice(None)
    taken = sum(p is not None for p in parts)
    return taken < value.ndim or parts[-1] == slice(None)
