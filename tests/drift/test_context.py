"""The text that leads to a place: as the tokenizer has it, whatever the length of its tokens."""

from __future__ import annotations

import json

import pytest
import torch
from drift_models import subject
from torch import nn

from xtrain.drift import Record, compare
from xtrain.drift.comparison.report import as_json, as_text, context, page
from xtrain.drift.recording.recorder import record_prompts
from xtrain.drift.settings import Run

WORDS = ["a ", "longer ", "I ", "considerably ", "of ", "\u20ac", "x ", "extraordinarily "]
CHOSEN = [1, 7, 0, 0, 2, 3, 0, 6, 7, 0]


class Scripted(nn.Module):
    """Chooses CHOSEN one after the other; the margin is smallest at step `tight`."""

    def __init__(self, tight, shift=0.0):
        super().__init__()
        self.tight, self.shift = tight, shift

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 8)
        step = input_ids.shape[1] - 2
        logits[:, -1, CHOSEN[step]] = 0.5 if step == self.tight else 2.0
        return logits + self.shift * torch.arange(8)


def recorded(tight, decode, shift=0.0, **settings):
    model = subject(Scripted(tight, shift), 8)
    model.decode = decode
    prompt = [{"tokens": [4, 4], "text": "of of "}]
    return record_prompts(model, prompt, Run(num_tokens=len(CHOSEN), **settings))


def words(ids):
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize("tight", [0, 1, 2, 6, 9])
def test_words_of_any_length(tight):
    a, b = recorded(tight, words), recorded(tight, words, 2.0**-10)
    found = compare(a, b)
    assert found.smallest_margin.step == tight
    expected = "of of " + words(CHOSEN[:tight])
    assert context(a, found.smallest_margin) == repr(expected[-60:])
    assert as_json(found)["smallest_margin"]["context"] == repr(expected[-60:])
    assert f"after {expected[-60:]!r}" in as_text(found) and "after" in page(found)


def test_a_character_of_several_tokens():
    """The bytes of one character: what is there before its last is no text yet."""
    pieces = [b"\xe2", b"\x82", b"\xac", b"z", b"longer ", b"", b"", b""]

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    class Bytes(Scripted):
        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 8)
            step = input_ids.shape[1] - 2
            logits[:, -1, [4, 0, 1, 2, 3][step]] = 0.5 if step == self.tight else 2.0
            return logits

    for tight, text in ((1, "longer "), (2, "longer "), (3, "longer "), (4, "longer \u20ac")):
        model = subject(Bytes(tight), 8)
        model.decode = decode
        prompt = [{"tokens": [4, 4], "text": ""}]
        found = record_prompts(model, prompt, Run(num_tokens=5))
        assert found.cases[0].text == "longer \u20acz"
        assert context(found, compare(found, found).smallest_margin) == repr(text)


def test_records_from_before_have_the_share_of_the_text(tmp_path):
    """Their steps do not say where the text of a token ends; forged numbers are refused."""
    from xtrain.drift import DriftError
    from xtrain.drift.recording.tensors import file_hash, write_json

    model = subject(Scripted(6), 8)
    model.decode = lambda ids: "y" * len(ids)
    prompt = [{"tokens": [4, 4], "text": "of of "}]
    record_prompts(model, prompt, Run(num_tokens=10), out=tmp_path / "r")
    path, manifest = tmp_path / "r" / "case_0000.json", tmp_path / "r" / "manifest.json"
    contents = json.loads(path.read_text())
    assert [step.pop("text_end") for step in contents["steps"]] == list(range(10))

    def rewrite():
        write_json(path, contents)
        listed = json.loads(manifest.read_text())
        size = {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}
        listed["files"]["case_0000.json"] = size
        write_json(manifest, listed)

    rewrite()
    old = Record(tmp_path / "r")
    assert context(old, compare(old, old).smallest_margin) == repr("of of " + "y" * 6)
    for forged in (-1, "x", 1.5, 11):
        contents["steps"][3]["text_end"] = forged
        rewrite()
        with pytest.raises(DriftError, match="text_end"):
            compare(tmp_path / "r", tmp_path / "r")
