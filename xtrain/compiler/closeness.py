"""How far the values of a swapped graph are from the truth, and how far they may be.

The bound of class E2 is twice the error of the graph without swaps, and half an ulp. The error of
one run may be small by luck: where the bound is passed, more runs, with noise in the last digit of
each op, are asked for, and the largest of their errors counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Constants of formulas are matched to 8 digits: what differs by more in fp64 is another formula.
FORMULA = 2.0**-26
Values = dict[str, Tensor | None]


@dataclass(frozen=True)
class Comparison:
    """How far one value of the swapped graph is from the truth.

    bounds:   of the whole tensor's error and of its worst element's.
    excused:  elements that are not finite without swaps either.
    """

    name: str
    ratio: float = 0.0
    said: str = ""
    is_as_run: bool = False
    target: Tensor | None = None
    dtype: torch.dtype | None = None
    bounds: tuple[float, ...] = ()
    excused: Tensor | None = None

    def is_missed_by(self, value: Tensor | None) -> bool:
        """Whether another run's value is out of the bounds too."""
        if _form_differs(value, self.target, self.dtype, self.is_as_run):
            return True
        if self.target is None or not self.bounds:
            return False
        errors = _errors(_or_zeros(value, self.target), self.target, self.excused)
        return any(_ratio(e, b) > 1 for e, b in zip(errors, self.bounds, strict=True))


NOTHING = Comparison("nothing")


def compare(
    actual: Values,
    plain: Values,
    truth: Values,
    noisy: Callable[[], list[Values]],
    *,
    is_as_run: bool,
) -> Comparison:
    """The value of `actual` that is worst, against class E2, or the same formula in fp64.

    Args:     plain: what the graph without swaps gave in the dtypes of actual; the truth, in fp64.
              noisy: gives more of those, asked where the first alone is passed.
    """
    worst = NOTHING
    for name, value in actual.items():
        found = _compare_one(name, value, plain.get(name), truth.get(name), noisy, is_as_run)
        if found.ratio >= worst.ratio:
            worst = found
    return worst


def _compare_one(
    name: str,
    value: Tensor | None,
    plain: Tensor | None,
    target: Tensor | None,
    noisy: Callable[[], list[Values]],
    is_as_run: bool,
) -> Comparison:
    dtype = plain.dtype if plain is not None else None
    if said := _form_differs(value, target, dtype, is_as_run):
        return Comparison(name, math.inf, said, is_as_run, target, dtype)
    if is_as_run:  # torch's own backward may fill in zeros
        value, plain, target = _zeros_for_none(value, plain, target)
    if value is None or plain is None or target is None:
        return Comparison(name)
    excused = ~_difference(plain, target).isfinite()
    errors, sizes = (
        _errors(value, target, excused),
        _errors(target, torch.zeros_like(target), excused),
    )
    unit = _unit(value.dtype) if is_as_run else FORMULA
    spread = _errors(plain, target, excused)

    def bounds() -> tuple[float, ...]:
        return tuple(2 * s + unit * size for s, size in zip(spread, sizes, strict=True))

    def ratio() -> float:
        return max(map(_ratio, errors, bounds()))

    if ratio() > 1:
        for other in noisy():
            more = _errors(_or_zeros(other.get(name), target), target, excused)
            spread = tuple(map(max, spread, more))
    said = (
        f"off by {ratio():.2g} times the bound (error {errors[0]:.2g} in a norm of {sizes[0]:.2g})"
    )
    return Comparison(name, ratio(), said, is_as_run, target, dtype, bounds(), excused)


def _form_differs(
    value: Tensor | None, target: Tensor | None, dtype: torch.dtype | None, is_as_run: bool
) -> str:
    """What is another kind of value, "" if nothing is."""
    if value is None or target is None:
        if value is target or is_as_run:
            return ""
        return "missing" if value is None else "there, and is missing without swaps"
    if value.shape != target.shape:
        return f"of shape {tuple(value.shape)}, and of {tuple(target.shape)} without swaps"
    if dtype is not None and value.dtype != dtype:
        return f"{value.dtype}, and {dtype} without swaps"
    return ""


def _or_zeros(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value


def _zeros_for_none(*values: Tensor | None) -> list[Tensor | None]:
    known = next((v for v in values if v is not None), None)
    return [known if known is None else _or_zeros(v, known) for v in values]


def _difference(value: Tensor, target: Tensor) -> Tensor:
    """The absolute difference in fp64; 0 where both are the same infinity or no number."""
    kind = torch.complex128 if target.is_complex() else torch.float64
    a, b = value.detach().to(kind), target.detach().to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def _errors(value: Tensor, target: Tensor, excused: Tensor | None) -> tuple[float, ...]:
    """The norm of the difference and its largest element."""
    difference = _difference(value, target)
    if excused is not None:
        difference = difference.masked_fill(excused, 0.0)
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.norm()), float(difference.max())


def _unit(dtype: torch.dtype) -> float:
    """Half an ulp of 1: what a last rounding may be off by."""
    is_float = dtype.is_floating_point or dtype.is_complex
    return torch.finfo(dtype).eps / 2 if is_float else 0.0


def _ratio(error: float, bound: float) -> float:
    if error <= bound:  # both may be 0
        return error / bound if bound and bound < math.inf else 0.0
    return error / bound if bound else math.inf
