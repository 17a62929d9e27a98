"""Training examples of a speculator: prompts for the target, and outputs that exist already."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.errors import TeachingTextError
from decoder.model.pretrained import LanguageModel
from indexer.errors import SourceError, TokenizerError, UnusableError, reason_of
from indexer.sources.chats.conversations import (
    Conversation,
    Exchange,
    Turn,
    conversation_of,
    exchanges_of,
    messages_of,
    plain_text,
    prompts_of,
)
from indexer.sources.chats.shapes import Shape
from indexer.sources.recordings import RecordingTally, read_records
from indexer.sources.source_options import DEFAULT_FIELD
from retriever.drafter import TokenIds

_REFUSED: Final = "turns that the chat template refuses"

NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A prompt with its output.

    Attributes:
        prompt: int32[p], at least one token.
        output: int32[n], the recorded output; empty if the target is to write it.
        is_own: whether the target itself wrote the output, after a prompt that was not recorded.
        opening: int32[q], the conversation up to its first question, unless that is the prompt.
    """

    prompt: TokenIds
    output: TokenIds = field(default_factory=lambda: NO_TOKENS)
    is_own: bool = False
    opening: TokenIds = field(default_factory=lambda: NO_TOKENS)

    @property
    def key(self) -> bytes:
        """Key that examples with the same first question share; they are held out together.

        The reason is that later prompts of a conversation contain the earlier ones. If the prompt
        was not recorded, the output takes its place.
        """
        first = self.opening if len(self.opening) else self.prompt
        return hashlib.blake2b(
            (self.output if self.is_own else first).tobytes(), digest_size=8
        ).digest()


def read_lessons(
    paths: Sequence[Path], language_model: LanguageModel, tally: RecordingTally, max_tokens: int
) -> Iterator[Lesson]:
    """Yield a training example for each answer, prompt and document in files.

    For each recorded answer, the example holds all turns before it as the prompt, and the answer
    itself as the output. A document becomes a user's message. It is a line of text, or the text in
    the field that the options name (by default `text`, if a record holds no conversation).

    Args:
        paths: files; see `read_records`.
        language_model: the target; its tokenizer and chat template are used.
        tally: counts unusable records.
        max_tokens: most tokens of a prompt, whose start is cut, and of an output, whose end is cut.

    Raises:
        TeachingTextError: a file cannot be read.
    """
    for path in paths:
        try:
            for place, entry in read_records(path, tally, with_lines=True):
                with tally.dropping(place):
                    found = _lessons_of(entry, path, language_model, tally)
                    yield from (_within(each, max_tokens) for each in found if len(each.prompt))
        except SourceError as error:
            raise TeachingTextError(str(error)) from error


def from_outputs(
    outputs: Iterable[TokenIds], language_model: LanguageModel, max_tokens: int
) -> Iterator[Lesson]:
    """Yield a training example for each output of the target that was stored without its prompt.

    Args:
        outputs: int32[n] each, the outputs.
        language_model: the target that wrote them; its chat template gives the prompt.
        max_tokens: most tokens of an output.
    """
    lead = np.array(_lead(language_model), np.int32)
    for output in outputs:
        if len(output):
            yield Lesson(lead, np.asarray(output[:max_tokens], np.int32), is_own=True)


def held_out(lessons: Sequence[Lesson], share: float) -> tuple[list[Lesson], list[Lesson]]:
    """Split the examples into training and held-out ones; examples with equal keys stay together.

    With two keys or more, both parts have at least one. The split depends only on the keys, so an
    interrupted training continues with the same one.

    Args:
        lessons: examples in any order.
        share: share of the keys to hold out, from 0 to 1.
    """
    taught: list[Lesson] = []
    judging: list[Lesson] = []
    for lesson in lessons:
        draw = int.from_bytes(lesson.key, "little") / 2**64
        (judging if draw < share else taught).append(lesson)
    if lessons and not (taught and judging):
        first = lessons[0].key
        judging = [lesson for lesson in lessons if lesson.key == first]
        taught = [lesson for lesson in lessons if lesson.key != first]
    return taught, judging


def _lessons_of(
    entry: Any, path: Path, language_model: LanguageModel, tally: RecordingTally
) -> list[Lesson]:
    """Return the training examples of a line or a record.

    Raises:
        UnusableError: the entry holds neither a document nor a conversation, or the chat template
            refuses its turns.
    """
    text = entry if tally.field else _text_of(entry)
    if isinstance(text, str):
        return [Lesson(_asked((Turn("user", text),), language_model))] if text.strip() else []
    return tally.take(entry, path, "prompts", lambda found: _conversed(found, language_model))


def _text_of(entry: Any) -> Any:
    """Return the text of a record without a conversation; otherwise the entry itself."""
    if isinstance(entry, dict) and conversation_of(entry) is None:
        return entry.get(DEFAULT_FIELD)
    return entry


def _conversed(found: Conversation, language_model: LanguageModel) -> list[Lesson]:
    """Return an example for each answer in a conversation, and for a last, unanswered question."""
    exchanges = [] if found.shape == Shape.TEXT else list(exchanges_of(found))
    answered = {each.prompt for each in exchanges}
    exchanges += [Exchange(each, "") for each in prompts_of(found) if each not in answered]
    return [
        Lesson(
            _asked(each.prompt, language_model),
            _written(each.output, language_model),
            opening=_asked(_opening(each.prompt), language_model),
        )
        for each in exchanges
        if any(turn.role == "user" for turn in each.prompt)
    ]


def _opening(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turns up to and including the user's first turn."""
    first = next(number for number, turn in enumerate(turns) if turn.role == "user")
    return turns[: first + 1]


def _asked(turns: tuple[Turn, ...], language_model: LanguageModel) -> TokenIds:
    """Return the tokens of a prompt.

    Raises:
        UnusableError: the chat template refuses the turns.
    """
    if len(turns) == 1 and turns[0].role == "user":
        return np.array(language_model.encode(turns[0].text), np.int32)
    tokenizer = language_model.tokenizer
    if not language_model.use_chat_template or not tokenizer.chat_template:
        return np.array(tokenizer.encode(plain_text(turns)), np.int32)
    try:
        return np.array(language_model.encode_chat(messages_of(turns)), np.int32)
    except TokenizerError as error:
        raise UnusableError(_REFUSED, reason_of(error)) from error


def _written(text: str, language_model: LanguageModel) -> TokenIds:
    return np.array(language_model.tokenizer.encode(text, add_special_tokens=False), np.int32)


def _lead(language_model: LanguageModel) -> list[int]:
    """Return the prompt for an answer whose question is unknown."""
    return language_model.encode("?") or [0]


def _within(lesson: Lesson, max_tokens: int) -> Lesson:
    return replace(
        lesson,
        prompt=lesson.prompt[-max_tokens:],
        output=lesson.output[:max_tokens],
        opening=lesson.opening[-max_tokens:],
    )
