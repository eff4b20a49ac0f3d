"""Corpus: splits, descriptions, and what importing costs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xtrain.data import Batches, DataError, open_corpus
from xtrain.data.sources import TEXT_SUFFIXES


@pytest.fixture
def corpus(tmp_path):
    letters = bytes(range(32, 127))
    (tmp_path / "a.txt").write_bytes(letters * 19 + letters[::-1])  # 1900 tokens
    return open_corpus([tmp_path / "a.txt"], cache_dir=tmp_path / "cache", progress=False)


def test_split_gives_views_of_the_end(corpus):
    for train, val in (corpus.split(val_fraction=0.1), corpus.split(val_tokens=190)):
        assert isinstance(train, np.memmap) and isinstance(val, np.memmap)
        assert np.shares_memory(train, corpus.tokens) and np.shares_memory(val, corpus.tokens)
        assert (train.size, val.size) == (1710, 190)
        assert np.array_equal(np.concatenate([train, val]), corpus.tokens)
    train, val = corpus.split(val_tokens=0, seq_len=100)
    assert (train.size, val.size) == (1900, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "one of val_fraction and val_tokens"),
        ({"val_fraction": 0.1, "val_tokens": 1}, "one of val_fraction and val_tokens"),
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"val_fraction": -0.1}, r"must be in \[0, 1\), got -0.1"),
        ({"val_fraction": float("nan")}, r"must be in \[0, 1\), got nan"),
        ({"val_tokens": 1900}, r"val_tokens must be in \[0, 1900\), .* got 1900"),
        ({"val_tokens": -1}, "got -1"),
        (
            {"val_fraction": 0.05, "seq_len": 95},
            r"validation part of 95 tokens \(of 1900\) is too short for one sequence of 95 \+ 1",
        ),
        ({"val_tokens": 1850, "seq_len": 50}, r"training part of 50 tokens \(of 1900\)"),
    ],
)
def test_split_errors(corpus, options, match):
    with pytest.raises(DataError, match=match):
        corpus.split(**options)


def test_too_short_for_one_sequence_names_both_lengths(corpus):
    with pytest.raises(DataError, match=r"hold 1900 tokens, too short .* seq_len 2048 needs 2048"):
        Batches(corpus.tokens, seq_len=2048, batch_size=1, seed=0)


def test_description_is_one_line(corpus, tmp_path):
    assert corpus.description.startswith(f"{tmp_path}/a.txt: 1 file, 1,900 bytes, sha256 ")
    assert corpus.description.endswith("; byte: 1,900 tokens") and "\n" not in corpus.description
    assert len(corpus.fingerprint) == 64 and int(corpus.fingerprint, 16)


def test_import_brings_no_torch_and_no_optional_package():
    program = (
        "import sys, xtrain.data\n"
        "print([m for m in ('torch', 'tokenizers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert got.stdout.strip() == "[]", got.stderr


def test_docs_data_md_is_true(tmp_path, monkeypatch, capsys):
    """Its Python example runs as pasted, and its list of suffixes is the real one."""
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "docs/data.md", "exec"), {})
    assert "standard library of Python" in capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("| text file")]
    assert set(row.split("`")[1].split()) == TEXT_SUFFIXES
