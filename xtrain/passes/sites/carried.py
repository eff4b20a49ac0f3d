"""What a node carries of another value: in another form, scaled, normed, in part, under a gate.

x.to(bf16), x.view(B * T, D), x * 0.5, dropout(x)     x itself, as `peel` sees it
rms_norm(x), x - x.mean(-1, keepdim=True)             x, normed
(1 - g) * x + g * h             x, gated: a highway; both factors are candidates
x * padding + h                 x, masked
einsum("ij,jbtd->ibtd", a, x)   x, a stack of streams that coefficients mix
a + f(b), a, b = x.chunk(2)     x, of which a is a part: a reversible block
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes.graph import (
    ADD,
    CUT,
    DIV,
    DROPOUT,
    FILL,
    MUL,
    NEG,
    PART,
    PERMUTE,
    RESHAPE,
    SUB,
    VIEW_LIKE,
    first_operand,
    first_two,
    holds_contraction,
    is_parameter,
    is_table,
    made_of_parameters,
    ndim_of,
    op_name,
    reach,
    same_shape,
    tensor_meta,
)

_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"})
_MAX_GATES = 4
_MAX_STREAMS = 16


# --- one value in other forms ---------------------------------------------------------------------


def peel(node: fx.Node) -> fx.Node:
    """Return the value that a residual operand is, without casts, views, dropout and scaling."""
    return peeled_chain(node)[-1]


def peeled_chain(node: fx.Node) -> list[fx.Node]:
    """Return node, then what it is a cast, view, dropout or scaling of, down to what computes."""
    chain = [node]
    while (inner := _through(chain[-1])) is not None:
        chain.append(inner)
    return chain


def carried_chain(node: fx.Node) -> list[fx.Node]:
    """Return node, then what it is a form, a norm or a part of, down to what computes."""
    chain = [node]
    while inner := form_or_norm_of(chain[-1]) or part_of(chain[-1]) or _shifted(chain[-1]):
        chain.append(inner)
    return chain


def form_or_norm_of(node: fx.Node) -> fx.Node | None:
    """The value that a node shows in another form, or normed."""
    return _through(node) or _normed(node)


def _through(node: fx.Node) -> fx.Node | None:
    """The one operand that a node passes on in another form, or None when it computes.

    A stream that is scaled by parameters may be shifted by some as well.
    """
    name = op_name(node)
    value, other = first_two(node)
    is_view = name in VIEW_LIKE or (name == "getattr" and node.args[1] in ("T", "mT"))
    is_view |= name == "getitem" and _keeps_all(node)
    if is_view or name in DROPOUT or name in NEG:
        return value if isinstance(value, fx.Node) else None
    if name in DIV and "rounding_mode" not in node.kwargs:
        return _scaled_operand(value, other)
    if name in MUL | ADD:
        return _scaled_operand(value, other) or _scaled_operand(other, value)
    return None


def _keeps_all(getitem: fx.Node) -> bool:
    """Whether an index leaves a tensor whole: x[None], x[..., None], x[:, :]."""
    index = getitem.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or _is_full(part) for part in parts)


def _is_full(part: object) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _scaled_operand(value: object, factor: object) -> fx.Node | None:
    """`value` when `factor` is a number or scalar, a parameter or made of parameters only."""
    if not isinstance(value, fx.Node) or tensor_meta(value) is None:
        return None
    if isinstance(factor, fx.Node) and ndim_of(factor) > 0 and not made_of_parameters(factor):
        return None
    return None if made_of_parameters(value) else value


def _normed(node: fx.Node) -> fx.Node | None:
    """The value that a norm is of, or one step of a spelt-out norm: one number for each token."""
    name = op_name(node)
    value, other = first_two(node)
    if name in _NORMS:
        return value if isinstance(value, fx.Node) else None
    if name in MUL | DIV | SUB and _is_one_a_token(other, value):
        return value
    if name in MUL and _is_one_a_token(value, other):
        return other
    return None


def _is_one_a_token(factor: object, value: object) -> bool:
    one, whole = tensor_meta(factor), tensor_meta(value)
    if one is None or whole is None or one.ndim != whole.ndim or one.ndim == 0:
        return False
    return statically_known_true(one.shape[-1] == 1) and not statically_known_true(
        whole.shape[-1] == 1
    )


def part_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a part of, of as many dims: a slice, a chunk.

    A row of stacked values (select, x[0]) is a value of its own.
    """
    source = first_operand(node) if op_name(node) in PART else None
    if op_name(node) == "getitem" and isinstance(source, fx.Node) and op_name(source) in CUT:
        source = first_operand(source)
    return source if ndim_of(node) == ndim_of(source) > -1 else None


def _shifted(node: fx.Node) -> fx.Node | None:
    """The value that a node adds a table of the model's own to: positions, a running mean."""
    first, second = first_two(node) if op_name(node) in ADD | SUB else (None, None)
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if same_shape(first, node) and is_table(second):
        return None if is_table(first) else first
    return second if same_shape(second, node) and is_table(first) else None


# --- values under gates, and of which a node is a part --------------------------------------------


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
    name = op_name(node)
    if name in MUL:
        operands = list(first_two(node))
    elif name == "where":
        operands = list(node.args[1:3])
    else:
        operands = [first_operand(node)] if name in DIV | FILL else []
    return [o for o in operands if isinstance(o, fx.Node)]


def wholes(node: fx.Node) -> list[fx.Node]:
    """The values that an addend is a part of, none where it is whole.

    Parts of a projection are values of their own: queries and keys, the halves of a gate.
    """
    found = []
    value = peel(node)
    while (source := part_of(value)) is not None:
        value = peel(source)
        if holds_contraction(value):
            break
        found.append(value)
    return found


def mixed_streams(node: fx.Node) -> fx.Node | None:
    """The stack of streams that a product mixes by a small square of coefficients, or None.

    H[n, B, T, D] -> sum_m a[m, n] H[m]: as many values as before, of streams that stand side by
    side (AltUp, hyper-connections). Heads, whose tokens attention mixes, are cut from one stream.
    Outside of graphs an einsum is a product of views of three dims.
    """
    result = tensor_meta(node)
    if op_name(node) not in ("einsum", "matmul", "bmm") or result is None or result.ndim < 3:
        return None
    for value in node.all_input_nodes:
        others = [n for n in node.all_input_nodes if n is not value]
        given = tensor_meta(value)
        if given is None or given.ndim != result.ndim or made_of_parameters(value):
            continue
        if len(others) == 1 and _is_small_square(others[0]) and _stands_side_by_side(value):
            if statically_known_true(given.numel() == result.numel()):
                return value
    return None


def _is_small_square(node: fx.Node) -> bool:
    value = tensor_meta(node)
    if value is None or value.ndim < 2:
        return False
    rows, columns = value.shape[-2:]
    is_known = isinstance(rows, int) and isinstance(columns, int)
    return is_known and rows == columns and rows <= _MAX_STREAMS


def _stands_side_by_side(node: fx.Node) -> bool:
    """Whether a value of four dims is no other view of one of fewer, nor a projection."""
    views = PERMUTE | {"contiguous", "clone"} | (RESHAPE if ndim_of(node) < 4 else frozenset())
    value = node
    while op_name(value) in views:
        value = value.all_input_nodes[0]
    if holds_contraction(value) or ndim_of(value) < 4:
        return False
    inner = form_or_norm_of(value)
    return tensor_meta(inner) is None or ndim_of(inner) == ndim_of(value)


def parameters_read_by(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the parameters that these nodes multiply by or add, in the nodes' order."""
    seen = set()
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in seen and made_of_parameters(source):
                seen.add(source)
                yield from filter(is_parameter, reach([source]))
