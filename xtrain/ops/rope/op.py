"""Rotary position embedding of explicit positions: each pair of elements turned by its angle.

    half:         pairs (x[i], x[i + R/2])         interleaved: pairs (x[2 i], x[2 i + 1])
    out_a = a * cos - b * sin                      out_b = b * cos + a * sin

R = 2 * cos.shape[-1] <= H: the first R elements of a head turn, the rest pass. Rows of cos and sin
are the rows of x: whatever positions they were made of. Arithmetic is in c (fp64 for fp64 x, else
fp32), cos and sin in any float dtype included, and rounded once.

The map is a rotation: its gradient turns grad_out back (sin negated), so that backward saves cos
and sin and nothing of the size of x. cos and sin themselves get no gradient.

Letters: B batch, N query heads, M KV heads, T sequence, H head dim, R rotated elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.shared.layout import empty_in, inverse, memory_order

LAYOUTS = ("half", "interleaved")
KERNEL_DTYPES = (*core.FLOATS, torch.float64)
Join = Callable[[list[Tensor], Tensor], Tensor]  # (turned parts, x) -> the parts, then x's rest


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """Return x turned by the formula above, pair by pair; differentiable."""
    check_inputs("rope", x, cos, sin, layout)
    c = compute_dtype(x.dtype)
    cos, sin = _per_head(cos.to(c)), _per_head(sin.to(c))
    R = 2 * cos.shape[-1]
    out = x.to(c).clone()
    step = slice(0, R // 2), slice(R // 2, R)
    first, second = step if layout == "half" else (slice(0, R, 2), slice(1, R, 2))
    out[..., first] = x[..., first].to(c) * cos - x[..., second].to(c) * sin
    out[..., second] = x[..., second].to(c) * cos + x[..., first].to(c) * sin
    return out.to(x.dtype)


def rope_qk_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half"
) -> tuple[Tensor, Tensor]:
    """Return q and k turned by the formula above; differentiable."""
    return rope_reference(q, cos, sin, layout=layout), rope_reference(k, cos, sin, layout=layout)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str, join: Join) -> Tensor:
    """Return x turned: one read and one write of it, in its own order."""
    order = memory_order(x)
    cos, sin = (
        _per_head(table).expand(x.shape[0], -1, -1, -1).permute(order) for table in (cos, sin)
    )
    return _turn(x.permute(order), cos, sin, layout, join).permute(inverse(order))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str, join: Join) -> Tensor:
    """Turn x, whose dims are those of cos and sin up to broadcasting; the result is contiguous."""
    c = compute_dtype(x.dtype)
    cos, sin = cos.to(c), sin.to(c)
    R = 2 * cos.shape[-1]
    turning = x[..., :R].to(c)
    if layout == "half":
        a, b = turning.chunk(2, dim=-1)
        parts = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    else:
        a, b = turning.unflatten(-1, (R // 2, 2)).unbind(-1)
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        parts = [pairs.flatten(-2).to(x.dtype)]
    if R < x.shape[-1]:
        return join(parts, x).contiguous()
    # concatenated once: inductor would write an inner result to memory, and copy it to the outer
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).contiguous()


def _in_place_of_columns(parts: list[Tensor], x: Tensor) -> Tensor:
    """Return x with parts in place of its first columns, chosen by the column.

    A concatenation inductor writes to memory of its own on a CPU, and copies it from there to where
    a packed row of gradients takes it.
    """
    H, first = x.shape[-1], 0
    col = torch.arange(H, device=x.device)
    for part in parts:
        end = first + part.shape[-1]
        x = torch.where((first <= col) & (col < end), F.pad(part, (first, H - end)), x)
        first = end
    return x


def _beside_columns(parts: list[Tensor], x: Tensor) -> Tensor:
    """Return the same in one pass, where nothing is fused."""
    return torch.cat([*parts, x[..., sum(part.shape[-1] for part in parts) :]], dim=-1)


def _per_head(table: Tensor) -> Tensor:
    """[T, R/2] or [B, T, R/2] -> what broadcasts over [B, N, T, R/2]."""
    return table.unsqueeze(-3)


def check_inputs(op: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    """Raise ValueError for inputs that do not go together."""
    if layout not in LAYOUTS:
        message = f'layout must be "half" or "interleaved", got {layout!r}'
    elif x.dim() != 4:
        message = f"x must be [B, N, T, H], got {tuple(x.shape)}"
    elif not all(t.dtype.is_floating_point for t in (x, cos, sin)):
        message = f"x, cos and sin must hold floats, got {x.dtype}, {cos.dtype} and {sin.dtype}"
    elif cos.shape != sin.shape:
        message = f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}"
    elif not _rows_fit(x, cos):
        message = (
            "cos and sin must be [T, R/2] or [B, T, R/2] with R <= H for x [B, N, T, H] = "
            f"{tuple(x.shape)}, got {tuple(cos.shape)}"
        )
    elif not x.device == cos.device == sin.device:
        message = (
            f"x, cos and sin must share a device, got {x.device}, {cos.device} and {sin.device}"
        )
    else:
        return
    raise torch_compat.argument_error(f"{op}: {message}")


def _rows_fit(x: Tensor, table: Tensor) -> bool:
    B, _, T, H = x.shape
    if table.dim() not in (2, 3) or table.shape[-2] != T or 2 * table.shape[-1] > H:
        return False
    return table.dim() == 2 or table.shape[0] == B


def supports(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return core.kernel_refuses(KERNEL_DTYPES, x=x, cos=cos, sin=sin)


def supports_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half"
) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k {k.dtype}; the kernel takes both in one dtype"
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return (
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; the kernel takes both with one batch "
            "size and head dim"
        )
    return supports(q, cos, sin, layout=layout)


def prefers_kernel(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> bool:
    """Return whether, under inductor, the kernel is the faster form.

    On GPUs: inductor's concatenations read x once for each part of the result.
    """
    return x.device.type == "cuda" and x.dtype in KERNEL_DTYPES


def prefers_kernel_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half"
) -> bool:
    """Return whether, under inductor, the kernel is the faster form: see `prefers_kernel`."""
    return prefers_kernel(q, cos, sin, layout=layout) and q.dtype == k.dtype


# --- The four ops: of x, or of q and k, and their transposes -------------------------------------


@dataclass(frozen=True)
class _Turn:
    """One of the four ops: tensors and tables in, tensors turned forth or back out.

    name:    of the op in messages, of a transpose that of its forward.
    inverse: whether every angle is negated.
    """

    name: str
    inverse: bool

    def define(self, schema: str) -> torch._ops.OpOverload:
        """Define the op, whose results are one tensor, or two, as many as it turns."""
        return core.define_op(
            schema,
            fake=self.fake,
            decomposition=self.decomposition,
            cpu=self.eager,
            cuda=self.cuda,
        )

    def check(self, *args: Any) -> tuple[list[Tensor], Tensor, Tensor, str]:
        """Return ([x] or [q, k], cos, sin, layout), or raise for what does not go together."""
        *xs, cos, sin, layout = args
        for x in xs:
            check_inputs(self.name, x, cos, sin, layout)
        return xs, cos, sin, layout

    def fake(self, *args: Any) -> Any:
        xs, *_ = self.check(*args)
        return _results([empty_in(memory_order(x), x.shape, x) for x in xs])

    def decomposition(self, *args: Any) -> Any:
        """Turn as inductor fuses it."""
        return self._by_torch(_in_place_of_columns, *args)

    def eager(self, *args: Any) -> Any:
        self.check(*args)
        return self._by_torch(_beside_columns, *args)

    def _by_torch(self, join: Join, *args: Any) -> Any:
        *xs, cos, sin, layout = args
        sin = -sin if self.inverse else sin
        return _results([_turned(x, cos, sin, layout, join) for x in xs])

    def cuda(self, *args: Any) -> Any:
        xs, cos, sin, layout = self.check(*args)
        x, *k = xs
        refused = supports_qk(x, k[0], cos, sin) if k else supports(x, cos, sin)
        if 0 in [t.numel() for t in (*xs, cos)] or refused is not None:
            return self.decomposition(*args)
        launch = import_module("xtrain.ops.rope.kernel").rope_rows
        return _results(launch(xs, *_tables(cos, sin), layout, inverse=self.inverse))


def _results(turned: list[Tensor]) -> Any:
    return turned[0] if len(turned) == 1 else tuple(turned)


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return tables of one stride whose rows are dense, as the kernel reads them."""
    if cos.stride() == sin.stride() and cos.stride(-1) == 1:
        return cos, sin
    return cos.contiguous(), sin.contiguous()


FORWARD = _Turn("rope", False).define(
    "rope(Tensor x, Tensor cos, Tensor sin, str layout, bool opaque=False) -> Tensor"
)
BACKWARD = _Turn("rope", True).define(
    "rope_backward(Tensor grad_out, Tensor cos, Tensor sin, str layout, bool opaque=False) "
    "-> Tensor"
)
FORWARD_QK = _Turn("rope_qk", False).define(
    "rope_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout, bool opaque=False) "
    "-> (Tensor, Tensor)"
)
BACKWARD_QK = _Turn("rope_qk", True).define(
    "rope_qk_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, str layout, "
    "bool opaque=False) -> (Tensor, Tensor)"
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, cos, sin, ctx.layout, ctx.opaque = inputs
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)  # what nobody reads has no gradient, and gets no zeros


def _derivative(one: torch._ops.OpOverload, both: torch._ops.OpOverload) -> Any:
    """Return backward(ctx, grad...) for a map whose transpose is `one`, of two tensors `both`."""

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = *ctx.saved_tensors, ctx.layout, ctx.opaque
        if len(grads) == 2 and all(grad is not None for grad in grads):
            turned = both(*grads, *rest)
        else:
            turned = [None if grad is None else one(grad, *rest) for grad in grads]
        return *turned, None, None, None, None

    return backward


# Each of a pair is the other's transpose, so second derivatives come for nothing.
core.define_autograd(FORWARD, _derivative(BACKWARD, BACKWARD_QK), _setup_context)
core.define_autograd(BACKWARD, _derivative(FORWARD, FORWARD_QK), _setup_context)
core.define_autograd(FORWARD_QK, _derivative(BACKWARD, BACKWARD_QK), _setup_context)
core.define_autograd(BACKWARD_QK, _derivative(FORWARD, FORWARD_QK), _setup_context)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """Turn each pair of elements of x by its angle.

    Shapes:   x [B, N, T, H], any strides; cos, sin [T, R/2] or [B, T, R/2], R <= H, rows as x has
              them; result like x, dense in x's order of batch, heads and tokens, never an alias.
    Args:     layout: "half" pairs i with i + R/2 (Llama, GPT-NeoX), "interleaved" 2 i with 2 i + 1
              (GPT-J); elements from R on pass unchanged.
    Grad:     grad_out turned back; saves cos and sin. cos and sin get no gradient.
    Numerics: fp32 (fp64 for fp64 x), rounded once; give cos and sin in fp32: rounded to bf16 they
              turn by wrong angles from position 257 on.
    Raises:   ValueError if shapes do not fit, layout is unknown, or an input holds no floats.
    Source:   Su et al. 2021 (RoFormer).
    """
    return FORWARD(x, cos, sin, layout, core.opaque(prefers_kernel, x, cos, sin, layout=layout))


def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half"
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys in one call: `rope` of both, which share B, T, H and the tables.

    Shapes:   q [B, N, T, H], k [B, M, T, H]; cos, sin as for `rope`; results like q and k.
    Args, Grad, Numerics, Raises, Source: as `rope`.
    """
    opaque = core.opaque(prefers_kernel_qk, q, k, cos, sin, layout=layout)
    return FORWARD_QK(q, k, cos, sin, layout, opaque)


OP = core.Op(rope, rope_reference, FORWARD, BACKWARD, supports, prefers_kernel)
OP_QK = core.Op(rope_qk, rope_qk_reference, FORWARD_QK, BACKWARD_QK, supports_qk, prefers_kernel_qk)
