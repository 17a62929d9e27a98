"""Traces as token ids on disk: read once, iterated over many times, one at a time in memory."""

import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from retriever.drafter import Prediction, TokenIds
from retriever.traces.traces import Trace

_HEADER: Final = 6
"""Number of integers before the tokens of a trace. They are its label, the lengths of prompt and
output, the number of predictions, and the lengths in bytes of its group and lane. Each prediction
follows its length and that of its label. Group and lane come last."""

Lane = Callable[[], Iterator[Trace]]
"""Function that yields the recorded outputs of a lane, in order."""


class TraceSpool:
    """Traces in a temporary file, each with a number as its label.

    A process that receives the spool reads from the same file, as long as the file exists.

    Attributes:
        num_traces: number of traces.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file: Any = file
        self._path = path
        self._at = 0  # read position; not shared by processes that share the file
        self.num_traces = 0
        self._places: list[int] = []
        self._names: list[tuple[str, str]] = []

    def write(self, trace: Trace, label: int = 0) -> None:
        """Append a trace."""
        self._places.append(self._file.tell())
        named = [each.encode(errors="replace") for each in (trace.group, trace.lane)]
        self._names.append((trace.group, trace.lane))
        sizes = [len(trace.prompt), len(trace.output), len(trace.predictions), *map(len, named)]
        header = array("i", [label, *sizes])
        self._file.write(header.tobytes())
        self._file.write(trace.prompt.astype(np.int32).tobytes())
        self._file.write(trace.output.astype(np.int32).tobytes())
        for each in trace.predictions:
            label_bytes = each.label.encode(errors="replace")
            self._file.write(array("i", [len(each.tokens), len(label_bytes)]).tobytes())
            self._file.write(each.tokens.astype(np.int32).tobytes() + label_bytes)
        self._file.write(b"".join(named))
        self._file.flush()  # for readers in this process or another
        self.num_traces += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}

    def labelled(self) -> Iterator[tuple[int, Trace]]:
        """Yield each trace with its label, in order."""
        for place in self._places:
            yield self._trace_at(place)

    def lanes(self) -> Iterator[list[Lane]]:
        """Yield the lanes of each group; groups and lanes are in the order of their first traces.

        A trace without a group is a separate group. Other code may iterate meanwhile.
        """
        groups: dict[tuple[str, int], dict[tuple[str, int], list[int]]] = {}
        for number, (group, lane) in enumerate(self._names):
            # Groups and lanes without a name are distinguished by the trace's number.
            lanes = groups.setdefault((group, -1 if group else number), {})
            lanes.setdefault((lane, -1 if lane else number), []).append(number)
        for lanes in groups.values():
            yield [partial(self._traces, numbers) for numbers in lanes.values()]

    def _traces(self, numbers: list[int]) -> Iterator[Trace]:
        return (self._trace_at(self._places[number])[1] for number in numbers)

    def _trace_at(self, place: int) -> tuple[int, Trace]:
        self._at = place
        header = self._read(_HEADER).tolist()
        label, num_prompt, num_output, num_predictions, *sizes = header
        tokens = self._read(num_prompt + num_output)
        predictions = tuple(self._prediction() for _ in range(num_predictions))
        group, lane = (self._bytes(size).decode() for size in sizes)
        return label, Trace(tokens[:num_prompt], tokens[num_prompt:], predictions, group, lane)

    def __iter__(self) -> Iterator[Trace]:
        return (trace for _, trace in self.labelled())

    def _prediction(self) -> Prediction:
        num_tokens, num_bytes = self._read(2).tolist()
        return Prediction(self._read(num_tokens), self._bytes(num_bytes).decode())

    def _read(self, count: int) -> TokenIds:
        return np.frombuffer(self._bytes(4 * count), np.int32)

    def _bytes(self, size: int) -> bytes:
        if self._file is None:  # in a process that received the spool
            self._file = Path(self._path).open("rb")  # noqa: SIM115  (until the process ends)
        read = os.pread(self._file.fileno(), size, self._at)
        self._at += size
        return read


@contextmanager
def trace_spool() -> Iterator[TraceSpool]:
    """Yield an empty spool, whose file is deleted after the block."""
    with tempfile.NamedTemporaryFile() as file:
        yield TraceSpool(file, file.name)
