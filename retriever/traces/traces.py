"""Recorded outputs of models: a prompt, and the text that the model wrote after it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike

from indexer.errors import SourceError, TokenizerError, UnusableError
from indexer.reader import Vocabulary
from indexer.sources.blocks import whole_characters
from indexer.sources.chats.conversations import Turn, exchanges_of, messages_of, plain_text
from indexer.sources.chats.shapes import SYSTEM
from indexer.sources.recordings import EXPECTED, RecordingTally, read_records
from indexer.tokenizer import (
    DEFAULT_MODEL,
    CoreTokenizer,
    encode_chat,
    encode_prompt,
    load_core,
    load_indexed,
    vocabulary_of,
)
from retriever.drafter import Prediction, TokenIds, predictions_of
from retriever.errors import LimitExceededError, TraceError
from retriever.limits import Limits, check_predictions, checked_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_PARTS: Final = 0.1
"""Largest harmless share of tokens that are parts of characters. Above it, these tokens dominate
all figures."""


@dataclass(slots=True)
class TokenizerFit:
    """How a tokenizer divides texts.

    If the tokenizer covers a script badly, a character is several tokens. All of them except the
    first are easy to draft, so they flatter every drafter.

    Attributes:
        num_characters: characters of the texts.
        num_tokens: tokens of the texts.
        num_parts: tokens that are only a part of a character.
    """

    num_characters: int = 0
    num_tokens: int = 0
    num_parts: int = 0

    @property
    def share_of_parts(self) -> float:
        """Share of the tokens that are parts of characters, from 0 to 1."""
        return self.num_parts / max(self.num_tokens, 1)

    @property
    def caution(self) -> str:
        """Warning if these tokens' figures do not apply to a model's own tokens; else empty."""
        if self.share_of_parts <= MOST_PARTS:
            return ""
        return (
            f"{self.share_of_parts:.0%} of the tokens are parts of characters, which are easy to "
            "draft; your model's tokenizer may know this script better: name it by --tokenizer"
        )

    def as_json(self) -> dict[str, float]:
        """Return the reported figures."""
        return {
            "tokens_per_character": self.num_tokens / max(self.num_characters, 1),
            "share_of_parts": self.share_of_parts,
        }

    def count(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        """Count a text, given the span of characters of each of its tokens."""
        same = [left == right for left, right in pairwise(offsets)]
        neighbours = zip([False, *same], [*same, False], strict=True) if offsets else ()
        self.num_characters += len(text)
        self.num_tokens += len(offsets)
        self.num_parts += sum(before or after for before, after in neighbours)


class ChatEncoder:
    """Encodes with a model's own tokenizer, which is loaded on first use; this can take seconds.

    Args:
        name: hub id, directory or `.gguf` file; None for that of an index, or the default model.
        index_name: the tokenizer's name according to an index; see `indexed_tokenizer`.

    Attributes:
        fit: fit of the encoded outputs.
    """

    def __init__(self, name: str | None, index_name: str | None = None) -> None:
        self._name = name
        self._index_name = index_name
        self.fit = TokenizerFit()

    @cached_property
    def tokenizer(self) -> "CoreTokenizer | PreTrainedTokenizerBase":
        """The tokenizer, loaded without transformers if possible."""
        if self._name is None and self._index_name is not None:
            return load_indexed(self._index_name)
        return load_core(self._name or DEFAULT_MODEL)

    @property
    def used_tokenizer(self) -> str | None:
        """The name of the tokenizer; None until it is needed."""
        if "tokenizer" not in vars(self):
            return None
        return self._name or self._index_name or DEFAULT_MODEL

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of the ids; None if no tokenizer was named and none has been needed."""
        if self._name is None and "tokenizer" not in vars(self):
            return None
        return vocabulary_of(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a user's message in the chat template, ready for the answer."""
        return encode_prompt(self.tokenizer, text)

    def encode_turns(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the ids of a conversation in the chat template, ready for the next answer.

        Raises:
            UnusableError: the template refuses the conversation.
        """
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            return list(tokenizer.encode(plain_text(turns)))
        try:
            return encode_chat(tokenizer, messages_of(turns))
        except TokenizerError as error:
            raise UnusableError("refused by the chat template", str(error)) from error

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        encoding = core.encode(text, add_special_tokens=False)
        self.fit.count(text, encoding.offsets)
        return list(encoding.ids)


NO_TRACE: Final = "no trace"
_STATED: Final = frozenset({"group", "lane", "prediction", "predictions"})
"""Keys that give more information on an answer. Records with one of them are never repeats."""

REPEATED: Final = "answer that was read before"
_MAX_TOKEN_ID: Final = (1 << 31) - 1
_MAX_LABEL: Final = 64  # characters: within the limit of labels in any script
_OTHERS: Final = frozenset(
    (
        "messages",
        "conversations",
        "conversation",
        "instruction",
        "question",
        "input",
        "history",
        *SYSTEM,
    )
)
"""Keys next to `output` that mark a record as more than a prompt and its output."""


class TextEncoder(Protocol):
    """Turns the text of a trace into token ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt as the model would see it."""
        ...

    def encode_turns(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the ids of a conversation so far, as the model would see it.

        Raises:
            UnusableError: the model cannot read the conversation.
        """
        ...

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of an output, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded output.

    Attributes:
        prompt: int32[n], the model's input.
        output: int32[m], the model's output.
        predictions: texts that the output was expected to contain.
        group: name of a group of outputs that were written concurrently and are similar; empty for
            no group.
        lane: name of a lane in the group; outputs of a lane follow one another. Empty for a
            separate lane.
    """

    prompt: TokenIds
    output: TokenIds
    predictions: tuple[Prediction, ...] = ()
    group: str = ""
    lane: str = ""


_Traced = tuple[Trace, dict[str, Any]]
"""A trace, and the record that it was read from."""


def read_traces(
    path: Path,
    encoder: TextEncoder,
    limit: int | None = None,
    skipped: RecordingTally | None = None,
) -> Iterator[Trace]:
    """Read recorded outputs: from each conversation, the turns of the assistant.

    The file is opened immediately and read while the result is iterated over, because a log may be
    large.

    Args:
        path: JSON lines (`.gz` or plain), JSON, CSV or Parquet. A record is a conversation as
            `conversation_of` reads it, or has `prompt_ids` and `output_ids`. Conversations without
            a turn of the assistant are skipped. Expected contents of an output (`prediction`,
            `predictions`) are read, too.
        encoder: encodes texts.
        limit: most traces to read.
        skipped: counts conversations, and records without a trace; None to refuse such records.

    Raises:
        TraceError: the file cannot be read or has no trace, or a record without a trace is refused;
            the message names its place.
    """
    return (trace for trace, _ in islice(stream_traces(path, encoder, skipped), limit))


def stream_traces(
    path: Path, encoder: TextEncoder, skipped: RecordingTally | None = None
) -> Iterator[_Traced]:
    """Read as `read_traces` does; yield each trace with its record."""
    reading = _Reading(path, encoder, skipped)
    sides = reading.sides(_sides)
    first = next(sides, None)
    if first is None:
        raise reading.without_trace()
    return _some(reading.traces(chain([first], sides)), reading)


def _some(traces: Iterator[_Traced], reading: "_Reading") -> Iterator[_Traced]:
    """Yield traces; raise an error if there are none because all were skipped."""
    is_empty = True
    for each in traces:
        is_empty = False
        yield each
    if is_empty:
        raise reading.without_trace()


def read_outputs(
    path: Path, encoder: TextEncoder, skipped: RecordingTally | None = None
) -> Iterator[TokenIds]:
    """Read only the outputs, for example as recent generations; prompts may be missing.

    Raises:
        TraceError: see `read_traces`, except that a file may be empty.
    """
    reading = _Reading(path, encoder, skipped)
    sides = reading.sides(_outputs)
    first = list(islice(sides, 1))
    return (trace.output for trace, _ in reading.traces(chain(first, sides)))


_Text = str | TokenIds
_Prompt = _Text | tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class _Sides:
    """A prompt and an output before they are encoded, with their record and its place.

    Attributes:
        is_last: whether the record's predictions are for this output.
        group: group of the answers, if the record has several to one prompt; else empty.
    """

    prompt: _Prompt
    output: _Text
    row: Any
    place: str
    is_last: bool
    group: str = ""


class _Reading:
    """Reads a file once; unusable records are counted or refused."""

    def __init__(self, path: Path, encoder: TextEncoder, skipped: RecordingTally | None) -> None:
        self._path = path
        self._encoder = encoder
        self._is_strict = skipped is None
        self._seen: set[int] = set()
        self.tally = RecordingTally() if skipped is None else skipped

    def sides(self, take: "_Take") -> Iterator[_Sides]:
        """Yield the prompts and outputs of all records."""
        for place, row in self._records():
            with self._skipping(place):
                found = list(take(row, self._path, self.tally))
                for number, (prompt, output, num_samples) in enumerate(found, start=1):
                    if self._was_read(row, prompt, output):
                        self.tally.skip(REPEATED, place)
                        continue
                    is_last = take is _sides and number == len(found)
                    group = place if num_samples > 1 else ""
                    yield _Sides(prompt, output, row, place, is_last, group)

    def _was_read(self, row: Any, prompt: "_Prompt", output: "_Text") -> bool:
        """Return whether the same answer to the same prompt was read before, as in growing logs.

        Answers that were written concurrently, with a group in their record, may be equal.
        """
        if isinstance(output, np.ndarray) or isinstance(prompt, np.ndarray):
            return False
        if isinstance(row, dict) and not _STATED.isdisjoint(row):
            return False
        key = hash((prompt, output))  # 64 bits: a million answers collide with p = 1 in 40 million
        was_read = key in self._seen
        self._seen.add(key)
        return was_read

    def traces(self, recorded: Iterable[_Sides]) -> Iterator[_Traced]:
        """Yield the encoded traces of prompts and outputs, with their records."""
        for each in recorded:
            with self._skipping(each.place):
                yield self._trace(each), each.row

    def without_trace(self) -> TraceError:
        """Return the error for a file without outputs, with the reason."""
        return TraceError(f"{self._path} holds no recorded output: {self.tally.why_nothing()}")

    def _records(self) -> Iterator[tuple[str, Any]]:
        try:
            for place, row in read_records(self._path, self.tally):
                self._check()
                yield place, row
        except SourceError as error:
            raise TraceError(str(error)) from error
        self._check()

    def _check(self) -> None:
        if self._is_strict and self.tally.num_dropped:
            said = self.tally.describe_skipped()
            raise TraceError(f"{self._path} cannot be read: {said}")

    @contextmanager
    def _skipping(self, place: str) -> Iterator[None]:
        try:
            yield
        except UnusableError as unusable:
            if self._is_strict:
                raise TraceError(f"{place}: {unusable}: {unusable.remedy}") from unusable
            self.tally.drop(str(unusable), place, unusable.remedy)

    def _trace(self, sides: _Sides) -> Trace:
        prompt = _prompt_ids(sides.prompt, self._encoder)
        output = _ids(sides.output, self._encoder.encode_output)
        predictions = _predictions_in(sides.row, self._encoder) if sides.is_last else ()
        most = Limits().max_sequence_tokens
        if len(prompt) + len(output) > most:
            raise UnusableError(
                "too long", f"a prompt with its output has at most {most:,} tokens: leave it out"
            )
        group, lane = _place_in(sides.row)
        return Trace(prompt, output, predictions, group or sides.group, lane)


_Taken = tuple[_Prompt, _Text, int]
_Take = Callable[[Any, Path, RecordingTally], Iterable[_Taken]]


def _sides(row: Any, path: Path, tally: RecordingTally) -> list[_Taken]:
    """Return the prompts and outputs of a record, and how many answers it has to each prompt.

    Raises:
        UnusableError: the record is not a trace.
    """
    if _is_plain(row):
        return [(_field(row, "prompt"), _field(row, "output"), 1)]
    exchanges = tally.take(row, path, "outputs", exchanges_of)
    if not exchanges and isinstance(row.get("prompt"), str):
        _field(row, "output")
    return [(each.prompt, each.output, each.num_samples) for each in exchanges]


def _outputs(row: Any, path: Path, tally: RecordingTally) -> list[_Taken]:
    """Return the outputs of a record, which may lack a prompt; see `_sides`."""
    if _is_plain(row):
        return [((), _field(row, "output"), 1)]
    return [((), output, number) for _, output, number in _sides(row, path, tally)]


def _is_plain(row: Any) -> bool:
    """Return whether a record has ids, or `prompt` or `output` that must be texts."""
    if not isinstance(row, dict) or "prompt_ids" in row or "output_ids" in row:
        return True
    is_text = isinstance(row.get("output"), str) and not isinstance(row.get("prompt"), list | dict)
    return is_text and not _OTHERS & row.keys()


def _prompt_ids(prompt: _Prompt, encoder: TextEncoder) -> TokenIds:
    if not isinstance(prompt, tuple):
        return _ids(prompt, encoder.encode_prompt)
    return checked_tokens(encoder.encode_turns(prompt) if prompt else [], None)


def _ids(field: str | TokenIds, encode: Callable[[str], list[int]]) -> TokenIds:
    return checked_tokens(encode(field), None) if isinstance(field, str) else field


def _place_in(row: Any) -> tuple[str, str]:
    """Return the group and the lane that a record states, empty if it states none."""
    if not isinstance(row, dict):
        return "", ""
    group, lane = (row.get(name) for name in ("group", "lane"))
    return (
        str(group) if isinstance(group, str | int) else "",
        str(lane) if isinstance(lane, str | int) else "",
    )


def _predictions_in(row: Any, encoder: TextEncoder) -> tuple[Prediction, ...]:
    """Return the predictions of a record for its last output.

    They are in its `predictions`, a list of texts or of `{"text": …}` or `{"ids": […]}` with a
    `label`. Or they are in its `prediction`, also within its `request`: a text, or an object as in
    OpenAI's API.

    Raises:
        UnusableError: the predictions have a different form.
    """
    if not isinstance(row, dict):
        return ()
    request = row.get("request")
    stated = row.get("prediction")
    if stated is None and isinstance(request, dict):
        stated = request.get("prediction")
    listed = row.get("predictions")
    try:
        found = _stated(stated, encoder)
        for number, each in enumerate(listed if isinstance(listed, list) else ()):
            found.append(_listed(each, f"prediction {number}", encoder))
        check_predictions([len(each.tokens) for each in found], Limits())
    except (ValueError, LimitExceededError) as error:
        raise UnusableError("invalid prediction", str(error)) from error
    return tuple(each for each in found if len(each.tokens))


def _stated(stated: Any, encoder: TextEncoder) -> list[Prediction]:
    if isinstance(stated, str):
        stated = {"type": "content", "content": stated}
    return predictions_of(stated, lambda text: encoder.encode_output(whole_characters(text)))


def _listed(stated: Any, label: str, encoder: TextEncoder) -> Prediction:
    fields = {"text": stated} if isinstance(stated, str) else stated
    if not isinstance(fields, dict) or ("text" in fields) == ("ids" in fields):
        raise UnusableError(NO_TRACE, '`predictions` are texts, {"text": …} or {"ids": […]}')
    label = str(fields.get("label", label))[:_MAX_LABEL]
    if "ids" in fields:
        return Prediction(_checked(fields["ids"], "`predictions`"), label)
    if not isinstance(fields["text"], str):
        raise UnusableError(NO_TRACE, "`predictions` hold a text that is not a string")
    text = whole_characters(fields["text"])
    return Prediction(np.array(encoder.encode_output(text), np.int32), label)


def _field(row: Any, name: str) -> str | TokenIds:
    """Return the prompt or the output of a trace: its text, or its ids if given."""
    if not isinstance(row, dict):
        raise UnusableError(NO_TRACE, f"a trace is a JSON object, but this is not; {EXPECTED}")
    ids = row.get(f"{name}_ids")
    if ids is not None:
        return _checked(ids, f"`{name}_ids`")
    text = row.get(name)
    if not isinstance(text, str):
        problem = "is not text" if name in row else "is missing"
        raise UnusableError(
            NO_TRACE, f"`{name}` {problem}: give it as text, or `{name}_ids` as a list"
        )
    return whole_characters(text)


def _checked(ids: ArrayLike, what: str) -> TokenIds:
    if not isinstance(ids, list):
        raise UnusableError(NO_TRACE, f"{what} is not a list of token ids")
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnusableError(NO_TRACE, f"{what} holds {value!r}, which is not a token id")
        if not 0 <= value <= _MAX_TOKEN_ID:
            raise UnusableError(
                NO_TRACE, f"{what} holds {value}, which is not a token id: they fit into four bytes"
            )
    return checked_tokens(ids, None)
