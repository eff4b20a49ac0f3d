"""Who reads a sum: what only softmax or only a gate reads is no residual stream."""

from __future__ import annotations

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import is_absent_dropout

# Ops that scores pass on their way to softmax, and ops that ask a value for its form alone.
_ON_THE_WAY_TO_SOFTMAX = fx_utils.VIEW_LIKE | fx_utils.ADD | fx_utils.MUL | fx_utils.DIV
_ON_THE_WAY_TO_SOFTMAX |= {"masked_fill", "masked_fill_", "where", "tanh", "clamp", "clamp_min"}
_FORM_OF_THEIR_SECOND_OPERAND = frozenset({"type_as", "view_as", "reshape_as", "expand_as"})


def is_read_by_softmax_alone(node: fx.Node) -> bool:
    """Whether a sum is attention scores: no stream ends in softmax without a projection first."""
    found, seen, pending = False, {node}, [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            name = fx_utils.op_name(user)
            if name in _FORM_OF_THEIR_SECOND_OPERAND and user.args[0] is not value:
                continue
            if name in fx_utils.SOFTMAX:
                found = True
            elif name not in _ON_THE_WAY_TO_SOFTMAX:
                return False
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return found


# What picks a part of a value, beside what shows it in another form.
_PARTS = frozenset({"getitem", "slice", "narrow"})


def is_read_by_a_gate_alone(node: fx.Node) -> bool:
    """Whether a sum is a branch's inner value: all that reads it multiplies it by a computed gate.

    A state space adds its input, scaled, to what its scan returns, and gates the sum on the way to
    the output projection. A stream is normed or projected somewhere, or carried on.
    """
    found, seen, pending = False, {node}, [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            name = fx_utils.op_name(user)
            if name in _FORM_OF_THEIR_SECOND_OPERAND and user.args[0] is not value:
                continue
            if name in fx_utils.VIEW_LIKE or name in _PARTS or is_absent_dropout(user):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif name in fx_utils.MUL and _multiplies_by_a_projection(user, value):
                found = True
            else:
                return False
    return found


def _multiplies_by_a_projection(product: fx.Node, value: fx.Node) -> bool:
    """Whether the other factor holds a contraction: a padding mask or a weight does not."""
    factors = [fx_utils.operand(product, 0, "input", "self"), fx_utils.operand(product, 1, "other")]
    others = [f for f in factors if isinstance(f, fx.Node) and f is not value]
    seen, pending = set(others), list(others)
    while pending:
        source = pending.pop()
        if fx_utils.holds_contraction(source):
            return True
        new = [n for n in source.all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return False
