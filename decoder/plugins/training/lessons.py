"""What a speculator is taught from: prompts for the target, and outputs that it gave before."""

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
    """A prompt, and what was written after it.

    Attributes:
        prompt: int32[p], at least one token.
        output: int32[n], recorded; none where the target is to answer.
        is_own: whether the target itself wrote the output, to a prompt that was not kept.
        opening: int32[q], the conversation up to its first question, where that is not the prompt.
    """

    prompt: TokenIds
    output: TokenIds = field(default_factory=lambda: NO_TOKENS)
    is_own: bool = False
    opening: TokenIds = field(default_factory=lambda: NO_TOKENS)

    @property
    def key(self) -> bytes:
        """Lessons of equal keys are held out together: those that share the first question.

        Later prompts of a conversation hold the earlier ones. Where the prompt was not kept, the
        output stands for it.
        """
        first = self.opening if len(self.opening) else self.prompt
        return hashlib.blake2b(
            (self.output if self.is_own else first).tobytes(), digest_size=8
        ).digest()


def read_lessons(
    paths: Sequence[Path], language_model: LanguageModel, tally: RecordingTally, max_tokens: int
) -> Iterator[Lesson]:
    """Yield a lesson for each answer, prompt and document of files.

    An answer is asked for again, after all that was said before it; what is recorded is kept with
    it. A document, which is a line of text or a text that a field names (by default `text`, where a
    record holds no conversation), is put to the target as a user's message.

    Args:
        paths: as `read_records` takes them.
        language_model: whose tokenizer and chat template count.
        tally: counts what cannot be used.
        max_tokens: of a prompt: what is longer begins later; and of an output, which ends earlier.

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
    """Yield a lesson for each output of the target that was kept without its prompt.

    Args:
        outputs: int32[n] each.
        language_model: whose they are: its chat template leads to an answer.
        max_tokens: of an output.
    """
    lead = np.array(_lead(language_model), np.int32)
    for output in outputs:
        if len(output):
            yield Lesson(lead, np.asarray(output[:max_tokens], np.int32), is_own=True)


def held_out(lessons: Sequence[Lesson], share: float) -> tuple[list[Lesson], list[Lesson]]:
    """Return the lessons to teach and those to judge by; lessons of equal keys stay together.

    Of two keys or more, one is taught and one judges at least. Which are which depends on the keys
    alone, so that an interrupted training goes on with the same ones.

    Args:
        lessons: of any order.
        share: of the keys that judge, from 0 to 1.
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
    """Return the lessons of a line or a record.

    Raises:
        UnusableError: it holds neither a document nor a conversation, or the chat template refuses
            its turns.
    """
    text = entry if tally.field else _text_of(entry)
    if isinstance(text, str):
        return [Lesson(_asked((Turn("user", text),), language_model))] if text.strip() else []
    return tally.take(entry, path, "prompts", lambda found: _conversed(found, language_model))


def _text_of(entry: Any) -> Any:
    """Return a line of text, or the text of a record that holds no conversation."""
    if isinstance(entry, dict) and conversation_of(entry) is None:
        return entry.get(DEFAULT_FIELD)
    return entry


def _conversed(found: Conversation, language_model: LanguageModel) -> list[Lesson]:
    """Return a lesson for each answer of a conversation, and for its end if that is a question."""
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
    """Return the turns up to a user's first."""
    first = next(number for number, turn in enumerate(turns) if turn.role == "user")
    return turns[: first + 1]


def _asked(turns: tuple[Turn, ...], language_model: LanguageModel) -> TokenIds:
    """Return the tokens of a prompt.

    Raises:
        UnusableError: the chat template refuses its turns.
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
    """Return the tokens before an answer to a question that is not known."""
    return language_model.encode("?") or [0]


def _within(lesson: Lesson, max_tokens: int) -> Lesson:
    return replace(
        lesson,
        prompt=lesson.prompt[-max_tokens:],
        output=lesson.output[:max_tokens],
        opening=lesson.opening[-max_tokens:],
    )
