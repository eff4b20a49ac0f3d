"""The torch.compile backend: run the passes on a graph, then hand it on with its seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from xtrain import passes, torch_compat
from xtrain.compiler.backend_failures import failures_explained
from xtrain.compiler.seeds import ENTRY_ROOT, Seeds, is_entry, without_locals
from xtrain.compiler.session import Session, SiteError
from xtrain.compiler.swaps import (
    OnBackward,
    compile_swapped,
    passes_of_normalised_graph,
    wanted,
)
from xtrain.compiler.uncovered import counted, refusal, uncovered_sites, unexplained
from xtrain.passes.graph import called_bodies, clone_graph
from xtrain.passes.sites.insert_residual_dropout import InsertResult, insert_residual_dropout
from xtrain.passes.sites.switch_dropout import switch_dropout


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
        session, options = self.session, self.session.options
        report = session.report
        if self.training:
            report.num_train_graphs += 1
        else:
            report.num_eval_graphs += 1
        inputs = list(example_inputs)
        inserted = InsertResult()
        general = self._general(module)
        to_run = self._passes(inserted, general, on_cuda=torch_compat.any_on_cuda(inputs))
        first, second, third = (
            [p for p in to_run if p.stage == stage]
            for stage in ("traced", "normalised", "backward")
        )
        dump_dir = self._dump_dir() if first or second else None
        on_backward = OnBackward(third, dump_dir, num_before=len(first) + len(second))
        inner = torch_compat.inner_backend(
            options.backend,
            mode=options.mode,
            options=options.options,
            dynamic=options.dynamic,
            backward_pass=on_backward if third else None,
            backward_key=passes.cache_key(third),
        )
        if not (first or second):  # nothing to drop, to swap or of the user's: as Dynamo traced it
            return self._compile(inner, module, inputs, "")
        key = passes.cache_key(to_run, (options.backend, options.kernels))
        module = clone_graph(module)
        behind = len(second) + len(third)
        results = passes.run_passes(module, first, dump_dir=dump_dir, num_behind=behind)
        report.passes += results if self.training else []
        compile_graph = functools.partial(self._compile, inner, key=key)
        swap = functools.partial(
            compile_swapped,
            session,
            to_run=second,
            dump_dir=dump_dir,
            num_before=len(first),
            num_behind=len(third),
            compile_graph=compile_graph,
            results=report.passes if self.training else [],
            on_backward=on_backward,
            verify=options.verify and self.training,
        )
        if not self.drops:
            return swap(module, inputs)
        unseeded = [
            without_locals(line.replace(f"{ENTRY_ROOT}.", "").replace(ENTRY_ROOT, "the model"))
            for line in inserted.unseeded
        ]
        report.unseeded = list(dict.fromkeys([*report.unseeded, *unseeded]))
        self._check_covered(module, inserted)
        seeds = Seeds(session, module, inserted.slots, switchable=self.switchable)
        if self.switchable:
            switch_dropout(module)
        if seeds.num_rows:
            example = torch_compat.fake_like_inputs(inputs, seeds.example())
            seeds.placeholder.meta["example_value"] = example
            inputs.append(example)
        with failures_explained(session, module):
            compiled = swap(module, inputs)
        run = seeds.feed(compiled) if seeds.num_rows else seeds.watch(compiled)
        return self._recorded(run, inserted)

    def _recorded(self, run: Callable[..., Any], inserted: InsertResult) -> Callable[..., Any]:
        """Return `run`, which shows itself to the recorder of a forward that has one."""
        session, found = self.session, inserted.found
        session.is_recording_wanted = True  # what ran beside a new graph is to be seen

        def run_seen(*inputs: Any) -> Any:
            recorder, call = session.recorder, session.call
            is_watched = call is not None and call.samples.is_watching
            if found is None or not (recorder or is_watched):
                return run(*inputs)
            with torch_compat.real_tensors():  # and without the modes that see what no graph holds
                results = run(*inputs)
            if recorder is not None:
                recorder.note_graph(found, inputs, results)
            return results

        return run_seen

    def _general(self, module: fx.GraphModule) -> str:
        """Which sites the account may add in a graph: what it shows of the forward decides."""
        if not is_entry(module):
            return "none"
        if self.session.per_block:
            return "stream"
        whole = len(torch_compat.graph_breaks()) == self.session.breaks_at_start
        return "all" if whole else "none"

    def _passes(self, inserted: InsertResult, general: str, *, on_cuda: bool) -> list[passes.Pass]:
        """The passes of this mode in running order; `inserted` receives the sites."""
        options = self.session.options

        def insert(graph: fx.Graph) -> InsertResult:
            result = insert_residual_dropout(
                graph,
                p=options.dropout,
                existing=options.existing,  # type: ignore[arg-type]
                settled=self.session.sums,
                general=general,
            )
            inserted.__dict__.update(result.__dict__)
            return result

        insertion = passes.Pass(
            passes.INSERT_RESIDUAL_DROPOUT,
            insert,
            insert_residual_dropout,
            (
                ("p", options.dropout),
                ("existing", options.existing),
                ("sums", tuple(options.sums.items())),
                ("general", general),
            ),
            drops=True,
        )
        every = [insertion, *passes_of_normalised_graph(self.session)]
        ordered = passes.order(every, options.passes, options.disable_passes)
        return wanted(self.session, ordered, training=self.training, on_cuda=on_cuda)

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

    def _check_covered(self, module: fx.GraphModule, inserted: InsertResult) -> None:
        report = self.session.report
        lines = uncovered_sites(inserted)
        if not self.session.per_block and inserted.found and inserted.found.account:
            account = inserted.found.account
            report.account = counted(account.entries)
            lines += [unexplained(e) for e in account.entries if e.verdict == "unexplained"]
        report.uncovered += [line for line in lines if line not in report.uncovered]
        if lines and self.session.options.strict:
            raise SiteError(refusal(lines, self.session))

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
