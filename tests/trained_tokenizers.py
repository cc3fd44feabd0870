"""Small BPE tokenizers, trained on a few texts: byte-level, or with spaces as letters as Llama's."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def byte_level(
    texts: Sequence[str],
    size: int,
    special: list[str],
    *,
    cut: bool = True,
    limit: int = 1000,
) -> Tokenizer:
    """Train GPT-2's kind; without `cut` merges go across every position where text is cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, texts, size, special, pre_tokenizers.ByteLevel.alphabet(), limit)


def sentencepiece(
    texts: Sequence[str], size: int, special: list[str], unknown: str, limit: int = 1000
) -> Tokenizer:
    """Train Llama's kind, with a token for each byte after the special ones."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=unknown, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    return _train(tokenizer, texts, size, special, [], limit)


def _train(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    size: int,
    special: list[str],
    alphabet: list[str],
    limit: int,
) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=limit,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
