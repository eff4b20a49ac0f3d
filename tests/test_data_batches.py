"""Batches as a function of seed, step and sample; token shards that they are cut from."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from statistics import median

import numpy as np
import pytest
import torch

from xtrain.data import Batches, DataError, open_corpus, to_torch
from xtrain.data.batches import permute
from xtrain.rng import site_seed, splitmix64


def epoch_order(size: int, seed: int, epoch: int = 0) -> np.ndarray:
    batches = Batches(np.arange(size + 1), seq_len=1, batch_size=1, seed=seed)
    return batches.ids(epoch * size, size)


def test_splitmix64_equals_the_scalar_one():
    values = [0, 1, 12345, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    got = splitmix64(np.array(values, dtype=np.uint64))
    assert got.dtype == np.uint64
    assert got.tolist() == [splitmix64(value) for value in values]


SIZES = [*range(1, 70), 97, 127, 128, 251, 256, 257, 1000, 1021, 4096, 65_536, 65_537, 100_003]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 + 5])
def test_every_sample_once_an_epoch(seed):
    for size in SIZES:
        for epoch in (0, 1, 7):
            order = epoch_order(size, seed, epoch)
            assert np.array_equal(np.sort(order), np.arange(size)), (size, epoch)


def test_permute_equals_brute_force_in_plain_integers():
    """The same network and cycle walk written index by index with Python ints."""

    def plain(x: int, size: int, key: int) -> int:
        columns = math.isqrt(size - 1) + 1 if size > 1 else 1
        rows = (size + columns - 1) // columns
        while True:
            left, right = divmod(x, rows)
            for number in range(12):
                salt = key ^ (number << 56)
                if number % 2 == 0:
                    left = (left + splitmix64(salt ^ right)) % columns
                else:
                    right = (right + splitmix64(salt ^ left)) % rows
            x = left * rows + right
            if x < size:
                return x

    def plain_sum_first(size: int, key: int) -> list[int]:
        return [plain(x, size, key) for x in range(size)]

    for size in (1, 2, 3, 5, 16, 17, 101, 1009):
        for key in (0, 1, splitmix64(99)):
            keys = np.full(size, key, dtype=np.uint64)
            got = permute(np.arange(size, dtype=np.uint64), size, keys)
            assert got.tolist() == plain_sum_first(size, key), (size, key)


def test_permute_large_domains_stay_in_range_and_distinct():
    for size in (2**32 - 5, 2**40 + 15, 2**62 + 1):
        positions = np.arange(size - 1000, size, dtype=np.uint64)
        keys = np.full(1000, splitmix64(size), dtype=np.uint64)
        got = permute(positions, size, keys)
        assert int(got.max()) < size and np.unique(got).size == 1000
        # Neighbours scatter over the whole range: their mean is that of uniform numbers.
        mean = float(np.mean(got.astype(np.float64) / size))
        assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / 1000)


def test_small_permutations_are_all_reached_evenly():
    """chi^2 over the n! orders of n samples, one draw per epoch; 5-sigma bound."""
    for size in (2, 3, 4):
        epochs = 240 * math.factorial(size)
        batches = Batches(np.arange(size + 1), seq_len=1, batch_size=1, seed=3)
        counts = Counter(map(tuple, batches.ids(0, epochs * size).reshape(epochs, size).tolist()))
        kinds = math.factorial(size)
        assert len(counts) == kinds
        chi2 = sum((n - 240) ** 2 / 240 for n in counts.values())
        assert chi2 < (kinds - 1) + 5 * math.sqrt(2 * (kinds - 1))


def test_order_is_well_mixed():
    size = 10_007
    order = epoch_order(size, seed=11).astype(np.float64)
    positions = np.arange(size)
    bound = 5 / math.sqrt(size)
    assert abs(np.corrcoef(positions, order)[0, 1]) < bound
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
    # Fixed points of a random permutation: Poisson with mean 1.
    assert np.sum(order == positions) <= 8
    # Each tenth of the epoch sees each tenth of the corpus alike (expected 100 each).
    table = np.histogram2d(positions, order, bins=10)[0]
    chi2 = float(np.sum((table - size / 100) ** 2 / (size / 100)))
    assert abs(chi2 - 81) < 5 * math.sqrt(2 * 81)


def test_epochs_and_seeds_differ():
    size = 10_007
    orders = [epoch_order(size, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    bound = 5 / math.sqrt(size)
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert np.array_equal(orders[0], epoch_order(size, 0, 0))


def test_sample_keys_are_apart_from_dropout_keys():
    """The key of an epoch comes from rng under a site name of its own."""
    batches = Batches(np.arange(100), seq_len=1, batch_size=4, seed=5)
    for epoch in range(3):
        assert batches._key(epoch) == site_seed(5, epoch, 0, "data_order") % 2**64


def test_batches_cut_one_stream_of_samples():
    """Every cut of the sample numbers, also across epochs, gives the same samples (row C43)."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 1234).astype(np.uint16)
    batches = Batches(tokens, seq_len=10, batch_size=7, seed=2)
    steps = 3 * -(-batches.num_samples // 7)  # three epochs and what fills the last step
    stream = batches.ids(0, steps * 7)
    inputs, targets = batches.samples(0, steps * 7)
    for step in reversed(range(steps)):  # any order, nothing to replay
        whole = batches.batch(step)
        parts = [batches.samples(step * 7 + at, n) for at, n in ((0, 3), (3, 1), (4, 3))]
        for kind, joined in enumerate((inputs, targets)):
            assert np.array_equal(whole[kind], joined[step * 7 : step * 7 + 7])
            assert np.array_equal(whole[kind], np.concatenate([part[kind] for part in parts]))
    for epoch in range(2):
        one = stream[epoch * batches.num_samples : (epoch + 1) * batches.num_samples]
        assert np.array_equal(np.sort(one), np.arange(batches.num_samples))


def test_windows_and_shifted_targets():
    tokens = np.arange(1, 102, dtype=np.uint16)  # token i holds i + 1
    batches = Batches(tokens, seq_len=10, batch_size=4, seed=0)
    assert (batches.num_samples, batches.num_left_out) == (10, 0)
    inputs, targets = batches.batch(0)
    assert inputs.dtype == targets.dtype == np.int64
    for row, window in enumerate(batches.ids(0, 4)):
        assert inputs[row].tolist() == list(range(window * 10 + 1, window * 10 + 11))
        assert targets[row].tolist() == list(range(window * 10 + 2, window * 10 + 12))
    seen = np.sort(batches.samples(0, 10)[1].ravel())
    assert seen.tolist() == list(range(2, 102))  # each token but the first is a target once


def test_last_incomplete_window_is_left_out_and_said():
    batches = Batches(np.arange(110), seq_len=10, batch_size=2, seed=0)
    assert (batches.num_samples, batches.num_left_out) == (10, 9)
    assert "last 9 tokens left out" in batches.description
    assert batches.samples(0, 10)[1].max() == 100
    assert "left out" not in Batches(np.arange(101), seq_len=10, batch_size=2, seed=0).description


def test_numbers_beyond_int64_are_exact():
    batches = Batches(np.arange(102), seq_len=1, batch_size=4, seed=0)
    far = 2**70
    ids = batches.ids(far, 200)
    start = -far % 101
    assert np.array_equal(np.sort(ids[start : start + 101]), np.arange(101))


def test_errors():
    with pytest.raises(DataError, match=r"hold 64 tokens.*one sequence: seq_len 64 needs 64 \+ 1"):
        Batches(np.arange(64), seq_len=64, batch_size=1, seed=0)
    assert Batches(np.arange(65), seq_len=64, batch_size=1, seed=0).num_samples == 1
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Batches(np.arange(64), seq_len=8, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        Batches(np.arange(64), seq_len=0, batch_size=1, seed=0)
    batches = Batches(np.arange(64), seq_len=8, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        batches.batch(-1)
    with pytest.raises(TypeError):
        batches.batch(1.5)


def test_memmap_batches_are_quick_and_do_not_copy_the_corpus(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(20_000_000, dtype=np.uint32).astype(np.uint16).tofile(path)  # 40 MB
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    batches = Batches(tokens[1000:], seq_len=1024, batch_size=32, seed=0)
    tracemalloc.start()
    for step in range(20):
        batches.batch(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A batch itself is 2 * 32 * 1024 * 8 bytes = 0.5 MiB, and two are alive at once.
    assert peak < 2 << 20
    times = []
    for step in range(50):
        started = time.thread_time()
        batches.batch(step)
        times.append(time.thread_time() - started)
    assert median(times) < 2e-3  # 0.4 ms measured


def test_to_torch():
    pair = Batches(np.arange(100), seq_len=8, batch_size=2, seed=0).batch(0)
    tensors = to_torch(pair, "cpu")
    for tensor, array in zip(tensors, pair, strict=True):
        assert tensor.dtype == torch.int64 and np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.gpu
def test_to_torch_cuda():
    pair = Batches(np.arange(100), seq_len=8, batch_size=2, seed=0).batch(0)
    for tensor, array in zip(to_torch(pair, "cuda"), pair, strict=True):
        assert tensor.is_cuda and np.array_equal(tensor.cpu().numpy(), array)


# --- token shards ---------------------------------------------------------------------------------


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
