"""How linear_cross_entropy is computed: a chunk of tokens at a time, in one buffer of logits.

For each chunk a product gives the logits, their rows are turned into the loss and, in the same
memory, into its gradient, and two products take that on to hidden and weight. On a GPU the rows are
the work of one Triton kernel, elsewhere of torch operations. The formula is in
linear_cross_entropy.py.

Letters: V vocabulary, D model dim; n tokens, flat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops.cross_entropy import KERNEL_DTYPES
from xtrain.ops.cross_entropy_decomposition import (
    compute_dtype,
    factor_of_losses,
    grad_logits_into,
    reduce_losses,
    token_losses_into,
    weights_in_loss,
)

# On the CPU: 32 MiB of fp32 logits, enough rows for a product to be worth reading the weight.
CPU_CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Options:
    """What the loss of a token depends on besides its logits and its target."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None


@dataclass
class Gradients:
    """Where the gradients of all tokens are collected; None where one is not wanted."""

    hidden: Tensor | None  # [n, D]
    weight: Tensor | None  # [V, D], perhaps in a wider dtype than the weight
    empty: bool = True  # weight holds nothing yet


def chunk_rows(V: int, D: int, device_type: str, *, wide: bool) -> int:
    """Return how many tokens' logits are held at a time.

    On a GPU, where the weight's gradient is summed in a wider dtype and rounded at the end, D rows
    cost no memory at the peak: they take as much as the rounded gradient, which takes their
    place when they are gone. 2048 at least, since the gradient's sum is read and written once
    a chunk, and a multiple of 128, the height of a product's tiles. Without the wider sum nothing
    makes room for the logits, so there are half as many.
    """
    if device_type != "cuda":
        return max(1, CPU_CHUNK_ELEMENTS // V)
    rows = max(2048, D // 128 * 128)
    return rows if wide else rows // 2


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients that wait for the upstream gradient.

    fp16 has not the range: a gradient that a loss scale of 65536 is still to come to would vanish.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def forward_eager(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    options: Options,
    reduction: str,
    needs_grad: tuple[bool, bool],
    accumulate_wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, lse, factor, grad_hidden, grad_weight), the last two [0] where not wanted."""
    c = compute_dtype(hidden.dtype)
    held = held_dtype(hidden.dtype)
    weights = weights_in_loss(targets, token_weights, options.ignore_index, c)
    factor = factor_of_losses(weights, reduction)
    losses = torch.empty(targets.shape, dtype=c, device=targets.device)
    lse = torch.empty_like(losses)
    # held fp16 gradients are divided by the sum of the weights when they are handed out
    scale = weights * factor if any(needs_grad) and held == hidden.dtype else weights
    grads = new_gradients(hidden, weight, needs_grad, accumulate_wide)
    walk(hidden, weight, targets, scale, losses, lse, grads, options)
    grad_hidden, grad_weight = rounded(grads, hidden, held)
    loss = reduce_losses(losses, weights, factor, reduction)
    return loss, lse, factor, grad_hidden, grad_weight


def backward_eager(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    lse: Tensor,
    factor: Tensor,
    options: Options,
    needs_grad: tuple[bool, bool],
    accumulate_wide: bool,
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) by computing the logits again."""
    weights = weights_in_loss(targets, token_weights, options.ignore_index, lse.dtype)
    scale = grad_loss.to(lse.dtype) * factor * weights
    grads = new_gradients(hidden, weight, needs_grad, accumulate_wide)
    walk(hidden, weight, targets, scale, None, lse, grads, options)
    return rounded(grads, hidden, hidden.dtype)


def new_gradients(
    hidden: Tensor, weight: Tensor, needs_grad: tuple[bool, bool], accumulate_wide: bool
) -> Gradients:
    """Return memory for the gradients that are wanted, not yet written."""
    of_hidden, of_weight = needs_grad
    held = held_dtype(hidden.dtype)
    wide = compute_dtype(hidden.dtype) if accumulate_wide else held
    shape = (hidden.shape[:-1].numel(), hidden.shape[-1])
    return Gradients(
        hidden.new_empty(shape, dtype=held) if of_hidden else None,
        weight.new_empty(weight.shape, dtype=wide) if of_weight else None,
    )


def rounded(grads: Gradients, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden like hidden, grad_weight) in dtype; [0] for one that is not wanted."""
    nothing = hidden.new_empty(0, dtype=dtype)
    of_hidden, of_weight = grads.hidden, grads.weight
    if of_weight is not None and grads.empty:  # no token at all
        of_weight.zero_()
    return (
        nothing if of_hidden is None else of_hidden.to(dtype).view(hidden.shape),
        nothing.clone() if of_weight is None else of_weight.to(dtype),
    )


def walk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    grads: Gradients,
    options: Options,
) -> None:
    """Go over the tokens chunk by chunk; write losses and lse (or read lse) and fill grads.

    Args:     scale: [...], the gradient of each l_i; where it is 0 a token counts for nothing.
    """
    V, D = weight.shape
    hidden = as_matrix(hidden.flatten(0, -2))
    weight = as_matrix(weight)
    targets, scale, lse = (t.contiguous().view(-1) for t in (targets, scale, lse))
    losses = None if losses is None else losses.view(-1)
    n = hidden.shape[0]
    wide = grads.weight is not None and grads.weight.dtype != weight.dtype
    step = chunk_rows(V, D, weight.device.type, wide=wide)
    rows_step = row_function(hidden)
    # Rows start at multiples of 128 bytes: for products by tensor cores, and for vector accesses.
    stride = -(-V // 64) * 64
    logits = hidden.new_empty((min(step, n), stride))[:, :V]
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        h, x = hidden[part], logits[: min(step, n - start)]
        torch.mm(h, weight.t(), out=x)
        wants_grad = grads.hidden is not None or grads.weight is not None
        loss_rows = None if losses is None else losses[part]
        rows_step(x, targets[part], scale[part], loss_rows, lse[part], wants_grad, options)
        if grads.hidden is not None:
            product_into(grads.hidden[part], x, weight, add=False)
        if grads.weight is not None:
            product_into(grads.weight, x.t(), h, add=not grads.empty)
            grads.empty = False


def as_matrix(x: Tensor) -> Tensor:
    """Return x [n, m], or a copy where no product could read it by one stride."""
    rows, cols = x.stride()
    if (cols == 1 and rows >= max(1, x.shape[1])) or (rows == 1 and cols >= max(1, x.shape[0])):
        return x
    return x.contiguous()


def product_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """Write a @ b into out, or add it; out may be fp32 where a and b are narrower."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.device.type == "cuda":
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        product_into(out, a.to(out.dtype), b.to(out.dtype), add=add)


# --- Rows ----------------------------------------------------------------------------------------

RowFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, bool, Options], None]


def row_function(hidden: Tensor) -> RowFunction:
    """Return what turns logits into losses and gradients: the kernel, or torch operations."""
    if hidden.device.type == "cuda" and why_no_kernel(hidden) is None:
        return rows_by_kernel
    return rows_by_torch


def why_no_kernel(hidden: Tensor) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    if hidden.dtype not in KERNEL_DTYPES:
        return f"hidden is {hidden.dtype}; the kernel takes fp64, fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def rows_by_kernel(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    wants_grad: bool,
    options: Options,
) -> None:
    """Write losses and lse, or read lse; with wants_grad turn logits into their gradient."""
    import_module("xtrain.ops.triton.cross_entropy").cross_entropy_rows(
        logits,
        logits if wants_grad else None,
        targets,
        scale,
        losses,
        lse,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        softcap=options.softcap,
        padded=True,
    )


def rows_by_torch(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    wants_grad: bool,
    options: Options,
) -> None:
    """Do the same in torch operations."""
    plain = (options.ignore_index, options.label_smoothing, options.z_loss)
    y = logits if options.softcap is None else capped(logits.to(lse.dtype), options.softcap)
    if losses is not None:
        token_losses_into(losses, lse, y, targets, *plain)
        for result in (losses, lse):  # of tokens that count for nothing
            result.masked_fill_(silent_rows(targets, scale, options.ignore_index).squeeze(-1), 0.0)
    if not wants_grad:
        return
    if options.softcap is None:
        grad_logits_into(logits, y, targets, scale, lse, *plain)
        return
    grad = torch.empty_like(y)
    grad_logits_into(grad, y, targets, scale, lse, *plain)
    grad *= cap_derivative(y, options.softcap)
    logits.copy_(grad.masked_fill_(silent_rows(targets, scale, options.ignore_index), 0.0))


def capped(x: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(x / softcap)."""
    return softcap * torch.tanh(x / softcap)


def cap_derivative(y: Tensor, softcap: float) -> Tensor:
    """Return the derivative of `capped`, given its result."""
    return 1.0 - (y / softcap) ** 2


def silent_rows(targets: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """Return [..., 1]: True for tokens whose logits get no gradient, whatever they hold."""
    return ((targets == ignore_index) | (scale == 0)).unsqueeze(-1)
