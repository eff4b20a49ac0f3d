"""The torch.compile backend: run the passes on a graph, hand it on, feed its seeds at each call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from xtrain import ops, passes, torch_compat
from xtrain.blocks import Blocks
from xtrain.dynamic_shapes import ShapeWatch
from xtrain.passes import fx_utils
from xtrain.passes.insert_residual_dropout import (
    SEEDS,
    InsertResult,
    SiteSlot,
    insert_residual_dropout,
)
from xtrain.passes.residual_sites import find_cut_adds, is_parameter
from xtrain.report import Report, Site
from xtrain.rng import site_seed
from xtrain.step_keys import ReplayLedger, StepKey, StepKeys

# The name under which our entry functions hold the model: graphs traced from them say so.
ENTRY_ROOT = "L['_xtrain_model']"


class SiteError(RuntimeError):
    """A residual site that xtrain.compile cannot cover, or that a forward did not execute."""


@dataclass(frozen=True)
class Options:
    """The keywords of xtrain.compile, checked."""

    dropout: float
    backend: str
    kernels: str
    existing: str
    strict: bool
    passes: tuple[Any, ...]
    disable_passes: tuple[str, ...]
    dump_graphs: Path | None
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False


@dataclass
class Call:
    """One training forward in progress: its key, its batch, the sites that have run so far."""

    key: StepKey
    batch: int
    executed: list[Site] = field(default_factory=list)
    _claims: dict[tuple[str, str], int] = field(default_factory=dict)

    def claim(self, block: str, kind: str) -> str:
        """Return the site's name within its block: the kind, numbered from the second on."""
        count = self._claims[block, kind] = self._claims.get((block, kind), 0) + 1
        return kind if count == 1 else f"{kind}_{count}"


class Session:
    """What the graphs of one compiled model share: options, keys, sites, the running call."""

    def __init__(
        self, model: nn.Module, options: Options, keys: StepKeys, *, per_block: bool = False
    ):
        self.model = model
        self.per_block = per_block
        self.options = options
        self.keys = keys
        self.blocks = Blocks(model)
        self.shapes = ShapeWatch(options.dynamic)
        self.sites: dict[tuple[str, str], Site] = {}
        self.report = Report()
        self.ledger: ReplayLedger[torch.Tensor] = ReplayLedger()
        self._local = threading.local()
        self._owners: dict[int, str | None] = {}

    @property
    def call(self) -> Call | None:
        """The training forward that runs in this thread, or None."""
        stack = getattr(self._local, "stack", None)
        return stack[-1] if stack else None

    def push(self, call: Call | None) -> None:
        """Enter a forward; None stands for one without dropout."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append(call)

    def pop(self) -> None:
        """Leave the forward that was entered last."""
        self._local.stack.pop()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the compiled model runs in this thread, with dropout or without."""
        return bool(getattr(self._local, "stack", None))

    @property
    def block(self) -> str | None:
        """The path of the block that runs in this thread by a graph of its own, or None."""
        return getattr(self._local, "block", None)

    @contextmanager
    def running_block(self, path: str) -> Iterator[None]:
        """Say which of the layers that share a graph runs inside the context."""
        outer, self._local.block = self.block, path
        try:
            yield
        finally:
            self._local.block = outer

    def site(self, block: str, name: str, dropout: str = "xtrain") -> Site:
        """Return the site of that name in a block, listing it in the report on first sight."""
        site = self.sites.get((block, name))
        if site is None:
            full_name = f"{block}.{name}" if block else name
            site = Site(full_name, self.blocks.layer(block), name, dropout)
            self.sites[block, name] = site
        return site

    def owner_block(self, parameter: torch.Tensor) -> str | None:
        """Return the block that holds a parameter, None when none or several do."""
        key = id(parameter)
        if key not in self._owners:
            self._owners = {}
            for name, candidate in self.model.named_parameters(remove_duplicate=False):
                block = self.blocks.block_of(name)
                known = self._owners.get(id(candidate), block)
                self._owners[id(candidate)] = block if known == block else None
        return self._owners.get(key)

    def note(self, text: str) -> None:
        """Add a line to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)


class Backend:
    """What Dynamo calls with each graph of one mode (training with dropout, or without)."""

    def __init__(self, session: Session, *, training: bool):
        self.session = session
        self.training = training
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
        inner = torch_compat.inner_backend(
            options.backend, mode=options.mode, options=options.options, dynamic=options.dynamic
        )
        if not self.training:
            return self._compile(inner, module, list(example_inputs), "")
        module = fx_utils.clone_graph(module)
        inserted, results = self._run_passes(module)
        report.passes += results
        report.unseeded += [line for line in inserted.unseeded if line not in report.unseeded]
        self._check_covered(module, inserted)
        rows = [slot for slot in inserted.slots if slot.covered_by == "xtrain"]
        if not rows:
            feeder = Seeds(session, module, inserted.slots)
            return feeder.watch(self._compile(inner, module, list(example_inputs), ""))
        feeder = Seeds(session, module, inserted.slots)
        seeds = torch_compat.fake_like_inputs(example_inputs, feeder.example())
        feeder.placeholder.meta["example_value"] = seeds
        key = passes.cache_key(self._passes(InsertResult()), (options.backend, options.kernels))
        return feeder.feed(self._compile(inner, module, [*example_inputs, seeds], key))

    def _passes(self, inserted: InsertResult) -> list[passes.Pass]:
        options = self.session.options

        def insert(graph: fx.Graph) -> InsertResult:
            result = insert_residual_dropout(
                graph,
                p=options.dropout,
                existing=options.existing,  # type: ignore[arg-type]
            )
            inserted.__dict__.update(result.__dict__)
            return result

        builtin = passes.Pass(
            passes.INSERT_RESIDUAL_DROPOUT,
            insert,
            insert_residual_dropout,
            (("p", options.dropout), ("existing", options.existing)),
        )
        return passes.order([builtin], options.passes, options.disable_passes)

    def _run_passes(self, module: fx.GraphModule) -> tuple[InsertResult, list[passes.PassResult]]:
        inserted = InsertResult()
        dump = self.session.options.dump_graphs
        if dump is not None:
            dump = dump / f"graph_{self.session.report.num_train_graphs:02d}"
            dump.mkdir(parents=True, exist_ok=True)
        results = passes.run_passes(module, self._passes(inserted), dump_dir=dump)
        return inserted, results

    def _check_covered(self, module: fx.GraphModule, inserted: InsertResult) -> None:
        report = self.session.report
        lines = [
            f"{slot.kind} in {_readable_path(slot.path)}: {slot.reason}"
            for slot in inserted.slots
            if not slot.covered_by
        ]
        if not _is_entry(module):
            lines += [
                f"{add.name} ({fx_utils.module_path(add) or 'the frame'}): a graph break lies "
                "between the residual stream, the branch and their add"
                for add in find_cut_adds(module.graph)
            ]
        report.uncovered += [line for line in lines if line not in report.uncovered]
        if lines and self.session.options.strict:
            raise SiteError(
                "a residual site gets no dropout: "
                + "; ".join(lines)
                + ". Remove the cause (TORCH_LOGS=graph_breaks shows where a graph broke), or pass "
                "strict=False to train without dropout there."
            )

    def _compile(
        self, inner: Callable[..., Any], module: fx.GraphModule, inputs: list[Any], key: str
    ) -> Callable[..., Any]:
        ddp_module = torch_compat.active_ddp_module()
        backend = inner
        if ddp_module is not None and self.session.options.backend != "eager":
            if any(fx_utils.called_bodies(n) for n in module.graph.nodes):
                self.session.note(
                    "DDP's graph splitter is off: checkpointed blocks cannot be cut at buckets, so "
                    "gradients are reduced after the whole backward"
                )
            else:
                backend = torch_compat.ddp_backend(ddp_module, inner)
        with torch_compat.cache_key_tag(key):
            return backend(module, inputs)


class Seeds:
    """Fill the seeds input of one graph at each call: a (seed, offset) pair for each site."""

    def __init__(self, session: Session, module: fx.GraphModule, slots: list[SiteSlot]):
        self.session = session
        self.slots = slots
        nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._index = {node: i for i, node in enumerate(nodes)}
        self._sizes = _SizeReader(nodes)
        self._blocks = [self._static_block(slot) for slot in slots]
        # A graph of the whole model is recomputed through the model's forward, which knows its key.
        self.is_whole = _is_entry(module) and not session.per_block
        self.num_rows = sum(slot.covered_by == "xtrain" for slot in slots)
        self.device = torch.device("cpu")
        for node in nodes:
            if node.target == SEEDS:
                self.placeholder = node
                self.device = node.meta["example_value"].device

    def example(self) -> torch.Tensor:
        """Return a tensor of the seeds input's form."""
        return torch.empty(2 * self.num_rows, dtype=torch.int64, device=self.device)

    def feed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled` without its last input, which is made here at each call."""

        def run(*inputs: Any) -> Any:
            return compiled(*inputs, self.tensor(inputs))

        return run

    def watch(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled`, noting the sites that the model's own dropout covers."""

        def run(*inputs: Any) -> Any:
            if self.session.call is not None:
                self.numbers(self.session.call, inputs)
            return compiled(*inputs)

        return run if self.slots else compiled

    def tensor(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Return a fresh seeds tensor: a buffer changed in place would break a second forward."""
        call = self.session.call
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if call is None:
            return self.session.ledger.find(id(self), tensors)
        seeds = torch.tensor(self.numbers(call, inputs), dtype=torch.int64)
        if self.device.type == "cuda":
            seeds = seeds.pin_memory().to(self.device, non_blocking=True)
        elif self.device.type != "cpu":
            seeds = seeds.to(self.device)
        if not self.is_whole:
            self.session.ledger.record(id(self), tensors, seeds)
        return seeds

    def numbers(self, call: Call, inputs: Sequence[Any]) -> list[int]:
        """Return the (seed, offset) pairs of this call, flat, and mark the sites as executed."""
        flat: list[int] = []
        key = call.key
        for slot, static_block in zip(self.slots, self._blocks, strict=True):
            if not slot.covered_by:
                continue
            block = static_block or self.session.block or self._block(slot, inputs)
            site = self.session.site(block, call.claim(block, slot.kind), slot.covered_by)
            call.executed.append(site)
            if slot.covered_by == "xtrain":
                offset = 0
                if key.first_sample:
                    offset = key.first_sample * self._per_sample(slot, site, call, inputs)
                flat += (
                    site_seed(key.base_seed, key.step, site.layer, site.site),
                    _wrap(offset),
                )
        return flat

    def _static_block(self, slot: SiteSlot) -> str | None:
        """The block that the add's own module path names, for graphs traced from our entry.

        In a graph of one block paths begin at the block, and say nothing of which it is.
        """
        if self.session.per_block or not slot.path.startswith(ENTRY_ROOT + "."):
            return None
        return self.session.blocks.block_of(slot.path.removeprefix(ENTRY_ROOT + "."))

    def _block(self, slot: SiteSlot, inputs: Sequence[Any]) -> str:
        """The block that owns the branch's parameters: also right where layers share a graph."""
        for witness in slot.witnesses:
            position = self._index.get(witness)
            if position is not None and position < len(inputs):
                block = self.session.owner_block(inputs[position])
                if block is not None:
                    return block
        if slot.path.startswith(ENTRY_ROOT) and not self.session.per_block:
            return slot.path.removeprefix(ENTRY_ROOT).removeprefix(".")
        raise SiteError(
            f"cannot tell which block a {slot.kind} site in {_readable_path(slot.path)} belongs "
            "to: its graph shows neither a module path nor a parameter of one block alone. "
            "Compile the whole model without graph breaks."
        )

    def _per_sample(self, slot: SiteSlot, site: Site, call: Call, inputs: Sequence[Any]) -> int:
        shape = self._sizes.evaluate(slot.branch_shape, inputs)
        if shape[0] % call.batch:
            raise ValueError(
                f"site {site.name}: its value has shape {shape}, whose leading size is no multiple "
                f"of the batch of {call.batch}, so first_sample={call.key.first_sample} names no "
                "element of it. Use first_sample=0, or a model whose batch dimension is first."
            )
        return functools.reduce(lambda a, b: a * b, shape, 1) // call.batch


class _SizeReader:
    """Evaluate sizes that were symbols at trace time from the inputs of a call."""

    def __init__(self, placeholders: Sequence[fx.Node]):
        self._where: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for position, node in enumerate(placeholders):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                self._where.setdefault(value.node.expr, (position, None))
            elif isinstance(value, torch.Tensor) and not is_parameter(node):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._where.setdefault(size.node.expr, (position, dim))

    def evaluate(self, shape: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self._size(size, inputs) for size in shape)

    def _size(self, size: Any, inputs: Sequence[Any]) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        values = {}
        for symbol in expression.free_symbols:
            position, dim = self._where[symbol]
            value = inputs[position]
            values[symbol] = int(value) if dim is None else value.shape[dim]
        return int(expression.subs(values))


def _is_entry(module: fx.GraphModule) -> bool:
    """Whether a graph was traced from our entry, so that it holds the model from its first op."""
    return any(
        torch_compat.source_name(n).startswith(ENTRY_ROOT)
        for n in module.graph.nodes
        if n.op == "placeholder"
    )


def _readable_path(path: str) -> str:
    return path.removeprefix(ENTRY_ROOT).removeprefix(".") or "the model's own forward"


def _wrap(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_ = ops  # the graphs that are built here call xtrain's ops, which importing registers
