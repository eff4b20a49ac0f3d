"""The dropout that a model has on a branch of its own: by an op, or by a mask written by hand.

F.dropout(h, p)                         an op: what it drops is its first operand
h * (torch.rand_like(h) > p) / (1 - p)  by hand: a factor that only a generator decides
h.div(keep) * (keep + torch.rand(B, 1, 1)).floor_()              stochastic depth, a sample at once
h.masked_fill(torch.rand(h.shape) < p, 0), torch.where(mask, h, 0), h[mask] = 0, h.mul_(mask)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import form_or_norm_of, is_active_dropout, peeled_chain

# What a dropped value stays on its way to the add, beside its forms and norms.
_KEEPS_DROPPED = fx_utils.MUL | fx_utils.DIV | {"getitem", "slice", "narrow", "chunk", "split"}
_KEEPS_DROPPED |= {"masked_fill", "masked_fill_", "where"}
_WRITES = fx_utils.IN_PLACE_SCALING | {"masked_fill_", "setitem"}
_MASKS = fx_utils.MUL | {"masked_fill", "masked_fill_", "where", "setitem"}

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


def own_dropout(branch: fx.Node, residual: fx.Node) -> fx.Node | None:
    """Return the model's own active dropout on a branch, the nearest to its end, or None."""
    return next(own_dropouts(branch, residual), None)


def own_dropouts(branch: fx.Node, residual: fx.Node) -> Iterator[fx.Node]:
    """Yield the model's own active dropouts on a branch, from its end on.

    A gate, a mask, a slice or a norm may follow one; no contraction and no stream lies between.
    """
    seen = {branch, *peeled_chain(residual)}
    pending = [branch]
    for node in pending:
        if is_active_dropout(node) or is_masked_by_hand(node):
            yield node
        if (write := _masking_write(node)) is not None and write not in seen:
            seen.add(write)
            yield write
        inner = form_or_norm_of(node)
        sources = [] if inner is None else [inner]
        if inner is None and fx_utils.op_name(node) in _KEEPS_DROPPED:
            sources = node.all_input_nodes
        pending += (new := [n for n in sources if n not in seen])
        seen.update(new)


def is_masked_by_hand(node: fx.Node) -> bool:
    """Whether a node multiplies by, fills by or selects by a mask that only a generator decides."""
    if fx_utils.op_name(node) not in _MASKS:
        return False
    return any(is_random_mask(operand) for operand in node.all_input_nodes)


def _masking_write(node: fx.Node) -> fx.Node | None:
    """A mask that is written into a value: h.mul_(mask), h[mask] = 0, and h is read behind it."""
    for user in node.users:
        if fx_utils.op_name(user) in _WRITES and user.args and user.args[0] is node:
            if is_masked_by_hand(user):
                return user
    return None


def is_random_mask(node: fx.Node) -> bool:
    """Whether a tensor is 0 or not by chance alone: no value of the model enters.

    Noise that drops nothing (jitter, Gumbel noise of a router) is no mask.
    """
    if fx_utils.tensor_meta(node) is None:
        return False
    decided, draws = False, False
    seen, pending = {node}, [node]
    for source in pending:
        name = fx_utils.op_name(source)
        writes = [u for u in source.users if _changes_in_place(u, source)]
        names = {name, *map(fx_utils.op_name, writes)}
        draws |= not names.isdisjoint(_UNIFORM | _DECISIONS)
        decided |= not names.isdisjoint(_THRESHOLDS | _DECISIONS)
        if not names.isdisjoint(_UNIFORM | _DECISIONS) or name in _LIKE:
            continue
        meta = fx_utils.tensor_meta(source)
        if source.op in ("placeholder", "get_attr") and meta is not None:
            if meta.ndim and meta.dtype.is_floating_point:
                return False
        sources = [n for n in source.all_input_nodes if fx_utils.tensor_meta(n) is not None]
        pending += (new := [n for n in sources if n not in seen])
        seen.update(new)
    return draws and decided


def _changes_in_place(user: fx.Node, value: fx.Node) -> bool:
    name = fx_utils.op_name(user)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place and bool(user.args) and user.args[0] is value
