"""What a rewrite must leave as it was: the state that each op runs in, and what memory holds when.

A pass says which values new ones take the place of; `Account.settle` proves that nobody can tell,
or refuses. Between the old values and what the new ones read lies the match; of every op in it:

    state      grad mode, and the contexts entered around it (autocast, inference mode, a level of
               functorch): as where the new ops stand. Another grad mode is one where no gradient
               could flow through the op anyway: masks and tables of constants.
    versions   no write into what it reads comes behind: it holds what the new ops read, and what
               they keep for the backward.
    readers    no hook hangs on it: it would see another gradient, or none; nothing is written into
               the result, which an op may keep, lay out otherwise, or hand out as a view.
    inputs     all it depends on is read by the new ops too, or proved to be constant.

A value that merely takes another's place (a view of the same shape) runs no op: it must hold what
that held for every reader, and a gradient must flow through where one flowed before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import (
    Refused,
    called_bodies,
    erase_unread,
    is_call,
    is_float,
    op_name,
    output_of,
    placeholders,
    reach,
    tensors_of,
    value_of,
    walk_graphs,
    written_operands,
)
from xtrain.passes.swaps.match import cast_source

WRITTEN = "an op writes in place into what it reads"
GRAD_MODE = "it reaches across a change of grad mode that its gradients depend on"
CONTEXT = "it reaches across the edge of a context (autocast, inference mode)"

Context = tuple[Any, ...]  # what enters it, and with which arguments


@dataclass(frozen=True)
class State:
    """What ops around an op have set: whether autograd records it, and the contexts it runs in."""

    grad: bool
    contexts: tuple[Context, ...] = ()


class Account:
    """The account of one graph, made before a pass changes it; what it settles enters it."""

    def __init__(self, graph: fx.Graph, start: State):
        self.graph = graph
        self.known = set(graph.nodes)
        self._states = _states_of(graph, start)
        self._is_uniform = len(set(self._states.values())) <= 1
        self._carrying: dict[fx.Node, bool] = {}
        self._memories = {node: _memories(node) for node in graph.nodes}
        self._makers: dict[Hashable, fx.Node] = {}
        self._writes: dict[Hashable, list[fx.Node]] = {}
        for node, memories in self._memories.items():
            for memory in memories:
                self._makers.setdefault(memory, node)
            for memory in _written_by(node):
                self._writes.setdefault(memory, []).append(node)

    # --- what the graph says ----------------------------------------------------------------------

    def state(self, node: fx.Node) -> State:
        """Return the state that a node runs in; a new node runs in that of its place."""
        while node not in self._states:
            node = node.next
        return self._states[node]

    def carries(self, node: fx.Node) -> bool:
        """Whether a gradient may flow back through a value: no if it is a constant of the model."""
        pending = [node]
        while pending:
            value = pending[-1]
            sources = [] if value in self._carrying else self._gradient_sources(value)
            if unknown := [n for n in sources if n not in self._carrying]:
                pending += unknown
                continue
            self._carrying.setdefault(value, any(self._carrying[n] for n in sources))
            pending.pop()
        return self._carrying[node]

    def _gradient_sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of which a value may carry the gradient; enter what has its own.

        Under no_grad an op records nothing, but one that hands out its operand itself, or has
        written into it, gives what carries as that does.
        """
        tensors = tensors_of(node)
        if value_of(node) is not None and not any(map(is_float, tensors)):
            return []
        is_leaf = node.op in ("placeholder", "get_attr")
        if is_leaf or self.state(node).grad:
            if any(v.requires_grad for v in tensors) or (is_leaf and not tensors):
                self._carrying[node] = True
            return node.all_input_nodes
        return [n for n in node.all_input_nodes if self.memories(n) & self.memories(node)]

    def memories(self, node: fx.Node) -> set[Hashable]:
        """Return what names the memory of a value, or of several: views of it have the same."""
        if node not in self._memories:
            self._memories[node] = _memories(node)
        return self._memories[node]

    def maker(self, node: fx.Node) -> fx.Node:
        """Return the first node of the graph that holds a value's memory: itself, for a new one."""
        return next((self._makers.get(memory, node) for memory in self.memories(node)), node)

    def writes_into(self, node: fx.Node) -> list[fx.Node]:
        """Return the ops that write into a value or its views, in running order."""
        return sorted({w for m in self.memories(node) for w in self._writes.get(m, ())})

    def are_over(self, node: fx.Node) -> bool:
        """Whether ops that write into a value come before all others that take it.

        What all readers see is what the value stays: a read may move to a later place.
        """
        writes = self.writes_into(node)
        readers = [user for user in node.users if user not in writes]
        return all(write < reader for write in writes for reader in readers)

    def forget(self, write: fx.Node) -> None:
        """Take note that an op no longer writes in place, and what its value is now."""
        self._memories[write] = _memories(write)
        for memory, writes in self._writes.items():
            self._writes[memory] = [w for w in writes if w is not write]

    def erase_unknown(self) -> None:
        """Erase what was emitted for a match that came to nothing."""
        erase_unread([n for n in self.graph.nodes if n not in self.known])

    def _version(self, memory: Hashable, place: fx.Node) -> int:
        """How many ops have written into memory before a place."""
        return sum(write < place for write in self._writes.get(memory, ()))

    # --- what a rewrite must prove ----------------------------------------------------------------

    def settle(self, replaced: Mapping[fx.Node, fx.Node], constants: Iterable[Any] = ()) -> None:
        """Put new values in the place of old ones and erase what nothing reads behind it.

        Args:     replaced: old value -> new value. New ops stand in the graph; what they read that
                  was there before is what the match is of.
                  constants: values that need no proof, since the new ops hold what they say.
        Raises:   Refused, with nothing changed, where a reader, or a gradient, could tell.
        """
        match = self.prove(replaced, constants)
        for old, new in replaced.items():
            old.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)  # type: ignore[misc]
        erase_unread(match)
        self.known.update(self._emitted(replaced.values()))

    def prove(
        self, replaced: Mapping[fx.Node, fx.Node], constants: Iterable[Any] = ()
    ) -> list[fx.Node]:
        """Return the nodes of a match. Raises Refused as `settle` does."""
        emitted = self._emitted(replaced.values())
        read = {n for e in emitted for n in e.all_input_nodes if n not in emitted}
        read |= {new for new in replaced.values() if new in self.known}
        match = _between(replaced, read | set(constants))
        if any(_written_by(node) for node in match):
            raise Refused(WRITTEN)
        if emitted:
            if any(map(self.writes_into, replaced)):
                raise Refused("an op writes in place into its result")
            self._check_states(match, read, [e for e in emitted if e.all_input_nodes])
            self._check_versions(match, emitted)
        else:
            self._check_handed_on(match, replaced)
        for node in match:
            if any("register_hook" in op_name(u) for u in node.users if node not in replaced):
                raise Refused("a hook hangs on a value that it replaces")
        return match

    def _emitted(self, values: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes that new values are computed by and that were not there before."""
        new = (value for value in values if value not in self.known)
        return set(reach(new, lambda n: [m for m in n.all_input_nodes if m not in self.known]))

    def _check_states(
        self, match: list[fx.Node], read: set[fx.Node], places: list[fx.Node]
    ) -> None:
        if self._is_uniform:
            return
        states = {self.state(place) for place in places}
        for node in read:
            made = self.state(self.maker(node)).contexts
            if any(_is_inference(c) and c not in state.contexts for c in made for state in states):
                raise Refused("it reads a value of inference mode, which no op may keep")
        for node in match:
            for state in states - {(own := self.state(node))}:
                if own.contexts != state.contexts:
                    raise Refused(CONTEXT)
                if any(map(self.carries, node.all_input_nodes)):
                    raise Refused(GRAD_MODE)

    def _check_versions(self, match: list[fx.Node], emitted: set[fx.Node]) -> None:
        if not self._writes:
            return
        made = set(match)
        for reader in (*match, *emitted):
            for memory in (m for n in reader.all_input_nodes for m in self.memories(n)):
                is_inner = self._makers.get(memory) in made
                last = 0 if is_inner else len(self._writes.get(memory, ()))
                if self._version(memory, reader) != last:
                    raise Refused(WRITTEN)

    def _check_handed_on(self, match: list[fx.Node], replaced: Mapping[fx.Node, fx.Node]) -> None:
        for node in (*match, *replaced.values()):
            writes = self.writes_into(node)
            if any(w in node.users for w in writes) or not self.are_over(node):
                raise Refused(WRITTEN)
        if not any(map(self.carries, replaced.values())):
            return
        if self._is_uniform and (self.state(match[0]).grad or not self._leave(replaced)):
            return
        readers = [self._states[user] for old in replaced for user in old.users]
        for node in match:
            own = self.state(node)
            if not own.grad:
                raise Refused(GRAD_MODE)
            if any(reader.contexts != own.contexts for reader in readers):
                raise Refused(CONTEXT)

    def _leave(self, values: Iterable[fx.Node]) -> bool:
        """Whether one of these values, or a view of it, is an output of the graph."""
        left = {m for n in output_of(self.graph).all_input_nodes for m in self.memories(n)}
        return any(self.memories(value) & left for value in values)


def accounts_of(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Account]]:
    """Yield a graph and every body below it with its account; a body starts in its call's state."""
    starts: dict[fx.Graph, State] = {module.graph: State(torch.is_grad_enabled())}
    for part in dict.fromkeys(walk_graphs(module)):
        account = Account(part.graph, starts.get(part.graph, State(True)))
        for node in part.graph.nodes:
            for body in called_bodies(node):
                if body.graph not in starts or account.state(node).grad:
                    starts[body.graph] = account.state(node)
        yield part, account


# --- states ---------------------------------------------------------------------------------------


def _states_of(graph: fx.Graph, start: State) -> dict[fx.Node, State]:
    """Return the state that each node runs in.

    A call that has no value and takes none is there for what it sets: a grad mode, a context that
    it enters, or, taking what an enter handed out, one that it leaves.
    """
    states = {}
    state, grad = start, start.grad
    entered: dict[fx.Node, Context] = {}
    for node in graph.nodes:
        states[node] = state
        if node.target is torch_compat.SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif _sets_state(node):
            if left := [n for n in node.all_input_nodes if n in entered]:
                for enter in left:
                    del entered[enter]
            else:
                entered[node] = _context_of(node)
        else:
            continue
        state = State(grad, _in_effect((*start.contexts, *entered.values())))
    return states


def _context_of(enter: fx.Node) -> Context:
    known = torch_compat.ENTER_AUTOCAST, torch_compat.ENTER_INFERENCE_MODE
    return enter.target, enter.args if enter.target in known else repr((enter.args, enter.kwargs))


def _in_effect(contexts: tuple[Context, ...]) -> tuple[Context, ...]:
    """What contexts, outermost first, come to: of autocast the innermost for each device, if it
    changes anything.
    """
    others = tuple(c for c in contexts if c[0] is not torch_compat.ENTER_AUTOCAST)
    casts = {c[1][0]: c for c in contexts if c[0] is torch_compat.ENTER_AUTOCAST}
    changed = []
    for device, (enter, (_, dtype, enabled, *_)) in casts.items():
        dtype = (dtype or torch.get_autocast_dtype(device)) if enabled else None
        outside = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if dtype != outside:
            changed.append((enter, (device, dtype, enabled)))
    return (*others, *changed)


def _is_inference(context: Context) -> bool:
    return context[0] is torch_compat.ENTER_INFERENCE_MODE and context[1] == (True,)


def _sets_state(node: fx.Node) -> bool:
    return _is_without_value(node) and all(map(_is_without_value, node.all_input_nodes))


def _is_without_value(node: fx.Node) -> bool:
    is_plain_call = node.op == "call_function" and not called_bodies(node)
    return is_plain_call and "example_value" not in node.meta and "val" not in node.meta


# --- memory and matches ---------------------------------------------------------------------------


def _memories(node: fx.Node) -> set[Hashable]:
    """The memory of the tensors that a value is; what is not known is one memory for all."""
    return set(map(torch_compat.memory_of, tensors_of(node)))


def _written_by(node: fx.Node) -> set[Hashable]:
    """The memory that an op writes into, itself or in a body that it calls."""
    written = set().union(*map(_memories, written_operands(node)))
    for body in called_bodies(node):
        outside = set().union(*map(_memories, placeholders(body.graph)))
        written |= outside & set().union(*map(_written_by, body.graph.nodes))
    return written


def _between(replaced: Iterable[fx.Node], read: set[fx.Node]) -> list[fx.Node]:
    """What old values are computed by from what new ones read. Refused where they read more."""

    def sources(node: fx.Node) -> list[fx.Node]:
        if not is_call(node):
            raise Refused(f"it depends on {node.name}, which its op does not read")
        cast = cast_source(node)
        found = node.all_input_nodes if cast is None else [cast]
        return [n for n in found if n not in read and (value_of(n) is None or tensors_of(n))]

    return list(reach([old for old in replaced if old not in read], sources))
