"""The explanation as text: tables, then the graph line by line, as traced and as compiled."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tabulate import tabulate

from xtrain.explain.capture import Explanation, GraphRecord, first_line
from xtrain.explain.changes import rows
from xtrain.explain.snapshot import Node, value_text
from xtrain.passes.graph import short_place
from xtrain.passes.run import PassResult

WIDTH = 118  # of a line of the short form


def as_text(explanation: Explanation, *, whole_graph: bool = False) -> str:
    """Return the report; the graph of one block of each kind, or of the whole model."""
    parts = [
        headline(explanation),
        _sites(explanation),
        _passes(explanation),
        _refusals(explanation),
        "\n".join(remarks(explanation)),
    ]
    several = len(explanation.graphs) > 1
    for number, record in enumerate(explanation.graphs, start=1):
        name = f"graph {number}" if several else "graph"
        if whole_graph:
            parts.append("\n".join([_graph_title(name, record), *_lines(record)]))
        elif record.sites or not several:
            parts += _example_blocks(name, record)
        else:
            parts.append(f"{_size(name, record)}, no residual site")
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(explanation: Explanation) -> str:
    """Say what was looked at, and how."""
    import torch

    subject, options = explanation.subject, explanation.options
    facts = [f"{subject.num_parameters / 1e6:.3g} M parameters", *subject.facts]
    bound = inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs)
    given = ", ".join(f"{n} {_argument(v)}".strip() for n, v in bound.arguments.items())
    chosen = ", ".join(f"{name} {options[name]}" for name in OPTIONS if name in options)
    how = f"torch {torch.__version__}, {options['backend']} on cpu"
    return (
        f"{subject.title}: {', '.join(facts)}\n"
        f"one training forward of {given or 'no input'}: {chosen}; {how}"
    )


def _argument(value: Any) -> str:
    return value_text(value) or (str(value) if isinstance(value, bool | int) else "")


OPTIONS = ("dropout", "existing", "kernels", "logits", "dtype")


def site_rows(explanation: Explanation) -> list[dict[str, Any]]:
    """Return one row a site: what the report says of it, and where it stands in which graph."""
    by_name = {site.name: site for site in explanation.report.sites}
    found: dict[str, dict[str, Any]] = {}
    for number, record in enumerate(explanation.graphs, start=1):
        traced = record.before.by_key()
        for mark in record.sites:
            for name in mark.names or [f"{mark.kind}, uncovered"]:
                site = by_name.get(name)
                row = {
                    "name": name,
                    "layer": site.layer if site else None,
                    "site": site.site if site else mark.kind,
                    "dropout": mark.covered_by or "nobody",
                    "reason": mark.reason,
                    "value": traced[mark.add].value if mark.add in traced else "",
                    "graph": number,
                    "add": mark.add,
                    "own": mark.own,
                    "mask": mark.dropout,
                }
                found.setdefault(name if site else f"{number}/{mark.add}", row)
    for name, site in by_name.items():  # of a graph whose sites could not be told apart
        if name not in found:
            found[name] = dict(
                name=name, layer=site.layer, site=site.site, dropout=site.dropout, reason="",
                value="", graph=0, add="", own="", mask="",
            )  # fmt: skip
    return sorted(found.values(), key=lambda r: (r["layer"] is None, r["layer"] or 0))


def _sites(explanation: Explanation) -> str:
    table = [
        (row["name"], row["layer"], row["dropout"], row["value"], row["add"], row["mask"] or "-")
        for row in site_rows(explanation)
    ]
    if not table and not explanation.options["dropout"]:
        return "residual sites: none, as dropout is 0; --dropout P shows them"
    headers = ["residual site", "layer", "dropout by", "value", "traced add", "mask drawn in"]
    return tabulate(table, headers, tablefmt="simple", missingval="-")


def pass_totals(explanation: Explanation) -> list[PassResult]:
    """Return one result a pass, summed over the graphs, in running order."""
    totals: dict[str, PassResult] = {}
    for result in explanation.report.passes:
        total = totals.setdefault(result.name, PassResult(name=result.name))
        for name in (
            "num_matched",
            "num_replaced",
            "time_ms",
            "num_nodes_before",
            "num_nodes_after",
        ):
            setattr(total, name, getattr(total, name) + getattr(result, name))
        for counts, more in ((total.forms, result.forms), (total.skipped, result.skipped)):
            for reason, count in more.items():
                counts[reason] = counts.get(reason, 0) + count
    return list(totals.values())


def _passes(explanation: Explanation) -> str:
    table = [
        (
            result.name,
            result.num_matched,
            result.num_replaced,
            f"{result.num_nodes_before} -> {result.num_nodes_after}",
            f"{result.time_ms:.1f}",
            "; ".join(result.forms) or "-",
        )
        for result in pass_totals(explanation)
    ]
    if not table:
        return "passes: none ran"
    headers = ["pass", "matched", "replaced", "nodes", "time (ms)", "form"]
    return tabulate(table, headers, tablefmt="simple", disable_numparse=True)


def refusals(explanation: Explanation) -> list[tuple[str, int, str]]:
    """Return (pass, how many matches it left alone, why)."""
    return [
        (result.name, count, reason)
        for result in pass_totals(explanation)
        for reason, count in result.skipped.items()
    ]


def _refusals(explanation: Explanation) -> str:
    found = refusals(explanation)
    if not found:
        return "left alone: nothing that a pass matched"
    table = [f"  {count} x {name}: {reason}" for name, count, reason in found]
    return "\n".join(["left alone:", *table])


def remarks(explanation: Explanation) -> list[str]:
    """Return what is said in a line each: breaks, unseeded dropout, notes, strict mode."""
    report = explanation.report
    lines = counted(
        f"graph break at {short_place(place)}: {first_line(reason)}"
        for place, reason in explanation.graph_breaks
    )
    if not lines:
        count = len(explanation.graphs)
        lines.append("no graph break" if count == 1 else f"no graph break; {count} graphs")
    lines += [f"uncovered: {line}" for line in report.uncovered]
    unseeded = (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", line) for line in report.unseeded)
    lines += counted(f"unseeded: {line}" for line in unseeded) or ["no unseeded dropout"]
    lines += [f"note: {line}" for line in report.notes]
    if report.verification is not None:
        lines.append(str(report.verification))
    verdict = f"would raise: {explanation.refusal}" if explanation.refusal else "accepts the model"
    return [*lines, f"strict mode {verdict}"]


def counted(lines: Iterable[str]) -> list[str]:
    """Return each line once, with how often it came."""
    return [f"{x} ({n} times)" if n > 1 else x for x, n in Counter(lines).items()]


# --- graphs --------------------------------------------------------------------------------------


LEGEND = "- traced, + compiled, ~ reads something else now"


def _size(name: str, record: GraphRecord) -> str:
    count = record.before.num_parameters
    return (
        f"{name}, {len(record.before.nodes)} -> {len(record.after.nodes)} ops over {count} "
        "parameters and buffers"
    )


def _graph_title(name: str, record: GraphRecord) -> str:
    return f"{_size(name, record)}; {LEGEND}"


def _example_blocks(name: str, record: GraphRecord) -> Iterator[str]:
    """The first block of each list of blocks, shortened to a screen's width."""
    firsts: dict[str, str] = {}
    for node in record.before.nodes:
        if node.block:
            firsts.setdefault(node.block.rpartition(".")[0], node.block)
    if not firsts:
        yield "\n".join([_graph_title(name, record), *_lines(record)])
    for block in firsts.values():
        title = f"{block} in the {name} (--graph prints all); {LEGEND}"
        lines = [_shortened(line.replace(f"{block}.", ".")) for line in _lines(record, block)]
        yield "\n".join([title, *lines])


def _shortened(line: str) -> str:
    code, mark, note = line.partition("  # ")
    room = WIDTH - len(mark) - len(note)
    code = code if len(code) <= room else f"{code[: max(room - 3, 40)]}..."
    return code + mark + note


def _lines(record: GraphRecord, block: str | None = None) -> Iterator[str]:
    """One line an op, under its module's path; of one block only, what went together in short."""
    notes = node_notes(record)
    module: str | None = None

    def under_heading(sign: str, nodes: list[Node]) -> Iterator[str]:
        nonlocal module
        for node in nodes:
            if node.module != module:
                module = node.module
                yield f"  {module or 'the model itself'}:"
            yield _line(sign, node, notes["-" if sign == "-" else "+"].get(node.key, ""))

    def changed(removed: list[Node], added: list[Node]) -> Iterator[str]:
        nonlocal module
        if block is None or len(removed) < 3:
            yield from under_heading("-", removed)
        else:
            if removed[0].module != module:
                module = removed[0].module
                yield f"  {module or 'the model itself'}:"
            yield from _in_short(removed, notes["-"])
        yield from under_heading("+", added)

    belongs = _membership(record, block)
    removed: list[Node] = []
    added: list[Node] = []
    for left, right in rows(record.before, record.after):
        left = left if belongs(left) else None
        right = right if belongs(right) else None
        if left is not None and right is not None and left.key == right.key:
            yield from changed(removed, added)
            removed, added = [], []
            yield from under_heading(" " if left.text == right.text else "~", [right])
            continue
        removed += [left] if left is not None else []
        added += [right] if right is not None else []
    yield from changed(removed, added)


def _membership(record: GraphRecord, block: str | None) -> Callable[[Node | None], bool]:
    """Say which ops belong to a block: its own, and those that draw the masks of its sites.

    The last add of a block can be fused with the norm that begins the next.
    """
    traced = record.before.by_key()
    masks = {m.dropout for m in record.sites if m.add in traced and traced[m.add].block == block}
    return lambda node: (
        node is not None and (block is None or node.block == block or node.key in masks)
    )


def _in_short(removed: list[Node], notes: dict[str, str]) -> Iterator[str]:
    """Name the functions of ops that went together, the passes and sites behind them."""
    for start in range(0, len(removed), 8):
        part = removed[start : start + 8]
        said = dict.fromkeys(t for n in part for t in notes.get(n.key, "").split("; ") if t)
        yield f"-   {', '.join(n.target for n in part)}  # {'; '.join(said)}"


def _line(sign: str, node: Node, note: str) -> str:
    call = node.text if node.target == node.text else f"{node.name} = {node.text}"
    if node.target in ("input", "output"):
        call = f"{node.target} {node.text}"
    value = f": {node.value}" if node.value else ""
    return f"{sign}   {'  ' * node.depth}{call}{value}" + (f"  # {note}" if note else "")


def node_notes(record: GraphRecord) -> dict[str, dict[str, str]]:
    """Return sign -> key -> what to say of a traced ("-") or a compiled ("+") op."""
    notes: dict[str, dict[str, str]] = {
        "-": dict(record.changes.removed),
        "+": dict(record.changes.added),
    }

    def add(sign: str, key: str, text: str) -> None:
        if key:
            notes[sign][key] = f"{notes[sign][key]}; {text}" if key in notes[sign] else text

    for mark in record.sites:
        add("-", mark.add, f"site {mark.label}")
        if mark.dropout:
            add("+", mark.dropout, f"site {mark.label}")
        else:
            add("+", mark.add, f"site {mark.label}")
        if mark.own:
            add("-", mark.own, f"the model's own dropout of {mark.label}")
            add("+", mark.own, f"the model's own dropout of {mark.label}")
    return notes
