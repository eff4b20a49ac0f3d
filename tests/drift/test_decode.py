"""Three ways to continue a prompt: whose tokens they are, and how many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drift_models import Rowwise, gpt2, llama, prompts, subject
from torch import nn

from xtrain.drift import compare
from xtrain.drift.cli import main
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run


def test_greedy_is_the_models_own_generate():
    """Without a cache and with it, the tokens of a small model are those of generate()."""
    for model in (llama(), gpt2()):
        lists = prompts([1, 2, 3], [7, 8, 9], [5])
        ids = torch.tensor([[1, 2, 3]])
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        own = record_prompts(subject(model, 64), lists, Run(num_tokens=6))
        theirs = record_prompts(
            subject(model, 64), lists, Run(num_tokens=6, decode="generate", batch_size=2)
        )
        for found in (own, theirs):
            assert [step.tokens[0] for step in found.cases[0].steps] == expected[0, 3:].tolist()
        result = compare(own, theirs)
        assert result.exit_code in (0, 1) and result.max_shift < 1e-5
        assert len(result.positions) == 18
        assert [p.position for p in result.positions[:6]] == [2, 3, 4, 5, 6, 7]


def test_sampling_is_drawn_by_its_seed_alone():
    model = Rowwise()
    settings = Run(num_tokens=12, decode="sample", sample_seed=3)
    torch.manual_seed(1)
    first = record_prompts(subject(model), prompts([1], [1]), settings)
    torch.manual_seed(2)
    again = record_prompts(subject(model), prompts([1], [1]), settings)
    texts = [[s.tokens[0] for s in case.steps] for case in (*first.cases, *again.cases)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]  # a prompt's own draws
    other = Run(num_tokens=12, decode="sample", sample_seed=4)
    assert compare(first, record_prompts(subject(model), prompts([1], [1]), other)).exit_code == 4


@pytest.mark.parametrize("decode", ["greedy", "generate"])
def test_ops_are_recorded_of_as_many_steps_as_were_asked_for(decode):
    settings = Run(num_tokens=4, decode=decode, op_steps=2)
    found = record_prompts(subject(gpt2(), 64), prompts([1, 2, 3]), settings)
    counts = [len(step.keys()) for step in found.steps()]
    assert counts[0] > 20 and counts[1] > 20 and counts[2:] == [0, 0]
    assert [len(step.keys("blocks")) for step in found.steps()] == [2] * 4


def test_sampled_tokens_have_the_frequencies_of_softmax():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def forward(self, input_ids):
            return self.table.expand(*input_ids.shape, 3)

    settings = Run(num_tokens=40, decode="sample", temperature=2.0, op_steps=0)
    found = record_prompts(subject(Fixed(), 3), prompts(*[[0]] * 40), settings)
    drawn = np.array([step.tokens[0] for step in found.steps()])
    expected = np.exp([0, 0.5, 1]) / np.exp([0, 0.5, 1]).sum()
    rate = np.bincount(drawn, minlength=3) / drawn.size
    assert (np.abs(rate - expected) <= 5 * np.sqrt(expected * (1 - expected) / drawn.size)).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_goes_on_behind_the_end_of_a_text(tmp_path, batch):
    """Every record of a prompt has as many steps as were asked for, whatever the model says.

    The expected tokens are those of a greedy loop written out; the first prompt meets the end id
    before the last step, in a model whose generation_config and config both name it.
    """
    model = gpt2()
    lists = [[1, 2, 3], [7, 8, 9], [4, 5]]
    expected = [greedy_loop(model, ids, 8) for ids in lists]
    end = expected[0][2]
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "p.json").write_text(str(lists))
    flags = ["--prompts", tmp_path / "p.json", "--tokens=8", "--decode=generate"]
    outs = [tmp_path / f"{name}.drift" for name in "ab"]
    for out in outs:
        command = ["record", "--out", out, tmp_path / "hf", *flags, f"--batch={batch}"]
        assert main([str(word) for word in command]) == 0
    found = compare(*outs)
    assert found.exit_code == 0
    assert [[step.tokens[0] for step in case.steps] for case in found.a.cases] == expected
    assert main(["compare", *map(str, outs)]) == 0


def greedy_loop(model, ids, count):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]
