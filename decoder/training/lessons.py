"""What a speculator is taught from: prompts for the target, and outputs that it gave before."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from decoder.errors import TeachingTextError
from decoder.model.pretrained import LanguageModel
from indexer.errors import SourceError, TokenizerError
from indexer.sources.conversations import Turn, exchanges_of, messages_of, plain_text, prompts_of
from indexer.sources.recordings import RecordingTally, UnusableError, read_entries
from retriever.drafter import TokenIds

_TEXT: Final = "text"
"""Field of a record that holds a document and no conversation."""

NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A prompt, and what was written after it.

    Attributes:
        prompt: int32[p], at least one token.
        output: int32[n], recorded; none where the target is to answer.
        is_own: whether the target itself wrote the output.
    """

    prompt: TokenIds
    output: TokenIds = field(default_factory=lambda: NO_TOKENS)
    is_own: bool = False

    @property
    def key(self) -> bytes:
        """What stands for the prompt: lessons of equal keys are held out together."""
        return hashlib.blake2b(self.prompt.tobytes(), digest_size=8).digest()


def read_lessons(
    paths: Sequence[Path], language_model: LanguageModel, tally: RecordingTally, max_tokens: int
) -> Iterator[Lesson]:
    """Yield a lesson for each answer, prompt and document of files.

    An answer is asked for again, after all that was said before it; what is recorded is kept with
    it. A document, which is the `text` of a record or a line of text, is put to the target as a
    user's message.

    Args:
        paths: as `read_entries` takes them.
        language_model: whose tokenizer and chat template count.
        tally: counts what cannot be used.
        max_tokens: of a prompt: what is longer begins later; and of an output, which ends earlier.

    Raises:
        TeachingTextError: a file cannot be read.
    """
    for path in paths:
        try:
            for place, entry in read_entries(path, tally):
                try:
                    found = list(_lessons_of(entry, path, language_model, tally))
                except UnusableError as unusable:
                    tally.drop(str(unusable), place, unusable.remedy)
                    continue
                yield from (_within(lesson, max_tokens) for lesson in found if len(lesson.prompt))
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


def held_out(lessons: Iterable[Lesson], share: float) -> tuple[list[Lesson], list[Lesson]]:
    """Return the lessons to teach and those to judge by; equal prompts stay together.

    Which are which depends on the prompts alone, so that an interrupted training goes on with the
    same ones.

    Args:
        lessons: of any order.
        share: of the prompts that judge, from 0 to 1.
    """
    taught: list[Lesson] = []
    judging: list[Lesson] = []
    for lesson in lessons:
        draw = int.from_bytes(lesson.key, "little") / 2**64
        (judging if draw < share else taught).append(lesson)
    return taught, judging


def _lessons_of(
    entry: Any, path: Path, language_model: LanguageModel, tally: RecordingTally
) -> Iterator[Lesson]:
    """Yield the lessons of a line or a record.

    Raises:
        UnusableError: it holds neither a document nor a conversation.
    """
    if isinstance(entry, dict) and isinstance(entry.get(_TEXT), str):
        entry = entry[_TEXT]
    if isinstance(entry, str):
        yield Lesson(_asked((Turn("user", entry),), language_model) if entry.strip() else NO_TOKENS)
        return
    if isinstance(entry, dict) and _are_texts(entry.get("turns")):
        yield Lesson(_asked((Turn("user", entry["turns"][0]),), language_model))
        return
    yield from tally.take(
        entry,
        path,
        "prompts",
        lambda found: [
            *(
                Lesson(_asked(each.prompt, language_model), _written(each.output, language_model))
                for each in exchanges_of(found)
                if any(turn.role == "user" for turn in each.prompt)
            ),
            *(
                Lesson(_asked(turns, language_model))
                for turns in chain(prompts_of(found))
                if turns == found.turns
            ),
        ],
    )


def _are_texts(turns: object) -> bool:
    """Return whether a record is a question as Spec-Bench writes it: a list of messages."""
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)


def _asked(turns: tuple[Turn, ...], language_model: LanguageModel) -> TokenIds:
    """Return the tokens of a prompt; none where the chat template refuses its turns."""
    if len(turns) == 1 and turns[0].role == "user":
        return np.array(language_model.encode(turns[0].text), np.int32)
    tokenizer = language_model.tokenizer
    if not language_model.use_chat_template or not tokenizer.chat_template:
        return np.array(tokenizer.encode(plain_text(turns)), np.int32)
    try:
        return np.array(language_model.encode_chat(messages_of(turns)), np.int32)
    except TokenizerError:
        return NO_TOKENS


def _written(text: str, language_model: LanguageModel) -> TokenIds:
    return np.array(language_model.tokenizer.encode(text, add_special_tokens=False), np.int32)


def _lead(language_model: LanguageModel) -> list[int]:
    """Return the tokens before an answer to a question that is not known."""
    return language_model.encode("?") or [0]


def _within(lesson: Lesson, max_tokens: int) -> Lesson:
    return Lesson(lesson.prompt[-max_tokens:], lesson.output[:max_tokens], lesson.is_own)
