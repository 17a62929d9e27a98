"""Answering one prompt: text as it comes, and figures at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoder.loop import Decoder
from decoder.models import LanguageModel
from decoder.statistics import Statistics
from decoder.text import TextStream


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation.

    Attributes:
        text: what was generated, without special tokens.
        token_ids: the same as tokens, the stop token included.
        statistics: what it took.
    """

    text: str
    token_ids: list[int]
    statistics: Statistics

    def report(self) -> dict[str, Any]:
        """Return the answer and its figures as plain values."""
        return {"text": self.text, "token_ids": self.token_ids, **self.statistics.report()}


def answer(  # noqa: PLR0913  the last three are options
    decoder: Decoder,
    language_model: LanguageModel,
    prompt: str,
    *,
    max_new_tokens: int,
    remember: bool = True,
    on_text: Callable[[str], object] = lambda _: None,
) -> Answer:
    """Generate an answer to a prompt.

    Args:
        decoder: made for this model.
        language_model: whose tokenizer reads the prompt and writes the answer.
        prompt: a user's message, or the beginning of a text where there is no chat template.
        max_new_tokens: most tokens to generate.
        remember: whether the drafter may use the answer for later ones.
        on_text: is called with each piece of text as soon as its characters are complete.

    Raises:
        InvalidPromptError: the prompt is empty or too long for the model.
    """
    tokens = language_model.encode(prompt)
    generation = decoder.generate(tokens, max_new_tokens, remember=remember)
    stream = TextStream(language_model.tokenizer)
    pieces: list[str] = []
    token_ids: list[int] = []
    for step in generation:
        token_ids.extend(step)
        pieces.append(stream.push(step))
        on_text(pieces[-1])
    pieces.append(stream.finish())
    on_text(pieces[-1])
    return Answer("".join(pieces), token_ids, generation.statistics)
