"""Traces: one line of JSON for every pass of the target, written while decoding goes on."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from transformers import PreTrainedTokenizerBase

from decoder.errors import TraceFileError
from decoder.observation import ObservedPass, Observer
from decoder.stopping import plain_text
from indexer.errors import reason_of
from retriever.tree import Source

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class TracedTree:
    """A draft, node by node, most probable first; see `retriever.tree.DraftTree`.

    Attributes:
        tokens: token ids.
        texts: the same as text.
        parents: index of each node's parent, -1 for children of the last committed token.
        probabilities: that the node and all its ancestors are accepted, as the drafter says.
        sources: the dominant source of each node, by name; see `retriever.tree.Source`.
    """

    tokens: list[int]
    texts: list[str]
    parents: list[int]
    probabilities: list[float]
    sources: list[str]

    @classmethod
    def parsed(cls, fields: dict[str, Any]) -> Self:
        """Take over what a line says of its tree.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is no tree.
        """
        tree = cls(
            list(map(int, fields["tokens"])),
            list(map(str, fields["texts"])),
            list(map(int, fields["parents"])),
            list(map(float, fields["probabilities"])),
            list(map(str, fields["sources"])),
        )
        if len({len(values) for values in asdict(tree).values()}) != 1:
            raise ValueError("the columns of its tree differ in length")
        return tree


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One line of a trace.

    Attributes:
        prompt: number of the prompt, from 1.
        step: number of the pass, from 1, which is the prompt's own.
        tree: what the drafter sent.
        num_kept: nodes that the budget left: the tree's first ones.
        path: the nodes that were accepted.
        tokens: what was committed, accepted nodes first.
        text: the same as text.
        draft_us: microseconds in the drafter.
        target_us: microseconds in the target.
        host_us: microseconds in the loop itself.
    """

    prompt: int
    step: int
    tree: TracedTree
    num_kept: int
    path: list[int]
    tokens: list[int]
    text: str
    draft_us: float
    target_us: float
    host_us: float

    @property
    def width(self) -> int:
        """Tokens in the pass: the last committed one and the nodes that were verified."""
        return 1 + self.num_kept

    @property
    def is_prompt(self) -> bool:
        """Whether this is the pass that read the prompt, which has a cost of its own."""
        return self.step == 1

    def accepted_sources(self) -> list[str]:
        """Return the sources of the accepted nodes, in order."""
        return [self.tree.sources[node] for node in self.path]

    @classmethod
    def parsed(cls, line: str) -> Self:
        """Read a line.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is not one of a trace.
        """
        fields = _object(json.loads(line), "it")
        tree = TracedTree.parsed(_object(fields["tree"], "its tree"))
        path = list(map(int, fields["path"]))
        if not all(0 <= node < len(tree.tokens) for node in path):
            raise ValueError("its path leaves its tree")
        return cls(
            int(fields["prompt"]),
            int(fields["step"]),
            tree,
            int(fields["num_kept"]),
            path,
            list(map(int, fields["tokens"])),
            str(fields["text"]),
            *(float(fields[name]) for name in ("draft_us", "target_us", "host_us")),
        )


class TraceWriter:
    """Writes passes to a file, compressed with gzip where its name ends in `.gz`.

    Args:
        path: where to; a file that is there is replaced.
        tokenizer: tells the text of tokens.

    Raises:
        TraceFileError: the file cannot be written, now or while observing or closing.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._text_of = cache(lambda token: plain_text(tokenizer, [token]))
        with self._translating():
            self._file: TextIO = _opened(path, "wt")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except TraceFileError:
            if error is None:  # the first error is raised
                raise

    def close(self) -> None:
        """Write the remaining passes and close the file; a second call does nothing."""
        with self._translating():
            self._file.close()

    def observer(self, prompt: int) -> Observer:
        """Return what writes the passes of a prompt, whose number is given."""
        numbers = iter(range(1, 2**63))
        return lambda step: self._write(self._traced(prompt, next(numbers), step))

    def _write(self, traced: TracedStep) -> None:
        with self._translating():
            self._file.write(json.dumps(asdict(traced), ensure_ascii=False) + "\n")
            if self._path.suffix != ".gz":
                self._file.flush()

    def _traced(self, prompt: int, number: int, step: ObservedPass) -> TracedStep:
        times = step.times
        return TracedStep(
            prompt,
            number,
            self._traced_tree(step),
            len(step.tree),
            step.path.tolist(),
            step.tokens,
            plain_text(self._tokenizer, step.tokens),
            *(
                round(seconds * _MICROSECONDS, 1)
                for seconds in (times.draft_s, times.target_s, times.host_s)
            ),
        )

    def _traced_tree(self, step: ObservedPass) -> TracedTree:
        tree = step.drafted
        tokens = tree.token_ids.tolist()
        return TracedTree(
            tokens,
            [self._text_of(token) for token in tokens],
            tree.parents.tolist(),
            [round(p, 4) for p in tree.probabilities.tolist()],
            [Source(source).name.lower() for source in tree.sources.tolist()],
        )

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What a full disk did not take would be tried again when the file is closed.
            with suppress(OSError, AttributeError):
                self._file.close()
            raise TraceFileError(
                f"cannot write the trace {self._path}: {reason_of(error)}"
            ) from error


def check_trace(path: Path) -> None:
    """Refuse a place that no trace can be written to, before anything is done for one.

    Raises:
        TraceFileError: it is a folder, or in one that is not there.
    """
    if path.is_dir():
        raise TraceFileError(f"cannot write the trace {path}: it is a folder")
    if not path.parent.is_dir():
        raise TraceFileError(f"cannot write the trace {path}: there is no folder {path.parent}")


def read_trace(path: Path) -> Iterator[TracedStep]:
    """Read the passes of a trace, in order.

    Raises:
        TraceFileError: the file cannot be read, or a line is not one of a trace.
    """
    try:
        with _opened(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                yield _parsed(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path} is not text in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFileError(f"cannot read {path}: {reason_of(error)}") from error


def _parsed(line: str, place: str) -> TracedStep:
    try:
        return TracedStep.parsed(line)
    except KeyError as error:
        raise TraceFileError(f"{place} is no pass of a trace: it has no {error}") from error
    except json.JSONDecodeError as error:
        raise TraceFileError(f"{place} is no pass of a trace, nor any JSON") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceFileError(f"{place} is no pass of a trace: {reason_of(error)}") from error


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is no JSON object")
    return value


def _opened(path: Path, mode: str) -> Any:
    opening = partial(gzip.open, path) if path.suffix == ".gz" else path.open
    return opening(mode, encoding="utf-8")
