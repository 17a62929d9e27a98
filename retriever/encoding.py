"""Text to token ids as a model sees it: prompts in the chat template, outputs bare."""

from functools import cached_property
from typing import TYPE_CHECKING

from indexer.reader import Vocabulary
from indexer.tokenizer import DEFAULT_MODEL, encode_prompt, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatEncoder:
    """Encodes with a model's own tokenizer, which is loaded at the first use: it takes seconds.

    Args:
        name: hub id, directory or `.gguf` file; None for the default model.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of transformers."""
        return load_tokenizer(self._name or DEFAULT_MODEL)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary that ids belong to; None where none was named and none was needed."""
        if self._name is None and "tokenizer" not in vars(self):
            return None
        return vocabulary_of(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a user's message in the chat template, ready for the answer."""
        return encode_prompt(self.tokenizer, text)

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))
