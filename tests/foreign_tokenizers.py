"""Tokenizers as other programs make them, trained on a little text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPACE = "\u2581"


def byte_level(texts, vocab_size, *before, normalizer=None) -> Tokenizer:
    """Byte-level BPE; behind other pre-tokenizers, if given, it does not split again."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece(texts, vocab_size, *, prefix=True, byte_fallback=False) -> Tokenizer:
    """As Llama 2's file spells it: BPE over the whole text, a word's space its first letter."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    # for the training alone: no merge over a space
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    special = ["<unk>", "<s>", "</s>"]
    special += [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, special_tokens=special
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = None
    return tokenizer


def word_piece(texts, vocab_size) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, show_progress=False, special_tokens=["[UNK]", "[SEP]"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_level(texts, *special) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(show_progress=False, special_tokens=list(special))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(texts, vocab_size) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
