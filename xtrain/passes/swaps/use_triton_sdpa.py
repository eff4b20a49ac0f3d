"""Swap scaled dot-product attention for xtrain.sdpa, masks and repeated heads taken out.

Before:  k, v = repeat_kv(k, 4), repeat_kv(v, 4)      After:  y = xtrain.sdpa(q, k, v, causal)
         m = arange(T)[:, None] >= arange(T)                  with M = N / 4 heads of k and v
         y = F.scaled_dot_product_attention(q, k, v, m)
Stage:   normalised graph, behind use_triton_rope.     Changes numerics: within tolerance.
Anchor:  scaled_dot_product_attention.
Needs:   no dropout of probabilities; no mask, or one that depends on no input and proves to be
         causal or a sliding window. Under autocast q, k and v are cast as torch's op casts them.
Skips:   what no fused kernel takes, masks that are inputs, symbolic or of other forms; is_causal
         with unequal lengths, which torch aligns at the top left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain.ops import OPS
from xtrain.passes import fx_utils
from xtrain.passes.fx_utils import op_name, operand, tensor_meta
from xtrain.passes.match import Refused, is_number, known_dtype, unary_of
from xtrain.passes.result import PassResult
from xtrain.passes.swaps.account import Account
from xtrain.passes.swaps.constant_masks import ConstantMasks, Meaning
from xtrain.passes.swaps.forms import (
    Forms,
    check_same_form,
    emit_cast,
    emit_getitem,
    emit_op,
    erase_dead,
    values_of,
)
from xtrain.passes.swaps.swap import swap_each

OP = OPS["sdpa"]


def use_triton_sdpa(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the attention calls of a graph and of its bodies."""
    forms = Forms(kernels, backend)
    module = graph.owning_module
    assert module is not None
    masks = ConstantMasks(fx_utils.operands_of_bodies(module))

    def swap(node: fx.Node, account: Account) -> str | None:
        if op_name(node) != "scaled_dot_product_attention":
            return None
        q, k, v = (operand(node, i, name) for i, name in enumerate(("query", "key", "value")))
        if any(tensor_meta(x) is None for x in (q, k, v, node)):
            return None
        return _swap(node, (q, k, v), _meaning(node, masks), forms, account)

    return swap_each(graph, swap)


def _meaning(node: fx.Node, masks: ConstantMasks) -> Meaning:
    """What the call's mask and is_causal let a query see. Raises Refused where no kernel does."""
    if operand(node, 4, "dropout_p", default=0.0) != 0:
        raise Refused("it drops attention probabilities")
    mask, is_causal = operand(node, 3, "attn_mask"), operand(node, 5, "is_causal", default=False)
    if is_causal:
        q, k = (tensor_meta(operand(node, i, name)) for i, name in enumerate(("query", "key")))
        assert q is not None and k is not None
        if mask is not None:
            raise Refused("it has a mask and is_causal")
        if not statically_known_true(q.shape[-2] == k.shape[-2]):
            raise Refused("it is causal with unequal lengths of queries and keys")
        return Meaning(causal=True)
    if mask is None:
        return Meaning()
    value, result = tensor_meta(mask), tensor_meta(node)
    if value is None or result is None or value.ndim < 2:
        raise Refused("its mask is no tensor of queries and keys")
    if not statically_known_true(value.shape[-2] == result.shape[-2]):
        raise Refused("its mask is the same for all queries")
    return masks.meaning(mask)


def _swap(
    node: fx.Node,
    inputs: tuple[fx.Node, fx.Node, fx.Node],
    meaning: Meaning,
    forms: Forms,
    account: Account,
) -> str:
    """Put the op in the call's own place, where it reads q, k and v as the call does."""
    graph = node.graph
    q, k, v = inputs
    scale, dtype = operand(node, 6, "scale"), known_dtype(node)
    if any(len(shape) != 4 for shape in (_shape(x) for x in (q, k, v))):
        raise Refused("q, k and v are not [batch, heads, tokens, head dim]")
    if scale is None:
        scale = _shape(q)[3] ** -0.5
    if not is_number(scale):
        raise Refused("its scale is no constant")
    once = _unrepeated(k, account), _unrepeated(v, account)
    if all(x is not None for x in once) and len({_shape(x)[1] for x in once}) == 1:
        k, v = once  # type: ignore[assignment]
    with graph.inserting_before(node):
        cast = [emit_cast(graph, x, dtype, node) for x in (q, k, v)]
        values = values_of(tuple(cast))
        masked: dict[str, Any] = {"causal": meaning.causal, "window": meaning.window}
        if (reason := OP.supports(*values, scale=scale, **masked)) is not None:
            raise Refused(f"no fused kernel takes it: {reason.removeprefix('explicit: ')}")
        opaque, form = forms.choose(OP, *values, scale=scale, **masked)
        options = (None, meaning.causal, float(scale), meaning.window, None)
        both = emit_op(graph, OP, (*cast, *options), node, opaque=opaque)
        out = emit_getitem(graph, both, 0, node)
    check_same_form(out, node)
    sources = node.all_input_nodes
    account.settle({node: out}, constants=[operand(node, 3, "attn_mask")])
    for source in sources:
        erase_dead(source)
    return form


def _shape(node: Any) -> torch.Size:
    value = tensor_meta(node)
    assert value is not None
    return value.shape


def _unrepeated(node: fx.Node, account: Account) -> fx.Node | None:
    """Return k [B, M, S, H] for the [B, M * G, S, H] that repeats each of its heads G times.

    None too where an op may write into k behind the repeat, which has copied it.
    """
    once = _repeated_by(node)
    return once if once is not None and account.are_over(once) else None


def _repeated_by(node: fx.Node) -> fx.Node | None:
    if op_name(node) == "repeat_interleave" and operand(node, 2, "dim") in (1, -3):
        heads = operand(node, 0, "input", "self")
        return heads if isinstance(operand(node, 1, "repeats"), int) else None
    while (inner := unary_of(node, "contiguous")) is not None:
        node = inner
    spread = unary_of(node, "reshape", "view", "_unsafe_view", "flatten")
    once = unary_of(spread, "expand")
    value = tensor_meta(once)
    if value is None or value.ndim != 5 or value.shape[2] != 1:
        return None
    heads = unary_of(once, "unsqueeze")
    if heads is None and op_name(once) == "getitem":
        heads = once.args[0]
    source, result, wide = tensor_meta(heads), tensor_meta(node), tensor_meta(spread)
    if source is None or result is None or wide is None or source.ndim != 4 or result.ndim != 4:
        return None
    B, M, S, H = source.shape
    wanted = (B, M, wide.shape[2], S, H), (B, M * wide.shape[2], S, H)
    found = tuple(wide.shape), tuple(result.shape)
    same = all(
        statically_known_true(a == b)
        for w, f in zip(wanted, found, strict=True)
        for a, b in zip(w, f, strict=True)
    )
    return heads if same else None
