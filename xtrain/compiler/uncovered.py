"""Say where a residual site gets no dropout, or may be, why, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

from xtrain.compiler.graph_breaks import breaks_said
from xtrain.compiler.report import SumLine
from xtrain.compiler.seeds import readable_path
from xtrain.compiler.session import Session
from xtrain.compiler.settled import line_of, plain_path
from xtrain.passes.graph import short_place
from xtrain.passes.sites.insert_residual_dropout import InsertResult
from xtrain.passes.sites.program import LIBRARY_OP
from xtrain.passes.sites.sum_account import HANDED_ON, IN_AN_OP, OPAQUE, SumEntry

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
_PER_BLOCK = (
    "Under compile_blocks what lies outside the blocks is in no graph (use xtrain.compile), nor "
    "are layers past Dynamo's recompile_limit, where something other than weights differs between "
    "them (TORCH_LOGS=recompiles says what; a key-value cache may: use_cache=False)"
)
_SETTLE = (
    "Say what it is: sums={{{place!r}: 'drop'}} puts dropout on the addend that is no skip (of two "
    "such, the last), 'leave' leaves the sum alone"
)


def uncovered_sites(inserted: InsertResult) -> list[str]:
    """Return a line for each site of a graph that nobody's dropout covers."""
    lines = [
        f"{slot.kind} in {readable_path(slot.path)}: {slot.reason}"
        for slot in inserted.slots
        if not slot.covered_by
    ]
    return list(dict.fromkeys(lines))


def counted(entries: Iterable[SumEntry]) -> list[SumLine]:
    """Return the account as reports keep it: equal verdicts by one rule in one line."""
    counts = Counter(
        (e.verdict, e.seen if e.verdict == "unexplained" else e.rule, e.settled) for e in entries
    )
    return [SumLine(v, rule, n, settled) for (v, rule, settled), n in counts.items()]


def unexplained(entry: SumEntry) -> str:
    """Return a line for a sum that may be a residual site: what was seen, and how to settle it."""
    add = entry.add
    place = plain_path(add) or short_place(line_of(add))
    if entry.rule == OPAQUE:
        return (
            f"the op at {place_of(add)} takes and returns a stream, and {entry.seen}: it may hold "
            f"a residual sum. Write the sum outside of it, or say that it holds none: "
            f"sums={{{place!r}: 'leave'}}"
        )
    if entry.rule == HANDED_ON:
        return (
            f"the value at {place_of(add)} was dropped as a branch that its block returns beside "
            "the stream, and no code adds it to that stream: use xtrain.compile, whose graph shows "
            "what it is"
        )
    if entry.rule == IN_AN_OP:
        return (
            f"the body of {add.meta[LIBRARY_OP]} adds at {place_of(add)}, where no pass can put "
            f"dropout: {entry.seen}. Write the sum outside of the op, or say that it is to have "
            f"none: sums={{{place!r}: 'leave'}}"
        )
    return (
        f"the add at {place_of(add)} may be a residual site: {entry.seen}. "
        f"{_SETTLE.format(place=place)}"
    )


def left_to_eager(entry: SumEntry) -> str:
    """Return a line for a residual sum that no dropout reached: no graph shows the whole of it."""
    add = entry.add
    where = (
        "ran outside of the compiled graphs"
        if "place" in add.meta
        else ("gets a branch and a stream from different graphs")
    )
    return f"the add at {place_of(add)} {where}: {entry.seen}"


def refusal(lines: list[str], session: Session) -> str:
    """Return the message of the error that strict mode raises for these lines."""
    cause = cause_said(session)
    advice = "strict=False trains without dropout there, and lists it in the report"
    return (
        f"a residual site gets no dropout: {'; '.join(lines)}. {f'{cause}. ' * bool(cause)}"
        f"{advice}.{session.failures_said()}"
    )


def cause_said(session: Session) -> str:
    """Return why code of a model was left to eager, as far as that is known, "" if it is not."""
    cause = breaks_said(session.num_breaks_before)
    if cause:
        return cause + " (TORCH_LOGS=graph_breaks shows where a graph broke)"
    return _PER_BLOCK if session.per_block else ""


def place_of(node: fx.Node) -> str:
    """Return the file, line and code that a node was traced from, its name where none is known."""
    if "place" in node.meta:
        return str(node.meta["place"])
    found = list(_LINE.finditer(str(node.meta.get("stack_trace", ""))))
    if not found:
        return node.name
    last = found[-1]
    return f"{short_place(last['file'])}:{last['line']}, `{last['code'].strip()}`"
