"""What xtrain.compile found and did, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from xtrain.passes.result import PassResult


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


@dataclass
class Report:
    """The state of a compiled model after its forwards so far; `str(report)` is a table.

    sites:     residual sites in module order.
    passes:    one PassResult per pass and training graph, in running order.
    uncovered: places that train without dropout (strict=False), each with the reason; a site that
               a graph break cuts is known by its add alone, and not among the sites.
    unseeded:  the model's own dropout that stays as it is (attention probabilities, embeddings).
    notes:     switches that were turned off and why, forms that ops took.
    num_train_graphs, num_eval_graphs: graphs compiled so far; more than one means graph breaks,
               other shapes, or another grad mode.
    """

    sites: list[Site] = field(default_factory=list)
    passes: list[PassResult] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
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
        if self.uncovered:
            parts.append(f"places that train without dropout: {len(self.uncovered)}")
        parts += [f"uncovered: {line}" for line in self.uncovered]
        parts += [f"unseeded: {line}" for line in self.unseeded]
        parts += [f"note: {line}" for line in self.notes]
        return "\n\n".join([*tables, "\n".join(parts)])


def _counted(counts: dict[str, int]) -> str:
    return "; ".join(f"{n} x {what}" for what, n in counts.items()) or "-"
