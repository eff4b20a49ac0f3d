"""What became of each op of a graph: which pass took it out, and what stands in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from xtrain.explain.snapshot import Node, Snapshot

# What hands a part or another form of an op's result on: what it replaced, the op replaced.
_THIN = frozenset({"getitem", "to", "aten.to"})


@dataclass(frozen=True)
class Stage:
    """One pass on one graph: the graph that it was given and the graph that it left."""

    pass_name: str
    before: Snapshot
    after: Snapshot


@dataclass
class Changes:
    """From a traced graph to the compiled one.

    removed:  key of a traced op that is gone -> the pass that took it out.
    added:    key of a new op -> the pass that put it in.
    replaces: key of a new op -> keys of the traced ops whose place it took.
    """

    removed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    replaces: dict[str, list[str]] = field(default_factory=dict)

    def replaced_by(self) -> dict[str, str]:
        """Return key of a traced op -> key of the new op that took its place."""
        return {old: new for new, olds in self.replaces.items() for old in olds}


def follow(before: Snapshot, after: Snapshot, stages: list[Stage]) -> Changes:
    """Follow each op from the traced graph to the compiled one through the passes between."""
    traced, compiled = before.by_key(), after.by_key()
    changes = Changes()
    origins: dict[str, list[str]] = {}
    for stage in stages:
        old, new = stage.before.by_key(), stage.after.by_key()
        for key in old.keys() - new.keys():
            if key in traced:
                changes.removed[key] = stage.pass_name
        for key in new.keys() - old.keys():
            changes.added[key] = stage.pass_name
        for key, replaced in _replaced(old, new).items():
            known = [o for k in replaced for o in ([k] if k in traced else origins.get(k, []))]
            origins[key] = list(dict.fromkeys(known))
    changes.removed = {k: v for k, v in changes.removed.items() if k not in compiled}
    changes.added = {k: v for k, v in changes.added.items() if k in compiled and k not in traced}
    order = {key: position for position, key in enumerate(traced)}
    for key in changes.added:
        gone = sorted(
            (k for k in origins.get(key, ()) if k in changes.removed), key=order.__getitem__
        )
        if gone:
            changes.replaces[key] = gone
    return changes


def _replaced(old: dict[str, Node], new: dict[str, Node]) -> dict[str, list[str]]:
    """Return new op -> the ops that one pass took out for it, in no particular order.

    Readers that stayed tell: where one read r and now reads n, n stands for r, and so for what only
    r needed. Ops are asked in running order, and each takes what no earlier one has taken.
    """
    removed, added = old.keys() - new.keys(), [key for key in new if key not in old]
    heads: dict[str, set[str]] = {key: set() for key in added}
    for key, node in new.items():
        earlier = old[key].inputs if key in old else ()
        if len(earlier) == len(node.inputs):
            for was, now in zip(earlier, node.inputs, strict=True):
                if was in removed and now in heads:
                    heads[now].add(was)
    for key in reversed(added):
        if new[key].target in _THIN:
            for source in new[key].inputs:
                if source in heads:
                    heads[source] |= heads[key]
    taken: set[str] = set()
    result = {}
    for key in added:
        if new[key].target in _THIN:
            continue
        pending, group = [k for k in heads[key] if k not in taken], []
        while pending:
            current = pending.pop()
            if current in taken or current not in removed:
                continue
            taken.add(current)
            group.append(current)
            pending += old[current].inputs
        if group:
            result[key] = group
    return result


def rows(before: Snapshot, after: Snapshot) -> Iterator[tuple[Node | None, Node | None]]:
    """Yield pairs of traced and compiled ops in running order; None where one side has none."""
    a, b = [n.key for n in before.nodes], [n.key for n in after.nodes]
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    for _, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        left, right = before.nodes[a_start:a_end], after.nodes[b_start:b_end]
        for i in range(max(len(left), len(right))):
            yield (
                left[i] if i < len(left) else None,
                right[i] if i < len(right) else None,
            )
