"""Building an index: documents to tokens, tokens to segments, segments to a published catalog."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.catalog import CatalogWriter, Contents
from indexer.errors import IndexerError, SourceError, TokenizerError
from indexer.format import MAX_POSITIONS, SegmentRecord, token_dtype
from indexer.output import check_output, new_index_folder
from indexer.screening.screen import NO_SCREENING, Screen, ScreenOptions
from indexer.segments import (
    MAX_SEGMENT_TOKENS,
    Block,
    TokenisedDocument,
    gather_blocks,
    write_phrases,
    write_segment,
)
from indexer.sources import (
    DEFAULT_FIELD,
    DEFAULT_MAX_DOCUMENT_BYTES,
    find_files,
    read_documents,
)
from indexer.tally import BuildReport, Tally
from indexer.tokenise import EMPTY, tokenise, usable_texts
from indexer.tokenizer import DEFAULT_MODEL, Vocabulary, load_tokenizer, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnProgress = Callable[[Tally], None]
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
_Beginning = tuple[Iterable[TokenisedDocument], Vocabulary]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an index is built; every value has a default that fits most corpora.

    Attributes:
        field: key of the text in a line of JSON.
        max_document_bytes: longer documents are skipped.
        max_segment_tokens: a segment with more tokens holds a single document; from 1 to
            `MAX_POSITIONS`, beyond which positions do not fit the format.
        overwrite: replace an index that is at the output path already.
        screen: what must not get into the index; texts are screened, not tokens.

    Raises:
        IndexerError: `max_segment_tokens` is out of its range.
    """

    field: str = DEFAULT_FIELD
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    max_segment_tokens: int = MAX_SEGMENT_TOKENS
    overwrite: bool = False
    screen: ScreenOptions = NO_SCREENING

    def __post_init__(self) -> None:
        if not 1 <= self.max_segment_tokens <= MAX_POSITIONS:
            raise IndexerError(
                f"a segment cannot be limited to {self.max_segment_tokens} tokens: "
                f"choose from 1 to {MAX_POSITIONS}"
            )


DEFAULTS: Final = BuildOptions()


def build_index(
    sources: Sequence[Path | str],
    output: Path | str,
    tokenizer: "str | PreTrainedTokenizerBase" = DEFAULT_MODEL,
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Index folders, files and JSON lines.

    Args:
        sources: folders, files of text, and `.jsonl` or `.jsonl.gz` files of one document a line.
        output: the index's directory; it appears when it is whole, or not at all.
        tokenizer: of the model whose output is to be drafted: loaded, or a name that
            `locate_model` understands.
        options: how to build.
        on_progress: called after every document with the counts so far.

    Raises:
        SourceError: a source does not exist, or no document could be read.
        TokenizerError: the tokenizer cannot be loaded or used.
        IndexExistsError: the output path is taken.
        IndexerError: the index cannot be written.
    """
    check_output(Path(output), overwrite=options.overwrite)
    tally = Tally()
    files = find_files(sources, tally)
    if tally.num_bytes_found == 0:
        tally.skipped.update({EMPTY: len(files)} if files else {})
        raise _no_document(tally)
    documents = read_documents(files, options.field, options.max_document_bytes, tally)

    def begin() -> _Beginning:
        tokenised, vocabulary = _tokenised(documents, tokenizer, options, tally)
        return _watched(tokenised, tally, on_progress), vocabulary

    return _build(begin, Path(output), options, tally)


def build_from_texts(
    documents: Iterable[tuple[str, str]],
    output: Path | str,
    tokenizer: "str | PreTrainedTokenizerBase" = DEFAULT_MODEL,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index pairs of name and text; see `build_index`."""
    tally = Tally()
    begin = partial(_tokenised, documents, tokenizer, options, tally)
    return _build(begin, Path(output), options, tally)


def build_from_tokens(
    documents: Iterable[tuple[str, TokenIds]],
    output: Path | str,
    vocabulary: Vocabulary,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index pairs of name and token ids, which came from the tokenizer of `vocabulary`.

    Raises:
        SourceError: there is no document with a token.
        TokenizerError: a token id is outside the vocabulary.
        IndexExistsError: the output path is taken.
        IndexerError: the index cannot be written.
    """
    tally = Tally()
    checked = _checked(documents, vocabulary, tally)
    return _build(lambda: (checked, vocabulary), Path(output), options, tally)


def _tokenised(
    documents: Iterable[tuple[str, str]],
    tokenizer: "str | PreTrainedTokenizerBase",
    options: BuildOptions,
    tally: Tally,
) -> _Beginning:
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    vocabulary = vocabulary_of(loaded)
    screen = Screen(options.screen) if options.screen.is_active else None
    tally.screened = screen.tally if screen is not None else None
    usable = usable_texts(documents, options.max_document_bytes, tally, screen)
    return tokenise(usable, loaded, vocabulary, tally), vocabulary


def _build(
    begin: Callable[[], _Beginning], output: Path, options: BuildOptions, tally: Tally
) -> BuildReport:
    """Build an index of what `begin` returns; it is called once the output can be written."""
    with new_index_folder(output, overwrite=options.overwrite) as folder:
        documents, vocabulary = begin()
        started = time.perf_counter()
        blocks = gather_blocks(documents, options.max_segment_tokens)
        records = _write_index(folder, blocks, vocabulary)
        if not records:
            raise _no_document(tally)
    return BuildReport(
        output=str(output),
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_segments=len(records),
        num_bytes=tally.num_bytes,
        seconds=time.perf_counter() - started,
        skipped=dict(sorted(tally.skipped.items())),
        skipped_places=dict(sorted(tally.skipped_places.items())),
        screened=tally.screened,
    )


def _no_document(tally: Tally) -> SourceError:
    reasons = tally.describe_skipped()
    return SourceError("no document to index" + (f": skipped {reasons}" if reasons else ""))


def _write_index(
    folder: Path, blocks: Iterable[Block], vocabulary: Vocabulary
) -> list[SegmentRecord]:
    """Write segments, documents and phrases, then the catalog that makes them an index."""
    records = []
    with CatalogWriter(folder) as catalog, ThreadPoolExecutor(1) as pool:
        for block, written in _written(pool, folder, blocks, vocabulary.size):
            record = written.result()
            catalog.add_documents(record.name, block.documents)
            records.append(record)
        phrases = write_phrases(folder, records, vocabulary.size)
        catalog.publish(Contents(vocabulary, tuple(records), phrases))
    return records


def _written(
    pool: ThreadPoolExecutor, folder: Path, blocks: Iterable[Block], vocabulary_size: int
) -> Iterator[tuple[Block, "Future[SegmentRecord]"]]:
    """Write each block while the next one is gathered; no more than two are held."""
    waiting: deque[tuple[Block, Future[SegmentRecord]]] = deque()
    for ordinal, block in enumerate(blocks):
        written = pool.submit(write_segment, folder, ordinal, block, vocabulary_size)
        waiting.append((block, written))
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def _watched(
    documents: Iterable[TokenisedDocument], tally: Tally, on_progress: OnProgress | None
) -> Iterator[TokenisedDocument]:
    for document in documents:
        if on_progress is not None:
            on_progress(tally)
        yield document


def _checked(
    documents: Iterable[tuple[str, TokenIds]], vocabulary: Vocabulary, tally: Tally
) -> Iterator[TokenisedDocument]:
    dtype = token_dtype(vocabulary.size)
    for name, token_ids in documents:
        ids = np.asarray(token_ids)
        if ids.size == 0:
            tally.skipped[EMPTY] += 1
            continue
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise TokenizerError(f"the token ids of {name!r} are not a sequence of integers")
        for extreme in (int(ids.min()), int(ids.max())):
            if not 0 <= extreme < vocabulary.size:
                raise TokenizerError(
                    f"{name!r} has the token id {extreme}, which is outside the vocabulary of "
                    f"{vocabulary.size}"
                )
        yield TokenisedDocument(name, ids.astype(dtype))
