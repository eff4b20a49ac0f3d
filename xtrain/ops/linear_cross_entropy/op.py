"""The LM head and its loss in one: cross-entropy of hidden @ weight.T, never whole in memory.

    x_ij  = softcap * tanh((h_i . w_j) / softcap)        the product alone where softcap is None
    l_i   = cross-entropy of x_i as in cross_entropy/op.py: label smoothing, z-loss, ignored tokens
    loss  = sum_i(w_i * l_i) / sum_i(w_i)                mean; or the sum, or each w_i * l_i
    dh_i  = sum_j dx_ij * (1 - (x_ij / softcap)^2) * w_j        and dw_j likewise, over tokens

The products hidden @ weight.T and those of the gradients are made in the inputs' dtype; all between
is in c (fp64 for fp64, else fp32). A mean or a sum has one upstream number, so where a gradient is
wanted the forward makes it right away, while it holds the logits: three products instead of four.
The backward multiplies by that number. Where the forward made none, or for one upstream number a
token (reduction "none"), the backward makes the logits again.

Letters: V vocabulary, D model dim; "..." the tokens, of any number of dimensions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.cross_entropy.op import (
    Options,
    check_options,
    check_range,
    cross_entropy_reference,
    factor_of_losses,
    grad_logits,
    reduce_losses,
    silent_rows,
    token_losses,
    weights_in_loss,
)
from xtrain.ops.linear_cross_entropy.chunks import (
    Saved,
    Wanted,
    backward_eager,
    chunk_rows,
    forward_eager,
    held_dtype,
    why_no_kernel,
)

ACCUMULATIONS = ("fp32", "same")
MAX_CHUNKS = 16  # of the tokens where inductor sees through the op


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    weight_grad_accumulation: str = "fp32",
    **options: Any,
) -> Tensor:
    """Return the loss from whole logits in c; differentiable. options: as the public function."""
    c = compute_dtype(hidden.dtype)
    return cross_entropy_reference(hidden.to(c) @ weight.to(c).t(), targets, **options)


# --- The form that inductor can see through ------------------------------------------------------
#
# On a GPU public calls keep the op opaque, whose kernels reuse one buffer of logits. Seen through,
# the tokens are cut into at most MAX_CHUNKS pieces, each with logits of its own; where their number
# is a symbol there is one piece. The backward of a gradient that the forward made is one
# multiplication, which inductor fuses with what comes next.


def forward_decomposition(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, lse, factor, grad_hidden, grad_weight) as the op does."""
    c, held = compute_dtype(hidden.dtype), held_dtype(hidden.dtype)
    weights = weights_in_loss(targets, token_weights, options, c)
    factor = factor_of_losses(weights, options)
    parts = [
        _token_losses(x, t, s, options) for _, x, t, s in _chunks(hidden, weight, targets, weights)
    ]
    losses, lse = (_joined(list(part)).view(targets.shape) for part in zip(*parts, strict=True))
    scale = weights * factor if held == hidden.dtype else weights
    wanted = wanted.in_forward(options)
    grads = _gradients(hidden, weight, targets, scale, lse, options, wanted, held)
    return reduce_losses(losses, weights, factor, options), lse, factor, *grads


def backward_decomposition(
    grad_loss: Tensor, saved: Saved, options: Options, wanted: Wanted, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) as the op does."""
    if saved.hidden is None or saved.weight is None:
        upstream = upstream_of(grad_loss, saved.factor, dtype)
        made = (saved.grad_hidden, saved.grad_weight)
        first, second = (
            scaled(grad, upstream, dtype) if needed else grad.new_empty(0, dtype=dtype)
            for grad, needed in zip(made, wanted[:2], strict=True)
        )
        return first, second
    scale = saved.scale(grad_loss, options)
    inputs = saved.hidden, saved.weight, saved.targets
    return _gradients(*inputs, scale, saved.lse, options, wanted, dtype)


def upstream_of(grad_loss: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what gradients that the forward made for inputs of dtype are multiplied by."""
    upstream = grad_loss.to(factor.dtype)
    return upstream if held_dtype(dtype) == dtype else upstream * factor


def scaled(held: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """Return held * upstream, formed in c and rounded once to dtype."""
    return (held.to(upstream.dtype) * upstream).to(dtype)


Chunk = tuple[Tensor, Tensor, Tensor, Tensor]


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> list[Chunk]:
    """Return (hidden [n, D], logits [n, V], targets [n], scale [n]) of each piece."""
    V, D = weight.shape
    hidden = hidden.flatten(0, -2)
    n = hidden.shape[0]
    step = n
    if isinstance(n, int):
        rows = chunk_rows(V, D, weight.element_size(), weight.device.type, wide=True)
        step = max(rows, -(-n // MAX_CHUNKS))
    starts = range(0, max(n, 1), step) if isinstance(n, int) else (0,)
    pieces = []
    for start in starts:
        h, t, s = (x[start : start + step] for x in (hidden, targets.view(-1), scale.view(-1)))
        pieces.append((h, h @ weight.t(), t, s))
    return pieces


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts one after the other; of one, torch.cat would be a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _token_losses(
    x: Tensor, targets: Tensor, scale: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return (l [n], lse [n]) in c; l is 0 where scale is."""
    losses, lse = token_losses(options.capped(x.to(scale.dtype)), targets, options)
    silent = silent_rows(targets, scale, options).squeeze(-1)
    return torch.where(silent, 0.0, losses), torch.where(silent, 0.0, lse)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    lse: Tensor,
    options: Options,
    wanted: Wanted,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) in dtype, [0] where not wanted."""
    of_hidden, of_weight = [], None
    if wanted.needs_grad_hidden or wanted.needs_grad_weight:
        lse_parts = lse.view(-1)
        for h, x, t, s in _chunks(hidden, weight, targets, scale):
            part, lse_parts = lse_parts[: h.shape[0]], lse_parts[h.shape[0] :]
            dx = _grad_logits(x, t, s, part, options)
            if wanted.needs_grad_hidden:
                of_hidden.append(_product(dx, weight, dtype))
            if wanted.needs_grad_weight:
                term = _product(dx.t(), h, scale.dtype if wanted.wide else dtype)
                of_weight = term if of_weight is None else of_weight + term
    nothing = hidden.new_empty(0, dtype=dtype)
    return (
        _joined(of_hidden).view(hidden.shape) if of_hidden else nothing,
        nothing.clone() if of_weight is None else of_weight.to(dtype),
    )


def _grad_logits(
    x: Tensor, targets: Tensor, scale: Tensor, lse: Tensor, options: Options
) -> Tensor:
    """Return d loss / d x in x's dtype."""
    y = options.capped(x.to(lse.dtype))
    grad = grad_logits(y, targets, scale, lse, options)
    if options.softcap is not None:
        grad = grad * options.cap_derivative(y)
        grad = torch.where(silent_rows(targets, scale, options), 0.0, grad)
    return grad.to(x.dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in dtype, which may be wider than theirs."""
    return a @ b if dtype == a.dtype else a.to(dtype) @ b.to(dtype)


# --- The op --------------------------------------------------------------------------------------


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    c, held = compute_dtype(hidden.dtype), held_dtype(hidden.dtype)
    wanted = wanted.in_forward(options)
    return (
        hidden.new_empty(() if options.reduction != "none" else targets.shape, dtype=c),
        hidden.new_empty(targets.shape, dtype=c),
        hidden.new_empty((), dtype=c),
        hidden.new_empty(hidden.shape if wanted.needs_grad_hidden else (0,), dtype=held),
        hidden.new_empty(weight.shape if wanted.needs_grad_weight else (0,), dtype=held),
    )


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if targets.device.type == "cpu":
        check_range("linear_cross_entropy", targets, options, weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return forward_eager(hidden, weight, targets, token_weights, options, *rest)


def _backward_fake(
    grad_loss: Tensor, saved: Saved, options: Options, wanted: Wanted, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    like_hidden = saved.grad_hidden if saved.hidden is None else saved.hidden
    like_weight = saved.grad_weight if saved.weight is None else saved.weight
    return (
        saved.lse.new_empty(like_hidden.shape if wanted.needs_grad_hidden else (0,), dtype=dtype),
        saved.lse.new_empty(like_weight.shape if wanted.needs_grad_weight else (0,), dtype=dtype),
    )


def _backward_eager(
    grad_loss: Tensor, saved: Saved, options: Options, wanted: Wanted, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    hidden, weight = saved.hidden, saved.weight
    if hidden is None or weight is None:
        upstream = upstream_of(grad_loss, saved.factor, dtype)
        return (
            _scaled(saved.grad_hidden, upstream, wanted.needs_grad_hidden, dtype),
            _scaled(saved.grad_weight, upstream, wanted.needs_grad_weight, dtype),
        )
    with torch.autocast(hidden.device.type, enabled=False):
        return backward_eager(grad_loss, hidden, weight, saved, options, wanted)


def _scaled(held: Tensor, upstream: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
    if not wanted:
        return held.new_empty(0, dtype=dtype)
    if held.device.type != "cuda" or why_no_kernel(held) is not None:
        return scaled(held, upstream, dtype)
    out = torch.empty(held.shape, dtype=dtype, device=held.device)
    return import_module("xtrain.ops.linear_cross_entropy.kernel").scale(held, upstream, out)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, "
_WANTED = "bool needs_grad_hidden, bool needs_grad_weight, str weight_grad_accumulation, "

FORWARD = core.define_op(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? token_weights, "
    + _OPTIONS
    + "str reduction, "
    + _WANTED
    + "bool opaque=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    records=(Options, Wanted),
    fake=_fake,
    decomposition=forward_decomposition,
    cpu=_forward,
    cuda=_forward,
)
BACKWARD = core.define_op(
    "linear_cross_entropy_backward(Tensor grad_loss, Tensor? hidden, Tensor? weight, "
    "Tensor targets, Tensor? token_weights, Tensor lse, Tensor factor, Tensor grad_hidden, "
    "Tensor grad_weight, "
    + _OPTIONS
    + _WANTED
    + "ScalarType dtype, bool opaque=False) -> (Tensor, Tensor)",
    records=(Saved, Options, Wanted),
    fake=_backward_fake,
    decomposition=backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_eager,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, token_weights, *options = inputs
    *ctx.options, reduction, made_hidden, made_weight, ctx.accumulation, ctx.opaque = options
    _, lse, factor, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(lse, factor, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)  # or autograd would make zeros of the size of the weight
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    ctx.made = reduction != "none" and made_hidden >= needs_hidden and made_weight >= needs_weight
    ctx.dtype = hidden.dtype
    inputs_again = (None, None) if ctx.made else (hidden, weight)
    ctx.save_for_backward(*inputs_again, targets, token_weights, *output[1:])


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 11
    if grad_loss is None:
        return (None, None, *nothing)
    needs = ctx.needs_input_grad[:2]
    saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
    if ctx.made and may_reuse(saved, grad_loss, ctx.dtype):
        grads = _scaled_in_place(saved, grad_loss, ctx.dtype)
    else:
        # a product with one number is fused where it is used; products of matrices stay calls
        opaque = ctx.opaque and not ctx.made
        grads = BACKWARD(
            grad_loss, *saved, *ctx.options, *needs, ctx.accumulation, ctx.dtype, opaque
        )
    return (*(g if wanted else None for g, wanted in zip(grads, needs, strict=True)), *nothing)


def _scaled_in_place(
    saved: tuple[Tensor, ...], grad_loss: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the held gradients themselves, multiplied where they lie."""
    *_, factor, grad_hidden, grad_weight = saved
    upstream = upstream_of(grad_loss, factor, dtype)
    scale = import_module("xtrain.ops.linear_cross_entropy.kernel").scale
    with torch.cuda.device_of(grad_loss):
        return scale(grad_hidden, upstream, grad_hidden), scale(grad_weight, upstream, grad_weight)


def may_reuse(saved: tuple[Tensor, ...], grad_loss: Tensor, dtype: torch.dtype) -> bool:
    """Return whether backward may hand out the memory of the gradients that the forward made.

    Outside of graphs that is so when this backward frees the saved tensors: nobody else has seen
    them, and a second backward is an error. Traced or observed calls take the op, which is pure.
    """
    return (
        grad_loss.is_cuda
        and held_dtype(dtype) == dtype
        and all(type(t) is Tensor and why_no_kernel(t) is None for t in (grad_loss, *saved[-2:]))
        and not torch_compat.is_observed()
        and not torch_compat.backward_keeps_graph()
    )


core.define_autograd(FORWARD, _backward, _setup_context)
core.forbid_second_derivative(BACKWARD)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
    weight_grad_accumulation: str = "fp32",
) -> Tensor:
    """Return the cross-entropy of hidden @ weight.T against targets that are already shifted.

    Shapes:   hidden (..., D) and weight (V, D), any strides, of one dtype; targets (...), integers;
              result () or, for reduction "none", (...).
    Args:     ignore_index, label_smoothing, z_loss, token_weights, reduction: as `cross_entropy`.
              softcap: logits become softcap * tanh(logits / softcap).
              weight_grad_accumulation: "fp32" sums weight's gradient over chunks of tokens in fp32
              (fp64 for fp64) and rounds once; "same" sums in weight's dtype: less memory, and an
              error that grows with the number of chunks.
    Grad:     of hidden and weight, in their dtype. For a mean or a sum they are made in the
              forward, if grad mode is on, and saved instead of the inputs.
    Numerics: logits in the inputs' dtype, as F.linear gives them; the loss from them in fp32 (fp64
              for fp64), which is also the result's dtype. Under autocast, the inputs are cast as
              F.linear's would be. Two runs are equal bit for bit.
    Raises:   ValueError for shapes, dtypes or options that do not fit, and, eagerly on the CPU, for
              a target outside [0, V), with its position.
    Source:   chunks and gradients in the forward: Liger-Kernel, Hsu et al. 2024; Cut Your Losses,
              Wijmans et al. 2024. Soft-cap: Gemma 2, 2024. Otherwise as `cross_entropy`.
    """
    hidden, weight = _as_linear_casts(hidden), _as_linear_casts(weight)
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_inputs(hidden, weight, targets, token_weights, options)
    if weight_grad_accumulation not in ACCUMULATIONS:
        raise ValueError(
            f"linear_cross_entropy: weight_grad_accumulation must be one of {ACCUMULATIONS}, got "
            f"{weight_grad_accumulation!r}"
        )
    wants_grad = torch.is_grad_enabled() and reduction != "none"
    last = (
        *options,
        *(wants_grad and hidden.requires_grad, wants_grad and weight.requires_grad),
        weight_grad_accumulation,
        core.opaque(prefers_kernel, hidden, weight, targets),
    )
    if hidden.dim() > 1:
        return FORWARD(hidden, weight, targets, token_weights, *last)[0]
    weights = None if token_weights is None else token_weights.unsqueeze(0)
    loss = FORWARD(hidden.unsqueeze(0), weight, targets.unsqueeze(0), weights, *last)[0]
    return loss.squeeze(0) if reduction == "none" else loss


def _as_linear_casts(x: Tensor) -> Tensor:
    """Return x as F.linear would take it: in autocast's dtype where that is on."""
    device_type = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type)) if x.dtype.is_floating_point else x


def check_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
) -> None:
    """Raise ValueError, with the values, for what `linear_cross_entropy` cannot compute."""
    name = "linear_cross_entropy"
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: hidden must be [..., D] and weight [V, D], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise ValueError(
            f"{name}: hidden and weight must be floats of one dtype, got {hidden.dtype} and "
            f"{weight.dtype}: cast one of them, or call under autocast, which casts both"
        )
    if hidden.device != weight.device or hidden.device != targets.device:
        raise ValueError(
            f"{name}: hidden, weight and targets must be on one device, got {hidden.device}, "
            f"{weight.device} and {targets.device}"
        )
    check_options(name, targets, token_weights, options)
    if hidden.shape[:-1] != targets.shape or weight.shape[0] == 0:
        raise ValueError(
            f"{name}: hidden must be targets' shape and a last dimension D, weight at least one "
            f"class, got {tuple(hidden.shape)}, targets {tuple(targets.shape)} and weight "
            f"{tuple(weight.shape)}"
        )


def supports(hidden: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return why_no_kernel(hidden)


def prefers_kernel(*_: Any, **__: Any) -> bool:
    """Return True: seen through, the logits of a chunk could not share one buffer with the next."""
    return True


OP = core.Op(
    linear_cross_entropy,
    linear_cross_entropy_reference,
    FORWARD,
    BACKWARD,
    supports,
    prefers_kernel,
)
