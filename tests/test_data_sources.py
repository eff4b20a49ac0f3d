"""From names of data to a corpus: files, folders, globs, splits, descriptions."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xtrain.data import Batches, DataError, open_corpus
from xtrain.data.sources import TEXT_SUFFIXES, _matches, list_sources, list_stdlib


@pytest.fixture
def read(tmp_path):
    """Return the text of a corpus read with byte tokens, and check that a second reading agrees."""

    def read(*data, **options) -> str:
        options = {"cache_dir": tmp_path / "cache", "progress": False, **options}
        corpus = open_corpus([str(item) for item in data], **options)
        return corpus.tokenizer.decode(corpus.tokens)

    return read


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fails(read, match: str, *data, **options) -> str:
    """Assert a DataError of one line that holds match literally; return its text."""
    with pytest.raises(DataError) as caught:
        read(*data, **options)
    text = str(caught.value)
    assert match in text and "\n" not in text, text
    assert isinstance(caught.value, ValueError)
    return text


# What is found


def test_one_file_is_its_bytes(tmp_path, read):
    text = "naïve \x00 \U0001f600 \r\n tail without newline"
    assert read(write(tmp_path / "a.txt", text)) == text
    assert read(write(tmp_path / "README", text)) == text  # named outright, no suffix needed


def test_documents_are_separated_by_one_newline(tmp_path, read):
    files = [write(tmp_path / n, c) for n, c in (("a.txt", "a"), ("b.md", "b\n"), ("c.py", "c"))]
    empty = write(tmp_path / "e.txt", "")
    assert read(*files) == "a\nb\nc"
    assert read(empty, files[0], empty, files[1], empty) == "a\nb\n"
    rows = write(tmp_path / "r.jsonl", '{"text": "x"}\n{"text": ""}\n\n{"text": "y"}')
    assert read(rows, files[2]) == "x\ny\nc"


def test_files_larger_than_a_block_arrive_whole(tmp_path, read):
    """A sequence of four bytes straddles each block's edge (1 MiB)."""
    text = "abc" + "\U0001f600" * 600_000
    assert read(write(tmp_path / "big.txt", text)) == text


def test_folder_order_and_what_is_left_out(tmp_path):
    root = tmp_path / "d"
    for name in ("b.txt", "a/z.py", "a/b/c.md", "a.rst", "B.TXT", ".git/x.txt", ".hidden.txt"):
        write(root / name, "t")
    write(root / "image.png", b"\x89PNG")
    write(root / "LICENSE", "no suffix")
    write(root / "fake.txt", b"text\0binary")
    write(root / "__pycache__/m.py", "t")
    write(root / "weights.bin", b"\0" * 10)
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "gone.txt").symlink_to(root / "nowhere")
    listing = list_sources([str(root)])
    names = [os.path.relpath(source.path, root) for source in listing.sources]
    assert names == ["B.TXT", "a/b/c.md", "a/z.py", "a.rst", "b.txt"]
    assert dict(+listing.left_out) == {"hidden": 2, "not text": 2, "binary": 2, "not a file": 1}
    corpus = open_corpus([root], cache_dir=tmp_path / "cache", progress=False)
    assert "5 files (left out: 2 binary, 2 hidden, 1 not a file, 2 not text)" in corpus.description


def test_globs_and_repeats(tmp_path, read):
    a, b = write(tmp_path / "x/a.txt", "a"), write(tmp_path / "x/y/b.txt", "b")
    write(tmp_path / "x/c.png", "c")
    literal = write(tmp_path / "odd[1].txt", "odd")
    assert read(tmp_path / "x/*.txt") == "a"
    assert read(tmp_path / "x/**/*.txt") == "a\nb"
    assert read(tmp_path / "x/*") == "a\nb"  # a.txt, and the folder y
    assert read(literal) == "odd"
    assert read(b, a, tmp_path / "x") == "b\na"
    listing = list_sources([str(b), str(a), str(tmp_path / "x")])
    assert listing.left_out["named twice"] == 2


@pytest.mark.parametrize(
    "pattern",
    "** * **/* */*.txt **/b/*.txt a/** a/**/b/* **/**/[bc]*.txt .*/* */../b.txt ./**/*.txt a*/ "
    "a/b/../*.txt none/* b.txt/* ?.txt".split(),
)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_pattern_matches_what_glob_matches(tmp_path, monkeypatch, pattern, absolute):
    for name in ("b.txt", "a/b.txt", "a/b/c.txt", "a/b/b/d.md", "a/.h/e.txt", ".g/f.txt", "ab/b"):
        write(tmp_path / "root" / name, "t")
    (tmp_path / "root/gone.txt").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "root")
    pattern = f"{tmp_path}/root/{pattern}" if absolute else pattern
    expected = {os.path.normpath(path) for path in glob.glob(pattern, recursive=True)}
    assert {os.path.normpath(path) for path in _matches("", pattern.split("/"))} == expected


def test_links_among_folders_do_not_multiply(tmp_path, read):
    write(tmp_path / "x/a.txt", "a")
    for name in ("one", "two"):
        (tmp_path / "x" / name).symlink_to(".")  # glob.glob finds 2^40 paths here
    listing = list_sources([str(tmp_path / "x/**/*.txt")])
    assert len(listing.sources) == 1 and not listing.left_out["named twice"]
    assert read(tmp_path / "x/**") == read(tmp_path / "**/*.txt") == "a"


def test_home_is_expanded(tmp_path, read, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "home")
    assert read("~/a.txt") == "home"


def test_the_standard_library_is_the_default(tmp_path):
    corpus = open_corpus(None, cache_dir=tmp_path, progress=False)
    root = Path(os.__file__).parent
    names = [os.path.relpath(source.path, root) for source in list_stdlib().sources]
    assert {"argparse.py", "json/decoder.py", "ast.py"} <= set(names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [part for part in parts if part.startswith(("_sysconfigdata", "config-"))]
    # Independent count of the bytes, and the text itself.
    texts = [(root / name).read_bytes() for name in names]
    size = sum(map(len, texts))
    assert f"{len(names)} files" in corpus.description and f"{size:,} bytes" in corpus.description
    assert ".".join(map(str, sys.version_info[:3])) in corpus.description
    assert bytes(corpus.tokens[: len(texts[0])].astype(np.uint8)) == texts[0]
    assert corpus.tokens.size > 5_000_000 and corpus.vocab_size == 256


def test_the_standard_library_replaces_what_is_not_utf8(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    write(root / "latin.py", "# caf\xe9\n".encode("latin-1"))
    write(root / "test/skipped.py", "# test\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    for tokenizer in ("byte", "bpe:300"):
        corpus = open_corpus(None, tokenizer=tokenizer, cache_dir=tmp_path / "c", progress=False)
        text = corpus.tokenizer.decode(corpus.tokens).removesuffix("<|endoftext|>")
        assert text == "# caf\ufffd\n"
    for missing in (root / "test/none", root / "test"):  # a zipped Python has no such folder
        (root / "test/skipped.py").unlink(missing_ok=True)
        with pytest.raises(DataError, match="no Python source below"):
            list_stdlib(missing)


# Records


def test_jsonl(tmp_path, read):
    rows = [{"text": "one\n", "id": 1}, {"id": 2, "text": "zw\u00f6lf \U0001f600"}]
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(map(json.dumps, rows)) + "\n")
    assert read(path) == "one\nzw\u00f6lf \U0001f600"
    other = write(tmp_path / "b.ndjson", '{"body": "b"}')
    assert read(other, field="body") == "b"


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"text": "a"', ":3: not JSON (Expecting ',' delimiter"),
        ("[1, 2]", ":3: not a JSON object but an array"),
        ('"text"', ":3: not a JSON object but a string"),
        ('{"body": "a", "id": 1}', ":3: no field 'text' (fields here: 'body', 'id')"),
        ("{}", ":3: no field 'text' (fields here: none)"),
        ('{"text": 5}', ":3: field 'text' is not a string but a number"),
        ('{"text": null}', ":3: field 'text' is not a string but null"),
        ('{"text": "a\\ud800b"}', ":3: lone surrogate U+D800 at character 1"),
        ('{"text": ' + "[" * 200_000, ":3: "),  # RecursionError or JSON error by version
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, read, line, match):
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    fails(read, f"{path}{match}", path)


def test_jsonl_not_utf8_names_line_and_offset(tmp_path, read):
    good = '{"text": "\xfc"}\n'.encode()
    path = write(tmp_path / "a.jsonl", good + b'{"text": "caf\xe9"}\n')
    fails(read, f"{path}:2: not UTF-8 at byte offset {len(good) + 13}", path)
    assert read(path, errors="replace") == "\xfc\ncaf\ufffd"
    lone = write(tmp_path / "b.jsonl", '{"text": "a\\ud800\\udfffb"}')
    assert read(lone, errors="replace") == "a\U000103ffb"  # a pair is one character, not lone
    lone = write(tmp_path / "c.jsonl", '{"text": "a\\udfff\\ud800b"}')
    assert read(lone, errors="replace") == "a\ufffd\ufffdb"


def test_parquet(tmp_path, read, monkeypatch):
    texts = [f"row {i} \u00fc" for i in range(3000)]  # several batches, several row groups
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(3000), "text": texts}), path, row_group_size=700)
    assert read(path) == "\n".join(texts)
    large = pa.table({"body": pa.array(texts[:2], pa.large_string()).dictionary_encode()})
    pq.write_table(large, tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", field="body") == "\n".join(texts[:2])
    fails(read, f"{path}: no column 'body' (columns: 'id', 'text')", path, field="body")
    fails(read, f"{path}: row 0: 'id' is not a string but a number", path, field="id")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "n.parquet")
    fails(read, "n.parquet: row 1: 'text' is not a string but null", tmp_path / "n.parquet")
    broken = write(tmp_path / "c.parquet", path.read_bytes()[:-100])
    fails(read, f"{broken}: not a readable .parquet", broken)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails(read, "needs pyarrow: pip install 'xtrain[parquet]'", write(tmp_path / "d.parquet", "x"))


# Errors of names and contents


def test_missing_names(tmp_path, read):
    fails(read, f"cannot read {tmp_path}/no.txt: No such file or directory", tmp_path / "no.txt")
    fails(read, f"the pattern {tmp_path}/*.txt matches no data", tmp_path / "*.txt")
    fails(read, "no data named")
    write(tmp_path / "d/x.png", "x")
    fails(read, f"the folder {tmp_path}/d holds no text", tmp_path / "d")
    os.mkfifo(tmp_path / "pipe.txt")
    fails(read, "pipe.txt: neither a file nor a folder", tmp_path / "pipe.txt")


def test_unknown_suffix(tmp_path, read):
    text = fails(read, "unknown suffix '.pdf'", write(tmp_path / "a.pdf", "x"))
    assert all(suffix in text for suffix in (*TEXT_SUFFIXES, ".jsonl", ".parquet", ".bin"))
    fails(read, "one JSON object per line is read as .jsonl", write(tmp_path / "a.json", "[]"))


def test_empty(tmp_path, read):
    empty = write(tmp_path / "e.txt", "")
    fails(read, f"{empty} is empty (0 bytes)", empty)
    blank = write(tmp_path / "e.jsonl", '\n{"text": ""}\n')
    fails(read, "the data are empty: no text in any document", blank)
    assert not list((tmp_path / "cache").iterdir())  # nothing half-made stays


@pytest.mark.parametrize("size", [10, (1 << 20) - 1, (1 << 20) + 5])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [(b"\xe9 tail", "invalid continuation byte"), (b"\xff", "invalid start byte")],
)
def test_not_utf8_names_file_and_offset(tmp_path, read, size, bad, reason):
    good = ("\xfc" + "a" * size).encode()[:size]
    path = write(tmp_path / "a.txt", good + bad)
    fails(read, f"{path}: not UTF-8 at byte offset {size} (0x{bad[0]:02x}: {reason})", path)
    assert read(path, errors="replace") == (good + bad).decode(errors="replace")


def test_not_utf8_at_the_very_end(tmp_path, read):
    path = write(tmp_path / "a.txt", b"abc\xf0\x9f\x98")
    fails(read, "not UTF-8 at byte offset 3 (0xf0: unexpected end of data)", path)
    fails(read, "errors must be one of", path, errors="ignore")


def test_unreadable_file_and_folder():
    """As an ordinary user: root reads everything, so its effective id is put down meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        secret = write(root / "secret.txt", "x")
        write(root / "shut/a.txt", "x")
        (root / "cache").mkdir(mode=0o777)
        secret.chmod(0)
        (root / "shut").chmod(0)
        root.chmod(0o755)
        messages = []
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        try:
            for data in (secret, root / "shut"):
                with pytest.raises(DataError) as caught:
                    open_corpus([data], cache_dir=root / "cache", progress=False)
                messages.append(str(caught.value))
        finally:
            if was_root:
                os.seteuid(0)
            (root / "shut").chmod(0o755)
        assert messages == [
            f"cannot read {path}: Permission denied" for path in (secret, root / "shut")
        ]


# Datasets


def test_hf_local_folders(tmp_path, read, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    texts = [f"story {i} \u00fc" for i in range(1500)]
    train, valid = datasets.Dataset.from_dict({"text": texts}), ["held", "out"]
    both = datasets.DatasetDict(train=train, valid=datasets.Dataset.from_dict({"text": valid}))
    both.save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    pq.write_table(pa.table({"text": texts}), write(tmp_path / "files/train-0.parquet", ""))
    for spec in ("both", "both:train", "one", "files", "files:train"):
        assert read(f"hf:{tmp_path}/{spec}") == "\n".join(texts), spec
    assert read(f"hf:{tmp_path}/both:valid") == "held\nout"
    fails(read, "no split 'test' (splits: train, valid)", f"hf:{tmp_path}/both:test")
    fails(read, "cannot load hf:", f"hf:{tmp_path}/files:test")
    fails(read, "no column 'body' (columns: 'text')", f"hf:{tmp_path}/one", field="body")
    fails(read, "write hf:NAME", "hf:")
    fails(read, f"is read as hf:{tmp_path}/one", tmp_path / "one")
    # The key is the content: the same rows from another form are the same corpus.
    prints = {
        open_corpus([f"hf:{tmp_path}/{s}"], cache_dir=tmp_path / "c", progress=False).fingerprint
        for s in ("both", "one", "files")
    }
    assert len(prints) == 1


def test_hf_without_the_package(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = fails(read, "pip install 'xtrain[hf]'", "hf:roneneldan/TinyStories")
    assert text.startswith("hf:roneneldan/TinyStories needs the datasets package")


# --- the corpus: splits, descriptions, what importing costs ---------------------------------------


@pytest.fixture
def corpus(tmp_path):
    letters = bytes(range(32, 127))
    (tmp_path / "a.txt").write_bytes(letters * 19 + letters[::-1])  # 1900 tokens
    return open_corpus([tmp_path / "a.txt"], cache_dir=tmp_path / "cache", progress=False)


def test_split_gives_views_of_the_end(corpus):
    train, val = corpus.split(val_fraction=0.1)
    assert isinstance(train, np.memmap) and isinstance(val, np.memmap)
    assert np.shares_memory(train, corpus.tokens) and np.shares_memory(val, corpus.tokens)
    assert (train.size, val.size) == (1710, 190)
    assert np.array_equal(np.concatenate([train, val]), corpus.tokens)
    train, val = corpus.split(val_fraction=0, seq_len=100)
    assert (train.size, val.size) == (1900, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"val_fraction": -0.1}, r"must be in \[0, 1\), got -0.1"),
        ({"val_fraction": float("nan")}, r"must be in \[0, 1\), got nan"),
        (
            {"val_fraction": 0.05, "seq_len": 95},
            r"validation part of 95 tokens \(of 1900\) is too short for one sequence of 95 \+ 1",
        ),
        ({"val_fraction": 0.974, "seq_len": 50}, r"training part of 49 tokens \(of 1900\)"),
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
