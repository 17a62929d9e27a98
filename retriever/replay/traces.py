"""Recorded outputs of models: a prompt, and what the model went on to write."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from numpy.typing import ArrayLike

from indexer.errors import SourceError, reason_of
from indexer.reader import Vocabulary
from indexer.sources.conversations import (
    Turn,
    conversation_of,
    exchanges_of,
    messages_of,
    plain_text,
)
from indexer.sources.recordings import EXPECTED, is_table, read_recorded
from indexer.tokenizer import (
    DEFAULT_MODEL,
    CoreTokenizer,
    encode_chat,
    encode_prompt,
    load_core,
    load_indexed,
    vocabulary_of,
)
from retriever.drafter import TokenIds
from retriever.errors import TraceError
from retriever.limits import checked_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatEncoder:
    """Encodes with a model's own tokenizer, which is loaded at the first use: it may take seconds.

    Args:
        name: hub id, directory or `.gguf` file; None for that of an index, or the default model.
        index_name: what an index says that its tokenizer is called; see `indexed_tokenizer`.
    """

    def __init__(self, name: str | None, index_name: str | None = None) -> None:
        self._name = name
        self._index_name = index_name

    @cached_property
    def tokenizer(self) -> "CoreTokenizer | PreTrainedTokenizerBase":
        """The tokenizer, without transformers where that is possible."""
        if self._name is None and self._index_name is not None:
            return load_indexed(self._index_name)
        return load_core(self._name or DEFAULT_MODEL)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary that ids belong to; None where none was named and none was needed."""
        if self._name is None and "tokenizer" not in vars(self):
            return None
        return vocabulary_of(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a user's message in the chat template, ready for the answer."""
        return encode_prompt(self.tokenizer, text)

    def encode_turns(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the ids of a conversation in the chat template, ready for the next answer."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer.encode(plain_text(turns)))
        return encode_chat(self.tokenizer, messages_of(turns))

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))


_MAX_TOKEN_ID: Final = (1 << 31) - 1
_CANNOT_BE_READ: Final = (OSError, EOFError, zlib.error, UnicodeDecodeError)


class TextEncoder(Protocol):
    """Turns the text of a trace into token ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt as the model would see it."""
        ...

    def encode_turns(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the ids of a conversation so far, as the model would see it."""
        ...

    def encode_output(self, text: str) -> list[int]:
        """Return the ids of an output, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded output.

    Attributes:
        prompt: int32[n], what the model was given.
        output: int32[m], what it wrote.
    """

    prompt: TokenIds
    output: TokenIds


def read_traces(path: Path, encoder: TextEncoder, limit: int | None = None) -> Iterator[Trace]:
    """Read recorded outputs: of each conversation, every turn of the assistant.

    The file is read and checked at once; texts are encoded as the result is iterated over.

    Args:
        path: JSON lines (`.gz` or plain), JSON, CSV or Parquet. A record is a conversation as
            `conversation_of` knows it, or has `prompt_ids` and `output_ids`. Conversations in
            which the assistant does not speak are passed over.
        encoder: for texts.
        limit: most traces.

    Raises:
        TraceError: the file cannot be read, holds no trace, or a row is not one; the line is named.
    """
    sides = (each for row, place in _rows(path) for each in _sides(row, place))
    recorded = list(islice(sides, limit))
    if not recorded:
        raise TraceError(f"{path} holds no trace: {EXPECTED}")
    return (
        Trace(_prompt_ids(prompt, encoder), _ids(output, encoder.encode_output))
        for prompt, output in recorded
    )


def stream_traces(path: Path, encoder: TextEncoder) -> Iterator[tuple[Trace, dict[str, Any]]]:
    """Read what `read_traces` reads one by one, each with its record: a log may be large.

    Raises:
        TraceError: as the result is iterated over; see `read_traces`.
    """
    is_empty = True
    for row, place in _rows(path):
        for prompt, output in _sides(row, place):
            is_empty = False
            yield Trace(_prompt_ids(prompt, encoder), _ids(output, encoder.encode_output)), row
    if is_empty:
        raise TraceError(f"{path} holds no trace: {EXPECTED}")


def read_outputs(path: Path, encoder: TextEncoder) -> Iterator[TokenIds]:
    """Read the outputs alone, for example as recent generations; prompts may be missing.

    Raises:
        TraceError: the file cannot be read, or a row has no output; the line is named.
    """
    outputs = [output for row, place in _rows(path) for output in _outputs(row, place)]
    return (_ids(output, encoder.encode_output) for output in outputs)


_Text = str | TokenIds
_Prompt = _Text | tuple[Turn, ...]


def _sides(row: Any, place: str) -> Iterator[tuple[_Prompt, _Text]]:
    """Yield the prompts and outputs of a record."""
    if _is_plain(row):
        yield _field(row, "prompt", place), _field(row, "output", place)
        return
    conversation = conversation_of(row)
    exchanges = list(exchanges_of(conversation)) if conversation else []
    if conversation is None or ("prompt" in row and not exchanges):
        yield _field(row, "prompt", place), _field(row, "output", place)
        return
    for exchange in exchanges:
        yield exchange.prompt, _encodable(exchange.output, f"{place}: the assistant's turn")


def _outputs(row: Any, place: str) -> Iterator[_Text]:
    """Yield the outputs of a record, which may lack a prompt."""
    conversation = None if _is_plain(row) else conversation_of(row)
    if conversation is None:
        yield _field(row, "output", place)
        return
    for exchange in exchanges_of(conversation):
        yield _encodable(exchange.output, f"{place}: the assistant's turn")


def _is_plain(row: Any) -> bool:
    """Return whether a record has ids, or `prompt` or `output` that must be texts."""
    if not isinstance(row, dict) or "prompt_ids" in row or "output_ids" in row:
        return True
    others = {"messages", "conversations", "conversation", "instruction", "question", "input"}
    return "output" in row and not others & row.keys()


def _prompt_ids(prompt: _Prompt, encoder: TextEncoder) -> TokenIds:
    if not isinstance(prompt, tuple):
        return _ids(prompt, encoder.encode_prompt)
    for turn in prompt:
        _encodable(turn.text, "a turn")
    if not prompt:
        return checked_tokens([], None)
    return checked_tokens(encoder.encode_turns(prompt), None)


def _ids(field: str | TokenIds, encode: Callable[[str], list[int]]) -> TokenIds:
    return checked_tokens(encode(field), None) if isinstance(field, str) else field


def _field(row: Any, name: str, place: str) -> str | TokenIds:
    """Return one side of a trace: its text, or its ids where they are given."""
    if not isinstance(row, dict):
        raise TraceError(f"{place}: a trace is a JSON object, this is none")
    ids = row.get(f"{name}_ids")
    if ids is not None:
        return _checked(ids, f"{place}: `{name}_ids`")
    text = row.get(name)
    if not isinstance(text, str):
        problem = "is no text" if name in row else "is missing"
        raise TraceError(f"{place}: `{name}` {problem}: give it as text, or `{name}_ids` as a list")
    return _encodable(text, f"{place}: `{name}`")


def _encodable(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TraceError(f"{what} holds half of a surrogate pair") from error
    return text


def _checked(ids: ArrayLike, place: str) -> TokenIds:
    if not isinstance(ids, list):
        raise TraceError(f"{place} is no list of token ids")
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TraceError(f"{place} holds {value!r}, which is no token id")
        if not 0 <= value <= _MAX_TOKEN_ID:
            raise TraceError(f"{place} holds {value}: token ids lie from 0 to {_MAX_TOKEN_ID}")
    return checked_tokens(ids, None)


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file, each with its place."""
    if is_table(path):
        try:
            yield from read_recorded(path)
        except SourceError as error:
            raise TraceError(str(error)) from error
        return
    opener = gzip.open if path.suffix == ".gz" else open
    line = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield _parsed(text, f"{path}, line {line}"), f"{path}, line {line}"
    except _CANNOT_BE_READ as error:
        where = f" after line {line}" if line else ""
        raise TraceError(f"{path} cannot be read{where}: {reason_of(error)}") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{place} is not JSON: {error}") from error
