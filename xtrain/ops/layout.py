"""Memory layouts that results must have exactly, since their fakes promise them."""

from __future__ import annotations

from torch import Tensor


def contiguous(x: Tensor) -> Tensor:
    """Return x.contiguous() in exactly the strides of torch.empty(x.shape).

    A dim of size 0 or 1 may have any stride in a contiguous tensor, and elementwise ops hand it on.
    For eager kernels: on symbolic sizes the comparison would become a guard.
    """
    strides: list[int] = []
    step = 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    dense = x.contiguous()
    return dense if dense.stride() == tuple(strides) else dense.as_strided(x.shape, strides)
