"""Three ways to continue prompts while every forward is recorded.

greedy    the argmax of the whole prefix, computed anew each step: no cache, nothing to go wrong
sample    the same loop; the token is drawn by NumPy from softmax(logits / temperature), by a number
          that depends on (seed, prompt, step) alone
generate  the model's own: Hugging Face's generate() with its cache, or xtrain.generate
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtrain.drift.collect import Collector
from xtrain.drift.errors import DriftError
from xtrain.drift.observe import Origins, logits_of, observed
from xtrain.drift.record_folder import CaseWriter
from xtrain.drift.recording import _Recording, greedy

PADDING_ID = 0  # to the right of what counts: a causal model's real tokens never see it


def decode(recording: _Recording, progress: Callable[[str], None]) -> None:
    """Record every prompt of a recording."""
    loop = _generate if recording.settings.decode == "generate" else _own_loop
    groups = list(_groups(recording))
    done = 0
    for numbers in groups:
        loop(recording, numbers)
        done += len(numbers)
        progress(f"{done}/{len(recording.prompts)} prompts")


def forward_only(recording: _Recording, progress: Callable[[str], None]) -> None:
    """Record one forward of each prompt with all its positions."""
    done = 0
    for numbers in _groups(recording):
        cases = recording.cases(numbers)
        tokens = [list(recording.prompts[number]["tokens"]) for number in numbers]
        lengths = [len(row) for row in tokens]
        positions = [slice(0, n) for n in lengths]
        inputs, collector = _batch(recording, cases, tokens, positions)
        logits = recording.run(inputs, collector, ops=True)
        steps = [recording.step(logits[row, :n], n) for row, n in enumerate(lengths)]
        collector.write(steps, logits)
        for case in cases:
            case.close(None)
        done += len(numbers)
        progress(f"{done}/{len(recording.prompts)} prompts")


def _batch(
    recording: _Recording, cases: list[Any], tokens: list[list[int]], positions: list[slice]
) -> tuple[dict[str, Tensor], Collector]:
    """Return the inputs of one forward, padded and filled up, and what collects its results."""
    lengths = [len(row) for row in tokens]
    width = max(recording.settings.pad_to or 0, *lengths)
    rows = _fill(tokens, recording.settings.batch_size)
    array = np.full((len(rows), width), PADDING_ID, np.int64)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    inputs = {"input_ids": torch.from_numpy(array).to(recording.settings.device)}
    layout = recording.layout(len(rows), width, lengths)
    return inputs, Collector(layout, cases, positions)


def _groups(recording: _Recording) -> Iterator[list[int]]:
    """Yield the prompts of each batch; generate() takes prompts of one length at a time."""
    size, prompts = recording.settings.batch_size, recording.prompts
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        key = len(prompt["tokens"]) if recording.settings.decode == "generate" else 0
        by_length.setdefault(key, []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


def _fill(rows: list[Any], size: int) -> list[Any]:
    """Return size rows: the last batch is as large as the others, by repeating its prompts."""
    return [rows[i % len(rows)] for i in range(size)]


def _own_loop(recording: _Recording, numbers: Sequence[int]) -> None:
    settings = recording.settings
    cases = recording.cases(numbers)
    tokens = [list(recording.prompts[number]["tokens"]) for number in numbers]
    for step in range(settings.num_tokens):
        _step(recording, cases, numbers, tokens, step)
    for case, number, row in zip(cases, numbers, tokens, strict=True):
        _close(recording, case, row[len(recording.prompts[number]["tokens"]) :])


def _step(
    recording: _Recording,
    cases: list[Any],
    numbers: Sequence[int],
    tokens: list[list[int]],
    step: int,
) -> None:
    """Record one forward and append the token that it chooses to each row."""
    settings = recording.settings
    lengths = [len(row) for row in tokens]
    positions = [slice(n - 1, n) for n in lengths]
    inputs, collector = _batch(recording, cases, tokens, positions)
    ops = settings.op_steps is None or step < settings.op_steps
    logits = recording.run(inputs, collector, ops=ops)
    steps = []
    for row, number in enumerate(numbers):
        last = logits[row, positions[row]]
        chosen = _choose(recording, last, number, step)
        steps.append(recording.step(last, lengths[row], [chosen]))
        tokens[row].append(chosen)
    collector.write(steps, logits)


def _choose(recording: _Recording, logits: Tensor, prompt: int, step: int) -> int:
    settings = recording.settings
    values = logits.detach().cpu().double().numpy()
    if settings.decode == "greedy":
        return greedy(values)[0]
    scaled = (values[0] - values[0].max()) / settings.temperature
    cumulative = np.cumsum(np.exp(scaled))
    raw = np.random.PCG64([settings.sample_seed, prompt, step]).random_raw()
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
