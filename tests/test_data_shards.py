"""Token shards in both forms, mapped where they lie or joined, and every way they can be wrong."""

import numpy as np
import pytest

from xtrain.data import Batches, DataError, open_corpus

GPT2, LLAMA3 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


def shard(path, ids, form=None, *, count=None, cut=0, magic=None, version=None):
    """Write a .bin by hand: raw uint16, or a header of 256 int32 and the ids."""
    data = np.asarray(ids).astype("<u2").tobytes()
    if form is not None:
        known_magic, known_version, dtype = form
        header = np.zeros(256, dtype="<i4")
        header[:3] = (
            known_magic if magic is None else magic,
            known_version if version is None else version,
            len(ids) if count is None else count,
        )
        data = header.tobytes() + np.asarray(ids).astype(dtype).tobytes()
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.fixture
def read(tmp_path):
    def read(*paths, tokenizer="ids:50257"):
        return open_corpus(
            [str(p) for p in paths],
            tokenizer=tokenizer,
            cache_dir=tmp_path / "cache",
            progress=False,
        )

    return read


IDS = np.random.default_rng(0).integers(0, 50257, 5000)


@pytest.mark.parametrize("form", [None, GPT2, LLAMA3])
def test_one_shard_is_mapped_where_it_lies(tmp_path, read, form):
    path = shard(tmp_path / "train.bin", IDS, form)
    corpus = read(path)
    assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.tolist() == IDS.tolist()
    assert corpus.tokens.dtype == (np.uint32 if form is LLAMA3 else np.uint16)
    assert not corpus.tokens.flags.writeable and not (tmp_path / "cache").exists()
    assert corpus.vocab_size == 50257
    assert "1 token shard, " in corpus.description and "5,000 tokens" in corpus.description
    inputs, targets = Batches(corpus.tokens, seq_len=100, batch_size=2, seed=0).batch(0)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_several_shards_are_joined_in_order(tmp_path, read):
    folder = tmp_path / "shards"
    folder.mkdir()
    shard(folder / "val.bin", IDS[:10], GPT2)
    shard(folder / "train_1.bin", IDS[10:30])
    shard(folder / "train_0.bin", IDS[30:1000], GPT2)
    expected = [*IDS[30:1000], *IDS[10:30], *IDS[:10]]
    corpus = read(folder)
    assert corpus.tokens.tolist() == expected and isinstance(corpus.tokens, np.memmap)
    again = read(folder / "train_?.bin", folder / "val.bin")
    assert again.tokens.tolist() == expected and again.fingerprint == corpus.fingerprint
    assert read(folder / "val.bin", folder / "train_?.bin").fingerprint != corpus.fingerprint


def test_ids_out_of_range_name_id_and_position(tmp_path, read):
    ids = np.full(3_000_000, 5)  # more than one block of the scan
    ids[2_500_000:2_500_002] = (50257, 60000)
    for form, name in ((None, "raw.bin"), (GPT2, "head.bin")):
        path = shard(tmp_path / name, ids, form)
        match = f"{path}: id 50257 at position 2500000 is outside ids:50257's vocabulary of 50257"
        with pytest.raises(DataError, match=match):
            read(path)
        with pytest.raises(DataError, match="id 50257 at position 2500000 .*name the shard's own"):
            read(path, tokenizer="byte")


def test_a_model_smaller_than_the_vocabulary(tmp_path, read):
    corpus = read(shard(tmp_path / "a.bin", [1, 2, 300, 4]))
    corpus.check_vocab(50304)
    corpus.check_vocab(301)
    with pytest.raises(DataError, match="id 300 at position 2 is outside the model's vocabulary"):
        corpus.check_vocab(300)


def test_vocabulary_larger_than_the_dtype(tmp_path, read):
    path = shard(tmp_path / "a.bin", IDS)
    with pytest.raises(DataError, match=r"stores 16-bit ids \(at most 65536 tokens\).*of 65537"):
        read(path, tokenizer="ids:65537")
    assert read(path, tokenizer="ids:65536").tokens.size == 5000
    assert read(shard(tmp_path / "b.bin", IDS, LLAMA3), tokenizer="ids:128256").tokens.size == 5000


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"form": GPT2, "cut": 1}, r"truncated, the header says 5000 ids \(11024 bytes\).*11023"),
        ({"form": GPT2, "cut": 5000}, r"truncated, the header says 5000 ids .* has 6024 bytes"),
        ({"form": GPT2, "cut": 10_100}, "truncated, 924 bytes for a header of 1024"),
        ({"form": GPT2, "count": 4999}, r"damaged, the header says 4999 ids \(11022 bytes\)"),
        ({"form": GPT2, "count": -1}, "damaged, the header says -1 ids"),
        ({"form": LLAMA3, "cut": 4}, r"truncated, the header says 5000 ids \(21024 bytes\)"),
        ({"form": GPT2, "version": 2}, "version 2 of magic number 20240520 is not known"),
        ({"form": LLAMA3, "version": 1}, r"version 1 of magic number 20240801.*version 7 is"),
        ({"form": GPT2, "magic": 20240326}, "wrong magic number 20240326 for a token shard"),
        ({"form": None, "cut": 1}, "9999 bytes is no whole number of uint16 ids"),
        ({"form": None, "cut": 10_000}, r"is empty \(0 bytes\)"),
    ],
)
def test_broken_shards(tmp_path, read, options, match):
    path = shard(tmp_path / "a.bin", IDS, **options)
    with pytest.raises(DataError, match=match) as caught:
        read(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_header_without_ids(tmp_path, read):
    with pytest.raises(DataError, match=r"a.bin is empty \(its header says 0 ids\)"):
        read(shard(tmp_path / "a.bin", [], GPT2))


def test_raw_zeros_are_ids(tmp_path, read):
    """A file of one repeated id is not taken for a header with a wrong magic number."""
    assert read(shard(tmp_path / "a.bin", np.zeros(5000))).tokens.tolist() == [0] * 5000
    assert read(shard(tmp_path / "b.bin", np.full(5000, 7))).tokens.tolist() == [7] * 5000


def test_mixtures(tmp_path, read):
    path = shard(tmp_path / "a.bin", IDS)
    text = tmp_path / "a.txt"
    text.write_text("text")
    match = f"cannot mix token shards with text: {path} holds token ids, {text} holds text"
    for names in ((text, path), (path, text), (tmp_path / "a.*",)):
        with pytest.raises(DataError, match=match):
            read(*names)
    with pytest.raises(DataError, match="store ids of different types"):
        read(path, shard(tmp_path / "b.bin", IDS, LLAMA3))
    with pytest.raises(DataError, match="bpe:300 is trained on text, but .*a.bin holds token ids"):
        read(path, tokenizer="bpe:300")
    with pytest.raises(DataError, match="ids:50257 is for token shards"):
        read(text)
