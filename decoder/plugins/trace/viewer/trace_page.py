"""A trace as a single self-contained page that needs no network and no other file."""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer
from transformers import PreTrainedTokenizerBase

from decoder.errors import TraceFileError
from decoder.plugins.trace.trace import TracedStep, TraceWriter, check_trace, read_as_far
from decoder.plugins.trace.viewer.traced_documents import DocumentFinder
from indexer.errors import reason_of
from indexer.reader import Index
from retriever.operations.design import colours, hash_of, style_of

_WHOLE: Final = 10_000  # a probability of 1 in the page's data: four digits, as in a trace
_UNKNOWN: Final = "unspecified"  # CSS class of sources that this version does not know


class _Numbers:
    """Numbers values in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        """Return the number of a value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def of_each(self, values: Iterable[Hashable]) -> list[int]:
        """Return the number of each value."""
        return [self.of(value) for value in values]

    def values(self) -> list[Any]:
        """Return all values; the index of each is its number."""
        return list(self._numbers)


class _Collected:
    """The data of the page's script: passes as columns, and tables of repeated values."""

    def __init__(self) -> None:
        self._texts, self._sources, self._documents = _Numbers(), _Numbers(), _Numbers()
        self._prompts = _Numbers()
        self._sources.of_each(colours())  # known ones first, always in the same order
        self._asked: dict[int, str] = {}
        self._passes: list[dict[str, Any]] = []

    def add(self, step: TracedStep) -> None:
        """Add a pass."""
        tree = step.tree
        prompt = self._prompts.of(step.prompt)
        if step.prompt_text:
            self._asked[prompt] = step.prompt_text
        self._passes.append(
            {
                "prompt": prompt,
                "step": step.step,
                "kept": step.num_kept,
                "path": step.path,
                "pieces": self._texts.of_each(step.pieces),
                "ids": tree.tokens,
                "texts": self._texts.of_each(tree.texts),
                "parents": tree.parents,
                "probabilities": [round(_WHOLE * each) for each in tree.probabilities],
                "sources": self._sources.of_each(tree.sources),
                "times": [round(us) for us in (step.draft_us, step.target_us, step.host_us)],
                "evidence": [
                    [
                        each.node,
                        each.match_length,
                        each.count,
                        [
                            [self._documents.of((at.index, at.name, at.licence)), at.position]
                            for at in each.documents
                        ],
                    ]
                    for each in step.evidence
                ],
            }
        )

    def told(self, title: str, note: str) -> dict[str, Any]:
        """Return all data as plain values."""
        known = colours()
        return {
            "title": title,
            "note": note,
            "sources": [
                {"name": name, "css": name if name in known else _UNKNOWN}
                for name in self._sources.values()
            ],
            "texts": self._texts.values(),
            "documents": self._documents.values(),
            "prompts": [
                {"number": number, "text": self._asked.get(at, "")}
                for at, number in enumerate(self._prompts.values())
            ],
            "passes": self._passes,
        }


def page_of(steps: Iterable[TracedStep], title: str, note: str = "") -> str:
    """Return a trace as HTML.

    Text of models and documents is only data in the page, never markup or script. The page's
    security policy allows only its own script and style, by their hashes.

    Args:
        steps: the passes, at least one.
        title: heading of the page.
        note: note about the trace, for example where it was cut.
    """
    collected = _Collected()
    for step in steps:
        collected.add(step)
    style, script = style_of(_part("viewer.css")), _part("viewer.js")
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "style": style,
        "script": script,
        "data": _embeddable(collected.told(title, note)),
    }
    return re.sub("@(policy|style|script|data)@", lambda at: parts[at[1]], _part("viewer.html"))


def write_page(path: Path, steps: Iterable[TracedStep], title: str, note: str = "") -> None:
    """Write a trace as a page; see `page_of`.

    Raises:
        TraceFileError: the file cannot be written.
    """
    try:
        path.write_text(page_of(steps, title, note), encoding="utf-8")
    except OSError as error:
        raise TraceFileError(f"cannot write the page {path}: {reason_of(error)}") from error


def check_written(trace: Path | None, page: Path | None) -> None:
    """Refuse files that cannot be written, before a model is loaded.

    Raises:
        TraceFileError: a file cannot be written; the message says why.
    """
    if trace is not None:
        check_trace(trace)
    if page is not None:
        check_trace(page, "page")


@contextmanager
def written_passes(
    trace: Path | None,
    page: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    indexes: Sequence[Path],
) -> Iterator[TraceWriter | None]:
    """Write the passes of the block to a trace, a page, or both; with neither, yield `None`.

    The page is written at the end, even if an error ends the block. Then standard error names the
    written files.

    Args:
        trace: path of the trace, if wanted.
        page: path of the page, if wanted.
        tokenizer: decodes tokens to text.
        indexes: indexes that drafts come from; documents are looked up in them.

    Raises:
        TraceFileError: a file cannot be written.
        IndexerError: an index cannot be opened.
    """
    if trace is None and page is None:
        yield None
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(Index.open(path)) for path in indexes]
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foredraft-")))
        path = folder / "passes.jsonl" if trace is None else trace
        writer = TraceWriter(path, tokenizer, DocumentFinder(opened))
        try:
            with writer:
                yield writer
        finally:
            if page is not None and writer.num_passes:
                steps, note = read_as_far(path)
                write_page(page, steps, page.stem, note)
            written = [each for each in (trace, page) if each is not None and writer.num_passes]
            if written:
                typer.echo(f"wrote {' and '.join(map(str, written))}", err=True)


def _embeddable(values: Any) -> str:
    """Return JSON that is safe inside a script element, which HTML ends at the first `</`."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    return files("decoder.plugins.trace.viewer").joinpath(name).read_text(encoding="utf-8")
