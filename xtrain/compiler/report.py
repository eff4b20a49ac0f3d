"""What xtrain.compile found and did, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from xtrain.passes.run import PassResult


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

        sites = [(s.name, s.layer, s.site, s.dropout) for s in self.sites]
        passes = [
            (
                r.name,
                r.num_matched,
                r.num_replaced,
                f"{r.num_nodes_before} -> {r.num_nodes_after}",
                f"{r.time_ms:.1f}",
                _counted(r.forms),
                _counted(r.skipped),
            )
            for r in self.passes
        ]
        site_names = ["residual site", "layer", "site", "dropout by"]
        pass_names = ["pass", "matched", "replaced", "nodes", "time (ms)", "form", "left alone"]
        tables = [
            tabulate(rows, names, tablefmt="simple", disable_numparse=rows is passes)
            for rows, names in ((sites, site_names), (passes, pass_names))
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
        by_verdict = {v: [s for s in self.account if s.verdict == v] for v in _VERDICTS}
        total, sites, open_ = (
            sum(s.count for s in lines)
            for lines in (self.account, by_verdict["site"], by_verdict["unexplained"])
        )
        said = [f"account of sums: {total} seen, {sites} are sites, {open_} unexplained"]
        said += [f"left alone: {s.count} x {s.rule}" for s in by_verdict["left"] if not s.settled]
        settled = [s for s in self.account if s.settled]
        said += [f"settled by sums=: {s.count} x {s.rule or 'dropout put in'}" for s in settled]
        return "\n".join(said)


_VERDICTS = ("site", "left", "unexplained")


def _counted(counts: dict[str, int]) -> str:
    return "; ".join(f"{n} x {what}" for what, n in counts.items()) or "-"
