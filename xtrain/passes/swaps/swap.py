"""Run one matcher over a graph and the bodies that it calls, counting what it did and refused."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from xtrain import torch_compat
from xtrain.passes.match import Refused
from xtrain.passes.result import PassResult
from xtrain.passes.swaps.account import Account, accounts_of

# Takes a node; returns None where it is no anchor, else the form that the op took.
Swap = Callable[[fx.Node, Account], str | None]


def swap_each(graph: fx.Graph, swap: Swap) -> PassResult:
    """Offer each node of a graph and of its bodies to `swap`; a Refused match stays as it is.

    What a match emitted before it was refused is taken out again.
    """
    result = PassResult()
    module = graph.owning_module
    assert module is not None
    for part, account in accounts_of(module):
        for node in list(part.graph.nodes):
            if torch_compat.is_erased(node) or node.op not in ("call_function", "call_method"):
                continue
            try:
                form = swap(node, account)
            except Refused as refusal:
                result.num_matched += 1
                result.skip(str(refusal))
                account.erase_unknown()
                continue
            if form is not None:
                result.num_matched += 1
                result.num_replaced += 1
                result.forms[form] = result.forms.get(form, 0) + 1
    return result
