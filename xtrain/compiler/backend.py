"""The torch.compile backend: run the passes on a graph, then hand it on with its seeds.

first        on a copy of Dynamo's graph: dropout, switch_dropout, passes of the user's
then         on a copy of that: normalise, swaps for kernels. What fails here costs kernels alone
last         inside inductor, on backward graphs that it is about to lower
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from xtrain import passes, torch_compat
from xtrain.compiler.compile_report import ENTRY_ROOT, without_locals
from xtrain.compiler.compile_session import Session
from xtrain.compiler.seeds import Seeds, is_entry
from xtrain.compiler.strict import check_covered, failures_explained
from xtrain.compiler.verify import VerifiedGraph
from xtrain.passes.graph import called_bodies, clone_graph
from xtrain.passes.sites.insert_residual_dropout import InsertResult, insert_residual_dropout
from xtrain.passes.sites.switch_dropout import switch_dropout
from xtrain.passes.swaps.normalise import normalise, remove_noop_views
from xtrain.passes.swaps.split_gradient_sums import split_gradient_sums

log = logging.getLogger("xtrain.passes")

_SWAPS = tuple(map(passes.function, passes.SWAPS))


class Backend:
    """What Dynamo calls with each graph of one mode, training or evaluation."""

    def __init__(self, session: Session, *, training: bool, switchable: bool = False):
        self.session = session
        self.training = training
        self.switchable = switchable  # some modules train and others do not
        self.drops = training and session.options.dropout > 0
        # Dynamo shows this name in logs and errors.
        self.__name__ = "xtrain_train" if training else "xtrain_eval"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs; the module itself is left as it is."""
        session, options, report = self.session, self.session.options, self.session.report
        report.num_train_graphs += self.training
        report.num_eval_graphs += not self.training
        inputs = list(example_inputs)
        general = self._general(module)
        staged = _Staged(self._passes(general, on_cuda=torch_compat.any_on_cuda(inputs)))
        inner = torch_compat.inner_backend(
            options.backend,
            mode=options.mode,
            options=options.options,
            dynamic=options.dynamic,
            backward_pass=staged.run_on_backward if staged.of("backward") else None,
            backward_key=passes.cache_key(staged.of("backward")),
        )
        if not staged.of("traced", "normalised"):  # as Dynamo traced it
            return self._compile(inner, module, inputs, "")
        staged.dump_dir = self._dump_dir()
        key = passes.cache_key(staged.passes, (options.backend, options.kernels))
        compile_graph = functools.partial(self._compile, inner, key=key)
        module = clone_graph(module)
        results = staged.run(module, staged.of("traced"))
        report.passes += results if self.training else []
        if not self.drops:
            return self._swapped(staged, module, inputs, compile_graph)
        inserted = next((r for r in results if isinstance(r, InsertResult)), InsertResult())
        unseeded = [
            without_locals(line.replace(f"{ENTRY_ROOT}.", "").replace(ENTRY_ROOT, "the model"))
            for line in inserted.unseeded
        ]
        report.unseeded = list(dict.fromkeys([*report.unseeded, *unseeded]))
        check_covered(session, inserted)
        seeds = Seeds(session, module, inserted.slots, switchable=self.switchable)
        if self.switchable:
            switch_dropout(module)
        if seeds.num_rows:
            example = torch_compat.fake_like_inputs(inputs, seeds.example())
            seeds.placeholder.meta["example_value"] = example
            inputs.append(example)
        with failures_explained(session, module):
            compiled = self._swapped(staged, module, inputs, compile_graph)
        return self._recorded(seeds.feed(compiled), inserted)

    def _general(self, module: fx.GraphModule) -> str:
        """Which sites the account may add in a graph: what it shows of the forward decides."""
        if not is_entry(module):
            return "none"
        if self.session.per_block:
            return "stream"
        whole = len(torch_compat.graph_breaks()) == self.session.breaks_at_start
        return "all" if whole else "none"

    def _passes(self, general: str, *, on_cuda: bool) -> list[passes.Pass]:
        """The passes of a graph in running order, those that this mode and these options call for.

        On the CPU there are no kernels, only what inductor makes of an op's decomposition: without
        dropout that gains nothing, and the graph is left to the bit unless kernels="triton" asks.
        """
        options = self.session.options
        ordered = passes.order(self._ours(general), options.passes, options.disable_passes)
        gains = self.drops or on_cuda or options.kernels == "triton"
        swaps = self.training and gains and options.kernels != "off" and options.backend != "eager"
        asked = any(p.normalised and p.name not in passes.PASSES for p in ordered)

        def is_wanted(entry: passes.Pass) -> bool:
            if entry.stage == "traced":
                return self.drops or entry.name != passes.INSERT_RESIDUAL_DROPOUT
            if entry.stage == "backward":
                return options.backend == "inductor"
            is_theirs = entry.name not in passes.PASSES
            return swaps or is_theirs or (asked and entry.name == passes.NORMALISE)

        return list(filter(is_wanted, ordered))

    def _ours(self, general: str) -> list[passes.Pass]:
        """Return xtrain's own passes in running order, with their options."""
        options = self.session.options
        insertion = functools.partial(
            insert_residual_dropout,
            p=options.dropout,
            existing=options.existing,  # type: ignore[arg-type]
            settled=options.settled,
            general=general,
        )
        of_insertion = (
            ("p", options.dropout),
            ("existing", options.existing),
            ("sums", tuple(options.sums.items())),
            ("general", general),
        )
        name = passes.INSERT_RESIDUAL_DROPOUT
        source = insert_residual_dropout
        ours = [passes.Pass(name, insertion, source, of_insertion, drops=True)]
        for function in (normalise, *_SWAPS, remove_noop_views):
            keywords: dict[str, Any] = {}
            if function in _SWAPS:
                keywords = {"kernels": options.kernels, "backend": options.backend}
                if "logits" in inspect.signature(function).parameters:
                    keywords["logits"] = options.logits
            run = functools.partial(function, **keywords)
            of_pass = tuple(keywords.items())
            ours.append(passes.Pass(function.__name__, run, function, of_pass, "normalised"))
        last = split_gradient_sums
        return [*ours, passes.Pass(last.__name__, last, last, stage="backward")]

    def _dump_dir(self) -> Path | None:
        """The folder for this graph's dumps, made if there is to be one."""
        folder = self.session.options.dump_graphs
        if folder is None:
            return None
        report = self.session.report
        number = report.num_train_graphs if self.training else report.num_eval_graphs
        folder = folder / f"{'train' if self.training else 'eval'}_graph_{number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _swapped(
        self,
        staged: _Staged,
        module: fx.GraphModule,
        inputs: list[Any],
        compile_graph: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """Compile a graph with the passes of the normalised graph run on a copy.

        If one of ours fails, or the compiler on what they made, the graph itself is compiled:
        whatever goes wrong here costs kernels and nothing else. A failure of the user's passes is
        raised.
        """
        to_run = staged.of("normalised")
        verify = self.session.options.verify and self.training
        found: list[passes.PassResult] = []
        stages = []
        try:
            copy = clone_graph(module) if to_run else module
            for entry in to_run:
                found += staged.run(copy, [entry])
                if verify:
                    stages.append((entry.name, clone_graph(copy)))
            compiled = compile_graph(copy, inputs)
        except Exception as error:
            blamed = getattr(error, "pass_name", "")
            suspects = [blamed] if blamed else [p.name for p in to_run]
            is_ours = bool(to_run) and all(name in passes.PASSES for name in suspects)
            if not is_ours or torch_compat.is_for_dynamo(error):
                raise
            compiled = compile_graph(module, inputs)  # raises where the swaps are not at fault
            found = []
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            log.warning("no kernels are swapped in, dropout stays as it is: %s", reason)
            self.session.note(f"no kernels are swapped in: {reason}")
        if self.training:
            self.session.report.passes += found + staged.results_of_backward()
        if verify and any(r.num_replaced for r in found if r.name in passes.PASSES):
            return VerifiedGraph(
                self.session,
                compiled,
                lambda other: compile_graph(clone_graph(other), inputs),
                module,
                stages,
            )
        return compiled

    def _recorded(self, run: Callable[..., Any], inserted: InsertResult) -> Callable[..., Any]:
        """Return `run`, which shows itself to the recording of a forward that has one."""
        session, found = self.session, inserted.found
        session.is_recording_wanted = True  # what ran beside a new graph is to be seen

        def run_seen(*inputs: Any) -> Any:
            program, call = session.recording, session.call
            is_watched = call is not None and call.samples.is_watching
            if found is None or not (program or is_watched):
                return run(*inputs)
            with torch_compat.real_tensors():  # and without the modes that see what no graph holds
                results = run(*inputs)
            if program is not None:
                program.note_graph(found, inputs, results)
            return results

        return run_seen

    def _compile(
        self, inner: Callable[..., Any], module: fx.GraphModule, inputs: list[Any], key: str
    ) -> Callable[..., Any]:
        ddp_module = torch_compat.active_ddp_module()
        backend = inner
        if ddp_module is not None and self.session.options.backend != "eager":
            if any(called_bodies(n) for n in module.graph.nodes):
                self.session.note(
                    "DDP's graph splitter is off: checkpointed blocks cannot be cut at buckets, so "
                    "gradients are reduced after the whole backward"
                )
            else:
                backend = torch_compat.ddp_backend(ddp_module, inner)
        with torch_compat.cache_key_tag(key):
            return backend(module, inputs)


class _Staged:
    """The passes of one graph, numbered as one list whatever the stage that runs them.

    Inductor calls those of the backward for each backward graph of the forward's: Dynamo's graph
    may be cut into pieces (DDP), each with a backward of its own.
    """

    def __init__(self, to_run: Sequence[passes.Pass]):
        self.passes = list(to_run)
        self.dump_dir: Path | None = None
        self._of_backward = [passes.PassResult(name=p.name) for p in self.of("backward")]
        self._has_backward_run = False

    def of(self, *stages: str) -> list[passes.Pass]:
        """Return the passes of these stages."""
        return [p for p in self.passes if p.stage in stages]

    def run(self, module: fx.GraphModule, some: Sequence[passes.Pass]) -> list[passes.PassResult]:
        """Run neighbours in the list on a graph."""
        before = self.passes.index(some[0]) if some else 0
        behind = len(self.passes) - before - len(some)
        return passes.run_passes(
            module, some, dump_dir=self.dump_dir, num_before=before, num_behind=behind
        )

    def run_on_backward(self, graph: fx.Graph) -> None:
        """Run the passes of the backward on a graph of inductor's."""
        module = graph.owning_module
        assert module is not None
        found = self.run(module, self.of("backward"))
        for result, more in zip(self._of_backward, found, strict=True):
            if not self._has_backward_run:
                result.skipped.clear()
            result.add(more)
        self._has_backward_run = True

    def results_of_backward(self) -> list[passes.PassResult]:
        """Return what they did so far; a backward compiled later still is counted in it."""
        if not self._has_backward_run:
            for result in self._of_backward:
                result.skipped = {"no backward was lowered: none is needed, or a cache had it": 1}
        return self._of_backward
