"""Traces: one line of JSON for every pass of the target, written during decoding."""

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self, TextIO

from transformers import PreTrainedTokenizerBase

from decoder.errors import CutTraceError, TraceFileError
from decoder.observation import ObservedPass, Observer
from decoder.plugins.trace.viewer.traced_documents import DocumentFinder, TracedEvidence
from decoder.stopping import TextStream, plain_text
from indexer.errors import reason_of
from retriever.tree import ROOT, Source

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class TracedTree:
    """A draft, node by node, most probable first; see `retriever.tree.DraftTree`.

    Attributes:
        tokens: token id of each node.
        texts: text of each node's token.
        parents: index of each node's parent; -1 for children of the last committed token.
        probabilities: the drafter's estimates that a node and all its ancestors are accepted.
        sources: name of the dominant source of each node; see `retriever.tree.Source`.
    """

    tokens: list[int]
    texts: list[str]
    parents: list[int]
    probabilities: list[float]
    sources: list[str]

    @classmethod
    def parsed(cls, fields: dict[str, Any]) -> Self:
        """Return the tree from the fields of a line.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: the fields are not a valid tree.
        """
        tree = cls(
            list(map(int, fields["tokens"])),
            list(map(str, fields["texts"])),
            list(map(int, fields["parents"])),
            list(map(_finite, fields["probabilities"])),
            list(map(str, fields["sources"])),
        )
        if len({len(values) for values in asdict(tree).values()}) != 1:
            raise ValueError("the columns of its tree differ in length")
        if not all(ROOT <= parent < node for node, parent in enumerate(tree.parents)):
            raise ValueError("a parent in its tree is not an earlier node")
        return tree


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One line of a trace.

    Attributes:
        prompt: number of the prompt, from 1.
        step: number of the pass within the prompt; pass 1 reads the prompt.
        tree: the drafter's tree.
        num_kept: number of verified nodes; the budget keeps the first nodes of the tree.
        path: the accepted nodes.
        tokens: the committed tokens, accepted nodes first.
        text: text of the committed tokens.
        draft_us: microseconds in the drafter.
        target_us: microseconds in the target.
        host_us: microseconds in the decoding loop itself.
        pieces: the text that each committed token adds. It is empty for a token that ends within a
            character; a later token then adds the character.
        evidence: where indexes contain the verified nodes, if the writer looked this up.
        prompt_text: text of the prompt in the pass that reads it; else empty.
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
    pieces: list[str]
    evidence: list[TracedEvidence]
    prompt_text: str

    @property
    def width(self) -> int:
        """Tokens in the pass: the last committed token and the verified nodes."""
        return 1 + self.num_kept

    @property
    def is_prompt(self) -> bool:
        """Whether this is the pass that read the prompt; its cost differs from other passes."""
        return self.step == 1

    def accepted_sources(self) -> list[str]:
        """Return the sources of the accepted nodes, in order."""
        return [self.tree.sources[node] for node in self.path]

    @classmethod
    def parsed(cls, line: str) -> Self:
        """Return the step from a line.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: the line is not from a trace.
        """
        fields = _object(json.loads(line), "it")
        tree = TracedTree.parsed(_object(fields["tree"], "its tree"))
        traced = cls(
            int(fields["prompt"]),
            int(fields["step"]),
            tree,
            int(fields["num_kept"]),
            list(map(int, fields["path"])),
            list(map(int, fields["tokens"])),
            str(fields["text"]),
            _finite(fields["draft_us"]),
            _finite(fields["target_us"]),
            _finite(fields["host_us"]),
            list(map(str, fields["pieces"])),
            [TracedEvidence.parsed(_object(each, "evidence")) for each in fields["evidence"]],
            str(fields["prompt_text"]),
        )
        traced._check()
        return traced

    def _check(self) -> None:
        """Raise ValueError if parts of a line contradict one another."""
        num_nodes = len(self.tree.tokens)
        if not all(0 <= node < num_nodes for node in self.path):
            raise ValueError("its path contains a node outside its tree")
        if not all(0 <= each.node < num_nodes for each in self.evidence):
            raise ValueError("it has evidence for a node outside its tree")
        if not 0 <= self.num_kept <= num_nodes:
            raise ValueError("more nodes were verified than its tree has")
        if len(self.pieces) != len(self.tokens):
            raise ValueError("its pieces of text and its tokens differ in number")


class TraceWriter:
    """Writes passes to a file, compressed with gzip if its name ends in `.gz`.

    Args:
        path: path of the file; an existing file is replaced.
        tokenizer: decodes tokens to text.
        finder: finds documents that contain the verified nodes, between two passes.

    Attributes:
        num_passes: number of passes written so far.

    Raises:
        TraceFileError: the file cannot be written; observers and `close` raise this too.
    """

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, finder: DocumentFinder | None = None
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._finder = finder
        self.num_passes = 0
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

    def observer(self, prompt: int, text: str = "", context: Sequence[int] = ()) -> Observer:
        """Return an observer that writes the passes of a prompt.

        Args:
            prompt: number of the prompt.
            text: text of the prompt, for the trace.
            context: tokens of the prompt, which the search for documents uses as context.
        """
        last = list(context)[-DocumentFinder.MAX_MATCH :]
        sequence = _TracedSequence(prompt, text, TextStream(self._tokenizer), last)
        return lambda step: self._write(self._traced(sequence, step))

    def _write(self, traced: TracedStep) -> None:
        with self._translating():
            self._file.write(json.dumps(asdict(traced), ensure_ascii=False) + "\n")
            self.num_passes += 1
            if self._path.suffix != ".gz":
                self._file.flush()

    def _traced(self, sequence: "_TracedSequence", step: ObservedPass) -> TracedStep:
        times, finder, context = step.times, self._finder, sequence.context
        number = sequence.advance(step.tokens)
        return TracedStep(
            sequence.prompt,
            number,
            self._traced_tree(step),
            len(step.tree),
            step.path.tolist(),
            step.tokens,
            plain_text(self._tokenizer, step.tokens),
            _microseconds(times.draft_s),
            _microseconds(times.target_s),
            _microseconds(times.host_s),
            pieces=[sequence.stream.push([token]) for token in step.tokens],
            evidence=[] if finder is None else finder.evidence(context, step.tree),
            prompt_text=sequence.text if number == 1 else "",
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
            # Data that a full disk refused would be written again when the file is closed.
            with suppress(OSError, AttributeError):
                self._file.close()
            raise TraceFileError(
                f"cannot write the trace {self._path}: {reason_of(error)}"
            ) from error


@dataclass(slots=True)
class _TracedSequence:
    """A sequence whose passes are being written.

    Attributes:
        prompt: number of the prompt.
        text: text of the prompt.
        stream: decodes the sequence's tokens.
        context: the last tokens before the next pass.
        num_steps: number of passes so far.
    """

    prompt: int
    text: str
    stream: TextStream
    context: list[int]
    num_steps: int = 0

    def advance(self, tokens: Sequence[int]) -> int:
        """Add the tokens of a pass, and return the number of the pass."""
        self.context = [*self.context, *tokens][-DocumentFinder.MAX_MATCH :]
        self.num_steps += 1
        return self.num_steps


def check_trace(path: Path, what: str = "trace") -> None:
    """Refuse a path that a trace could not be written to, before decoding starts.

    Args:
        path: path of the file.
        what: name of the kind of file in messages.

    Raises:
        TraceFileError: the path is a folder or a write-protected file, or its folder is missing or
            not writable.
    """
    if path.is_dir():
        raise TraceFileError(f"cannot write the {what} {path}: it is a folder")
    if not path.parent.is_dir():
        raise TraceFileError(f"cannot write the {what} {path}: there is no folder {path.parent}")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise TraceFileError(f"cannot write the {what} {path}: the file is write-protected")
        return
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise TraceFileError(
            f"cannot write the {what} {path}: no file can be made in {path.parent}: "
            f"{reason_of(error)}"
        ) from error


def read_trace(path: Path) -> Iterator[TracedStep]:
    """Read the passes of a trace, in order.

    Raises:
        CutTraceError: the file ends in the middle of a line; all passes before it were yielded.
        TraceFileError: the file cannot be read, or a line is not from a trace.
    """
    number = 0
    try:
        with _opened(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _parsed_or_cut(line, path, number)
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path} is not text in UTF-8") from error
    except (EOFError, zlib.error) as error:
        if number:
            raise _cut(path, number + 1) from error
        raise TraceFileError(f"cannot read {path}: {reason_of(error)}") from error
    except OSError as error:
        raise TraceFileError(f"cannot read {path}: {reason_of(error)}") from error


def read_as_far(path: Path) -> tuple[list[TracedStep], str]:
    """Read a trace that may be cut, for example by a full disk or a killed process.

    Returns:
        The passes, and a sentence that says where the trace was cut; empty if it is complete.

    Raises:
        TraceFileError: the file cannot be read, a complete line is not from a trace, or the file
            has no pass.
    """
    steps: list[TracedStep] = []
    note = ""
    try:
        steps.extend(read_trace(path))
    except CutTraceError as error:
        note = str(error)
    if not steps:
        raise TraceFileError(f"{path} has no pass: nothing was generated while it was written")
    return steps, note


def _parsed_or_cut(line: bytes, path: Path, number: int) -> TracedStep:
    """Read a line; a line that is not JSON and has no end counts as cut, unless it is the first."""
    try:
        return _parsed(line.decode(), f"{path}:{number}")
    except (TraceFileError, UnicodeDecodeError) as error:
        is_json = isinstance(error, TraceFileError) and not isinstance(
            error.__cause__, json.JSONDecodeError
        )
        if number == 1 or line.endswith(b"\n") or is_json:
            raise
        raise _cut(path, number) from error


def _cut(path: Path, number: int) -> CutTraceError:
    return CutTraceError(
        f"{path} is cut in the middle of line {number}: only the lines before it are used"
    )


def _parsed(line: str, place: str) -> TracedStep:
    try:
        return TracedStep.parsed(line)
    except KeyError as error:
        raise TraceFileError(f"{place} is not a pass of a trace: it has no {error}") from error
    except json.JSONDecodeError as error:
        raise TraceFileError(f"{place} is not a pass of a trace: it is not JSON") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceFileError(f"{place} is not a pass of a trace: {reason_of(error)}") from error


def _microseconds(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 1)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not a JSON object")
    return value


def _opened(path: Path, mode: str) -> Any:
    opening = partial(gzip.open, path) if path.suffix == ".gz" else path.open
    return opening(mode, encoding=None if "b" in mode else "utf-8")
