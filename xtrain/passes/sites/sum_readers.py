"""Who reads a sum: a residual stream is normed, projected or carried on.

What only softmax reads are scores, what only a gate reads is a branch's inner value, what only
attention multiplies are queries, keys, values or the state of a linear attention, and a difference
that is only squared is the error of a loss (an autoencoder's, a diffusion model's).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from xtrain.passes import fx_utils
from xtrain.passes.values import FORM_OF_SECOND, SUB, is_absent_dropout, is_parameter

# Ops that scores pass on their way to softmax, and ops that ask a value for its form alone.
_ON_THE_WAY_TO_SOFTMAX = fx_utils.VIEW_LIKE | fx_utils.ADD | fx_utils.MUL | fx_utils.DIV
_ON_THE_WAY_TO_SOFTMAX |= {"masked_fill", "masked_fill_", "where", "tanh", "clamp", "clamp_min"}


def is_no_stream(node: fx.Node, root: fx.Node) -> bool:
    """Whether the readers of a sum show that it is no residual stream.

    root: the addend that it would carry on. One that is normed or projected is a stream, also where
    its last sum is multiplied by another value as it is (late interaction).
    """
    return (
        is_read_by_softmax_alone(node)
        or is_read_by_a_gate_alone(node)
        or (is_read_by_attention_alone(node) and is_read_by_attention_alone(root))
        or is_error_of_a_loss(node)
    )


def is_read_by_softmax_alone(node: fx.Node) -> bool:
    """Whether a sum is attention scores: no stream ends in softmax without a projection first."""
    found, seen, pending = False, {node}, [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            name = fx_utils.op_name(user)
            if name in FORM_OF_SECOND and user.args[0] is not value:
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
            if name in FORM_OF_SECOND and user.args[0] is not value:
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


# What a value stays a form of on its way to attention: heads are cut, repeated, normed and rotated.
_ON_THE_WAY_TO_ATTENTION = fx_utils.VIEW_LIKE | _PARTS | fx_utils.ADD | fx_utils.MUL | fx_utils.DIV
_ON_THE_WAY_TO_ATTENTION |= SUB | {"neg", "cat", "stack", "chunk", "split", "unbind"}
_ON_THE_WAY_TO_ATTENTION |= {"expand", "repeat_interleave", "rms_norm", "layer_norm"}
_MATRIX_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})


def is_read_by_attention_alone(node: fx.Node) -> bool:
    """Whether all that reads a sum multiplies it by another value, without a parameter between.

    Values mixed with an earlier layer's (v = a v + b v1), and the state of a linear attention that
    is not gated (S = S + k (v - S k)). Whoever projects, returns or norms a sum by other ops reads
    a stream.
    """

    def follow(user: fx.Node, value: fx.Node) -> bool | None:
        name = fx_utils.op_name(user)
        if name in FORM_OF_SECOND and user.args[0] is not value:
            return None
        if name in fx_utils.ATTENTION or name in _MATRIX_PRODUCTS:
            return not any(_is_weight(n) for n in user.all_input_nodes)
        return None if name in _ON_THE_WAY_TO_ATTENTION else False

    return _all_readers(node, follow)


def _is_weight(node: fx.Node) -> bool:
    """Whether a matrix is parameters alone, also those that indices pick (experts)."""
    seen, pending = {node}, [node]
    for source in pending:
        if is_parameter(source):
            continue
        new = [n for n in source.all_input_nodes if _is_float(n) and n not in seen]
        if not new:
            return False
        pending += new
        seen.update(new)
    return True


def _is_float(node: fx.Node) -> bool:
    value = fx_utils.tensor_meta(node)
    return value is None or value.dtype.is_floating_point


_MEASURES = frozenset({"square", "square_", "abs", "abs_", "absolute", "norm", "vector_norm"})
_MEASURES |= {"linalg_norm", "linalg_vector_norm"}
_WEIGHTED = fx_utils.VIEW_LIKE | _PARTS | fx_utils.MUL | fx_utils.DIV | {"masked_fill", "where"}


def is_error_of_a_loss(node: fx.Node) -> bool:
    """Whether a sum is a difference of which only the size matters: it is squared or made absolute.

    The input of an autoencoder is an ancestor of what it predicts, and the noise of a diffusion
    model too, as a stream is of its branch.
    """

    def follow(user: fx.Node, value: fx.Node) -> bool | None:
        name = fx_utils.op_name(user)
        if name in _MEASURES or (name in ("pow", "__pow__") and _exponent(user) in (2, 4)):
            return True
        if name in fx_utils.MUL and fx_utils.add_operands(user) == (value, value):
            return True
        return None if name in _WEIGHTED else False

    return fx_utils.op_name(node) in SUB and _all_readers(node, follow)


def _exponent(power: fx.Node) -> object:
    return fx_utils.operand(power, 1, "exponent")


def _all_readers(node: fx.Node, follow: Callable[[fx.Node, fx.Node], bool | None]) -> bool:
    """Whether every way along the readers of a value ends where `follow` says True.

    follow: (reader, the value that it reads) -> True, the way ends well; False, it does not; None,
    it leads on through the reader.
    """
    found, seen, pending = False, {node}, [node]
    for value in pending:
        for user in value.users:
            if is_absent_dropout(user):
                ends: bool | None = None
            else:
                ends = follow(user, value)
            if ends is False:
                return False
            found |= ends is True
            if ends is None and user not in seen:
                seen.add(user)
                pending.append(user)
    return found
