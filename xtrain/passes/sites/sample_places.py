"""Where the samples of a batch lie in each value of a graph, followed from the graph's inputs.

A source is one dimension of one input. Its place in a value is (dim, before, size, after): the
dimension that holds it, and how many steps of that dimension lie outside and inside of it.

    tokens [B, T]               B: (0, 1, B, 1)        view(B * T, D)       (0, 1, B, T)
    transpose(0, 1)             (1, 1, B, 1)           outermost no longer
    repeat(K, 1)                (0, K, B, 1)           repeat_interleave(K, 0)   (0, 1, B, K)

UNKNOWN is what an op made that is not read here, MIXED where attention or a product compares
positions of a source with one another, so that they are no samples. A residual sum is as its stream
says: what an unknown branch adds element by element lies where the stream's samples do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import fx

from xtrain.ops.dropout.op import FORWARD as DROPOUT_OP
from xtrain.passes.graph import (
    CAST,
    COPY,
    CUT,
    PERMUTE,
    RESHAPE,
    SOFTMAX,
    STACK,
    base_of,
    body_operands,
    called_bodies,
    dtype_of,
    first_operand,
    is_parameter,
    may_hold_floats,
    op_name,
    operand,
    placeholders,
    tensor_meta,
    written_operands,
)
from xtrain.passes.sites.program import written_into


class Place(NamedTuple):
    """One source in one value; size is the source's own."""

    dim: int
    before: int
    size: int
    after: int


UNKNOWN, MIXED = "unknown", "mixed"
Source = tuple[int, int]  # position among the graph's placeholders, dimension
State = dict[Source, Any]  # a source that is absent has no place: the value is the same for all

_SAME = CAST | COPY | {"dropout", "dropout_", "native_dropout"}
_SAME |= frozenset(
    "detach layer_norm rms_norm native_layer_norm group_norm native_group_norm batch_norm "
    "native_batch_norm instance_norm normalize cumsum cumprod index_fill index_fill_ tril triu "
    "silu relu gelu truediv floordiv and_ or_ identity requires_grad_ lift_fresh lift_fresh_copy"
    "".split()
)
_FRESH = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones "
    "new_full new_tensor arange zeros ones full empty size dim numel".split()
)
_REDUCTIONS = frozenset(
    "sum mean amax amin max min var std norm logsumexp prod all any argmax argmin count_nonzero "
    "vector_norm median".split()
)
_PICKS = frozenset("gather take_along_dim index_select roll flip sort topk argsort".split())
# Ops that put rows of another value into their first operand: where they take the dimension, if
# they have one, and that value.
_PUTS = {"index_copy": (1, 3), "scatter": (1, 3), "masked_scatter": (None, 2)}
_PUTS |= {f"{name}_": where for name, where in _PUTS.items()}
_LEADING = frozenset(
    "conv1d conv2d conv3d convolution conv_transpose1d max_pool1d max_pool2d avg_pool1d avg_pool2d "
    "adaptive_avg_pool1d adaptive_avg_pool2d interpolate".split()
)
# Where an op that may give several values takes the dimension that it cuts or orders.
_SEVERAL = dict.fromkeys(CUT, (2, 0)) | {"unbind": (1, 0), "topk": (2, -1)}
_SEVERAL |= dict.fromkeys(("sort", "max", "min"), (1, -1))


def sample_places(graph: fx.Graph, seeds: fx.Node | None) -> tuple[dict[int, State], list[State]]:
    """Return row of the seeds input -> places of the sources at its site, and those of the outputs.

    Args:     seeds: the placeholder whose rows the graph's dropouts read.
    """
    inputs: dict[fx.Node, State] = {}
    for position, node in enumerate(placeholders(graph)):
        shape = _shape(node)
        if shape and node is not seeds and not is_parameter(node):
            inputs[node] = {
                (position, dim): Place(dim, 1, size, 1) for dim, size in enumerate(shape)
            }
    walk = Walk({} if seeds is None else {seeds: 0})
    outputs = walk.run(graph, inputs)
    flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return walk.rows, [walk.of(value) for value in flat]


def is_outermost(place: Any, shape: Sequence[int]) -> bool:
    """Whether the samples lie one after the other in a value of this shape, each contiguous."""
    return isinstance(place, Place) and place.before * math.prod(shape[: place.dim]) == 1


class Walk:
    """Follow the sources through nodes in running order: `states` of those that have been seen."""

    def __init__(self, seeds: dict[fx.Node, int]):
        self.rows: dict[int, State] = {}
        self.seeds = seeds  # seeds inputs and slices of them -> their first row
        self.states: dict[fx.Node, State] = {}
        self.parts: dict[fx.Node, Any] = {}  # what a called body returns
        self._last: fx.Node | None = None

    def of(self, value: Any) -> State:
        """Return the places of the sources in a value."""
        return self.states.get(value, {}) if isinstance(value, fx.Node) else {}

    def run(self, graph: fx.Graph, inputs: dict[fx.Node, State]) -> Any:
        """Follow the sources through a graph; return its outputs, as nodes."""
        dropped = []
        for node in graph.nodes:
            if node.op == "output":
                outputs = node.args[0]
            elif node.op == "placeholder":
                self.states[node] = inputs.get(node, {})
            elif body_operands(node):
                self._enter(node, called_bodies(node)[0])
            else:
                self.step(node)
            if node.target is DROPOUT_OP and (row := self._row(node)) is not None:
                dropped.append((node, row))
        for node, row in dropped:
            same = [u for u in node.users if _shape(u) == _shape(node)]
            found = _join([self.of(node), *map(self.of, same)])
            shape = _shape(node) or ()
            self.rows[row] = {
                source: (place, is_outermost(place, shape)) for source, place in found.items()
            }
        return outputs

    def _row(self, dropped: fx.Node) -> int | None:
        seed = dropped.args[2]
        if isinstance(seed, fx.Node) and seed.target is operator.getitem:
            source, index = seed.args
            if source in self.seeds and isinstance(index, int):
                return self.seeds[source] + index // 2  # type: ignore[index]
        return None

    def _enter(self, call: fx.Node, body: fx.GraphModule) -> None:
        operands = body_operands(call)
        for placeholder, given in operands.items():
            if isinstance(given, fx.Node) and given.target is operator.getitem:
                source, index = given.args
                if source in self.seeds and isinstance(index, slice):
                    self.seeds[placeholder] = self.seeds[source] + index.start // 2  # type: ignore[index]
        results = self.run(body.graph, {p: self.of(o) for p, o in operands.items()})
        if isinstance(results, tuple | list):
            self.parts[call] = [self.of(value) for value in results]
            self.states[call] = _join(self.parts[call])
        else:
            self.states[call] = self.of(results)

    def go_on(self, graph: fx.Graph) -> None:
        """Follow the sources through what has been appended to a graph; inputs have none."""
        new = list(takewhile(lambda node: node is not self._last, reversed(graph.nodes)))[::-1]
        for node in new:
            if node.op != "placeholder":
                self.step(node)
        self._last = new[-1] if new else self._last

    def step(self, node: fx.Node) -> None:
        """Follow the sources through one call."""
        self.states[node] = state = self._after(node)
        for target in written_operands(node):
            self.states[target] = state
            while (whole := base_of(target)) is not None:
                part = _in_part(state, _shape(target), _shape(whole))
                self.states[whole] = state = _agreed([self.of(whole), part])
                target = whole

    def _after(self, node: fx.Node) -> State:
        name = op_name(node)
        if name == "getitem" and node.args[0] in self.parts:
            return self.parts[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.op in ("get_attr", "call_module") or name in _FRESH:
            return _unknown(map(self.of, node.all_input_nodes)) if node.op == "call_module" else {}
        sources = [n for n in node.all_input_nodes if self.of(n)]
        if not sources:
            return {}
        try:
            return _follow(node, name, self.of)
        except (_UnreadError, IndexError, KeyError, TypeError, ValueError, AttributeError):
            return _unknown(map(self.of, sources))


class _UnreadError(Exception):
    """An op, or a form of one, that is not read here."""


def _follow(node: fx.Node, name: str, of: Any) -> State:
    """The state of a node's value by its op."""
    first = first_operand(node)

    def moved(move: Callable[[Place], Any]) -> State:
        return _mapped(of(first), move)

    if name == "setitem":
        return _agreed([of(first), _written(node, of(node.args[2]))])
    if node.target is written_into:
        return _agreed([of(first), _in_part(of(node.args[1]), _shape(node.args[1]), _shape(first))])
    out = _shape(node)
    if "scaled_dot_product" in name:
        name = "scaled_dot_product_attention"
    if name in ("scaled_dot_product_attention", "einsum", "matmul", "bmm", "mm", "linear"):
        return _join(_contracted(node, name, of))
    if name in ("addmm", "baddbmm"):
        a, b = node.args[1:3]
        return _join([_matmul(a, b, of), of(first)])
    if name in STACK:
        return _catenated(node, name, first, of)
    if name in _SEVERAL and (out is None or name in CUT):
        position, default = _SEVERAL[name]
        dim = _dim(first, operand(node, position, "dim", default=default))
        if name == "unbind":
            return moved(lambda p: _without_dim(p, dim))
        return moved(lambda p: UNKNOWN if p.dim == dim else p)
    if name in _SAME:
        return of(first)
    if out is None:
        raise _UnreadError
    if name == "getitem":
        if not isinstance(first, fx.Node) or _shape(first) is None:
            return of(first)
        return _indexed(first, node.args[1], of)
    if name == "index":
        indices: Any = node.args[1]
        return _indexed(first, [slice(None) if i is None else i for i in indices], of)
    shape = _shape(first)
    if name in SOFTMAX or name == "log_softmax":
        dim = _dim(first, operand(node, 1, "dim", default=-1))
        return moved(lambda p: MIXED if p.dim == dim and p.size > 1 else p)
    if name == "embedding":  # (indices, weight), in aten the other way round
        return of(next(n for n in node.all_input_nodes if not may_hold_floats(n)))
    if name in ("copy", "copy_"):
        return _aligned(of(node.args[1]), _shape(node.args[1]), out)
    if shape is None:
        raise _UnreadError
    if name in RESHAPE or name == "ravel":
        return moved(lambda p: _located(p, shape, out))
    if name in PERMUTE or name == "getattr":
        order = _order(node, name, len(shape))
        return moved(lambda p: p._replace(dim=order.index(p.dim)))
    if name in ("expand", "expand_as", "broadcast_to"):
        return _aligned(of(first), shape, out)
    if name in ("repeat", "tile"):
        added = len(out) - len(shape)
        wide = (*(1,) * added, *shape)
        times = [o // max(w, 1) for o, w in zip(out, wide, strict=True)]
        return moved(
            lambda p: p._replace(dim=p.dim + added, before=p.before * times[p.dim + added])
        )
    if name == "repeat_interleave":
        times_, dim = operand(node, 1, "repeats"), operand(node, 2, "dim")
        if not isinstance(times_, int) or dim is None:
            raise _UnreadError
        dim = _dim(first, dim)
        return moved(lambda p: p._replace(after=p.after * times_) if p.dim == dim else p)
    if name in ("select", "narrow", "slice"):
        dim = _dim(first, operand(node, 1, "dim", default=0))
        if name == "select":
            return moved(lambda p: _without_dim(p, dim))
        return moved(lambda p: p if p.dim != dim or out[dim] == shape[dim] else UNKNOWN)
    if name in _PICKS:
        whole: Any = () if name == "roll" else -1  # a roll without dims is of the whole, flat
        dims = operand(node, 2 if name == "roll" else 1, "dim", "dims", default=whole)
        given = dims if isinstance(dims, tuple | list) else (dims,)
        taken = [_dim(first, d) for d in given] or range(len(shape))
        return moved(lambda p: UNKNOWN if p.dim in taken else p)
    if name in _PUTS or name in ("index_put", "index_put_"):
        return _agreed([of(first), _put(node, name, of)])
    if name.startswith(("index_add", "scatter_add")) or name == "scatter_reduce":
        return _join([of(first), _unknown(map(of, node.all_input_nodes[1:]))])
    if name in ("pad", "constant_pad_nd"):
        widths = operand(node, 1, "pad")
        padded = {len(shape) - 1 - i // 2 for i, width in enumerate(widths) if width != 0}
        return moved(lambda p: UNKNOWN if p.dim in padded else p)
    if name == "where":
        a, b = operand(node, 1, "self", "input"), operand(node, 2, "other")
        values = _agreed([_aligned(of(n), _shape(n), out) for n in (a, b) if _shape(n) is not None])
        return _join([values, _aligned(of(node.args[0]), _shape(node.args[0]), out)])
    if name in _LEADING:
        return moved(lambda p: p if p.dim == 0 and out[0] == shape[0] else UNKNOWN)
    if name in _REDUCTIONS:
        dims = operand(node, 1, "dim", "axis", default=None)
        if dims is None:
            return {}
        taken = [_dim(first, d) for d in (dims if isinstance(dims, tuple | list) else (dims,))]
        if len(out) == len(shape):
            return moved(lambda p: None if p.dim in taken else p)
        return moved(lambda p: _without_dims(p, taken))
    if node.target is DROPOUT_OP or _is_pointwise(name):
        operands = [n for n in node.all_input_nodes if _shape(n) is not None]
        return _join([_aligned(of(n), _shape(n), out) for n in operands])
    raise _UnreadError


# --- ops that bring values together --------------------------------------------------------------


def _join(states: Iterable[State]) -> State:
    """Element by element: a place that is known stands for one that is not."""
    joined: State = {}
    for state in states:
        for source, place in state.items():
            known = joined.get(source, place)
            if MIXED in (known, place):
                joined[source] = MIXED
            elif known == UNKNOWN or place == UNKNOWN:
                joined[source] = place if known == UNKNOWN else known
            elif known == place:
                joined[source] = place
            else:
                joined[source] = MIXED if place.size > 1 else UNKNOWN
    return joined


def _agreed(states: Iterable[State]) -> State:
    """Of parts that lie side by side: a place is that of the whole where no part has another."""
    agreed: State = {}
    for state in states:
        for source, place in state.items():
            known = agreed.get(source, place)
            differ = MIXED if MIXED in (known, place) else UNKNOWN
            agreed[source] = place if known == place else differ
    return agreed


def _unknown(states: Iterable[State]) -> State:
    return {s: MIXED if p == MIXED else UNKNOWN for state in states for s, p in state.items()}


def _contracted(node: fx.Node, name: str, of: Any) -> list[State]:
    a, b = operand(node, 0, "input", "query"), operand(node, 1, "other", "weight")
    rank = len(_shape(a) or ())
    rows = _mapped(of(a), lambda p: None if p.dim == rank - 1 else p)
    if name == "linear":
        return [rows]
    if name == "scaled_dot_product_attention":
        key, value = operand(node, 1, "key"), operand(node, 2, "value")
        of_keys = [
            _mapped(of(n), lambda p: (MIXED if p.size > 1 else None) if p.dim >= rank - 2 else p)
            for n in (key, value)
        ]
        return [rows, *of_keys]
    if name == "einsum":
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = list(operands[0])
        if not isinstance(equation, str) or "." in equation:
            raise _UnreadError
        left, _, right = equation.replace(" ", "").partition("->")
        return [
            _mapped(
                of(n),
                lambda p, t=terms: (
                    p._replace(dim=right.index(t[p.dim])) if t[p.dim] in right else None
                ),
            )
            for n, terms in zip(operands, left.split(","), strict=True)
        ]
    return [_matmul(a, b, of)]


def _matmul(a: Any, b: Any, of: Any) -> State:
    rank_a, rank_b = len(_shape(a) or ()), len(_shape(b) or ())
    if min(rank_a, rank_b) < 2:
        raise _UnreadError
    rank = max(rank_a, rank_b)

    def of_a(p: Place) -> Any:
        return None if p.dim == rank_a - 1 else p._replace(dim=p.dim + rank - rank_a)

    def of_b(p: Place) -> Any:
        return None if p.dim == rank_b - 2 else p._replace(dim=p.dim + rank - rank_b)

    return _join([_mapped(of(a), of_a), _mapped(of(b), of_b)])


def _catenated(node: fx.Node, name: str, parts: Any, of: Any) -> State:
    dim = operand(node, 1, "dim", "axis", default=0) % len(_shape(node) or (1,))
    if name == "stack":
        return _agreed(
            _mapped(of(n), lambda p: p._replace(dim=p.dim + (p.dim >= dim))) for n in parts
        )
    return _agreed(_mapped(of(n), lambda p: UNKNOWN if p.dim == dim else p) for n in parts)


def _aligned(state: State, shape: Sequence[int] | None, out: Sequence[int]) -> State:
    """Broadcast from the right; what is spread over rows has no place in them."""
    assert shape is not None
    added = len(out) - len(shape)
    return _mapped(
        state,
        lambda p: p._replace(dim=p.dim + added) if out[p.dim + added] == shape[p.dim] else None,
    )


# --- views and indices ---------------------------------------------------------------------------


def _located(place: Place, shape: Sequence[int], out: Sequence[int]) -> Any:
    """The place in a view: what a step of the source is in elements stays."""
    step = place.after * math.prod(shape[place.dim + 1 :])
    found = []
    for dim, size in enumerate(out):
        inner = math.prod(out[dim + 1 :])
        if inner and step % inner == 0:
            after = step // inner
            if size % (after * place.size) == 0:
                found.append(Place(dim, size // (after * place.size), place.size, after))
    whole = [p for p in found if p.before == p.after == 1]
    return next(iter(whole or found), UNKNOWN)


def _without_dim(place: Place, dim: int) -> Any:
    """The place behind one step of a dimension: of samples, that is one of them."""
    if place.dim == dim:
        return UNKNOWN if place.size > 1 else None
    return place._replace(dim=place.dim - (dim < place.dim))


def _without_dims(place: Place, dims: Sequence[int]) -> Place | None:
    if place.dim in dims:
        return None
    return place._replace(dim=place.dim - sum(d < place.dim for d in dims))


def _order(node: fx.Node, name: str, rank: int) -> list[int]:
    """The dimensions of a permuted value, as those of its source."""
    order = list(range(rank))
    if name == "permute":
        given = node.args[1:] if len(node.args) > 1 else tuple(node.kwargs.values())[-1:]
        dims = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        return [int(d) % rank for d in dims]  # type: ignore[arg-type]
    if name in ("movedim", "moveaxis"):
        a, b = operand(node, 1, "source"), operand(node, 2, "destination")
        order.insert(b % rank, order.pop(a % rank))
        return order
    if name == "getattr" and node.args[1] not in ("T", "mT"):
        raise _UnreadError
    if name in ("t", "mT", "numpy_T", "getattr"):
        is_all = name == "numpy_T" or (name == "getattr" and node.args[1] == "T")
        return order[::-1] if is_all else [*order[:-2], order[-1], order[-2]]
    a, b = operand(node, 1, "dim0", "axis0") % rank, operand(node, 2, "dim1", "axis1") % rank
    order[a], order[b] = order[b], order[a]
    return order


def _index_parts(shape: Sequence[int], index: Any) -> list[Any]:
    """An index with `...` written out: one entry for each dimension, and None for new ones."""
    parts = list(index) if isinstance(index, tuple | list) else [index]
    used = sum(p is not None and p is not ... for p in parts)
    rest = [slice(None)] * (len(shape) - used)
    if any(p is ... for p in parts):
        at = next(i for i, p in enumerate(parts) if p is ...)
        return [*parts[:at], *rest, *parts[at + 1 :]]
    return [*parts, *rest]


def _indexed(value: fx.Node, index: Any, of: Any) -> State:
    shape = _shape(value) or ()
    parts = _index_parts(shape, index)
    tensors = [p for p in parts if isinstance(p, fx.Node) and _shape(p) is not None]
    if any(dtype_of(p) in (torch.bool, torch.uint8) for p in tensors) or len(tensors) > 1:
        raise _UnreadError
    places: dict[int, Any] = {}  # dimension of the value -> of the result, None if it is gone
    result, dim, picked = 0, 0, 0
    for part in parts:
        if part is None:
            result += 1
        elif isinstance(part, slice):
            places[dim] = result if _is_whole(part, shape[dim]) else -1 - result
            result, dim = result + 1, dim + 1
        elif isinstance(part, fx.Node) and _shape(part) is not None:
            picked, places[dim] = result, UNKNOWN
            result, dim = result + len(_shape(part) or ()), dim + 1
        else:
            places[dim], dim = None, dim + 1

    def move(p: Place) -> Any:
        at = places[p.dim]
        if at is None:
            return UNKNOWN if p.size > 1 else None
        if at == UNKNOWN:
            return at
        return UNKNOWN if at < 0 else p._replace(dim=at)

    given = [_mapped(of(t), lambda p: p._replace(dim=p.dim + picked)) for t in tensors]
    return _join([_mapped(of(value), move), *given])


def _written(node: fx.Node, state: State) -> State:
    """What `value[index] = part` writes where: dimensions that are taken whole, or in part."""
    value, index, part = node.args
    shape, given = _shape(value) or (), _shape(part) or ()
    parts = _index_parts(shape, index)
    if any(p is None or isinstance(p, fx.Node) and _shape(p) is not None for p in parts):
        return _unknown([state])
    kept = [dim for dim, p in enumerate(parts) if isinstance(p, slice)]
    added = len(kept) - len(given)

    def move(p: Place) -> Any:
        at = kept[p.dim + added]
        return p._replace(dim=at) if shape[at] == given[p.dim] else UNKNOWN

    return _mapped(state, move)


def _put(node: fx.Node, name: str, of: Any) -> State:
    """The places in what an op puts into its first operand, which has the same dimensions."""
    first = operand(node, 0, "input", "self")
    shape = _shape(first) or ()
    taken: Sequence[int] = range(len(shape))
    if name in _PUTS:
        where, position = _PUTS[name]
        value = operand(node, position, "source", "src", "value")
        if where is not None:
            taken = [_dim(first, operand(node, where, "dim"))]
    else:
        indices, value = operand(node, 1, "indices"), operand(node, 2, "values")
        taken = [dim for dim, index in enumerate(indices) if index is not None]
        if _shape(value) != shape:
            return _unknown([of(value)])
    if not isinstance(value, fx.Node):
        return {}
    put = _mapped(of(value), lambda p: UNKNOWN if p.dim in taken else p)
    return _in_part(put, _shape(value), shape)


def _in_part(state: State, given: Any, shape: Any) -> State:
    """The places of a value in one of as many dimensions that it is a part of."""
    if given is None or shape is None or len(given) != len(shape):
        return _unknown([state])
    return _mapped(state, lambda p: p if given[p.dim] == shape[p.dim] else UNKNOWN)


def _is_whole(part: slice, size: int) -> bool:
    ends = (part.start in (None, 0), part.stop is None or part.stop == size, part.step in (None, 1))
    return all(ends)


# --- what nodes are ------------------------------------------------------------------------------


def _mapped(state: State, move: Any) -> State:
    """Move the known places of a state; None takes a source out."""
    moved = {s: move(p) if isinstance(p, Place) else p for s, p in state.items()}
    return {s: p for s, p in moved.items() if p is not None}


def _shape(node: Any) -> tuple[int, ...] | None:
    """The sizes that a value was traced with, None for what is no tensor or depends on data."""
    value = tensor_meta(node)
    if value is None or value.is_nested:
        return None
    sizes = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
    return None if any(s is None for s in sizes) else tuple(map(int, sizes))


def _dim(value: Any, dim: int) -> int:
    return dim % len(_shape(value) or (1,))


_PYTHONS = frozenset(
    "add sub mul pow neg eq ne lt le gt ge mod xor invert iadd isub imul itruediv".split()
)


def _is_pointwise(name: str) -> bool:
    """Whether torch says of an op that it works element by element."""
    name = name.strip("_")
    if name in _PYTHONS or name in ("radd", "rmul", "rsub", "rtruediv", "and", "or"):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads: list[str] = getattr(packet, "overloads", list)()
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads)
