"""Take out the views and casts that the swaps put back to back.

Before:  a = x.transpose(1, 2);  b = a.transpose(1, 2)      After:  readers of b and d read x
         c = x.to(fp32);  d = c.to(bf16)        x is bf16
Stage:   normalised graph, last.     Changes numerics: no: widening a float is exact.
"""

from __future__ import annotations

import torch
from torch import fx

from xtrain.passes.account import Account
from xtrain.passes.match import cast_source, dtype_of
from xtrain.passes.normalise import unchanged
from xtrain.passes.result import PassResult
from xtrain.passes.swap import swap_each


def remove_noop_views(graph: fx.Graph) -> PassResult:
    """Take out what hands a value on unchanged; each counts as matched and replaced."""

    def take_out(node: fx.Node, account: Account) -> str | None:
        source = unchanged(node) or _cast_back(node)
        if source is None:
            return None
        account.settle({node: source})
        return "taken out"

    result = swap_each(graph, take_out)
    result.forms.clear()
    return result


def _cast_back(node: fx.Node) -> fx.Node | None:
    """Return x for x.to(wider).to(x.dtype)."""
    middle = cast_source(node)
    source = cast_source(middle)
    if source is None or dtype_of(source) != dtype_of(node):
        return None
    narrow, wide = dtype_of(source), dtype_of(middle)
    assert narrow is not None and wide is not None
    return source if torch.promote_types(narrow, wide) == wide else None
