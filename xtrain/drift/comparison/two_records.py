"""compare: two records -> where they part, how far, whether a token can flip. NumPy alone."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.comparison.comparable import (
    Change,
    by_flag,
    by_weights,
    changes,
    why_not_comparable,
)
from xtrain.drift.comparison.differences import (
    Aside,
    Distance,
    absolute_difference,
    align,
    bound,
    check_rows,
    contradiction_of,
    differences,
    distance,
    max_ulps,
    out_of_order,
    set_aside,
    verify,
)
from xtrain.drift.comparison.flip import flip_verdict
from xtrain.drift.comparison.pairing import Partners
from xtrain.drift.recording.record_format import Case, OpKey, Record, Step, shape_of
from xtrain.drift.recording.tensors import coarser_dtype, to_float64
from xtrain.drift.settings import LAYOUT

IDENTICAL, NO_FLIP, CAN_FLIP, TOKENS_DIFFER, NOT_COMPARABLE = 0, 1, 2, 3, 4
VERDICTS = {
    IDENTICAL: "identical: all recorded bits are equal",
    NO_FLIP: "the numbers differ, no token can flip",
    CAN_FLIP: "the numbers differ, and a token can flip",
    TOKENS_DIFFER: "the tokens differ",
    NOT_COMPARABLE: "not comparable",
}


Place = tuple[str, str, str]  # "a", "b" or "both", path, op


class Unmatched(NamedTuple):
    """An op without a partner: one of two records lacks it, or has it in another shape."""

    record: str  # "a" | "b": the one that has it; "both" when the shapes differ
    path: str
    op: str
    times: int  # occurrences in all compared forwards


@dataclass(frozen=True)
class Divergence:
    """The first result that differs; unpacks as (module path, op)."""

    module_path: str  # "" is the model itself
    op: str  # "aten.mm"; "output" of a block, "logits" of the model
    prompt: int
    step: int
    index: int  # in graph order among a's ops
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    distance: Distance
    cause: str = ""  # as far as operands and arguments tell

    def __iter__(self) -> Iterator[str]:
        return iter((self.module_path, self.op))

    def __str__(self) -> str:
        return f"{self.module_path or 'model'}: {self.op}"


@dataclass(frozen=True)
class Position:
    """The flip rule at one place; xtrain.drift.comparison.flip has the formulas."""

    prompt: int
    step: int
    position: int  # index of the last token that the logits depend on
    token_a: int  # chosen by a, by b
    token_b: int
    margin: float
    shift: float
    can_flip: bool
    flipped: bool
    equal: bool  # the logits, bit for bit
    runner_up: int

    def __str__(self) -> str:
        return f"prompt {self.prompt}, step {self.step}, position {self.position}"


@dataclass
class PromptResult:
    """What is equal of one prompt."""

    prompt: int
    num_steps: int = 0  # compared: up to the first one with other tokens
    ops_equal: bool = True
    logits_equal: bool = True
    tokens_equal: bool = True
    first_divergence: Divergence | None = None
    num_matched: int = 0  # results of ops and blocks that both have

    @property
    def words(self) -> tuple[str, str, str]:
        """Ops, logits and tokens, each "same" or "differ"; ops "-" where none has a partner."""
        equal = (self.ops_equal, self.logits_equal, self.tokens_equal)
        ops, logits, tokens = ("same" if value else "differ" for value in equal)
        return ops if self.num_matched else "-", logits, tokens


@dataclass
class LayerGrowth:
    """The difference of one block's output, over all compared places."""

    path: str
    max_abs: float = 0.0
    max_ulps: float = 0.0  # of numbers of the size of the output's rms at that place, or larger
    max_relative: float = 0.0  # to the root mean square of the output at that place
    num_different: int = 0
    num_compared: int = 0


@dataclass
class Comparison:
    """The result; xtrain.drift.comparison.drift_report makes text, JSON and a page of it."""

    a: Record
    b: Record
    reason: str | None  # why the records are not comparable
    changes: list[Change]  # environment, then how the model was run
    prompts: list[PromptResult] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    growth: list[LayerGrowth] = field(default_factory=list)
    unmatched: list[Unmatched] = field(default_factory=list)
    num_matched: int = 0  # op results compared
    renamed: list[tuple[str, str]] = field(default_factory=list)  # weights: name in b, name in a
    aside: Aside = field(default_factory=set, repr=False)  # rows in an order of their own
    partners: Partners | None = field(default=None, repr=False)  # None: not compared op by op

    @cached_property
    def same_layout(self) -> bool:
        """Whether both computed the prompts in the same batches, with the same padding."""
        return all(self.a.run[name] == self.b.run[name] for name in LAYOUT)

    @property
    def environment_changes(self) -> list[Change]:
        """What differs in the two environments, threads and run settings included."""
        return self.changes

    @cached_property
    def first_divergence(self) -> Divergence | None:
        """The earliest over all prompts: by step, then by place in the graph; None if none."""
        found = [p.first_divergence for p in self.prompts if p.first_divergence is not None]
        return min(found, key=lambda d: (d.step, d.index, d.prompt), default=None)

    @property
    def exit_code(self) -> int:
        """Return 0 identical, 1 no token can flip, 2 one can, 3 tokens differ, 4 not comparable."""
        if self.reason is not None:
            return NOT_COMPARABLE
        if not all(prompt.tokens_equal for prompt in self.prompts):
            return TOKENS_DIFFER
        if all(prompt.ops_equal and prompt.logits_equal for prompt in self.prompts):
            return IDENTICAL
        return CAN_FLIP if any(position.can_flip for position in self.positions) else NO_FLIP

    @property
    def verdict(self) -> str:
        """The exit code in words."""
        words = VERDICTS[self.exit_code]
        return f"{words}: {self.reason}" if self.reason else words

    @property
    def max_shift(self) -> float:
        """The largest shift of a pair at any compared place."""
        return max((position.shift for position in self.positions), default=0.0)

    @property
    def tightest(self) -> Position | None:
        """The place that is nearest to a flip: the smallest margin in units of its own shift."""
        return min(self.positions, key=_headroom, default=None)

    @property
    def smallest_margin(self) -> Position | None:
        """The place with the smallest margin of all."""
        return min(self.positions, key=lambda p: p.margin, default=None)


def _headroom(position: Position) -> tuple[bool, bool, float, float]:
    ratio = position.margin / position.shift if position.shift > 0 else float("inf")
    return not position.flipped, not position.can_flip, ratio, position.margin


def compare(
    a: Record | str | os.PathLike[str],
    b: Record | str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two records, or the folders of two; neither environment need be there.

    Args:     names: OLD -> NEW, whole parts of the names of modules and weights that both records
              are read with; without it b's names are taken for a's where prefix or bits say so.
    Raises:   DriftError for a record that is missing, damaged or of another version, and for names
              that neither record has.
    """
    a = a if isinstance(a, Record) else Record(a)
    b = b if isinstance(b, Record) else Record(b)
    for opened in (a, b):
        verify(opened)
    a, b = by_flag(a, b, names or {})
    b, renamed = by_weights(a, b)
    reason, same_inputs = why_not_comparable(a, b)
    result = Comparison(a, b, reason, changes(a, b), renamed=renamed)
    if not same_inputs:
        return result
    result.growth = [LayerGrowth(path) for path in a.model["blocks"]]
    result.partners = Partners(a, b, same_layout=result.same_layout)
    if not result.same_layout:
        result.aside = out_of_order(a, b, result.partners)
    unmatched: Counter[Place] = Counter()
    for case_a, case_b in zip(a.cases, b.cases, strict=True):
        result.prompts.append(_compare_case(result, case_a, case_b, unmatched))
    result.unmatched = [Unmatched(*key, count) for key, count in unmatched.items()]
    return result


def _compare_case(result: Comparison, a: Case, b: Case, unmatched: Counter[Place]) -> PromptResult:
    prompt, before = PromptResult(a.number), result.num_matched
    for step_a, step_b in zip(a.steps, b.steps, strict=False):
        found = _compare_ops(result, step_a, step_b, unmatched)
        equal = _compare_logits(result, step_a, step_b)
        _grow(result, step_a, step_b)
        prompt.num_steps += 1
        prompt.ops_equal &= found is None
        if not equal.all():
            prompt.logits_equal = False
            found = found or _logits_divergence(step_a, step_b)
        prompt.first_divergence = prompt.first_divergence or found
        if step_a.tokens != step_b.tokens:
            prompt.tokens_equal = False
            break  # from here on the inputs differ
    prompt.num_matched = result.num_matched - before
    return prompt


def _compare_ops(
    result: Comparison, a: Step, b: Step, unmatched: Counter[Place]
) -> Divergence | None:
    """Return the first op or block of a step that differs."""
    found: list[tuple[float, Divergence]] = []
    partners = result.partners
    assert partners is not None
    for kind in ("ops", "blocks"):
        keys_a, keys_b = a.keys(kind), b.keys(kind)
        if kind == "ops" and bool(keys_a) != bool(keys_b):
            unmatched.update(("a" if keys_a else "b", *key[:2]) for key in keys_a or keys_b)
            continue
        aligned = partners(a, b) if kind == "ops" else align(keys_a, keys_b)
        unmatched.update(("a", *keys_a[i][:2]) for i in aligned.only_a)
        unmatched.update(("b", *keys_b[j][:2]) for j in aligned.only_b)
        check_rows(aligned.pairs, a, b, kind)
        rows = differences(aligned.pairs, a, b, kind, same_layout=result.same_layout)
        if kind == "ops" and result.aside:
            rows = set_aside(rows, a, b, result.aside)
        result.num_matched += int(rows.comparable.sum())
        for row in np.flatnonzero(~rows.comparable):
            unmatched["both", *keys_a[rows.pairs[row, 0]][:2]] += 1
        for i, j in rows.pairs[rows.different][:1].tolist():
            place, divergence = _divergence(kind, a, b, i, j)
            if kind == "ops":
                divergence = replace(divergence, cause=partners.cause(a, b, aligned, i, j))
            found.append((place, divergence))
    return min(found, key=lambda item: item[0])[1] if found else None


def _divergence(kind: str, a: Step, b: Step, i: int, j: int) -> tuple[float, Divergence]:
    """Return a divergence and its place among a's ops; a block ends after the last op in it."""
    key_a, key_b = a.keys(kind)[i], b.keys(kind)[j]
    columns = a.columns(kind), b.columns(kind)
    one, other = (a.value(i), b.value(j)) if kind == "ops" else _whole_rows(a, b, i, j)
    if one is not None and other is not None and one[0].shape == other[0].shape:
        size = distance(*one, *other)
    else:
        size = bound(*columns, i, j, coarser_dtype(key_a.dtype, key_b.dtype))
    place: float = i
    if kind == "blocks":
        place = _end_of(key_a.path, a.keys("ops"), i)
    divergence = Divergence(
        module_path=key_a.path,
        op=key_a.op,
        prompt=a.case.number,
        step=a.number,
        index=int(place),
        dtypes=(key_a.dtype, key_b.dtype),
        shape=shape_of(columns[0].shape[i]),
        distance=size,
    )
    return place, divergence


def _whole_rows(a: Step, b: Step, i: int, j: int) -> tuple[Any, Any]:
    """Return a block's rows as its values where they are all of it; else nothing is exact."""
    rows_a, rows_b = a.rows(i), b.rows(j)
    size = math.prod(shape_of(a.columns("blocks").shape[i]))
    return (rows_a, rows_b) if rows_a[0].size == size else (None, None)


def _end_of(block: str, keys: tuple[OpKey, ...], number: int) -> float:
    inside = [i for i, key in enumerate(keys) if f"{key.path}.".startswith(f"{block}.")]
    return inside[-1] + 0.5 if inside else len(keys) + number


def _compare_logits(result: Comparison, a: Step, b: Step) -> NDArray[np.bool_]:
    """Add the step's positions to the result and return which have equal bits."""
    bits_a, dtype_a = a.logits()
    bits_b, dtype_b = b.logits()
    if bits_a.shape != bits_b.shape:
        raise ValueError(f"logits of two shapes, {bits_a.shape} and {bits_b.shape}")
    x, y = a.logits_float64(), b.logits_float64()
    if dtype_a == dtype_b:
        signs = np.signbit(x) == np.signbit(y)
        equal = ((x == y) & signs | np.isnan(x) & np.isnan(y)).all(axis=1)
    else:
        equal = ((x == y) | np.isnan(x) & np.isnan(y)).all(axis=1)
    offset = a.info["length"] - len(x)
    for row, found in enumerate(flip_verdict(x, y)):
        result.positions.append(
            Position(
                prompt=a.case.number,
                step=a.number,
                position=offset + row,
                token_a=a.tokens[row],
                token_b=b.tokens[row],
                margin=found.margin,
                shift=found.shift,
                can_flip=found.can_flip,
                flipped=found.flipped,
                equal=bool(equal[row]),
                runner_up=found.runner_up,
            )
        )
    return equal


def _logits_divergence(a: Step, b: Step) -> Divergence:
    logits_a, logits_b = a.logits(), b.logits()
    return Divergence(
        module_path="",
        op="logits",
        prompt=a.case.number,
        step=a.number,
        index=len(a.keys("ops")) + len(a.keys("blocks")),
        dtypes=(logits_a[1], logits_b[1]),
        shape=logits_a[0].shape,
        distance=distance(*logits_a, *logits_b),
    )


def _grow(result: Comparison, a: Step, b: Step) -> None:
    """Add the block outputs of a step, where the logits were taken, to the growth by layer."""
    aligned = align(a.keys("blocks"), b.keys("blocks"))
    layers = {layer.path: layer for layer in result.growth}
    left, right = a.columns("blocks"), b.columns("blocks")
    for i, j in aligned.pairs.tolist():
        (bits_a, dtype_a), (bits_b, dtype_b) = a.rows(i), b.rows(j)
        layer = layers.get(a.keys("blocks")[i].path)
        if bits_a.shape != bits_b.shape or not bits_a.size or layer is None:
            continue
        x, y = to_float64(bits_a, dtype_a), to_float64(bits_b, dtype_b)
        delta = absolute_difference(x, y)
        if delta.any() and (left.hash[i] == right.hash[j]).all() and dtype_a == dtype_b:
            raise contradiction_of(a, "blocks", i, "rows")
        layer.num_compared += len(x)
        layer.num_different += int(delta.any(axis=1).sum())
        worst = float(delta.max())
        layer.max_abs = max(layer.max_abs, worst)
        with np.errstate(all="ignore"):
            rms = np.sqrt(np.mean(x * x, axis=1))
            relative = delta.max(axis=1) / rms
        coarser = coarser_dtype(dtype_a, dtype_b)
        ulps = max_ulps(delta, x, y, coarser, np.nan_to_num(rms)[:, None])
        layer.max_ulps = max(layer.max_ulps, ulps)
        if np.isfinite(relative).any():
            layer.max_relative = max(layer.max_relative, float(np.nanmax(relative)))
