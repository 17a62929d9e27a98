"""A tokenizer with one token for each byte."""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STOP: Final = "<end>"
"""Token 0."""


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Return a tokenizer of bytes, from 1 on, and of pairs that are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {STOP: 0, **{byte: number for number, byte in enumerate(alphabet, start=1)}}
    vocabulary |= {one + other: len(vocabulary) + at for at, (one, other) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
