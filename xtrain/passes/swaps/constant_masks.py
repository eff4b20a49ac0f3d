"""Evaluate attention masks that depend on no input, and say what they are.

Models build a causal mask from torch.arange inside their forward and hand it to attention as a
tensor. It is a constant of the graph: computed once here, it can be compared with what a kernel
does without reading a mask at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from xtrain import torch_compat
from xtrain.passes import fx_utils
from xtrain.passes.fx_utils import op_name
from xtrain.passes.match import Refused
from xtrain.passes.swaps.account import Account, State

# Elements of a mask that are still worth computing: 2 GiB of bytes.
_MAX_ELEMENTS = 1 << 31
_RANDOM = frozenset({"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout"})


@dataclass(frozen=True)
class Meaning:
    """What a mask lets a query see: all keys, those up to its own, or a window of those."""

    causal: bool = False
    window: int | None = None


class ConstantMasks:
    """The meanings of a module's constant masks, each computed once.

    outer: placeholder of a called body -> what the caller hands it.
    """

    def __init__(self, outer: Mapping[fx.Node, Any]):
        self._outer = outer
        self._meanings: dict[fx.Node, Meaning | str] = {}
        self._accounts: dict[fx.Graph, Account] = {}

    def meaning(self, mask: fx.Node) -> Meaning:
        """Return what a mask [.., T, S] means. Raises Refused if it is not a constant, or other."""
        while mask.op == "placeholder" and isinstance(self._outer.get(mask), fx.Node):
            mask = self._outer[mask]
        if mask not in self._meanings:
            try:
                self._meanings[mask] = meaning_of(self._evaluate(mask))
            except Refused as refusal:
                self._meanings[mask] = str(refusal)
        found = self._meanings[mask]
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _evaluate(self, mask: fx.Node) -> Tensor:
        needed = self._in_running_order(mask, self._ancestors(mask))
        with torch_compat.real_tensors(), torch.no_grad():
            values: dict[fx.Node, Any] = {}
            for node in needed:
                if node.op == "placeholder":
                    values[node] = values[self._outer[node]]
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)
        return values[mask]

    def _ancestors(self, mask: fx.Node) -> set[fx.Node]:
        """What a mask is computed from, itself among it. Refused if an input is among it.

        Ops that write into a value on the way belong to it, and must lie before the mask itself.
        """
        found: set[fx.Node] = set()
        ends = {mask.graph: mask}  # by graph, what the mask is read by, or is itself
        pending = [mask]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            self._check_constant(node)
            if node.op == "placeholder":
                given = self._outer[node]
                ends[given.graph] = min(u for u in given.users if fx_utils.called_bodies(u))
                pending.append(given)
                continue
            writes = self._account_of(node.graph).writes_into(node)
            if not all(write is mask or write < ends[node.graph] for write in writes):
                raise Refused("its mask is written in place")
            pending += [*node.all_input_nodes, *writes]
        return found

    def _account_of(self, graph: fx.Graph) -> Account:
        if graph not in self._accounts:
            self._accounts[graph] = Account(graph, State(grad=True))
        return self._accounts[graph]

    def _in_running_order(self, mask: fx.Node, needed: set[fx.Node]) -> list[fx.Node]:
        """The nodes graph by graph, a caller's before those of the body that it calls."""
        graphs = [mask.graph]
        while True:
            taken = (n for n in needed if n.op == "placeholder" and n.graph is graphs[-1])
            caller = next((self._outer[n].graph for n in taken), None)
            if caller is None:
                break
            graphs.append(caller)
        return [n for graph in reversed(graphs) for n in graph.nodes if n in needed]

    def _check_constant(self, node: fx.Node) -> None:
        if node.op == "placeholder" and isinstance(self._outer.get(node), fx.Node):
            return
        if node.op not in ("call_function", "call_method"):
            raise Refused("its mask depends on an input")
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.SymInt) or (
            isinstance(value, Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape)
        ):
            raise Refused("its mask has symbolic sizes, so that it cannot be computed here")
        if op_name(node) in _RANDOM:
            raise Refused("its mask is random")
        if isinstance(value, Tensor) and value.numel() > _MAX_ELEMENTS:
            raise Refused("its mask is too large to be computed here")


def meaning_of(mask: Tensor) -> Meaning:
    """Return what a mask [.., T, S], bool or additive, means; Refused if no kernel does the same.

    Additive: 0 where a query sees, -inf or its dtype's lowest number where not. The latter is an
    ordinary number, but a row that sees anything gives it exactly 0; rows that see nothing refuse.
    """
    if mask.ndim < 2:
        raise Refused("its mask has no row for each query")
    sees = mask if mask.dtype == torch.bool else _seen(mask)
    first = sees[(0,) * (sees.ndim - 2)]
    if not bool((sees == first).all()):
        raise Refused("its mask differs between samples or heads")
    if not bool(first.any(-1).all()):
        raise Refused("its mask leaves a query nothing to see")
    if bool(first.all()):
        return Meaning()
    T, S = first.shape
    i = torch.arange(T, device=mask.device)[:, None] + (S - T)
    j = torch.arange(S, device=mask.device)[None, :]
    causal = j <= i
    if torch.equal(first, causal):
        return Meaning(causal=True)
    window = int(first[-1].sum())
    if torch.equal(first, causal & (j > i - window)):
        return Meaning(causal=True, window=window)
    raise Refused("its mask is neither causal nor a sliding window")


def _seen(mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        raise Refused("its mask holds neither booleans nor floats")
    sees = mask == 0
    hidden = (mask == -math.inf) | (mask == torch.finfo(mask.dtype).min)
    if not bool((sees | hidden).all()):
        raise Refused("its mask adds other numbers than 0 and minus infinity")
    return sees
