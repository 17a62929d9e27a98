"""Recorded outputs of models: a prompt, and what the model went on to write."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import ArrayLike

from retriever.drafter import TokenIds
from retriever.errors import InvalidRequestError, TraceError
from retriever.limits import checked_tokens

_NOT_A_TRACE: Final = (AttributeError, KeyError, TypeError, ValueError, InvalidRequestError)


class TextEncoder(Protocol):
    """Turns the text of a trace into token ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt as the model would see it."""
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
    """Read JSON lines (`.gz` or plain) with `prompt` and `output`, or `prompt_ids`/`output_ids`.

    Raises:
        TraceError: the file cannot be read, or a row is not a trace; the line is named.
    """
    for index, (line, row) in enumerate(_rows(path)):
        if index == limit:
            return
        try:
            prompt = row.get("prompt_ids")
            output = row.get("output_ids")
            yield Trace(
                _ids(encoder.encode_prompt(row["prompt"]) if prompt is None else prompt),
                _ids(encoder.encode_output(row["output"]) if output is None else output),
            )
        except _NOT_A_TRACE as error:
            raise TraceError(
                f"{path}, line {line}: a trace needs `prompt` and `output` as text, or "
                f"`prompt_ids` and `output_ids` as lists of token ids ({error!r})"
            ) from error


def read_outputs(path: Path, encoder: TextEncoder) -> Iterator[TokenIds]:
    """Read the outputs alone, for example as recent generations; prompts may be missing.

    Raises:
        TraceError: as `read_traces`.
    """
    for line, row in _rows(path):
        try:
            output = row.get("output_ids")
            yield _ids(encoder.encode_output(row["output"]) if output is None else output)
        except _NOT_A_TRACE as error:
            raise TraceError(
                f"{path}, line {line}: needs `output` as text or `output_ids` ({error!r})"
            ) from error


def _ids(values: ArrayLike) -> TokenIds:
    return checked_tokens(values, None)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    line = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(f"{path} cannot be read after line {line}: {error}") from error
