"""Find the residual sites of a graph: where a branch is added back onto the stream that it read.

A site is one addend b of a float add, all of one shape, such that another addend r (seen through
casts and views) is an ancestor of b and a contraction lies on the way:

    h = rms_norm(x); h = linear(silu(linear(h)));  y = x + h          r = x, b = h

What the rules keep out, and which rule does it:
    RoPE (x * cos + rotate(x) * sin), embedding sums, masks, biases     r is no ancestor of b
    gelu_new's x + 0.0447 * x**3                                        no contraction on the way
    U-net skips and x0 injection (stream + skip)                        r is on b's own stream
    losses and router terms                                             scalars, not [.., D] values
Post-dominance is not asked for: an auxiliary router loss bypasses the stream.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes import fx_utils
from xtrain.rng import ATTENTION, CROSS_ATTENTION, FEED_FORWARD


@dataclass(frozen=True)
class ResidualSite:
    """One branch that joins the residual stream, as found in a graph.

    add:       the add that `branch` is an operand of.
    branch:    the addend that dropout belongs on.
    residual:  the addend that carries the stream.
    kind:      "attention", "cross_attention" or "feed_forward", read off the branch's own ops.
    own:       an active dropout that the model itself has on this branch, or None.
    path:      source name of the module whose code adds, "" for a frame's own code.
    witnesses: parameters that the branch multiplies by, nearest the add first: who owns them is
               who owns the site, also in a graph that several layers share.
    """

    add: fx.Node
    branch: fx.Node
    residual: fx.Node
    kind: str
    own: fx.Node | None
    path: str
    witnesses: tuple[fx.Node, ...]


def find_residual_sites(graph: fx.Graph) -> list[ResidualSite]:
    """Return the sites of one graph (not of its higher-order bodies) in execution order."""
    return _Finder(graph).run()


class _Finder:
    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        # node -> the nodes it equals but for branches added on the way (the residual stream)
        self.stream: dict[fx.Node, set[fx.Node]] = {}

    def run(self) -> list[ResidualSite]:
        sites: list[ResidualSite] = []
        for node in self.graph.nodes:
            if self.is_candidate(node) and self._outer_add(node) is None:
                sites.extend(self._sites_of(node))
        return sites

    def is_candidate(self, node: fx.Node) -> bool:
        """An add of two tensors of the result's shape, floating point, more than a scalar."""
        if fx_utils.op_name(node) not in fx_utils.ADD or len(node.args) < 2:
            return False
        result = fx_utils.tensor_meta(node)
        if result is None or not result.dtype.is_floating_point or result.ndim < 2:
            return False
        operands = [fx_utils.tensor_meta(a) for a in node.args[:2]]
        return all(
            o is not None and o.dtype.is_floating_point and _same_shape(o, result) for o in operands
        )

    def _outer_add(self, node: fx.Node) -> fx.Node | None:
        """The add that this one is only a link of: single use, same module.

        Routed plus shared experts are summed inside the feed-forward module and so make one
        branch of the block's add; attention + feed-forward of a parallel block are summed in the
        block's own code and so stay two.
        """
        users = list(node.users)
        if len(users) != 1 or not self.is_candidate(users[0]):
            return None
        same_module = fx_utils.module_path(users[0]) == fx_utils.module_path(node)
        return users[0] if same_module and users[0].args[0] is not users[0].args[1] else None

    def _addends(self, add: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The (add, operand) pairs of a chain of single-use adds, left to right."""
        for operand in add.args[:2]:
            assert isinstance(operand, fx.Node)
            if self.is_candidate(operand) and self._outer_add(operand) is add:
                yield from self._addends(operand)
            else:
                yield add, operand

    def _sites_of(self, top: fx.Node) -> list[ResidualSite]:
        addends = list(self._addends(top))
        best: tuple[fx.Node, list[tuple[fx.Node, fx.Node]]] | None = None
        for _, operand in addends:
            root = peel(operand)
            others = [(add, node) for add, node in addends if node is not operand]
            branches = self._branches_from(root, others)
            if branches and (best is None or len(branches) > len(best[1])):
                best = (operand, branches)
        if best is None:
            return []
        residual, branches = best
        self._extend_stream(top, residual)
        return [self._describe(add, branch, residual) for add, branch in branches]

    def _branches_from(
        self, root: fx.Node, operands: list[tuple[fx.Node, fx.Node]]
    ) -> list[tuple[fx.Node, fx.Node]]:
        """The operands that depend on `root` through a contraction and are not its own stream."""
        if root.op in ("get_attr", "output") or not operands:
            return []
        last = max(self.order[node] for _, node in operands)
        reached = self._reach(root, last)
        return [
            (add, node)
            for add, node in operands
            if reached.get(node) and root not in self.stream.get(peel(node), ())
        ]

    def _reach(self, root: fx.Node, last: int) -> dict[fx.Node, bool]:
        """Nodes up to position `last` that depend on root -> whether through a contraction."""
        reached = {root: False}
        pending = [root]
        while pending:
            node = pending.pop()
            for user in node.users:
                if self.order[user] > last or user.op == "output":
                    continue
                contracted = reached[node] or fx_utils.holds_contraction(user)
                if user not in reached or (contracted and not reached[user]):
                    reached[user] = contracted
                    pending.append(user)
        return reached

    def _extend_stream(self, top: fx.Node, residual: fx.Node) -> None:
        node: fx.Node = residual
        members = {residual, top}
        while True:
            members |= self.stream.get(node, set())
            inner = _through(node)
            if inner is None:
                break
            node = inner
            members.add(node)
        self.stream[top] = members

    def _describe(self, add: fx.Node, branch: fx.Node, residual: fx.Node) -> ResidualSite:
        root = peel(residual)
        own = next((n for n in peeled_chain(branch) if is_active_dropout(n)), None)
        members = self._between(root, branch)
        return ResidualSite(
            add=add,
            branch=branch,
            residual=residual,
            kind=_kind(members, self._reach(root, self.order[branch])),
            own=own,
            path=fx_utils.module_path(add),
            witnesses=tuple(_witnesses(members)),
        )

    def _between(self, root: fx.Node, branch: fx.Node) -> list[fx.Node]:
        """The nodes that lie on a way from root to branch, nearest the branch first."""
        reached = self._reach(root, self.order[branch])
        found, pending = {branch}, [branch]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source in reached and source is not root and source not in found:
                    found.add(source)
                    pending.append(source)
        return sorted(found, key=lambda n: -self.order[n])


def peel(node: fx.Node) -> fx.Node:
    """Return the value that a residual operand is, without casts, views, dropout and scaling."""
    return peeled_chain(node)[-1]


def is_active_dropout(node: fx.Node) -> bool:
    """Return whether a node drops elements in this graph; F.dropout with p = 0 counts as absent."""
    if fx_utils.op_name(node) not in fx_utils.DROPOUT:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "xtrain":
        return True
    return bool(_argument(node, 1, "p", 0.5)) and _argument(node, 2, "training", True) is not False


def _argument(node: fx.Node, position: int, name: str, default: object) -> object:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, node.kwargs.get("train", default) if position == 2 else default)


def peeled_chain(node: fx.Node) -> list[fx.Node]:
    """Return node, then what it is a cast, view, dropout or scaling of, down to what computes."""
    chain = [node]
    while (inner := _through(chain[-1])) is not None:
        chain.append(inner)
    return chain


def _through(node: fx.Node) -> fx.Node | None:
    """The one operand that a node passes on in another form, or None when it computes."""
    name = fx_utils.op_name(node)
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if name in fx_utils.VIEW_LIKE or name in fx_utils.DROPOUT:
        return node.args[0]
    if name in fx_utils.MUL and len(node.args) == 2:
        return _scaled_operand(node.args[0], node.args[1]) or _scaled_operand(
            node.args[1], node.args[0]
        )
    return None


def _scaled_operand(value: object, factor: object) -> fx.Node | None:
    """`value` when `factor` is a number, a parameter or made of parameters only."""
    if not isinstance(value, fx.Node) or fx_utils.tensor_meta(value) is None:
        return None
    if isinstance(factor, fx.Node) and not _made_of_parameters(factor):
        return None
    return None if _made_of_parameters(value) else value


def _made_of_parameters(node: fx.Node, depth: int = 8) -> bool:
    if is_parameter(node):
        return True
    if node.op in ("placeholder", "output") or depth == 0:
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(_made_of_parameters(n, depth - 1) for n in inputs)


def is_parameter(node: fx.Node) -> bool:
    """Return whether a node is a parameter that the graph takes as an input."""
    return isinstance(fx_utils.tensor_meta(node), torch.nn.Parameter) and node.op in (
        "placeholder",
        "get_attr",
    )


def _witnesses(members: Iterable[fx.Node]) -> Iterator[fx.Node]:
    seen = set()
    for member in members:
        for source in member.all_input_nodes:
            if source not in seen and (is_parameter(source) or _made_of_parameters(source)):
                seen.add(source)
                yield from _leaves(source)


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    if is_parameter(node):
        yield node
        return
    for source in node.all_input_nodes:
        yield from _leaves(source)


def _kind(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Name a branch by what it does: attention, cross-attention, or anything else.

    members: the branch's nodes, nearest the add first; own: what depends on the residual stream.
    Keys that do not depend on it (an encoder's states) make it cross-attention.
    """
    for node in members:
        if fx_utils.op_name(node) in fx_utils.ATTENTION:
            keys = node.args[1] if len(node.args) > 1 else node.kwargs.get("key")
            return ATTENTION if keys in own else CROSS_ATTENTION
        for body in fx_utils.called_bodies(node):
            inside = list(reversed(body.graph.nodes))
            if _kind(inside, inside) != FEED_FORWARD:
                return ATTENTION
    return _kind_of_spelt_out_attention(members, own)


def _kind_of_spelt_out_attention(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Tell matmul + softmax + matmul from a router's softmax: attention multiplies two values.

    The product of two values before the softmax, neither of them a parameter, is queries x keys.
    """
    names = [fx_utils.op_name(n) for n in members]
    after = next((i for i, name in enumerate(names) if name in fx_utils.SOFTMAX), len(members))
    for node in members[after:]:
        if fx_utils.op_name(node) in fx_utils.CONTRACTION:
            values = [n for n in node.all_input_nodes if not _made_of_parameters(n)]
            if len(values) >= 2:
                return ATTENTION if all(n in own for n in values) else CROSS_ATTENTION
    return FEED_FORWARD


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shapes without adding a guard: symbols are equal where that is known already."""
    return a.ndim == b.ndim and all(
        statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def find_cut_adds(graph: fx.Graph) -> list[fx.Node]:
    """Return adds of a graph piece that look like sites whose other half lies in another piece.

    One operand is an activation that enters the piece, the other is or comes from another one and
    not from the first: after a graph break inside a branch, that is what its residual add is.
    """
    finder = _Finder(graph)
    found = []
    for add in graph.nodes:
        if not finder.is_candidate(add):
            continue
        for residual, branch in (add.args[:2], add.args[1::-1]):
            root = peel(residual)
            if _is_activation_input(root) and _depends_on_other_input(branch, root):
                found.append(add)
                break
    return found


def _is_activation_input(node: fx.Node) -> bool:
    meta = fx_utils.tensor_meta(node)
    return (
        node.op == "placeholder"
        and meta is not None
        and meta.dtype.is_floating_point
        and meta.ndim >= 2
        and not is_parameter(node)
    )


def _depends_on_other_input(branch: fx.Node, root: fx.Node) -> bool:
    seen, pending = {branch}, [branch]
    others = False
    while pending:
        node = pending.pop()
        if node is root:
            return False
        others |= _is_activation_input(node)
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return others
