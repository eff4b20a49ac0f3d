"""What xtrain.compile found and did, as data and as a table; how it spells places in code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import module_path, short_place
from xtrain.passes.run import PassResult

# The name under which our entry functions hold the model: graphs traced from them say so.
ENTRY_ROOT = "L['_xtrain_model']"
_LOCAL = re.compile(r"\bL\['(\w+)'\]")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True)
class Site:
    """One residual site of the model.

    name:    module path of the block and the site in it, e.g. "layers.3.attention".
    layer:   ordinal of the block over all blocks of the model, in module order.
    site:    "attention" | "cross_attention" | "feed_forward", numbered from the second of a kind.
             (layer, site) are the arguments of `xtrain.rng.site_seed`.
    dropout: whose dropout covers it: "xtrain", or "model" where the model's own was left.
    """

    name: str
    layer: int
    site: str
    dropout: str = "xtrain"


@dataclass(frozen=True)
class SumLine:
    """One line of the account: sums of a training forward with the same fate.

    verdict: "site", "left" or "unexplained"; rule: why sums are left, or what was seen of one.
    count:   how many sums; settled: whether the user's `sums=` says so.
    """

    verdict: str
    rule: str
    count: int
    settled: bool = False


@dataclass
class Verification:
    """What verify=True compared in the first step; `str(verification)` is one line.

    num_graphs:  swapped graphs that were held against themselves without swaps.
    num_losses, num_outputs, num_gradients: what agreed, over all calls of these graphs in the step;
                 gradients come with its backward.
    largest:     the largest error as a multiple of its bound, of the value `largest_at`.
    failures:    what did not agree, with the pass at fault.
    left_out:    what could not be compared, and why.
    """

    num_graphs: int = 0
    num_losses: int = 0
    num_outputs: int = 0
    num_gradients: int = 0
    largest: float = 0.0
    largest_at: str = ""
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def note_error(self, ratio: float, name: str) -> None:
        """Count the error of a value that agrees."""
        if ratio >= self.largest:
            self.largest, self.largest_at = ratio, name

    def leave_out(self, text: str) -> bool:
        """Note what is not compared, once; whether it is new."""
        is_new = text not in self.left_out
        self.left_out += [text] if is_new else []
        return is_new

    def __str__(self) -> str:
        if not self.num_graphs:
            return "verified: nothing; no swapped graph has run in training"
        counts = {"loss": self.num_losses, "output": self.num_outputs}
        counts["gradient"] = self.num_gradients
        said = [_number(n, what) for what, n in counts.items() if n]
        graphs = _number(self.num_graphs, "graph")
        text = (
            f"verified: {', '.join(said) or 'nothing'} of {graphs} against the same without swaps"
        )
        if said:
            text += f"; largest error {self.largest:.2g} of its bound ({self.largest_at})"
        if not self.num_gradients and not self.failures:
            text += "; no backward has come yet"
        text += "".join(f"; FAILED: {line}" for line in self.failures)
        return text + "".join(f"; not compared: {line}" for line in self.left_out)


def _number(count: int, what: str) -> str:
    plural = f"{what}es" if what == "loss" else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


@dataclass
class Report:
    """The state of a compiled model after its forwards so far; `str(report)` is a table.

    sites:     residual sites in module order.
    passes:    one PassResult per pass and training graph, in running order.
    uncovered: places that train without dropout (strict=False), each with the reason; a site that
               a graph break cuts is known by its add alone, and not among the sites.
    unseeded:  the model's own dropout that stays as it is (attention probabilities, embeddings).
    account:   what became of each sum of the last training forward that was looked at whole: the
               sums that could carry a stream, by verdict and rule.
    notes:     switches that were turned off and why, forms that ops took.
    verification: what verify=True compared; None without it.
    num_train_graphs, num_eval_graphs: graphs compiled so far; more than one means graph breaks,
               other shapes, or another grad mode.
    """

    sites: list[Site] = field(default_factory=list)
    passes: list[PassResult] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)
    account: list[SumLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verification: Verification | None = None
    num_train_graphs: int = 0
    num_eval_graphs: int = 0

    def __str__(self) -> str:
        from tabulate import tabulate

        sites = {
            "residual site": [s.name for s in self.sites],
            "layer": [s.layer for s in self.sites],
            "site": [s.site for s in self.sites],
            "dropout by": [s.dropout for s in self.sites],
        }
        passes = {
            "pass": [r.name for r in self.passes],
            "matched": [r.num_matched for r in self.passes],
            "replaced": [r.num_replaced for r in self.passes],
            "nodes": [f"{r.num_nodes_before} -> {r.num_nodes_after}" for r in self.passes],
            "time (ms)": [f"{r.time_ms:.1f}" for r in self.passes],
            "form": [_counted(r.forms) for r in self.passes],
            "left alone": [_counted(r.skipped) for r in self.passes],
        }
        tables = [
            tabulate(columns, "keys", tablefmt="simple", disable_numparse=columns is passes)
            for columns, rows in ((sites, self.sites), (passes, self.passes))
            if rows
        ]
        parts = [
            f"{len(self.sites)} residual sites; graphs compiled: "
            f"{self.num_train_graphs} for training, {self.num_eval_graphs} for evaluation",
        ]
        if self.account:
            parts.append(self._account_said())
        if self.uncovered:
            parts.append(f"places that train without dropout: {len(self.uncovered)}")
        parts += [f"uncovered: {line}" for line in self.uncovered]
        parts += [f"unseeded: {line}" for line in self.unseeded]
        parts += [f"note: {line}" for line in self.notes]
        parts += [str(self.verification)] if self.verification is not None else []
        return "\n\n".join([*tables, "\n".join(parts)])

    def _account_said(self) -> str:
        def total(*verdicts: str) -> int:
            return sum(s.count for s in self.account if not verdicts or s.verdict in verdicts)

        left = [s for s in self.account if s.verdict == "left" and not s.settled]
        settled = [s for s in self.account if s.settled]
        said = f"account of sums: {total()} seen, {total('site')} are sites, "
        said += f"{total('unexplained')} unexplained"
        lines = [f"left alone: {s.count} x {s.rule}" for s in left]
        lines += [f"settled by sums=: {s.count} x {s.rule or 'dropout put in'}" for s in settled]
        return "\n".join([said, *lines])


def _counted(counts: dict[str, int]) -> str:
    return "; ".join(f"{n} x {what}" for what, n in counts.items()) or "-"


# --- places in the code of a model ----------------------------------------------------------------


def without_locals(text: str) -> str:
    """Spell what a piece behind a graph break starts from plainly: L['self'].proj as self.proj."""
    return _LOCAL.sub(r"\1", text)


def readable_path(path: str) -> str:
    """Return a module path as a user would write it, from its source name in a graph."""
    path = path.removeprefix(ENTRY_ROOT).removeprefix(".")
    return without_locals(path) or "the model's own forward"


def plain_path(node: fx.Node) -> str:
    """Return the path of the module whose code a node was traced from, as a user writes it."""
    path = module_path(node)
    return path.removeprefix(ENTRY_ROOT).removeprefix("L['self']").removeprefix(".")


def line_of(node: fx.Node) -> str:
    """Return "file:line" of the code that a node was traced or recorded from, "" if unknown."""
    if "place" in node.meta:
        return str(node.meta["place"]).partition(" in ")[0]
    traced = torch_compat.frames(str(node.meta.get("stack_trace") or ""))
    return "" if not traced else ":".join(traced[-1])


def place_of(node: fx.Node) -> str:
    """Return the file, line and code that a node was traced from, its name where none is known."""
    if "place" in node.meta:
        return str(node.meta["place"])
    found = list(_LINE.finditer(str(node.meta.get("stack_trace", ""))))
    if not found:
        return node.name
    last = found[-1]
    return f"{short_place(last['file'])}:{last['line']}, `{last['code'].strip()}`"
