"""Swap rotary position embedding for xtrain.rope, queries and keys together for xtrain.rope_qk.

Before:  q2 = q * cos + rotate_half(q) * sin       After:  q2, k2 = xtrain.rope_qk(q, k,
         k2 = k * cos + rotate_half(k) * sin                       cos[.., :R/2], sin[.., :R/2],
                                                                   "half")
Stage:   normalised graph.     Changes numerics: within tolerance; products are not rounded to bf16
         before the sum.
Anchor:  the sum, the cat or the complex product that ends a rotation, in the spellings of models:

    whole         x * cos + rotate(x) * sin           rotate(x) = cat(-x2, x1), or -odd and even
                                                      interleaved; cos and sin as wide as x
    in parts      cat(x1 * cos - x2 * sin,            or stacked and flattened for the interleaved
                      x2 * cos + x1 * sin)            layout; cos and sin half as wide
    turned back   + for - and - for +                 the same with -sin; rotate(x) = cat(x2, -x1)
    complex       view_as_real(view_as_complex(pairs of x) * table).flatten(-2)        interleaved

         x may be the first columns of a head, the others handed on by a cat.
Needs:   heads and tokens in dims 1 and 2, in either order; tables as wide as x must show that both
         members of a pair share an angle (cat((f, f), -1) on the way to cos).
Skips:   tables whose making the graph does not show, learnt angles, other ranks, one token alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.ops import OPS
from xtrain.passes.graph import (
    CAT,
    NEG,
    Refused,
    dtype_of,
    first_operand,
    is_call,
    is_parameter,
    known_dtype,
    known_tensor,
    ndim_of,
    op_name,
    operand,
    operands_of_bodies,
    same_sizes,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account, State, accounts_of
from xtrain.passes.swaps.match import (
    add_of,
    both_orders,
    cast_source,
    is_last_dim,
    mul_of,
    only_user,
    part_of_last_dim,
    rounds_to,
    stride_of_last_dim,
    sub_of,
    unary_of,
)
from xtrain.passes.swaps.rewrite import Forms, Place, check_same_form

OP, OP_QK = OPS["rope"], OPS["rope_qk"]
HALF, INTERLEAVED = "half", "interleaved"
_VIEWS = ("reshape", "view", "_unsafe_view")
_FROM_OUTSIDE = (
    ": it is made outside of this graph (compile_blocks sees one block alone; xtrain.compile sees "
    "where its tables are made)"
)


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


@dataclass
class _Ready:
    """A rotation that can be swapped: x [B, N, T, H] or, tokens first, [B, T, N, H]."""

    turn: Turn
    heads_first: bool
    state: State

    def key(self) -> tuple[Any, ...]:
        """What queries and keys must share to turn in one call."""
        turn, value = self.turn, known_tensor(self.turn.x)
        tables = _unviewed(turn.cos), _unviewed(turn.sin), turn.is_complex
        T = value.shape[2 if self.heads_first else 1]
        form = (value.shape[0], T, value.shape[3], value.dtype, turn.width, dtype_of(turn.last))
        kind = turn.backwards, turn.whole_tables
        return *tables, *kind, turn.layout, self.heads_first, self.state, *map(str, form)


def use_triton_rope(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the rotations of a graph and of its bodies, in pairs where two share their tables."""
    result = PassResult()
    forms = Forms(kernels, backend)
    module = graph.owning_module
    assert module is not None
    outer = operands_of_bodies(module)
    for part, account in accounts_of(module):
        ready = _find(part.graph, outer, account, result)
        while ready:
            first = ready.pop(0)
            partner = next((r for r in ready if r.key() == first.key()), None)
            pair = [first] if partner is None else [first, partner]
            before = _place(pair)
            if before is None:
                pair, before = [first], first.turn.last
            ready = [r for r in ready if r not in pair]
            try:
                result.replaced(_swap(pair, Place(before, forms), account), len(pair))
            except Refused as refusal:
                for _ in pair:
                    result.skip(str(refusal))
                account.erase_unknown()
    return result


def _find(
    graph: fx.Graph, outer: Mapping[fx.Node, Any], account: Account, result: PassResult
) -> list[_Ready]:
    ready = []
    for node in filter(is_call, graph.nodes):
        turn = match_turn(node)
        if turn is None:
            continue
        result.num_matched += 1
        try:
            found = _Ready(turn, _heads_first(turn), account.state(turn.last))
            if turn.whole_tables:
                _check_tables(turn, outer)
            ready.append(found)
        except Refused as refusal:
            result.skip(str(refusal))
    return ready


# --- matching -------------------------------------------------------------------------------------


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
    x, start, _ = part_of_last_dim(turn.x) or (turn.x, 0, turn.width)
    user = only_user(turn.last)
    pieces = None if start != 0 or user is None else _joined(user)
    if user is None or pieces is None or len(pieces) != 2 or pieces[0] is not turn.last:
        return turn
    rest = part_of_last_dim(pieces[1])
    if rest is not None and rest[0] is x and rest[1:] == (turn.width, known_tensor(x).shape[-1]):
        turn.x, turn.last = x, user
    return turn


def _whole(node: fx.Node) -> Turn | None:
    """x * cos + rotate(x) * sin."""
    for (same, cos), sign, (rotated, sin) in _combinations(node):
        found = _rotated(rotated)
        if found is None or found[0] is not same or not isinstance(cos, fx.Node):
            continue
        x, layout, flipped = found
        if (width := _width(x)) is not None:
            back = (sign < 0) != flipped
            return Turn(x, cos, sin, layout, node, width, back, whole_tables=True)
    return None


def _rotated(node: Any) -> tuple[fx.Node, str, bool] | None:
    """Return (x, layout, flipped) when a node holds (-b, a) in the places of x's pairs (a, b).

    flipped: it holds (b, -a).
    """
    for first, second, layout in _two_pieces(node):
        readings = (second, unary_of(first, *NEG), False), (unary_of(second, *NEG), first, True)
        for a, b, flipped in readings:
            if (x := _pair(a, b, layout)) is not None:
                return x, layout, flipped
    return None


def _in_parts(node: fx.Node) -> Turn | None:
    """(a cos - b sin, b cos + a sin)."""
    for first, second, layout in _two_pieces(node):
        of_second = list(_combinations(second))
        for (a, cos), sign_a, (b, sin) in _combinations(first):
            for (b2, cos2), sign_b, (a2, sin2) in of_second:
                same = a is a2 and b is b2 and cos is cos2 and sin is sin2 and sign_a != sign_b
                x = _pair(a, b, layout) if same else None
                width = None if x is None else _width(x)
                if x is None or width is None:
                    continue
                if isinstance(cos, fx.Node) and isinstance(sin, fx.Node):
                    return Turn(x, cos, sin, layout, node, width, backwards=sign_a == 1)
    return None


# (value, table), sign of the other, (other value, other table)
_Combination = tuple[tuple[Any, Any], int, tuple[Any, Any]]


def _combinations(node: Any) -> Iterator[_Combination]:
    """Yield the readings of a node as v * t + sign * w * u, a negated table folded into sign."""
    readings = [(pair, 1) for pair in both_orders(add_of(node))]
    if (difference := sub_of(node)) is not None:
        readings.append((difference, -1))
    for (one, other), sign in readings:
        for v in both_orders(mul_of(one)):
            for w, table in both_orders(mul_of(other)):
                negated = unary_of(table, *NEG)
                yield (v, sign, (w, table)) if negated is None else (v, -sign, (w, negated))


def _as_complex(node: fx.Node) -> Turn | None:
    """(a + i b) * (cos + i sin)."""
    pairs = unary_of(node, "flatten", *_VIEWS)
    for value, table in both_orders(mul_of(unary_of(pairs, "view_as_real"))):
        x = _whole_of_pairs(unary_of(value, "view_as_complex"))
        width = None if x is None else _width(x)
        numbers = tensor_meta(table)
        if x is None or width is None or numbers is None or not numbers.is_complex():
            continue
        if _is_flattened(node, pairs):
            return Turn(x, table, table, INTERLEAVED, node, width, is_complex=True)
    return None


# --- pieces of the last dim -----------------------------------------------------------------------


def _width(x: fx.Node) -> int | None:
    size = known_tensor(x).shape[-1] if ndim_of(x) > 0 else None
    return size if isinstance(size, int) else None


def _is_flattened(flat: fx.Node, pairs: fx.Node) -> bool:
    """Whether one value is another with its last two dims as one."""
    if ndim_of(pairs) < 2 or ndim_of(flat) != ndim_of(pairs) - 1:
        return False
    return same_sizes(known_tensor(flat).shape[:-1], known_tensor(pairs).shape[:-2])


def _two_pieces(node: Any) -> list[tuple[Any, Any, str]]:
    """(first, second, layout) of a value that holds the members of pairs, in halves or in turn."""
    found = (_joined(node), HALF), (_interleaved(node), INTERLEAVED)
    return [(*pieces, layout) for pieces, layout in found if pieces and len(pieces) == 2]


def _joined(node: Any, names: frozenset[str] = CAT) -> list[Any] | None:
    """The pieces of a cat along the last dim."""
    if not isinstance(node, fx.Node) or op_name(node) not in names or ndim_of(node) < 0:
        return None
    pieces, dim = first_operand(node), operand(node, 1, "dim", "axis", default=0)
    return list(pieces) if is_last_dim(dim, node) and isinstance(pieces, tuple | list) else None


def _interleaved(node: Any) -> list[Any] | None:
    """The pieces of stack(pieces, -1).flatten(-2), in any spelling of that flatten."""
    stack = unary_of(node, "flatten", *_VIEWS)
    pieces = _joined(stack, frozenset({"stack"}))
    return pieces if pieces is not None and _is_flattened(node, stack) else None


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
    pairs = _member_of_pairs(a, 0)
    return _whole_of_pairs(pairs) if pairs is not None and _member_of_pairs(b, 1) is pairs else None


def _member_of_pairs(node: Any, position: int) -> Any:
    """Return pairs [..., 2] when a node is pairs.unbind(-1)[position] or pairs[..., position]."""
    if not isinstance(node, fx.Node) or op_name(node) != "getitem":
        return None
    source, index = node.args
    if isinstance(source, fx.Node) and op_name(source) == "unbind":
        pairs = operand(source, 0, "input", "self")
        is_last = is_last_dim(operand(source, 1, "dim", default=0), pairs)
        return pairs if is_last and index == position else None
    return source if isinstance(index, tuple) and index == (Ellipsis, position) else None


def _whole_of_pairs(node: Any) -> fx.Node | None:
    """Return x when a node is x.unflatten(-1, (-1, 2)), in any of its spellings."""
    x = unary_of(node, "unflatten", *_VIEWS)
    is_pairs = x is not None and _is_flattened(x, node) and known_tensor(node).shape[-1] == 2
    return x if is_pairs else None


# --- tables ---------------------------------------------------------------------------------------

# Ops that act on each element, or on leading dims alone: what holds for halves of the last dim of
# their operand holds for their result.
_KEEPS_COLUMNS = frozenset({"cos", "sin", "to", "_to_copy", "float", "type_as", "bfloat16", "half"})
_KEEPS_COLUMNS |= {"contiguous", "clone", "detach", "unsqueeze", "expand", "neg", "double"}


def _columns_come_in_pairs(node: Any, layout: str, outer: Mapping[fx.Node, Any]) -> bool:
    """Whether the graph shows that a table gives both members of each pair the same number.

    outer: placeholder of a called body -> what the caller hands it.
    """
    while isinstance(node, fx.Node) and not _repeats_columns(node, layout):
        name, first = op_name(node), operand(node, 0, "input", "self")
        if node.op == "placeholder" and node in outer:
            node = outer[node]
        elif name in _KEEPS_COLUMNS and tensor_meta(first) is not None:
            node = first
        elif name == "getitem" and _keeps_last_dim(node):
            node = first
        elif (factors := mul_of(node)) is not None:
            tables = [f for f in factors if isinstance(f, fx.Node)]
            node = tables[0] if len(tables) == 1 else None
        elif name == "index_select" and operand(node, 1, "dim") == 0:
            node = first
        else:
            node = operand(node, 1, "weight") if name == "embedding" else None
    return isinstance(node, fx.Node)


def _repeats_columns(node: fx.Node, layout: str) -> bool:
    if layout == HALF:
        pieces = _joined(node)
        twice = pieces is not None and len(pieces) == 2 and pieces[0] is pieces[1]
        return twice or _is_laid_out_twice(node)
    if op_name(node) == "repeat_interleave" and tensor_meta(node) is not None:
        return operand(node, 1, "repeats") == 2 and is_last_dim(operand(node, 2, "dim"), node)
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
    if tensor_meta(source) is None or tensor_meta(node) is None:
        return False
    parts = index if isinstance(index, tuple) else (index,)
    if any(p is Ellipsis for p in parts):
        return parts[-1] is Ellipsis or parts[-1] == slice(None)
    return sum(p is not None for p in parts) < ndim_of(source) or parts[-1] == slice(None)


def _check_tables(turn: Turn, outer: Mapping[fx.Node, Any]) -> None:
    for name, table in (("cos", turn.cos), ("sin", turn.sin)):
        if not _columns_come_in_pairs(table, turn.layout, outer):
            why = f"nothing shows that {name} gives both members of a pair one angle"
            raise Refused(f"{why}{_FROM_OUTSIDE if _is_from_outside(table, outer) else ''}")


def _is_from_outside(table: fx.Node, outer: Mapping[fx.Node, Any]) -> bool:
    """Whether a table was made before the graph: it is one of its inputs, viewed or cast."""
    node: Any = table
    while isinstance(node, fx.Node) and (node.op != "placeholder" or node in outer):
        node = outer[node] if node in outer else operand(node, 0, "input", "self")
    return isinstance(node, fx.Node) and not is_parameter(node)


def _heads_first(turn: Turn) -> bool:
    """Whether x is [B, N, T, H]: dim 2 is the one that the tables have rows for."""
    x = tensor_meta(turn.x)
    if x is None or x.ndim != 4:
        raise Refused("x is not [batch, heads, tokens, head dim]")
    shapes = []
    for table in (tensor_meta(t) for t in (turn.cos, turn.sin)):
        is_of_numbers = table is not None and (table.dtype.is_floating_point or turn.is_complex)
        if table is None or not is_of_numbers or table.ndim > 4:
            raise Refused("cos and sin are no tables of floats")
        if table.requires_grad:
            raise Refused("its angles are learnt: the op gives cos and sin no gradient")
        shapes.append((*(1,) * (4 - table.ndim), *table.shape))
    (b, first, second, width), other = shapes
    columns = turn.width if turn.whole_tables else turn.width // 2
    if shapes[0] != other or width != columns or not _is_one_or(b, x.shape[0]):
        raise Refused("cos and sin do not fit x as tables of one angle for each pair")
    for dim, is_one in ((2, first), (1, second)):
        rows = (first, second)[dim - 1]
        if is_one == 1 and rows != 1 and statically_known_true(rows == x.shape[dim]):
            return dim == 2
    raise Refused("cos and sin do not tell heads from tokens")


def _is_one_or(size: Any, expected: Any) -> bool:
    return bool(statically_known_true(size == 1) or statically_known_true(size == expected))


# --- swapping -------------------------------------------------------------------------------------


def _place(pair: list[_Ready]) -> fx.Node | None:
    """The node to put a call for both before: all it reads is there, and no reader is passed."""
    if len(pair) == 1:
        return pair[0].turn.last
    first, second = (r.turn for r in pair)
    if all(n < first.last for n in (second.x, second.cos, second.sin)):
        return first.last
    return second.last if all(user > second.last for user in first.last.users) else None


def _swap(pair: list[_Ready], place: Place, account: Account) -> str:
    turn = pair[0].turn
    cos, sin = (_table(place, table, pair[0]) for table in (turn.cos, turn.sin))
    if turn.is_complex:
        numbers = place.emit(torch.ops.aten.view_as_real.default, cos)
        cos, sin = (place.emit(torch.ops.aten.select.int, numbers, -1, i) for i in (0, 1))
    if turn.backwards:
        sin = place.emit(torch.ops.aten.neg.default, sin)
    inputs = [_input(place, r) for r in pair]
    op, shown = OP if len(pair) == 1 else OP_QK, {"layout": turn.layout}
    call = place.op(op, (*inputs, cos, sin), shown)
    results = [call] if len(pair) == 1 else [place.item(call, i) for i in (0, 1)]
    replaced = {r.turn.last: _output(place, r, y) for r, y in zip(pair, results, strict=True)}
    for last, result in replaced.items():
        check_same_form(result, last)
    # One pair of tables serves both, whoever made the views of it that the second reads.
    account.settle(replaced, constants=[t for r in pair for t in (r.turn.cos, r.turn.sin)])
    return place.form


def _input(place: Place, r: _Ready) -> fx.Node:
    """x as the op takes it: [B, N, T, H], in the dtype that the result is rounded to."""
    x, last = r.turn.x, r.turn.last
    if known_dtype(last) != dtype_of(x) and rounds_to(last, views=True) != dtype_of(x):
        x = place.cast(x, known_dtype(last))
    return x if r.heads_first else place.emit(torch.ops.aten.transpose.int, x, 1, 2, like=last)


def _output(place: Place, r: _Ready, result: fx.Node) -> fx.Node:
    if not r.heads_first:
        result = place.emit(torch.ops.aten.transpose.int, result, 1, 2, like=r.turn.last)
    return place.cast(result, known_dtype(r.turn.last))


def _table(place: Place, table: fx.Node, r: _Ready) -> fx.Node:
    """[T, R/2] or [B, T, R/2] of a table as the model broadcasts it over x."""
    turn, batch = r.turn, known_tensor(r.turn.x).shape[0]
    heads = ndim_of(table) - (3 if r.heads_first else 2)
    if heads >= 0 and ndim_of(table) >= 3:
        table = place.emit(torch.ops.aten.squeeze.dim, table, heads)
    is_batched = ndim_of(table) == 3
    if is_batched and not statically_known_true(known_tensor(table).shape[0] == batch):
        table = place.emit(torch.ops.aten.squeeze.dim, table, 0)
    if turn.whole_tables:
        cut = (-1, 0, turn.width // 2, 1) if turn.layout == HALF else (-1, 0, turn.width, 2)
        table = place.emit(torch.ops.aten.slice.Tensor, table, *cut)
    return table


def _unviewed(table: fx.Node) -> fx.Node:
    """A table before the dims that were put in for broadcasting: layers share it."""
    while True:
        source = unary_of(table, "unsqueeze")
        if source is None and op_name(table) == "getitem":
            index = table.args[1]
            parts = index if isinstance(index, tuple) else (index,)
            if all(p is None or p is Ellipsis or p == slice(None) for p in parts):
                source = table.args[0]
        if not isinstance(source, fx.Node):
            return table
        table = source
