"""Documents -> arrays of token ids, in bounded memory and as a pure function of the content.

Between documents stands the tokenizer's eos id, after each document; a tokenizer without one gets a
newline between two documents, unless the first ends in one. Empty documents vanish.

A document of up to WHOLE_CHARS characters is handed to the tokenizer as it is. Of a longer one it
sees windows, each beginning OVERLAP_CHARS before the end of the one before it. Two windows are
joined inside their overlap, and only if the tokenizer gives the same ids at the same places
throughout its middle half: then neither the end of the one nor the start of the other reaches the
seam, whatever the tokenizer splits, normalises or marks. Windows that disagree are read as one, up
to the whole document. So no cut shows in the ids. Where windows lie depends on the document alone,
not on the blocks in which it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xtrain.data.cache import FORMAT_VERSION
from xtrain.data.readers import Piece, read_pieces
from xtrain.data.sources import Source
from xtrain.data.tokenizer import ByteTokenizer, JsonTokenizer, ids_dtype
from xtrain.rng import splitmix64

# The package takes some 200 bytes a character while it works.
WHOLE_CHARS = 1 << 20
WINDOW_CHARS = 1 << 18
OVERLAP_CHARS = 1 << 14
_BATCH_CHARS = 1 << 20
_BATCH_TEXTS = 1 << 12
# Texts for training bpe:N, where a cut within a word changes a count by one.
CHUNK_CHARS = 1 << 14
# bpe:N is trained on about this much text, spread over the whole corpus: more changes few merges
# and costs memory and minutes.
TRAIN_BYTES = 1 << 28

Ids = npt.NDArray[np.unsignedinteger]


def version(tokenizer: ByteTokenizer | JsonTokenizer) -> int:
    """Return the number, part of the cache's keys, that rises when the same text gets other ids.

    2: a document over 16,384 characters has the ids of the whole.
    """
    return FORMAT_VERSION if isinstance(tokenizer, ByteTokenizer) else 2


def all_pieces(
    sources: Sequence[Source], field: str, errors: str, advance: Callable[[int], None]
) -> Iterator[Piece]:
    """Yield the pieces of all documents of all sources."""
    for source in sources:
        yield from read_pieces(source, field, errors, advance)


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: ByteTokenizer | JsonTokenizer
) -> Iterator[Ids]:
    """Yield arrays of ids that, joined, are the corpus."""
    if tokenizer.eos_id is None:
        pieces = with_newlines(pieces)
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes(pieces)
    return _encode_batches(pieces, tokenizer)


def with_newlines(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Put a newline between documents, unless one stands there; drop empty documents.

    The newline is a document of its own, so that it never shifts the windows of its neighbours.
    """
    last_char, at_start = "", True
    for text, is_last in pieces:
        if text:
            if at_start and last_char not in ("", "\n"):
                yield Piece("\n", True)
            last_char, at_start = text[-1], False
        if not at_start:
            yield Piece(text, is_last)
        at_start = at_start or is_last


def find_cut(text: str, start: int, limit: int) -> int:
    """Return where to cut a document whose rest, text[start:], is longer than limit characters.

    Looks at text[start : start + limit + 1] alone, and cuts as late as it can.
    """
    for separator, after in (("\n", 1), (" ", 0)):
        at = text.rfind(separator, start + 1, start + limit)
        while at > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + after
            at = text.rfind(separator, start + 1, at)
    return start + limit


def chunks(pieces: Iterable[Piece], limit: int = CHUNK_CHARS) -> Iterator[Piece]:
    """Cut documents into chunks of at most limit characters; an empty document gives none."""
    rest, is_open = "", False
    for text, is_last in pieces:
        rest += text
        start = 0
        while len(rest) - start > limit:
            cut = find_cut(rest, start, limit)
            yield Piece(rest[start:cut], False)
            start, is_open = cut, True
        rest = rest[start:]
        if is_last:
            if rest or is_open:
                yield Piece(rest, True)
            rest, is_open = "", False


def sample_chunks(pieces: Iterable[Piece], num_bytes: int, limit_bytes: int) -> Iterator[str]:
    """Yield all chunks, or of a corpus over limit_bytes an even share chosen by their number."""
    keep_below = (1 << 64) if num_bytes <= limit_bytes else (limit_bytes << 64) // num_bytes
    for number, (text, _) in enumerate(chunks(pieces)):
        if splitmix64(number) < keep_below:
            yield text


def _encode_bytes(pieces: Iterable[Piece]) -> Iterator[Ids]:
    for text, _ in pieces:
        if text:
            yield np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2")


def windows(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Cut documents into windows that overlap; an empty document gives none."""
    limit, rest, is_open = WINDOW_CHARS + OVERLAP_CHARS, "", False
    for text, is_last in pieces:
        rest += text
        while len(rest) > (limit if is_open else max(limit, WHOLE_CHARS)):
            yield Piece(rest[:limit], False)
            rest, is_open = rest[WINDOW_CHARS:], True
        if is_last:
            if rest or is_open:
                yield Piece(rest, True)
            rest, is_open = "", False


def _encode_batches(pieces: Iterable[Piece], tokenizer: JsonTokenizer) -> Iterator[Ids]:
    join = _Join(tokenizer)
    batch: list[Piece] = []
    num_chars = 0
    for window in windows(pieces):
        batch.append(window)
        num_chars += len(window.text)
        if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_TEXTS:
            yield _encode_batch(batch, join)
            batch, num_chars = [], 0
    if batch:
        yield _encode_batch(batch, join)


def _encode_batch(batch: list[Piece], join: _Join) -> Ids:
    tokenizer = join.tokenizer
    ids: list[int] = []
    in_parts = join.held is not None or not all(window.is_last for window in batch)
    encodings = tokenizer.encodings([window.text for window in batch], with_offsets=in_parts)
    for window, encoding in zip(batch, encodings, strict=True):
        ids.extend(join(window.text, encoding, window.is_last) if in_parts else encoding.ids)
        if window.is_last and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
    return np.asarray(ids, dtype=ids_dtype(tokenizer.vocab_size))


@dataclass
class _Window:
    """A window of a document and what the tokenizer made of it."""

    text: str
    ids: list[int]
    starts: list[int]  # the character, from the window's first, at which each id's text starts
    first: int = 0  # the id with which it continues the window before it

    def near_seam(self, overlap_start: int) -> tuple[list[tuple[int, int]], int]:
        """Return (id, place) throughout the middle half of an overlap, and the seam's id."""
        quarter = OVERLAP_CHARS // 4
        found = [
            (number, start - overlap_start, token)
            for number, (start, token) in enumerate(zip(self.starts, self.ids, strict=True))
            if quarter <= start - overlap_start < 3 * quarter
        ]
        seam = next((n for n, place, _ in found if place >= 2 * quarter), len(self.ids))
        return [(token, place) for _, place, token in found], seam


@dataclass
class _Join:
    """From the windows of documents, in order, to the ids of the documents."""

    tokenizer: JsonTokenizer
    held: _Window | None = None  # of a document that goes on: its last window so far
    more: list[str] = field(default_factory=list)  # what is to be read in one with `held`
    wanted: int = 0  # characters of `held` and `more` together before they are read

    def __call__(self, text: str, encoding: Any, is_last: bool) -> list[int]:
        """Take in a window and return the ids that no later one can change."""
        if self.held is None and is_last:
            return encoding.ids
        out: list[int] = []
        window = _Window(text, encoding.ids, [start for start, _ in encoding.offsets])
        if self.held is None:
            self.held = window
        elif self.more or not self._joins(window, out):
            self._read_as_one(text, is_last)
        if is_last:
            out += self.held.ids[self.held.first :]
            self.held = None
        return out

    def _joins(self, window: _Window, out: list[int]) -> bool:
        """Go on with window, if it and the held one agree where they overlap."""
        held = self.held
        assert held is not None
        ours, seam = held.near_seam(len(held.text) - OVERLAP_CHARS)
        theirs, window.first = window.near_seam(0)
        if not ours or ours != theirs:
            return False
        out += held.ids[held.first : seam]
        self.held = window
        return True

    def _read_as_one(self, text: str, is_last: bool) -> None:
        """Lengthen the held window, at least twofold: a document is read anew a few times only."""
        held = self.held
        assert held is not None
        if not self.more:
            self.wanted = 2 * len(held.text)
        self.more.append(text[OVERLAP_CHARS:])
        if not is_last and len(held.text) + sum(map(len, self.more)) < self.wanted:
            return
        begins = held.starts[held.first] if held.first else 0
        whole = "".join((held.text, *self.more))
        (encoding,) = self.tokenizer.encodings([whole], with_offsets=True)
        starts = [start for start, _ in encoding.offsets]
        first = next((n for n, start in enumerate(starts) if start >= begins), len(starts))
        self.held, self.more = _Window(whole, encoding.ids, starts, first if held.first else 0), []
