"""Traces as token ids on disk: read once, gone through many times, one at a time in memory."""

import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

import numpy as np

from retriever.drafter import Prediction, TokenIds
from retriever.replay.traces import Trace

_HEADER: Final = 4
"""Numbers before the tokens of a trace: its label, the lengths of prompt and output, and how many
predictions follow, each behind its own length and that of its label."""


class TraceSpool:
    """Traces in a temporary file, each with a number as its label.

    Attributes:
        num_traces: how many there are.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_traces = 0

    def write(self, trace: Trace, label: int = 0) -> None:
        """Append a trace."""
        num_predictions = len(trace.predictions)
        header = array("i", [label, len(trace.prompt), len(trace.output), num_predictions])
        self._file.write(header.tobytes())
        self._file.write(trace.prompt.astype(np.int32).tobytes())
        self._file.write(trace.output.astype(np.int32).tobytes())
        for each in trace.predictions:
            named = each.label.encode(errors="replace")
            self._file.write(array("i", [len(each.tokens), len(named)]).tobytes())
            self._file.write(each.tokens.astype(np.int32).tobytes() + named)
        self.num_traces += 1

    def labelled(self) -> Iterator[tuple[int, Trace]]:
        """Yield the label and the trace of each, in order; one iteration at a time."""
        self._file.seek(0)
        for _ in range(self.num_traces):
            label, num_prompt, num_output, num_predictions = self._read(_HEADER).tolist()
            tokens = self._read(num_prompt + num_output)
            predictions = tuple(self._prediction() for _ in range(num_predictions))
            yield label, Trace(tokens[:num_prompt], tokens[num_prompt:], predictions)

    def __iter__(self) -> Iterator[Trace]:
        return (trace for _, trace in self.labelled())

    def _prediction(self) -> Prediction:
        num_tokens, num_bytes = self._read(2).tolist()
        return Prediction(self._read(num_tokens), self._file.read(num_bytes).decode())

    def _read(self, count: int) -> TokenIds:
        return np.frombuffer(self._file.read(4 * count), np.int32)


@contextmanager
def trace_spool() -> Iterator[TraceSpool]:
    """Have an empty spool during the block."""
    with tempfile.TemporaryFile() as file:
        yield TraceSpool(file)
