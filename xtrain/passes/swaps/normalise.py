"""Give every value of a graph one spelling, so that the matchers behind need to know one.

Before:  c = x.to(fp32)            x is fp32 already     After:  readers of c, d, v and t read x
         d = F.dropout(x, 0.0)
         v = x[:, 0:, :].view(x.shape) * 1.0
         t = x.transpose(1, 2).transpose(1, 2)
         h += y                    nobody reads h's memory later      h = h + y
         e = model.eps.item()      dynamic=True                       readers of e read the number
Stage:   Dynamo's graph, with dropout in. Casts of one value would otherwise part the residual
         stream from the norm that reads it.     Changes numerics: no.
Needs:   nothing; the graph is not traced again. Dynamo's graph is nearly canonical as it stands,
         and tracing it once more (make_fx) would lose what later readers need: example values
         (DDP's splitter), sources of inputs, checkpointed bodies, autocast and grad-mode regions.
Skips:   a value that is written in place, whose copy or view is then not the value itself; a view
         taken under no_grad of what carries a gradient: it cuts the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import (
    called_bodies,
    dtype_of,
    first_two,
    is_absent_dropout,
    is_call,
    op_name,
    operand,
    operands_of_bodies,
    same_shape,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.match import (
    both_orders,
    cast_source,
    div_of,
    is_number,
    mul_of,
    unary_of,
    widens,
)
from xtrain.passes.swaps.rewrite import swap_each

# Where the sources of what belongs to the compiled model begin (compiler/seeds.py, ENTRY_ROOT).
_MODEL = "L['_xtrain_model']"


def normalise(graph: fx.Graph) -> PassResult:
    """Take out what hands a value on unchanged; each counts as matched and replaced."""
    module = graph.owning_module
    assert module is not None
    num_numbers = _read_attributes(module)
    result = _take_out(graph, unchanged, also=_adds_out_of_place)
    result.num_matched += num_numbers
    result.num_replaced += num_numbers
    return result


def remove_noop_views(graph: fx.Graph) -> PassResult:
    """Take out the views and casts that the swaps put back to back, as `normalise` does.

    Before:  a = x.transpose(1, 2);  b = a.transpose(1, 2)      After:  readers of b and d read x
             c = x.to(fp32);  d = c.to(bf16)        x is bf16
    Stage:   normalised graph, last.     Changes numerics: no: widening a float is exact.
    """
    return _take_out(graph, lambda node: unchanged(node) or _cast_back(node))


def _take_out(
    graph: fx.Graph,
    source_of: Callable[[fx.Node], fx.Node | None],
    also: Callable[[fx.Node, Account], bool] = lambda node, account: False,
) -> PassResult:
    def take_out(node: fx.Node, account: Account) -> str | None:
        if also(node, account):
            return "taken out"
        source = source_of(node)
        if source is None:
            return None
        account.settle({node: source})
        return "taken out"

    result = swap_each(graph, take_out)
    result.forms.clear()
    return result


def _read_attributes(module: fx.GraphModule) -> int:
    """Put the numbers that are attributes of the model where dynamic=True made inputs of them.

    An eps, a scale or a probability of zero is no size: a guard on it costs no recompile. What is
    an argument of the forward stays an input.
    """
    numbers: dict[fx.Node, float] = {}
    for node in list(module.graph.nodes):
        value = node.meta.get("example_value")
        source = unary_of(node, "item")
        if source is None or not isinstance(value, torch.SymFloat):
            continue
        if source.op == "placeholder" and torch_compat.source_name(source).startswith(_MODEL):
            numbers[node] = torch_compat.guarded_float(value)
    for placeholder, value in operands_of_bodies(module).items():
        if isinstance(value, fx.Node) and value in numbers:
            numbers[placeholder] = numbers[value]
    for node, number in numbers.items():
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs),
                lambda n, node=node, number=number: number if n is node else n,  # type: ignore[misc]
            )
        if node.op != "placeholder":
            node.graph.erase_node(node)
    return len(numbers)


def _adds_out_of_place(node: fx.Node, account: Account) -> bool:
    """Turn an add in place into a plain one where nobody can see the difference.

    Under no_grad the target keeps the gradient that it carries, which a plain sum would not.
    """
    if op_name(node) not in ("iadd", "add_") or operand(node, 2, "alpha", default=1) != 1:
        return False
    target, other = first_two(node)
    before, after = tensor_meta(target), tensor_meta(node)
    if before is None or after is None or not isinstance(target, fx.Node):
        return False
    owner = account.maker(target)
    added = tensor_meta(other)
    promoted = before.dtype if added is None else torch.promote_types(before.dtype, added.dtype)
    if not is_call(owner) or called_bodies(owner):
        return False  # somebody else's memory
    if promoted != after.dtype or _is_read_by_another_name(node, account):
        return False
    if not account.state(node).grad and account.carries(target):
        return False
    node.op, node.target = "call_function", operator.add
    node.args, node.kwargs = (target, other), {}
    with torch.no_grad():
        node.meta["example_value"] = after.clone()
    account.forget(node)
    return True


def _is_read_by_another_name(write: fx.Node, account: Account) -> bool:
    """Whether a node behind a write reads the memory written other than through the write."""
    memories, through_write = account.memories(write), {write}
    node = write.next
    while node.op != "root":
        sources = [n for n in node.all_input_nodes if account.memories(n) & memories]
        if any(n not in through_write for n in sources):
            return True
        if sources and account.memories(node) & memories:
            through_write.add(node)
        node = node.next
    return False


# --- what hands a value on as it is ---------------------------------------------------------------


def unchanged(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node hands on as it is, or None."""
    if is_absent_dropout(node):
        return operand(node, 0, "input")
    readings = _same_cast, _whole, _same_view, _times_one, _turned_back
    return next((source for read in readings if (source := read(node)) is not None), None)


def _same_view(node: fx.Node) -> fx.Node | None:
    """Return x for x.view(x.shape) and the like."""
    source = unary_of(node, "view", "reshape", "expand")
    is_same = same_shape(source, node) and dtype_of(source) == dtype_of(node)
    return source if is_same else None


def _times_one(node: fx.Node) -> fx.Node | None:
    """Return x for x * 1.0, 1.0 * x and x / 1.0, as unset scales leave them."""
    quotient = div_of(node)
    for value, one in (quotient,) if quotient else both_orders(mul_of(node)):
        if is_number(one) and one == 1 and dtype_of(value) == dtype_of(node) is not None:
            return value
    return None


def _same_cast(node: fx.Node) -> fx.Node | None:
    source = cast_source(node)
    if source is None or op_name(node) == "_to_copy" or operand(node, 3, "copy") is True:
        return None
    is_same = "memory_format" not in node.kwargs and dtype_of(source) == dtype_of(node)
    return source if is_same else None


def _cast_back(node: fx.Node) -> fx.Node | None:
    """Return x for x.to(wider).to(x.dtype)."""
    middle = cast_source(node)
    source = cast_source(middle)
    if source is None or middle is None or dtype_of(source) != dtype_of(node):
        return None
    return source if widens(source, middle) else None


def _whole(node: fx.Node) -> fx.Node | None:
    """Return x for x[:, 0:, :] and the like."""
    if op_name(node) != "getitem":
        return None
    source, index = node.args
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(p is Ellipsis or _counts_up_from_zero(p) for p in parts)
    return source if parts and whole and same_shape(source, node) else None  # type: ignore[return-value]


def _counts_up_from_zero(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)


def _turned_back(node: fx.Node) -> fx.Node | None:
    """Return x for x.transpose(a, b).transpose(a, b)."""
    inner = unary_of(node, "transpose")
    source = unary_of(inner, "transpose")
    return source if source is not None and _dims(node) == _dims(inner) else None


def _dims(node: fx.Node) -> set[int] | None:
    value = tensor_meta(node)
    dims = operand(node, 1, "dim0"), operand(node, 2, "dim1")
    if value is None or not all(isinstance(d, int) for d in dims):
        return None
    return {d % value.ndim for d in dims}
