"""One model under two sets of names: by --map, by a prefix, by shape and bits where that is clear.

A wrapper puts `module.` before every name, another release calls `attn` `attention`. The names of b
become those of a, those of weights and those of modules; nothing else changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from xtrain.drift.errors import DriftError
from xtrain.drift.record_folder import Record

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
    return paths | {weight["name"] for weight in record.model["weights"]}


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
    here, there = (_weights(record) for record in (a, b))
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
    here, there = _weights(a), _weights(b)
    if len(here) != len(there) or set(here) == set(there):
        return []
    for dtype in (None, "BF16", "F16", "F32"):
        groups: dict[tuple[Hashable, str], tuple[list[str], list[str]]] = defaultdict(
            lambda: ([], [])
        )
        for side, weights in enumerate((here, there)):
            for name, weight in weights.items():
                groups[tuple(weight["shape"]), _mark(weight, dtype)][side].append(name)
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


def _mark(weight: Mapping[str, Any], dtype: str | None) -> str:
    own = weight["xxh3_128"]
    if dtype is None or weight["dtype"] == dtype:
        return f"{weight['dtype'] if dtype is None else dtype} {own}"
    return f"{dtype} {weight.get('rounded', {}).get(dtype, own)}"


def _weights(record: Record) -> dict[str, dict[str, Any]]:
    return {weight["name"]: weight for weight in record.model["weights"]}


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
