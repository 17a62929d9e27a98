"""A model's tokenizer that works without transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from indexer.errors import needing_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class CoreTokenizer:
    """A model's tokenizer. It imports transformers only to apply a chat template.

    Attributes:
        backend_tokenizer: tokenizer of the tokenizers library; it neither truncates nor pads.
        all_special_ids: ids of special tokens, as in transformers.
        name_or_path: name that the tokenizer was loaded by.
        chat_template: Jinja chat template; `None` if there is none.
        special_tokens_map: names and texts of the special tokens that the template may use.
    """

    backend_tokenizer: "Tokenizer"
    all_special_ids: tuple[int, ...]
    name_or_path: str
    chat_template: str | None = None
    special_tokens_map: Mapping[str, str] = field(default_factory=dict)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, including added ones."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, including special tokens, with spaces unchanged."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=False))

    def get_chat_template(self) -> str | None:
        """Return the chat template."""
        return self.chat_template

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return a conversation as formatted by the chat template, using transformers.

        Raises:
            ValueError: there is no template, or ids are requested.
            TokenizerError: transformers is not installed.
        """
        with needing_transformers("a chat template"):
            from transformers.utils.chat_template_utils import (  # noqa: PLC0415  (takes a second)
                render_jinja_template,
            )
        if self.chat_template is None or tokenize or not messages:
            raise ValueError("a conversation is written as text, by a template, from its messages")
        conversations: Any = [messages]
        rendered: Any = render_jinja_template(
            conversations,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **dict[str, Any](self.special_tokens_map),
        )
        return str(rendered[0][0])
