"""Dropout of a branch, the residual sum, and the RMS norm that the next layer starts with.

    d = dropout(x, p, seed, offset)          rounded to x's dtype
    h = residual + d                         rounded to the dtype that x and residual promote to
    y = rms_norm(h, weight, eps, cast)       rounded as the norm says, then to y_dtype if given

Backward of (grad_h, grad_y), either of which may be missing; grad_y may come as several tensors,
one for each user of y, to be added in c:

    g             = grad_h + (gradient of the norm at h for grad_y)      in c, not rounded between
    grad_residual = g
    grad_x        = keep ? g * (1 / (1 - p)) : +0

It reads h and weight: the mask comes from seed and offset again, the row's 1 / rms from h.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.dropout.op import (
    KERNEL_DTYPES,
    as_int64_scalar,
    check_mapped,
    check_p,
    dropout_decomposition,
    dropout_on_cpu,
    dropout_reference,
    scale_of,
    threshold_of,
)
from xtrain.ops.rms_norm.op import check_inputs as check_norm_inputs
from xtrain.ops.rms_norm.op import (
    gradients,
    norm_dtype,
    prefers_row_kernel,
    rms_norm_decomposition,
    rms_norm_reference,
    row_kernel_refuses,
)
from xtrain.ops.shared.layout import contiguous, in_rows

Dtype = torch.dtype
KERNEL_GRADS = 3  # as many gradients of y as the backward kernel adds up


class Options(NamedTuple):
    """What forward and backward are told beside their tensors."""

    p: float
    seed: Tensor
    offset: Tensor
    eps: float
    cast: str
    y_dtype: Dtype | None = None  # of the forward alone
    x_dtype: Dtype = torch.float32  # of the backward alone, as what follows
    residual_dtype: Dtype = torch.float32

    @property
    def llama(self) -> bool:
        """Whether the norm is cast as Llama's."""
        return self.cast == "llama"

    @property
    def shares_gradient(self) -> bool:
        """Whether x and residual have one gradient, which is then written once.

        A fifth of the backward's bytes. torch's own sum also hands one tensor to both addends.
        """
        return threshold_of(self.p) == 0 and self.x_dtype == self.residual_dtype

    def dropped(self, x: Tensor) -> Tensor:
        """Return x dropped out as inductor fuses it; as it is where nothing is to be dropped."""
        return dropout_decomposition(x, *self[:3]) if self.p > 0 else x

    @property
    def random(self) -> tuple[int, float, Tensor, Tensor] | None:
        """What kernels take of these, None where they drop nothing."""
        threshold = threshold_of(self.p)
        return (threshold, scale_of(self.p), self.seed, self.offset) if threshold > 0 else None


def dropout_add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float,
    seed: int | Tensor,
    offset: int | Tensor = 0,
    eps: float = 1e-6,
    *,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return (h, y) by the formulas above; differentiable."""
    check_inputs(x, residual, weight, p, eps, cast)
    h = residual + dropout_reference(x, p, seed, offset)
    return h, rms_norm_reference(h, weight, eps, cast=cast)


def dropout_add_rms_norm_decomposition(
    x: Tensor, residual: Tensor, weight: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return (h, y) as inductor fuses them: one pass over the rows."""
    h = residual.contiguous() + options.dropped(x).contiguous()
    return h, rms_norm_decomposition(h, weight, options.eps, options.cast, options.y_dtype)


def dropout_add_rms_norm_backward_decomposition(
    h: Tensor,
    weight: Tensor,
    grad_h: Tensor | None,
    grad_y: list[Tensor],
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_x, grad_residual, grad_weight) by the formulas above.

    Where `options.shares_gradient`, grad_x is grad_residual, and a tensor of no elements stands for
    it. Without grad_y a result may be grad_h itself: inductor needs no copy to tell them apart.
    """
    c = compute_dtype(torch.promote_types(h.dtype, weight.dtype))
    if grad_y:
        total = functools.reduce(torch.add, [g.contiguous().to(c) for g in grad_y])
        grad, grad_weight = gradients(total, h, weight, options.eps, options.cast)
        if grad_h is not None:
            grad = grad_h.contiguous().to(c) + grad
    else:
        shape = h.shape
        grad = torch.zeros(shape, dtype=c, device=h.device) if grad_h is None else grad_h.to(c)
        grad_weight = torch.zeros(weight.shape, dtype=c, device=h.device)
        grad = grad.contiguous()
    grad_residual = grad.to(options.residual_dtype)
    if options.shares_gradient:
        grad_x = torch.empty(0, dtype=options.x_dtype, device=h.device)
    else:
        grad_x = options.dropped(grad).to(options.x_dtype)
    return grad_x, grad_residual, grad_weight.to(weight.dtype)


def check_inputs(
    x: Tensor, residual: Tensor, weight: Tensor, p: float, eps: float, cast: str
) -> None:
    """Raise ValueError for inputs that do not go together."""
    check_p(p)
    check_norm_inputs(x, weight, eps, cast)
    if x.shape != residual.shape:
        message = f"residual must have x's shape, got {tuple(residual.shape)} for {tuple(x.shape)}"
    elif not residual.dtype.is_floating_point:
        message = f"residual must hold floats, got {residual.dtype}"
    elif x.device != residual.device:
        message = f"residual is on {residual.device} and x on {x.device}: move one to the other"
    else:
        return
    raise torch_compat.argument_error(f"dropout_add_rms_norm: {message}")


def supports(x: Tensor, residual: Tensor, weight: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return row_kernel_refuses(x=x, residual=residual, weight=weight)


def prefers_kernel(x: Tensor, residual: Tensor, weight: Tensor, *_: Any, **__: Any) -> bool:
    """Return whether, under inductor, the kernel is the faster form."""
    return prefers_row_kernel(x, residual, weight)


def _dtypes(x: Tensor, residual: Tensor, weight: Tensor, options: Options) -> tuple[Dtype, ...]:
    """Return the dtypes of h, of the norm, and of y."""
    h_dtype = torch.promote_types(x.dtype, residual.dtype)
    rounds_to = norm_dtype(h_dtype, weight.dtype, options.cast)
    return h_dtype, rounds_to, options.y_dtype or rounds_to


def _fake(x: Tensor, residual: Tensor, weight: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    check_inputs(x, residual, weight, options.p, options.eps, options.cast)
    h_dtype, _, y_dtype = _dtypes(x, residual, weight, options)
    return (
        torch.empty(x.shape, dtype=h_dtype, device=x.device),
        torch.empty(x.shape, dtype=y_dtype, device=x.device),
    )


def _cpu(x: Tensor, residual: Tensor, weight: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    check_inputs(x, residual, weight, options.p, options.eps, options.cast)
    branch = dropout_on_cpu(x, *options[:3]) if options.p > 0 else x
    h = contiguous(residual) + contiguous(branch)
    return h, rms_norm_decomposition(h, weight, options.eps, options.cast, options.y_dtype)


def _cuda(x: Tensor, residual: Tensor, weight: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    check_inputs(x, residual, weight, options.p, options.eps, options.cast)
    _, rounds_to, y_dtype = _dtypes(x, residual, weight, options)
    refused = row_kernel_refuses(x=x, residual=residual, weight=weight)
    if x.numel() == 0 or y_dtype not in KERNEL_DTYPES or refused is not None:
        dense = contiguous(x), contiguous(residual), weight
        return dropout_add_rms_norm_decomposition(*dense, options)
    launch = import_module("xtrain.ops.rms_norm.kernel").norm_fwd
    rest = options.random, options.eps, options.llama, rounds_to, y_dtype
    return launch(*in_rows(x, residual), weight.contiguous(), *rest)


def _backward_fake(
    h: Tensor, weight: Tensor, grad_h: Tensor | None, grad_y: list[Tensor], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = (0,) if options.shares_gradient else h.shape
    return (
        torch.empty(of_x, dtype=options.x_dtype, device=h.device),
        torch.empty(h.shape, dtype=options.residual_dtype, device=h.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=h.device),
    )


def _backward_eager(
    h: Tensor, weight: Tensor, grad_h: Tensor | None, grad_y: list[Tensor], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    if grad_h is not None:  # an op hands on no input
        grad_h = contiguous(grad_h) if grad_y else contiguous(grad_h).clone()
    grads = grad_h, [contiguous(grad) for grad in grad_y]
    dense = contiguous(h), contiguous(weight)
    return dropout_add_rms_norm_backward_decomposition(*dense, *grads, options)


def _backward_cuda(
    h: Tensor, weight: Tensor, grad_h: Tensor | None, grad_y: list[Tensor], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    given = {"h": h, "weight": weight} | {f"grad_y[{i}]": g for i, g in enumerate(grad_y)}
    refused = row_kernel_refuses(**given, **({} if grad_h is None else {"grad_h": grad_h}))
    if h.numel() == 0 or not grad_y or refused is not None:
        return _backward_eager(h, weight, grad_h, grad_y, options)
    if len(grad_y) > KERNEL_GRADS:
        rest_of_them = [grad.float() for grad in grad_y[KERNEL_GRADS - 1 :]]
        grad_y = [*grad_y[: KERNEL_GRADS - 1], functools.reduce(torch.add, rest_of_them)]
    grads = [grad.contiguous() for grad in grad_y]
    launch = import_module("xtrain.ops.rms_norm.kernel").norm_bwd
    grad_h = None if grad_h is None else grad_h.contiguous()
    dtypes = None if options.shares_gradient else options.x_dtype, options.residual_dtype
    rest = options.random, options.eps, options.llama, *dtypes
    grad_x, *others = launch(grad_h, grads, h.contiguous(), weight.contiguous(), *rest)
    if grad_x is None:
        grad_x = torch.empty(0, dtype=options.x_dtype, device=h.device)
    return grad_x, *others


FORWARD = core.define_op(
    "dropout_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float p, Tensor seed, "
    "Tensor offset, float eps, str cast, ScalarType? y_dtype=None, bool opaque=False) "
    "-> (Tensor, Tensor)",
    records=(Options,),
    fake=_fake,
    decomposition=dropout_add_rms_norm_decomposition,
    cpu=_cpu,
    cuda=_cuda,
)
# h first, not the gradients as elsewhere: the launch goes to the GPU of the first argument, and
# either gradient may be missing. grad_y is a list so that a pass may hand over what autograd would
# add up, in the users' dtype, in kernels of its own.
BACKWARD = core.define_op(
    "dropout_add_rms_norm_backward(Tensor h, Tensor weight, Tensor? grad_h, Tensor[] grad_y, "
    "float p, Tensor seed, Tensor offset, float eps, str cast, ScalarType x_dtype, "
    "ScalarType residual_dtype, bool opaque=False) -> (Tensor, Tensor, Tensor)",
    records=(Options,),
    fake=_backward_fake,
    decomposition=dropout_add_rms_norm_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_cuda,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, ctx.p, seed, offset, ctx.eps, ctx.cast, _, ctx.opaque = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(output[0], weight, seed, offset)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_h: Tensor | None, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
    h, weight, seed, offset = ctx.saved_tensors
    options = Options(ctx.p, seed, offset, ctx.eps, ctx.cast, None, *ctx.dtypes)
    arguments = *options[:5], *ctx.dtypes, ctx.opaque
    grads_y = [] if grad_y is None else [grad_y]
    grad_x, grad_residual, grad_weight = BACKWARD(h, weight, grad_h, grads_y, *arguments)
    if options.shares_gradient:
        grad_x = grad_residual
    # A norm that nobody reads gives its weight no gradient: zeros would be, to an optimiser that
    # decays weights, another thing.
    return grad_x, grad_residual, grad_weight if grads_y else None, *[None] * 7


core.define_autograd(FORWARD, _backward, _setup_context)
core.forbid_second_derivative(BACKWARD)
core.define_masked_vmap(FORWARD, num_tensors=2, seed=4)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    p: float,
    seed: int | Tensor,
    offset: int | Tensor = 0,
    eps: float = 1e-6,
    *,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return h = residual + dropout(x) and its norm y = rms_norm(h).

    Shapes:   x and residual (..., D) of one shape, any strides; weight (D); seed (), int64, on x's
              device; h and y like x, contiguous, never aliases.
    Args:     p, seed, offset: as for `dropout`; with p = 0 nothing random is computed.
              eps, cast: as for `rms_norm`.
    Random:   the mask of `dropout` for a tensor of x's shape, bit for bit.
    Grad:     for x, residual and weight, from the gradients of h and y, either of which may be
              missing; saves h and weight, neither mask nor row statistics.
    Numerics: dropout(x) is rounded to x's dtype and h to the dtype that x and residual promote to,
              as op by op; the norm as in `rms_norm`. In the backward the two gradients of h are
              added in fp32 (fp64 for fp64) and rounded once.
    Raises:   ValueError if p is outside [0, 1] or NaN, shapes or devices differ, or `rms_norm`
              would raise; TypeError if seed or offset is neither int nor a 0-d int64 tensor.
    Source:   Srivastava et al. 2014 (dropout); Zhang, Sennrich 2019 (RMSNorm).
    """
    seed = as_int64_scalar("seed", seed, x.device)
    offset = as_int64_scalar("offset", offset, x.device)
    check_mapped("dropout_add_rms_norm", x, residual, seed, offset)
    opaque = core.opaque(prefers_kernel, x, residual, weight, p, seed, offset, eps, cast=cast)
    return FORWARD(x, residual, weight, p, seed, offset, eps, cast, None, opaque)


OP = core.Op(
    dropout_add_rms_norm,
    dropout_add_rms_norm_reference,
    FORWARD,
    BACKWARD,
    supports,
    prefers_kernel,
)
