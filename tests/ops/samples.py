"""Inputs of every op, in several memory layouts: what the tests over all of OPS iterate over.

SAMPLES[name](make) yields argument tuples for `OPS[name].forward`; `make(*shape)` returns a float
tensor in the layout and dtype under test. The tests check that no op lacks its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]
LAYOUTS = ("contiguous", "transposed", "expanded", "sliced", "padded")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def maker(layout: str, dtype: torch.dtype, device: str = "cpu") -> Make:
    """Return make(*shape) -> a fresh random tensor of that shape in this layout."""

    def make(*shape: int) -> Tensor:
        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes).to(device, dtype)

        last = shape[-1]
        if layout == "transposed" and len(shape) == 4:  # [B, N, T, H] as models build it
            return randn(shape[0], shape[2], shape[1], last).transpose(1, 2)
        if layout == "transposed" and len(shape) >= 2:
            return randn(*shape[:-2], last, shape[-2]).transpose(-1, -2)
        if layout == "expanded":
            return randn(1, *shape[1:]).expand(shape)
        if layout == "sliced":
            return randn(*shape[:-1], 2 * last)[..., ::2]
        if layout == "padded":
            return randn(*shape[:-1], last + 64)[..., :last]
        return randn(*shape)

    return make


def _int64(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _dropout(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in ((3, 5, 8), (1, 7), (0, 8), (4, 0)):
        yield make(*shape), 0.25, _int64(5), _int64(3)
    for p in (0.0, 1.0):
        yield make(2, 3), p, _int64(5), _int64(0)


SAMPLES: dict[str, Callable[[Make], Iterator[tuple[Any, ...]]]] = {
    "dropout": _dropout,
}
