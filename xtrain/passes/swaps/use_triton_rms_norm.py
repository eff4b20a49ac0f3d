"""Swap root mean square norms for xtrain.rms_norm, in whatever order a model casts.

Before:  c = x.to(fp32)                                       After:  y = xtrain.rms_norm(x, w, eps,
         n = c * rsqrt(c.pow(2).mean(-1, keepdim) + eps)                   "llama" | "gemma")
         y = w * n.to(x.dtype)                  "llama": cast, then multiply
         y = (n * (1 + w.float())).to(x.dtype)  "gemma"
         y = (w * n).to(x.dtype)                as "llama" on c, rounded once to x.dtype
         y = F.rms_norm(x, (D,), w, eps)        multiplies in fp32, then casts
         y = w * F.rms_norm(x, (D,), None, eps) "llama"
         y = n.to(x.dtype), n, F.rms_norm(x, (D,)), whoever reads it      a weight of ones
Stage:   normalised graph.     Changes numerics: within tolerance; the order of casts stays.
Anchor:  x / rms, as a product with rsqrt or a quotient by sqrt.
Skips:   statistics formed in a half dtype, layer norms (x minus its mean), a norm over several dims
         or over a symbolic number of columns that has no weight.
Also:    where every reader of y rounds it (autocast), the op rounds as it stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from xtrain.ops import OPS
from xtrain.ops.core import compute_dtype
from xtrain.passes.graph import (
    Refused,
    dtype_of,
    is_xtrain_op,
    known_dtype,
    known_tensor,
    op_name,
    operand,
    tensor_meta,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.match import (
    add_of,
    both_orders,
    cast_source,
    div_of,
    is_last_dim,
    is_number,
    mul_of,
    name_of,
    only_user,
    power_of,
    rounds_to,
    sub_of,
    unary_of,
    uncast,
    unwidened,
)
from xtrain.passes.swaps.rewrite import Forms, Place, check_same_form, swap_each

OP = OPS["rms_norm"]
_NO_WEIGHT = "its weight is not one number per column"


@dataclass
class Norm:
    """A norm as found: what the op reads, and the node whose value it gives."""

    x: fx.Node
    weight: fx.Node | None  # None: ones
    cast: str
    last: fx.Node
    computes_in: torch.dtype | None = None  # cast x to it first: the op's own x.dtype rules y's
    eps: float = 0.0


def use_triton_rms_norm(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the norms of a graph and of its bodies; the report says how many, how and why not."""

    def swap(node: fx.Node, account: Account) -> str | None:
        norm = _match_call(node) if op_name(node) == "rms_norm" else _match_spelt_out(node)
        return None if norm is None else _swap(norm, Forms(kernels, backend), account)

    return swap_each(graph, swap)


def _swap(norm: Norm, forms: Forms, account: Account) -> str:
    x, last, place = norm.x, norm.last, Place(norm.last, forms)
    y_dtype = rounds_to(last) or known_dtype(last)
    if norm.computes_in is not None:
        x = place.cast(x, norm.computes_in)
    own = known_dtype(x)
    weight = _ones(x) if norm.weight is None else norm.weight
    if norm.cast == "llama":
        own = torch.promote_types(own, known_dtype(weight))
    options: dict[str, Any] = {} if y_dtype == own else {"out_dtype": y_dtype}
    y = place.op(OP, (x, weight, norm.eps), {"cast": norm.cast}, **options)
    check_same_form(y, last, dtype=y_dtype)
    account.settle({last: y})
    return place.form


def _ones(x: fx.Node) -> fx.Node:
    """Return a weight that changes nothing, in x's dtype, at the graph's start; norms share it.

    There it stands before any add that a norm may be fused with.
    """
    value = known_tensor(x)
    D = value.shape[-1]
    if not isinstance(D, int):
        raise Refused("it has no weight, and a symbolic number of columns")
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    first = next(n for n in x.graph.nodes if n.op not in ("placeholder", "get_attr"))
    while first.target is torch.ops.aten.full.default:
        if first.args == ([D], 1.0) and first.kwargs == options:
            return first
        first = first.next
    with x.graph.inserting_before(first):
        ones = x.graph.call_function(torch.ops.aten.full.default, ([D], 1.0), options)
    ones.meta = {"example_value": value.detach().new_ones(D)}
    return ones


# --- F.rms_norm -----------------------------------------------------------------------------------


def _match_call(node: fx.Node) -> Norm | None:
    """F.rms_norm computes in fp32 up to its result, which has x's dtype."""
    x, shape = operand(node, 0, "input"), operand(node, 1, "normalized_shape")
    weight, eps = operand(node, 2, "weight"), operand(node, 3, "eps")
    if is_xtrain_op(node) or tensor_meta(x) is None:
        return None
    if isinstance(shape, tuple | list) and len(shape) != 1:
        raise Refused("it normalises over several dims")
    c = compute_dtype(known_dtype(node))
    if eps is None:  # that of the dtype of the arithmetic (pytorch#142848)
        eps = torch.finfo(c).eps
    if not is_number(eps):
        raise Refused("eps is no constant")
    if weight is None:
        norm = _scaled(node, unwidened(x) if c == dtype_of(x) else x)
    elif _is_weight(weight, x):
        norm = Norm(x, weight, "llama", node, c if c != dtype_of(x) else None)
    else:
        raise Refused(_NO_WEIGHT)
    norm.eps = float(eps)
    return norm


# --- the norm spelt out ---------------------------------------------------------------------------


def _match_spelt_out(node: fx.Node) -> Norm | None:
    """Match from n = x / rms."""
    found = _normalised(node)
    if found is None:
        return None
    c, eps = found
    x = unwidened(c)
    difference = sub_of(x)
    if difference is not None and unary_of(uncast(difference[1]), "mean") is not None:
        raise Refused("it is a layer norm: the mean is taken off x")
    _check_wide(node, "x / rms is formed in {}")
    norm = _scaled(node, x)
    norm.eps = eps
    return norm


def _is_wide(node: fx.Node) -> bool:
    """Whether a value has the dtype of arithmetic on it: fp32 or fp64."""
    return dtype_of(node) == compute_dtype(dtype_of(node) or torch.float32)


def _check_wide(node: fx.Node, reason: str) -> None:
    if not _is_wide(node):
        raise Refused(reason.format(name_of(dtype_of(node))))


def _normalised(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (c, eps) when a node is c / sqrt(mean(c^2) + eps), else None."""
    pairs: list[tuple[Any, Any, Any]] = []  # value, what divides it squared, the node between
    for value, rstd in both_orders(mul_of(node)):
        pairs.append((value, _square_of_reciprocal(uncast(rstd)), rstd))
    if (quotient := div_of(node)) is not None:
        value, rms = quotient
        root = uncast(rms)
        pairs.append((value, unary_of(root, "sqrt") or power_of(root, 0.5), rms))
    for value, under_root, rstd in pairs:
        if not isinstance(under_root, fx.Node) or not isinstance(value, fx.Node):
            continue
        if (statistics := _mean_square(under_root)) is None:
            continue
        c, eps = statistics
        if uncast(value) is not uncast(c):
            return None  # a gate or a scale that divides one value by the rms of another
        _check_wide(rstd, "1 / rms is rounded to {}")
        if dtype_of(value) not in (dtype_of(c), dtype_of(unwidened(c))):
            raise Refused("x is rounded between its mean square and its quotient")
        return c, eps
    return None


def _square_of_reciprocal(node: object) -> Any:
    """Return v when a node is 1 / sqrt(v), in any of its spellings, else None."""
    if (under := unary_of(node, "rsqrt")) is not None:
        return under
    if (under := power_of(node, -0.5)) is not None:
        return under
    root = unary_of(node, "reciprocal")
    if root is None and (quotient := div_of(node)) is not None and quotient[0] in (1, 1.0):
        root = quotient[1]
    return unary_of(root, "sqrt") if root is not None else None


def _mean_square(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return (c, eps) when a node is mean(c^2, -1, keepdim) + eps, else None."""
    for mean, eps in both_orders(add_of(node)):
        squared = unary_of(mean, "mean")
        if squared is None or not is_number(eps):
            continue
        c = power_of(squared, 2)
        if not isinstance(c, fx.Node) or tensor_meta(squared) is None:
            return None
        dim = operand(mean, 1, "dim")
        dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
        if not is_last_dim(dim, squared) or operand(mean, 2, "keepdim") is not True:
            return None
        _check_wide(squared, "the mean square is formed in {}")
        if operand(mean, 3, "dtype") not in (None, dtype_of(squared)):
            raise Refused("the mean square changes dtype as it is summed")
        return c, float(eps)
    return None


def _scaled(n: fx.Node, x: fx.Node) -> Norm:
    """Follow n = x / rms to the product with the weight and the casts on the way, if it has one."""
    user = only_user(n)
    scaled, rounded = n, None
    if not _is_wide(n):
        rounded = n  # F.rms_norm without weight, on a half dtype
    elif user is not None and cast_source(user) is n:
        if dtype_of(user) != dtype_of(x):
            raise Refused(
                f"x / rms is rounded to {name_of(dtype_of(user))}, which is not x's dtype"
            )
        scaled, rounded = user, user
        user = only_user(user)
    factors = None if user is None else mul_of(user)
    weight: Any = None
    if factors is not None and factors[0] is not factors[1]:
        weight = factors[1] if factors[0] is scaled else factors[0]
    if user is None or not _is_weight(weight, x):
        is_same = dtype_of(scaled) == dtype_of(x)
        return Norm(x, None, "llama", scaled, None if is_same else dtype_of(scaled))
    if rounded is not None:
        return Norm(x, weight, "llama", user)
    return _scaled_before_cast(n, x, weight, user)


def _scaled_before_cast(n: fx.Node, x: fx.Node, weight: fx.Node, product: fx.Node) -> Norm:
    """The orders that multiply first: by 1 + w in fp32 ("gemma"), or by w itself."""
    cast = "llama"
    if (one_plus := _one_plus(weight)) is not None:
        weight, cast = one_plus, "gemma"
        if not _is_weight(weight, x):
            raise Refused(_NO_WEIGHT)
    last = product
    user = only_user(product)
    if user is not None and cast_source(user) is product and dtype_of(user) == dtype_of(x):
        last = user
    same = dtype_of(x) == dtype_of(n)
    fits = same if cast == "llama" else same or last is not product
    return Norm(x, weight, cast, last, None if fits else dtype_of(n))


def _one_plus(weight: fx.Node) -> fx.Node | None:
    """Return w when a node is 1 + w, formed in fp32: rounded to bf16, it is a weight of its own."""
    for one, w in both_orders(add_of(weight)) if _is_wide(weight) else ():
        if one in (1, 1.0) and is_number(one) and isinstance(w, fx.Node):
            return uncast(w)
    return None


def _is_weight(weight: Any, x: fx.Node) -> bool:
    """Whether a value is one float per column of x, on its device."""
    w, value = tensor_meta(weight), tensor_meta(x)
    if w is None or value is None or w.ndim != 1 or w.shape[0] != value.shape[-1]:
        return False
    return w.dtype.is_floating_point and w.device == value.device
