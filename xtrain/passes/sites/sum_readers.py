"""Who reads a sum: a residual stream is normed, projected or carried on.

What only softmax reads are scores, what only a gate reads is a branch's inner value, what only
attention multiplies are queries, keys, values or the state of a linear attention, and a difference
that is only squared is the error of a loss (an autoencoder's, a diffusion model's).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from xtrain.passes.graph import (
    ADD,
    ATTENTION_CALLS,
    DIV,
    FILL,
    FORM_OF_SECOND,
    MUL,
    PART,
    POWER,
    SOFTMAX,
    SUB,
    VIEW_LIKE,
    depends_on_contraction,
    first_two,
    is_absent_dropout,
    is_parameter,
    may_hold_floats,
    op_name,
    operand,
)

_ON_THE_WAY_TO_SOFTMAX = VIEW_LIKE | ADD | MUL | DIV | FILL | {"tanh", "clamp", "clamp_min"}
# What a value stays a form of on its way to attention: heads are cut, repeated, normed and rotated.
_ON_THE_WAY_TO_ATTENTION = VIEW_LIKE | PART | ADD | MUL | DIV | SUB
_ON_THE_WAY_TO_ATTENTION |= {"neg", "cat", "stack", "chunk", "split", "unbind"}
_ON_THE_WAY_TO_ATTENTION |= {"expand", "repeat_interleave", "rms_norm", "layer_norm"}
_MATRIX_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_MEASURES = frozenset(
    "square square_ abs abs_ absolute norm vector_norm linalg_norm linalg_vector_norm".split()
)
_ON_THE_WAY_TO_A_LOSS = VIEW_LIKE | PART | MUL | DIV | {"masked_fill", "where"}


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

    def ends(user: fx.Node, name: str, value: fx.Node) -> bool | None:
        if name in SOFTMAX:
            return True
        return None if name in _ON_THE_WAY_TO_SOFTMAX else False

    return _all_ways_end(node, ends)


def is_read_by_a_gate_alone(node: fx.Node) -> bool:
    """Whether a sum is a branch's inner value: all that reads it multiplies it by a computed gate.

    A state space adds its input, scaled, to what its scan returns, and gates the sum on the way to
    the output projection. A stream is normed or projected somewhere, or carried on.
    """

    def ends(user: fx.Node, name: str, value: fx.Node) -> bool | None:
        if name in VIEW_LIKE | PART:
            return None
        others = [f for f in first_two(user) if isinstance(f, fx.Node) and f is not value]
        return name in MUL and any(map(depends_on_contraction, others))

    return _all_ways_end(node, ends)


def is_read_by_attention_alone(node: fx.Node) -> bool:
    """Whether all that reads a sum multiplies it by another value, without a parameter between.

    Values mixed with an earlier layer's (v = a v + b v1), and the state of a linear attention that
    is not gated (S = S + k (v - S k)). Whoever projects, returns or norms a sum by other ops reads
    a stream.
    """

    def ends(user: fx.Node, name: str, value: fx.Node) -> bool | None:
        if name in ATTENTION_CALLS | _MATRIX_PRODUCTS:
            return not any(map(_is_weight, user.all_input_nodes))
        return None if name in _ON_THE_WAY_TO_ATTENTION else False

    return _all_ways_end(node, ends)


def is_error_of_a_loss(node: fx.Node) -> bool:
    """Whether a sum is a difference of which only the size matters: it is squared or made absolute.

    The input of an autoencoder is an ancestor of what it predicts, and the noise of a diffusion
    model too, as a stream is of its branch.
    """

    def ends(user: fx.Node, name: str, value: fx.Node) -> bool | None:
        is_even = name in POWER and operand(user, 1, "exponent") in (2, 4)
        is_square = name in MUL and first_two(user) == (value, value)
        if name in _MEASURES or is_even or is_square:
            return True
        return None if name in _ON_THE_WAY_TO_A_LOSS else False

    return op_name(node) in SUB and _all_ways_end(node, ends)


def _is_weight(node: fx.Node) -> bool:
    """Whether a matrix is parameters alone, also those that indices pick (experts).

    Where ways meet again, as those of a residual stream do, a value is computed.
    """
    seen, pending = {node}, [node]
    for source in pending:
        if not is_parameter(source):
            new = [n for n in source.all_input_nodes if may_hold_floats(n) and n not in seen]
            if not new:
                return False
            pending += new
            seen.update(new)
    return True


def _all_ways_end(node: fx.Node, ends: Callable[[fx.Node, str, fx.Node], bool | None]) -> bool:
    """Whether every way along the readers of a value ends where `ends` says True.

    What asks a value for its form alone does not count, an absent dropout leads on.

    Args:     ends: (reader, its op's name, the value that it reads) -> True, the way ends well;
              False, it does not; None, it leads on through the reader.
    """
    found, seen, pending = False, {node}, [node]
    for value in pending:
        for user in value.users:
            name = op_name(user)
            if name in FORM_OF_SECOND and user.args[0] is not value:
                continue
            end = None if is_absent_dropout(user) else ends(user, name, value)
            if end is False:
                return False
            found |= end is True
            if end is None and user not in seen:
                seen.add(user)
                pending.append(user)
    return found
