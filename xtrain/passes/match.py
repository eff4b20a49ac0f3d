"""What the matchers of the swaps share: one reading of each op, however it was spelt.

A matcher starts at an anchor, an op that few other patterns hold (rsqrt, silu, attention), and
walks from there along operands, so that operand order and casts between cost it no second pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.fx_utils import op_name, operand, tensor_meta

SUB = frozenset({"sub", "subtract", "__sub__"})
NEG = frozenset({"neg", "negative", "__neg__"})
_ADD = fx_utils.ADD - fx_utils.IN_PLACE_ADD
_MUL = fx_utils.MUL - fx_utils.IN_PLACE_SCALING
_DIV = fx_utils.DIV - fx_utils.IN_PLACE_SCALING
_CASTS = frozenset({"to", "_to_copy", "type", "type_as", "float", "half", "bfloat16", "double"})
_CASTS |= {"convert_element_type"}
# Ops whose operand autocast casts to its dtype: what they read, they round.
_LOWERING = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})
_LOWERING |= {"scaled_dot_product_attention"}
# Ops that show the numbers of their first operand, or a part of them, in another place.
_VIEWS = (fx_utils.VIEW_LIKE - {"clone"}) | {
    "getitem",
    "chunk",
    "split",
    "split_with_sizes",
    "tensor_split",
    "unbind",
    "expand",
    "expand_as",
    "broadcast_to",
    "slice",
    "select",
    "narrow",
    "detach",
    "t",
    "swapaxes",
    "movedim",
    "diagonal",
    "as_strided",
    "real",
    "view_as_real",
    "view_as_complex",
    "getattr",
    "unfold",
}


class Refused(Exception):
    """A match that stays as it is; the message is the reason that the report gives."""


def known_dtype(node: object) -> torch.dtype:
    """Return the dtype of a node that is known to hold a tensor."""
    dtype = dtype_of(node)
    assert dtype is not None
    return dtype


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of a node's tensor value, None for anything else."""
    value = tensor_meta(node)
    return None if value is None else value.dtype


def name_of(dtype: torch.dtype | None) -> str:
    """Return a dtype as messages spell it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def add_of(node: object) -> tuple[Any, Any] | None:
    """Return the addends of an out-of-place add without `alpha`, or None."""
    if not isinstance(node, fx.Node) or op_name(node) not in _ADD:
        return None
    return None if operand(node, 2, "alpha", default=1) != 1 else fx_utils.add_operands(node)


def sub_of(node: object) -> tuple[Any, Any] | None:
    """Return (a, b) of an out-of-place a - b without `alpha`, or None."""
    if not isinstance(node, fx.Node) or op_name(node) not in SUB:
        return None
    return None if operand(node, 2, "alpha", default=1) != 1 else fx_utils.add_operands(node)


def mul_of(node: object) -> tuple[Any, Any] | None:
    """Return the factors of an out-of-place product, or None."""
    if not isinstance(node, fx.Node) or op_name(node) not in _MUL:
        return None
    return fx_utils.add_operands(node)


def div_of(node: object) -> tuple[Any, Any] | None:
    """Return (a, b) of an out-of-place true division a / b, or None."""
    if not isinstance(node, fx.Node) or op_name(node) not in _DIV:
        return None
    return None if node.kwargs.get("rounding_mode") else fx_utils.add_operands(node)


def both_orders(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
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
    if op_name(node) in ("pow", "__pow__") and operand(node, 1, "exponent") == exponent:
        return operand(node, 0, "input", "self")
    if exponent == 2:
        factors = mul_of(node)
        if factors is not None and factors[0] is factors[1]:
            return factors[0]
        return unary_of(node, "square")
    return None


def cast_source(node: object) -> fx.Node | None:
    """Return what a float cast to another float dtype casts, or None for anything else."""
    source = unary_of(node, *_CASTS)
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
    while (source := cast_source(node)) is not None:
        dtype = known_dtype(node)
        if torch.promote_types(known_dtype(source), dtype) != dtype:
            break
        node = source
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the one node that reads a value, None when there are more or none."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def is_number(value: object) -> bool:
    """Whether an argument is a Python number (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def part_of_last_dim(node: object) -> tuple[fx.Node, Any, Any] | None:
    """Return (x, start, stop) when a node is x[..., start:stop], however it was cut out.

    Slices, chunk, split, narrow; for `x[..., 0::2]` and the like see `stride_of_last_dim`.
    """
    if not isinstance(node, fx.Node):
        return None
    name = op_name(node)
    if name == "getitem":
        source, index = node.args
        if not isinstance(source, fx.Node):
            return None
        if op_name(source) in ("chunk", "split", "split_with_sizes", "tensor_split"):
            return _piece(source, index)
        cut = _last_slice(source, index)
        return None if cut is None or cut[2] != 1 else (source, cut[0], cut[1])
    value = tensor_meta(operand(node, 0, "input", "self"))
    if name in ("slice", "narrow") and value is not None:
        dim = operand(node, 1, "dim", default=0)
        start = operand(node, 2, "start", default=0) or 0
        end = operand(node, 3, "end", "length")
        if dim not in (-1, value.ndim - 1) or operand(node, 4, "step", default=1) != 1:
            return None
        size = value.shape[-1]
        end = size if end is None else (start + end if name == "narrow" else min(end, size))
        return operand(node, 0, "input", "self"), start, end
    return None


def stride_of_last_dim(node: object) -> tuple[fx.Node, int, int] | None:
    """Return (x, start, step) when a node is x[..., start::step] with a step above 1."""
    if not isinstance(node, fx.Node) or op_name(node) != "getitem":
        return None
    source, index = node.args
    cut = _last_slice(source, index) if isinstance(source, fx.Node) else None
    if cut is None or cut[2] == 1:
        return None
    value = tensor_meta(source)
    assert isinstance(source, fx.Node) and value is not None
    return (source, cut[0], cut[2]) if cut[1] == value.shape[-1] else None


def _last_slice(source: fx.Node, index: Any) -> tuple[Any, Any, int] | None:
    """(start, stop, step) of an index that cuts the last dim alone."""
    value = tensor_meta(source)
    if value is None or not isinstance(index, tuple) or not index:
        return None
    *front, last = index
    full = slice(None)
    dims = sum(i is not Ellipsis for i in front)
    reaches_last = Ellipsis in front or dims == value.ndim - 1
    if not reaches_last or any(i is not Ellipsis and i != full for i in front):
        return None
    if not isinstance(last, slice) or any(isinstance(p, fx.Node) for p in _parts(last)):
        return None
    size = value.shape[-1]
    if not isinstance(size, int):
        return None
    return last.indices(size)


def _parts(cut: slice) -> tuple[Any, Any, Any]:
    return cut.start, cut.stop, cut.step


def _piece(source: fx.Node, index: Any) -> tuple[fx.Node, Any, Any] | None:
    """(x, start, stop) of one piece of a chunk or split along the last dim."""
    whole = operand(source, 0, "input", "self", "tensor")
    value = tensor_meta(whole)
    pieces = source.meta.get("example_value", source.meta.get("val"))
    dim = operand(source, 2, "dim", default=0)
    if value is None or dim not in (-1, value.ndim - 1) or not isinstance(index, int):
        return None
    if not isinstance(pieces, tuple | list) or not all(hasattr(p, "shape") for p in pieces):
        return None
    sizes = [p.shape[-1] for p in pieces]
    index %= len(sizes)
    return whole, sum(sizes[:index]), sum(sizes[: index + 1])


def rounds_to(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that all users of a value round it to as they read it, None if they differ.

    A cast does, and under autocast a matmul does: both its result and what it reads are bf16.
    """
    found = set()
    for user in node.users:
        if cast_source(user) is node or op_name(user) in _LOWERING:
            found.add(dtype_of(user))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def rounds_at_last_to(node: fx.Node) -> torch.dtype | None:
    """Return what `rounds_to` does for a value read through views, heads repeated included."""
    found = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            name = op_name(user)
            if cast_source(user) is not None or name in _LOWERING:
                found.add(dtype_of(user))
            elif name in _VIEWS or name == "repeat_interleave":
                pending.append(user)
            else:
                return None
    return found.pop() if len(found) == 1 else None
