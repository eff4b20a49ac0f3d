"""What the matchers of the swaps share: one reading of arithmetic, casts and parts of a tensor.

A matcher starts at an anchor, an op that few other patterns hold (rsqrt, silu, attention), and
walks from there along operands, so that operand order and casts between cost it no second pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from xtrain.passes.graph import (
    ADD,
    CAST,
    CUT,
    DIV,
    MUL,
    POWER,
    SHOWN,
    SUB,
    dtype_of,
    first_operand,
    first_two,
    is_in_place,
    known_dtype,
    known_tensor,
    ndim_of,
    op_name,
    operand,
    tensor_meta,
    tensors_of,
)

# Ops whose operand autocast casts to its dtype: what they read, they round.
_LOWERING = frozenset("linear matmul mm bmm addmm baddbmm scaled_dot_product_attention".split())

Pair = tuple[Any, Any]


def name_of(dtype: torch.dtype | None) -> str:
    """Return a dtype as messages spell it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def is_number(value: object) -> bool:
    """Whether an argument is a Python number (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- arithmetic -----------------------------------------------------------------------------------


def _pair_of(node: object, kind: frozenset[str]) -> Pair | None:
    """Return both operands of an op of a kind that writes into neither, or None."""
    if not isinstance(node, fx.Node) or (name := op_name(node)) not in kind or is_in_place(name):
        return None
    return first_two(node)


def add_of(node: object) -> Pair | None:
    """Return the addends of an out-of-place add without `alpha`, or None."""
    pair = _pair_of(node, ADD)
    return None if pair is None or _has_alpha(node) else pair


def sub_of(node: object) -> Pair | None:
    """Return (a, b) of an out-of-place a - b without `alpha`, or None."""
    pair = _pair_of(node, SUB - {"rsub", "__rsub__"})
    return None if pair is None or _has_alpha(node) else pair


def _has_alpha(node: Any) -> bool:
    return bool(operand(node, 2, "alpha", default=1) != 1)


def mul_of(node: object) -> Pair | None:
    """Return the factors of an out-of-place product, or None."""
    return _pair_of(node, MUL)


def div_of(node: Any) -> Pair | None:
    """Return (a, b) of an out-of-place true division a / b, or None."""
    pair = _pair_of(node, DIV)
    return None if pair is None or node.kwargs.get("rounding_mode") else pair


def both_orders(pair: Pair | None) -> tuple[Pair, ...]:
    """Return the two orders of a pair of operands, none for None."""
    return () if pair is None else (pair, pair[::-1])


def unary_of(node: object, *names: str) -> Any:
    """Return the operand of a one-operand call of one of these names, or None."""
    if not isinstance(node, fx.Node) or op_name(node) not in names:
        return None
    return operand(node, 0, "input", "self")


def power_of(node: object, exponent: float) -> Any:
    """Return the base of `base ** exponent`, or None; a square is also square(x) and x * x."""
    if not isinstance(node, fx.Node):
        return None
    if op_name(node) in POWER and operand(node, 1, "exponent") == exponent:
        return operand(node, 0, "input", "self")
    if exponent == 2:
        factors = mul_of(node)
        if factors is not None and factors[0] is factors[1]:
            return factors[0]
        return unary_of(node, "square")
    return None


# --- casts and readers ----------------------------------------------------------------------------


def cast_source(node: object) -> fx.Node | None:
    """Return what a float cast to another float dtype casts, or None for anything else."""
    source = unary_of(node, *CAST)
    value, cast = tensor_meta(source), tensor_meta(node)
    if value is None or cast is None or value.device != cast.device:
        return None
    floats = value.dtype.is_floating_point and cast.dtype.is_floating_point
    return source if floats else None


def uncast(node: Any) -> Any:
    """Return a value before the float casts that it went through."""
    while (source := cast_source(node)) is not None:
        node = source
    return node


def unwidened(node: Any) -> Any:
    """Return a value before the casts that only widened it: they changed nothing."""
    while (source := cast_source(node)) is not None and widens(source, node):
        node = source
    return node


def widens(narrow: fx.Node, wide: fx.Node) -> bool:
    """Whether a dtype holds all numbers of another."""
    dtype = known_dtype(wide)
    return torch.promote_types(known_dtype(narrow), dtype) == dtype


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the one node that reads a value, None when there are more or none."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def rounds_to(node: fx.Node, *, views: bool = False) -> torch.dtype | None:
    """Return the dtype that all users of a value round it to as they read it, None if they differ.

    A cast does, and under autocast a matmul does: both its result and what it reads are bf16.

    Args:     views: also who reads it through views, heads repeated included.
    """
    found = set()
    pending = [node]
    for value in pending:
        for user in value.users:
            name = op_name(user)
            if cast_source(user) is value or name in _LOWERING:
                found.add(dtype_of(user))
            elif views and (name in SHOWN or name == "repeat_interleave"):
                pending.append(user)
            else:
                return None
    return found.pop() if len(found) == 1 else None


# --- parts of the last dim ------------------------------------------------------------------------


def is_last_dim(dim: object, node: object) -> bool:
    """Whether a dim is a tensor's last, counted from either end."""
    return dim in (-1, ndim_of(node) - 1)


def part_of_last_dim(node: object) -> tuple[fx.Node, Any, Any] | None:
    """Return (x, start, stop) when a node is x[..., start:stop], however it was cut out.

    Slices, chunk, split, narrow; for `x[..., 0::2]` and the like see `stride_of_last_dim`.
    """
    if not isinstance(node, fx.Node):
        return None
    name, source = op_name(node), first_operand(node)
    if name == "getitem":
        if not isinstance(source, fx.Node):
            return None
        if op_name(source) in CUT:
            return _piece(source, node.args[1])
        cut = _last_slice(source, node.args[1])
        return None if cut is None or cut[2] != 1 else (source, cut[0], cut[1])
    if name in ("slice", "narrow") and (value := tensor_meta(source)) is not None:
        start = operand(node, 2, "start", default=0) or 0
        end = operand(node, 3, "end", "length")
        is_last = is_last_dim(operand(node, 1, "dim", default=0), source)
        if not is_last or operand(node, 4, "step", default=1) != 1:
            return None
        size = value.shape[-1]
        end = size if end is None else (start + end if name == "narrow" else min(end, size))
        return source, start, end
    return None


def stride_of_last_dim(node: object) -> tuple[fx.Node, int, int] | None:
    """Return (x, start, step) when a node is x[..., start::step] with a step above 1."""
    if not isinstance(node, fx.Node) or op_name(node) != "getitem":
        return None
    source, index = node.args
    cut = _last_slice(source, index) if isinstance(source, fx.Node) else None
    if cut is None or cut[2] == 1:
        return None
    assert isinstance(source, fx.Node)
    return (source, cut[0], cut[2]) if cut[1] == known_tensor(source).shape[-1] else None


def _last_slice(source: fx.Node, index: Any) -> tuple[Any, Any, int] | None:
    """(start, stop, step) of an index that cuts the last dim alone."""
    value = tensor_meta(source)
    if value is None or not isinstance(index, tuple) or not index:
        return None
    *front, last = index
    dims = sum(i is not Ellipsis for i in front)
    reaches_last = Ellipsis in front or dims == value.ndim - 1
    if not reaches_last or any(i is not Ellipsis and i != slice(None) for i in front):
        return None
    size = value.shape[-1]
    if not isinstance(last, slice) or not isinstance(size, int):
        return None
    if any(isinstance(p, fx.Node) for p in (last.start, last.stop, last.step)):
        return None
    return last.indices(size)


def _piece(source: fx.Node, index: Any) -> tuple[fx.Node, Any, Any] | None:
    """(x, start, stop) of one piece of a chunk or split along the last dim."""
    whole = first_operand(source)
    sizes = [piece.shape[-1] for piece in tensors_of(source)]
    if tensor_meta(whole) is None or not isinstance(index, int) or not sizes:
        return None
    if not is_last_dim(operand(source, 2, "dim", default=0), whole):
        return None
    index %= len(sizes)
    return whole, sum(sizes[:index]), sum(sizes[: index + 1])
