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

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.cross_entropy.op import check_options, check_range, cross_entropy_reference
from xtrain.ops.linear_cross_entropy.chunks import (
    Options,
    backward_eager,
    capped,
    forward_eager,
    held_dtype,
    why_no_kernel,
)
from xtrain.ops.linear_cross_entropy.decomposition import (
    backward_decomposition,
    forward_decomposition,
    scaled,
    upstream_of,
)

ACCUMULATIONS = ("fp32", "same")


def linear_cross_entropy_reference(
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
    """Return the loss from whole logits in c; differentiable."""
    c = compute_dtype(hidden.dtype)
    logits = hidden.to(c) @ weight.to(c).t()
    return cross_entropy_reference(
        logits if softcap is None else capped(logits, softcap),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        token_weights=token_weights,
        reduction=reduction,
    )


# The ops' options, in this order: ignore_index, label_smoothing, z_loss, softcap; then, forward
# alone, reduction; then needs_grad_hidden, needs_grad_weight, weight_grad_accumulation.


def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, reduction, needs_grad_hidden, needs_grad_weight, _ = options
    c, held = compute_dtype(hidden.dtype), held_dtype(hidden.dtype)
    whole = reduction != "none"
    return (
        hidden.new_empty(() if whole else targets.shape, dtype=c),
        hidden.new_empty(targets.shape, dtype=c),
        hidden.new_empty((), dtype=c),
        hidden.new_empty(hidden.shape if whole and needs_grad_hidden else (0,), dtype=held),
        hidden.new_empty(weight.shape if whole and needs_grad_weight else (0,), dtype=held),
    )


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *loss_options, reduction, needs_grad_hidden, needs_grad_weight, accumulation = options
    if targets.device.type == "cpu":
        check_range("linear_cross_entropy", targets, loss_options[0], weight.shape[0])
    whole = reduction != "none"
    needs_grad = (whole and needs_grad_hidden, whole and needs_grad_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return forward_eager(
            hidden,
            weight,
            targets,
            token_weights,
            Options(*loss_options),
            reduction,
            needs_grad,
            accumulation == "fp32",
        )


def _backward_fake(
    grad_loss: Tensor,
    hidden: Tensor | None,
    weight: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *_, needs_grad_hidden, needs_grad_weight, _, dtype = options
    like_hidden = grad_hidden if hidden is None else hidden
    like_weight = grad_weight if weight is None else weight
    return (
        lse.new_empty(like_hidden.shape if needs_grad_hidden else (0,), dtype=dtype),
        lse.new_empty(like_weight.shape if needs_grad_weight else (0,), dtype=dtype),
    )


def _backward_kernel(
    grad_loss: Tensor,
    hidden: Tensor | None,
    weight: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *loss_options, needs_grad_hidden, needs_grad_weight, accumulation, dtype = options
    if hidden is None or weight is None:
        upstream = upstream_of(grad_loss, factor, dtype)
        return (
            _scaled(grad_hidden, upstream, needs_grad_hidden, dtype),
            _scaled(grad_weight, upstream, needs_grad_weight, dtype),
        )
    with torch.autocast(hidden.device.type, enabled=False):
        return backward_eager(
            grad_loss,
            hidden,
            weight,
            targets,
            token_weights,
            lse,
            factor,
            Options(*loss_options),
            (needs_grad_hidden, needs_grad_weight),
            accumulation == "fp32",
        )


def _scaled(held: Tensor, upstream: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
    if not wanted:
        return held.new_empty(0, dtype=dtype)
    if held.device.type != "cuda" or why_no_kernel(held) is not None:
        return scaled(held, upstream, dtype)
    out = torch.empty(held.shape, dtype=dtype, device=held.device)
    return import_module("xtrain.ops.linear_cross_entropy.kernel").scale(held, upstream, out)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, "
_GRADIENTS = "bool needs_grad_hidden, bool needs_grad_weight, str weight_grad_accumulation, "

FORWARD = core.define_op(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? token_weights, "
    + _OPTIONS
    + "str reduction, "
    + _GRADIENTS
    + "bool opaque=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    + _GRADIENTS
    + "ScalarType dtype, bool opaque=False) -> (Tensor, Tensor)",
    fake=_backward_fake,
    decomposition=backward_decomposition,
    cpu=_backward_kernel,
    cuda=_backward_kernel,
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
    loss_options = (label_smoothing, z_loss, token_weights, reduction)
    check_inputs(hidden, weight, targets, *loss_options, softcap, weight_grad_accumulation)
    wants_grad = torch.is_grad_enabled() and reduction != "none"
    last = (
        *(ignore_index, label_smoothing, z_loss, softcap, reduction),
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
    label_smoothing: float,
    z_loss: float,
    token_weights: Tensor | None,
    reduction: str,
    softcap: float | None,
    weight_grad_accumulation: str,
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
    check_options(name, targets, label_smoothing, z_loss, token_weights, reduction)
    if hidden.shape[:-1] != targets.shape or weight.shape[0] == 0:
        raise ValueError(
            f"{name}: hidden must be targets' shape and a last dimension D, weight at least one "
            f"class, got {tuple(hidden.shape)}, targets {tuple(targets.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap must be finite and positive, or None, got {softcap}")
    if weight_grad_accumulation not in ACCUMULATIONS:
        raise ValueError(
            f"{name}: weight_grad_accumulation must be one of {ACCUMULATIONS}, got "
            f"{weight_grad_accumulation!r}"
        )


def supports(hidden: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return why_no_kernel(hidden)


def prefers_kernel(*_: Any, **__: Any) -> bool:
    """Return True: seen through, the logits of a chunk could not share one buffer with the next."""
    return True


OP = core.Op(
    public=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    forward=FORWARD,
    backward=BACKWARD,
    supports=supports,
    prefers_kernel=prefers_kernel,
)
