"""The explanation as plain values for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from xtrain.explain.capture import Explanation, GraphRecord
from xtrain.explain.text import pass_totals, refusals, site_rows
from xtrain.passes.run import PassResult

SCHEMA = 1  # goes up when a field changes its meaning or goes


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Return everything that the text and the page show, and every op of the graphs."""
    import torch

    import xtrain

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
        "passes": [_pass(result) for result in pass_totals(explanation)],
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
        "graphs": [_graph(record) for record in explanation.graphs],
    }


def _pass(result: PassResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "matched": result.num_matched,
        "replaced": result.num_replaced,
        "nodes_before": result.num_nodes_before,
        "nodes_after": result.num_nodes_after,
        "time_ms": result.time_ms,
        "forms": result.forms,
    }


def _graph(record: GraphRecord) -> dict[str, Any]:
    changes = record.changes
    return {
        "num_parameters": record.before.num_parameters,
        "traced": [node.as_dict() for node in record.before.nodes],
        "compiled": [node.as_dict() for node in record.after.nodes],
        "removed": changes.removed,
        "added": {
            key: {"pass": name, "replaces": changes.replaces.get(key, [])}
            for key, name in changes.added.items()
        },
    }
