"""Sums over stacked values: torch.stack((x, h)).sum(0) is x + h, however it is spelt.

stack or cat of values with a dim of size 1; casts and factors (weights) in between; then sum, mean,
or a product that sums over the stack's dim: einsum("k,kbtd->btd"), matmul, tensordot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.passes import fx_utils
from xtrain.passes.values import same_sizes

_STACKS = frozenset({"stack", "cat", "concat", "concatenate"})
_CASTS = frozenset(
    "to _to_copy type type_as float half bfloat16 double contiguous clone alias".split()
) | {"convert_element_type"}
_SCALINGS = fx_utils.MUL | fx_utils.DIV


def stack_summed_by(node: fx.Node) -> fx.Node | None:
    """The stack whose values a node adds up, weighted or not, None when it adds none."""
    chain = chain_to_stack(node)
    return chain[-1] if chain else None


def chain_to_stack(node: fx.Node) -> list[fx.Node]:
    """What lies between a sum over stacked values and the stack, which is last; [] if none is."""
    reader = _SUMMED_DIM.get(fx_utils.op_name(node))
    if reader is None:
        return []
    for operand in node.all_input_nodes:
        chain = _to_stack(operand)
        if chain and reader(node, operand) == _stack_dim(chain[-1]):
            return chain
    return []


def stacked_values(stack: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The stacked values, each once, with the node that takes it: the stack, or a view in front.

    A value that is stacked twice is one operand: it cannot be replaced in one place alone.
    """
    values = fx_utils.operand(stack, 0, "tensors")
    found: dict[Any, fx.Node] = {}
    for value in values:
        if fx_utils.op_name(stack) == "stack":
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
        name = fx_utils.op_name(chain[-1])
        sources = chain[-1].all_input_nodes
        if name in _CASTS or name in fx_utils.DIV:
            sources = sources[:1]
        elif name not in fx_utils.MUL:
            return []
        inner = [s for s in sources if _same_ndim(s, node)]
        if len(inner) > 1:
            inner = [s for s in inner if _is_stack(s) or _to_stack(s)]
        if len(inner) != 1:
            return []
        chain.append(inner[0])
    return chain


def _same_ndim(a: fx.Node, b: fx.Node) -> bool:
    first, second = fx_utils.tensor_meta(a), fx_utils.tensor_meta(b)
    return first is not None and second is not None and first.ndim == second.ndim


def _is_stack(node: fx.Node) -> bool:
    """Whether a node stacks values along a dim that they have not."""
    if fx_utils.op_name(node) not in _STACKS:
        return False
    values = fx_utils.operand(node, 0, "tensors")
    if not isinstance(values, list | tuple) or not values:
        return False
    if fx_utils.op_name(node) == "stack":
        return all(isinstance(v, fx.Node) for v in values)
    return all(_is_unsqueezed(v, _stack_dim(node)) for v in values)


def _is_unsqueezed(value: object, dim: int | None) -> bool:
    """Whether a value shows another with one more dim, of size 1."""
    if not isinstance(value, fx.Node) or dim is None:
        return False
    if fx_utils.op_name(value) not in ("unsqueeze", "getitem", "view", "reshape"):
        return False
    whole = fx_utils.tensor_meta(value)
    source = fx_utils.tensor_meta(value.all_input_nodes[0])
    if whole is None or source is None or not dim < whole.ndim:
        return False
    shape = list(whole.shape)
    return statically_known_true(shape.pop(dim) == 1) and same_sizes(shape, source.shape)


def _stack_dim(stack: fx.Node) -> int | None:
    meta = fx_utils.tensor_meta(stack)
    dim = fx_utils.operand(stack, 1, "dim", "axis", default=0)
    return dim % meta.ndim if meta is not None and isinstance(dim, int) else None


def _reduced_dim(node: fx.Node, operand: fx.Node) -> int | None:
    """The one dim that sum or mean adds up."""
    dim = fx_utils.operand(node, 1, "dim", "axis")
    if isinstance(dim, list | tuple) and len(dim) == 1:
        dim = dim[0]
    meta = fx_utils.tensor_meta(operand)
    if meta is None or not isinstance(dim, int) or operand is not node.args[0]:
        return None
    return dim % meta.ndim


def _einsum_dim(node: fx.Node, operand: fx.Node) -> int | None:
    """The dim that einsum sums out of an operand whose other dims are those of the result."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    meta = fx_utils.tensor_meta(operand)
    if not isinstance(equation, str) or "->" not in equation or meta is None:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or operands.count(operand) != 1:
        return None
    term = terms[operands.index(operand)]
    if "..." in term:  # as many dims as the operand has beyond its letters
        dims = "*" * (meta.ndim - len(term) + 3)
        term, output = term.replace("...", dims), output.replace("...", dims)
    gone = [i for i, letter in enumerate(term) if letter not in output]
    return gone[0] if len(gone) == 1 and term.replace(term[gone[0]], "") == output else None


def _product_dim(node: fx.Node, operand: fx.Node) -> int | None:
    """The dim that a product with a vector sums over: the last of the first operand."""
    first, second = fx_utils.operand(node, 0, "input"), fx_utils.operand(node, 1, "other", "weight")
    one, two = fx_utils.tensor_meta(first), fx_utils.tensor_meta(second)
    if one is None or two is None:
        return None
    if fx_utils.op_name(node) == "tensordot":
        dims = fx_utils.operand(node, 2, "dims", default=2)
        return 0 if operand is second and one.ndim == 1 and dims == 1 else None
    columns = two.shape[:-1] if fx_utils.op_name(node) == "linear" else two.shape[1:]
    is_vector = all(statically_known_true(size == 1) for size in columns)
    return one.ndim - 1 if operand is first and is_vector else None


# op -> which dim of an operand it sums over so that the others stay, in order
_SUMMED_DIM: dict[str, Callable[[fx.Node, fx.Node], int | None]] = {
    "sum": _reduced_dim,
    "mean": _reduced_dim,
    "einsum": _einsum_dim,
    "matmul": _product_dim,
    "linear": _product_dim,
    "tensordot": _product_dim,
}
