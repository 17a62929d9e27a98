"""Tokens to text while they are still coming."""

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

INCOMPLETE: Final = "\ufffd"
"""What stands for a character of which some bytes are missing."""


class TextStream:
    """Decodes a growing sequence, and holds back characters that are not complete yet.

    Tokens may end in the middle of a character, and what a token looks like may depend on the
    one before it. So each piece is the difference between two decodings that begin at the same
    earlier token.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain; it may be empty."""
        self._tokens.extend(tokens)
        text = self._pending()
        if text.endswith(INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return what was held back, complete or not."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = plain_text(self._tokenizer, self._tokens[self._start : self._shown])
        return plain_text(self._tokenizer, self._tokens[self._start :])[len(shown) :]


def plain_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of tokens as it is, without special ones."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
