"""Give every value of a graph one spelling, so that the matchers behind need to know one.

Before:  c = x.to(fp32)            x is fp32 already     After:  readers of c, d, v and t read x
         d = F.dropout(x, 0.0)
         v = x[:, 0:, :]
         t = x.transpose(1, 2).transpose(1, 2)
Stage:   Dynamo's graph, with dropout in. Casts of one value would otherwise part the residual
         stream from the norm that reads it.     Changes numerics: no.
Needs:   nothing; the graph is not traced again. Dynamo's graph is nearly canonical as it stands,
         and tracing it once more (make_fx) would lose what later readers need: example values
         (DDP's splitter), sources of inputs, checkpointed bodies, autocast and grad-mode regions.
Skips:   a value that is written in place, whose copy or view is then not the value itself.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes.forms import replace
from xtrain.passes.fx_utils import op_name, operand, tensor_meta
from xtrain.passes.match import Writes, cast_source, unary_of
from xtrain.passes.result import PassResult
from xtrain.passes.swap import swap_each
from xtrain.passes.values import is_absent_dropout


def normalise(graph: fx.Graph) -> PassResult:
    """Take out what hands a value on unchanged; each counts as matched and replaced."""

    def take_out(node: fx.Node, writes: Writes) -> str | None:
        source = unchanged(node)
        if source is None:
            return None
        writes.refuse(source, node)
        replace(node, source)
        return "taken out"

    result = swap_each(graph, take_out)
    result.forms.clear()
    return result


def unchanged(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node hands on as it is, or None."""
    if is_absent_dropout(node):
        return operand(node, 0, "input")
    if (source := _same_cast(node)) is not None:
        return source
    if op_name(node) == "getitem":
        return _whole(node)
    return _turned_back(node)


def _same_cast(node: fx.Node) -> fx.Node | None:
    source = cast_source(node)
    if source is None or op_name(node) == "_to_copy" or operand(node, 3, "copy") is True:
        return None
    if "memory_format" in node.kwargs:
        return None
    before, after = tensor_meta(source), tensor_meta(node)
    same = before is not None and after is not None and before.dtype == after.dtype
    return source if same else None


def _whole(node: fx.Node) -> fx.Node | None:
    """Return x for x[:, 0:, :] and the like."""
    source, index = node.args
    if not isinstance(source, fx.Node) or tensor_meta(source) is None:
        return None
    parts = index if isinstance(index, tuple) else (index,)
    before, after = tensor_meta(source), tensor_meta(node)
    if before is None or after is None or before.ndim != after.ndim:
        return None
    same = all(
        statically_known_true(a == b) for a, b in zip(before.shape, after.shape, strict=True)
    )
    whole = all(p is Ellipsis or _counts_up_from_zero(p) for p in parts)
    return source if whole and same and parts else None


def _counts_up_from_zero(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)


def _turned_back(node: fx.Node) -> fx.Node | None:
    """Return x for x.transpose(a, b).transpose(a, b)."""
    inner = unary_of(node, "transpose")
    source = unary_of(inner, "transpose")
    if source is None or _dims(node) != _dims(inner):
        return None
    return source


def _dims(node: fx.Node) -> set[int] | None:
    value = tensor_meta(node)
    dims = operand(node, 1, "dim0"), operand(node, 2, "dim1")
    if value is None or not all(isinstance(d, int) for d in dims):
        return None
    return {d % value.ndim for d in dims}
