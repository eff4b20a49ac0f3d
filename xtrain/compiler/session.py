"""What the graphs of one compiled model share, and the strict checks on a forward's sites."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from xtrain.compiler.blocks import Blocks
from xtrain.compiler.dynamic_shapes import ShapeWatch
from xtrain.compiler.options import Options
from xtrain.compiler.report import Report, Site
from xtrain.compiler.step_keys import ReplayLedger, StepKey, StepKeys

# What to do about an op that a backend cannot trace.
UNTRACEABLE = (
    "Write that op without values that are read on the host (in transformers: "
    "experts_implementation='batched_mm', or 'grouped_mm' on bfloat16 weights), or pass "
    "strict=False to train without dropout there."
)


class SiteError(RuntimeError):
    """A residual site that xtrain.compile cannot cover, or that a forward did not execute."""


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
        # by mode: an evaluation at another size must not make the training graphs dynamic
        self.shapes = {mode: ShapeWatch(options.dynamic) for mode in (True, False)}
        self.symbols: tuple[str, ...] = ()  # sources of ints that layers do not share
        self.is_replaced = False  # whether another compile_blocks has taken the blocks over
        self.sites: dict[tuple[str, str], Site] = {}
        self.report = Report()
        self.failures: list[str] = []  # of the backend, after which Dynamo leaves code to eager
        self.last_executed: tuple[Site, ...] = ()
        self.ledger: ReplayLedger[torch.Tensor] = ReplayLedger()
        if options.logits == "drop" and (options.kernels == "off" or options.backend == "eager"):
            self.note("logits are kept: kernels='off' and backend='eager' swap no head and loss")
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
            try:
                layer = self.blocks.layer(block)
            except KeyError:
                raise _not_there(self.model, f"{block} is new") from None
            site = Site(full_name, layer, name, dropout)
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

    def failures_said(self) -> str:
        """Return what a message says of the backend's failures so far, "" if there was none."""
        if not self.failures:
            return ""
        return f" It began with this: {'; '.join(self.failures)}. {UNTRACEABLE}"

    def note(self, text: str) -> None:
        """Add a line to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)


def _not_there(model: nn.Module, change: str) -> SiteError:
    name = type(model).__name__
    return SiteError(
        f"{name} is not the model that was compiled: {change}. Call xtrain.compile again where "
        "layers have changed; sites are numbered by them."
    )


def check_model_unchanged(session: Session) -> None:
    """Raise where a training forward would run other blocks than those that were compiled."""
    if session.is_replaced:
        raise RuntimeError(
            f"compile_blocks was called on this {type(session.model).__name__} again, and its "
            "blocks run the graphs of the last call; use the CompiledModel that it returned"
        )
    if session.options.strict and (change := session.blocks.changed_list()):
        raise _not_there(session.model, change)


def check_executed(session: Session, call: Call) -> None:
    """Hold the sites that a forward ran against the report and the blocks against one another."""
    if not session.options.strict:
        return
    if not call.executed:
        raise SiteError(
            f"dropout={session.options.dropout}, but the training forward of "
            f"{type(session.model).__name__} ran no residual site: none was found, or Dynamo fell "
            "back to eager (TORCH_LOGS=graph_breaks,recompiles says why). Pass strict=False to "
            f"train without dropout.{session.failures_said()}"
        )
    executed = set(call.executed)
    missing = [s.name for s in session.sites.values() if s not in executed]
    if missing:
        raise SiteError(
            f"a training forward ran {len(executed)} residual sites of {len(session.sites)}; "
            f"missing: {', '.join(missing[:5])}. A part of the model was skipped, or Dynamo fell "
            "back to eager there (TORCH_LOGS=graph_breaks,recompiles says why). strict=False "
            f"accepts it.{session.failures_said()}"
        )
    _check_blocks_agree(session)


def _check_blocks_agree(session: Session) -> None:
    """Blocks of one class in one list must have equally many sites.

    Across lists they need not: the blocks of an encoder and a decoder can share a class. A block
    that stands in several places of a list has the sites of each.
    """
    places = session.blocks.num_places
    counts = Counter(block for block, _ in session.sites)
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for path, class_name in session.blocks.class_names.items():
        groups.setdefault((class_name, path.rpartition(".")[0]), {})[path] = counts.get(path, 0)
    for (class_name, _), per_block in groups.items():
        per_place = {path: n / places[path] for path, n in per_block.items()}
        if len(set(per_block.values())) > 1 and len(set(per_place.values())) > 1:
            listed = ", ".join(f"{path}: {n}" for path, n in per_block.items())
            cause = "a pattern was missed in some"
            if session.per_block and 0 in per_block.values():
                cause = (
                    "a pattern was missed in some, or Dynamo reached its recompile_limit: the "
                    "layers share no graph when something other than weights differs between them "
                    "(TORCH_LOGS=recompiles says what). A key-value cache may: use_cache=False"
                )
            raise SiteError(
                f"blocks of class {class_name} differ in their number of residual sites ({listed})"
                f"; {cause}. strict=False accepts it."
            )
