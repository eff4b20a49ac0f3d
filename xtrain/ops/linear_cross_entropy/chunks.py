"""How linear_cross_entropy is computed: a chunk of tokens at a time, in one buffer of logits.

For each chunk a product gives the logits, their rows are turned into the loss and, in the same
memory, into its gradient, and two products take that on to hidden and weight. On a GPU the rows are
the work of one Triton kernel, elsewhere of torch operations. The formula is in op.py.

Letters: V vocabulary, D model dim; n tokens, flat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.cross_entropy.op import (
    KERNEL_DTYPES,
    Options,
    factor_of_losses,
    grad_logits_into,
    reduce_losses,
    rows_by_kernel,
    silent_rows,
    token_losses_into,
    weights_in_loss,
)

# On the CPU: 32 MiB of fp32 logits, enough rows for a product to be worth reading the weight.
CPU_CHUNK_ELEMENTS = 1 << 23
# On a GPU, of logits beside a narrow sum: with all that is returned 0.75 GiB at V 128256, D 2048.
LEAN_BYTES = 203 << 20
UNIT = 256  # tokens: the height of two tiles of a product


class Saved(NamedTuple):
    """What the forward leaves to the backward, in the order of the backward's schema.

    hidden, weight: None where the forward made the gradients, which are [0] where it did not.
    """

    hidden: Tensor | None
    weight: Tensor | None
    targets: Tensor
    token_weights: Tensor | None
    lse: Tensor
    factor: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor

    def scale(self, grad_loss: Tensor, options: Options) -> Tensor:
        """Return the gradient of each token's loss."""
        weights = weights_in_loss(self.targets, self.token_weights, options, self.lse.dtype)
        return grad_loss.to(self.lse.dtype) * self.factor * weights


class Wanted(NamedTuple):
    """Which gradients are wanted, and how that of the weight is summed."""

    needs_grad_hidden: bool
    needs_grad_weight: bool
    weight_grad_accumulation: str  # "fp32" | "same"

    @property
    def wide(self) -> bool:
        """Whether the weight's is summed in c."""
        return self.weight_grad_accumulation == "fp32"

    def in_forward(self, options: Options) -> Wanted:
        """Return what the forward makes: nothing where each token has an upstream number."""
        return Wanted(False, False, "same") if options.reduction == "none" else self


@dataclass
class Gradients:
    """Where the gradients of all tokens are collected; None where one is not wanted."""

    hidden: HiddenGradient | None
    weight: Tensor | None  # [V, D], perhaps in a wider dtype than the weight
    empty: bool = True  # weight holds nothing yet


class HiddenGradient:
    """The gradient of hidden [n, D], chunk by chunk.

    grows: memory is taken as chunks come, and leaves logits the room of those still to come; in the
           end, when the logits are gone, they are copied together.
    """

    def __init__(self, hidden: Tensor, dtype: torch.dtype, *, grows: bool):
        self.shape = (hidden.shape[:-1].numel(), hidden.shape[-1])
        self.grows = grows
        self._new = partial(hidden.new_empty, dtype=dtype)
        self._whole = None if grows else self._new(self.shape)
        self._parts: list[tuple[slice, Tensor]] = []

    def part(self, tokens: slice) -> Tensor:
        """Return where the gradient of these tokens is to be written."""
        if self._whole is not None:
            return self._whole[tokens]
        self._parts.append((tokens, self._new((tokens.stop - tokens.start, self.shape[1]))))
        return self._parts[-1][1]

    def whole(self) -> Tensor:
        """Return the gradient of all tokens, to be asked for once."""
        if self._whole is None and len(self._parts) == 1:
            return self._parts[0][1]
        whole = self._new(self.shape) if self._whole is None else self._whole
        for tokens, part in self._parts:
            whole[tokens] = part
        return whole


def chunk_rows(
    V: int, D: int, itemsize: int, device_type: str, *, wide: bool, bytes_to_come: int = 0
) -> int:
    """Return how many tokens' logits are held at a time, at most.

    Few and large chunks, since each reads and writes the whole sum of the weight's gradient. On a
    GPU, in multiples of UNIT, what memory allows is this:

    wide: the sum is fp32 and rounded at the end. D rows of logits are as large as the rounded sum,
          which takes their place when they are gone: they cost nothing at the peak. A quarter more
          is added while that is at most 64 MiB.
    else: the logits come on top of all that is returned: three quarters of D rows, and at most
          203 MiB. Of what is returned, bytes_to_come are not taken yet, the rows' own among them:
          the logits may fill these too, with up to D rows.

    D counts as 2048 at least: fewer rows would not fill a GPU.
    """
    if device_type != "cuda":
        return max(1, CPU_CHUNK_ELEMENTS // V)
    D, row_bytes = max(D, 2048), V * itemsize
    if wide:
        rows = D + min(D // 4, (64 << 20) // row_bytes)
    else:
        room = min(D * 3 // 4 * row_bytes, LEAN_BYTES) + bytes_to_come
        rows = min(D, room // (row_bytes + (D * itemsize if bytes_to_come else 0)))
    return max(rows // UNIT * UNIT, UNIT)


def token_chunks(n: int, rows_at: Callable[[int], int], unit: int) -> list[slice]:
    """Cut n tokens into the fewest chunks, about equal, in multiples of unit.

    A small chunk costs as much memory traffic for the weight's gradient as a large one.

    Args:     rows_at: the most that a chunk from a token on may hold; falls from token to token.
    """
    count = len(_cut(n, rows_at, n))
    units = -(-n // unit)
    ends = [min(n, units * (i + 1) // count * unit) for i in range(count)]
    equal = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if all(part.stop - part.start <= rows_at(part.start) for part in equal):
        return equal
    most = -(-units // count) * unit
    while len(parts := _cut(n, rows_at, most)) > count:
        most += unit
    return parts


def _cut(n: int, rows_at: Callable[[int], int], most: int) -> list[slice]:
    parts: list[slice] = []
    start = 0
    while start < n:
        parts.append(slice(start, min(n, start + min(most, rows_at(start)))))
        start = parts[-1].stop
    return parts


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
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, lse, factor, grad_hidden, grad_weight), the last two [0] where not wanted."""
    wanted = wanted.in_forward(options)
    c = compute_dtype(hidden.dtype)
    held = held_dtype(hidden.dtype)
    weights = weights_in_loss(targets, token_weights, options, c)
    factor = factor_of_losses(weights, options)
    losses = torch.empty(targets.shape, dtype=c, device=targets.device)
    lse = torch.empty_like(losses)
    # held fp16 gradients are divided by the sum of the weights when they are handed out
    made = wanted.needs_grad_hidden or wanted.needs_grad_weight
    scale = weights * factor if made and held == hidden.dtype else weights
    grads = new_gradients(hidden, weight, wanted)
    walk(hidden, weight, targets, scale, losses, lse, grads, options)
    grad_hidden, grad_weight = rounded(grads, hidden, held)
    loss = reduce_losses(losses, weights, factor, options)
    return loss, lse, factor, grad_hidden, grad_weight


def backward_eager(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    saved: Saved,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden, grad_weight) by computing the logits again."""
    scale = saved.scale(grad_loss, options)
    grads = new_gradients(hidden, weight, wanted)
    walk(hidden, weight, saved.targets, scale, None, saved.lse, grads, options)
    return rounded(grads, hidden, hidden.dtype)


def new_gradients(hidden: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
    """Return memory for the gradients that are wanted, not yet written."""
    held = held_dtype(hidden.dtype)
    dtype = compute_dtype(hidden.dtype) if wanted.wide else held
    grows = not wanted.wide and weight.device.type == "cuda"
    return Gradients(
        HiddenGradient(hidden, held, grows=grows) if wanted.needs_grad_hidden else None,
        weight.new_empty(weight.shape, dtype=dtype) if wanted.needs_grad_weight else None,
    )


def rounded(grads: Gradients, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (grad_hidden like hidden, grad_weight) in dtype; [0] for one that is not wanted."""
    nothing = hidden.new_empty(0, dtype=dtype)
    of_hidden, of_weight = grads.hidden, grads.weight
    if of_weight is not None and grads.empty:  # no token at all
        of_weight.zero_()
    return (
        nothing if of_hidden is None else _cast(of_hidden.whole(), dtype).view(hidden.shape),
        nothing.clone() if of_weight is None else _cast(of_weight, dtype),
    )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fresh x in dtype; by our kernel, which moves more bytes a second than torch's."""
    if x.dtype == dtype or x.device.type != "cuda" or why_no_kernel(x) is not None:
        return x.to(dtype)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return import_module("xtrain.ops.linear_cross_entropy.kernel").scale(x, one, out)


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
    on_gpu = weight.device.type == "cuda"
    row_bytes = D * held_dtype(hidden.dtype).itemsize
    grows = grads.hidden is not None and grads.hidden.grows

    def rows_at(start: int) -> int:
        to_come = (n - start) * row_bytes if grows else 0
        sizes = (V, D, weight.element_size(), weight.device.type)
        return chunk_rows(*sizes, wide=wide, bytes_to_come=to_come)

    unit = min(rows_at(n), UNIT) if on_gpu else 1
    rows_step = row_function(hidden)
    # Rows start at multiples of 128 bytes: for products by tensor cores, and for vector accesses.
    stride = -(-V // 64) * 64
    buffer = hidden.new_empty((0, stride))
    for part in token_chunks(n, rows_at, unit):
        size = part.stop - part.start
        if size > len(buffer) or grows and size < len(buffer):
            del buffer  # before the next is taken
            buffer = hidden.new_empty((size, stride))
        h, x = hidden[part], buffer[:size, :V]
        torch.mm(h, weight.t(), out=x)
        grad = None if grads.hidden is None and grads.weight is None else x
        loss_rows = None if losses is None else losses[part]
        rows_step(x, grad, targets[part], scale[part], loss_rows, lse[part], options)
        if grads.hidden is not None:
            product_into(grads.hidden.part(part), x, weight, add=False)
        if grads.weight is not None:
            product_into(grads.weight, x.t(), h, add=not grads.empty)
            grads.empty = False
        del x, grad  # or the memory of their buffer could not go


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


def row_function(hidden: Tensor) -> Callable[..., None]:
    """Return what turns logits into losses and, where they lie, gradients; see rows_by_torch."""
    if hidden.device.type == "cuda" and why_no_kernel(hidden) is None:
        return partial(rows_by_kernel, padded=True)
    return rows_by_torch


def why_no_kernel(hidden: Tensor) -> str | None:
    """Return why the Triton kernel cannot take these inputs, or None when it can."""
    return core.kernel_refuses(KERNEL_DTYPES, hidden=hidden)


def rows_by_torch(
    logits: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    options: Options,
) -> None:
    """Do what cross_entropy_rows of cross_entropy/kernel.py does, in torch operations."""
    y = logits if options.softcap is None else options.capped(logits.to(lse.dtype))
    silent = silent_rows(targets, scale, options)
    if losses is not None:
        token_losses_into(losses, lse, y, targets, options)
        for result in (losses, lse):  # of tokens that count for nothing
            result.masked_fill_(silent.squeeze(-1), 0.0)
    if grad is None:
        return
    if options.softcap is None:
        grad_logits_into(grad, y, targets, scale, lse, options)
        return
    of_capped = torch.empty_like(y)
    grad_logits_into(of_capped, y, targets, scale, lse, options)
    of_capped *= options.cap_derivative(y)
    grad.copy_(of_capped.masked_fill_(silent, 0.0))
