"""open_corpus: from names of data and a tokenizer to one memory-mapped array of token ids."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from xtrain.data import cache, encode, readers
from xtrain.data.errors import DataError
from xtrain.data.sources import Listing, Source, list_sources
from xtrain.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    ids_dtype,
    load_tokenizer,
    parse_bpe,
    train_bpe,
)

Ids = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Corpus:
    """Token ids, read-only and memory-mapped, with the tokenizer that made them.

    tokens        1-D, uint16 or uint32
    description   one line: what was read, bytes, hash, number of tokens
    fingerprint   hex; equal exactly when content, order of files, tokenizer and options are equal
    """

    tokens: np.memmap
    tokenizer: Tokenizer
    description: str
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """The tokenizer's: every id is below it."""
        return self.tokenizer.vocab_size

    def split(
        self, *, val_fraction: float, seq_len: int | None = None
    ) -> tuple[np.memmap, np.memmap]:
        """Return (train, val): views, val being the end of the corpus.

        Args:     val_fraction: share of the tokens, in [0, 1); 0 gives an empty val.
                  seq_len: when given, each part that is not empty must hold one sequence.
        Raises:   DataError for a value out of range or a part that is too short, with both lengths.
        """
        total = self.tokens.size
        if not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction must be in [0, 1), got {val_fraction}")
        count = round(total * val_fraction)
        parts = self.tokens[: total - count], self.tokens[total - count :]
        for name, part in zip(("training", "validation"), parts, strict=True):
            if seq_len is not None and 0 < part.size <= seq_len:
                raise DataError(
                    f"the {name} part of {part.size} tokens (of {total}) is too short for one"
                    f" sequence of {seq_len} + 1 tokens; use more data, a smaller seq_len or"
                    " another split"
                )
        return parts  # type: ignore[return-value]

    def check_vocab(self, vocab_size: int, owner: str = "the model") -> None:
        """Raise a DataError naming the first id and its position that owner's vocabulary lacks."""
        if vocab_size >= self.vocab_size:
            return
        block = 1 << 21
        for start in range(0, self.tokens.size, block):
            ids = self.tokens[start : start + block]
            readers.check_ids(ids, vocab_size, owner, "the corpus", start)


@dataclass(frozen=True)
class _Content:
    """What the sources hold: their joint hash and size, and what must not change meanwhile."""

    sha256: str
    num_bytes: int
    stamps: tuple[tuple[int, int] | None, ...]


def open_corpus(
    data: Sequence[str | os.PathLike[str]] | None,
    *,
    tokenizer: str | os.PathLike[str] = "byte",
    field: str = "text",
    errors: str = "strict",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Corpus:
    """Read data, tokenise it once, and return it as a memory-mapped corpus.

    Args:     data: files, folders, globs, hf:NAME[:SPLIT]; None is the source text of the running
              Python's standard library.
              tokenizer: "byte" | "bpe:N" (trained on the data) | path of a tokenizer.json |
              "ids:N" (token shards without a tokenizer).
              field: key or column of the text in .jsonl, .parquet and hf: data.
              errors: "strict" refuses text that is not UTF-8, "replace" reads U+FFFD there.
              cache_dir: default $XDG_CACHE_HOME/xtrain or ~/.cache/xtrain.
              progress: a bar on a terminal, lines elsewhere, on standard error; False is silent.
    Raises:   DataError, one line, for everything that is wrong with these.
    """
    if errors not in readers.ERROR_POLICIES:
        raise DataError(f"errors must be one of {readers.ERROR_POLICIES}, got {errors!r}")
    spec = os.fspath(tokenizer)
    named = None if parse_bpe(spec) is not None else load_tokenizer(spec)
    listing = list_sources(data)
    errors = listing.errors or errors
    folder = Path(cache_dir) if cache_dir is not None else cache.default_cache_dir()
    opener = _Opener(listing, field, errors, folder.expanduser(), Progress(progress))
    return opener.shards(spec, named) if listing.are_shards else opener.text(spec, named)


class _Opener:
    """One call of open_corpus: what its steps share."""

    def __init__(
        self, listing: Listing, field: str, errors: str, folder: Path, progress: Progress
    ) -> None:
        self.listing = replace(listing, sources=[readers.opened(s) for s in listing.sources])
        self.field, self.errors, self.folder, self.progress = field, errors, folder, progress

    def text(self, spec: str, named: Tokenizer | None) -> Corpus:
        """Return the corpus of documents."""
        content = self.content()
        if content.num_bytes == 0:
            raise DataError(f"{self.listing.label} is empty (0 bytes)")
        tokenizer = self.trained_bpe(spec, content) if named is None else named
        if not isinstance(tokenizer, ByteTokenizer | JsonTokenizer):
            raise DataError(
                f"tokenizer {spec} is for token shards (.bin), but {self.listing.label} holds"
                " text: use byte, bpe:N or a tokenizer.json"
            )
        version = encode.version(tokenizer)
        key = _hash(version, content.sha256, tokenizer.fingerprint)

        def build() -> Iterator[Ids]:
            started, count = time.perf_counter(), 0
            with self.progress.bar("tokenising", content.num_bytes) as advance:
                pieces = encode.all_pieces(self.listing.sources, self.field, self.errors, advance)
                for ids in encode.encode_pieces(pieces, tokenizer):
                    count += ids.size
                    yield ids
            self.check_unchanged(content)
            self.progress.say(
                f"tokenised {content.num_bytes:,} bytes with {tokenizer.name}: {count:,} tokens in"
                f" {time.perf_counter() - started:.1f} s, kept in {self.folder}"
            )

        dtype = ids_dtype(tokenizer.vocab_size)
        tokens = cache.cached_tokens(self.folder, key, dtype, build, self.progress.say)
        return Corpus(tokens, tokenizer, self.description(content, tokenizer, tokens.size), key)

    def shards(self, spec: str, tokenizer: Tokenizer | None) -> Corpus:
        """Return the corpus of token shards: one is mapped where it lies, several are joined."""
        first = self.listing.sources[0].path
        if tokenizer is None:
            raise DataError(
                f"{spec} is trained on text, but {first} holds token ids: name the shard's own"
                " tokenizer.json, or ids:N"
            )
        parts = [readers.open_shard(source.path) for source in self.listing.sources]
        for part in parts:
            if part.dtype != parts[0].dtype:
                raise DataError(f"{first} and {part.path} store ids of different types")
        with self.progress.bar(
            "checking ids", sum(p.num_tokens * p.dtype.itemsize for p in parts)
        ) as advance:
            for part in parts:
                readers.check_range(part, tokenizer.vocab_size, tokenizer.name, advance)
        content = self.content()
        dtype = parts[0].dtype
        key = _hash(cache.FORMAT_VERSION, content.sha256, tokenizer.fingerprint)
        if len(parts) == 1:
            tokens = np.memmap(
                first, dtype=dtype, mode="r", offset=parts[0].offset, shape=(parts[0].num_tokens,)
            )
        else:

            def build() -> Iterator[Ids]:
                for part in parts:
                    yield from readers.read_ids(part)
                self.check_unchanged(content)

            tokens = cache.cached_tokens(self.folder, key, dtype, build, self.progress.say)
        return Corpus(tokens, tokenizer, self.description(content, tokenizer, tokens.size), key)

    def content(self) -> _Content:
        """Hash every source; the key of the cache stands for content, not for names or dates."""
        sources = self.listing.sources
        stamps = tuple(readers.stamp(source) for source in sources)
        sizes = [stamp[0] for stamp in stamps if stamp is not None]
        total = sum(sizes) if len(sizes) == len(sources) else None
        parts: list[object] = [self.errors]
        num_bytes = 0
        with self.progress.bar("hashing", total) as advance:
            for source in sources:
                digest = readers.digest(source, self.field, advance)
                names_field = source.kind in ("jsonl", "parquet", "hf")
                parts += [source.kind, digest.sha256.hex(), self.field if names_field else None]
                num_bytes += digest.num_bytes
        return _Content(_hash(*parts), num_bytes, stamps)

    def check_unchanged(self, content: _Content) -> None:
        """Raise when a file was written to since it was hashed: the ids would not fit the key."""
        for source, stamp in zip(self.listing.sources, content.stamps, strict=True):
            if readers.stamp(source) != stamp:
                raise DataError(f"{source.path} changed while it was read; run again")

    def trained_bpe(self, spec: str, content: _Content) -> JsonTokenizer:
        """Return the tokenizer of bpe:N for this content, trained now or before."""
        path = self.folder / f"{_hash(cache.FORMAT_VERSION, content.sha256, spec)}.tokenizer.json"
        return cache.made_once(
            path,
            lambda warn: _stored_tokenizer(path, spec, warn),
            lambda file: file.write(self.train(spec, content).json_text.encode()),
            self.progress.say,
        )

    def train(self, spec: str, content: _Content) -> JsonTokenizer:
        """Train bpe:N on the sources."""
        started, size = time.perf_counter(), cast(int, parse_bpe(spec))
        with self.progress.bar(f"training {spec}", content.num_bytes) as advance:
            pieces = encode.all_pieces(self.listing.sources, self.field, self.errors, advance)
            texts = encode.sample_chunks(pieces, content.num_bytes, encode.TRAIN_BYTES)
            tokenizer = train_bpe(size, texts)
        self.check_unchanged(content)
        self.progress.say(
            f"trained {spec} in {time.perf_counter() - started:.1f} s"
            + (
                f": the data yield only {tokenizer.vocab_size} tokens"
                if tokenizer.vocab_size < size
                else ""
            )
        )
        return tokenizer

    def description(self, content: _Content, tokenizer: Tokenizer, num_tokens: int) -> str:
        """Return the line that a run prints about its data."""
        sources, left_out = self.listing.sources, self.listing.left_out
        noun = _noun(sources)
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(left_out.items()) if n)
        return (
            f"{self.listing.label}: {len(sources)} {noun}{'s' if len(sources) != 1 else ''}"
            f"{f' (left out: {reasons})' if reasons else ''}, {content.num_bytes:,} bytes,"
            f" sha256 {content.sha256[:12]}; {tokenizer.name}: {num_tokens:,} tokens"
        )


def _noun(sources: Sequence[Source]) -> str:
    kinds = {source.kind for source in sources}
    return (
        {"shard": "token shard", "hf": "dataset"}.get(kinds.pop(), "file")
        if len(kinds) == 1
        else "source"
    )


def _stored_tokenizer(path: Path, spec: str, warn: bool) -> JsonTokenizer | None:
    """Return a trained tokenizer from the cache, or None when it is absent or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        return JsonTokenizer(spec, text, {"eos_token": END_OF_TEXT})
    except FileNotFoundError:
        return None
    except Exception:  # the tokenizers package raises bare Exception
        if warn:
            cache.warn_damaged(path, "it is no tokenizer.json")
        return None


def _hash(*parts: object) -> str:
    """Return the SHA-256 of a list of plain values, unambiguous about where one ends."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Progress:
    """Where slow work reports: a bar on a terminal, single lines elsewhere, or nowhere."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def say(self, line: str) -> None:
        """Print one line."""
        if self.enabled:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, num_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """Show bytes done out of num_bytes while the block runs; gives the function to report to.

        tqdm's disable=None: no bar where standard error is not a terminal.
        """
        with tqdm(
            total=num_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            disable=None if self.enabled else True,
            leave=False,
        ) as bar:
            yield bar.update
