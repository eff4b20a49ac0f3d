"""The account of sums: what becomes of every sum of a training forward that could carry a stream.

A sum could carry a residual stream if some value R, of the sum's shape, reaches the sum and,
through something that holds parameters or is opaque, another of its addends. Each such sum ends as

    site          dropout covers the addends that are branches
    left          no site, by a rule with a name (LEFT below)
    unexplained   neither: strict mode raises, and says how a user settles it

It is read off one flat graph (`Program`): bodies of checkpoints stand where they are called, and
the pieces that graph breaks leave are joined with what ran between them (compiler/recorder.py).
How R reaches an addend:

    carries      R itself: cast, viewed, scaled, normed, in part, under sums that add branches to it
    of R alone   flip(R), softmax(R), R @ constant: nothing with parameters lies between
    gated        of R, and of something with parameters that reads R: R * sigmoid(linear(R))
    computed     every way from R goes through parameters or an opaque op: what a branch is

A sum of something carried (or of R alone) and something computed is a site, whatever ops lie
between. What two computed addends are (a projected skip and a branch, two experts) cannot be told
from the sum itself, but from its place: whatever lies inside the branch of a site has its dropout.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain import torch_compat
from xtrain.passes import fx_utils
from xtrain.passes.branch_kind import branch_kind
from xtrain.passes.own_dropouts import own_dropout
from xtrain.passes.program import Program, is_item, operands, written_into
from xtrain.passes.residual_sites import ResidualSite, computing_module, find_residual_sites
from xtrain.passes.roots import mixed_streams
from xtrain.passes.stacks import stack_summed_by
from xtrain.passes.sum_readers import (
    is_error_of_a_loss,
    is_read_by_attention_alone,
    is_read_by_softmax_alone,
)
from xtrain.passes.sums import held_operands
from xtrain.passes.values import (
    form_or_norm_of,
    is_parameter,
    is_table,
    is_xtrain_op,
    parameters_read_by,
    part_of,
    peel,
    reads_form_alone,
    same_sizes,
)

Verdict = Literal["site", "left", "unexplained"]

# The rules by which a sum is left alone, as reports name them.
INSIDE_A_BRANCH = "inside the branch of a site"
EARLIER_VALUE = "adds an earlier value of the stream, or forms of one value"
JOINED = "joins streams that were kept side by side"
OPAQUE = "an op whose body no graph shows"
IN_AN_OP = "a sum in the body of a library's op"
MODULATED = "adds to a stream what does not read it"
SCORES = "attention scores: only softmax reads it"
MIXED_VALUES = "queries, keys or values: only attention reads it"
ERROR_OF_A_LOSS = "the error of a loss: only its size is read"
SETTLED = "left alone by the user"

# Where the value of a node comes from: how near it stays to the source of an edge.
_CARRIES, _ALONE, _COMPUTED = 0, 1, 2
_MAX_COMMON_VALUES = 64
_STACKS = frozenset({"stack", "cat", "concat", "concatenate"})
_CHUNKS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})


class Label(NamedTuple):
    """How a value reaches an addend: at its nearest, and whether parameters lie on any way."""

    nearest: int
    has_parameters: bool


@dataclass
class SumEntry:
    """One line of the account: a sum, what became of it and why.

    add is a node of the flat graph; `seen` says in words how the addends depend on one value.
    """

    add: fx.Node
    verdict: Verdict
    rule: str = ""
    seen: str = ""
    settled: bool = False


@dataclass
class General:
    """A site that the account found where the search for plain ones did not: nodes of its graph."""

    add: fx.Node
    branches: list[fx.Node]
    skip: fx.Node | None
    root: fx.Node | None


# What the user says of a sum: "drop", "leave", or "" for nothing.
Settled = Callable[[fx.Node], str]


class SumAccount:
    """Judge every sum of a program. `entries` and `general` are the result of `run`."""

    def __init__(self, program: Program, settled: Settled = lambda node: ""):
        self.program = program
        self.settled = settled
        self.graph = program.graph
        self.branches = program.branches
        self.nodes = list(self.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.parameters: set[fx.Node] = set()
        self.live: set[fx.Node] = set()
        self.picked: set[fx.Node] = set()  # rows of parameters, by indices: experts, embeddings
        self._classify()
        self._sources = {node: list(self._edges(node)) for node in self.nodes}
        self.entries: list[SumEntry] = []
        self.general: list[General] = []

    def run(self) -> list[SumEntry]:
        """Return an entry for each sum that could carry a stream, in running order."""
        entries = [SumEntry(add, "site") for add, found in self.branches.items() if found]
        candidates = [
            n
            for n in self.nodes
            if n not in self.branches
            and stack_summed_by(n) not in self.branches
            and (self._addends(n) or self._may_hold_a_sum(n))
        ]
        spine = self._spine()
        for add in candidates:
            entry = self._settle(add)
            if entry is None and add not in spine:
                entry = SumEntry(add, "left", INSIDE_A_BRANCH)
            if entry is None:
                entry = self._judge(add) if self._addends(add) else self._judge_opaque(add)
            if entry is not None:
                entries.append(entry)
        self.entries = [self._within_later_branches(e) for e in entries]
        self.entries.sort(key=lambda e: self.order[e.add])
        return self.entries

    def _within_later_branches(self, entry: SumEntry) -> SumEntry:
        """Take back what was said of a sum inside the branch of a site that was found later."""
        is_found_here = any(site.add is entry.add for site in self.general)
        if entry.settled or (entry.verdict == "site" and not is_found_here):
            return entry
        if entry.add in self._spine():
            return entry
        if is_found_here:
            self.general = [site for site in self.general if site.add is not entry.add]
            del self.branches[entry.add]
        return SumEntry(entry.add, "left", INSIDE_A_BRANCH)

    def _settle(self, add: fx.Node) -> SumEntry | None:
        """The entry of a sum that the user has said something of."""
        call = self.program.inside.get(add)
        said = self.settled(add) or (self.settled(call) if call is not None else "")
        if said == "leave":
            return SumEntry(add, "left", SETTLED, settled=True)
        if said != "drop" or call is not None:
            return None
        shared = self._common(add)
        addends = self._addends(add)
        root, skip, branches = None, None, addends[-1:]
        if shared is not None:
            root, addends, found = shared
            skips = [
                a
                for a, label in zip(addends, found, strict=True)
                if label is None or _is_skip(label)
            ]
            branches = [a for a in addends if a not in skips] if skips else addends[-1:]
            skip = next(iter(skips), None)
        self._add_general(General(add, branches, skip, root))
        return SumEntry(add, "site", settled=True)

    def _may_hold_a_sum(self, node: fx.Node) -> bool:
        """Whether an op that is not known by its name makes a value of an input's shape.

        It may return several, or write into what it is given and return none.
        """
        if not self._is_opaque(node):
            return False
        inputs = [n for n in node.all_input_nodes if n in self.live and _ndim(n) >= 2]
        value = node.meta.get("example_value", node.meta.get("val"))
        made = value if isinstance(value, tuple | list) else (value,)
        shapes = [v.shape for v in made if isinstance(v, torch.Tensor)]
        return any(not shapes or any(_same_shape(n, s) for s in shapes) for n in inputs)

    def _judge_opaque(self, node: fx.Node) -> SumEntry | None:
        """What an opaque op on the spine is: with parameters it may be a whole residual step."""
        inputs = [n for n in node.all_input_nodes if n in self.live]
        is_shared = any(
            self._common(node, inputs=[a, *(n for n in inputs if n is not a)]) is not None
            for a in inputs
            if len(inputs) > 1 and _ndim(a) >= 2
        )
        if not is_shared and not any(n in self.parameters for n in node.all_input_nodes):
            return None
        name = fx_utils.op_name(node) or str(node.target)
        if self.settled(node) == "leave":
            return SumEntry(node, "left", SETTLED, settled=True)
        why = self.program.unseen.get(node, "")
        seen = f"the body of {name} is not seen{f' ({why})' * bool(why)}"
        return SumEntry(node, "unexplained", OPAQUE, seen)

    def _add_general(self, site: General) -> None:
        self.branches.setdefault(site.add, set()).update(site.branches)
        self.general.append(site)

    # --- values ---------------------------------------------------------------------------------

    def _classify(self) -> None:
        """Tell parameters and what is made of them, and activations, from tables and numbers."""
        for node in self.nodes:
            role = node.meta.get("role")
            if node.op == "output":
                continue
            if node.op in ("placeholder", "get_attr"):
                if role == "parameter" or (role is None and is_parameter(node)):
                    self.parameters.add(node)
                elif role == "input" or (role is None and _is_activation(node)):
                    self.live.add(node)
                continue
            inputs = node.all_input_nodes
            if inputs and all(n in self.parameters for n in inputs):
                self.parameters.add(node)
            elif any(n in self.live or n in self.parameters for n in inputs) and _is_float(node):
                self.live.add(node)
                floats = [n for n in inputs if _is_float(n)]
                if floats and all(n in self.parameters or n in self.picked for n in floats):
                    self.picked.add(node)

    def _edges(self, node: fx.Node) -> Iterator[tuple[fx.Node, int, bool]]:
        """The values that a node is computed from: (source, how near it stays, by parameters)."""
        if node.op in ("placeholder", "get_attr", "output"):
            return
        member = _member(node)
        if member is not None:
            yield (member, _CARRIES, False)
            return
        inputs = [
            n for n in node.all_input_nodes if n in self.live and not reads_form_alone(node, n)
        ]
        if node.target is written_into or (
            is_item(node) and fx_utils.tensor_meta(node.args[0]) is None
        ):
            yield from ((n, _CARRIES, False) for n in inputs)
            return
        addends = set(self._addends(node)) or set(self._held(node))
        given = [n for n in node.all_input_nodes if n in self.parameters]
        opaque = self._is_opaque(node)
        carried = None if opaque else form_or_norm_of(node) or part_of(node) or _stacked_form(node)
        carries_all = fx_utils.op_name(node) in _STACKS or stack_summed_by(node) is not None
        mixed = None if opaque else mixed_streams(node)
        if fx_utils.op_name(node) in fx_utils.CONTRACTION:
            given += [n for n in inputs if n in self.picked]
        matrix = opaque or any(_ndim(p) >= 2 for p in given)
        for source in inputs:
            if carries_all or source in addends or source is carried or source is mixed:
                yield (source, _CARRIES, bool(given))
            else:
                yield (source, _COMPUTED if matrix else _ALONE, bool(given) or opaque)

    def _is_opaque(self, node: fx.Node) -> bool:
        """Whether what a node does is not known by its name: another library's op, a control flow.

        A module that is called as one, and a body that runs many times, hold their own parameters.
        """
        if node.op == "call_module":
            return True
        if isinstance(node.target, torch_compat.HigherOrderOperator):
            if fx_utils.op_name(node) in fx_utils.CONTRACTION:  # flex_attention
                return False
            bodies = fx_utils.called_bodies(self.program.origin.get(node, node))
            return bool(bodies) or "place" in node.meta  # recorded, so that no body shows
        return fx_utils.is_library_op(node.target)

    def _addends(self, node: fx.Node) -> list[fx.Node]:
        """The activations that a node adds up, [] where it adds fewer than two."""
        if node.op not in ("call_function", "call_method") or not _is_float(node):
            return []
        if fx_utils.tensor_meta(node) is None or _ndim(node) < 2 or is_xtrain_op(node):
            return []
        found = self._held(node)
        if not found and node not in self.parameters:
            found = self._merged_addends(node)
        return found if len(found) > 1 else []

    def _held(self, node: fx.Node) -> list[fx.Node]:
        held = [o for _, o in held_operands(node) if isinstance(o, fx.Node)]
        held = [o for o in held if _ndim(o) > 1]  # a vector is a bias, whatever it was made of
        return list(dict.fromkeys(o for o in held if o in self.live))

    def _merged_addends(self, node: fx.Node) -> list[fx.Node]:
        """Stacked values that an op adds up along the stack, in a spelling that sums.py has not.

        What views, casts, scales, projects or attends to a stack keeps its values apart.
        """
        name = fx_utils.op_name(node)
        if name not in _SUMS_OVER_DIM:
            return []
        for source in node.all_input_nodes:
            stack: fx.Node | None = source
            while stack is not None and fx_utils.op_name(stack) not in _STACKS:
                stack = form_or_norm_of(stack)
            if stack is None or stack_summed_by(node) is not None:
                continue
            values = fx_utils.operand(stack, 0, "tensors")
            if not isinstance(values, list | tuple) or not _along_stack(node, source, stack):
                continue
            live = [v for v in values if isinstance(v, fx.Node) and v in self.live]
            return list(dict.fromkeys(_unsqueezed(v) for v in live))
        return []

    # --- ways -----------------------------------------------------------------------------------

    def _labels(self, value: fx.Node, blocked: set[fx.Node]) -> dict[fx.Node, Label]:
        """Every value that reaches `value`, with how; a branch reaches nothing behind its add."""
        labels = {value: Label(_CARRIES, False)}
        heap = [-self.order[value]]
        seen = {value}
        while heap:
            node = self.nodes[-heapq.heappop(heap)]
            if node in blocked:
                continue
            at = labels[node]
            cut = self.branches.get(node, ())
            for source, step, by_parameters in self._sources[node]:
                if source in cut:
                    continue
                label = Label(max(at.nearest, step), at.has_parameters or by_parameters)
                known = labels.get(source)
                if known is not None:
                    label = Label(
                        min(known.nearest, label.nearest),
                        known.has_parameters or label.has_parameters,
                    )
                labels[source] = label
                if source not in seen:
                    seen.add(source)
                    heapq.heappush(heap, -self.order[source])
        return labels

    def _spine(self) -> set[fx.Node]:
        """What reaches the forward's main results without passing through a branch."""
        outputs = [n for n in self.nodes if n.op == "output"]
        results = [n for out in outputs for n in out.all_input_nodes if n in self.live]
        pending = self._main(results)
        spine = set(pending)
        while pending:
            node = pending.pop()
            cut = self.branches.get(node, ())
            for source in node.all_input_nodes:
                if source not in spine and source not in cut and source in self.live:
                    spine.add(source)
                    pending.append(source)
        return spine

    def _main(self, results: list[fx.Node]) -> list[fx.Node]:
        """The results that depend on most sites: keys and values kept for later depend on fewer."""
        adds = {add for add, found in self.branches.items() if found}
        reached = [adds & self._ancestors(result) for result in results]
        return [
            result
            for result, found in zip(results, reached, strict=True)
            if not any(found < other for other in reached)
        ]

    def _ancestors(self, node: fx.Node) -> set[fx.Node]:
        seen, pending = {node}, [node]
        for value in pending:
            pending += (new := [n for n in value.all_input_nodes if n not in seen])
            seen.update(new)
        return seen

    # --- the verdict ----------------------------------------------------------------------------

    def _common(
        self,
        add: fx.Node,
        blocked: Iterable[fx.Node] = (),
        inputs: Sequence[fx.Node] = (),
    ) -> tuple[fx.Node, list[fx.Node], list[Label | None]] | None:
        """The last value of a sum's shape that two addends depend on, one of them by parameters.

        Returns:  (R, addends, label of R in each), or None where there is no such value.
        """
        addends = list(inputs) or self._addends(add)
        blocked = set(blocked)
        is_shape_of_first = bool(inputs) or fx_utils.op_name(add) in _SUMS_OVER_DIM
        shape = _shape(addends[0] if is_shape_of_first else add)
        labels = [self._labels(a, blocked) for a in addends]
        for _ in range(_MAX_COMMON_VALUES):
            common = [
                n
                for n in set().union(*labels)
                if n in self.live
                and n not in blocked
                and sum(n in known for known in labels) > 1
                and (_same_shape(n, shape) or _is_in_part(n, shape, labels))
            ]
            if not common:
                return None
            root = max(common, key=self.order.__getitem__)
            found = [known.get(root) for known in labels]
            known = [label for label in found if label is not None]
            if any(label.has_parameters and label.nearest > _CARRIES for label in known):
                return root, addends, found
            # All carry it, or are forms of it alone: it explains what they share up to here.
            blocked.add(root)
            labels = [self._labels(a, blocked) for a in addends]
        return None

    def _judge(self, add: fx.Node) -> SumEntry | None:
        """What a sum on the spine is; None where its addends have no value in common."""
        shared = self._common(add)
        if shared is None:
            return self._explained(add)
        root, addends, found = shared
        pairs = list(zip(addends, found, strict=True))
        if is_read_by_softmax_alone(add):
            return SumEntry(add, "left", SCORES)
        if is_error_of_a_loss(add):
            return SumEntry(add, "left", ERROR_OF_A_LOSS)
        if is_read_by_attention_alone(add) and is_read_by_attention_alone(root):
            return SumEntry(add, "left", MIXED_VALUES)
        skips = [a for a, label in pairs if label is not None and _is_skip(label)]
        branches = [a for a, label in pairs if label is not None and a not in skips]
        streams = [a for a in branches if self._is_stream(a, root)]
        if streams and len(streams) == len(branches):
            return SumEntry(add, "left", MODULATED)
        branches = [a for a in branches if a not in streams]
        if self._are_parts(add, addends, root):
            return SumEntry(add, "left", JOINED)
        seen = _said(found)
        is_stacked = stack_summed_by(add) is not None or fx_utils.op_name(add) in _SUMS_OVER_DIM
        if add in self.program.inside:  # which no pass can reach
            return SumEntry(add, "unexplained", IN_AN_OP, seen)
        if not skips or not all(map(_can_be_dropped, branches)) or is_stacked:
            return SumEntry(add, "unexplained", seen=seen)
        self._add_general(General(add, branches, skips[0], root))
        return SumEntry(add, "site", seen=seen)

    def _explained(self, add: fx.Node) -> SumEntry | None:
        """The entry of a sum whose addends share a value, but nothing that was computed from it."""
        first, *others = (self._labels(a, set()) for a in self._addends(add))
        shape = _shape(add)
        for other in others:
            if any(n in other and n in self.live and _same_shape(n, shape) for n in first):
                return SumEntry(add, "left", EARLIER_VALUE)
        return None

    def _is_stream(self, addend: fx.Node, root: fx.Node) -> bool:
        """Whether an addend is another stream than the one of `root`, or carries that one on.

        It is a form of a site's sum that does not depend on root, or that has it from its stream.
        """
        labels = self._labels(addend, set())
        for node, label in labels.items():
            if label.nearest == _COMPUTED or not self.branches.get(node):
                continue
            if self.order[node] <= self.order[root]:
                continue
            inner = self._labels(node, set()).get(root)
            if inner is None or inner.nearest != _COMPUTED:
                return True
        return False

    def _are_parts(self, add: fx.Node, addends: list[fx.Node], root: fx.Node) -> bool:
        """Whether addends have nothing in common but a stack of streams that each takes one of."""
        ndim = _ndim(root)
        labels = [self._labels(a, set()) for a in addends]
        stacks = {n for n in labels[0] if _ndim(n) > ndim and all(n in known for known in labels)}
        if not stacks:
            return False
        last = max(stacks, key=self.order.__getitem__)
        if self.order[last] < self.order[root]:
            return False
        return self._common(add, {last}) is None

    def mistaken(self) -> list[fx.Node]:
        """The sites of the plain search whose branch is a stream: it holds a sum of such a one.

        x + x0 where x is gate * (x0 + f(x0)): the plain search does not see the sum under the gate,
        and takes all of x for a branch of x0.
        """
        known = {add for add, found in self.branches.items() if found}
        unseen = [n for n in self.nodes if n not in known and len(self._addends(n)) > 1]
        unseen = [n for n in unseen if stack_summed_by(n) not in known and self._is_open(n)]
        return [add for add in known if any(self._carries_one(add, unseen))]

    def _is_open(self, add: fx.Node) -> bool:
        """Whether a sum is one of a skip and a branch, as far as it shows."""
        shared = self._common(add)
        if shared is None:
            return False
        labels = [label for label in shared[2] if label is not None]
        return any(map(_is_skip, labels)) and not all(map(_is_skip, labels))

    def _carries_one(self, add: fx.Node, unseen: list[fx.Node]) -> Iterator[bool]:
        """Whether such a sum, of the site's own stream and behind it, goes on into a branch."""
        residual = self.program.residuals.get(add)
        root = None if residual is None else peel(residual)
        for branch in self.branches[add]:
            labels = self._labels(branch, set())
            for inner in unseen:
                if root is None or inner not in labels or self.order[inner] <= self.order[root]:
                    continue
                own = self._labels(inner, set()).get(root)
                if labels[inner].nearest != _COMPUTED and own and own.nearest != _COMPUTED:
                    yield True

    def goes_on(self, add: fx.Node) -> bool:
        """Whether a sum reaches a result as a stream does: by no way through parameters alone."""
        results = [n for out in self.nodes if out.op == "output" for n in out.all_input_nodes]
        found = [self._labels(n, set()).get(add) for n in self._main(results)]
        return any(label is not None and label.nearest != _COMPUTED for label in found)

    def between(self, root: fx.Node, branch: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
        """The nodes on the ways from root to branch, nearest the branch first; root's readers."""
        reached = {root}
        for node in self.nodes[self.order[root] + 1 : self.order[branch] + 1]:
            cut = self.branches.get(node, ())
            if any(n in reached and n not in cut for n in node.all_input_nodes):
                reached.add(node)
        found, pending = {branch}, [branch]
        for node in pending:
            cut = self.branches.get(node, ())
            new = [n for n in node.all_input_nodes if n in reached and n not in cut]
            new = [n for n in new if n not in found and n is not root]
            found.update(new)
            pending += new
        return sorted(found, key=lambda n: -self.order[n]), reached


# Ops that may add values up along a dimension, beside those that sums.py reads as sums.
_SUMS_OVER_DIM = frozenset(
    "sum mean nansum nanmean cumsum cumsum_ logcumsumexp einsum matmul bmm tensordot conv1d conv2d "
    "avg_pool1d avg_pool2d adaptive_avg_pool1d trace".split()
)


def _along_stack(node: fx.Node, source: fx.Node, stack: fx.Node) -> bool:
    """Whether a node may add up what is stacked: its result has fewer values, or a running sum."""
    if "cumsum" in fx_utils.op_name(node):
        return True
    result, given = fx_utils.tensor_meta(node), fx_utils.tensor_meta(source)
    if result is None or given is None:
        return False
    members = fx_utils.operand(stack, 0, "tensors")
    member = fx_utils.tensor_meta(members[0]) if members else None
    # A sum over the stack has the size of one member; one over another dim, or a norm, has not.
    return member is not None and _same_count(result, member)


def _same_count(a: torch.Tensor, b: torch.Tensor) -> bool:
    return statically_known_true(a.numel() == b.numel())


def _unsqueezed(node: fx.Node) -> fx.Node:
    """The value that was given one more dim to be concatenated."""
    if fx_utils.op_name(node) in ("unsqueeze", "view", "reshape", "getitem") and node.args:
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        return source
    return node


def _member(node: fx.Node) -> fx.Node | None:
    """The one value of a stack that a node takes out again: stack((x, h))[0], unbind, select."""
    name = fx_utils.op_name(node)
    if name not in ("getitem", "select") or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, index = node.args[0], node.args[-1]
    if not isinstance(index, int):
        return None
    inner = fx_utils.op_name(source)
    if inner in _CHUNKS:
        cut = source.all_input_nodes[0]
        count = len(source.meta.get("example_value", source.meta.get("val", ())) or ())
        values = _stacked(cut)
        whole = inner == "unbind" if fx_utils.op_name(cut) == "stack" else inner != "unbind"
        return values[index] if values and len(values) == count and whole else None
    values = _stacked(source) if fx_utils.op_name(source) == "stack" else None
    dim = fx_utils.operand(source, 1, "dim", default=0)
    at = node.args[1] if name == "select" else 0
    return values[index] if values and dim == at and index < len(values) else None


def _stacked(node: fx.Node) -> Sequence[fx.Node] | None:
    if fx_utils.op_name(node) not in _STACKS:
        return None
    values = fx_utils.operand(node, 0, "tensors")
    if isinstance(values, list | tuple) and all(isinstance(v, fx.Node) for v in values):
        return values
    return None


def _stacked_form(node: fx.Node) -> fx.Node | None:
    """One value given further dims, or repeated: the streams of a hyper-connection begin so."""
    if fx_utils.op_name(node) in ("expand", "repeat", "broadcast_to", "expand_as", "tile"):
        value = fx_utils.operand(node, 0, "input", "self")
        return value if isinstance(value, fx.Node) else None
    return None


def _is_skip(label: Label) -> bool:
    """Whether an addend is the value itself, or a form of it alone."""
    return label.nearest == _CARRIES or (label.nearest == _ALONE and not label.has_parameters)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    if isinstance(value, tuple | list):
        return not isinstance(value, torch.Size)
    return value is None


def _is_activation(node: fx.Node) -> bool:
    value = fx_utils.tensor_meta(node)
    return value is not None and _is_float(node) and value.ndim >= 2 and not is_table(node)


_ORDINALS = ("first", "second", "third", "fourth")


def _said(labels: Sequence[Label | None]) -> str:
    """Say how each addend depends on the value that they have in common."""
    words = []
    for i, label in enumerate(labels):
        if label is None:
            how = "does not depend on it"
        elif label.nearest == _CARRIES:
            how = "carries it on"
        elif label.nearest == _COMPUTED:
            how = "is computed from it by parameters"
        elif label.has_parameters:
            how = "is gated by it, or computed from it"
        else:
            how = "is a form of it alone"
        words.append(f"the {_ORDINALS[i] if i < len(_ORDINALS) else f'{i + 1}th'} {how}")
    return f"of a value that its addends have in common, {' and '.join(words)}"


def _is_in_part(node: fx.Node, shape: torch.Size, labels: Sequence[dict[fx.Node, Label]]) -> bool:
    """Whether an addend carries a part of a value on: one of several streams side by side."""
    if _ndim(node) != len(shape):
        return False
    return any(known[node].nearest == _CARRIES for known in labels if node in known)


def _can_be_dropped(node: fx.Node) -> bool:
    value = fx_utils.tensor_meta(node)
    return value is not None and value.dtype.is_floating_point


def _ndim(node: fx.Node) -> int:
    value = fx_utils.tensor_meta(node)
    return -1 if value is None else value.ndim


def _shape(node: fx.Node) -> torch.Size:
    value = fx_utils.tensor_meta(node)
    return torch.Size(()) if value is None else value.shape


def _same_shape(node: fx.Node, shape: torch.Size) -> bool:
    value = fx_utils.tensor_meta(node)
    return value is not None and same_sizes(value.shape, shape)


@dataclass
class Found:
    """The sites of a graph and of the bodies that it calls, found once, and its account of sums.

    sites:   by graph, in running order; unsited: the same of bodies that take no seeds.
    account: None where only the whole forward can tell (a piece of it, compiler/recorder.py).
    """

    program: Program
    sites: dict[fx.Graph, list[ResidualSite]]
    account: SumAccount | None = None


def find_sites(
    module: fx.GraphModule, settled: Settled = lambda node: "", general: str = "all"
) -> Found:
    """Return the residual sites of a graph module and its bodies, and the account of its sums.

    Args:     module: its hidden sums are spelt out (spell_out_sums).
              settled: what the user says of a sum of these graphs.
              general: which sites the account may add to those that the plain search finds: "all"
              where the graph is a whole forward, "stream" where it is a block (those whose sum
              goes on as a stream), "none" for a piece, which is judged with the others later.
    """
    found: dict[fx.Graph, list[ResidualSite]] = {}
    _find_plain(module.graph, (), settled, found)
    program = Program.of(module)
    program.cover(site for sites in found.values() for site in sites)
    result = Found(program, found)
    if general == "none":
        return result
    account = SumAccount(program, lambda node: settled(program.origin.get(node, node)))
    for add in account.mistaken():
        del program.branches[add]
        origin = program.origin[add]
        found[origin.graph] = [s for s in found[origin.graph] if origin not in s.takers]
    account.run()
    for site in account.general:
        for described in _described(account, site):
            if general == "all" or account.goes_on(site.add):
                found.setdefault(described.add.graph, []).append(described)
            else:
                program.branches.pop(site.add, None)
    result.account = account
    return result


def _find_plain(
    graph: fx.Graph,
    calls: tuple[fx.Node, ...],
    settled: Settled,
    found: dict[fx.Graph, list[ResidualSite]],
) -> None:
    from xtrain.passes.cut_adds import find_cut_adds

    if graph in found:
        return
    sites = find_residual_sites(graph, calls if find_cut_adds(graph) else ())
    found[graph] = [site for site in sites if settled(site.add) != "leave"]
    for node in graph.nodes:
        for body in fx_utils.called_bodies(node):
            inner = (*calls, node) if fx_utils.body_operands(node) else ()
            _find_plain(body.graph, inner, settled, found)


def _described(account: SumAccount, site: General) -> Iterator[ResidualSite]:
    """The general sites of one add, in the nodes of the graphs that the program was made of."""
    origin = account.program.origin
    add = origin[site.add]
    there = {here: there for there, here in operands(add, site.add)}
    for branch in site.branches:
        if branch not in there:
            continue
        residual = there.get(site.skip) if site.skip is not None else None
        if site.root is not None:
            members, reached = account.between(site.root, branch)
        else:
            members, reached = [branch], {branch}
        residual = residual if residual is not None else there[branch]
        own = own_dropout(there[branch], residual) if residual is not there[branch] else None
        yield ResidualSite(
            add=add,
            branch=there[branch],
            residual=residual,
            kind=branch_kind(members, reached),
            own=own,
            shared=(),
            path=fx_utils.module_path(add),
            takers=(add,),
            witnesses=tuple(origin.get(n, n) for n in parameters_read_by(members)),
            origin=computing_module(members),
        )
