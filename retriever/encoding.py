"""Text to token ids as a model sees it: prompts in the chat template, outputs bare."""

from functools import cached_property
from typing import Any, Final

from indexer.reader import Vocabulary
from indexer.tokenizer import DEFAULT_MODEL, load_tokenizer, vocabulary_of

_NO_SPECIAL: Final = {"add_special_tokens": False}


class ChatEncoder:
    """Encodes with a model's own tokenizer, which is loaded at the first use: it takes seconds.

    Args:
        name: hub id, directory or `.gguf` file; None for the default model.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._loaded = False

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        self._loaded = True
        return load_tokenizer(self._name or DEFAULT_MODEL)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary that ids belong to; None where none was named and none was needed."""
        if self._name is None and not self._loaded:
            return None
        return vocabulary_of(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a user's message in the chat template, ready for the answer."""
        if self.tokenizer.chat_template is None:
            return self.encode_output(text)
        messages = [{"role": "user", "content": text}]
        wrapped = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode_output(wrapped)

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        ids: list[int] = self.tokenizer(text, **_NO_SPECIAL)["input_ids"]
        return ids
