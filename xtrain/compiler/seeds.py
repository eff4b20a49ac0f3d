"""The seeds input of a graph: one (seed, offset) pair for each site, made anew at each call."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.compiler.compile_report import ENTRY_ROOT, Site, readable_path
from xtrain.compiler.compile_session import Call, Session, SiteError
from xtrain.compiler.sizes import SizeReader
from xtrain.passes.sites.insert_residual_dropout import SEEDS, SiteSlot
from xtrain.passes.sites.sample_places import sample_places
from xtrain.passes.sites.switch_dropout import OFF
from xtrain.rng import ATTENTION, site_seed

log = logging.getLogger("xtrain.passes")


class Seeds:
    """Fill the seeds input of one graph at each call: a (seed, offset) pair for each site."""

    def __init__(
        self,
        session: Session,
        module: fx.GraphModule,
        slots: list[SiteSlot],
        *,
        switchable: bool = False,
    ):
        self.session = session
        self._switchable = switchable
        self.slots = slots
        nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._index = {node: i for i, node in enumerate(nodes)}
        self._sizes = SizeReader(nodes)
        self._blocks = [self._static_block(slot) for slot in slots]
        # A graph of the whole model is recomputed through the model's forward, which knows its key.
        self.is_whole = is_entry(module) and not session.per_block
        self.num_rows = sum(slot.covered_by == "xtrain" for slot in slots)
        self.device = torch.device("cpu")
        seeds = None
        for node in nodes:
            if node.target == SEEDS:
                self.placeholder = seeds = node
                self.device = node.meta["example_value"].device
        try:
            self._samples, self._outputs = sample_places(module.graph, seeds)
        except Exception:  # then nothing shows where the samples are, and a first_sample is refused
            log.exception("the samples could not be followed through a graph")
            self._samples, self._outputs = {}, []

    def example(self) -> torch.Tensor:
        """Return a tensor of the seeds input's form."""
        return torch.empty(2 * self.num_rows, dtype=torch.int64, device=self.device)

    def feed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled` without its last input, the seeds, which are made here at each call.

        A graph without that input, whose sites the model's own dropout covers, is watched alone.
        """

        def run(*inputs: Any) -> Any:
            call = self.session.call
            if self.num_rows:
                outputs = compiled(*inputs, self.tensor(inputs))
            else:
                if call is not None:
                    self.numbers(call, inputs)
                outputs = compiled(*inputs)
            if call is not None and call.key.first_sample:
                # the graphs behind this one learn where the samples lie in what they are handed
                call.samples.note(inputs, outputs, self._outputs)
            return outputs

        return run

    def tensor(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Return a fresh seeds tensor: a buffer changed in place would break a second forward."""
        call = self.session.call
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if call is None:
            return self.session.seeds.find(self._scope(), tensors)
        seeds = torch.tensor(self.numbers(call, inputs), dtype=torch.int64)
        if self.device.type == "cuda":
            seeds = seeds.pin_memory().to(self.device, non_blocking=True)
        elif self.device.type != "cpu":
            seeds = seeds.to(self.device)
        if not self.is_whole:
            self.session.seeds.record(self._scope(), tensors, seeds)
        return seeds

    def _scope(self) -> tuple[Any, ...]:
        """What a recompute shares with the forward that it repeats, beside the input tensors.

        Not this graph: a reentrant checkpoint runs the forward without gradients and the recompute
        with them, and Dynamo traces the two apart.
        """
        return self.session.block, *((slot.kind, slot.path) for slot in self.slots)

    def numbers(self, call: Call, inputs: Sequence[Any]) -> list[int]:
        """Return the (seed, offset) pairs of this call, flat, and mark the sites as executed."""
        flat: list[int] = []
        key = call.key
        dims = call.samples.dims(inputs) if key.first_sample else []
        for slot, static_block in zip(self.slots, self._blocks, strict=True):
            if not slot.covered_by:
                continue
            block = static_block or self.session.block or self._block(slot, inputs)
            kind = self._kind(slot, block, inputs)
            site = self.session.site(block, call.claim(block, kind), slot.covered_by)
            home = self.session.home(block, site, self._parameters(slot, inputs))
            is_off = self._switchable and not home.training
            (call.switched_off if is_off else call.executed).append(site)
            if slot.covered_by != "xtrain":
                continue
            if is_off:
                flat += (0, OFF)
                continue
            offset = 0
            if key.first_sample:
                batch = call.samples.batch(dims, self._samples.get(len(flat) // 2, {}))
                offset = key.first_sample * self._per_sample(slot, site, call, inputs, batch)
            flat += (
                site_seed(key.base_seed, key.step, site.layer, site.site),
                _wrap(offset),
            )
        return flat

    def _kind(self, slot: SiteSlot, block: str, inputs: Sequence[Any]) -> str:
        """The kind of a site; keys that the stream made in another graph are its own.

        Which they are the first recorded forward shows, and it stays so.
        """
        if not slot.keys:
            return slot.kind
        program, known = self.session.recording, self.session.kinds
        if program is not None and (block, slot.add) not in known:
            keys, streams = (
                [inputs[self._index[n]] for n in ns] for ns in (slot.keys, slot.streams)
            )
            known[block, slot.add] = ATTENTION if program.made(keys, streams) else slot.kind
        return known.get((block, slot.add), slot.kind)

    def _parameters(self, slot: SiteSlot, inputs: Sequence[Any]) -> Iterator[Any]:
        """The parameters that a branch multiplies by."""
        for witness in slot.witnesses:
            position = self._index.get(witness)
            if position is not None and position < len(inputs):
                yield inputs[position]

    def _static_block(self, slot: SiteSlot) -> str | None:
        """The block that module paths name, for graphs traced from our entry.

        Where another block computes the branch than adds it, it is that one's: a block may hand
        branch and residual on for the next one to add. In a graph of one block paths begin at the
        block, and say nothing of which it is.
        """
        if self.session.per_block:
            return None
        for path in (slot.origin, slot.path):
            if path.startswith(ENTRY_ROOT + "."):
                block = self.session.blocks.block_of(path.removeprefix(ENTRY_ROOT + "."))
                if block is not None:
                    return block
        return None

    def _block(self, slot: SiteSlot, inputs: Sequence[Any]) -> str:
        """The block that owns the branch's parameters: also right where layers share a graph."""
        for parameter in self._parameters(slot, inputs):
            block = self.session.owner_block(parameter)
            if block is not None:
                return block
        if slot.path.startswith(ENTRY_ROOT) and not self.session.per_block:
            return slot.path.removeprefix(ENTRY_ROOT).removeprefix(".")
        raise SiteError(
            f"cannot tell which block a {slot.kind} site in {readable_path(slot.path)} belongs "
            "to: its graph shows neither a module path nor a parameter of one block alone. "
            "Compile the whole model without graph breaks."
        )

    def _per_sample(
        self, slot: SiteSlot, site: Site, call: Call, inputs: Sequence[Any], batch: int | None
    ) -> int:
        """Return how many elements of a site's value are one sample's.

        Raises:   ValueError where nothing shows that they lie one after the other.
        """
        shape = self._sizes.evaluate(slot.branch_shape, inputs)
        numel = math.prod(shape)
        if not batch or numel % batch:
            raise ValueError(
                f"site {site.name}: its value has shape {shape}, and nothing shows that the samples"
                f" of a batch of {call.batch} lie in it outermost, in order, each in one piece, so "
                f"first_sample={call.key.first_sample} names no element of it. Use "
                "set_step(step, first_sample=0), or a model whose batch dimension stays first from "
                "an argument on."
            )
        if call.is_default and batch != call.batch:
            raise ValueError(
                f"site {site.name}: its batch holds {batch} samples, and rank x batch was taken "
                f"with {call.batch}; call set_step(step, first_sample) before each training forward"
            )
        return numel // batch


def is_entry(module: fx.GraphModule) -> bool:
    """Whether a graph was traced from our entry, so that it holds the model from its first op."""
    return any(
        torch_compat.source_name(n).startswith(ENTRY_ROOT)
        for n in module.graph.nodes
        if n.op == "placeholder"
    )


def _wrap(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
