"""The second half of the pipeline: normalise a graph's copy and swap what is known for kernels."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from xtrain import passes, torch_compat
from xtrain.compiler.session import Session
from xtrain.compiler.verify import VerifiedGraph
from xtrain.passes.graph import clone_graph

log = logging.getLogger("xtrain.passes")

_SWAPS = tuple(map(passes.function, passes.SWAPS))


def passes_of_normalised_graph(session: Session) -> list[passes.Pass]:
    """Return our passes from `normalise` on, in running order, with their options.

    Those of the backward are last.
    """
    options = session.options
    entries = [_entry(passes.NORMALISE)]
    for swap in _SWAPS:
        keywords = {"kernels": options.kernels, "backend": options.backend}
        if "logits" in inspect.signature(swap).parameters:
            keywords["logits"] = options.logits
        run = functools.partial(swap, **keywords)
        options_of_swap = tuple(keywords.items())
        entry = passes.Pass(swap.__name__, run, swap, options_of_swap, stage="normalised")
        entries.append(entry)
    last = replace(_entry("split_gradient_sums"), stage="backward")
    return [*entries, _entry("remove_noop_views"), last]


def _entry(name: str) -> passes.Pass:
    function = passes.function(name)
    return passes.Pass(name, function, function, stage="normalised")


def wanted(
    session: Session, every: Sequence[passes.Pass], *, training: bool, on_cuda: bool
) -> list[passes.Pass]:
    """Return those of the ordered passes that this mode and these options call for.

    On the CPU there are no kernels, only what inductor makes of an op's decomposition: without
    dropout that gains nothing, and the graph is left to the bit unless kernels="triton" asks.
    """
    options = session.options
    drops = training and options.dropout > 0
    gains = drops or on_cuda or options.kernels == "triton"
    swaps = training and gains and options.kernels != "off" and options.backend != "eager"
    asked = any(p.normalised and p.name not in passes.PASSES for p in every)
    chosen = []
    for entry in every:
        if entry.name == passes.INSERT_RESIDUAL_DROPOUT and not drops:
            continue
        if entry.stage == "backward":
            chosen += [entry] if options.backend == "inductor" else []
            continue
        ours = entry.normalised and entry.name in passes.PASSES
        if not ours or swaps or (asked and entry.name == passes.NORMALISE):
            chosen.append(entry)
    return chosen


class OnBackward:
    """The passes of the backward, as inductor calls them on each backward graph of one forward's.

    Dynamo's graph may be cut into pieces (DDP), each with a backward of its own.
    """

    def __init__(self, to_run: Sequence[passes.Pass], dump_dir: Path | None, *, num_before: int):
        self._to_run = to_run
        self._dump_dir = dump_dir
        self._num_before = num_before
        self._results = [passes.PassResult(name=p.name) for p in to_run]
        self._has_run = False

    def __call__(self, graph: fx.Graph) -> None:
        """Run them on a graph of inductor's."""
        module = graph.owning_module
        assert module is not None
        found = passes.run_passes(
            module, self._to_run, dump_dir=self._dump_dir, num_before=self._num_before
        )
        for result, more in zip(self._results, found, strict=True):
            if not self._has_run:
                result.skipped.clear()
            result.add(more)
        self._has_run = True

    def results(self) -> list[passes.PassResult]:
        """Return what the passes did so far; a backward compiled later still is counted in it."""
        if not self._has_run:
            for result in self._results:
                result.skipped = {"no backward was lowered: none is needed, or a cache had it": 1}
        return self._results


def compile_swapped(
    session: Session,
    module: fx.GraphModule,
    inputs: list[Any],
    *,
    to_run: Sequence[passes.Pass],
    dump_dir: Path | None,
    num_before: int,
    num_behind: int,
    compile_graph: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    results: list[passes.PassResult],
    verify: bool,
    on_backward: OnBackward,
) -> Callable[..., Any]:
    """Compile a graph with the passes of the normalised graph run on a copy.

    If one of ours fails, or the compiler on what they made, the graph itself is compiled: whatever
    goes wrong here costs kernels and nothing else. A failure of the user's passes is raised.

    Args:     num_before, num_behind: passes before and behind these, for the numbering.
              results: what receives a PassResult a pass, if they served, on_backward's behind.
              verify: hold the first step against the graph without them.
    """
    if not to_run:
        compiled = compile_graph(module, inputs)
        results += on_backward.results()
        return compiled
    has_theirs = any(p.name not in passes.PASSES for p in to_run)
    try:
        copy = clone_graph(module)
        found: list[passes.PassResult] = []
        stages = []
        for number, entry in enumerate(to_run):
            place = num_before + number
            left = len(to_run) - number - 1 + num_behind
            found += passes.run_passes(
                copy, [entry], dump_dir=dump_dir, num_before=place, num_behind=left
            )
            if verify:
                stages.append((entry.name, clone_graph(copy)))
        compiled = compile_graph(copy, inputs)
    except Exception as error:
        blamed = getattr(error, "pass_name", "")
        theirs = blamed not in passes.PASSES if blamed else has_theirs
        if theirs or torch_compat.is_for_dynamo(error):
            raise
        compiled = compile_graph(module, inputs)  # raises where the swaps are not at fault
        results += on_backward.results()
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        log.warning("no kernels are swapped in, dropout stays as it is: %s", reason)
        session.note(f"no kernels are swapped in: {reason}")
        return compiled
    results += found + on_backward.results()
    if verify and any(r.num_replaced for r in found if r.name in passes.PASSES):
        return VerifiedGraph(
            session,
            compiled,
            lambda other: compile_graph(clone_graph(other), inputs),
            module,
            stages,
        )
    return compiled
