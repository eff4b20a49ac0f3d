"""Which op of one forward is which op of another: by what it computes from, and what comes out.

1. Two forwards of one structure (the same ops of the same operands in one order) belong together
   row by row, whatever their numbers: another device, dtype, thread count.
2. Else what is equal belongs together: results of the same bits in one module, of the same operands
   before others. An op that hands on what it was given (h * 1.0) so takes no partner from its
   neighbours.
3. What is left follows the data: from operands that belong together to the op of that name that
   reads them. What an op without a partner has read is what its readers read.
4. Then the order within a module, and results of the same bits and operands in another module or
   under another name.

But for equal bits, an op of another name or another number of operands is never a partner. What
finds none is listed, and never called a difference. Ops are looked up, not held against each other:
tens of thousands of them take a second.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from xtrain.drift.recording.record_format import (
    FIRST_WEIGHT,
    UNKNOWN,
    Columns,
    Formula,
    OpKey,
    Record,
    Step,
)

FAR = 64  # results looked at behind an op without a partner
NEAR = 8  # ops of a name that may be the one whose operands have no partner
MANY = 1000  # ops of a module that are put in order together
EITHER_ORDER = ("aten.add", "aten.mul")  # of two operands

Origin = int | str  # a row, INPUT or UNKNOWN, or a weight's name
Mark = Callable[[int, int], Hashable]


@dataclass(frozen=True)
class Alignment:
    """Rows of two tables of ops that belong together."""

    pairs: NDArray[np.int64]  # [n, 2], in the order of a
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], num_a: int, num_b: int) -> Alignment:
        """Return the alignment of tables of some lengths; what is in no pair is one side's."""
        used_a, used_b = {i for i, _ in pairs}, {j for _, j in pairs}
        return cls(
            np.array(pairs, np.int64).reshape(-1, 2),
            tuple(i for i in range(num_a) if i not in used_a),
            tuple(j for j in range(num_b) if j not in used_b),
        )


@dataclass(frozen=True, eq=False)
class Ops:
    """One forward, as far as it decides about partners."""

    keys: Sequence[OpKey]
    formulas: Sequence[Formula] | None
    weights: Sequence[str]  # names, by the numbers that operands have
    values: Sequence[Hashable]  # equal where the bits are
    shapes: Sequence[Hashable]

    def operands(self, row: int) -> list[Origin]:
        """Return what an op computes from."""
        if self.formulas is None:
            return []
        return [
            self.weights[FIRST_WEIGHT - origin] if origin <= FIRST_WEIGHT else origin
            for origin in self.formulas[row].operands
        ]


def _rows(array: NDArray) -> list[bytes]:
    data, width = array.tobytes(), array.shape[1] * array.itemsize
    return [data[at : at + width] for at in range(0, len(data), width)]


def pair(a: Ops, b: Ops, *, any_shape: bool = False) -> Alignment:
    """Return which ops belong together.

    any_shape: whether partners may have other shapes, as of other batches or padding.
    """
    if _same_structure(a, b):
        rows = np.arange(len(a.keys))
        return Alignment(np.stack([rows, rows], axis=1), (), ())
    return _Search(a, b, any_shape).alignment()


class Partners:
    """The pairs of each forward of two records; found once where the next has the same form."""

    def __init__(self, a: Record, b: Record, *, same_layout: bool):
        self.any_shape = not same_layout
        self.weights = [[weight["name"] for weight in r.model["weights"]] for r in (a, b)]
        marks = [{w["name"]: w["xxh3_128"] for w in r.model["weights"]} for r in (a, b)]
        self.other_weights = {name for name in marks[0] if marks[0][name] != marks[1].get(name)}
        self.found: dict[tuple[int, int], tuple[Alignment, NDArray[np.bool_]]] = {}

    def __call__(self, a: Step, b: Step) -> Alignment:
        """Return which ops of two forwards belong together."""
        tables = a.info["ops_table"], b.info["ops_table"]
        columns = a.columns(), b.columns()
        if tables in self.found:
            alignment, equal = self.found[tables]
            if (_equal_bits(alignment, *columns) == equal).all():
                return alignment
        alignment = pair(*self._ops(a, b), any_shape=self.any_shape)
        self.found[tables] = alignment, _equal_bits(alignment, *columns)
        return alignment

    def _ops(self, a: Step, b: Step) -> list[Ops]:
        return [
            Ops(step.keys(), step.formulas(), weights, _rows(table.hash), _rows(table.shape))
            for step, weights, table in zip(
                (a, b), self.weights, (a.columns(), b.columns()), strict=True
            )
        ]

    def cause(self, a: Step, b: Step, alignment: Alignment, i: int, j: int) -> str:
        """Return why the results of two partners differ, as far as their formulas tell."""
        left, right = self._ops(a, b)
        return cause(left, right, alignment, i, j, self.other_weights)


def _equal_bits(alignment: Alignment, a: Columns, b: Columns) -> NDArray[np.bool_]:
    i, j = alignment.pairs.T
    return (a.hash[i] == b.hash[j]).all(axis=1)


def _names(a: Ops, b: Ops) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return each op's (path, op); modules that only one side has are all called the same."""
    shared = {key.path for key in a.keys} & {key.path for key in b.keys}
    left, right = (
        [(key.path if key.path in shared else "?", key.op) for key in ops.keys] for ops in (a, b)
    )
    return left, right


def _same_structure(a: Ops, b: Ops) -> bool:
    left, right = _names(a, b)
    if left != right:
        return False
    if a.formulas is None or b.formulas is None:
        return [key.path for key in a.keys] == [key.path for key in b.keys]
    return all(a.operands(row) == b.operands(row) for row in range(len(a.keys)))


class _Search:
    """The pairs found so far: partner[0][i] of a's row i, partner[1][j] of b's, -1 for none."""

    def __init__(self, a: Ops, b: Ops, any_shape: bool):
        self.sides, self.any_shape = (a, b), any_shape
        self.names = _names(a, b)
        self.recorded = a.formulas is not None and b.formulas is not None
        self.operands = tuple([ops.operands(i) for i in range(len(ops.keys))] for ops in (a, b))
        self.partner = [-1] * len(a.keys), [-1] * len(b.keys)
        self.left = Counter(self.names[0]), Counter(self.names[1])  # without a partner, by name
        self.results = tuple(
            [(value, key.dtype) for value, key in zip(ops.values, ops.keys, strict=True)]
            for ops in (a, b)
        )
        self.common = set(self.results[0]) & set(self.results[1])
        # of a what reads a row; of b what has a result, what reads an operand, what has a name
        self.readers_of: dict[Origin, list[int]] = defaultdict(list)
        self.with_result: dict[Hashable, list[int]] = defaultdict(list)
        self.reading: dict[Hashable, list[int]] = defaultdict(list)
        self.named: dict[Hashable, deque[int]] = defaultdict(deque)
        for i, origins in enumerate(self.operands[0]):
            for origin in dict.fromkeys(origins):
                self.readers_of[origin].append(i)
        for j, origins in enumerate(self.operands[1]):
            self.with_result[self.results[1][j]].append(j)
            self.named[self.names[1][j]].append(j)
            for origin in dict.fromkeys(origins):
                self.reading[origin, self.names[1][j]].append(j)

    def alignment(self) -> Alignment:
        """Find partners in the order of the module's docstring."""
        marks = self._marks()
        for mark in marks[:3] if self.recorded else marks[2:3]:
            self._pair_equal(mark)
        self._follow(range(len(self.partner[0])))
        for alike in (True, False):  # modules whose rest is the same, before the others
            for rows_a, rows_b in self._modules():
                self._follow(self._in_order(rows_a, rows_b, alike))
        for mark in marks[3:] if self.recorded else ():
            self._pair_equal(mark)
        rows = [(i, j) for i, j in enumerate(self.partner[0]) if j >= 0]
        return Alignment.of(rows, *map(len, self.partner))

    def _pair(self, i: int, j: int) -> None:
        self.partner[0][i], self.partner[1][j] = j, i
        self.left[0][self.names[0][i]] -= 1
        self.left[1][self.names[1][j]] -= 1

    def _arguments(self, side: int, row: int) -> str:
        formulas = self.sides[side].formulas
        return formulas[row].arguments if formulas is not None else ""

    # --- What is equal ---------------------------------------------------------------------------

    def _marks(self) -> list[Mark]:
        """Return what is equal for equal ops, the most telling first: a function of (side, row)."""
        results, names = self.results, self.names
        of = [
            [
                tuple(results[side][o] if isinstance(o, int) and o >= 0 else o for o in origins)
                for origins in self.operands[side]
            ]
            for side in (0, 1)
        ]
        return [
            lambda s, i: (results[s][i], names[s][i], of[s][i], self._arguments(s, i)),
            lambda s, i: (results[s][i], names[s][i], of[s][i]),
            lambda s, i: (results[s][i], names[s][i]),
            lambda s, i: (results[s][i], names[s][i][1], of[s][i]),  # in another module
            lambda s, i: (results[s][i], of[s][i]),  # under another name
        ]

    def _pair_equal(self, mark: Mark) -> None:
        """Pair results of the same bits by a mark; of several the k-th belongs to the k-th."""
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for side in (1, 0):
            for row, other in enumerate(self.partner[side]):
                if other >= 0 or self.results[side][row] not in self.common:
                    continue
                if side == 1:
                    waiting[mark(1, row)].append(row)
                elif there := waiting.get(mark(0, row)):
                    self._pair(row, there.popleft())

    # --- Along the data --------------------------------------------------------------------------

    def _follow(self, rows: Iterable[int]) -> None:
        """Pair those of some rows of a that read the same: the certain first, in a's order.

        Certain: of known operands. Likely: of what stands behind an op without a partner. Last:
        where a module has more ops of that name on one side, those with other arguments.
        """
        if not self.recorded:
            return
        first = sorted({i for i in rows if self.partner[0][i] < 0})
        stages = first, list(first), list(first)
        while (stage := next((n for n, heap in enumerate(stages) if heap), None)) is not None:
            i = heapq.heappop(stages[stage])
            j = self._same_reader(i, stage) if self.partner[0][i] < 0 else None
            if j is None:
                continue
            self._pair(i, j)
            for reader in self._unpaired_readers(i):
                for heap in stages:
                    heapq.heappush(heap, reader)

    def _unpaired_readers(self, i: int) -> Iterator[int]:
        return (row for row in self.readers_of.get(i, ()) if self.partner[0][row] < 0)

    def _same_reader(self, i: int, stage: int) -> int | None:
        """Return b's op of a's name that reads the same, None where there is none."""
        name, strict = self.names[0][i], stage == 0
        others = stage == 2 or self.left[0][name] == self.left[1][name]
        found = None
        for j in self._candidates(i, strict):
            if self.partner[1][j] < 0 and self._fits(i, j) and self._reads_the_same(i, j, strict):
                if self._arguments(0, i) == self._arguments(1, j):
                    return j
                found = j if found is None and others else found
        return found

    def _candidates(self, i: int, strict: bool) -> Iterator[int]:
        """Yield rows of b that read something that i reads, and the next ones of its name."""
        name = self.names[0][i]
        for origin in dict.fromkeys(self.operands[0][i]):
            there: list[Origin] = [] if origin == UNKNOWN else [origin]
            if isinstance(origin, int) and origin >= 0:
                there = [*self.with_result.get(self.results[0][origin], ())[:FAR]]
                if self.partner[0][origin] >= 0:
                    there.append(self.partner[0][origin])
            for other in there:
                yield from self.reading.get((other, name), ())
        waiting = self.named.get(name)
        while waiting and self.partner[1][waiting[0]] >= 0:
            waiting.popleft()
        if waiting and not strict:
            yield from list(islice(waiting, NEAR))

    def _fits(self, i: int, j: int) -> bool:
        return self.any_shape or self.sides[0].shapes[i] == self.sides[1].shapes[j]

    def _reads_the_same(self, i: int, j: int, strict: bool) -> bool:
        """Return whether all operands belong together, as far as they have partners.

        strict: all have. Else what stands behind those without one, and one that has.
        """
        left, right = self.operands[0][i], self.operands[1][j]
        if len(left) != len(right):
            return False
        orders = [right]
        if len(right) == 2 and self.names[0][i][1] in EITHER_ORDER:
            orders.append(right[::-1])
        for order in orders:
            certain = [self._same(x, y) for x, y in zip(left, order, strict=True)]
            if all(certain):
                return True
            if strict or len(left) > 1 and not any(certain):
                continue
            operands = zip(left, order, certain, strict=True)
            if all(same or self._behind(0, x) & self._behind(1, y) for x, y, same in operands):
                return True
        return False

    def _same(self, x: Origin, y: Origin) -> bool:
        """Return whether two operands belong together, or have equal bits."""
        if isinstance(x, str) or isinstance(y, str) or x < 0 or y < 0:
            return x == y
        return self.partner[0][x] == y or self.results[0][x] == self.results[1][y]

    def _behind(self, side: int, origin: Origin) -> set[Hashable]:
        """Return what an operand stands for: itself, else what the op without partner has read."""
        found: set[Hashable] = set()
        seen, waiting = {origin}, deque([origin])
        while waiting and len(seen) < FAR:
            row = waiting.popleft()
            if isinstance(row, str) or row < 0:
                found |= {row} - {UNKNOWN}
                continue
            known: set[Hashable] = {*({self.results[side][row]} & self.common)}
            if (other := self.partner[side][row]) >= 0:
                known.add(other if side else row)
            found |= known
            fresh = [o for o in self.operands[side][row] if o not in seen] if not known else []
            seen.update(fresh)
            waiting.extend(fresh)
        return found

    # --- By place --------------------------------------------------------------------------------

    def _modules(self) -> list[tuple[list[int], list[int]]]:
        """Return the rows without a partner of each module that both sides have some of."""
        groups: tuple[dict[str, list[int]], ...] = ({}, {})
        for side in (0, 1):
            for row, other in enumerate(self.partner[side]):
                if other < 0:
                    groups[side].setdefault(self.names[side][row][0], []).append(row)
        return [(rows, groups[1][path]) for path, rows in groups[0].items() if path in groups[1]]

    def _in_order(self, rows_a: list[int], rows_b: list[int], alike: bool) -> list[int]:
        """Pair what is left of a module by its order, and return what may now find a partner.

        alike: only where the rest of the module is the same on both sides.
        """
        rows_a, rows_b = (
            [row for row in rows if self.partner[side][row] < 0]
            for side, rows in enumerate((rows_a, rows_b))
        )
        forms_a, forms_b = (
            [(*self.names[side][row], len(self.operands[side][row])) for row in rows]
            for side, rows in enumerate((rows_a, rows_b))
        )
        found = []
        if alike and forms_a == forms_b:
            found = [(i, j) for i, j in zip(rows_a, rows_b, strict=True) if self._fits(i, j)]
        elif not alike:
            found = [
                (rows_a[x], rows_b[y])
                for x, y in common_order(forms_a, forms_b)
                if self._fits(rows_a[x], rows_b[y]) and not self._contradicts(rows_a[x], rows_b[y])
            ]
        for i, j in found:
            self._pair(i, j)
        return [reader for i, _ in found for reader in self._unpaired_readers(i)]

    def _contradicts(self, i: int, j: int) -> bool:
        """Return whether two ops read nothing in common, though all they read is known."""
        left, right = (
            set().union(*(self._behind(side, o) for o in self.operands[side][row]))
            for side, row in ((0, i), (1, j))
        )
        return bool(left and right) and not left & right


def common_order(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of a common order of two lists; of long ones beginning, end, then the k-th.

    Of long lists a longest one would take the product of their lengths.
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    found = [(i, i) for i in range(start)]
    rest_a, rest_b = a[start : len(a) - end], b[start : len(b) - end]
    if max(len(rest_a), len(rest_b)) <= MANY:
        blocks = SequenceMatcher(None, rest_a, rest_b, autojunk=False).get_matching_blocks()
        inner = [(m.a + k, m.b + k) for m in blocks for k in range(m.size)]
    else:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for y, item in enumerate(rest_b):
            waiting[item].append(y)
        inner = [(x, waiting[item].popleft()) for x, item in enumerate(rest_a) if waiting[item]]
    found += [(start + x, start + y) for x, y in inner]
    return found + [(len(a) - k, len(b) - k) for k in range(end, 0, -1)]


def cause(
    a: Ops, b: Ops, alignment: Alignment, i: int, j: int, other_weights: Collection[str]
) -> str:
    """Return why the results of two ops that belong together differ, "" where it is not known.

    other_weights: the names of those whose bits differ.
    """
    if a.formulas is None or b.formulas is None:
        return ""
    words = a.formulas[i].arguments, b.formulas[j].arguments
    if words[0] != words[1]:
        return f"its arguments are {words[0] or 'none'} in A, {words[1] or 'none'} in B"
    partner = dict(alignment.pairs.tolist())
    alone = set(alignment.only_a), set(alignment.only_b)
    equal = True
    for x, y in zip(a.operands(i), b.operands(j), strict=False):
        if isinstance(x, str) or isinstance(y, str) or x < 0 or y < 0:
            if x == y and x in other_weights:
                return f"it reads {x}, which differs"
            equal &= x == y and x != UNKNOWN
            continue
        for side, ops, row in (("A", a, x), ("B", b, y)):
            if row in alone[side == "B"]:
                key = ops.keys[row]
                return f"it reads {key.op} of {key.path or 'the model'}, which {side} alone has"
        equal &= a.values[x] == b.values[y]
        if partner.get(x) != y and a.values[x] != b.values[y]:
            key, other = a.keys[x], b.keys[y]
            return (
                f"it reads {key.op} of {key.path or 'the model'} in A, "
                f"{other.op} of {other.path or 'the model'} in B"
            )
    return "all that it reads is equal" if equal else ""
