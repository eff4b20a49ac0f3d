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
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.ops import OPS
from xtrain.passes.fx_utils import DROPOUT, op_name, operand, tensor_meta
from xtrain.passes.match import Refused, add_of, dtype_of, known_dtype
from xtrain.passes.result import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.forms import Forms, emit, emit_getitem, emit_op, values_of
from xtrain.passes.swaps.swap import swap_each
from xtrain.passes.values import is_xtrain_op

OP = OPS["dropout_add_rms_norm"]
NORM = OPS["rms_norm"].forward


def fuse_dropout_add_rms_norm(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Fuse dropout, add and norm in a graph and its bodies."""
    forms = Forms(kernels, backend)

    def swap(node: fx.Node, account: Account) -> str | None:
        if node.target is not NORM:
            return None
        h = node.args[0]
        addends = add_of(h)
        if addends is None or not all(tensor_meta(a) is not None for a in addends):
            return None  # the norm of something else: an embedding, a projection
        assert isinstance(h, fx.Node)
        return _fuse(node, h, addends, forms, account)

    return swap_each(graph, swap)


def _fuse(
    norm: fx.Node, h: fx.Node, addends: tuple[Any, Any], forms: Forms, account: Account
) -> str:
    graph = norm.graph
    x, residual = _branch_first(addends)
    _check(h, x, residual)
    _, weight, eps, cast = norm.args[:4]
    assert isinstance(weight, fx.Node)
    if weight.op not in ("placeholder", "get_attr") and not _stands_before(weight, h):
        raise Refused("the norm's weight is computed only behind the add")
    y_dtype = operand(norm, 4, "out_dtype")
    dropped = x if _is_dropout(x) else None
    with graph.inserting_before(h):
        p: Any = 0.0
        seed: Any = None
        if dropped is not None:
            x, p, seed, offset = dropped.args  # type: ignore[assignment]
        else:
            seed = offset = _zero(graph, x)
        values = values_of((x, residual, weight, p, seed, offset, eps))
        options = {} if y_dtype is None else {"y_dtype": y_dtype}
        opaque, form = forms.choose(OP, *values, cast=cast)
        both = emit_op(
            graph,
            OP,
            (x, residual, weight, p, seed, offset, eps, cast),
            norm,
            opaque=opaque,
            **options,
        )
        new_h, new_y = (emit_getitem(graph, both, i, like) for i, like in enumerate((h, norm)))
    if dtype_of(new_h) != dtype_of(h) or dtype_of(new_y) != dtype_of(norm):
        raise Refused("the op's results would have other dtypes than the model's")
    account.settle({h: new_h, norm: new_y})
    return form


def _branch_first(addends: tuple[Any, Any]) -> tuple[fx.Node, fx.Node]:
    """(branch, residual): the branch is the addend with dropout of ours; without any, the later."""
    first, second = addends
    if _is_dropout(first) != _is_dropout(second):
        return (first, second) if _is_dropout(first) else (second, first)
    return second, first


def _is_dropout(node: fx.Node) -> bool:
    """Whether an addend is a dropout that the add alone reads: the fusion would draw it twice."""
    return is_xtrain_op(node) and op_name(node) in DROPOUT and len(node.users) == 1


def _check(h: fx.Node, x: fx.Node, residual: fx.Node) -> None:
    values = [tensor_meta(n) for n in (h, x, residual)]
    shapes = [v.shape for v in values if v is not None]
    if any(len(s) != len(shapes[0]) for s in shapes) or not all(
        statically_known_true(a == b) for s in shapes[1:] for a, b in zip(shapes[0], s, strict=True)
    ):
        raise Refused("branch and residual differ in shape")
    if not all(v is not None and v.dtype.is_floating_point for v in values):
        raise Refused("branch and residual are no floats")
    promoted = torch.promote_types(known_dtype(x), known_dtype(residual))
    if promoted != dtype_of(h):
        raise Refused("the sum has another dtype than its addends promote to")


def _stands_before(node: fx.Node, other: fx.Node) -> bool:
    return node < other


def _zero(graph: fx.Graph, like: fx.Node) -> fx.Node:
    """A seed for p = 0, which is never read, on the device of `like`."""
    return emit(graph, torch.ops.aten.new_zeros.default, (like, []), like, dtype=torch.int64)
