"""Tokenizers: round trips, training, files of others, chunks that equal the whole document."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import foreign_tokenizers as foreign
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from xtrain.data import DataError, encode, load_tokenizer, open_corpus
from xtrain.data.encode import chunks, encode_pieces, find_cut, sample_chunks, with_newlines
from xtrain.data.readers import Piece
from xtrain.data.tokenizer import JsonTokenizer, train_bpe

TEXT = Path(json.__file__).read_text() + Path(random.__file__).read_text()
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe(600, [TEXT])


def random_strings(count: int) -> list[str]:
    """Empty, leading space, NUL, emoji with joiners, specials, combining marks, any code point."""
    rng = random.Random(0)
    special = ["", " ", "  a", "\0", "a\0b", " \n\t ", "\U0001f468\u200d\U0001f469\u200d\U0001f467"]
    special += [
        "\u1f03\u0301",
        "e\u0301",
        "\ufeff",
        "\uffff",
        "\U0010ffff",
        END,
        f" {END}x",
        "\r\n",
    ]
    alphabets = [
        "ab 1\n.,'",
        "".join(map(chr, range(256))),
        " \t\n\r\v\f\x1c\x85\xa0\u2003\u3000a'",
        "\u4e2d\u6587\u0e01\u0e33\u0627\u05d0\U0001f600\U0001f1e9\ufe0f\u200d ",
    ]
    strings = list(special)
    while len(strings) < count:
        size = rng.randrange(40)
        if rng.random() < 0.3:
            points = (rng.randrange(0x110000 - 0x800) for _ in range(size))
            strings.append("".join(chr(p if p < 0xD800 else p + 0x800) for p in points))
        else:
            strings.append("".join(rng.choices(rng.choice(alphabets), k=size)))
    return strings


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_round_trip_of_1000_strings(kind, bpe, tmp_path):
    tokenizer = load_tokenizer("byte") if kind == "byte" else bpe
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.vocab_size, again.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    strings = random_strings(1000)
    assert len(strings) == 1000 and "" in strings
    for text in strings:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert again.encode(text) == ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(np.array(tokenizer.encode("array"), dtype=np.uint16)) == "array"


def test_byte_ids_are_the_utf8_bytes(tmp_path):
    tokenizer = load_tokenizer("byte")
    text = "naive \u00fc\U0001f600"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([0x61, 0xF0, 0x9F]) == "a\ufffd"  # what a model may well generate
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id) == ("byte", 256, None)
    # The saved file means the same to other software, and to us.
    tokenizer.save(tmp_path / "tokenizer.json")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hugging_face = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in random_strings(100):
        assert other.encode(text).ids == list(text.encode())
        assert hugging_face(text)["input_ids"] == list(text.encode())
        assert other.decode(list(text.encode()), skip_special_tokens=False) == text
    assert load_tokenizer(tmp_path).name == "byte"


def test_lone_surrogates_are_refused(bpe):
    for tokenizer in (load_tokenizer("byte"), bpe):
        with pytest.raises(DataError, match=r"lone surrogate U\+DC80 at character 2"):
            tokenizer.encode("ab\udc80")


def test_decode_names_an_id_out_of_range(bpe):
    for tokenizer in (load_tokenizer("byte"), bpe, load_tokenizer("ids:10")):
        last = tokenizer.vocab_size - 1
        with pytest.raises(DataError, match=f"id {last + 1} at position 1: .* ids 0 to {last}"):
            tokenizer.decode([0, last + 1])
        with pytest.raises(DataError, match="id -1 at position 0"):
            tokenizer.decode([-1])


def test_bare_ids(tmp_path):
    tokenizer = load_tokenizer("ids:50257")
    assert (tokenizer.vocab_size, tokenizer.decode([5, 50256])) == (50257, "<5><50256>")
    with pytest.raises(DataError, match="has no text to encode"):
        tokenizer.encode("a")
    tokenizer.save(tmp_path / "t.json")
    assert load_tokenizer(tmp_path / "t.json").name == "ids:50257"


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("bpe", "'bpe': '' is not a number of tokens; write bpe:N, for example bpe:8192"),
        ("bpe:", "'bpe:': '' is not a number"),
        ("bpe:8k", "'8k' is not a number"),
        ("bpe:-5", "'-5' is not a number"),
        ("bpe:\u0663\u0660\u0660", "is not a number"),
        ("bpe:256", "N must be from 257 (256 bytes and the end of a document) to 1000000"),
        ("bpe:1000001", "N must be from 257"),
        ("ids:0", "N must be from 1"),
        ("ids:x", "'x' is not a number of tokens; write ids:N, for example ids:50257"),
        ("bytes", "no tokenizer file bytes; a tokenizer is byte, bpe:N, ids:N or the path of"),
    ],
)
def test_wrong_names(spec, match):
    with pytest.raises(DataError) as caught:
        open_corpus(None, tokenizer=spec, progress=False)
    assert match in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_tokenizer(tmp_path):
    for content in (b"", b"not json", b"[]", b"{}", b'{"model": {}}', b"\xff\xfe", b'{"model": 3}'):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(DataError, match="t.json is not a tokenizer.json") as caught:
            load_tokenizer(tmp_path / "t.json")
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=f"no tokenizer file {tmp_path}/tokenizer.json"):
        load_tokenizer(tmp_path)


def test_bpe_learns_and_is_the_same_in_every_process(bpe, tmp_path):
    assert (bpe.vocab_size, bpe.eos_id, bpe.name) == (600, 0, "bpe:600")
    assert len(bpe.encode(TEXT)) < 0.6 * len(TEXT)
    program = (
        "import hashlib, sys; from xtrain.data.tokenizer import train_bpe;"
        "t = train_bpe(600, [sys.stdin.read()]);"
        "print(hashlib.sha256(t.json_text.encode()).hexdigest())"
    )
    for hash_seed, threads in (("1", "1"), ("2", "2")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        got = subprocess.run(
            [sys.executable, "-c", program], input=TEXT, env=env, capture_output=True, text=True
        )
        assert got.stdout.strip() == hashlib.sha256(bpe.json_text.encode()).hexdigest(), got.stderr


def test_bpe_corpus(tmp_path, capfd):
    """Documents end in the eos id; the data bound the vocabulary; special tokens are recognised."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "aaaa aaaa"}\n{"text": ""}\n{"text": "bb<|endoftext|>c"}'
    )
    options = {"tokenizer": "bpe:8192", "cache_dir": tmp_path / "cache"}
    corpus = open_corpus([tmp_path / "a.jsonl"], **options)
    tokenizer = corpus.tokenizer
    assert corpus.vocab_size == tokenizer.vocab_size == 257 + 2  # aa, aaaa; nothing else repeats
    assert f"the data yield only {tokenizer.vocab_size} tokens" in capfd.readouterr().err
    expected = [
        *tokenizer.encode("aaaa aaaa"),
        0,
        *tokenizer.encode("bb"),
        0,
        *tokenizer.encode("c"),
        0,
    ]
    assert corpus.tokens.tolist() == expected
    again = open_corpus([tmp_path / "a.jsonl"], **options)
    assert again.fingerprint == corpus.fingerprint and "trained" not in capfd.readouterr().err


def foreign_tokenizer(path: Path, vocab: dict[str, int], eos: str | None = None) -> Path:
    """A word-level tokenizer.json with every setting that could spoil a corpus."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([name for name in vocab if name.startswith("<")])
    bos = next(iter(vocab))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    if eos is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return path / "tokenizer.json"


def test_a_file_of_others(tmp_path):
    """Truncation, padding and a bos of the file do not reach the corpus; its eos does."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "</s>": 3, "<stop>": 70_000}
    (tmp_path / "d.txt").write_text("a b b a c")
    for eos, eos_id in (
        (None, 3),
        ("<stop>", 70_000),
        ({"content": "<stop>"}, 70_000),
        ("<x>", None),
    ):
        file = foreign_tokenizer(tmp_path / str(eos_id), vocab, eos)
        corpus = open_corpus(
            [tmp_path / "d.txt"], tokenizer=file, cache_dir=tmp_path / "cache", progress=False
        )
        end = [] if eos_id is None else [eos_id]
        assert corpus.tokens.tolist() == [1, 2, 2, 1, 0, *end]
        # Ids decide the type, not the count of entries.
        assert corpus.tokens.dtype == np.uint32 and corpus.vocab_size == 70_001
    small = foreign_tokenizer(tmp_path / "small", {"<unk>": 0, "z": 65_535})
    assert load_tokenizer(small).vocab_size == 65_536
    corpus = open_corpus(
        [tmp_path / "d.txt"], tokenizer=small, cache_dir=tmp_path / "cache", progress=False
    )
    assert corpus.tokens.dtype == np.uint16


@pytest.mark.parametrize(
    ("file", "eos"),
    [
        ("tokenizer_config.json", {"eos_token": "<stop>", "pad_token": "a"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<stop>", "special": True}}),
        ("special_tokens_map.json", {"eos_token": "<stop>", "bos_token": "b"}),
        ("special_tokens_map.json", {"eos_token": {"content": "<stop>"}}),
        ("generation_config.json", {"eos_token_id": [4, 3]}),
        ("config.json", {"eos_token_id": 4}),
        ("tokenizer_config.json", {"eos_token": "<not there>"}),
        ("tokenizer_config.json", {"eos_token": None}),
        ("tokenizer_config.json", ["eos_token"]),
    ],
)
def test_what_was_saved_is_the_same_tokenizer(tmp_path, file, eos):
    """The file alone does not say which token ends a document; what was saved does."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "</s>": 3, "<stop>": 4}
    source, copy = tmp_path / "source", tmp_path / "copy"
    copy.mkdir()
    foreign_tokenizer(source, vocab)
    (source / file).write_text(json.dumps(eos))
    first = load_tokenizer(source)
    first.save(copy / "tokenizer.json")
    for spec in (copy, copy / "tokenizer.json"):
        again = load_tokenizer(spec)
        assert (again.eos_id, again.fingerprint) == (first.eos_id, first.fingerprint)
        assert again.special_tokens == first.special_tokens
    hugging_face = PreTrainedTokenizerFast.from_pretrained(copy)
    if "<not there>" in str(eos):
        assert first.eos_id is None
    else:
        assert first.eos_id == (4 if isinstance(eos, dict) and any(eos.values()) else 3)
        assert hugging_face.eos_token_id == first.eos_id
    for role in ("bos_token", "pad_token"):
        named = eos.get(role) if isinstance(eos, dict) else None
        assert first.special_tokens.get(role) == named
        assert named is None or getattr(hugging_face, role) == named


def test_a_byte_vocabulary_with_an_end_of_document_keeps_it(tmp_path):
    """256 bytes and no merges are `byte` only where nothing is added to them."""
    load_tokenizer("byte").save(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode("a<|im_end|>") == [97, 256]


def test_a_sentencepiece_like_file_decodes(tmp_path):
    """Metaspace and byte fallback, as Llama 2's: our calls pass through to its own decoder."""
    vocab = {
        "<unk>": 0,
        "\u2581": 1,
        "a": 2,
        "\u2581a": 3,
        **{f"<0x{b:02X}>": 4 + b for b in range(256)},
    }
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(" a\u00fc") == [3, 4 + 0xC3, 4 + 0xBC]
    assert tokenizer.decode(tokenizer.encode(" a\u00fc a")) == " a\u00fc a"


# Chunks


def mixed_text(rng: random.Random, size: int) -> str:
    words = ["a", "bc", " ", "  ", "\n", "\n\n", "\r\n", "'s", "'", ".", ",", "12", "\u00a0", "\t"]
    words += ["\u4e2d\u6587", "\U0001f600", "def", " x", "\nx", END, "\u2028", "\x1c", "we'll"]
    return "".join(rng.choices(words, k=size))


@pytest.mark.parametrize("limit", [1, 7, 64, 500])
def test_chunks_depend_on_the_document_alone(limit):
    """Any cutting of a document into pieces gives the same chunks, which join to the document."""
    rng = random.Random(limit)
    for _ in range(20):
        text = mixed_text(rng, 400)
        whole = list(chunks([Piece(text, True)], limit))
        assert "".join(piece.text for piece in whole) == text
        assert [piece.is_last for piece in whole] == [False] * (len(whole) - 1) + [True]
        assert all(0 < len(piece.text) <= limit for piece in whole)
        edges = sorted(rng.sample(range(len(text)), 15))
        parts = [text[a:b] for a, b in zip([0, *edges], [*edges, None], strict=True)]
        pieces = [*(Piece(part, False) for part in parts), Piece("", True)]
        assert [p.text for p in chunks(pieces, limit) if p.text] == [p.text for p in whole]


def is_safe(text: str, cut: int) -> bool:
    """After a newline or before a space that has no white space beside it."""
    after_newline = re.fullmatch(r"\S\n\S", text[cut - 2 : cut + 1])
    before_space = re.fullmatch(r"\S \S", text[cut - 1 : cut + 2])
    return bool(after_newline or before_space)


def test_chunked_ids_equal_those_of_the_whole_document(bpe):
    """Cuts at safe places are invisible to the patterns of GPT-2 and of its descendants."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    gpt4_like = tokenizers.Tokenizer.from_str(bpe.json_text)
    gpt4_like.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rng = random.Random(1)
    num_cuts = 0
    for tokenizer in (bpe, JsonTokenizer("gpt4-like", gpt4_like.to_str())):
        for _ in range(40):
            text = mixed_text(rng, 600)
            start, ids = 0, []
            while len(text) - start > 100:
                cut = find_cut(text, start, 100)
                if not is_safe(text, cut):  # only when there is no safe place is it cut elsewhere
                    assert cut == start + 100
                    assert not any(is_safe(text, at) for at in range(start + 2, cut))
                    break
                ids += tokenizer.encode(text[start:cut])
                start, num_cuts = cut, num_cuts + 1
            assert ids + tokenizer.encode(text[start:]) == tokenizer.encode(text)
    assert num_cuts > 500


def test_encode_pieces_equals_document_by_document(bpe):
    """Many short and a few long documents (several chunks, several batches) keep their order."""
    rng = random.Random(2)
    documents = [mixed_text(rng, rng.choice([0, 3, 50])) for _ in range(5000)] + [TEXT * 30, "end"]
    pieces = [Piece(text, True) for text in documents]
    got = np.concatenate(list(encode_pieces(pieces, bpe)))
    expected: list[int] = []
    for text in documents:
        if text:
            expected += [*bpe.encode(text), 0]
    assert got.tolist() == expected


# GPT-4o's pattern, apart from its classes of letters: a piece may run over a line end (";\n//").
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODE = "".join(
    f'int f{i}(int *x) {{\n  x[{i}] += {i * i};\n// the {i}th, "so \'far"\n\n\t}};\n'
    "//// caf\u00e9 \ufb01n\n"
    for i in range(400)
)


def split_bpe(*patterns: str, normalizer=None) -> tokenizers.Tokenizer:
    """Byte-level BPE behind the given patterns, with merges that reach over them."""
    before = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    return foreign.byte_level([CODE], 700, *before, normalizer=normalizer)


KINDS = {
    "GPT-2": lambda: split_bpe(),
    "GPT-4o": lambda: split_bpe(GPT4O),
    "lines": lambda: split_bpe(r"[^\n]*\n"),
    "two lines": lambda: split_bpe(r"[^\n]*\n[^\n]*\n"),
    "quotations": lambda: split_bpe(r'"[^"]*"'),
    "no pieces": lambda: split_bpe(r"(?m:.+)"),
    "NFKC": lambda: split_bpe(GPT4O, normalizer=normalizers.NFKC()),
    "sentencepiece": lambda: foreign.sentencepiece([CODE], 500, prefix=False),
    "dummy prefix": lambda: foreign.sentencepiece([CODE], 500),
    "WordPiece": lambda: foreign.word_piece([CODE], 300),
    "unigram": lambda: foreign.unigram([CODE], 150),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_a_document_know_no_cut(kind, monkeypatch):
    """Documents of a few windows, in any number of pieces: the ids of the package for the whole."""
    backend = KINDS[kind]()
    tokenizer = JsonTokenizer(kind, backend.to_str())
    rng = random.Random(0)
    shuffled = mixed_text(rng, 4000) + "a" * 3000 + mixed_text(rng, 2000)
    documents = [CODE, "short", shuffled, "", CODE[::-1], CODE[: 400 + 200]]
    expected = [backend.encode(text, add_special_tokens=False).ids for text in documents]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    read_at_once = []
    original = JsonTokenizer.encodings

    def encodings(self, texts, **options):
        read_at_once.extend(map(len, texts))
        return original(self, texts, **options)

    monkeypatch.setattr(JsonTokenizer, "encodings", encodings)
    for whole, window, overlap in ((1 << 20, 1 << 18, 1 << 14), (0, 3000, 800), (0, 400, 200)):
        monkeypatch.setattr(encode, "WHOLE_CHARS", whole)
        monkeypatch.setattr(encode, "WINDOW_CHARS", window)
        monkeypatch.setattr(encode, "OVERLAP_CHARS", overlap)
        for text, ids in zip(documents, expected, strict=True):
            read_at_once.clear()
            edges = [0, *sorted(rng.sample(range(len(text) + 1), min(5, len(text)))), None]
            pieces = [Piece(text[a:b], b is None) for a, b in zip(edges, edges[1:], strict=False)]
            got = [i for array in encode_pieces(pieces, tokenizer) for i in array.tolist()]
            assert got == [*ids, *(end if text else [])]
        if kind in ("GPT-2", "GPT-4o", "dummy prefix") and not whole:
            assert max(read_at_once) <= window + overlap  # the last one is short: once


def test_a_long_document_is_read_in_windows(monkeypatch):
    """Several windows of the true size, and seconds at most."""
    tokenizer = JsonTokenizer("gpt-4o", split_bpe(GPT4O).to_str())
    text = CODE * 34
    assert len(text) > encode.WHOLE_CHARS
    expected = tokenizer.encode(text)
    longest = []
    original = JsonTokenizer.encodings

    def encodings(self, texts, **options):
        longest.append(max(map(len, texts)))
        return original(self, texts, **options)

    monkeypatch.setattr(JsonTokenizer, "encodings", encodings)
    started = time.process_time()
    got = np.concatenate(list(encode_pieces([Piece(text, True)], tokenizer)))
    assert time.process_time() - started < 20
    assert got.tolist() == [*expected, 0]
    assert max(longest) == encode.WINDOW_CHARS + encode.OVERLAP_CHARS


def test_newlines_between_documents():
    def joined(*documents: list[str]) -> str:
        pieces = [
            Piece(text, at == len(texts) - 1)
            for texts in documents
            for at, text in enumerate(texts)
        ]
        return "".join(piece.text for piece in with_newlines(pieces))

    assert joined(["a", "b"], ["c"]) == "ab\nc"
    assert joined(["a\n", ""], ["", "c", ""], [""], ["", ""], ["d"]) == "a\nc\nd"
    assert joined([""], ["a"], [""]) == "a"


def test_training_sample_is_an_even_share():
    pieces = [Piece(f"{i:05d}", True) for i in range(20_000)]
    assert len(list(sample_chunks(pieces, 100_000, 100_000))) == 20_000
    kept = [int(text) for text in sample_chunks(pieces, 100_000, 10_000)]
    assert kept == sorted(kept) == [int(t) for t in sample_chunks(pieces, 100_000, 10_000)]
    assert abs(len(kept) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    assert abs(np.mean(kept) - 10_000) < 5 * 20_000 / (12 * 2000) ** 0.5
