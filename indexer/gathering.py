"""From sources to the documents that will be indexed: read, tokenised, each once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexer.engines import Engine
from indexer.errors import SourceError
from indexer.options import BuildOptions
from indexer.parts import Part
from indexer.segments import Piece
from indexer.sources import SourceBlock, plan
from indexer.stages import PartTask, without_duplicates
from indexer.tally import Tally
from indexer.tokenise import EMPTY
from indexer.tokenizer import Vocabulary

OnProgress = Callable[[Tally], None]


class ReadingTask(Protocol):
    """A task that writes a part."""

    @property
    def memory_bytes(self) -> int:
        """How much memory it takes at most."""
        ...


_Task = TypeVar("_Task", bound=ReadingTask)


def planned(
    sources: Sequence[Path | str], options: BuildOptions, tally: Tally, scratch: Path
) -> list[SourceBlock]:
    """Return what there is to read, in blocks.

    Raises:
        SourceError: a source does not exist, or all of them are empty.
    """
    blocks = plan(sources, options.sources, tally, scratch)
    if tally.num_bytes_found == 0:
        num_files = sum(len(block.pieces) for block in blocks)
        tally.skipped.update({EMPTY: num_files} if num_files else {})
        raise no_document(tally)
    return blocks


def part_tasks(
    blocks: Sequence[SourceBlock],
    scratch: Path,
    tokenizer: Path,
    vocabulary: Vocabulary,
    options: BuildOptions,
) -> list[PartTask]:
    """Return what is to be read, in pieces."""
    return [
        PartTask(
            scratch / f"{number:08d}",
            block,
            tokenizer,
            vocabulary.size,
            options.sources,
            options.screen,
            options.keep_texts,
        )
        for number, block in enumerate(blocks)
    ]


def read_parts(
    engine: Engine,
    tasks: Sequence[_Task],
    tally: Tally,
    on_progress: OnProgress | None,
    write: Callable[[_Task], tuple[Part, Tally]],
) -> list[Part]:
    """Read and tokenise all sources, each task as `write` does; count."""
    if on_progress is not None:
        on_progress(tally)
    parts = []
    need = max((task.memory_bytes for task in tasks), default=0)
    with tally.stage("reading"):
        for part, counted in engine.map(write, tasks, need):
            tally.merge(counted)
            tally.num_documents += part.num_documents
            tally.num_tokens += part.num_tokens
            parts.append(part)
            if on_progress is not None:
                on_progress(tally)
    return parts


def chosen_pieces(
    parts: Sequence[Part],
    known: Sequence[NDArray[np.uint8]],
    options: BuildOptions,
    tally: Tally,
) -> list[Piece]:
    """Return the documents of parts that are to be indexed."""
    filled = [part for part in parts if part.num_documents]
    if options.deduplicate and filled:
        return without_duplicates(filled, known, tally)
    return [Piece(part, ((0, part.num_documents),)) for part in filled]


def no_document(tally: Tally) -> SourceError:
    """Return the error for sources that hold nothing to be indexed."""
    reasons = tally.describe_skipped()
    return SourceError("no document to index" + (f": skipped {reasons}" if reasons else ""))
