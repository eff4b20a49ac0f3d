"""What every pass returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassResult:
    """Counts of one pass on one graph; the runner adds the name, the time and the node counts.

    skipped: reason -> how many matches were left as they are for it.
    forms:   what swapped ops run as ("kernel", "decomposition: <why>") -> how many.
    """

    num_matched: int = 0
    num_replaced: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)
    name: str = ""
    time_ms: float = 0.0
    num_nodes_before: int = 0
    num_nodes_after: int = 0

    def add(self, other: PassResult) -> None:
        """Count what the pass did on one more graph."""
        for counts, more in ((self.skipped, other.skipped), (self.forms, other.forms)):
            for what, count in more.items():
                counts[what] = counts.get(what, 0) + count
        self.num_matched += other.num_matched
        self.num_replaced += other.num_replaced
        self.time_ms += other.time_ms
        self.num_nodes_before += other.num_nodes_before
        self.num_nodes_after += other.num_nodes_after

    def skip(self, reason: str) -> None:
        """Count one match that was left as it is, with the reason."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
