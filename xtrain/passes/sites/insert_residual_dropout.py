"""Insert seeded, stateless dropout on every residual branch.

Before:  h = linear(a, w)              After:  h = linear(a, w)
         y = x + h                             d = xtrain.dropout(h, p, seeds[2i], seeds[2i + 1])
                                               y = x + d
Stage:   Dynamo's own graph, before AOTAutograd, so that autograd derives the backward and a
         failing later pass can lose a kernel but never the dropout.     Changes numerics: yes.
Needs:   an int64 input `xtrain_seeds`, (seed, offset) per row, that the pass adds to the graph and
         the caller feeds at each call; the model reads none.
Skips:   a branch that the model drops itself (existing="skip"); a second run changes nothing.
Leaves:  a branch whose value is changed in place behind the pass's back, or that sits in a control
         flow body (cond, scan): reported as uncovered with the reason.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.ops.dropout.op import FORWARD as DROPOUT_OP
from xtrain.passes.graph import (
    SHOWN,
    body_operands,
    called_bodies,
    is_active_dropout,
    is_xtrain_op,
    module_path,
    op_name,
    operand,
    reach,
    tensor_meta,
    walk_graphs,
    written_operands,
)
from xtrain.passes.run import PassResult
from xtrain.passes.sites.carried import peeled_chain
from xtrain.passes.sites.find_sites import Found, find_sites
from xtrain.passes.sites.own_dropouts import (
    is_dropped_whole,
    is_masked_by_hand,
    is_random_mask,
    own_dropout,
    own_dropouts,
)
from xtrain.passes.sites.residual_sites import ResidualSite
from xtrain.passes.sites.spell_out_sums import spell_out_sums
from xtrain.passes.sites.sum_account import Settled

SEEDS = "xtrain_seeds"
# Where torch's attention functions take the probability of dropping attention probabilities.
_ATTENTION_P = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_NESTED = (
    "its value is a nested tensor that the model makes, and masks are drawn for dense values: pad "
    "its rows (torch.nested.to_padded_tensor) before the blocks and hand them a mask"
)
_TRANSFORMED = (
    "inside a transform of torch.func (vmap), where the rows of a batch would share a mask; call "
    "the module on the whole batch"
)
_IN_PART = (
    "the model's own dropout ({}) drops a part of this branch and leaves the rest; pass "
    "existing='replace' to have one mask over the whole"
)


@dataclass(frozen=True)
class SiteSlot:
    """One site of one graph, as the caller needs it to fill a row of the seeds input.

    witnesses are placeholders of the outermost graph; branch_shape may hold SymInts;
    covered_by is "xtrain" (has a row), "model" (its own dropout stays) or "" with a reason; path
    and origin are the modules that add the branch and that compute it. add and own are the names
    of the add, as it was traced, and of the model's own dropout, behind those of the calls that
    lead to them ("wrap_body_0/add"). keys and streams are inputs of the graph, as ResidualSite has
    them.
    """

    kind: str
    path: str
    origin: str
    witnesses: tuple[fx.Node, ...]
    branch_shape: torch.Size
    covered_by: Literal["xtrain", "model", ""]
    reason: str = ""
    add: str = ""
    own: str = ""
    keys: tuple[fx.Node, ...] = ()
    streams: tuple[fx.Node, ...] = ()


@dataclass
class InsertResult(PassResult):
    """What was inserted: slots in row order first to last, and dropout that stays unseeded.

    found: the sites and the account of the graph's sums, in the nodes that it had before.
    """

    slots: list[SiteSlot] = field(default_factory=list, repr=False)
    unseeded: list[str] = field(default_factory=list)
    found: Found | None = field(default=None, repr=False)


def insert_residual_dropout(
    graph: fx.Graph,
    *,
    p: float,
    existing: Literal["skip", "replace"] = "skip",
    settled: Settled = lambda node: "",
    general: str = "all",
) -> InsertResult:
    """Insert xtrain.dropout(p) on each residual branch of a graph and of the bodies it calls.

    Args:     graph: owned by a GraphModule; changed in place, so pass a clone of Dynamo's.
              p: probability of dropping, 0 < p <= 1.
              existing: what to do where the model has an active dropout of its own.
              settled, general: as find_sites takes them.
    Returns:  InsertResult; its slots that are covered by "xtrain" are the rows of `xtrain_seeds`.
    """
    module = graph.owning_module
    assert module is not None
    spelt: dict[fx.Node, str] = {}
    for part in dict.fromkeys(walk_graphs(module)):
        spelt |= spell_out_sums(part.graph)
    found = find_sites(module, settled, general)
    inserter = _Inserter(p, existing, found.sites, spelt)
    slots = inserter.run(graph)
    result = InsertResult(num_matched=len(slots), slots=slots, found=found)
    result.num_replaced = sum(slot.covered_by == "xtrain" for slot in slots)
    for slot in slots:
        if slot.covered_by == "model":
            result.skip("the model's own dropout stays")
        elif not slot.covered_by:
            result.skip(slot.reason)
    for graph_module in walk_graphs(module):
        result.unseeded += _unseeded(graph_module.graph, inserter.residual_dropouts)
    return result


class _Inserter:
    def __init__(
        self,
        p: float,
        existing: str,
        found: dict[fx.Graph, list[ResidualSite]],
        spelt: dict[fx.Node, str],
    ):
        self.p = p
        self.existing = existing
        self.found = found
        self.spelt = spelt  # an add that hid in another op -> that op's name
        self.bodies: dict[fx.GraphModule, list[SiteSlot]] = {}
        self.residual_dropouts: set[fx.Node] = set()
        self.adds: set[fx.Node] = set()

    def run(self, graph: fx.Graph, calls: tuple[fx.Node, ...] = ()) -> list[SiteSlot]:
        """Insert into one graph and its bodies; the slots in execution order.

        Args:     calls: those that lead to this graph.
        """
        sites: dict[fx.Node, list[ResidualSite]] = {}
        for site in self.found[graph]:
            sites.setdefault(site.add, []).append(site)
        self.adds |= sites.keys()
        slots: list[SiteSlot] = []
        rows = 0
        for node in list(graph.nodes):
            for site in sites.get(node, ()):
                slots.append(self._insert(graph, site, rows))
                rows += _num_rows(slots[-1:])
            if called_bodies(node):
                inside = self._enter_bodies(graph, (*calls, node), rows)
                rows += _num_rows(inside)
                slots += inside
        return slots

    def _slot(self, site: ResidualSite, covered_by: Literal["xtrain", ""] = "") -> SiteSlot:
        return SiteSlot(
            kind=site.kind,
            path=site.path,
            origin=site.origin,
            witnesses=site.witnesses,
            branch_shape=_shape(site.branch),
            covered_by=covered_by,
            add=self.spelt.get(site.add, site.add.name),
            own=site.own.name if site.own is not None else "",
            keys=site.keys,
            streams=site.streams,
        )

    def _insert(self, graph: fx.Graph, site: ResidualSite, row: int) -> SiteSlot:
        meta = tensor_meta(site.branch)
        assert meta is not None
        slot = self._slot(site, covered_by="xtrain")
        if torch_compat.is_transformed(meta):
            return replace(slot, covered_by="", reason=_TRANSFORMED)
        if meta.is_nested:
            return replace(slot, covered_by="", reason=_NESTED)
        owns: list[fx.Node] = []
        if site.own is not None:
            owns = list(own_dropouts(site.branch, site.residual, self.adds))
            self.residual_dropouts |= {*site.shared, *owns}
            if self.existing == "skip" or is_xtrain_op(site.own):
                if site.shared or is_dropped_whole(site.branch, self.adds):
                    return replace(slot, covered_by="model")
                return replace(slot, covered_by="", reason=_IN_PART.format(site.own.name))
        if reason := _hazard(site, owns):
            return replace(slot, covered_by="", reason=reason)
        branch = site.branch
        unread: list[fx.Node] = []
        while (own := own_dropout(branch, site.residual, self.adds)) is not None:
            self.residual_dropouts.add(own)
            unread += reversed(_from_own(own, branch))
            branch = _without(own, branch, site.takers[0])
        for own in filter(lambda n: n.users, site.shared):  # the first site of them takes it away
            own.replace_all_uses_with(operand(own, 0, "input"))
            unread.append(own)
        with graph.inserting_before(site.takers[0]):
            seeds = _seeds_input(graph)
            seed = _element(graph, seeds, 2 * row)
            offset = _element(graph, seeds, 2 * row + 1)
            dropped = graph.call_function(DROPOUT_OP, (branch, self.p, seed, offset))
        dropped.meta = dict(branch.meta)
        dropped.meta["nn_module_stack"] = site.add.meta.get("nn_module_stack")
        _set_value(dropped, torch.empty_like(meta, memory_format=torch.contiguous_format))
        later = _readers_of_the_sum(site)
        for taker in site.takers:
            taker.replace_input_with(site.branch, dropped)
        for reader in later:
            reader.replace_input_with(site.branch, site.add)
        _erase_unread(unread)
        return slot

    def _enter_bodies(
        self, graph: fx.Graph, calls: tuple[fx.Node, ...], row: int
    ) -> list[SiteSlot]:
        """Insert into the body of a higher-order call and hand it its rows of the seeds."""
        call = calls[-1]
        bodies = called_bodies(call)
        outer = body_operands(call)
        if not outer:
            reason = f"inside a {op_name(call)} body, which takes no seeds"
            found = [s for body in bodies for s in self.found[body.graph]]
            return [
                replace(self._slot(s), witnesses=(), reason=reason, add=f"{call.name}/{s.add.name}")
                for s in found
                if s.own is None
            ]
        body = bodies[0]
        if body not in self.bodies:
            self.bodies[body] = self.run(body.graph, calls)
            body.recompile()
        inner = self.bodies[body]
        count = _num_rows(inner)
        if count:
            with graph.inserting_before(call):
                seeds = _seeds_input(graph)
                rows = graph.call_function(
                    operator.getitem, (seeds, slice(2 * row, 2 * (row + count)))
                )
                value = tensor_meta(seeds)
                assert value is not None
                _set_value(rows, value[: 2 * count])
            call.args = (*call.args, rows)
        return [
            replace(
                slot,
                keys=(),
                add=f"{call.name}/{slot.add}",
                own=f"{call.name}/{slot.own}" if slot.own else "",
                witnesses=tuple(
                    # a branch that enters the body has its parameters outside of it already
                    n
                    for w in slot.witnesses
                    if isinstance(n := outer.get(w, w), fx.Node)
                ),
            )
            for slot in inner
        ]


def _num_rows(slots: list[SiteSlot]) -> int:
    return sum(slot.covered_by == "xtrain" for slot in slots)


def _seeds_input(graph: fx.Graph) -> fx.Node:
    """The graph's seeds placeholder, added behind the others on first need."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        if node.target == SEEDS:
            return node
    first_op = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first_op):
        node = graph.placeholder(SEEDS)
    torch_compat.has_no_source(node)
    _set_value(node, _fake_seeds(graph))
    return node


def _fake_seeds(graph: fx.Graph) -> torch.Tensor:
    """Describe the seeds input: int64 on the device of the graph's floating-point values.

    Its length here is only an upper bound; the caller feeds exactly two numbers a row.
    """
    for node in graph.nodes:
        value = tensor_meta(node)
        if value is not None and value.dtype.is_floating_point:
            return value.new_empty((2 * len(graph.nodes),), dtype=torch.int64)
    raise RuntimeError("a graph without floating-point values has no residual site")


def _element(graph: fx.Graph, seeds: fx.Node, index: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (seeds, index))
    value = tensor_meta(seeds)
    assert value is not None
    _set_value(node, value.new_empty(()))
    return node


def _set_value(node: fx.Node, value: torch.Tensor) -> None:
    node.meta["example_value"] = value


def _shape(node: fx.Node) -> torch.Size:
    meta = tensor_meta(node)
    assert meta is not None
    return meta.shape


def _hazard(site: ResidualSite, owns: list[fx.Node]) -> str:
    """Why dropout on this branch could be undone or seen elsewhere, "" when it can't.

    `branch += residual` writes the sum into the branch's memory: whoever reads the branch itself
    behind it is handed the sum instead, but who reads that memory through a view would miss it.
    """
    if _writes_into_branch(site) and _is_seen_through_a_view(site):
        return "the add writes into the branch, which others see through a view"
    by_hand = [n for n in owns if is_masked_by_hand(n)]
    if by_hand:
        return (
            f"the model's own dropout is a mask written by hand ({by_hand[0].name}), which cannot "
            "be replaced; set its probability to 0, or pass existing='skip'"
        )
    if site.own is not None:
        after_own = _from_own(site.own, site.branch)[1:]
        if site.branch in written_operands(site.own) or any(map(written_operands, after_own)):
            return "the model's own dropout cannot be replaced: it is changed in place"
    return ""


def _writes_into_branch(site: ResidualSite) -> bool:
    return site.branch in written_operands(site.add)


def _readers_of_the_sum(site: ResidualSite) -> list[fx.Node]:
    """Who reads the branch behind an add that writes into it: `h.add_(x)`, then h."""
    if not _writes_into_branch(site):
        return []
    order = {node: i for i, node in enumerate(site.add.graph.nodes)}
    return [user for user in site.branch.users if order[user] > order[site.add]]


def _is_seen_through_a_view(site: ResidualSite) -> bool:
    """Whether the branch's memory is read behind the add under another name than its own."""
    order = {node: i for i, node in enumerate(site.add.graph.nodes)}
    links = itertools.takewhile(lambda n: op_name(n) in SHOWN, peeled_chain(site.branch))
    names = [site.branch, *(link.all_input_nodes[0] for link in links)]
    for name in names:
        for user in name.users:
            if order[user] > order[site.add] and name is not site.branch:
                return True
            is_view = op_name(user) in SHOWN and user not in names
            if is_view and order[user] < order[site.add]:
                names.append(user)
    return False


def _from_own(own: fx.Node, branch: fx.Node) -> list[fx.Node]:
    """The model's own dropout and what computes the branch from it, in running order."""
    needed = set(reach([branch]))
    found = {own: None}
    for node in own.graph.nodes:
        if node in needed and any(n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def _without(own: fx.Node, branch: fx.Node, taker: fx.Node) -> fx.Node:
    """Return the branch without the model's own dropout.

    What follows it is copied, so that other readers of the dropped value keep it.
    """
    copies: dict[fx.Node, fx.Node] = {own: operand(own, 0, "input")}
    for node in _from_own(own, branch)[1:]:
        if op_name(own) == "native_dropout" and node.all_input_nodes == [own]:
            copies[node] = copies[own]  # of the pair, what is dropped and not the mask
            continue
        with taker.graph.inserting_before(taker):
            copies[node] = taker.graph.node_copy(node, lambda n: copies.get(n, n))
    return copies[branch]


def _erase_unread(nodes: list[fx.Node]) -> None:
    """Erase the model's dropout once nothing reads it: run for nothing, it would still draw."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def _unseeded(graph: fx.Graph, residual: set[fx.Node]) -> list[str]:
    """Active dropout of the model's that is no residual site: attention, embeddings."""
    found = []
    draws = any(is_random_mask(node) for node in graph.nodes)
    for node in graph.nodes:
        where = module_path(node) or "the model"
        name = op_name(node)
        if is_active_dropout(node) and not is_xtrain_op(node) and node not in residual:
            found.append(f"{name} in {where}")
        elif draws and node not in residual and is_masked_by_hand(node):
            found.append(f"a mask written by hand ({name}) in {where}")
        elif name in _ATTENTION_P:
            p = operand(node, _ATTENTION_P[name], "dropout_p", default=0.0)
            active = operand(node, 13, "training", default=True) is not False
            if isinstance(p, int | float) and p > 0 and active:
                found.append(f"attention probabilities (p = {p}) in {where}")
    return found
