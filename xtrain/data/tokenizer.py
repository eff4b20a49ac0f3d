"""Tokenizers: plain bytes, byte-level BPE trained on the data, a tokenizer.json, or ids alone.

byte    256 ids, the bytes of the UTF-8 text; no end-of-document id
bpe:N   byte-level BPE of N ids with <|endoftext|> (id 0), by the `tokenizers` package
FILE    a tokenizer.json, or a folder that holds one; what stands beside it names the special tokens
ids:N   N ids without text, for token shards whose tokenizer is elsewhere

`encode` adds nothing (no bos, no eos, no padding, no truncation). Text that spells a special token,
such as <|endoftext|>, becomes that token's id, as in the raw TinyStories files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xtrain.data.errors import DataError, os_errors_as_data_errors, tokenizer_errors
from xtrain.files import file_bytes, is_object, json_file, json_value, shown

END_OF_TEXT = "<|endoftext|>"
MIN_BPE_SIZE = 257  # every byte, and END_OF_TEXT
MAX_BPE_SIZE = 1_000_000
# Files beside a tokenizer.json that name its special tokens; an earlier one wins.
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")  # the model's, with its eos_token_id
# What tokenizers of well-known models call the end of a document, when no file says it.
_EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_NAMES = "byte, bpe:N, ids:N or the path of a tokenizer.json"


class Tokenizer:
    """What the trainer, generate and export need of a tokenizer.

    name         what the user would pass as --tokenizer to name its kind
    vocab_size   largest id + 1
    eos_id       the id that ends a document, or None: then a newline separates documents
    fingerprint  hash of everything that decides the ids
    """

    name: str
    vocab_size: int
    eos_id: int | None = None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of text. Raises DataError for a lone surrogate (no valid Unicode)."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file from which load_tokenizer makes this tokenizer again."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """The bytes of the UTF-8 text as ids 0 to 255."""

    name = fingerprint = "byte"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of text."""
        _check_surrogates(text)
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the bytes; what is not UTF-8 becomes U+FFFD."""
        return bytes(_checked_ids(ids, self)).decode("utf-8", "replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the same mapping as a tokenizer.json, which other software reads too."""
        Path(path).write_text(_byte_tokenizer_json(), encoding="utf-8")


class IdTokenizer(Tokenizer):
    """A vocabulary of bare ids: it can bound and print them, but holds no text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.name = self.fingerprint = f"ids:{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """Raise: there is no text behind these ids."""
        raise DataError(f"{self.name} has no text to encode; name the shard's own tokenizer.json")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids in angle brackets."""
        return "".join(f"<{i}>" for i in _checked_ids(ids, self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the number of ids."""
        Path(path).write_text(json.dumps({"xtrain_ids": self.vocab_size}), encoding="utf-8")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json run by the `tokenizers` package.

    special_tokens: role -> text, such as {"eos_token": "<|im_end|>"}; tokenizer.json itself does
    not say which token ends a document.
    """

    def __init__(
        self, name: str, json_text: str, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self.json_text = json_text
        self.backend = Backend.from_str(json_text)
        # Settings of whoever wrote the file would cut or pad the corpus.
        self.backend.no_truncation()
        self.backend.no_padding()
        vocab = self.backend.get_vocab()
        if not vocab:
            raise ValueError("its vocabulary is empty")
        self.vocab_size = max(vocab.values()) + 1
        self.special_tokens = dict(special_tokens or {})
        known = next((name for name in _EOS_NAMES if name in vocab), None)
        if known is not None:
            self.special_tokens.setdefault("eos_token", known)
        self.eos_id = vocab.get(self.special_tokens.get("eos_token", ""))
        self.fingerprint = hashlib.sha256(f"{self.eos_id}\n{json_text}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of text, without the specials that a post-processor would add."""
        _check_surrogates(text)
        return self.encodings([text], with_offsets=False)[0].ids

    def encodings(self, texts: Sequence[str], *, with_offsets: bool) -> list[Any]:
        """Return what the package makes of each text, spread over the cores.

        with_offsets: also which characters each id stands for, which takes half as long again.
        """
        backend = self.backend
        encode = backend.encode_batch if with_offsets else backend.encode_batch_fast
        text = f"{shown(texts[0])}{' and others' if len(texts) > 1 else ''}" if texts else ""
        with tokenizer_errors(f"{self.name} cannot encode {text}"):  # a word, without [UNK], say
            return encode(texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens spelt out."""
        return self.backend.decode(_checked_ids(ids, self), skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer.json as it was read or trained, and its special tokens beside it."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        beside = Path(path).with_name(_TOKEN_FILES[0])
        beside.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        Path(path).write_text(self.json_text, encoding="utf-8", newline="")


def names_file(spec: str) -> bool:
    """Return whether a tokenizer's name is that of a file or folder, not byte, bpe:N or ids:N."""
    return spec.partition(":")[0] not in ("byte", "bpe", "ids")


def parse_bpe(spec: str) -> int | None:
    """Return N of "bpe:N", or None when spec is of another kind.

    Raises:   DataError when N is no integer from 257 to 1,000,000.
    """
    return _parse_size(spec, "bpe", MIN_BPE_SIZE, "256 bytes and the end of a document")


def load_tokenizer(spec: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of "byte", "ids:N" or a file; "bpe:N" needs data, see open_corpus.

    Raises:   DataError for a file that is missing or no tokenizer.json, or a wrong N.
    """
    spec = os.fspath(spec)
    if spec == "byte":
        return ByteTokenizer()
    if parse_bpe(spec) is not None:
        raise DataError(f"{spec} is trained on data: pass it to open_corpus, or name its file")
    size = _parse_size(spec, "ids", 1, "at least one")
    return IdTokenizer(size) if size is not None else _load_file(spec)


def train_bpe(vocab_size: int, texts: Iterable[str]) -> JsonTokenizer:
    """Train byte-level BPE on texts; the same texts in the same order give the same file.

    The vocabulary is smaller than asked when the texts hold no pair that occurs twice any more.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Spelt out in the text the special token would lend its letters to merges that never apply.
    backend.train_from_iterator((text.replace(END_OF_TEXT, "\n") for text in texts), trainer)
    return JsonTokenizer(f"bpe:{vocab_size}", backend.to_str(), {"eos_token": END_OF_TEXT})


def _parse_size(spec: str, kind: str, minimum: int, why: str) -> int | None:
    head, colon, number = spec.partition(":")
    if head != kind:
        return None
    example = f"write {kind}:N, for example {kind}:{8192 if kind == 'bpe' else 50257}"
    if not colon or not (number.isascii() and number.isdigit()):
        raise DataError(f"tokenizer {spec!r}: {number!r} is not a number of tokens; {example}")
    size = int(number)
    if not minimum <= size <= MAX_BPE_SIZE:
        raise DataError(
            f"tokenizer {spec!r}: N must be from {minimum} ({why}) to {MAX_BPE_SIZE}; {example}"
        )
    return size


def _load_file(spec: str) -> Tokenizer:
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.exists():
        raise DataError(f"no tokenizer file {path}; a tokenizer is {_NAMES}")
    with os_errors_as_data_errors(path):
        data = file_bytes(path)
    with tokenizer_errors(f"{path} is not a tokenizer.json"):
        text = data.decode("utf-8")
        parsed = json_value(data)
        if not is_object(parsed):
            raise ValueError("it holds no object")
        if set(parsed) == {"xtrain_ids"}:
            return load_tokenizer(f"ids:{parsed['xtrain_ids']}")
        if _is_byte_tokenizer(parsed):
            return ByteTokenizer()
        return JsonTokenizer(spec, text, _special_tokens(path, parsed))


def _special_tokens(path: Path, parsed: Mapping[str, Any]) -> dict[str, str]:
    """Return role -> text as the files beside a tokenizer.json name them."""
    tokens: dict[str, str] = {}
    for config in map(path.with_name, _TOKEN_FILES):
        for role, value in _json_object(config).items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                tokens.setdefault(role, text)
    for config in map(path.with_name, _ID_FILES):
        ids = _json_object(config).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        for added in parsed.get("added_tokens", ()):
            if added["id"] == first:
                tokens.setdefault("eos_token", added["content"])
    return tokens


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json_file(path)
    except (OSError, ValueError):
        return {}
    return value if is_object(value) else {}


def _check_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"cannot encode text with the lone surrogate U+{ord(text[error.start]):04X} at"
            f" character {error.start}: it is not valid Unicode"
        ) from None


def _checked_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    numbers = [int(i) for i in ids]
    for position, number in enumerate(numbers):
        if not 0 <= number < tokenizer.vocab_size:
            raise DataError(
                f"cannot decode id {number} at position {position}: {tokenizer.name} has ids 0 to"
                f" {tokenizer.vocab_size - 1}"
            )
    return numbers


def _byte_vocab() -> dict[str, int]:
    """Return byte-level BPE's printable character of each byte -> the byte.

    Source:   the mapping of GPT-2's encoder (Radford et al. 2019): printable bytes of Latin-1 stand
              for themselves, the others for U+0100, U+0101, ... in order.
    """
    spare = iter(range(256, 512))
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


def _byte_tokenizer_json() -> str:
    """Return a tokenizer.json with the 256 bytes in order and no merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()


def _is_byte_tokenizer(parsed: Any) -> bool:
    """Whether a tokenizer.json is the one that ByteTokenizer.save writes: 256 bytes, no merges."""
    model = parsed["model"]
    added = parsed.get("added_tokens")
    return not added and not model.get("merges") and model.get("vocab") == _byte_vocab()


def ids_dtype(vocab_size: int) -> np.dtype:
    """Return the little-endian type that stores ids of a vocabulary: uint16 where it suffices."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
