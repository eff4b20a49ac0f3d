"""Dropout masks from NumPy's unsigned 64-bit integers, written from the recipe in docs/design.md.

Shares no code with xtrain: the truth that every mode's masks are held to.
"""

from __future__ import annotations

import math

import numpy as np

_MASK = (1 << 64) - 1


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The published function on an array of uint64."""
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keep_mask(shape: int | tuple[int, ...], p: float, seed: int, offset: int = 0) -> np.ndarray:
    """The keep decisions of a tensor of this shape, True = kept; seed and offset mod 2^64."""
    shape = (shape,) if isinstance(shape, int) else shape
    with np.errstate(over="ignore"):
        i = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(offset & _MASK)
        h = splitmix64(np.uint64(seed & _MASK) ^ (i * np.uint64(0x9E3779B97F4A7C15)))
    u = (h >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return (u >= np.float32(p)).reshape(shape)


def phi(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two 0/1 masks."""
    return float(np.corrcoef(a.ravel().astype(np.float64), b.ravel().astype(np.float64))[0, 1])
