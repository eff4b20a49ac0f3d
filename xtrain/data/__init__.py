"""Files -> tokens -> a memory-mapped cache -> batches by (seed, step, sample).

    from xtrain.data import Batches, open_corpus

    corpus = open_corpus(["stories.jsonl"], tokenizer="bpe:8192")
    train, val = corpus.split(val_fraction=0.05, seq_len=1024)
    batches = Batches(train, seq_len=1024, batch_size=32, seed=0)
    inputs, targets = batches.batch(step=100)  # int64 arrays [B, T]; nothing is replayed

sources.py    names on the command line -> a sorted list of files; the embedded default
readers.py    files -> documents of text, or the token ids of .bin files
tokenizer.py  byte | bpe:N | FILE | ids:N
encode.py     documents -> arrays of token ids, in bounded memory
cache.py      one file per (content, tokenizer), complete or absent
corpus.py     open_corpus and Corpus
batches.py    the order of samples: a keyed permutation, evaluated index by index

Nothing here imports torch, except `to_torch` when it is called. Every error that a user can cause
is a DataError, a ValueError whose text is one line.
"""

from xtrain.data.batches import Batches, to_torch
from xtrain.data.corpus import Corpus, open_corpus
from xtrain.data.errors import DataError
from xtrain.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batches",
    "Corpus",
    "DataError",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "to_torch",
]
