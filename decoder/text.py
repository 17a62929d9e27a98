"""Tokens to text while they are still coming."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


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
        if text.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return what was held back, complete or not."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
