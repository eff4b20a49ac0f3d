"""What the graphs of one compiled model share."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from xtrain import torch_compat
from xtrain.blocks import Blocks
from xtrain.compiler.bypasses import Bypasses
from xtrain.compiler.dynamic_shapes import ShapeWatch
from xtrain.compiler.options import Options
from xtrain.compiler.recorder import Recorder
from xtrain.compiler.report import Report, Site, Verification
from xtrain.compiler.samples import Samples
from xtrain.compiler.settled import SettledSums
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
    """One training forward in progress: its key, its batch, the sites that have run so far.

    batch is what the arguments suggest, for the default first_sample (is_default) and messages.
    """

    key: StepKey
    batch: int
    samples: Samples
    is_default: bool = False
    is_mixed: bool = False  # some modules train and others do not
    executed: list[Site] = field(default_factory=list)
    switched_off: list[Site] = field(default_factory=list)  # of modules in eval mode
    blocks: set[str] = field(default_factory=set)  # that have run by graphs of their own
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
        self.sums = SettledSums(options.sums)
        self.recorder: Recorder | None = None  # of the forward that runs, where one is wanted
        self.is_recording_wanted = True
        self.is_one_graph = False  # whether the forward that was recorded last was one graph
        self.breaks_at_start = 0  # graph breaks that Dynamo had listed when the forward began
        self.is_replaced = False  # whether another compile_blocks has taken the blocks over
        self.sites: dict[tuple[str, str], Site] = {}
        self.kinds: dict[tuple[str, str], str] = {}  # of attentions: (block, add) -> kind
        self.report = Report(verification=Verification() if options.verify else None)
        self.verify_raises = options.strict
        self.num_forwards = 0
        self.num_breaks_before = len(torch_compat.graph_breaks())
        self.failures: list[str] = []  # of the backend, after which Dynamo leaves code to eager
        self.last_executed: tuple[Site, ...] = ()
        self.ledger: ReplayLedger[torch.Tensor] = ReplayLedger()
        if options.logits == "drop" and (options.kernels == "off" or options.backend == "eager"):
            self.note("logits are kept: kernels='off' and backend='eager' swap no head and loss")
        self.bypasses = Bypasses(model, self.blocks, options.dropout, lambda: self.is_running)
        self._local = threading.local()
        self._owners: dict[int, str | None] = {}
        self._homes: dict[Site, nn.Module] = {}

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
        self.num_forwards += 1

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
        if self.call is not None:
            self.call.blocks.add(path)
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
                raise not_there(self.model, f"{block} is new") from None
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

    def home(self, block: str, site: Site, parameters: Iterable[torch.Tensor]) -> nn.Module:
        """Return the module that a site's branch lies in, whose mode is the site's.

        It is the smallest that holds all matrices of the branch that are the block's own.
        """
        home = self._homes.get(site)
        if home is None:
            wanted = {id(p) for p in parameters if p.ndim >= 2}
            prefix = f"{block}." if block else ""
            paths = [
                name.split(".")[:-1]
                for name, parameter in self.model.named_parameters(remove_duplicate=False)
                if id(parameter) in wanted and name.startswith(prefix)
            ]
            common = os.path.commonprefix(paths) if paths else block.split(".")
            home = self._homes[site] = self.model.get_submodule(".".join(common))
        return home

    def training_mode(self) -> bool | None:
        """Return whether the model trains, None where some of its modules do and others do not.

        Which modules count is known from the first training forward on: those that sites lie in.
        """
        top = self.model.training
        if not self.options.dropout:
            return top
        modules: Iterable[nn.Module] = self._homes.values()
        if not self._homes:
            modules = self._holding_matrices
        return top if all(module.training == top for module in modules) else None

    @functools.cached_property
    def _holding_matrices(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if any(p.ndim >= 2 for p in m.parameters())]

    def failures_said(self) -> str:
        """Return what a message says of the backend's failures so far, "" if there was none."""
        if not self.failures:
            return ""
        return f" It began with this: {'; '.join(self.failures)}. {UNTRACEABLE}"

    def note(self, text: str) -> None:
        """Add a line to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)


def not_there(model: nn.Module, change: str) -> SiteError:
    """Return the error for a model whose modules have changed."""
    name = type(model).__name__
    return SiteError(
        f"{name} is not the model that was compiled: {change}. Call xtrain.compile again where "
        "layers have changed; sites are numbered by them."
    )
