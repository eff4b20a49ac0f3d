"""Documents -> arrays of token ids, in bounded memory and as a pure function of the content.

Between documents stands the tokenizer's eos id, after each document; a tokenizer without one gets a
newline between two documents, unless the first ends in one. Empty documents vanish.

Tokenizers see at most CHUNK_CHARS characters at a time. A longer document is cut after a newline or
before a space that has no white space beside it. There the patterns of byte-level BPE (GPT-2's and
its descendants') cut too, so the ids equal those of the whole document. Only a run of CHUNK_CHARS
characters without such a place is cut elsewhere; and a tokenizer that marks the start of its input
(SentencePiece's dummy prefix) marks each chunk's. Where the cuts fall depends on the document
alone, not on the blocks in which it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from xtrain.data.readers import Piece, read_pieces
from xtrain.data.sources import Source
from xtrain.data.tokenizer import ByteTokenizer, JsonTokenizer, ids_dtype
from xtrain.rng import splitmix64

CHUNK_CHARS = 1 << 14
_BATCH_CHARS = 1 << 20
_BATCH_CHUNKS = 1 << 12
# bpe:N is trained on about this much text, spread over the whole corpus: more changes few merges
# and costs memory and minutes.
TRAIN_BYTES = 1 << 28

Ids = npt.NDArray[np.unsignedinteger]


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

    The newline is a document of its own, so that it never shifts the chunks of its neighbours.
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


def _encode_batches(pieces: Iterable[Piece], tokenizer: JsonTokenizer) -> Iterator[Ids]:
    texts: list[str] = []
    ends: list[bool] = []
    num_chars = 0
    for text, is_last in chunks(pieces):
        texts.append(text)
        ends.append(is_last)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS or len(texts) >= _BATCH_CHUNKS:
            yield _encode_batch(texts, ends, tokenizer)
            texts, ends, num_chars = [], [], 0
    if texts:
        yield _encode_batch(texts, ends, tokenizer)


def _encode_batch(texts: list[str], ends: list[bool], tokenizer: JsonTokenizer) -> Ids:
    ids: list[int] = []
    for more, is_last in zip(tokenizer.encode_batch(texts), ends, strict=True):
        ids.extend(more)
        if is_last and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
    return np.asarray(ids, dtype=ids_dtype(tokenizer.vocab_size))
