"""The account of sums: what becomes of every sum of a training forward that could carry a stream.

A sum could carry a residual stream if some value R, of the sum's shape, reaches the sum and,
through something that holds parameters or is opaque, another of its addends. Each such sum ends as

    site          dropout covers the addends that are branches
    left          no site, by a rule with a name (LEFT below)
    unexplained   neither: strict mode raises, and says how a user settles it

It is read off one flat graph (`Program`): bodies of checkpoints stand where they are called, and
the pieces that graph breaks leave are joined with what ran between them, in
compiler/forward_program.py. How R reaches an addend:

    carries      R itself: cast, viewed, scaled, normed, in part, under sums that add branches to it
    of R alone   flip(R), softmax(R), R @ constant: nothing with parameters lies between
    gated        of R, and of something with parameters that reads R: R * sigmoid(linear(R))
    computed     every way from R goes through parameters or an opaque op: what a branch is

A sum of something carried (or of R alone) and something computed is a site, whatever ops lie
between. What two computed addends are (a projected skip and a branch, two experts) cannot be told
from the sum itself, but from its place: whatever lies inside the branch of a site has its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from xtrain.passes.graph import SUB, ndim_of, op_name, tensor_meta, value_of
from xtrain.passes.sites.carried import peel, peeled_chain
from xtrain.passes.sites.program import KERNEL, Program
from xtrain.passes.sites.sum_readers import (
    is_error_of_a_loss,
    is_read_by_attention_alone,
    is_read_by_softmax_alone,
)
from xtrain.passes.sites.sums import stack_summed_by
from xtrain.passes.sites.ways import (
    CARRIES,
    COMPUTED,
    SUMS_OVER_DIM,
    Label,
    Ways,
    has_shape,
    same_rows,
    shape_of,
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
# Why one is unexplained that is no sum, beside OPAQUE.
HANDED_ON = "a branch that a block returns and nobody adds"

_MAX_COMMON_VALUES = 64


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
        self.branches = program.branches
        self.ways = Ways(program)
        self.entries: list[SumEntry] = []
        self.general: list[General] = []

    def run(self) -> list[SumEntry]:
        """Return an entry for each sum that could carry a stream, in running order."""
        entries = list(self._handed_on())
        entries += [SumEntry(add, "site") for add, found in self.branches.items() if found]
        candidates = [
            n
            for n in self.ways.nodes
            if n not in self.branches
            and stack_summed_by(n) not in self.branches
            and (self.ways.addends(n) or self._may_hold_a_sum(n))
        ]
        spine = self.ways.spine()
        for add in candidates:
            entry = self._settle(add)
            if entry is None and add not in spine:
                entry = SumEntry(add, "left", INSIDE_A_BRANCH)
            if entry is None:
                entry = self._judge(add) if self.ways.addends(add) else self._judge_opaque(add)
            if entry is not None:
                entries.append(entry)
        self.entries = [self._within_later_branches(e) for e in entries]
        self.entries.sort(key=lambda e: self.ways.order[e.add])
        return self.entries

    def _handed_on(self) -> Iterator[SumEntry]:
        """Note which sums take the branches that blocks returned; yield those that none takes."""
        for value in sorted(self.program.handed_on, key=self.ways.order.__getitem__):
            readers, takers = [value], []
            for reader in readers:
                for user in reader.users:
                    if self._adds_to_a_skip(user, reader):
                        takers.append((user, reader))
                    else:
                        readers.append(user)
            if takers and all(value in peeled_chain(reader) for reader in readers):
                for add, branch in takers:
                    self.branches.setdefault(add, set()).add(branch)
            else:
                yield SumEntry(value, "unexplained", HANDED_ON)

    def _adds_to_a_skip(self, add: fx.Node, branch: fx.Node) -> bool:
        """Whether a sum adds a branch to what the branch reads, or a form of that."""
        shared = self._common(add) if branch in self.ways.addends(add) else None
        if shared is None:
            return False
        pairs = zip(*shared[1:], strict=True)
        return any(label is not None and label.is_skip for addend, label in pairs)

    def _within_later_branches(self, entry: SumEntry) -> SumEntry:
        """Take back what was said of a sum inside the branch of a site that was found later."""
        is_found_here = any(site.add is entry.add for site in self.general)
        if entry.settled or (entry.verdict == "site" and not is_found_here):
            return entry
        if entry.add in self.ways.spine():
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
        addends = self.ways.addends(add)
        root, skip, branches = None, None, addends[-1:]
        if shared is not None:
            root, addends, found = shared
            skips = [
                a for a, label in zip(addends, found, strict=True) if label is None or label.is_skip
            ]
            branches = [a for a in addends if a not in skips] if skips else addends[-1:]
            skip = next(iter(skips), None)
        self._add_general(General(add, branches, skip, root))
        return SumEntry(add, "site", settled=True)

    def _may_hold_a_sum(self, node: fx.Node) -> bool:
        """Whether an op that is not known by its name makes a value of an input's shape.

        It may return several, or write into what it is given and return none.
        """
        if not self.ways.is_opaque(node):
            return False
        if node in self.ways.made_unseen:
            return True
        inputs = [n for n in node.all_input_nodes if n in self.ways.live and ndim_of(n) >= 2]
        value = value_of(node)
        made = value if isinstance(value, tuple | list) else (value,)
        shapes = [v.shape for v in made if isinstance(v, torch.Tensor)]
        return any(not shapes or any(has_shape(n, s) for s in shapes) for n in inputs)

    def _judge_opaque(self, node: fx.Node) -> SumEntry | None:
        """What an opaque op on the spine is: with parameters it may be a whole residual step."""
        if node in self.ways.made_unseen:
            return SumEntry(node, "unexplained", OPAQUE, self.ways.made_unseen[node])
        inputs = [n for n in node.all_input_nodes if n in self.ways.live]
        is_shared = any(
            self._common(node, inputs=[a, *(n for n in inputs if n is not a)]) is not None
            for a in inputs
            if len(inputs) > 1 and ndim_of(a) >= 2
        )
        if not is_shared and not any(n in self.ways.parameters for n in node.all_input_nodes):
            return None
        name = node.meta.get(KERNEL) or op_name(node) or str(node.target)
        if self.settled(node) == "leave":
            return SumEntry(node, "left", SETTLED, settled=True)
        unseen = "a Triton kernel" if KERNEL in node.meta else ""
        why = self.program.unseen.get(node, unseen)
        seen = f"the body of {name} is not seen{f' ({why})' * bool(why)}"
        return SumEntry(node, "unexplained", OPAQUE, seen)

    def _add_general(self, site: General) -> None:
        self.branches.setdefault(site.add, set()).update(site.branches)
        self.general.append(site)

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
        addends = list(inputs) or self.ways.addends(add)
        blocked = set(blocked)
        is_shape_of_first = bool(inputs) or op_name(add) in SUMS_OVER_DIM
        shape = shape_of(addends[0] if is_shape_of_first else add)
        labels = [self.ways.labels(a, blocked) for a in addends]
        for _ in range(_MAX_COMMON_VALUES):
            common = [
                n
                for n in set().union(*labels)
                if n in self.ways.live
                and n not in blocked
                and sum(n in known for known in labels) > 1
                and (same_rows(n, shape) or _is_in_part(n, shape, labels))
            ]
            if not common:
                return None
            root = max(common, key=self.ways.order.__getitem__)
            found = [known.get(root) for known in labels]
            known = [label for label in found if label is not None]
            if any(label.has_parameters and label.nearest > CARRIES for label in known):
                return root, addends, found
            # All carry it, or are forms of it alone: it explains what they share up to here.
            blocked.add(root)
            labels = [self.ways.labels(a, blocked) for a in addends]
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
        skips = [a for a, label in pairs if label is not None and label.is_skip]
        branches = [a for a, label in pairs if label is not None and a not in skips]
        streams = [a for a in branches if self._is_stream(a, root)]
        if streams and len(streams) == len(branches):
            return SumEntry(add, "left", MODULATED)
        branches = [a for a in branches if a not in streams]
        if self._are_parts(add, addends, root):
            return SumEntry(add, "left", JOINED)
        seen = _said(found)
        hides = stack_summed_by(add) is not None or op_name(add) in SUMS_OVER_DIM
        hides |= bool(self.ways.product_addends(add))
        if add in self.program.inside:  # which no pass can reach
            return SumEntry(add, "unexplained", IN_AN_OP, seen)
        if any(self._is_network(add, a, root) for a in branches):
            return SumEntry(add, "unexplained", seen=f"{seen}, through sums of other sites")
        if not skips or not all(map(_can_be_dropped, branches)) or hides:
            return SumEntry(add, "unexplained", seen=seen)
        self._add_general(General(add, branches, skips[0], root))
        return SumEntry(add, "site", seen=seen)

    def _explained(self, add: fx.Node) -> SumEntry | None:
        """The entry of a sum whose addends share a value, but nothing that was computed from it."""
        first, *others = (self.ways.labels(a, set()) for a in self.ways.addends(add))
        shape = shape_of(add)
        for other in others:
            if any(n in other and n in self.ways.live and same_rows(n, shape) for n in first):
                return SumEntry(add, "left", EARLIER_VALUE)
        return None

    def _is_stream(self, addend: fx.Node, root: fx.Node) -> bool:
        """Whether an addend is another stream than the one of `root`, or carries that one on.

        It is a form of a site's sum that does not depend on root, or that has it from its stream.
        """
        labels = self.ways.labels(addend, set())
        carried = [n for n, label in labels.items() if label.nearest != COMPUTED]
        for node in carried:
            if not self.branches.get(node) or self.ways.order[node] <= self.ways.order[root]:
                continue
            inner = self.ways.labels(node, set()).get(root)
            if inner is None:
                return True
            if inner.nearest != COMPUTED and not self._is_taken_off(root, node, carried):
                return True
        return False

    def _is_taken_off(self, root: fx.Node, total: fx.Node, values: list[fx.Node]) -> bool:
        """Whether one of these values is the difference of a sum and the stream that it began with.

        (x + f) - x is f again, however x and the sum are shown: AltUp's innovation.
        """
        for node in values:
            if op_name(node) not in SUB or self.ways.order[node] <= self.ways.order[total]:
                continue
            known = [self.ways.labels(a, {total}) for a in self.ways.addends(node)]
            with_sum = [total in k and k[total].nearest != COMPUTED for k in known]
            without = [root in k and k[root].nearest != COMPUTED for k in known]
            if any(with_sum) and any(w and not t for w, t in zip(without, with_sum, strict=True)):
                return True
        return False

    def _are_parts(self, add: fx.Node, addends: list[fx.Node], root: fx.Node) -> bool:
        """Whether addends have nothing in common but a stack of streams that each takes one of."""
        ndim = ndim_of(root)
        labels = [self.ways.labels(a, set()) for a in addends]
        stacks = {n for n in labels[0] if ndim_of(n) > ndim and all(n in known for known in labels)}
        if not stacks:
            return False
        last = max(stacks, key=self.ways.order.__getitem__)
        if self.ways.order[last] < self.ways.order[root]:
            return False
        return self._common(add, {last}) is None

    def mistaken(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The sites of the plain search whose branch is a stream, as (add, branch).

        x + x0 where x is gate * (x0 + f(x0)): the plain search does not see the sum under the gate,
        and takes all of x for a branch of x0; or it sees the sum, and takes gate(x) for parameters;
        or a skip on the way from x0 to x is projected; or x is what several layers made in turn.
        """
        for add, residual in self.program.residuals.items():
            for branch in self.branches.get(add, ()):
                if self._is_network(add, branch, peel(residual)):
                    yield add, branch

    def _is_network(self, add: fx.Node, branch: fx.Node, root: fx.Node) -> bool:
        """Whether an addend is more than one branch: a stream that sums of its own have made."""
        return self._is_stream(branch, root) or self._hides_a_sum(add, branch, root)

    def _hides_a_sum(self, add: fx.Node, branch: fx.Node, root: fx.Node) -> bool:
        """Whether a sum that is no site carries the stream of root on inside of a branch.

        It adds to a form of what root carries, and is carried by the branch; or what it adds is all
        computed, as experts are, or a convolution and what that reads, but by layers that follow
        one another.
        """
        nodes = self.ways.beside(root, branch)
        if not any(map(self._is_open_sum, nodes)):
            return False
        carried = self.ways.carried(root)
        members = self.ways.reading(carried, nodes)
        is_all_computed = False
        for inner in filter(self._is_open_sum, members):
            shared = self._common(inner)
            if shared is None:
                continue
            known = [label for label in shared[2] if label is not None]
            if not any(label.is_skip for label in known):
                is_all_computed = True
            elif not all(label.is_skip for label in known):
                own, here = (self.ways.labels(n, set()) for n in (inner, branch))
                goes_on = inner in here and not here[inner].is_computed
                if goes_on and any(n in own and not own[n].is_computed for n in carried):
                    return True
        return is_all_computed and self.ways.runs_through_layers([*members, add])

    def _is_open_sum(self, node: fx.Node) -> bool:
        """Whether a node adds up activations and is no site."""
        stack = stack_summed_by(node)
        is_known = self.branches.get(node) or (stack is not None and self.branches.get(stack))
        return not is_known and len(self.ways.addends(node)) > 1

    def goes_on(self, add: fx.Node) -> bool:
        """Whether a sum reaches a result as a stream does: by no way through parameters alone."""
        results = [n for out in self.ways.nodes if out.op == "output" for n in out.all_input_nodes]
        found = [self.ways.labels(n, set()).get(add) for n in self.ways.main(results)]
        return any(label is not None and label.nearest != COMPUTED for label in found)


_ORDINALS = ("first", "second", "third", "fourth")


def _said(labels: Sequence[Label | None]) -> str:
    """Say how each addend depends on the value that they have in common."""
    words = []
    for i, label in enumerate(labels):
        if label is None:
            how = "does not depend on it"
        elif label.nearest == CARRIES:
            how = "carries it on"
        elif label.nearest == COMPUTED:
            how = "is computed from it by parameters"
        elif label.has_parameters:
            how = "is gated by it, or computed from it"
        else:
            how = "is a form of it alone"
        words.append(f"the {_ORDINALS[i] if i < len(_ORDINALS) else f'{i + 1}th'} {how}")
    return f"of a value that its addends have in common, {' and '.join(words)}"


def _is_in_part(node: fx.Node, shape: torch.Size, labels: Sequence[dict[fx.Node, Label]]) -> bool:
    """Whether an addend carries a part of a value on: one of several streams side by side."""
    if ndim_of(node) != len(shape):
        return False
    return any(known[node].nearest == CARRIES for known in labels if node in known)


def _can_be_dropped(node: fx.Node) -> bool:
    value = tensor_meta(node)
    return value is not None and value.dtype.is_floating_point
