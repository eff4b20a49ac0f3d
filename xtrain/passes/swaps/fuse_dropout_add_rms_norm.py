"""Fuse a residual add, the dropout on its branch and the norm that reads the sum.

Before:  d = xtrain.dropout(x, p, seed, offset)     After:  h, y = xtrain.dropout_add_rms_norm(
         h = residual + d                                       x, residual, w, p, seed, offset,
         y = xtrain.rms_norm(h, w, eps, cast)                    eps, cast)
Stage:   normalised graph, behind use_triton_rms_norm.     Changes numerics: no more than that did.
Needs:   h may have other readers, and always has: the next branch is added to it. The norm may sit
         in the next block, or be the final one. Several norms of one sum: the first is fused.
Also:    an add without dropout of ours fuses with p = 0.
Skips:   sums made in another graph than the norm (checkpointed blocks), sums of other shapes or
         dtypes, adds that write in place, a weight that is computed only behind the add.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.passes.graph import (
    DROPOUT,
    Refused,
    dtype_of,
    is_xtrain_op,
    known_dtype,
    known_tensor,
    op_name,
    operand,
    same_shape,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.match import add_of
from xtrain.passes.swaps.rewrite import Forms, Place, swap_each

OP = OPS["dropout_add_rms_norm"]
NORM = OPS["rms_norm"].forward


def fuse_dropout_add_rms_norm(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Fuse dropout, add and norm in a graph and its bodies."""

    def swap(node: fx.Node, account: Account) -> str | None:
        h: Any = node.args[0] if node.target is NORM else None
        addends = add_of(h)
        if addends is None or not all(tensor_meta(a) is not None for a in addends):
            return None  # the norm of something else: an embedding, a projection
        return _fuse(node, h, addends, Forms(kernels, backend), account)

    return swap_each(graph, swap)


def _fuse(
    norm: fx.Node, h: fx.Node, addends: tuple[Any, Any], forms: Forms, account: Account
) -> str:
    x, residual = _branch_first(addends)
    _check(h, x, residual)
    _, weight, eps, cast = norm.args[:4]
    assert isinstance(weight, fx.Node)
    if weight.op not in ("placeholder", "get_attr") and not weight < h:
        raise Refused("the norm's weight is computed only behind the add")
    y_dtype = operand(norm, 4, "out_dtype")
    options: dict[str, Any] = {} if y_dtype is None else {"y_dtype": y_dtype}
    place = Place(h, forms, like=norm)
    p: Any = 0.0
    if _is_dropout(x):
        x, p, seed, offset = x.args  # type: ignore[assignment]
    else:  # a seed that is never read, on x's device
        zero = torch.ops.aten.new_zeros.default
        seed = offset = place.emit(zero, x, [], like=x, dtype=torch.int64)
    both = place.op(OP, (x, residual, weight, p, seed, offset, eps), {"cast": cast}, **options)
    new_h, new_y = (place.item(both, i, like) for i, like in enumerate((h, norm)))
    if dtype_of(new_h) != dtype_of(h) or dtype_of(new_y) != dtype_of(norm):
        raise Refused("the op's results would have other dtypes than the model's")
    account.settle({h: new_h, norm: new_y})
    return place.form


def _branch_first(addends: tuple[Any, Any]) -> tuple[fx.Node, fx.Node]:
    """(branch, residual): the branch is the addend with dropout of ours; without any, the later."""
    first, second = addends
    return (first, second) if _is_dropout(first) > _is_dropout(second) else (second, first)


def _is_dropout(node: fx.Node) -> bool:
    """Whether an addend is a dropout that the add alone reads: the fusion would draw it twice."""
    return is_xtrain_op(node) and op_name(node) in DROPOUT and len(node.users) == 1


def _check(h: fx.Node, x: fx.Node, residual: fx.Node) -> None:
    if not same_shape(x, h) or not same_shape(residual, h):
        raise Refused("branch and residual differ in shape")
    if not all(known_tensor(n).dtype.is_floating_point for n in (h, x, residual)):
        raise Refused("branch and residual are no floats")
    promoted = torch.promote_types(known_dtype(x), known_dtype(residual))
    if promoted != dtype_of(h):
        raise Refused("the sum has another dtype than its addends promote to")
