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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain import torch_compat
from xtrain.ops import OPS
from xtrain.passes.graph import (
    Refused,
    called_bodies,
    erase_dead,
    is_call,
    known_dtype,
    known_tensor,
    ndim_of,
    op_name,
    operand,
    operands_of_bodies,
    same_sizes,
    tensor_meta,
    value_of,
    values_of,
)
from xtrain.passes.run import PassResult
from xtrain.passes.swaps.account import Account, State
from xtrain.passes.swaps.match import is_number, unary_of
from xtrain.passes.swaps.rewrite import Forms, Place, check_same_form, swap_each

OP = OPS["sdpa"]
# Elements of a mask that are still worth computing: 2 GiB of bytes.
_MAX_ELEMENTS = 1 << 31
_RANDOM = frozenset({"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout"})


def use_triton_sdpa(
    graph: fx.Graph, *, kernels: str = "auto", backend: str = "inductor"
) -> PassResult:
    """Swap the attention calls of a graph and of its bodies."""
    forms = Forms(kernels, backend)
    module = graph.owning_module
    assert module is not None
    masks = ConstantMasks(operands_of_bodies(module))

    def swap(node: fx.Node, account: Account) -> str | None:
        if op_name(node) != "scaled_dot_product_attention":
            return None
        qkv = [operand(node, i, name) for i, name in enumerate(("query", "key", "value"))]
        if any(tensor_meta(x) is None for x in (*qkv, node)):
            return None
        return _swap(node, qkv, _meaning(node, qkv, masks), forms, account)

    return swap_each(graph, swap)


def _meaning(node: fx.Node, qkv: list[fx.Node], masks: ConstantMasks) -> Meaning:
    """What the call's mask and is_causal let a query see. Raises Refused where no kernel does."""
    if operand(node, 4, "dropout_p", default=0.0) != 0:
        raise Refused("it drops attention probabilities")
    mask, is_causal = operand(node, 3, "attn_mask"), operand(node, 5, "is_causal", default=False)
    if is_causal:
        q, k = map(known_tensor, qkv[:2])
        if mask is not None:
            raise Refused("it has a mask and is_causal")
        if not statically_known_true(q.shape[-2] == k.shape[-2]):
            raise Refused("it is causal with unequal lengths of queries and keys")
        return Meaning(causal=True)
    if mask is None:
        return Meaning()
    if ndim_of(mask) < 2:
        raise Refused("its mask is no tensor of queries and keys")
    if not statically_known_true(known_tensor(mask).shape[-2] == known_tensor(node).shape[-2]):
        raise Refused("its mask is the same for all queries")
    return masks.meaning(mask)


def _swap(
    node: fx.Node, qkv: list[fx.Node], meaning: Meaning, forms: Forms, account: Account
) -> str:
    """Put the op in the call's own place, where it reads q, k and v as the call does."""
    q, *kv = qkv
    scale = operand(node, 6, "scale")
    if any(ndim_of(x) != 4 for x in qkv):
        raise Refused("q, k and v are not [batch, heads, tokens, head dim]")
    if scale is None:
        scale = known_tensor(q).shape[3] ** -0.5
    if not is_number(scale):
        raise Refused("its scale is no constant")
    once = [x for x in (_unrepeated(x, account) for x in kv) if x is not None]
    if len(once) == 2 and len({known_tensor(x).shape[1] for x in once}) == 1:
        kv = once
    place = Place(node, forms)
    cast = [place.cast(x, known_dtype(node)) for x in (q, *kv)]
    masked: dict[str, Any] = {"causal": meaning.causal, "window": meaning.window}
    if (reason := OP.supports(*values_of(tuple(cast)), scale=scale, **masked)) is not None:
        raise Refused(f"no fused kernel takes it: {reason.removeprefix('explicit: ')}")
    options = (None, meaning.causal, float(scale), meaning.window, None)
    out = place.item(place.op(OP, cast, {"scale": scale, **masked}, options), 0)
    check_same_form(out, node)
    sources = node.all_input_nodes
    account.settle({node: out}, constants=[operand(node, 3, "attn_mask")])
    for source in sources:
        erase_dead(source)
    return place.form


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
    if ndim_of(once) != 5 or known_tensor(once).shape[2] != 1:
        return None
    heads = unary_of(once, "unsqueeze")
    if heads is None and op_name(once) == "getitem":
        heads = once.args[0]
    wide = tensor_meta(spread)
    if ndim_of(heads) != 4 or ndim_of(node) != 4 or wide is None:
        return None
    B, M, S, H = known_tensor(heads).shape
    is_repeat = same_sizes(wide.shape, (B, M, wide.shape[2], S, H))
    is_repeat &= same_sizes(known_tensor(node).shape, (B, M * wide.shape[2], S, H))
    return heads if is_repeat else None


# --- constant masks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meaning:
    """What a mask lets a query see: all keys, those up to its own, or a window of those."""

    causal: bool = False
    window: int | None = None


class ConstantMasks:
    """The meanings of a module's constant masks, each computed once.

    Models build a causal mask from torch.arange inside their forward and hand it to attention as a
    tensor. It is a constant of the graph: computed once here, it can be compared with what a kernel
    does without reading a mask at all.

    outer: placeholder of a called body -> what the caller hands it.
    """

    def __init__(self, outer: Mapping[fx.Node, Any]):
        self._outer = outer
        self._meanings: dict[fx.Node, Meaning | str] = {}
        self._accounts: dict[fx.Graph, Account] = {}

    def meaning(self, mask: fx.Node) -> Meaning:
        """Return what a mask [.., T, S] means. Raises Refused if it is not a constant, or other."""
        while mask.op == "placeholder" and isinstance(self._outer.get(mask), fx.Node):
            mask = self._outer[mask]
        if mask not in self._meanings:
            try:
                self._meanings[mask] = meaning_of(self._evaluate(mask))
            except Refused as refusal:
                self._meanings[mask] = str(refusal)
        found = self._meanings[mask]
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _evaluate(self, mask: fx.Node) -> Tensor:
        needed = self._in_running_order(mask, self._ancestors(mask))
        with torch_compat.real_tensors(), torch.no_grad():
            values: dict[fx.Node, Any] = {}
            for node in needed:
                if node.op == "placeholder":
                    values[node] = values[self._outer[node]]
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)
        return values[mask]

    def _ancestors(self, mask: fx.Node) -> set[fx.Node]:
        """What a mask is computed from, itself among it. Refused if an input is among it.

        Ops that write into a value on the way belong to it, and must lie before the mask itself.
        """
        found: set[fx.Node] = set()
        ends = {mask.graph: mask}  # by graph, what the mask is read by, or is itself
        pending = [mask]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            self._check_constant(node)
            if node.op == "placeholder":
                given = self._outer[node]
                ends[given.graph] = min(u for u in given.users if called_bodies(u))
                pending.append(given)
                continue
            writes = self._account_of(node.graph).writes_into(node)
            if not all(write is mask or write < ends[node.graph] for write in writes):
                raise Refused("its mask is written in place")
            pending += [*node.all_input_nodes, *writes]
        return found

    def _account_of(self, graph: fx.Graph) -> Account:
        if graph not in self._accounts:
            self._accounts[graph] = Account(graph, State(grad=True))
        return self._accounts[graph]

    def _in_running_order(self, mask: fx.Node, needed: set[fx.Node]) -> list[fx.Node]:
        """The nodes graph by graph, a caller's before those of the body that it calls."""
        graphs = [mask.graph]
        while True:
            taken = (n for n in needed if n.op == "placeholder" and n.graph is graphs[-1])
            caller = next((self._outer[n].graph for n in taken), None)
            if caller is None:
                break
            graphs.append(caller)
        return [n for graph in reversed(graphs) for n in graph.nodes if n in needed]

    def _check_constant(self, node: fx.Node) -> None:
        if node.op == "placeholder" and isinstance(self._outer.get(node), fx.Node):
            return
        if not is_call(node):
            raise Refused("its mask depends on an input")
        value = value_of(node)
        if isinstance(value, torch.SymInt) or (
            isinstance(value, Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape)
        ):
            raise Refused("its mask has symbolic sizes, so that it cannot be computed here")
        if op_name(node) in _RANDOM:
            raise Refused("its mask is random")
        if isinstance(value, Tensor) and value.numel() > _MAX_ELEMENTS:
            raise Refused("its mask is too large to be computed here")


def meaning_of(mask: Tensor) -> Meaning:
    """Return what a mask [.., T, S], bool or additive, means; Refused if no kernel does the same.

    Additive: 0 where a query sees, -inf or its dtype's lowest number where not. The latter is an
    ordinary number, but a row that sees anything gives it exactly 0; rows that see nothing refuse.
    """
    if mask.ndim < 2:
        raise Refused("its mask has no row for each query")
    sees = mask if mask.dtype == torch.bool else _seen(mask)
    first = sees[(0,) * (sees.ndim - 2)]
    if not bool((sees == first).all()):
        raise Refused("its mask differs between samples or heads")
    if not bool(first.any(-1).all()):
        raise Refused("its mask leaves a query nothing to see")
    if bool(first.all()):
        return Meaning()
    T, S = first.shape
    i = torch.arange(T, device=mask.device)[:, None] + (S - T)
    j = torch.arange(S, device=mask.device)[None, :]
    causal = j <= i
    if torch.equal(first, causal):
        return Meaning(causal=True)
    window = int(first[-1].sum())
    if torch.equal(first, causal & (j > i - window)):
        return Meaning(causal=True, window=window)
    raise Refused("its mask is neither causal nor a sliding window")


def _seen(mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        raise Refused("its mask holds neither booleans nor floats")
    sees = mask == 0
    hidden = (mask == -math.inf) | (mask == torch.finfo(mask.dtype).min)
    if not bool((sees | hidden).all()):
        raise Refused("its mask adds other numbers than 0 and minus infinity")
    return sees
