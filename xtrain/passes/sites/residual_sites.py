"""Find the residual sites of a forward: where a branch is added back onto the stream that it read.

A site is one addend b of a float sum (sums.py says what counts as one), all of one shape, such that
another addend r is an ancestor of b and a contraction lies on the way. r is seen through casts,
views and scaling, and, where that finds no branch, under gates and as a part of a value
(carried.py):

    h = rms_norm(x); h = linear(silu(linear(h)));  y = x + h          r = x, b = h

What the rules keep out, and which rule does it:
    RoPE (x * cos + rotate(x) * sin), embedding sums, masks, biases     r is no ancestor of b
    the same with one key head, where cos has x's shape                 a table is no stream
    gelu_new's x + 0.0447 * x**3                                        no contraction on the way
    U-net skips, x0 or positions injected again (stream + skip)         r is carried by b's stream
    an input injected into a recurrent, normed state (norm(x + f) + x)  as above: norms carry on
    short convolutions of keys and values (k + conv(k))                 depthwise: no contraction
    a position bias that every layer adds to its scores (T5)            only softmax reads the sum
    a state space's output and the skip of its input (Mamba)            only a gate reads the sum
    a decayed state and what is added to it (delta rules, recurrent cells)  it started as zeros
    losses and router terms                                             scalars, not [.., D] values
    the error of a loss (pred - x), also where pred comes from x        only its size is read
    mixed values (a v + b v1), the state of a linear attention          only attention reads the sum
    a table of parameters that several layers add to a projection       a parameter is no stream
    x + (book[i] - x).detach(), i the nearest in a book to x            i is an integer: no branch
Post-dominance is not asked for: an auxiliary router loss bypasses the stream.

The search reads the flat graph of a `Program`, so that a branch is followed into and out of the
bodies of checkpoints; a site is told in the nodes of the graph, or body, that its add stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from xtrain.passes.graph import (
    ATTENTION_CALLS,
    BUFFERS,
    CONTRACTION,
    DIV,
    MUL,
    SOFTMAX,
    body_operands,
    called_bodies,
    holds_contraction,
    is_activation_input,
    is_active_dropout,
    is_models_dropout,
    is_parameter,
    is_table,
    made_of_parameters,
    may_hold_floats,
    module_path,
    op_name,
    operand,
    reach,
    same_shape,
)
from xtrain.passes.sites.carried import (
    carried_chain,
    form_or_norm_of,
    gated_roots,
    mixed_streams,
    parameters_read_by,
    peel,
    wholes,
)
from xtrain.passes.sites.own_dropouts import own_dropout
from xtrain.passes.sites.program import Program
from xtrain.passes.sites.sum_readers import is_no_stream
from xtrain.passes.sites.sums import (
    Blend,
    blend,
    held_operands,
    is_gathered,
    is_sum,
    stack_summed_by,
    sum_operands,
)
from xtrain.rng import ATTENTION, CROSS_ATTENTION, FEED_FORWARD


@dataclass(frozen=True)
class ResidualSite:
    """One branch that joins the residual stream, as found in a graph.

    add:       the add that `branch` is an operand of, or the stack that is summed.
    branch:    the addend that dropout belongs on.
    residual:  the addend that carries the stream.
    kind:      "attention", "cross_attention" or "feed_forward", read off the branch's own ops.
    own:       an active dropout that the model itself has on this branch, or None.
    shared:    active dropouts that the model has over a sum of branches, this one among them.
    path:      source name of the module whose code adds, "" for a frame's own code.
    takers:    the nodes that take the branch: the add, the difference of a blend h + c (x - h), and
               where one branch joins several sums (two streams, dense connections), each of them.
    witnesses: parameters that the branch multiplies by, nearest the add first: who owns them is
               who owns the site, also in a graph that several layers share.
    origin:    source name of the module that computes the branch, "" where no parameter tells.
    keys:      of a cross-attention, inputs of the graph that its keys come from, and streams, those
               that its residual carries: what made them says whether the keys are the stream's own.
    """

    add: fx.Node
    branch: fx.Node
    residual: fx.Node
    kind: str
    own: fx.Node | None
    shared: tuple[fx.Node, ...]
    path: str
    takers: tuple[fx.Node, ...]
    witnesses: tuple[fx.Node, ...]
    origin: str = ""
    keys: tuple[fx.Node, ...] = ()
    streams: tuple[fx.Node, ...] = ()


def find_residual_sites(
    program: Program, settled: Callable[[fx.Node], str] = lambda node: ""
) -> list[ResidualSite]:
    """Return the sites of a program, in execution order, and note their branches in it.

    Args:     settled: what the user says of a sum of its graphs: "leave" for no site.
    """
    finder = _Finder(program)
    found = [s for s in finder.run() if settled(program.origin[s.add]) != "leave"]
    for site in found:
        for taker in site.takers:
            program.branches.setdefault(taker, set()).add(site.branch)
            program.residuals[taker] = site.residual
    return [finder.in_its_graph(site) for site in found]


# An addend, with the node that takes it: the add itself, or the stack that a sum is made over.
Held = tuple[fx.Node, fx.Node]


class _Finder:
    def __init__(self, program: Program):
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.order = {node: position for position, node in enumerate(self.nodes)}
        # sum -> the values that it carries: itself and all addends, but for branches (the stream)
        self.stream: dict[fx.Node, set[fx.Node]] = {}
        self.states: set[fx.Node] = set()
        self.adds: set[fx.Node] = set()
        self.blends: dict[fx.Node, Blend] = {}
        self.holders: dict[ResidualSite, fx.Node] = {}  # the sum that takes a site's residual

    def run(self) -> list[ResidualSite]:
        self._find_blends()
        inner = {found.inner for found in self.blends.values()}
        sites: list[ResidualSite] = []
        for node in self.nodes:
            if self._is_sum(node) and node not in inner and self._outer_add(node) is None:
                sites.extend(self._sites_of(node))
        return self._one_mask_a_branch(sites)

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether a node is a sum of a graph: no pass can reach those in a library's op."""
        return node in self.program.origin and is_sum(node)

    def _one_mask_a_branch(self, sites: list[ResidualSite]) -> list[ResidualSite]:
        """Join the sites of a branch that several sums take, scaled or as it is."""
        groups: dict[tuple[fx.Node, fx.Graph], list[tuple[ResidualSite, fx.Node]]] = {}
        for site in sites:
            chain = _scaled_alone(site.branch)
            value = chain[-1]
            taker = site.takers[0] if len(chain) == 1 else chain[-2]
            if len(site.takers) == 1 and site.own is None:
                graph = self.program.graph_of(taker)
                groups.setdefault((value, graph), []).append((site, taker))
        joined: dict[ResidualSite, ResidualSite | None] = {}
        for (value, _), members in groups.items():
            if len({site.add for site, _ in members}) > 1:
                first, *others = (site for site, _ in members)
                takers = sorted({t for _, t in members}, key=self.order.__getitem__)
                joined |= dict.fromkeys(others)
                joined[first] = whole = replace(first, branch=value, takers=tuple(takers))
                self.holders[whole] = self.holders[first]
        return [kept for s in sites if (kept := joined.get(s, s)) is not None]

    def _find_blends(self) -> None:
        """Note where the operand that a blend takes twice is the branch: both must be dropped."""
        for node in self.nodes:
            found = blend(node)
            if found and self._branches_from(peel(found.other), [(node, found.twice)]):
                self.blends[node] = found

    def _outer_add(self, node: fx.Node) -> fx.Node | None:
        """The add that this one is only a link of: single use, same module, same graph.

        Routed plus shared experts are summed inside the feed-forward module and so make one
        branch of the block's add; attention + feed-forward of a parallel block are summed in the
        block's own code and so stay two, also under one dropout, whatever its p (Falcon). h + h is
        one value, not two addends. A sum that is scaled before it joins the stream is one branch:
        the routed and shared experts of a block that scales its branches (Granite).
        """
        users = list(node.users)
        while len(users) == 1 and is_models_dropout(users[0]):
            users = list(users[0].users)
        if len(users) != 1 or not self._is_sum(users[0]):
            return None
        if self.program.graph_of(users[0]) is not self.program.graph_of(node):
            return None
        if any(len(set(sum_operands(n))) == 1 for n in (node, users[0])):
            return None
        if stack_summed_by(node) is not None or is_gathered(node):
            return None  # what is stacked or gathered to be summed joins as one
        same_module = module_path(users[0]) == module_path(node)
        return users[0] if same_module else None

    def _addends(self, add: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The (holder, operand) pairs of a chain of single-use adds, left to right."""
        if add in self.blends:
            twice, other, inner = self.blends[add]
            yield from ((add, twice), (inner, other))
            return
        for holder, addend in held_operands(add):
            assert isinstance(addend, fx.Node)
            link = addend
            while is_models_dropout(link):
                link = operand(link, 0, "input")
            if self._is_sum(link) and self._outer_add(link) is add:
                yield from self._addends(link)
            else:
                yield holder, addend

    def _sites_of(self, top: fx.Node) -> list[ResidualSite]:
        addends = list(self._addends(top))
        residual, root, branches = self._best_residual(addends)
        on_branch = {node for _, node in branches}
        others = [node for _, node in addends if node not in on_branch]
        if root is not None:
            others.append(root)
        self.stream[top] = {top}.union(*map(self._carried, others))
        if residual is None or root is None or is_no_stream(top, root):
            if any(map(self._is_state, (r for _, o in addends for r in gated_roots(o)))):
                self.states.add(top)
            return []
        self.adds.update(add for add, _ in branches)
        holder = next(add for add, node in addends if node is residual)
        on_stream = _dropouts_over(holder, top)
        sites = []
        for add, branch in branches:
            shared = [d for d in _dropouts_over(add, top) if d not in on_stream]
            sites.append(self._describe(add, branch, residual, root, shared))
            self.holders[sites[-1]] = holder
        return sites

    def in_its_graph(self, site: ResidualSite) -> ResidualSite:
        """Tell a site in the nodes of the graph, or body, that its add stands in."""
        program, origin = self.program, self.program.origin
        graph = program.graph_of(site.add)
        own = origin.get(site.own) if site.own is not None else None
        return replace(
            site,
            add=origin[site.add],
            branch=program.operand_of(site.takers[0], site.branch),
            residual=program.operand_of(self.holders[site], site.residual),
            own=own if own is not None and own.graph is graph else None,
            shared=tuple(origin[drop] for drop in site.shared),
            takers=tuple(origin[taker] for taker in site.takers),
            witnesses=tuple(origin[n] for n in site.witnesses),
            keys=tuple(origin[n] for n in site.keys),
            streams=tuple(origin[n] for n in site.streams),
        )

    def _is_state(self, root: fx.Node) -> bool:
        """Whether a value is a recurrence's: it starts empty, and is decayed before each sum."""
        return op_name(root) in BUFFERS or root in self.states

    def _best_residual(
        self, addends: list[Held]
    ) -> tuple[fx.Node | None, fx.Node | None, list[Held]]:
        """The addend that most of the others are branches of, its value, and those.

        First each addend's own value is tried; then what it holds under a gate, or is a part of,
        in running order: of two that read each other, the first is the stream.
        """
        candidates = [(addend, peel(addend)) for _, addend in addends]
        hidden = [(o, r) for _, o in addends for r in gated_roots(o) if not self._is_state(r)]
        hidden += [(o, r) for _, o in addends for r in wholes(o)]
        hidden = [(o, r) for o, r in hidden if not is_table(r)]
        candidates += sorted(hidden, key=lambda pair: self.order[pair[1]])
        residual: fx.Node | None = None
        value: fx.Node | None = None
        most: list[Held] = []
        for addend, root in candidates:
            others = [(add, node) for add, node in addends if node is not addend]
            branches = self._branches_from(root, others)
            if len(branches) > len(most):
                residual, value, most = addend, root, branches
        return residual, value, most

    def _branches_from(self, root: fx.Node, operands: list[Held]) -> list[Held]:
        """The operands that depend on `root` through a contraction and do not carry it."""
        if root.op in ("get_attr", "output") or is_parameter(root) or not operands:
            return []
        last = max(self.order[add] for add, _ in operands)
        reached = self._reach([root], last)
        return [
            (add, node)
            for add, node in operands
            if reached.get(node) and root not in self._carried(node)
        ]

    def _reach(self, roots: Iterable[fx.Node], last: int) -> dict[fx.Node, bool]:
        """Nodes up to position `last` that depend on roots -> whether through a contraction."""
        reached = dict.fromkeys(roots, False)
        pending = [*reached]
        while pending:
            node = pending.pop()
            for user in node.users:
                if self.order[user] > last or user.op == "output" or not may_hold_floats(user):
                    continue
                contracted = reached[node] or holds_contraction(user)
                if user not in reached or (contracted and not reached[user]):
                    reached[user] = contracted
                    pending.append(user)
        return reached

    def _carried(self, node: fx.Node) -> set[fx.Node]:
        """The values that a node carries on: what it is a form or norm of, the stream of a sum."""
        chain = carried_chain(node)
        members = set(chain).union(*(self.stream.get(link, ()) for link in chain))
        if (mixed := mixed_streams(chain[-1])) is not None:
            members |= self._carried(mixed)
        if len(alone := held_operands(chain[-1])) == 1:  # a weighted sum over a stack of one
            members |= self._carried(alone[0][1])
        return members

    def _describe(
        self,
        add: fx.Node,
        branch: fx.Node,
        residual: fx.Node,
        root: fx.Node,
        shared: list[fx.Node],
    ) -> ResidualSite:
        reached = self._reach([root], self.order[add])
        members = self._between(root, branch, reached)
        kind = branch_kind(members, reached)
        if kind == CROSS_ATTENTION:  # keys of an earlier value of the stream are the stream's own
            reached |= self._reach(self._carried(root), self.order[add])
            kind = branch_kind(members, reached)
        keys = self._keys(add, members, reached) if kind == CROSS_ATTENTION else ()
        return ResidualSite(
            add=add,
            branch=branch,
            residual=residual,
            kind=kind,
            own=next(iter(shared), None) or own_dropout(branch, residual, self.adds),
            shared=tuple(shared),
            path=module_path(add),
            takers=(self.blends[add].inner, add) if add in self.blends else (add,),
            witnesses=tuple(parameters_read_by(members)),
            origin=computing_module(members),
            keys=keys,
            streams=tuple(n for n in self._carried(root) if is_activation_input(n)) if keys else (),
        )

    def _keys(
        self, add: fx.Node, members: list[fx.Node], own: dict[fx.Node, bool]
    ) -> tuple[fx.Node, ...]:
        """The inputs of the graph with which a cross-attention would be the stream's own."""
        inputs = [n for n in self.nodes if n not in own and is_activation_input(n)]
        reached = {n: own | self._reach([n], self.order[add]) for n in inputs}
        return tuple(n for n in inputs if branch_kind(members, reached[n]) == ATTENTION)

    def _between(
        self, root: fx.Node, branch: fx.Node, reached: dict[fx.Node, bool]
    ) -> list[fx.Node]:
        """The nodes that lie on a way from root to branch, nearest the branch first.

        A sum that carries the root is the stream as well: what was added to it is another branch.
        """
        roots = {root, *wholes(root)}

        def sources(node: fx.Node) -> list[fx.Node]:
            inside = [n for n in node.all_input_nodes if n in reached and n is not root]
            return [n for n in inside if roots.isdisjoint(self.stream.get(n, ()))]

        return sorted(reach([branch], sources), key=lambda n: -self.order[n])


def branch_kind(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Return "attention", "cross_attention" or "feed_forward".

    Args:     members: the branch's nodes, nearest the add first.
              own: what depends on the residual stream. Keys that do not depend on it (an encoder's
              states) make it cross-attention.
    """
    for node in members:
        if op_name(node) in ATTENTION_CALLS:
            return ATTENTION if operand(node, 1, "key") in own else CROSS_ATTENTION
        for body in called_bodies(node):
            kind = branch_kind(list(reversed(body.graph.nodes)), _own_inside(node, body, own))
            if kind != FEED_FORWARD:
                return kind
    return _kind_of_spelt_out_attention(members, own)


def _own_inside(call: fx.Node, body: fx.GraphModule, own: Container[fx.Node]) -> set[fx.Node]:
    """The nodes of a called body that depend on the residual stream outside it."""
    operands = body_operands(call)
    if not operands:  # control flow: what its body is given stays unknown
        return set(body.graph.nodes)
    found: set[fx.Node] = set()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            depends = operands.get(node) in own
        else:
            depends = any(source in found for source in node.all_input_nodes)
        if depends:
            found.add(node)
    return found


def _kind_of_spelt_out_attention(members: list[fx.Node], own: Container[fx.Node]) -> str:
    """Tell matmul + softmax + matmul from a router's softmax: attention multiplies two values.

    The product of two values before the softmax, neither of them a parameter, is queries x keys.
    Scores may be a sum of products: those with positions (XLNet) tell nothing of keys.
    """
    names = [op_name(n) for n in members]
    after = next((i for i, name in enumerate(names) if name in SOFTMAX), len(members))
    kind = FEED_FORWARD
    for node in members[after:]:
        if op_name(node) in CONTRACTION:
            added = operand(node, 0, "input") if _adds_its_first(node) else None
            values = [n for n in node.all_input_nodes if n is not added]
            values = [n for n in values if n in own or not made_of_parameters(n)]
            if len(values) >= 2:
                if all(n in own for n in values):
                    return ATTENTION
                kind = CROSS_ATTENTION
    return kind


def _adds_its_first(node: fx.Node) -> bool:
    """Whether a contraction adds its first operand to the product: a bias, such as ALiBi's."""
    return op_name(node) in ("baddbmm", "addbmm", "addmm")


def computing_module(members: list[fx.Node]) -> str:
    """Return the module in which the part of a branch nearest its add reads a parameter."""
    reading = (n for n in members if any(map(made_of_parameters, n.all_input_nodes)))
    return module_path(node) if (node := next(reading, None)) is not None else ""


def _scaled_alone(branch: fx.Node) -> list[fx.Node]:
    """A branch, then what it is a scaled form of, as long as nobody else reads the forms."""
    chain = [branch]
    while len(chain[-1].users) == 1 and (inner := form_or_norm_of(chain[-1])) is not None:
        if op_name(chain[-1]) not in MUL | DIV:
            break
        if not same_shape(inner, chain[-1]):
            break
        chain.append(inner)
    return chain


def _dropouts_over(link: fx.Node, top: fx.Node) -> list[fx.Node]:
    """The model's active dropouts between a link of a chain of sums and the chain's top."""
    found = []
    while link is not top and len(link.users) == 1:
        (link,) = link.users
        if is_active_dropout(link):
            found.append(link)
    return found
