"""What a pass returns, and running passes on a graph: time, lint, count, log, dump, cache key."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import fx

from xtrain.passes.graph import walk_graphs

log = logging.getLogger("xtrain.passes")


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

    def replaced(self, form: str, count: int = 1) -> None:
        """Count matches that were replaced by an op in this form."""
        self.num_replaced += count
        self.forms[form] = self.forms.get(form, 0) + count

    def skip(self, reason: str) -> None:
        """Count one match that was left as it is, with the reason."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


PassFn = Callable[[fx.Graph], PassResult | None]


class PassError(RuntimeError):
    """A graph pass failed or left a broken graph; the message names it, the cause is attached."""

    def __init__(self, message: str, pass_name: str = ""):
        super().__init__(message)
        self.pass_name = pass_name


@dataclass(frozen=True)
class Pass:
    """One entry of the running order.

    name:       what logs, reports and `disable_passes` call it.
    run:        changes the graph in place, returns counts (None counts as nothing matched).
    source:     the function whose source enters the cache key, where `run` is a partial of it.
    options:    values that change what it does; they enter the cache key.
    drops:      whether the dropout that was asked for is this pass's work.
    stage:      the graph it runs on: "traced", Dynamo's own; "normalised", a copy that may fail
                without loss of dropout; "backward", what inductor is about to lower.
    """

    name: str
    run: PassFn
    source: Callable[..., Any]
    options: tuple[tuple[str, object], ...] = ()
    stage: Literal["traced", "normalised", "backward"] = "traced"
    drops: bool = False

    @property
    def normalised(self) -> bool:
        """Whether it runs on the normalised graph."""
        return self.stage == "normalised"


def run_passes(
    module: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    dump_dir: Path | None = None,
    num_before: int = 0,
    num_behind: int = 0,
) -> list[PassResult]:
    """Run passes in order on a graph module of our own (never Dynamo's; see clone_graph).

    Logs one INFO line a pass and, with dump_dir, writes `01_<pass>.before.py` and `.after.py`.

    Args:     num_before, num_behind: passes of the same graph in other calls, for the numbering.
    Raises:   PassError, naming the pass, when it raises, leaves a broken graph or returns something
              other than a PassResult or None.
    """
    results = []
    total = num_before + len(passes) + num_behind
    for position, entry in enumerate(passes, start=num_before + 1):
        before = _readable(module) if dump_dir else ""
        nodes_before = _count_nodes(module)
        start = time.perf_counter()
        result = _run_one(module, entry)
        result.time_ms = (time.perf_counter() - start) * 1e3
        result.name = entry.name
        result.num_nodes_before = nodes_before
        result.num_nodes_after = _count_nodes(module)
        results.append(result)
        _log(position, total, result)
        if dump_dir:
            stem = dump_dir / f"{position:02d}_{entry.name}"
            stem.with_suffix(".before.py").write_text(before)
            stem.with_suffix(".after.py").write_text(_readable(module))
    return results


def cache_key(passes: Iterable[Pass], extra: Iterable[object] = ()) -> str:
    """Return a hash of the passes' names, order, sources and options, of xtrain's matchers, and of
    `extra`.

    Inductor's caches key on the graph that they are given and on this: a graph that looks the
    same may have been lowered by another version of a pass or op.
    """
    digest = hashlib.sha256(_sources())
    for entry in passes:
        for part in (entry.name, _source_of(entry.source), repr(entry.options)):
            digest.update(f"{len(part)}:{part};".encode())
    for item in extra:
        digest.update(f"{item!r};".encode())
    return digest.hexdigest()


@functools.cache
def _sources() -> bytes:
    """The code that passes of ours share: a match or an op's form may change with any of it."""
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))


def _run_one(module: fx.GraphModule, entry: Pass) -> PassResult:
    try:
        result = entry.run(module.graph)
        for part in walk_graphs(module):
            part.graph.lint()
            part.recompile()
    except Exception as error:
        raise PassError(
            f"the graph pass {entry.name!r} failed with {type(error).__name__}: {error}. "
            f"{_what_to_do(entry)}",
            entry.name,
        ) from error
    if result is None:
        return PassResult()
    if not isinstance(result, PassResult):
        raise PassError(
            f"the graph pass {entry.name!r} returned {result!r}; return a PassResult or None",
            entry.name,
        )
    return result


def _what_to_do(entry: Pass) -> str:
    """Return the advice for a pass that fails: never to lose dropout without a word."""
    if not entry.drops:
        return f"disable_passes=[{entry.name!r}] leaves it out."
    return (
        "It puts in the dropout, so the model cannot train as asked: report this with the model "
        "and the traceback, a fault of xtrain's; only dropout=0 goes on, and trains without any."
    )


def _log(position: int, total: int, result: PassResult) -> None:
    skipped = "".join(f"; skipped {count}: {why}" for why, count in result.skipped.items())
    log.info(
        "[%d/%d] %s: %d matched, %d replaced; nodes %d -> %d; %.0f ms%s",
        position,
        total,
        result.name,
        result.num_matched,
        result.num_replaced,
        result.num_nodes_before,
        result.num_nodes_after,
        result.time_ms,
        skipped,
    )


def _count_nodes(module: fx.GraphModule) -> int:
    return sum(len(part.graph.nodes) for part in walk_graphs(module))


def _readable(module: fx.GraphModule) -> str:
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def _source_of(function: Callable[..., Any]) -> str:
    """A pass's name and the source of the module that defines it: its helpers count too."""
    if isinstance(function, functools.partial):
        return f"{_source_of(function.func)}, {function.args!r}, {function.keywords!r}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        return f"{name}\n{inspect.getsource(inspect.getmodule(function) or function)}"
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            raise TypeError(
                f"cannot identify pass {function!r} for the compile cache: register a function"
            ) from None
        return repr((code.co_code, code.co_consts, code.co_names))
