"""How far results may be from the truth: one table, each bound with its reason.

The rule for ops (class E2 of docs/design.md): the error against fp64 is at most twice that of plain
PyTorch in the same dtype, plus the table's atol. The table alone is for results with no plain
PyTorch of the same rounding to compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

# dtype -> (rtol, atol) for values of order 1
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),  # 4500 ulp: sums of up to a thousand terms in another order
    torch.float32: (2e-6, 1e-6),  # 16 ulp: exp, log and rsqrt differ by a few between libraries
    torch.bfloat16: (
        8e-3,
        8e-3,
    ),  # 1 ulp (2^-7): fp32 inside, one rounding, which may go other ways
    torch.float16: (1e-3, 1e-3),  # 1 ulp (2^-10), likewise
}

# What the rule adds to twice the plain error: a plain result may be exact by luck.
SLACK: dict[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,  # 8 ulp of 1
    torch.bfloat16: 2.0**-8,  # half an ulp of 1: the last rounding
    torch.float16: 2.0**-11,  # half an ulp of 1
}


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Compare in fp64 with the tolerance of dtype (default: actual's)."""
    rtol, atol = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def max_error(actual: Tensor, truth: Tensor) -> float:
    """Return the largest absolute difference, in fp64; 0 for empty tensors."""
    assert actual.shape == truth.shape, f"{tuple(actual.shape)} against {tuple(truth.shape)}"
    if actual.numel() == 0:
        return 0.0
    return float((actual.detach().double() - truth.detach().double()).abs().max())


def assert_no_worse_than_plain(
    actual: Tensor, plain: Tensor, truth: Tensor, *, scale: float | None = None
) -> None:
    """Assert error(actual) <= 2 * error(plain) + slack * scale, errors against fp64 `truth`.

    Args:  plain: what plain PyTorch gives in actual's dtype.
           scale: size of the values; default: the largest of truth, at least 1.
    """
    assert actual.dtype == plain.dtype, f"{actual.dtype} against {plain.dtype}"
    if scale is None:
        scale = max(1.0, float(truth.detach().abs().max())) if truth.numel() else 1.0
    bound = 2 * max_error(plain, truth) + SLACK[actual.dtype] * scale
    error = max_error(actual, truth)
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g} ({actual.dtype})"
