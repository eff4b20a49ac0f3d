"""The explanation as one self-contained HTML page: tables, and the two graphs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from xtrain.explain.capture import Explanation, GraphRecord, SiteMark
from xtrain.explain.changes import rows
from xtrain.explain.page_script import SCRIPT
from xtrain.explain.page_style import STYLE
from xtrain.explain.snapshot import Node
from xtrain.explain.text import headline, pass_totals, refusals, remarks, site_rows

LEGEND = (("gone", "taken out"), ("new", "put in"), ("moved", "reads something else now"))


def page(explanation: Explanation) -> str:
    """Return the page; it loads nothing from anywhere."""
    title = escape(explanation.subject.title)
    first, _, second = headline(explanation).partition("\n")
    panes = [_Pane(number, r) for number, r in enumerate(explanation.graphs, start=1)]
    body = [
        '<button id="theme" title="light or dark">light / dark</button>',
        f"<h1>{title}</h1>",
        f'<p class="dim">{escape(first.removeprefix(explanation.subject.title + ": "))}; '
        f"{escape(second)}</p>",
        _cards(explanation),
        "<h2>Residual sites</h2>",
        _sites(explanation, panes),
        '<div class="columns"><div>',
        "<h2>Passes</h2>",
        _passes(explanation),
        "</div><div>",
        *_left_alone(explanation),
        "<h2>Remarks</h2>",
        _list(remarks(explanation)),
        "</div></div>",
        "<h2>Graphs, as traced and as compiled</h2>",
        _tools(panes),
        *(line for pane in panes for line in pane.table(len(panes) > 1)),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>xtrain.explain: {title}</title>\n<style>{STYLE}</style>\n</head>",
            "<body>\n<main>",
            *body,
            f'</main>\n<div id="detail" hidden></div>\n<script>{SCRIPT}</script>',
            "</body>\n</html>\n",
        ]
    )


# --- what stands above the graphs ----------------------------------------------------------------


def _cards(explanation: Explanation) -> str:
    sites = site_rows(explanation)
    covered = sum(row["dropout"] != "nobody" for row in sites)
    graphs = explanation.graphs
    ops = [sum(len(getattr(r, side).nodes) for r in graphs) for side in ("before", "after")]
    swapped = sum(node.key in record.changes.added and node.target.startswith("xtrain.")
                  for record in graphs for node in record.after.nodes)  # fmt: skip
    breaks = len(explanation.graph_breaks)
    refused = sum(count for _, count, _ in refusals(explanation))
    verdict = "refuses" if explanation.refusal else "accepts"
    cards = (
        ("sites covered", f"{covered} of {len(sites)}", covered == len(sites)),
        ("strict mode", verdict, not explanation.refusal),
        ("ops", f"{ops[0]} &rarr; {ops[1]}", None),
        ("xtrain ops put in", str(swapped), None),
        ("left alone", str(refused), None),
        ("unseeded dropouts", str(len(explanation.report.unseeded)), None),
        ("graph breaks", str(breaks), breaks == 0),
    )
    colour = {None: "", True: ' class="good"', False: ' class="bad"'}
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><b{colour[good]}>{value}</b>{name}</div>'
            for name, value, good in cards
        )
        + "</div>"
    )


def _sites(explanation: Explanation, panes: Sequence[_Pane]) -> str:
    lines = []
    for row in site_rows(explanation):
        pane = panes[row["graph"] - 1] if row["graph"] else None
        links = {
            side: pane.link(side, row[name]) if pane and row[name] else "-"
            for side, name in (("a", "add"), ("b", "mask"))
        }
        own = pane.link("a", row["own"]) if pane and row["own"] else "-"
        by = escape(row["dropout"]) + (f": {escape(row['reason'])}" if row["reason"] else "")
        lines.append(
            (
                f"<code>{escape(row['name'])}</code>",
                "-" if row["layer"] is None else str(row["layer"]),
                by if row["dropout"] != "nobody" else f'<span class="bad">{by}</span>',
                f"<code>{escape(row['value'])}</code>",
                links["a"],
                own,
                links["b"],
            )
        )
    headers = ("site", "layer", "dropout by", "value", "traced add", "model's own", "mask drawn in")
    return _table(headers, lines, numbers=(1,))


def _passes(explanation: Explanation) -> str:
    lines = [
        (
            f"<code>{escape(result.name)}</code>",
            str(result.num_matched),
            str(result.num_replaced),
            f"{result.num_nodes_before} &rarr; {result.num_nodes_after}",
            f"{result.time_ms:.1f}",
            escape("; ".join(result.forms)) or "-",
        )
        for result in pass_totals(explanation)
    ]
    headers = ("pass", "matched", "replaced", "nodes", "time (ms)", "form")
    return _table(headers, lines, numbers=(1, 2, 3, 4))


def _left_alone(explanation: Explanation) -> Iterator[str]:
    found = refusals(explanation)
    yield "<h2>Left alone, and why</h2>"
    if found:
        lines = [(f"<code>{escape(n)}</code>", str(c), escape(reason)) for n, c, reason in found]
        yield _table(("pass", "matches", "reason"), lines, numbers=(1,))
    else:
        yield '<p class="dim">Nothing that a pass matched.</p>'


def _list(lines: Iterable[str]) -> str:
    return f'<ul class="lines">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _table(
    headers: Sequence[str], lines: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in numbers else ''}>{value}</{tag}>"
            for i, value in enumerate(values)
        )

    body = "\n".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table class="plain"><thead><tr>{cells("th", headers)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _tools(panes: Sequence[_Pane]) -> str:
    blocks = dict.fromkeys(n.block for p in panes for n in p.record.before.nodes if n.block)
    options = '<option value="">all layers</option><option value="=">outside the blocks</option>'
    options += "".join(f'<option value="={escape(b)}">{escape(b)}</option>' for b in blocks)
    legend = "".join(f'<span><i class="key {css}"></i>{text}</span>' for css, text in LEGEND)
    return (
        '<div class="tools">'
        '<input id="search" type="search" placeholder="filter: op, name, module ( / )" '
        'aria-label="filter rows">'
        f'<select id="layer" aria-label="layer">{options}</select>'
        '<label><input id="changed" type="checkbox"> changes only</label>'
        f'<span id="count" class="dim"></span>{legend}'
        '<span><i class="key" style="background: var(--site)"></i>residual site</span></div>'
    )


# --- the graphs ----------------------------------------------------------------------------------


class _Pane:
    """One graph as a table of two columns; side "a" is the traced graph, "b" the compiled one."""

    def __init__(self, number: int, record: GraphRecord):
        self.record = record
        self.ids = {
            side: {node.key: f"g{number}{side}{i}" for i, node in enumerate(graph.nodes)}
            for side, graph in (("a", record.before), ("b", record.after))
        }
        self.number = number
        self.marks: dict[tuple[str, str], list[SiteMark]] = {}
        for mark in record.sites:
            spots = {("a", mark.add), ("b", mark.dropout or mark.add)}
            spots |= {("a", mark.own), ("b", mark.own)} if mark.own else set()
            for spot in spots:
                self.marks.setdefault(spot, []).append(mark)
        replaced_by = record.changes.replaced_by()
        self.kin = {
            "a": {old: [self.ids["b"][new]] for old, new in replaced_by.items()},
            "b": {
                new: [self.ids["a"][k] for k in olds]
                for new, olds in record.changes.replaces.items()
            },
        }

    def link(self, side: str, key: str) -> str:
        """Return a link to an op, or its name where the graph does not have it any more."""
        name = escape(key.rpartition("/")[2])
        place = self.ids[side].get(key)
        return f'<a href="#{place}"><code>{name}</code></a>' if place else f"<code>{name}</code>"

    def table(self, numbered: bool) -> Iterator[str]:
        """Yield the lines of the graph's table."""
        if numbered:
            yield f"<h2>Graph {self.number}</h2>"
        before, after = self.record.before, self.record.after
        yield (
            '<table class="graph"><thead><tr>'
            f"<th>as traced: {len(before.nodes)} ops</th>"
            f"<th>as compiled: {len(after.nodes)} ops</th></tr></thead><tbody>"
        )
        module, block = None, ""
        for left, right in rows(before, after):
            node = left or right
            assert node is not None
            if node.module != module:
                first = " first" if node.block != block else ""
                module, block = node.module, node.block
                name = escape(module) or "the model itself"
                yield f'<tr class="module{first}"><th colspan="2">{name}</th></tr>'
            kind = self._kind(left, right)
            yield (
                f'<tr data-kind="{kind}" data-block="{escape(node.block)}" '
                f'data-module="{escape(node.module)}">'
                f"{self._cell('a', left, kind)}{self._cell('b', right, kind)}</tr>"
            )
        yield "</tbody></table>"

    @staticmethod
    def _kind(left: Node | None, right: Node | None) -> str:
        if left is None or right is None or left.key != right.key:
            return "changed"
        return "same" if left.text == right.text else "moved"

    def _cell(self, side: str, node: Node | None, kind: str) -> str:
        if node is None:
            return "<td></td>"
        changes = self.record.changes
        by_pass = (changes.removed if side == "a" else changes.added).get(node.key, "")
        css = kind if kind == "moved" and side == "b" else ""
        if by_pass:
            css = "gone" if side == "a" else "new"
        marks = self.marks.get((side, node.key), [])
        chips = "".join(
            f' <span class="chip site">{"own dropout of " if mark.own == node.key else ""}'
            f"{escape(mark.label)}</span>"
            for mark in marks
        )
        if by_pass:
            short = by_pass.removeprefix("use_triton_")
            chips += f' <span class="chip" title="{escape(by_pass)}">{escape(short)}</span>'
        data = {
            "side": side,
            "inputs": " ".join(self.ids[side][k] for k in node.inputs),
            "kin": " ".join(self.kin[side].get(node.key, ())),
            "pass": by_pass,
            "source": node.source,
            "module": node.module,  # the row's is that of the traced op
        }
        attributes = "".join(f' data-{k}="{escape(v)}"' for k, v in data.items() if v)
        indent = f' style="margin-left: {node.depth * 1.2:.1f}em"' if node.depth else ""
        return (
            f'<td class="{css}"><div class="op{" site" if marks else ""}" tabindex="0" '
            f'id="{self.ids[side][node.key]}"{attributes}{indent}>{_code(node)}{chips}</div></td>'
        )


def _code(node: Node) -> str:
    name, value = escape(node.name), escape(node.value)
    if node.target in ("input", "output"):
        call = f'<span class="name">{node.target}</span> {escape(node.text)}'
    else:
        rest = escape(node.text.removeprefix(node.target))
        call = f'<span class="name">{name}</span> = <b>{escape(node.target)}</b>{rest}'
    kind = f' <span class="type">{value}</span>' if value else ""
    return f'<span class="code">{call}{kind}</span>'
