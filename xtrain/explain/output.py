"""What is said of an explanation: tables, and these as text, as plain values or as one page."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import xtrain
from xtrain.explain.capture import Explanation
from xtrain.explain.graphs import GraphRecord, Node, rows, value_text
from xtrain.passes.run import PassResult
from xtrain.report import render

SCHEMA = 1  # of the values for machines; goes up when a field changes its meaning or goes
WIDTH = 118  # of a line of the short form
OPTIONS = ("dropout", "existing", "kernels", "logits", "dtype")  # that the headline names
SITES = {  # header -> field of a row of `site_rows`
    "residual site": "name",
    "layer": "layer",
    "dropout by": "dropout",
    "value": "value",
    "traced add": "add",
    "mask drawn in": "mask",
}
PASSES = ("pass", "matched", "replaced", "nodes", "time (ms)", "form")


# --- tables --------------------------------------------------------------------------------------


def headline(explanation: Explanation) -> tuple[str, str]:
    """Say what was looked at, and how."""
    subject, options = explanation.subject, explanation.options
    bound = inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs)
    given = ", ".join(f"{n} {_argument(v)}".strip() for n, v in bound.arguments.items())
    chosen = ", ".join(f"{name} {options[name]}" for name in OPTIONS if name in options)
    how = f"torch {torch.__version__}, {options['backend']} on cpu"
    return (
        ", ".join([f"{subject.num_parameters / 1e6:.3g} M parameters", *subject.facts]),
        f"one training forward of {given or 'no input'}: {chosen}; {how}",
    )


def _argument(value: Any) -> str:
    return value_text(value) or (str(value) if isinstance(value, bool | int) else "")


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
    unplaced = dict.fromkeys(("reason", "value", "add", "own", "mask"), "") | {"graph": 0}
    for name, site in by_name.items():  # of a graph whose sites could not be told apart
        found.setdefault(name, {**asdict(site), **unplaced})
    return sorted(found.values(), key=lambda r: (r["layer"] is None, r["layer"] or 0))


def pass_totals(explanation: Explanation) -> list[PassResult]:
    """Return one result a pass, summed over the graphs, in running order."""
    totals: dict[str, PassResult] = {}
    for result in explanation.report.passes:
        totals.setdefault(result.name, PassResult(name=result.name)).add(result)
    return list(totals.values())


def pass_rows(explanation: Explanation) -> list[tuple[Any, ...]]:
    """Return the cells below PASSES."""
    return [
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


def refusals(explanation: Explanation) -> list[tuple[str, int, str]]:
    """Return (pass, how many matches it left alone, why)."""
    return [
        (result.name, count, reason)
        for result in pass_totals(explanation)
        for reason, count in result.skipped.items()
    ]


def remarks(explanation: Explanation) -> list[str]:
    """Return what is said in a line each: breaks, unseeded dropout, notes, strict mode."""
    report, num_graphs = explanation.report, len(explanation.graphs)
    whole = "no graph break" if num_graphs == 1 else f"no graph break; {num_graphs} graphs"
    lines = _counted(f"graph break at {line}" for line in explanation.breaks) or [whole]
    lines += [f"uncovered: {line}" for line in report.uncovered]
    unseeded = (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", line) for line in report.unseeded)
    lines += _counted(f"unseeded: {line}" for line in unseeded) or ["no unseeded dropout"]
    lines += [f"note: {line}" for line in report.notes]
    lines += [str(report.verification)] if report.verification is not None else []
    verdict = f"would raise: {explanation.refusal}" if explanation.refusal else "accepts the model"
    return [*lines, f"strict mode {verdict}"]


def _counted(lines: Iterable[str]) -> list[str]:
    """Return each line once, with how often it came."""
    return [f"{x} ({n} times)" if n > 1 else x for x, n in Counter(lines).items()]


# --- plain values --------------------------------------------------------------------------------


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Return everything that the text and the page show, and every op of the graphs."""
    subject, report = explanation.subject, explanation.report
    return {
        "schema": SCHEMA,
        "model": {
            "title": subject.title,
            "class": type(subject.model).__name__,
            "num_parameters": subject.num_parameters,
            "facts": subject.facts,
        },
        "options": {k: v for k, v in explanation.options.items() if k != "dump_graphs"},
        "versions": {"xtrain": xtrain.__version__, "torch": str(torch.__version__)},
        "sites": site_rows(explanation),
        "passes": [
            {
                "name": result.name,
                "matched": result.num_matched,
                "replaced": result.num_replaced,
                "nodes_before": result.num_nodes_before,
                "nodes_after": result.num_nodes_after,
                "time_ms": result.time_ms,
                "forms": result.forms,
            }
            for result in pass_totals(explanation)
        ],
        "left_alone": [
            {"pass": name, "count": count, "reason": reason}
            for name, count, reason in refusals(explanation)
        ],
        "uncovered": report.uncovered,
        "unseeded": report.unseeded,
        "notes": report.notes,
        "verification": None if report.verification is None else asdict(report.verification),
        "graph_breaks": [
            {"place": place, "reason": reason} for place, reason in explanation.graph_breaks
        ],
        "strict": {"accepts": not explanation.refusal, "reason": explanation.refusal},
        "graphs": [_graph_values(record) for record in explanation.graphs],
    }


def _graph_values(record: GraphRecord) -> dict[str, Any]:
    changes = record.changes
    return {
        "num_parameters": record.before.num_parameters,
        "traced": [asdict(node) for node in record.before.nodes],
        "compiled": [asdict(node) for node in record.after.nodes],
        "removed": changes.removed,
        "added": {
            key: {"pass": name, "replaces": changes.replaces.get(key, [])}
            for key, name in changes.added.items()
        },
    }


# --- text ----------------------------------------------------------------------------------------


def as_text(explanation: Explanation, *, whole_graph: bool = False) -> str:
    """Return the report; the graph of one block of each kind, or of the whole model."""
    what, how = headline(explanation)
    parts = [
        f"{explanation.subject.title}: {what}\n{how}",
        _sites_said(explanation),
        _passes_said(explanation),
        _refusals_said(explanation),
        "\n".join(remarks(explanation)),
    ]
    several = len(explanation.graphs) > 1
    for number, record in enumerate(explanation.graphs, start=1):
        name = f"graph {number}" if several else "graph"
        if whole_graph:
            parts.append("\n".join([f"{_size(name, record)}; {LEGEND}", *_lines(record)]))
        elif record.sites or not several:
            parts += _example_blocks(name, record)
        else:
            parts.append(f"{_size(name, record)}, no residual site")
    return "\n\n".join(parts) + "\n"


def _sites_said(explanation: Explanation) -> str:
    found = site_rows(explanation)
    if not found and not explanation.options["dropout"]:
        return "residual sites: none, as dropout is 0; --dropout P shows them"
    cells = [[None if row[name] == "" else row[name] for name in SITES.values()] for row in found]
    return tabulate(cells, list(SITES), tablefmt="simple", missingval="-")


def _passes_said(explanation: Explanation) -> str:
    found = pass_rows(explanation)
    if not found:
        return "passes: none ran"
    return tabulate(found, PASSES, tablefmt="simple", disable_numparse=True)


def _refusals_said(explanation: Explanation) -> str:
    lines = [f"  {count} x {name}: {why}" for name, count, why in refusals(explanation)]
    return "\n".join(
        ["left alone:", *lines] if lines else ["left alone: nothing that a pass matched"]
    )


LEGEND = "- traced, + compiled, ~ reads something else now"


def _size(name: str, record: GraphRecord) -> str:
    count = record.before.num_parameters
    return (
        f"{name}, {len(record.before.nodes)} -> {len(record.after.nodes)} ops over {count} "
        "parameters and buffers"
    )


def _example_blocks(name: str, record: GraphRecord) -> Iterator[str]:
    """The first block of each list of blocks, shortened to a screen's width."""
    firsts: dict[str, str] = {}
    for node in record.before.nodes:
        if node.block:
            firsts.setdefault(node.block.rpartition(".")[0], node.block)
    if not firsts:
        yield "\n".join([f"{_size(name, record)}; {LEGEND}", *_lines(record)])
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
    lines: list[tuple[str, str]] = []  # (module, what is said of its ops)
    belongs, noted = _membership(record, block), _notes(record)
    removed: list[Node] = []
    added: list[Node] = []

    def say(sign: str, node: Node) -> None:
        note = noted("a" if sign == "-" else "b", node)
        lines.append((node.module, _line(sign, node) + (f"  # {'; '.join(note)}" if note else "")))

    def say_changes() -> None:
        if block is None or len(removed) < 3:
            for node in removed:
                say("-", node)
        else:
            lines.extend((removed[0].module, line) for line in _in_short(removed, noted))
        for node in added:
            say("+", node)
        removed.clear()
        added.clear()

    for left, right in rows(record.before, record.after):
        left = left if belongs(left) else None
        right = right if belongs(right) else None
        if left is not None and right is not None and left.key == right.key:
            say_changes()
            say(" " if left.text == right.text else "~", right)
            continue
        removed += [left] if left is not None else []
        added += [right] if right is not None else []
    say_changes()
    for module, group in itertools.groupby(lines, key=lambda line: line[0]):
        yield f"  {module or 'the model itself'}:"
        yield from (line for _, line in group)


def _membership(record: GraphRecord, block: str | None) -> Callable[[Node | None], bool]:
    """Say which ops belong to a block: its own, and those that draw the masks of its sites.

    The last add of a block can be fused with the norm that begins the next.
    """
    traced = record.before.by_key()
    masks = {m.dropout for m in record.sites if m.add in traced and traced[m.add].block == block}
    return lambda node: (
        node is not None and (block is None or node.block == block or node.key in masks)
    )


Noted = Callable[[str, Node], list[str]]


def _notes(record: GraphRecord) -> Noted:
    """Say of an op of a side by which pass it came or went, and whose site it is."""
    marks = record.marks()

    def noted(side: str, node: Node) -> list[str]:
        by_pass = record.pass_of(side, node.key)
        said = [
            f"the model's own dropout of {m.label}" if m.own == node.key else f"site {m.label}"
            for m in marks.get((side, node.key), ())
        ]
        return [by_pass, *said] if by_pass else said

    return noted


def _in_short(removed: list[Node], noted: Noted) -> Iterator[str]:
    """Name the functions of ops that went together, the passes and sites behind them."""
    for start in range(0, len(removed), 8):
        part = removed[start : start + 8]
        said = dict.fromkeys(note for node in part for note in noted("a", node))
        yield f"-   {', '.join(n.target for n in part)}  # {'; '.join(said)}"


def _line(sign: str, node: Node) -> str:
    call = node.text if node.target == node.text else f"{node.name} = {node.text}"
    if node.target in ("input", "output"):
        call = f"{node.target} {node.text}"
    return f"{sign}   {'  ' * node.depth}{call}" + (f": {node.value}" if node.value else "")


# --- the page ------------------------------------------------------------------------------------


def page(explanation: Explanation) -> str:
    """Return the page; it loads nothing from anywhere."""
    found, graphs = site_rows(explanation), explanation.graphs
    panes = [_Pane(number, record) for number, record in enumerate(graphs, start=1)]
    return render(
        Path(__file__).with_name("page.html"),
        title=f"xtrain.explain: {explanation.subject.title}",
        subject=explanation.subject,
        headline=headline(explanation),
        cards=_cards(explanation, found),
        sites=[(row, panes[row["graph"] - 1] if row["graph"] else None) for row in found],
        pass_headers=PASSES,
        passes=pass_rows(explanation),
        refusals=refusals(explanation),
        remarks=remarks(explanation),
        blocks=list(dict.fromkeys(n.block for r in graphs for n in r.before.nodes if n.block)),
        panes=panes,
    )


def _cards(explanation: Explanation, sites: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return (name, figure, whether that is good: None is neither) of what is seen first."""
    graphs, refusal = explanation.graphs, explanation.refusal
    covered, breaks = sum(s["dropout"] != "nobody" for s in sites), len(explanation.graph_breaks)
    traced, compiled = (
        sum(len(graph.nodes) for graph in side)
        for side in ([r.before for r in graphs], [r.after for r in graphs])
    )
    put_in = [n for r in graphs for n in r.after.nodes if r.pass_of("b", n.key)]
    return [
        ("sites covered", f"{covered} of {len(sites)}", covered == len(sites)),
        ("strict mode", "refuses" if refusal else "accepts", not refusal),
        ("ops", f"{traced} -> {compiled}", None),
        ("xtrain ops put in", sum(n.target.startswith("xtrain.") for n in put_in), None),
        ("left alone", sum(count for _, count, _ in refusals(explanation)), None),
        ("unseeded dropouts", len(explanation.report.unseeded), None),
        ("graph breaks", breaks, breaks == 0),
    ]


class _Pane:
    """One graph as a table of two columns; side "a" is the traced graph, "b" the compiled one.

    ids: side -> key of an op -> the id of its cell; kin: ids of what replaced it, or it replaced.
    """

    def __init__(self, number: int, record: GraphRecord):
        self.number, self.record, self.marks = number, record, record.marks()
        self.ids = {
            side: {node.key: f"g{number}{side}{i}" for i, node in enumerate(graph.nodes)}
            for side, graph in (("a", record.before), ("b", record.after))
        }
        self.kin: dict[tuple[str, str], list[str]] = {}
        for new, olds in record.changes.replaces.items():
            self.kin["b", new] = [self.ids["a"][old] for old in olds]
            for old in olds:
                self.kin["a", old] = [self.ids["b"][new]]

    def rows(self) -> Iterator[tuple[Node, str, list[dict[str, Any] | None]]]:
        """Yield an op of each row, "same", "moved" or "changed", and the cells of both sides."""
        for left, right in rows(self.record.before, self.record.after):
            node, kind = left or right, "changed"
            assert node is not None
            if left is not None and right is not None and left.key == right.key:
                kind = "same" if left.text == right.text else "moved"
            yield node, kind, [self._cell("a", left, kind), self._cell("b", right, kind)]

    def _cell(self, side: str, node: Node | None, kind: str) -> dict[str, Any] | None:
        if node is None:
            return None
        by_pass = self.record.pass_of(side, node.key)
        style = "moved" if kind == "moved" and side == "b" else None
        if by_pass:
            style = "gone" if side == "a" else "new"
        return {
            "node": node,
            "style": style,
            "marks": self.marks.get((side, node.key), []),
            "by_pass": by_pass,
            "data": {
                "id": self.ids[side][node.key],
                "data-side": side,
                "data-inputs": " ".join(self.ids[side][key] for key in node.inputs) or None,
                "data-kin": " ".join(self.kin.get((side, node.key), ())) or None,
                "data-pass": by_pass or None,
                "data-source": node.source or None,
                "data-module": node.module or None,  # the row's is that of the traced op
            },
        }
