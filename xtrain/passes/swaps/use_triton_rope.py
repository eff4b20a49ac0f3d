"""Swap rotary position embedding for xtrain.rope, queries and keys together for xtrain.rope_qk.

Before:  q2 = q * cos + rotate_half(q) * sin       After:  q2, k2 = xtrain.rope_qk(q, k,
         k2 = k * cos + rotate_half(k) * sin                       cos[.., :R/2], sin[.., :R/2],
                                                                   "half")
Stage:   normalised graph.     Changes numerics: within tolerance; products are not rounded to bf16
         before the sum.
Anchor:  the sum, the cat or the complex product that ends a rotation; see rope_patterns.py.
Needs:   heads and tokens in dims 1 and 2, in either order; tables as wide as x must show that both
         members of a pair share an angle (cat((f, f), -1) on the way to cos).
Skips:   tables whose making the graph does not show, learnt angles, other ranks, one token alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.ops import OPS
from xtrain.passes import fx_utils
from xtrain.passes.fx_utils import operand, tensor_meta
from xtrain.passes.match import Refused, dtype_of, known_dtype, rounds_at_last_to, unary_of
from xtrain.passes.result import PassResult
from xtrain.passes.swaps.account import Account, State, accounts_of
from xtrain.passes.swaps.forms import (
    Forms,
    check_same_form,
    emit,
    emit_cast,
    emit_getitem,
    emit_op,
    values_of,
)
from xtrain.passes.swaps.rope_patterns import HALF, Turn, columns_come_in_pairs, match_turn
from xtrain.passes.values import is_parameter

OP, OP_QK = OPS["rope"], OPS["rope_qk"]
_FROM_OUTSIDE = (
    ": it is made outside of this graph (compile_blocks sees one block alone; xtrain.compile sees "
    "where its tables are made)"
)


@dataclass
class _Ready:
    """A rotation that can be swapped: x [B, N, T, H] or, tokens first, [B, T, N, H]."""

    turn: Turn
    heads_first: bool
    state: State

    def key(self) -> tuple[Any, ...]:
        """What queries and keys must share to turn in one call."""
        turn, value = self.turn, tensor_meta(self.turn.x)
        assert value is not None
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
    outer = fx_utils.operands_of_bodies(module)
    for part, account in accounts_of(module):
        ready = _find(part.graph, outer, account, result)
        while ready:
            first = ready.pop(0)
            partner = next((r for r in ready if r.key() == first.key()), None)
            pair = [first] if partner is None else [first, partner]
            place = _place(pair)
            if place is None:
                pair, place = [first], first.turn.last
            ready = [r for r in ready if r not in pair]
            try:
                form = _swap(pair, place, forms, account)
            except Refused as refusal:
                for _ in pair:
                    result.skip(str(refusal))
                account.erase_unknown()
                continue
            result.num_replaced += len(pair)
            result.forms[form] = result.forms.get(form, 0) + len(pair)
    return result


def _find(
    graph: fx.Graph, outer: Mapping[fx.Node, Any], account: Account, result: PassResult
) -> list[_Ready]:
    ready = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        turn = match_turn(node)
        if turn is None:
            continue
        result.num_matched += 1
        try:
            ready.append(_Ready(turn, _heads_first(turn), account.state(turn.last)))
            if turn.whole_tables:
                _check_tables(turn, outer)
        except Refused as refusal:
            result.skip(str(refusal))
            ready = [r for r in ready if r.turn is not turn]
    return ready


def _heads_first(turn: Turn) -> bool:
    """Whether x is [B, N, T, H]: dim 2 is the one that the tables have rows for."""
    x = tensor_meta(turn.x)
    tables = [tensor_meta(t) for t in (turn.cos, turn.sin)]
    if x is None or x.ndim != 4:
        raise Refused("x is not [batch, heads, tokens, head dim]")
    shapes = []
    for table in tables:
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


def _check_tables(turn: Turn, outer: Mapping[fx.Node, Any]) -> None:
    for name, table in (("cos", turn.cos), ("sin", turn.sin)):
        if not columns_come_in_pairs(table, turn.layout, outer):
            why = f"nothing shows that {name} gives both members of a pair one angle"
            raise Refused(f"{why}{_FROM_OUTSIDE if _is_from_outside(table, outer) else ''}")


def _is_from_outside(table: fx.Node, outer: Mapping[fx.Node, Any]) -> bool:
    """Whether a table was made before the graph: it is one of its inputs, viewed or cast."""
    node: Any = table
    while isinstance(node, fx.Node) and (node.op != "placeholder" or node in outer):
        node = outer[node] if node in outer else operand(node, 0, "input", "self")
    return isinstance(node, fx.Node) and not is_parameter(node)


def _place(pair: list[_Ready]) -> fx.Node | None:
    """The node to put a call for both before: all it reads is there, and no reader is passed."""
    if len(pair) == 1:
        return pair[0].turn.last
    first, second = (r.turn for r in pair)
    order = {node: i for i, node in enumerate(first.last.graph.nodes)}
    if all(order[n] < order[first.last] for n in (second.x, second.cos, second.sin)):
        return first.last
    if all(order[user] > order[second.last] for user in first.last.users):
        return second.last
    return None


def _swap(pair: list[_Ready], place: fx.Node, forms: Forms, account: Account) -> str:
    graph, turn = place.graph, pair[0].turn
    with graph.inserting_before(place):
        cos, sin = (_table(t, pair[0], place) for t in (turn.cos, turn.sin))
        if turn.is_complex:
            numbers = emit(graph, torch.ops.aten.view_as_real.default, (cos,), place)
            cos, sin = (
                emit(graph, torch.ops.aten.select.int, (numbers, -1, i), place) for i in (0, 1)
            )
        if turn.backwards:
            sin = emit(graph, torch.ops.aten.neg.default, (sin,), place)
        inputs = [_input(r) for r in pair]
        op = OP if len(pair) == 1 else OP_QK
        opaque, form = forms.choose(op, *values_of((*inputs, cos, sin)), layout=turn.layout)
        call = emit_op(graph, op, (*inputs, cos, sin, turn.layout), place, opaque=opaque)
        results = (
            [call] if len(pair) == 1 else [emit_getitem(graph, call, i, place) for i in (0, 1)]
        )
        results = [_output(r, result) for r, result in zip(pair, results, strict=True)]
    for r, result in zip(pair, results, strict=True):
        check_same_form(result, r.turn.last)
    replaced = {r.turn.last: result for r, result in zip(pair, results, strict=True)}
    # One pair of tables serves both, whoever made the views of it that the second reads.
    account.settle(replaced, constants=[t for r in pair for t in (r.turn.cos, r.turn.sin)])
    return form


def _input(r: _Ready) -> fx.Node:
    """x as the op takes it: [B, N, T, H], in the dtype that the result is rounded to."""
    x, graph = r.turn.x, r.turn.x.graph
    wide = known_dtype(r.turn.last)
    if wide != known_dtype(x) and rounds_at_last_to(r.turn.last) != known_dtype(x):
        x = emit_cast(graph, x, wide, r.turn.last)
    if r.heads_first:
        return x
    return emit(graph, torch.ops.aten.transpose.int, (x, 1, 2), r.turn.last)


def _output(r: _Ready, result: fx.Node) -> fx.Node:
    graph = result.graph
    if not r.heads_first:
        result = emit(graph, torch.ops.aten.transpose.int, (result, 1, 2), r.turn.last)
    return emit_cast(graph, result, known_dtype(r.turn.last), r.turn.last)


def _table(table: fx.Node, r: _Ready, like: fx.Node) -> fx.Node:
    """[T, R/2] or [B, T, R/2] of a table as the model broadcasts it over x."""
    graph, turn = table.graph, r.turn
    x, value = tensor_meta(turn.x), tensor_meta(table)
    assert x is not None and value is not None
    heads = value.ndim - (3 if r.heads_first else 2)
    if heads >= 0 and value.ndim >= 3:
        table = emit(graph, torch.ops.aten.squeeze.dim, (table, heads), like)
        value = tensor_meta(table)
        assert value is not None
    if value.ndim == 3 and not statically_known_true(value.shape[0] == x.shape[0]):
        table = emit(graph, torch.ops.aten.squeeze.dim, (table, 0), like)
    if turn.whole_tables:
        cut = (-1, 0, turn.width // 2, 1) if turn.layout == HALF else (-1, 0, turn.width, 2)
        table = emit(graph, torch.ops.aten.slice.Tensor, (table, *cut), like)
    return table


def _unviewed(table: fx.Node) -> fx.Node:
    """A table before the dims that were put in for broadcasting: layers share it."""
    while True:
        source = unary_of(table, "unsqueeze")
        if source is None and fx_utils.op_name(table) == "getitem":
            index = table.args[1]
            parts = index if isinstance(index, tuple) else (index,)
            if all(p is None or p is Ellipsis or p == slice(None) for p in parts):
                source = table.args[0]
        if not isinstance(source, fx.Node):
            return table
        table = source
