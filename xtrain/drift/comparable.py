"""May two records be compared at all, and what differs in how they were made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.errors import DriftError
from xtrain.drift.record_folder import Record
from xtrain.drift.values import FLOATS, coarser_dtype, narrow

# Where the record lies, or what it keeps, changes no number.
NOT_SETTINGS = ("tensors", "top_k", "op_steps", "num_tokens", "warm_up")


class Change(NamedTuple):
    """A setting that has two values; None where a record lacks it."""

    name: str
    a: Any
    b: Any


def changes(a: Record, b: Record) -> list[Change]:
    """Return what differs: environment first, then how the model was run, as "run.NAME"."""
    run_a, run_b = (
        {f"run.{k}": v for k, v in record.run.items() if k not in NOT_SETTINGS} for record in (a, b)
    )
    found = []
    for left, right in ((a.environment, b.environment), (run_a, run_b)):
        for name in [*left, *(name for name in right if name not in left)]:
            x, y = left.get(name), right.get(name)
            if name.startswith("weights.") and (name not in left or name not in right):
                continue  # records of version 1 do not say how weights lie in memory
            if x != y:
                if isinstance(x, list) and isinstance(y, list):  # of long lists, what differs
                    x, y = [v for v in x if v not in y], [v for v in y if v not in x]
                found.append(Change(name, x, y))
    return found


def why_not_comparable(a: Record, b: Record) -> tuple[str | None, bool]:
    """Return (the reason or None, whether op by op comparison makes sense all the same).

    Other weights in the same places still tell which op reads them first: a comparison is made,
    though its verdict is "not comparable".
    """
    reason = _inputs(a, b) or _structure(a, b)
    return (reason, False) if reason else (_weights(a, b), True)


def _inputs(a: Record, b: Record) -> str | None:
    prompts_a, prompts_b = a.contents["prompts"], b.contents["prompts"]
    if len(prompts_a) != len(prompts_b):
        return f"other prompts: A has {len(prompts_a)}, B has {len(prompts_b)}"
    for number, (x, y) in enumerate(zip(prompts_a, prompts_b, strict=True)):
        if x["tokens"] != y["tokens"]:
            return f"other prompts: the tokens of prompt {number} differ"
        marks = {x.get("xxh3_128"), y.get("xxh3_128")} - {None}
        if len(marks) > 1:
            return f"other inputs: those of prompt {number} differ"
    forward_a, forward_b = a.run["decode"] is None, b.run["decode"] is None
    if forward_a != forward_b:
        return "one record is a single forward, the other decodes"
    if not forward_a and a.run["num_tokens"] != b.run["num_tokens"]:
        return f"other lengths: A has {a.run['num_tokens']} tokens, B has {b.run['num_tokens']}"
    for name in ("sample_seed", "temperature"):
        sampled = "sample" in (a.run["decode"], b.run["decode"])
        if sampled and a.run[name] != b.run[name]:
            return f"tokens drawn otherwise: {name} {a.run[name]} and {b.run[name]}"
    return None


def _structure(a: Record, b: Record) -> str | None:
    weights_a, weights_b = _by_name(a), _by_name(b)
    for name in [*weights_a, *weights_b]:
        if name not in weights_a or name not in weights_b:
            lacking = "A" if name not in weights_a else "B"
            return f"other models: {lacking} has no weight {name}; --map OLD=NEW if it is renamed"
        x, y = weights_a[name]["shape"], weights_b[name]["shape"]
        if x != y:
            return f"other models: {name} is {x} in A and {y} in B"
    for x, y in zip(_logit_shapes(a), _logit_shapes(b), strict=False):
        if x != y:
            return f"other models: logits {list(x)} in A and {list(y)} in B"
    return None


def _logit_shapes(record: Record) -> list[tuple[int, ...]]:
    return [case.steps[0].logits()[0].shape for case in record.cases if case.steps]


def _weights(a: Record, b: Record) -> str | None:
    weights_a, weights_b = _by_name(a), _by_name(b)
    one_source = a.model.get("checkpoint") == b.model.get("checkpoint") is not None
    answers = {name: _same(weights_a[name], weights_b[name], one_source) for name in weights_a}
    different = [name for name, same in answers.items() if not same]
    if not different:
        return None
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    if False in answers.values():
        return f"other weights: {next(n for n in different if answers[n] is False)}{more}"
    dtypes = f"{weights_a[different[0]]['dtype']} in A and {weights_b[different[0]]['dtype']} in B"
    return (
        f"nobody can tell whether these weights are the same: {different[0]}{more}, {dtypes}, "
        "neither the other rounded; record both in one dtype, or one of them in fp32"
    )


def _same(x: dict[str, Any], y: dict[str, Any], one_source: bool) -> bool | None:
    """Return whether two weights hold the same numbers, those of one dtype rounded to the other.

    None: two roundings of something finer, which may or may not have been the same.
    one_source: whether both records name the same checkpoint.
    """
    dtypes = x["dtype"], y["dtype"]
    if x["dtype"] == y["dtype"]:
        same = x["xxh3_128"] == y["xxh3_128"]
        if same and x["samples"] != y["samples"]:
            raise _contradiction(x)
        return same
    if not set(dtypes) <= FLOATS.keys():
        return False
    left, right = (np.array(weight["samples"], np.float64) for weight in (x, y))
    if "rounded" not in x or "rounded" not in y:  # recorded before there were such hashes
        return _equal_rounded(left, right, coarser_dtype(*dtypes))
    for dtype in dtypes:
        mark_x, mark_y = _mark(x, dtype), _mark(y, dtype)
        if mark_x is not None and mark_x == mark_y:
            if "F64" not in dtypes and not _equal_rounded(left, right, dtype):
                raise _contradiction(x)
            return True
    if set(dtypes) != {"BF16", "F16"} or not _near(left, right):
        return False
    return True if one_source else None


def _mark(weight: dict[str, Any], dtype: str) -> str | None:
    """Return the hash of a weight in a dtype, with one NaN for all, where the record has it."""
    own = weight["xxh3_128"] if weight["dtype"] == dtype else None
    return weight["rounded"].get(dtype, own)


def _equal_rounded(x: NDArray[np.float64], y: NDArray[np.float64], dtype: str) -> bool:
    return bool(np.array_equal(narrow(x, dtype), narrow(y, dtype), equal_nan=True))


def _near(x: NDArray[np.float64], y: NDArray[np.float64]) -> bool:
    """Return whether numbers of bf16 and fp16 may be roundings of the same ones."""
    x, y = (np.clip(values, -65504, 65504) for values in (x, y))  # beyond it fp16 has infinity
    return bool(np.allclose(x, y, rtol=2.0**-8 + 2.0**-11, atol=2.0**-24, equal_nan=True))


def _contradiction(weight: dict[str, Any]) -> DriftError:
    return DriftError(
        f"the records contradict each other: {weight['name']} has equal bits and other samples; "
        "one of them was edited, record again"
    )


def _by_name(record: Record) -> dict[str, dict[str, Any]]:
    return {weight["name"]: weight for weight in record.model["weights"]}
