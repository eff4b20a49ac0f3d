"""record: a model's forwards as a folder. One forward of given inputs, or prompts decoded.

Three ways to continue prompts while every forward is recorded.

greedy    the argmax of the whole prefix, computed anew each step: no cache, nothing to go wrong
sample    the same loop; the token is drawn by NumPy from softmax(logits / temperature), by a number
          that depends on (seed, prompt, step) alone
generate  the model's own: Hugging Face's generate() with its cache, or xtrain.generate
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtrain.drift.recording.environment import collect
from xtrain.drift.recording.observe import Origins, Runner, logits_of, observed
from xtrain.drift.recording.record_format import Record
from xtrain.drift.recording.recorded_model import RecordedModel, hash_weights, placement
from xtrain.drift.recording.tensors import hash_bits, json_number
from xtrain.drift.recording.writing import CaseWriter, Collector, Layout, RecordWriter, to_bits
from xtrain.drift.settings import DriftError, Run

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
    with _recording(of_library(model, 0), prompts, settings, out, overwrite) as recording:
        cases = recording.cases(range(len(prompts)))
        layout = recording.layout(len(prompts), max(lengths), lengths)
        run = partial(recording.run, named)
        recording.forward(cases, layout, [slice(None)] * len(prompts), run)
        for case in cases:
            case.close(None)
    return recording.result()


def of_library(model: nn.Module, vocab_size: int) -> RecordedModel:
    """Return a model that a program holds; vocab_size: ids of its head that count, 0: all."""
    description = {"kind": "library", "name": type(model).__name__}
    return RecordedModel(model, description, vocab_size, None, weights=hash_weights(model))


def record_prompts(
    subject: RecordedModel,
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
    with _recording(subject, prompts, settings, out, overwrite) as recording:
        done = 0
        for numbers in _groups(prompts, settings):
            loop(recording, numbers)
            done += len(numbers)
            progress(f"{done}/{len(prompts)} prompts")
    return recording.result()


@contextmanager
def _recording(
    subject: RecordedModel,
    prompts: Sequence[Mapping[str, Any]],
    settings: Run,
    out: str | os.PathLike[str] | None,
    overwrite: bool,
) -> Iterator[_Recording]:
    """Give a record under way; it is complete when the block ends well, and absent otherwise."""
    folder = None
    if out is None:  # until the record is collected
        folder = tempfile.TemporaryDirectory(prefix="xtrain-drift-")
        out = Path(folder.name) / "record.drift"
    runner = Runner(subject.model, settings.mode)
    writer = RecordWriter(Path(out), overwrite=overwrite)  # last: an error leaves no folder
    was_training = subject.model.training
    subject.model.eval()
    try:
        warm = settings.warm_up
        recording = _Recording(subject, prompts, settings, runner, writer, folder, warm)
        yield recording
        writer.close(recording.contents())
    except BaseException:
        writer.discard()
        raise
    finally:
        subject.model.train(was_training)


@dataclass(eq=False)
class _Recording:
    """One record being written, the writers of its prompts, the totals."""

    subject: RecordedModel
    prompts: Sequence[Mapping[str, Any]]
    settings: Run
    runner: Runner
    writer: RecordWriter
    folder: tempfile.TemporaryDirectory | None
    warm: int  # forwards still to come before the first recorded one

    def contents(self) -> dict[str, Any]:
        """Return what record.json holds of it."""
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
                "num_parameters": sum(p.numel() for p in self.subject.model.parameters()),
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
        weight_sizes = frozenset(n for p in self.subject.model.parameters() for n in p.shape)
        return Layout(batch, length, tuple(lengths), weight_sizes)

    def has_ops(self, step: int) -> bool:
        """Return whether the ops of a step are recorded."""
        return self.settings.op_steps is None or step < self.settings.op_steps

    def run(
        self, inputs: Mapping[str, Any], collector: Collector | None, *, ops: bool = True
    ) -> Tensor:
        """Return the logits of a forward; the first one is warmed up."""
        unobserved = None
        while self.warm:
            unobserved = self.runner(inputs, None)
            self.warm -= 1
        logits = self.runner(inputs, collector, ops=ops)
        if unobserved is not None:
            self.runner.note_effect(logits, unobserved)
        return logits

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
        layout: Layout,
        positions: Sequence[slice],
        run: Callable[[Collector], Tensor],
        *,
        length: int | None = None,
        choose: Callable[[int, Tensor], int] | None = None,
    ) -> list[list[int]]:
        """Record one forward, a step of each case, and return the tokens that it chooses.

        Args:     run: makes the forward, hands its results to a collector and returns the logits.
                  length: of what the logits depend on, where a cache holds more than the inputs.
                  choose: gives the token of a row from its logits [1, V]; None: the largest of
                  each position.
        """
        collector = Collector(layout, cases, positions)
        logits = run(collector)
        if self.subject.vocab_size:
            logits = logits[..., : self.subject.vocab_size]
        if len(logits) != layout.batch:
            raise DriftError(
                f"the model returns {len(logits)} rows of logits for {layout.batch} of inputs"
            )
        steps = []
        for row, own_length in enumerate(layout.lengths):
            last = logits[row, positions[row]]
            steps.append(self.step(last, length or own_length, choose and [choose(row, last)]))
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

    def close(self, case: CaseWriter, ids: Sequence[int]) -> None:
        """Finish a prompt with its text, of which each step says how much went before it."""
        decode = self.subject.decode
        text = decode(ids) if decode is not None else None
        for number, step in enumerate(case.steps):
            step["text_end"] = None
            if decode is not None and text is not None:
                # bytes that are no whole character yet are none of the text
                step["text_end"] = len(os.path.commonprefix([decode(ids[:number]), text]))
        case.close(text)


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
    subject: RecordedModel, prompts: Sequence[Mapping[str, Any]], settings: Run
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


# --- decoding ------------------------------------------------------------------------------------


def _groups(prompts: Sequence[Mapping[str, Any]], settings: Run) -> Iterator[list[int]]:
    """Yield the prompts of each batch; generate() takes prompts of one length at a time."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        key = len(prompt["tokens"]) if settings.decode == "generate" else 0
        by_length[key].append(number)
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
    positions = [slice(0, n) for n in layout.lengths]
    recording.forward(cases, layout, positions, partial(recording.run, inputs))
    for case in cases:
        case.close(None)


def _own_loop(recording: _Recording, numbers: Sequence[int]) -> None:
    """Record a forward per token; each goes behind its prompt."""
    cases = recording.cases(numbers)
    tokens = [list(recording.prompts[number]["tokens"]) for number in numbers]
    for step in range(recording.settings.num_tokens):
        inputs, layout = recording.batch(tokens)
        chosen = recording.forward(
            cases,
            layout,
            [slice(n - 1, n) for n in layout.lengths],
            partial(recording.run, inputs, ops=recording.has_ops(step)),
            choose=partial(_choose, recording.settings, numbers, step),
        )
        tokens = [row + new for row, new in zip(tokens, chosen, strict=True)]
    for case, number, row in zip(cases, numbers, tokens, strict=True):
        recording.close(case, row[len(recording.prompts[number]["tokens"]) :])


def _choose(settings: Run, numbers: Sequence[int], step: int, row: int, logits: Tensor) -> int:
    values = logits.detach().cpu().double().numpy()
    if settings.decode == "greedy":
        return greedy(values)[0]
    scaled = (values[0] - values[0].max()) / settings.temperature
    cumulative = np.cumsum(np.exp(scaled))
    raw = np.random.PCG64([settings.sample_seed, numbers[row], step]).random_raw()
    uniform = (raw >> 11) * 2.0**-53 * cumulative[-1]
    return min(int(np.searchsorted(cumulative, uniform, side="right")), len(cumulative) - 1)


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
        recording.close(case, generated[row])


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

    return generate(
        recording.subject.model,
        prompt,
        num_tokens=recording.settings.num_tokens,
        vocab_size=recording.subject.vocab_size,
        temperature=0.0,
    )


@contextmanager
def _forwards(
    recording: _Recording, cases: Sequence[CaseWriter], prompt_length: int
) -> Iterator[None]:
    """Record each call of the model's forward, by whoever calls it, as a step."""
    model, blocks = recording.subject.model, recording.runner.blocks
    original = model.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch, length = (args[0] if args else kwargs["input_ids"]).shape
        number, outputs = len(cases[0].steps), []

        def run(collector: Collector) -> Tensor:
            origins = Origins(model, (*args, *kwargs.values()))
            with observed(model, blocks, collector, origins, ops=recording.has_ops(number)):
                outputs.append(original(*args, **kwargs))
            return logits_of(outputs[0])[:, -1:]

        layout = recording.layout(batch, length, [length] * len(cases))
        last = [slice(-1, None)] * len(cases)
        # the forward itself may read a cache
        recording.forward(cases, layout, last, run, length=prompt_length + number)
        return outputs[0]

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
