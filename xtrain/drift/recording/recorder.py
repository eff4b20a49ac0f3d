"""record: a model's forwards as a folder. One forward of given inputs, or prompts decoded.

Three ways to continue prompts while every forward is recorded.

greedy    the argmax of the whole prefix, computed anew each step: no cache, nothing to go wrong
sample    the same loop; the token is drawn by NumPy from softmax(logits / temperature), by a number
          that depends on (seed, prompt, step) alone
generate  the model's own: Hugging Face's generate() with its cache, or xtrain.generate
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtrain.drift.errors import DriftError
from xtrain.drift.recording.environment import collect
from xtrain.drift.recording.format import Record
from xtrain.drift.recording.observe import Origins, Runner, logits_of, observed
from xtrain.drift.recording.subject import (
    Subject,
    count_parameters,
    hash_weights,
    placement,
    weight_sizes,
)
from xtrain.drift.recording.tensors import hash_bits, json_number
from xtrain.drift.recording.writing import (
    CaseWriter,
    Collector,
    Layout,
    RecordWriter,
    to_bits,
)
from xtrain.drift.settings import Run

PADDING_ID = 0  # to the right of what counts: a causal model's real tokens never see it


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
    settings = Run(
        mode=mode,
        device=device,
        batch_size=len(prompts),
        decode=None,
        top_k=top_k,
        tensors=tensors,
        warm_up=warm_up,
    )
    lengths = [len(prompt["tokens"] or "-") for prompt in prompts]
    with _Recording(of_library(model, 0), prompts, settings, out, overwrite) as recording:
        cases = recording.cases(range(len(prompts)))
        layout = recording.layout(len(prompts), max(lengths), lengths)
        recording.forward(cases, named, layout, [slice(None)] * len(prompts))
        for case in cases:
            case.close(None)
    return recording.result()


def of_library(model: nn.Module, vocab_size: int) -> Subject:
    """Return a model that a program holds; vocab_size: ids of its head that count, 0: all."""
    description = {"kind": "library", "name": type(model).__name__}
    return Subject(model, description, vocab_size, None, weights=hash_weights(model))


def record_prompts(
    subject: Subject,
    prompts: Sequence[Mapping[str, Any]],
    settings: Run,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Record:
    """Decode every prompt as settings say and return the record of all forwards.

    Raises: DriftError for prompts that exceed the model's context, and as `record` does.
    """
    _check_lengths(subject, prompts, settings)
    loop = {None: _all_positions, "generate": _generate}.get(settings.decode, _own_loop)
    with _Recording(subject, prompts, settings, out, overwrite) as recording:
        done = 0
        for numbers in _groups(prompts, settings):
            loop(recording, numbers)
            done += len(numbers)
            progress(f"{done}/{len(prompts)} prompts")
    return recording.result()


class _Recording:
    """One record being written: the runner, the writers of the prompts under way, the totals."""

    def __init__(
        self,
        subject: Subject,
        prompts: Sequence[Mapping[str, Any]],
        settings: Run,
        out: str | os.PathLike[str] | None,
        overwrite: bool,
    ):
        self.subject, self.prompts, self.settings = subject, prompts, settings
        self.folder: tempfile.TemporaryDirectory | None = None
        if out is None:  # until the record is collected
            self.folder = tempfile.TemporaryDirectory(prefix="xtrain-drift-")
            out = Path(self.folder.name) / "record.drift"
        self.runner = Runner(subject.model, settings.mode)
        self.weight_sizes = weight_sizes(subject.model)
        self.warm = settings.warm_up
        self.writer = RecordWriter(
            Path(out), overwrite=overwrite
        )  # last: an error leaves no folder

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
                **collect(),
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
            weakref.finalize(record, self.folder.cleanup)
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

    def batch(self, tokens: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], Layout]:
        """Return the inputs of a forward, padded and filled up, and which part is whose."""
        lengths, size = [len(row) for row in tokens], self.settings.batch_size
        width = max(self.settings.pad_to or 0, *lengths)
        array = np.full((size, width), PADDING_ID, np.int64)
        for row, ids in enumerate(_fill(tokens, size)):
            array[row, : len(ids)] = ids
        inputs = {"input_ids": torch.from_numpy(array).to(self.settings.device)}
        return inputs, self.layout(size, width, lengths)

    def forward(
        self,
        cases: Sequence[CaseWriter],
        inputs: Mapping[str, Any],
        layout: Layout,
        positions: Sequence[slice],
        *,
        ops: bool = True,
        choose: Callable[[int, Tensor], int] | None = None,
    ) -> list[list[int]]:
        """Record one forward, a step of each case, and return the tokens that it chooses.

        choose: gives the token of a row from its logits [1, V]; None: the largest of each position.
        """
        collector = Collector(layout, cases, positions)
        logits = self.run(inputs, collector, ops=ops)
        if len(logits) != layout.batch:
            raise DriftError(
                f"the model returns {len(logits)} rows of logits for {layout.batch} of inputs"
            )
        steps = []
        for row, length in enumerate(layout.lengths):
            last = logits[row, positions[row]]
            steps.append(self.step(last, length, choose and [choose(row, last)]))
        collector.write(steps, logits)
        return [step["tokens"] for step in steps]

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


def _check_lengths(subject: Subject, prompts: Sequence[Mapping[str, Any]], settings: Run) -> None:
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


# --- decoding ------------------------------------------------------------------------------------


def _groups(prompts: Sequence[Mapping[str, Any]], settings: Run) -> Iterator[list[int]]:
    """Yield the prompts of each batch; generate() takes prompts of one length at a time."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        key = len(prompt["tokens"]) if settings.decode == "generate" else 0
        by_length.setdefault(key, []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), settings.batch_size):
            yield numbers[start : start + settings.batch_size]


def _fill(rows: Sequence[Any], size: int) -> list[Any]:
    """Return size rows: the last batch is as large as the others, by repeating its prompts."""
    return [rows[i % len(rows)] for i in range(size)]


def _all_positions(recording: _Recording, numbers: Sequence[int]) -> None:
    """Record one forward of each prompt with all its positions."""
    cases = recording.cases(numbers)
    inputs, layout = recording.batch([recording.prompts[number]["tokens"] for number in numbers])
    recording.forward(cases, inputs, layout, [slice(0, n) for n in layout.lengths])
    for case in cases:
        case.close(None)


def _own_loop(recording: _Recording, numbers: Sequence[int]) -> None:
    """Record a forward per token; each goes behind its prompt."""
    settings = recording.settings
    cases = recording.cases(numbers)
    tokens = [list(recording.prompts[number]["tokens"]) for number in numbers]
    for step in range(settings.num_tokens):
        inputs, layout = recording.batch(tokens)
        chosen = recording.forward(
            cases,
            inputs,
            layout,
            [slice(n - 1, n) for n in layout.lengths],
            ops=settings.op_steps is None or step < settings.op_steps,
            choose=functools.partial(_choose, recording, numbers, step),
        )
        tokens = [row + new for row, new in zip(tokens, chosen, strict=True)]
    for case, number, row in zip(cases, numbers, tokens, strict=True):
        _close(recording, case, row[len(recording.prompts[number]["tokens"]) :])


def _choose(
    recording: _Recording, numbers: Sequence[int], step: int, row: int, logits: Tensor
) -> int:
    settings = recording.settings
    values = logits.detach().cpu().double().numpy()
    if settings.decode == "greedy":
        return greedy(values)[0]
    scaled = (values[0] - values[0].max()) / settings.temperature
    cumulative = np.cumsum(np.exp(scaled))
    raw = np.random.PCG64([settings.sample_seed, numbers[row], step]).random_raw()
    uniform = (raw >> 11) * 2.0**-53 * cumulative[-1]
    return min(int(np.searchsorted(cumulative, uniform, side="right")), len(cumulative) - 1)


def _close(recording: _Recording, case: CaseWriter, ids: Sequence[int]) -> None:
    """Finish a prompt with its text, of which each step says how much went before it."""
    decode = recording.subject.decode
    text = decode(ids) if decode is not None else None
    for number, step in enumerate(case.steps):
        if decode is None or text is None:
            step["text_end"] = None
        else:  # bytes that are no whole character yet are none of the text
            step["text_end"] = len(os.path.commonprefix([decode(ids[:number]), text]))
    case.close(text)


# --- The model's own generation ------------------------------------------------------------------


def _generate(recording: _Recording, numbers: Sequence[int]) -> None:
    """Run the model's own loop; each forward that it makes becomes a step."""
    model, settings = recording.subject.model, recording.settings
    prompts = [recording.prompts[number]["tokens"] for number in numbers]
    if not hasattr(model, "generate") and settings.batch_size > 1:
        raise DriftError("xtrain.generate takes one prompt at a time; use --batch 1")
    ids = torch.tensor(_fill(prompts, settings.batch_size), device=settings.device)
    with torch.no_grad():
        while recording.warm:
            recording.runner({"input_ids": ids}, None)
            recording.warm -= 1
        cases = recording.cases(numbers)
        with _forwards(recording, cases, ids.shape[1]):
            if hasattr(model, "generate"):
                generated = _hugging_face(model, ids, settings.num_tokens)
            else:
                generated = [_xtrain(recording, prompts[0])]
    for row, case in enumerate(cases):
        if len(case.steps) != settings.num_tokens:
            raise DriftError(
                f"generate() made {len(case.steps)} forwards for {settings.num_tokens} tokens; "
                "record this model with --decode greedy"
            )
        for step, token in zip(case.steps, generated[row], strict=True):
            step["tokens"] = [token]  # what it chose, whatever it did to the logits
        _close(recording, case, generated[row])


def _hugging_face(model: Any, ids: Tensor, num_tokens: int) -> list[list[int]]:
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=num_tokens,
        min_new_tokens=None,
        # Every record of a prompt has the same number of steps. As an argument: a None in a
        # generation_config is filled up from the model's own, and the text would end there.
        eos_token_id=None,
        pad_token_id=PADDING_ID,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
    )
    return sequences[:, ids.shape[1] :].tolist()


def _xtrain(recording: _Recording, prompt: Sequence[int]) -> list[int]:
    from xtrain.generate import generate

    subject = recording.subject
    return generate(
        subject.model,
        prompt,
        num_tokens=recording.settings.num_tokens,
        vocab_size=subject.vocab_size,
        temperature=0.0,
    )


@contextmanager
def _forwards(recording: _Recording, cases: list[Any], prompt_length: int) -> Iterator[None]:
    """Record each call of the model's forward, by whoever calls it, as a step."""
    model, op_steps = recording.subject.model, recording.settings.op_steps
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs["input_ids"]
        batch, length = tokens.shape
        layout = recording.layout(batch, length, [length] * len(cases))
        collector = Collector(layout, cases, [slice(-1, None)] * len(cases))
        ops = op_steps is None or len(cases[0].steps) < op_steps
        origins = Origins(model, (*args, *kwargs.values()))
        with observed(model, recording.runner.blocks, collector, origins, ops=ops):
            output = original(*args, **kwargs)
        logits = logits_of(output)[:, -1:, : recording.subject.vocab_size]
        total = prompt_length + len(cases[0].steps)  # the forward itself may read a cache
        steps = [recording.step(logits[row], total) for row in range(len(cases))]
        collector.write(steps, logits)
        return output

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
