"""record: a model's forwards as a folder. One forward of given inputs, or prompts decoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtrain.drift import environment
from xtrain.drift.collect import Collector, Layout, to_bits
from xtrain.drift.errors import DriftError
from xtrain.drift.flag_values import DECODERS
from xtrain.drift.models import Subject
from xtrain.drift.observe import MODES, UNSEEN, Runner
from xtrain.drift.record_folder import (
    CaseWriter,
    Record,
    RecordWriter,
    keep_alive,
    temporary_record_path,
)
from xtrain.drift.values import hash_bits
from xtrain.drift.weights import (
    count_parameters,
    hash_weights,
    json_number,
    placement,
    weight_sizes,
)

# settings that count something, and the least they can be
LEAST = {"batch_size": 1, "num_tokens": 1, "top_k": 1}
LEAST |= dict.fromkeys(("pad_to", "sample_seed", "op_steps", "warm_up"), 0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is run while it is recorded; part of the record."""

    mode: str = "eager"
    dtype: str = "auto"  # that the model was cast to
    device: str = "cpu"
    batch_size: int = 1
    pad_to: int | None = None  # tokens; None: no further than the longest of a batch
    decode: str | None = "greedy"  # None: one forward, all positions
    num_tokens: int = 16
    temperature: float = 1.0  # of decode="sample"
    sample_seed: int = 0
    top_k: int = 8
    tensors: bool = False
    op_steps: int | None = None  # steps of a prompt whose ops are recorded; None: all
    warm_up: int = 0  # forwards before the first recorded one

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise DriftError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.decode not in (*DECODERS, None):
            raise DriftError(f"decode must be one of {', '.join(DECODERS)}, got {self.decode!r}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise DriftError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        if self.decode == "generate" and (self.mode != "eager" or self.pad_to):
            raise DriftError("decode=generate calls the model by itself: no other mode, no pad_to")
        if self.tensors and self.mode in UNSEEN:
            raise DriftError(
                f"tensors=True keeps the results of ops, and with mode={self.mode} none is seen; "
                "leave it out, or record the plain model with mode=eager or aot_eager"
            )
        if not 0 < self.temperature < float("inf"):
            raise DriftError(f"temperature must be above 0 and finite, got {self.temperature}")


def record(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    out: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    tensors: bool = False,
    top_k: int = 8,
    warm_up: int = 0,
    overwrite: bool = False,
) -> Record:
    """Run one forward of model on inputs and return the record of every op, block and logit.

    Args:     model: a causal language model, or any module that returns [B, T, V], [B, V] or [V];
              called in eval mode, its mode is put back.
              inputs: token ids [B, T] or [T], or other numbers, each row a prompt of the record; or
              the keyword arguments of the model's forward, tensors of B rows.
              out: the record's folder; None: a temporary one that lives as long as the result.
              mode: eager | aot_eager | inductor | unobserved; None: eager, or unobserved for a
              model that torch.compile or xtrain.compile returned.
              tensors: keep whole tensors, so that differences are exact everywhere; refused in the
              last two modes, which see no op.
              top_k: logits per position in the readable part; all are kept in the other.
              warm_up: forwards before, which are not recorded.
              overwrite: replace a record that is there.
    Raises:   DriftError for a model that returns no logits or is no module, a mode it cannot run in
              (a compiled one has its own), or an `out` that exists.
    """
    mode = _mode_of(model, mode)
    device = str(next((p.device for p in model.parameters()), "cpu"))
    named = _named_inputs(inputs, device)
    prompts = _prompts(named)
    settings = Settings(
        mode=mode,
        device=device,
        batch_size=len(prompts),
        decode=None,
        top_k=top_k,
        tensors=tensors,
        warm_up=warm_up,
    )
    with _Recording(of_library(model, 0), prompts, settings, out, overwrite) as recording:
        recording.forward(named)
    return recording.result()


def of_library(model: nn.Module, vocab_size: int) -> Subject:
    """Return a model that a program holds; vocab_size: ids of its head that count, 0: all."""
    description = {"kind": "library", "name": type(model).__name__}
    return Subject(model, description, vocab_size, None, weights=hash_weights(model))


def record_prompts(
    subject: Subject,
    prompts: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Record:
    """Decode every prompt as settings say and return the record of all forwards.

    Raises: DriftError for prompts that exceed the model's context, and as `record` does.
    """
    from xtrain.drift.decode import decode, forward_only

    _check_lengths(subject, prompts, settings)
    loop = decode if settings.decode else forward_only
    with _Recording(subject, prompts, settings, out, overwrite) as recording:
        loop(recording, progress)
    return recording.result()


class _Recording:
    """One record being written: the runner, the writers of the prompts under way, the totals."""

    def __init__(
        self,
        subject: Subject,
        prompts: Sequence[Mapping[str, Any]],
        settings: Settings,
        out: str | os.PathLike[str] | None,
        overwrite: bool,
    ):
        self.subject, self.prompts, self.settings = subject, prompts, settings
        self.folder = None
        if out is None:
            path, self.folder = temporary_record_path()
        else:
            path = Path(out)
        self.runner = Runner(subject.model, settings.mode)
        self.weight_sizes = weight_sizes(subject.model)
        self.warm = settings.warm_up
        self.writer = RecordWriter(path, overwrite=overwrite)  # last: an error leaves no folder

    def __enter__(self) -> _Recording:
        self.was_training = self.subject.model.training
        self.subject.model.eval()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.subject.model.train(self.was_training)
        if kind is not None:
            self.writer.discard()
            return
        try:
            self.writer.close(self._contents())
        except BaseException:
            self.writer.discard()
            raise

    def _contents(self) -> dict[str, Any]:
        effect = self.runner.observer_effect
        if effect is not None:
            effect = {**effect, "max_abs": json_number(effect["max_abs"])}
        return {
            "environment": {
                **environment.collect(),
                **placement(self.subject.model),
                "weights.file_headers": self.subject.file_headers,
            },
            "model": {
                **self.subject.description,
                "class": type(self.subject.model).__name__,
                "num_parameters": count_parameters(self.subject.model),
                "blocks": list(self.runner.blocks),
                "weights": self.subject.weights,
            },
            "run": asdict(self.settings),
            "observer_effect": effect,
            "prompts": list(self.prompts),
        }

    def result(self) -> Record:
        """Open what was written."""
        record = Record(self.writer.path)
        if self.folder is not None:
            keep_alive(record, self.folder)
        return record

    def cases(self, numbers: Sequence[int]) -> list[CaseWriter]:
        """Return the writers of some prompts."""
        return [CaseWriter(self.writer, i, values=self.settings.tensors) for i in numbers]

    def layout(self, batch: int, length: int, lengths: Sequence[int]) -> Layout:
        """Return which part of each tensor belongs to which prompt."""
        return Layout(batch, length, tuple(lengths), self.weight_sizes)

    def run(self, inputs: Mapping[str, Any], collector: Collector, *, ops: bool) -> Tensor:
        """Return the logits of a forward, cut to the vocabulary; the first one is warmed up."""
        unobserved = None
        while self.warm:
            unobserved = self.runner(inputs, None)
            self.warm -= 1
        logits = self.runner(inputs, collector, ops=ops)
        if unobserved is not None:
            self.runner.note_effect(logits, unobserved)
        return logits[..., : self.subject.vocab_size] if self.subject.vocab_size else logits

    def forward(self, inputs: Mapping[str, Any]) -> None:
        """Record one forward with all its positions."""
        batch = len(self.prompts)
        cases = self.cases(range(batch))
        lengths = [len(prompt["tokens"] or "-") for prompt in self.prompts]
        layout = self.layout(batch, max(lengths), lengths)
        collector = Collector(layout, cases, [slice(None)] * batch)
        logits = self.run(inputs, collector, ops=True)
        if len(logits) != batch:
            raise DriftError(
                f"the model returns {len(logits)} rows of logits for {batch} of inputs"
            )
        steps = [self.step(logits[row], lengths[row]) for row in range(batch)]
        collector.write(steps, logits)
        for case in cases:
            case.close(None)

    def step(
        self, logits: Tensor, length: int, tokens: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the readable part of a step: logits are those of its positions, [P, V]."""
        logits = logits.detach().float() if logits.element_size() < 4 else logits.detach()
        if tokens is None:
            tokens = greedy(logits.cpu().numpy())
        count = min(max(self.settings.top_k, 2), logits.shape[-1])
        values, ids = (item.cpu().numpy() for item in logits.topk(count))
        order = np.lexsort((ids, -np.nan_to_num(values, nan=np.inf)), axis=-1)
        values = np.take_along_axis(values, order, -1).astype(np.float64)
        ids = np.take_along_axis(ids, order, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            margin = values[:, 0] - values[:, 1] if count > 1 else np.full(len(values), np.inf)
        shown = slice(0, self.settings.top_k)
        return {
            "length": length,
            "tokens": [int(token) for token in tokens],
            "margin": [json_number(value) for value in margin],
            "top_ids": ids[:, shown].tolist(),
            "top_logits": [[json_number(value) for value in row[shown]] for row in values],
        }


def greedy(logits: NDArray) -> list[int]:
    """Return the lowest argmax of each position of [P, V]."""
    return logits.argmax(axis=-1).tolist()


def _named_inputs(inputs: Any, device: str) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        try:
            tensor = torch.as_tensor(inputs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DriftError(f"inputs must be numbers [B, T]: {error}") from None
        # one prompt; a vector of floats is left as it is, for models that take one
        named = {"input_ids": tensor[None] if _is_ids(tensor) and tensor.dim() == 1 else tensor}
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in named.items()
    }


def _prompts(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a prompt for each row: its ids, and the hash of all that is fed for it."""
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    first = tensors.get("input_ids", next(iter(tensors.values()), None))
    if first is None or not first.numel():
        raise DriftError("inputs hold no tensor with numbers in it")
    batch = len(first) if first.dim() > 1 else 1
    found = []
    for row in range(batch):
        parts = [
            t[row] if t.dim() and len(t) == batch and t.dim() > 1 else t for t in tensors.values()
        ]
        marks = [hash_bits(to_bits(part)[0]) for part in parts]
        ids = first[row].tolist() if _is_ids(first) and first.dim() == 2 else None
        found.append({"tokens": ids, "text": None, "xxh3_128": b"".join(marks).hex()})
    return found


def _is_ids(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _mode_of(model: nn.Module, mode: str | None) -> str:
    if not isinstance(model, nn.Module):
        raise DriftError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if mode not in (None, "unobserved") and is_compiled(model):
        raise DriftError(
            f"mode={mode} is for the plain model, and this one is compiled already: leave mode "
            "out to record its logits, or record the model that was compiled"
        )
    return mode or ("unobserved" if is_compiled(model) else "eager")


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile or xtrain.compile has made a model, or a part of it."""
    compiler = sys.modules.get("xtrain.compiler")  # not loaded: no model comes from there
    ours = compiler is not None and isinstance(model, compiler.CompiledModel)
    return ours or any(hasattr(module, "_orig_mod") for module in model.modules())


def _check_lengths(
    subject: Subject, prompts: Sequence[Mapping[str, Any]], settings: Settings
) -> None:
    """Refuse a context that is too small, and a padding that some forward could not have."""
    limit, pad_to = subject.max_length, settings.pad_to
    chosen = settings.num_tokens if settings.decode else 1
    for number, prompt in enumerate(prompts):
        length = len(prompt["tokens"])
        # the last token that is chosen is never fed back
        needed = length + chosen - 1
        if limit is not None and needed > limit:
            raise DriftError(
                f"prompt {number} has {length} tokens, with {chosen} more it exceeds "
                f"the model's context of {limit}; shorten it or lower --tokens"
            )
        if pad_to is not None and needed > pad_to:
            raise DriftError(
                f"--pad-to {pad_to} cannot hold prompt {number}: it has {length} tokens, the "
                f"longest forward {needed}; give at least that, or auto"
            )
    if limit is not None and pad_to is not None and pad_to > limit:
        raise DriftError(f"pad_to {pad_to} exceeds the context of {limit}")
