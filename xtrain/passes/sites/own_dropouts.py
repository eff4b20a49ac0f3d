"""The dropout that a model has on a branch of its own: by an op, or by a mask written by hand.

F.dropout(h, p)                         an op: what it drops is its first operand
h * (torch.rand_like(h) > p) / (1 - p)  by hand: a factor that only a generator decides
h.div(keep) * (keep + torch.rand(B, 1, 1)).floor_()              stochastic depth, a sample at once
h.masked_fill(torch.rand(h.shape) < p, 0), torch.where(mask, h, 0), h[mask] = 0, h.mul_(mask)
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from xtrain.passes.graph import (
    ADD,
    DIV,
    FILL,
    MUL,
    PART,
    STACK,
    SUB,
    is_active_dropout,
    op_name,
    reach,
    tensor_meta,
    written_operands,
)
from xtrain.passes.sites.carried import form_or_norm_of, peeled_chain

# What a dropped value stays on its way to the add, beside its forms and norms.
_KEEPS_DROPPED = MUL | DIV | FILL | PART | {"chunk", "split"}
# Where a dropped value meets others that may not be.
_JOINS = ADD | SUB | STACK
_MASKS = MUL | FILL | {"setitem"}

_UNIFORM = frozenset({"rand", "rand_like", "uniform", "uniform_", "random", "random_"})
_DECISIONS = frozenset({"bernoulli", "bernoulli_", "randint", "randint_like", "randperm"})
# What makes a decision of a uniform number.
_THRESHOLDS = frozenset(
    "lt le gt ge lt_ le_ gt_ ge_ less less_equal greater greater_equal floor floor_ ceil ceil_ "
    "round round_ bool trunc __lt__ __le__ __gt__ __ge__".split()
)
# Ops that ask a tensor for its form alone.
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_tensor "
    "size shape".split()
)


def own_dropout(
    branch: fx.Node, residual: fx.Node, sites: Container[fx.Node] = ()
) -> fx.Node | None:
    """Return the model's own active dropout on a branch, the nearest to its end, or None."""
    return next(own_dropouts(branch, residual, sites), None)


def own_dropouts(
    branch: fx.Node, residual: fx.Node, sites: Container[fx.Node] = ()
) -> Iterator[fx.Node]:
    """Yield the model's own active dropouts on a branch and its parts, from its end on.

    A gate, a mask, a slice, a norm or an addend may follow one; no contraction and no stream lies
    between.

    Args:     sites: adds of other sites, whose branches have a dropout of their own.
    """
    seen = {branch, *peeled_chain(residual)}
    pending = [branch]
    for node in pending:
        drop = _dropped_by(node)
        if drop is not None and (drop is node or drop not in seen):
            seen.add(drop)
            yield drop
        pending += (new := [n for n in _parts(node, sites) if n not in seen])
        seen.update(new)


def is_dropped_whole(branch: fx.Node, sites: Container[fx.Node] = ()) -> bool:
    """Whether the model's own dropout reaches every part of a branch that it reaches at all."""
    if _dropped_by(branch) is not None:
        return True
    parts = _parts(branch, sites)
    if op_name(branch) in _JOINS and len(parts) > 1:
        return all(is_dropped_whole(part, sites) for part in parts)
    return any(is_dropped_whole(part, sites) for part in parts)


def _dropped_by(node: fx.Node) -> fx.Node | None:
    """The op that drops a value: its own, or a write into it that is read behind: h.mul_(mask)."""
    writes = (user for user in node.users if node in written_operands(user))
    return next((n for n in (node, *writes) if _drops(n)), None)


def _drops(node: fx.Node) -> bool:
    return is_active_dropout(node) or is_masked_by_hand(node)


def _parts(node: fx.Node, sites: Container[fx.Node]) -> list[fx.Node]:
    """The values that a node shows, scales, cuts or joins, none where it computes."""
    inner = form_or_norm_of(node)
    if inner is not None:
        return [inner]
    name = op_name(node)
    if name in _KEEPS_DROPPED:
        return node.all_input_nodes
    if name in _JOINS and node not in sites:
        return [n for n in node.all_input_nodes if tensor_meta(n) is not None]
    return []


def is_masked_by_hand(node: fx.Node) -> bool:
    """Whether a node multiplies by, fills by or selects by a mask that only a generator decides."""
    return op_name(node) in _MASKS and any(map(is_random_mask, node.all_input_nodes))


def is_random_mask(node: fx.Node) -> bool:
    """Whether a tensor is 0 or not by chance alone: no value of the model enters.

    Noise that drops nothing (jitter, Gumbel noise of a router) is no mask.
    """
    if tensor_meta(node) is None:
        return False
    decided = draws = False
    for source in reach([node], _decided_by):
        names = _names(source)
        draws |= not names.isdisjoint(_UNIFORM | _DECISIONS)
        decided |= not names.isdisjoint(_THRESHOLDS | _DECISIONS)
        meta = tensor_meta(source)
        if source.op in ("placeholder", "get_attr") and meta is not None:
            if meta.ndim and meta.dtype.is_floating_point:
                return False
    return draws and decided


def _decided_by(value: fx.Node) -> list[fx.Node]:
    """The tensors that decide a value, none where a generator does."""
    if not _names(value).isdisjoint(_UNIFORM | _DECISIONS | _LIKE):
        return []
    return [n for n in value.all_input_nodes if tensor_meta(n) is not None]


def _names(value: fx.Node) -> set[str]:
    """The ops that make a value, and that write into it."""
    return {op_name(value), *(op_name(u) for u in value.users if value in written_operands(u))}
