"""Run one matcher over a graph and the bodies that it calls, counting what it did and refused."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.forms import erase_unread
from xtrain.passes.match import Refused, Writes
from xtrain.passes.result import PassResult

# Takes a node; returns None where it is no anchor, else the form that the op took.
Swap = Callable[[fx.Node, Writes], str | None]


def swap_each(graph: fx.Graph, swap: Swap) -> PassResult:
    """Offer each node of a graph and of its bodies to `swap`; a Refused match stays as it is.

    What a match emitted before it was refused is taken out again.
    """
    result = PassResult()
    module = graph.owning_module
    assert module is not None
    for part in dict.fromkeys(fx_utils.walk_graphs(module)):
        writes = Writes(part.graph)
        known = set(part.graph.nodes)
        for node in list(part.graph.nodes):
            if node._erased or node.op not in ("call_function", "call_method"):
                continue
            try:
                form = swap(node, writes)
            except Refused as refusal:
                result.num_matched += 1
                result.skip(str(refusal))
                erase_unread([n for n in part.graph.nodes if n not in known])
                continue
            if form is not None:
                result.num_matched += 1
                result.num_replaced += 1
                known = set(part.graph.nodes)
                result.forms[form] = result.forms.get(form, 0) + 1
    return result
