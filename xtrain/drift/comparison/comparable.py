"""May two records be compared: is it one model on the same inputs, and what differs in how it ran?

A wrapper puts `module.` before every name, another release calls `attn` `attention`. The names of b
become those of a, those of weights and those of modules, by --map, by a prefix, by shape and bits
where that is clear; nothing else changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.comparison.differences import contradiction
from xtrain.drift.recording.record_format import Record
from xtrain.drift.recording.tensors import FLOATS, coarser_dtype, narrow
from xtrain.drift.settings import DRAWING, MOVES_NOTHING, DriftError


class Change(NamedTuple):
    """A setting that has two values; None where a record lacks it."""

    name: str
    a: Any
    b: Any


def changes(a: Record, b: Record) -> list[Change]:
    """Return what differs: environment first, then how the model was run, as "run.NAME"."""
    run_a, run_b = (
        {f"run.{k}": v for k, v in record.run.items() if k not in MOVES_NOTHING}
        for record in (a, b)
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
    for name in DRAWING if "sample" in (a.run["decode"], b.run["decode"]) else ():
        if a.run[name] != b.run[name]:
            return f"tokens drawn otherwise: {name} {a.run[name]} and {b.run[name]}"
    return None


def _structure(a: Record, b: Record) -> str | None:
    weights_a, weights_b = a.weights, b.weights
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
    weights_a, weights_b = a.weights, b.weights
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
            raise _other_samples(x)
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
                raise _other_samples(x)
            return True
    if set(dtypes) != {"BF16", "F16"} or not _near(left, right):
        return False
    return True if one_source else None


def _mark(weight: Mapping[str, Any], dtype: str) -> str | None:
    """Return the hash of a weight in a dtype, with one NaN for all, where the record has it."""
    own = weight["xxh3_128"] if weight["dtype"] == dtype else None
    return weight.get("rounded", {}).get(dtype, own)


def _equal_rounded(x: NDArray[np.float64], y: NDArray[np.float64], dtype: str) -> bool:
    return bool(np.array_equal(narrow(x, dtype), narrow(y, dtype), equal_nan=True))


def _near(x: NDArray[np.float64], y: NDArray[np.float64]) -> bool:
    """Return whether numbers of bf16 and fp16 may be roundings of the same ones."""
    x, y = (np.clip(values, -65504, 65504) for values in (x, y))  # beyond it fp16 has infinity
    return bool(np.allclose(x, y, rtol=2.0**-8 + 2.0**-11, atol=2.0**-24, equal_nan=True))


def _other_samples(weight: dict[str, Any]) -> DriftError:
    return contradiction(f"{weight['name']} has equal bits and other samples")


# --- one model under two sets of names ------------------------------------------------------------

Rename = Callable[[str], str]


def by_flag(a: Record, b: Record, names: Mapping[str, str]) -> tuple[Record, Record]:
    """Return both records with OLD read as NEW wherever whole parts of a name are OLD.

    OLD with a dot at its end, or an empty NEW, is meant at the beginning of a name alone.

    Raises: DriftError for an OLD that neither has, and where two weights get one name.
    """
    for old, new in names.items():
        if not old and not new:
            raise DriftError("--map needs OLD=NEW, parts of the names of modules; got '='")
        rename = _renamer(old, new)
        known = [name for record in (a, b) for name in _all_names(record)]
        if all(rename(name) == name for name in known):
            raise DriftError(f"--map {old}={new}: neither record has a name with {old!r} in it")
        a, b = (record.renamed(rename, rename) for record in (a, b))
        for record in (a, b):
            weights = [weight["name"] for weight in record.model["weights"]]
            if twice := next((name for name in weights if weights.count(name) > 1), None):
                raise DriftError(f"--map {old}={new} calls two weights of {record.path} {twice}")
    return a, b


def _all_names(record: Record) -> set[str]:
    paths = {key.path for table in record.tables for key in table}
    return paths | record.weights.keys()


def _renamer(old: str, new: str) -> Rename:
    parts, others = ([part for part in name.split(".") if part] for name in (old, new))
    first_alone = old.endswith(".") or not others

    def rename(name: str) -> str:
        found: list[str] = []
        rest = name.split(".") if name else []
        if not parts:  # a prefix for those that lack it
            return name if rest[: len(others)] == others else ".".join([*others, *rest])
        while rest:
            if rest[: len(parts)] == parts and not (found and first_alone):
                found, rest = [*found, *others], rest[len(parts) :]
            else:
                found, rest = [*found, rest[0]], rest[1:]
        return ".".join(found)

    return rename


def by_weights(a: Record, b: Record) -> tuple[Record, list[tuple[str, str]]]:
    """Return b under a's names, and (name in b, name in a) of each weight that has another.

    b as it is where its names are a's, or where no mapping is clear.
    """
    pairs = _by_prefix(a, b) or _by_bits(a, b)
    changed = [(there, here) for here, there in pairs if here != there]
    if not changed:
        return b, []
    names, modules = {there: here for here, there in pairs}, _modules(pairs)

    def module(path: str) -> str:
        parts = path.split(".") if path else []
        rest: list[str] = []
        while parts and ".".join(parts) not in modules:
            rest.insert(0, parts.pop())
        return ".".join([*modules.get(".".join(parts), "").split("."), *rest]).strip(".")

    return b.renamed(names.__getitem__, module), changed


def _by_prefix(a: Record, b: Record) -> list[tuple[str, str]]:
    """Return (a's name, b's name) where one of them has the other's behind one prefix."""
    here, there = a.weights, b.weights
    for names, others, flipped in ((here, there, False), (there, here, True)):
        for prefix in {
            other[: -len(name)]
            for name in list(names)[:1]
            for other in others
            if other.endswith(f".{name}")
        }:
            if {prefix + name for name in names} == set(others):
                pairs = [(name, prefix + name) for name in names]
                return [pair[::-1] for pair in pairs] if flipped else pairs
    return []


def _by_bits(a: Record, b: Record) -> list[tuple[str, str]]:
    """Return (a's name, b's name) of all weights, each of the other's shape and bits; else none.

    Of several alike the one in the module that the others say, then the k-th is the k-th. A last
    one whose bits have no partner belongs to the last one of its shape.
    """
    here, there = a.weights, b.weights
    if len(here) != len(there) or set(here) == set(there):
        return []
    for dtype in (None, "BF16", "F16", "F32"):
        groups: dict[tuple[Hashable, Hashable], tuple[list[str], list[str]]] = defaultdict(
            lambda: ([], [])
        )
        for side, weights in enumerate((here, there)):
            for name, weight in weights.items():
                mark = weight["xxh3_128"] if dtype is None else _mark(weight, dtype)
                name_of = dtype or weight["dtype"], mark or weight["xxh3_128"]
                groups[tuple(weight["shape"]), name_of][side].append(name)
        if sum(len(x) == len(y) for x, y in groups.values()) * 2 > len(groups):
            break
    else:
        return []
    rest: dict[Hashable, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    pairs: list[tuple[str, str]] = []
    several = []
    for (shape, _), (left, right) in groups.items():
        if len(left) != len(right):
            rest[shape][0].extend(left)
            rest[shape][1].extend(right)
        elif len(left) == 1:
            pairs.append((left[0], right[0]))
        else:
            several.append((left, right))
    modules = _modules(pairs)
    for left, right in several:
        for name in [n for n in right if _parent(n) in modules]:
            fitting = [n for n in left if _parent(n) == modules[_parent(name)]]
            if len(fitting) == 1:
                left.remove(fitting[0])
                right.remove(name)
                pairs.append((fitting[0], name))
        pairs += zip(left, right, strict=True)
    if any(len(left) != 1 or len(right) != 1 for left, right in rest.values()):
        return []
    return pairs + [(left[0], right[0]) for left, right in rest.values()]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _modules(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return b's module -> a's, as far as the names of weights agree about it."""
    found: dict[str, set[str]] = defaultdict(set)
    for here, there in pairs:
        x, y = here.split(".")[:-1], there.split(".")[:-1]
        found[".".join(y)].add(".".join(x))
        while x and y and (x[-1] == y[-1] or len(x) == len(y)):
            x, y = x[:-1], y[:-1]
            found[".".join(y)].add(".".join(x))
    return {there: here.pop() for there, here in found.items() if len(here) == 1}
