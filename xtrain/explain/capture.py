"""Run one training forward through xtrain.compile and keep what each pass saw."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

import xtrain
from xtrain import passes as graph_passes
from xtrain import torch_compat
from xtrain.compiler import entries
from xtrain.compiler.backend import Backend
from xtrain.compiler.compile_report import Report
from xtrain.compiler.compile_session import Session, SiteError
from xtrain.config import ConfigError
from xtrain.explain.graphs import (
    GraphRecord,
    SiteMark,
    Snapshot,
    Stage,
    follow,
    parameter_path,
    snapshot,
)
from xtrain.passes.graph import short_place
from xtrain.passes.sites.insert_residual_dropout import InsertResult
from xtrain.subject import Subject

DEFAULTS = {
    "dropout": 0.1,
    "existing": "skip",
    "kernels": "auto",
    "logits": "keep",
    "dtype": "fp32",
    "disable_passes": (),
    "backend": "aot_eager",  # inductor's passes and graph, without its code
}


@dataclass
class Explanation:
    """What one training forward showed. `refusal` is what strict mode raises, "" if nothing.

    What `verify` found stands in the report; a failure of it is not raised here.
    """

    subject: Subject
    options: dict[str, Any]
    report: Report
    graphs: list[GraphRecord]
    graph_breaks: list[tuple[str, str]]
    refusal: str = ""

    @property
    def breaks(self) -> list[str]:
        """Say where the graph breaks and why, without the hints behind a reason."""
        return [
            f"{short_place(place)}: {reason.strip().splitlines()[0]}"
            for place, reason in self.graph_breaks
        ]


def explain(subject: Subject, *, passes: Sequence[Any] = (), **options: Any) -> Explanation:
    """Compile and run one training forward of a model; strict mode's refusal does not end it.

    Args:     passes, options: as for xtrain.compile, seed 0, and dtype: "bf16" for a forward under
              autocast. What is not given is as the subject trains, else dropout 0.1, backend
              "aot_eager", dtype "fp32". With verify the backward runs as well.
    Raises:   ConfigError if no residual site is found or the model's own forward fails.
    """
    options = {**DEFAULTS, **subject.options, **options}
    try:
        found = _run(subject, passes, {**options, "strict": True})
    except SiteError as error:
        found = _run(subject, passes, {**options, "strict": False})
        found.refusal = str(error)
    if options["dropout"] and not found.report.sites and not found.report.uncovered:
        pieces = "".join(
            f" (within one of the pieces that graph breaks leave: {where})"
            for where in found.breaks[:1]
        )
        raise ConfigError(
            f"no residual sites in {subject.title}: no branch with a projection is added back onto "
            f"the value that it reads{pieces}"
        )
    return found


def _run(subject: Subject, passes: Sequence[Any], options: dict[str, Any]) -> Explanation:
    model = subject.model.train()
    keywords = {name: value for name, value in options.items() if name != "dtype"}
    try:
        compiled = xtrain.compile(model, seed=0, passes=passes, **keywords)
    except (TypeError, ValueError) as error:  # what --disable-pass or --pass names
        raise ConfigError(str(error)) from None
    compiled._session.verify_raises = False
    backend = _WatchedBackend(compiled._session)
    entry = torch.compile(
        torch_compat.fresh_entry(entries.call_module, "xtrain_explain", model), backend=backend
    )
    compiled._entries = {True: functools.partial(entry, model), False: model}
    num_breaks = len(torch_compat.graph_breaks())
    with torch.autocast("cpu", torch.bfloat16, enabled=options["dtype"] == "bf16"):
        try:
            outputs = compiled(*subject.args, **subject.kwargs)
        except SiteError:
            raise
        except graph_passes.PassError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            _check_runs_alone(subject, model, error)
            raise
    if options.get("verify"):
        _run_backward(outputs)
    if not backend.graphs:
        raise ConfigError(f"Dynamo traced no graph of {subject.title}: is it compiled already?")
    breaks = torch_compat.graph_breaks()[num_breaks:]
    return Explanation(subject, options, compiled.report(), backend.graphs, breaks)


def _run_backward(outputs: Any) -> None:
    """Run the backward of a forward: of its loss, of what it returns where there is none."""
    ends = [x for x in entries.tensors_in(outputs) if x.requires_grad]
    losses = [x for x in ends if x.ndim == 0]
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.ones_like(x) if losses else torch.randn(x.shape, generator=generator).to(x.dtype)
        for x in losses or ends
    ]
    if gradients:
        torch.autograd.backward(losses or ends, gradients)


def _check_runs_alone(subject: Subject, model: nn.Module, error: Exception) -> None:
    """Raise ConfigError if the model's own forward fails on these inputs; else it is our fault."""
    try:
        model(*subject.args, **subject.kwargs)
    except Exception as own:
        raise ConfigError(
            f"the forward of {subject.title} fails by itself: {type(own).__name__}: {own}"
            f"{subject.advice}"
        ) from error


class _WatchedBackend(Backend):
    """The backend of training graphs, keeping each graph before, between and after the passes."""

    def __init__(self, session: Session):
        super().__init__(session, training=True)
        self.graphs: list[GraphRecord] = []
        self._paths = {id(p): name for name, p in session.model.named_parameters()}
        self._frame = ("", "")
        self._is_tracing = False
        self._watching_ms: list[tuple[graph_passes.PassResult, float]] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._frame = self._frame_path(module, example_inputs)
        record = GraphRecord(self._snapshot(module))
        self.graphs.append(record)
        self._is_tracing = True
        try:
            compiled = super().__call__(module, example_inputs)
        except BaseException:
            self.graphs.remove(record)  # Dynamo may call again with another trace
            raise
        self._finish(record)
        self._is_tracing = False

        def run(*inputs: Any) -> Any:
            call = self.session.call
            start = len(call.executed) if call is not None else 0
            result = compiled(*inputs)
            if call is not None:
                names = [site.name for site in call.executed[start:]]
                covered = [mark for mark in record.sites if mark.covered_by]
                for mark, name in zip(covered, names, strict=False):
                    mark.names += [name] if name not in mark.names else []
            return result

        return run

    def _passes(self, *args: Any, **kwargs: Any) -> list[graph_passes.Pass]:
        found = super()._passes(*args, **kwargs)
        return [p if p.stage == "backward" else replace(p, run=self._watched(p)) for p in found]

    def _watched(self, entry: graph_passes.Pass) -> graph_passes.run.PassFn:
        def run(graph: fx.Graph) -> graph_passes.PassResult | None:
            record, module = self.graphs[-1], graph.owning_module
            assert module is not None
            start = time.perf_counter()
            before = self._snapshot(module)
            spent = time.perf_counter() - start
            result = entry.run(graph)
            start = time.perf_counter()
            if isinstance(result, InsertResult):
                record.sites = [
                    SiteMark([], slot.kind, slot.covered_by, slot.reason, slot.add, slot.own)
                    for slot in result.slots
                ]
            record.stages.append(Stage(entry.name, before, self._snapshot(module)))
            result = graph_passes.PassResult() if result is None else result
            self._watching_ms.append((result, (spent + time.perf_counter() - start) * 1e3))
            return result

        return run

    def _compile(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        module = next(a for a in args if isinstance(a, fx.GraphModule))
        if self._is_tracing:  # else verify= looks for what is wrong in another form of a graph
            self.graphs[-1].after = self._snapshot(module)
        return super()._compile(*args, **kwargs)

    def _finish(self, record: GraphRecord) -> None:
        keys = record.after.by_key().keys()
        while record.stages and record.stages[-1].after.by_key().keys() != keys:
            record.stages.pop()  # a pass behind it failed, and the graph of all these was dropped
        for result, watching in self._watching_ms:  # the runner timed that as well
            result.time_ms -= watching
        self._watching_ms.clear()
        record.changes = follow(record.before, record.after, record.stages)
        ours = [mark for mark in record.sites if mark.covered_by == "xtrain"]
        for node in record.after.nodes:
            if node.row is not None and node.row < len(ours):
                ours[node.row].dropout = node.key

    def _snapshot(self, module: fx.GraphModule) -> Snapshot:
        return snapshot(module, self._block_of)

    def _block_of(self, path: str) -> str | None:
        local, real = self._frame
        if local and (path == local or path.startswith(f"{local}.")):
            path = (real + path.removeprefix(local)).removeprefix(".")
        return self.session.blocks.block_of(path)

    def _frame_path(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, str]:
        """The variable that holds a module in the frame of a piece, and that module's path.

        A parameter tells: the piece calls it self.mlp.weight, the model layers.0.mlp.weight.
        """
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for node, value in zip(placeholders, inputs, strict=False):
            path, local = self._paths.get(id(value)), parameter_path(node)
            variable, _, rest = local.partition(".")
            if path is not None and rest and f".{path}".endswith(f".{rest}"):
                return variable, path.removesuffix(rest).removesuffix(".")
        return "", ""
