"""Reads files of prompts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from decoder.errors import InvalidPromptError, PromptFileError
from indexer.errors import SourceError, UnusableError, reason_of
from indexer.sources.chats.conversations import Turn, messages_of, plain_text, prompts_of
from indexer.sources.recordings import RecordingTally, read_records
from retriever.drafter import Prediction
from retriever.errors import InvalidRequestError
from retriever.sequences import checked_predictions

if TYPE_CHECKING:
    from decoder.model.pretrained import LanguageModel

DEFAULT_CATEGORY = "prompts"

_NO_QUESTION: Final = "malformed question"
_QUESTION: Final = 'expected {"category": …, "turns": [TEXT, …]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        category: name of the kind of task.
        text: the user's message; in a conversation, the last message.
        line: the prompt's place in the file: a line number from 1, or a row number from 0.
        turns: all turns before the answer, if there are more turns than the message.
        later: the user's next messages; each follows one answer.
    """

    category: str
    text: str
    line: int = field(default=0, compare=False)
    turns: tuple[Turn, ...] = ()
    later: tuple[str, ...] = field(default=(), compare=False)

    def answered(self, answer: str) -> "Prompt":
        """Return the prompt that follows an answer, with the user's next message."""
        said = self.turns or (Turn("user", self.text),)
        text, *later = self.later
        turns = (*said, Turn("assistant", answer), Turn("user", text))
        return Prompt(self.category, text, self.line, turns, tuple(later))

    def encoded(self, language_model: "LanguageModel") -> list[int]:
        """Return the tokens of the model's input.

        A system message in the model's options replaces the conversation's own.

        Raises:
            TokenizerError: the chat template does not accept the prompt.
        """
        if not self.turns:
            return language_model.encode(self.text)
        tokenizer, system = language_model.tokenizer, language_model.system
        if not language_model.use_chat_template or not tokenizer.chat_template:
            return list(tokenizer.encode(plain_text(self.turns)))
        turns = self.turns
        if system is not None:
            others = (turn for turn in turns if turn.role != "system")
            turns = (Turn("system", system), *others)
        return language_model.encode_chat(messages_of(turns))


def read_prompts(
    path: Path,
    limit: int | None = None,
    per_category: int | None = None,
    skipped: RecordingTally | None = None,
) -> list[Prompt]:
    """Read a file of prompts, which may be compressed (`.gz`, `.zst`).

    Args:
        path: a file with one prompt per line, or with records in JSON lines, JSON, CSV or Parquet.
            A record is a question of Spec-Bench (Xia et al., 2024, arXiv:2401.07851),
            `{"question_id", "category", "turns"}`, whose first turn is the prompt, or a
            conversation as in `conversation_of`. Each answer of a conversation is generated again;
            all turns before it are its prompt. Conversations without a user's turn are skipped.
        limit: most prompts to return, spread evenly over the categories. Conversations have no
            categories: the first conversations are used, and the rest is not read, because a log
            may be large.
        per_category: most prompts of each category.
        skipped: counter of skipped conversations and unusable records; `None` to raise an error for
            unusable records.

    Raises:
        PromptFileError: the file cannot be read or holds no prompt, or a record is malformed and
            `skipped` is not given.
    """
    tally = RecordingTally() if skipped is None else skipped
    most = min((each for each in (limit, per_category) if each is not None), default=None)
    kept: dict[str, list[Prompt]] = {}
    try:
        for prompt in _prompts_in(path, tally, is_strict=skipped is None):
            of_category = kept.setdefault(prompt.category, [])
            if most is None or len(of_category) < most:
                of_category.append(prompt)
            if len(of_category) == most and list(kept) == [DEFAULT_CATEGORY]:
                break
    except SourceError as error:
        raise PromptFileError(str(error)) from error
    if not kept:
        raise PromptFileError(f"{path} holds no prompt: {tally.why_nothing()}")
    return list(islice(_spread(kept.values()), limit))


def read_text(stream: BinaryIO) -> str:
    """Read a prompt from a stream to its end.

    Raises:
        PromptFileError: the prompt is not UTF-8.
    """
    try:
        return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptFileError("standard input is not UTF-8") from error


def read_predictions(paths: Sequence[Path], encode: Callable[[str], list[int]]) -> list[Prediction]:
    """Read texts that answers are expected to contain; each is named after its file.

    Args:
        paths: the files of UTF-8 text to read.
        encode: function that encodes text with the model's tokenizer, without special tokens.

    Raises:
        PromptFileError: a file cannot be read, is not text or is empty.
        InvalidPromptError: there are too many texts, or they are too long together.
    """
    predictions = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise PromptFileError(
                f"--prediction {path} cannot be read: {reason_of(error)}"
            ) from error
        except UnicodeDecodeError as error:
            raise PromptFileError(f"--prediction {path} is not UTF-8") from error
        if not text:
            raise PromptFileError(f"--prediction {path} is empty: leave it out")
        predictions.append(Prediction(np.array(encode(text), np.int32), path.name))
    try:
        return checked_predictions(predictions)
    except InvalidRequestError as error:
        raise InvalidPromptError(f"--prediction: {error}") from error


def checked_text(text: str) -> str:
    """Return a prompt unchanged unless it is empty.

    Raises:
        InvalidPromptError: the prompt is empty.
    """
    if not text.strip():
        raise InvalidPromptError("the prompt is empty: give a text to continue from")
    return text


def _spread(categories: Iterable[list[Prompt]]) -> Iterator[Prompt]:
    """Alternate between categories, so that the first prompts, however many, cover them evenly."""
    rounds = chain.from_iterable(zip_longest(*categories))
    return (prompt for prompt in rounds if prompt is not None)


def _prompts_in(path: Path, tally: RecordingTally, *, is_strict: bool) -> Iterator[Prompt]:
    """Yield the prompts of a file; count or refuse unusable records."""
    for place, entry in read_records(path, tally, with_lines=True):
        _check(path, tally, is_strict=is_strict)
        try:
            yield from _prompts_of(entry, path, int(place.rpartition(":")[2]), tally)
        except UnusableError as unusable:
            if is_strict:
                raise PromptFileError(f"{place}: {unusable}: {unusable.remedy}") from unusable
            tally.drop(str(unusable), place, unusable.remedy)
    _check(path, tally, is_strict=is_strict)


def _check(path: Path, tally: RecordingTally, *, is_strict: bool) -> None:
    if is_strict and tally.num_dropped:
        raise PromptFileError(f"{path} cannot be read: {tally.describe_skipped()}")


def _prompts_of(entry: Any, path: Path, number: int, tally: RecordingTally) -> list[Prompt]:
    """Return the prompts in a line or record.

    Raises:
        UnusableError: the line or record is neither a prompt, nor a question, nor a conversation.
    """
    if isinstance(entry, str):
        return [Prompt(DEFAULT_CATEGORY, entry, number)]
    if isinstance(entry, dict) and "turns" in entry:
        return [_question(entry, number)]
    return [_prompt(turns, number) for turns in tally.take(entry, path, "prompts", prompts_of)]


def _prompt(turns: tuple[Turn, ...], number: int) -> Prompt:
    """Return a prompt made of a conversation's turns; a single message needs no `turns`."""
    is_message = len(turns) == 1 and turns[0].role == "user"
    return Prompt(DEFAULT_CATEGORY, turns[-1].text, number, () if is_message else turns)


def _question(question: dict[str, Any], number: int) -> Prompt:
    try:
        category, (text, *later) = question["category"], question["turns"]
    except (KeyError, TypeError, ValueError):
        raise UnusableError(_NO_QUESTION, _QUESTION) from None
    if not all(isinstance(value, str) and value.strip() for value in (category, text)):
        raise UnusableError(_NO_QUESTION, "the category and the first turn must be texts")
    if not all(isinstance(value, str) for value in later):
        raise UnusableError(_NO_QUESTION, "its turns must be texts")
    return Prompt(category, text, number, later=tuple(later))
