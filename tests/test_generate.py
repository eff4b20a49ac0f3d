"""Sampling: seeded by itself, inside the vocabulary, within the context; the command."""

from __future__ import annotations

import subprocess
import sys

import foreign_tokenizers as foreign
import pytest
import torch
from torch import nn

from xtrain import checkpoint
from xtrain import generate as command
from xtrain.data import load_tokenizer
from xtrain.generate import generate
from xtrain.model import Config, Transformer
from xtrain.training.run_folder import RunFolder


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
    for value, limit in (("nan", "finite"), ("inf", "finite"), ("-1", "at least 0")):
        assert command.main(["--run=counts", f"--temperature={value}"]) == 2
        assert f"--temperature must be {limit}, got" in capsys.readouterr().err
    assert command.main(["--run=counts", f"--seed={2**64}"]) == 2
    assert f"--seed must be at most {2**64 - 1}, got" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "xtrain.generate", "--promt", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown argument '--promt'; did you mean --prompt?\n"


# --- text of any tokenizer ----------------------------------------------------------------------

TEXT = ["the cat sat on the mat and the dog ran", "a small cat said what the dog sat on"] * 20


KINDS = {
    "byte_level": lambda: foreign.byte_level(TEXT, 300),
    "sentencepiece": lambda: foreign.sentencepiece(TEXT, 330, byte_fallback=True),
    "word_piece": lambda: foreign.word_piece(TEXT, 80),
    "word_level": lambda: foreign.word_level(TEXT, "[UNK]", "</s>"),
    "no unknown word": lambda: foreign.word_level(TEXT, "[SEP]"),
    "unigram": lambda: foreign.unigram(TEXT, 60),
    "bytes": lambda: None,
}


@pytest.fixture(scope="module", params=KINDS)
def untrained_run(request, tmp_path_factory):
    """(tokenizer or None for bytes, the run "r" of an untrained model), which tests only read."""
    run = RunFolder(tmp_path_factory.mktemp("generate") / "runs" / "r")
    run.path.mkdir(parents=True)
    run.config.write_text("")
    tokenizer = KINDS[request.param]()
    if tokenizer is None:
        load_tokenizer("byte").save(run.tokenizer)
    else:
        tokenizer.save(str(run.tokenizer))
    model = tiny(vocab_size=tokenizer.get_vocab_size() if tokenizer else 256, max_seq_len=16)
    state = {"model": model.config.to_dict(), "config": {}, "aliases": {}}
    state["data"] = {"fingerprint": "", "tokens": 0}
    tensors = {"model": model.state_dict(), "optimizer": {}, "rng": {}}
    checkpoint.write(run.checkpoints, 1, tensors, state, keep_last=1)
    return tokenizer, run


@pytest.fixture
def run(untrained_run, monkeypatch):
    monkeypatch.chdir(untrained_run[1].path.parent.parent)
    return untrained_run


def test_prompt_and_continuation_are_one_text(run, monkeypatch, capsys):
    """The space before a word is a matter of both; the tokenizers package itself says the text."""
    tokenizer, _ = run
    if tokenizer is None:
        ids, right = list(b" sat"), "the cat sat"
    else:
        prompt, ids = tokenizer.encode("the cat").ids, tokenizer.encode("the cat sat").ids
        assert ids[: len(prompt)] == prompt
        ids, right = ids[len(prompt) :], "the cat sat"
    monkeypatch.setattr(command, "generate", lambda *_, **__: ids)
    assert command.main(["--run=r", "--device=cpu", "--prompt=the cat"]) == 0
    assert capsys.readouterr().out == f"{right}\n"


PROMPTS = {
    "empty": "",
    "space": " ",
    "lines": "\n\n",
    "words": "the cat",
    "longer than the context": "the cat sat on the mat " * 20,
    "special": "the <|endoftext|> </s> [SEP] cat",
    "emoji": "caf\u00e9 \U0001f642\U0001f3fd \u732b",
    "half a character": "caf\u0065\u0301",
    "NUL": "the\0cat",
    "escapes": "\x1b[31m\x07",
    "not UTF-8": "the \udcff",
    "unknown words": "Zqxj WVK",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_any_prompt_gives_text_or_one_line(run, name, capsys):
    tokenizer, folder = run
    text = PROMPTS[name]
    code = command.main(
        ["--run=r", "--device=cpu", f"--prompt={text}", "--tokens=5", "--temperature=0"]
    )
    out, error = capsys.readouterr()
    if code:
        assert code == 2 and out == "" and error.startswith("error: ") and error.count("\n") == 1
        known = tokenizer is None or name == "words" or name.startswith("longer")
        assert not known or name == "not UTF-8"
        assert "\x1b" not in error
        return
    model, ours, _ = command.load_run(folder, "cpu")
    prompt = ours.encode(text or "\n") or [ours.eos_id]
    ids = prompt + generate(
        model,
        prompt,
        num_tokens=5,
        vocab_size=ours.vocab_size,
        temperature=0,
        eos_id=ours.eos_id,
    )
    if tokenizer is None:
        right = bytes(ids).decode("utf-8", "replace")
    else:
        right = tokenizer.decode(ids, skip_special_tokens=False)
    assert error == "" and out == right + "\n"


def test_a_character_may_be_spread_over_ids(run, monkeypatch, capsys):
    """Bytes that only together are one: the prompt's last and those sampled."""
    tokenizer, folder = run
    _, ours, _ = command.load_run(folder, "cpu")
    smile = "\U0001f642"
    try:
        ids = ours.encode(smile)
    except ValueError:
        return  # a list of words has no such character
    for cut in range(len(ids) + 1):
        monkeypatch.setattr(command, "generate", lambda *_, rest=ids[cut:], **__: rest)
        monkeypatch.setattr(command, "_encoded", lambda *_, start=ids[:cut]: start)
        assert command.main(["--run=r", "--device=cpu"]) == 0
        right = ours.decode(ids)
        assert capsys.readouterr().out == f"{right}\n"
        if tokenizer is None or "<0xF0>" in tokenizer.get_vocab():
            assert right == smile


def test_logits_that_are_not_finite_draw_nothing():
    table = torch.zeros(4, 4)
    table[1] = float("nan")
    table[2, 0] = float("inf")
    table[3] = -float("inf")
    for last in (1, 2, 3):
        for temperature in (0, 1.0):
            with pytest.raises(FloatingPointError, match="after 1 tokens are not finite"):
                generate(Fixed(table), [last], num_tokens=1, vocab_size=4, temperature=temperature)
    masked = torch.full((4, 4), -float("inf"))
    masked[:, 2] = 0.0  # a token ruled out is no fault
    assert generate(Fixed(masked), [0], num_tokens=2, vocab_size=4) == [2, 2]


def test_a_run_that_there_is_not_is_blamed_on_the_right_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (["--run=nope"], []):
        assert command.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --run found no run") and "--resume" not in error
