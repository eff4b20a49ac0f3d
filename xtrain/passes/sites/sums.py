"""What counts as a sum of addends: adds and differences, fused forms, sums over stacked values.

torch.lerp(x, h, w)            x + w * (h - x)      addends x and h
torch.addcdiv(x, h, g)         x + value * h / g    addends x and h
torch.rsub(h, x)               x - h                addends h and x
x.index_add(0, i, h)           x[i] += h            addends x and h, also of other shapes
torch.stack((x, h)).sum(0)     x + h                addends x and h, however it is spelt: cat of
                                                    values with a dim of size 1; casts and weights
                                                    in between; then sum, mean, or a product over
                                                    the stack's dim (einsum, matmul, tensordot)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes.graph import (
    ADD,
    BUFFERS,
    CAST,
    COPY,
    DIV,
    MUL,
    STACK,
    SUB,
    first_operand,
    first_two,
    is_table,
    ndim_of,
    op_name,
    operand,
    same_shape,
    same_sizes,
    tensor_meta,
)

_LERP = frozenset({"lerp", "lerp_"})
_ADDCDIV = frozenset({"addcdiv", "addcdiv_"})
# Where an op that adds to parts of its first operand takes what it adds.
_SCATTERED = {"index_add": (3, "source"), "scatter_add": (3, "src"), "index_put": (2, "values")}
_SCATTERED |= {f"{name}_": where for name, where in _SCATTERED.items()}
# x - f(x) is a residual sum too.
_PAIR = ADD | SUB | _LERP | _ADDCDIV


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds tensors of its own shape, floating point, of two dimensions or more.

    What is stacked has one shape, and a sum over it may keep a dim of size 1 in the stack's place.
    """
    result = tensor_meta(node)
    if result is None or not result.dtype.is_floating_point or result.ndim < 2:
        return False
    held = held_operands(node)
    scattered = [a for _, a in held[1:]] if op_name(node) in _SCATTERED else []
    return len(held) > 1 and all(
        (o := tensor_meta(a)) is not None
        and o.dtype.is_floating_point
        and (same_shape(a, node) or a in scattered or holder is not node)
        for holder, a in held
    )


def sum_operands(node: fx.Node) -> tuple[Any, ...]:
    """Return the operands of a sum that may be stream and branches, () for any other node.

    None in the place of one that the node takes twice, since it cannot be replaced by itself.
    """
    return tuple(addend for _, addend in held_operands(node))


def held_operands(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Return the operands of a sum, each with the node that takes it: a stack, or the sum."""
    name = op_name(node)
    if name in _PAIR:
        return [(node, addend) for addend in _pair(node, name)]
    if name in _SCATTERED:
        if name.startswith("index_put") and not operand(node, 3, "accumulate", default=False):
            return []
        return [(node, first_operand(node)), (node, operand(node, *_SCATTERED[name]))]
    stack = stack_summed_by(node)
    return [] if stack is None else stacked_values(stack)


def _pair(node: fx.Node, name: str) -> tuple[Any, Any]:
    first, second = first_two(node)
    if name in _ADDCDIV:
        second = operand(node, 1, "tensor1")
        return first, None if second is operand(node, 2, "tensor2") else second
    if name in _LERP:
        second, weight = operand(node, 1, "end"), operand(node, 2, "weight")
        if isinstance(weight, fx.Node) and weight in (first, second):
            return None, None
    return first, second


def is_gathered(node: fx.Node) -> bool:
    """Whether a node adds rows to a buffer that held no activation: messages, routed experts.

    Such a sum is one value, not several addends: elements of several rows meet in one of it.
    """
    base = first_operand(node) if op_name(node) in _SCATTERED else None
    if not isinstance(base, fx.Node):
        return False
    return op_name(base) in BUFFERS or is_table(base) or is_gathered(base)


class Blend(NamedTuple):
    """h + c * (x - h), which is lerp(h, x, c): h stands in the sum and in a difference."""

    twice: fx.Node
    other: fx.Node
    inner: fx.Node


def blend(node: fx.Node) -> Blend | None:
    """Read a sum as a blend, None where it is none or where others read its parts."""
    pair = first_two(node) if op_name(node) in ADD | SUB else ()
    for value, product in (pair, pair[::-1]) if pair else ():
        if not isinstance(product, fx.Node) or len(product.users) != 1:
            continue
        if op_name(product) not in MUL | DIV:
            continue
        for inner in product.all_input_nodes:
            if op_name(inner) not in SUB or len(inner.users) != 1:
                continue
            one, two = first_two(inner)
            if one is not two and value in (one, two) and is_sum(node) and is_sum(inner):
                return Blend(value, two if one is value else one, inner)
    return None


# --- sums over stacked values ---------------------------------------------------------------------


def stack_summed_by(node: fx.Node) -> fx.Node | None:
    """The stack whose values a node adds up, weighted or not, None when it adds none."""
    chain = chain_to_stack(node)
    return chain[-1] if chain else None


def chain_to_stack(node: fx.Node) -> list[fx.Node]:
    """What lies between a sum over stacked values and the stack, which is last; [] if none is."""
    reader = _SUMMED_DIM.get(op_name(node))
    for source in node.all_input_nodes if reader else ():
        chain = _to_stack(source)
        if chain and reader(node, source) == _stack_dim(chain[-1]):  # type: ignore[misc]
            return chain
    return []


def stacked_values(stack: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The stacked values, each once, with the node that takes it: the stack, or a view in front.

    A value that is stacked twice is one operand: it cannot be replaced in one place alone.
    """
    found: dict[Any, fx.Node] = {}
    for value in first_operand(stack):
        if op_name(stack) == "stack":
            found.setdefault(value, stack)
        elif len(value.users) == 1:
            found.setdefault(value.all_input_nodes[0], value)
        else:
            return []
    return [(holder, value) for value, holder in found.items()]


def _to_stack(node: fx.Node) -> list[fx.Node]:
    """Casts and scalings from a node down to a stack, which is last; [] where there is none."""
    chain = [node]
    while not _is_stack(chain[-1]):
        name = op_name(chain[-1])
        sources = chain[-1].all_input_nodes
        if name in CAST | COPY | DIV:
            sources = sources[:1]
        elif name not in MUL:
            return []
        inner = [s for s in sources if ndim_of(s) == ndim_of(node) > -1]
        if len(inner) > 1:
            inner = [s for s in inner if _to_stack(s)]
        if len(inner) != 1:
            return []
        chain.append(inner[0])
    return chain


def _is_stack(node: fx.Node) -> bool:
    """Whether a node stacks values along a dim that they have not."""
    values = first_operand(node) if op_name(node) in STACK else None
    if not isinstance(values, list | tuple) or not values:
        return False
    if op_name(node) == "stack":
        return all(isinstance(v, fx.Node) for v in values)
    return all(_is_unsqueezed(v, _stack_dim(node)) for v in values)


def _is_unsqueezed(value: object, dim: int | None) -> bool:
    """Whether a value shows another with one more dim, of size 1."""
    if not isinstance(value, fx.Node) or dim is None:
        return False
    if op_name(value) not in ("unsqueeze", "getitem", "view", "reshape"):
        return False
    whole, source = tensor_meta(value), tensor_meta(value.all_input_nodes[0])
    if whole is None or source is None or not dim < whole.ndim:
        return False
    shape = list(whole.shape)
    return statically_known_true(shape.pop(dim) == 1) and same_sizes(shape, source.shape)


def _stack_dim(stack: fx.Node) -> int | None:
    dim = operand(stack, 1, "dim", "axis", default=0)
    return dim % ndim_of(stack) if ndim_of(stack) > 0 and isinstance(dim, int) else None


def _reduced_dim(node: fx.Node, source: fx.Node) -> int | None:
    """The one dim that sum or mean adds up."""
    dim = operand(node, 1, "dim", "axis")
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    if ndim_of(source) < 1 or not isinstance(dim, int) or source is not node.args[0]:
        return None
    return dim % ndim_of(source)


def _einsum_dim(node: fx.Node, source: fx.Node) -> int | None:
    """The dim that einsum sums out of an operand whose other dims are those of the result."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    if not isinstance(equation, str) or "->" not in equation or tensor_meta(source) is None:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or operands.count(source) != 1:
        return None
    term = terms[operands.index(source)]
    if "..." in term:  # as many dims as the operand has beyond its letters
        dims = "*" * (ndim_of(source) - len(term) + 3)
        term, output = term.replace("...", dims), output.replace("...", dims)
    gone = [i for i, letter in enumerate(term) if letter not in output]
    return gone[0] if len(gone) == 1 and term.replace(term[gone[0]], "") == output else None


def _product_dim(node: fx.Node, source: fx.Node) -> int | None:
    """The dim that a product with a vector sums over: the last of the first operand."""
    first, second = operand(node, 0, "input"), operand(node, 1, "other", "weight")
    one, two = tensor_meta(first), tensor_meta(second)
    if one is None or two is None:
        return None
    if op_name(node) == "tensordot":
        dims = operand(node, 2, "dims", default=2)
        return 0 if source is second and one.ndim == 1 and dims == 1 else None
    columns = two.shape[:-1] if op_name(node) == "linear" else two.shape[1:]
    is_vector = all(statically_known_true(size == 1) for size in columns)
    return one.ndim - 1 if source is first and is_vector else None


# op -> which dim of an operand it sums over so that the others stay, in order
_SUMMED_DIM: dict[str, Callable[[fx.Node, fx.Node], int | None]] = {
    "sum": _reduced_dim,
    "mean": _reduced_dim,
    "einsum": _einsum_dim,
    "matmul": _product_dim,
    "linear": _product_dim,
    "tensordot": _product_dim,
}
