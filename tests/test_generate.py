"""Sampling: seeded by itself, inside the vocabulary, within the context; the command."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from training import running

from xtrain import generate as command
from xtrain.generate import generate
from xtrain.model import Config, Transformer


def tiny(**overrides):
    torch.manual_seed(0)
    return Transformer(Config.preset("tiny", **overrides))


class Fixed(nn.Module):
    """Logits that depend on the last token alone: logits[v] = table[token, v]."""

    def __init__(self, table, max_seq_len=8):
        super().__init__()
        self.table = nn.Parameter(torch.as_tensor(table, dtype=torch.float32))
        self.config = Config.preset("tiny", max_seq_len=max_seq_len)
        self.lengths = []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return self.table[tokens], None


def test_greedy_is_the_argmax_of_the_whole_prefix():
    model = tiny(max_seq_len=12)
    prompt = [3, 1, 4]
    ids = generate(model, prompt, num_tokens=6, vocab_size=16, temperature=0)
    tokens = list(prompt)
    for expected in ids:
        logits, _ = model(torch.tensor([tokens]))
        assert int(logits[0, -1].argmax()) == expected
        tokens.append(expected)
    assert generate(model, prompt, num_tokens=6, vocab_size=16, top_k=1) == ids


def test_the_draw_depends_on_its_seed_alone():
    model = tiny()
    arguments = dict(num_tokens=20, vocab_size=16, temperature=1.0, top_k=0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(model, [1], seed=5, **arguments)
    assert torch.equal(torch.get_rng_state(), state)  # torch's own generator is left alone
    torch.manual_seed(2)
    assert generate(model, [1], seed=5, **arguments) == first
    assert generate(model, [1], seed=6, **arguments) != first


def test_padded_rows_of_the_head_are_never_chosen():
    """Row C50: the head is rounded up to 64 rows; those beyond the tokenizer may be likeliest."""
    table = torch.zeros(16, 16)
    table[:, 10:] = 100.0
    for temperature in (0, 0.5, 5.0):
        ids = generate(
            Fixed(table), [0], num_tokens=50, vocab_size=10, temperature=temperature, top_k=0
        )
        assert max(ids) < 10
    with pytest.raises(ValueError, match="prompt must be ids below 10, at least one"):
        generate(Fixed(table), [10], num_tokens=1, vocab_size=10)
    with pytest.raises(ValueError, match="at least one"):
        generate(Fixed(table), [], num_tokens=1, vocab_size=10)


def test_frequencies_are_those_of_softmax_and_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    count = 2000
    for top_k, kept in ((0, 4), (2, 2)):
        ids = generate(
            Fixed(logits.expand(4, 4)),
            [0],
            num_tokens=count,
            vocab_size=4,
            temperature=2.0,
            top_k=top_k,
        )
        probability = torch.where(torch.arange(4) >= 4 - kept, (logits / 2).exp(), 0)
        probability /= probability.sum()
        rate = torch.bincount(torch.tensor(ids), minlength=4) / count
        sigma = (probability * (1 - probability) / count).sqrt()
        assert torch.all((rate - probability).abs() <= 5 * sigma)


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature):
    table = torch.tensor([[-3e4, 3e4 - 1.0, 3e4], [5.0, 4.0, -5.0], [0.0, 2.0, 1.0]])
    greedy = generate(Fixed(table), [0], num_tokens=6, vocab_size=3, temperature=0)
    low = generate(Fixed(table), [0], num_tokens=6, vocab_size=3, temperature=temperature)
    assert low == greedy == [2, 1, 0, 2, 1, 0]


def test_context_end_and_mode():
    cycle = torch.full((4, 4), -100.0)
    for token in range(4):
        cycle[token, (token + 1) % 4] = 100.0
    model = Fixed(cycle, max_seq_len=5).train()
    assert generate(model, [0], num_tokens=9, vocab_size=4) == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert model.lengths == [1, 2, 3, 4, 5, 5, 5, 5, 5] and model.training
    assert generate(model, [0], num_tokens=9, vocab_size=4, eos_id=3) == [1, 2, 3]


@pytest.fixture
def runner(tmp_path):
    with running(tmp_path) as runner:
        yield runner


def test_the_command_continues_a_run(runner, monkeypatch, capsys):
    monkeypatch.chdir(runner.folder)
    assert runner("--name=counts", "--steps=150") == 0
    capsys.readouterr()
    flags = ["--run=counts", "--prompt=one two ", "--tokens=40", "--temperature=0", "--device=cpu"]
    assert command.main(flags) == 0
    text = capsys.readouterr().out
    assert text.startswith("one two ") and len(text) > 30
    known = set("zero one two three four five six seven eight nine".split())
    words = text.split()[2:-1]
    assert sum(word in known for word in words) >= len(words) / 2  # it has learnt to spell
    assert command.main(flags) == 0 and capsys.readouterr().out == text

    assert command.main(["--run=count", "--device=cpu"]) == 2
    assert "did you mean counts?" in capsys.readouterr().err
    assert command.main(["--run=counts", "--tokens=-1"]) == 2
    assert "--tokens must be at least 0" in capsys.readouterr().err
    for value in ("nan", "inf", "-1"):
        assert command.main(["--run=counts", f"--temperature={value}"]) == 2
        assert "--temperature must be at least 0 and finite" in capsys.readouterr().err
    assert command.main(["--run=counts", f"--seed={2**64}"]) == 2
    assert "--seed must be from" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "xtrain.generate", "--promt", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown argument '--promt'; did you mean --prompt?\n"
