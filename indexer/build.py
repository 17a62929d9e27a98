"""Builds an index: sources become parts, parts become segments, segments become a snapshot."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from indexer.build_report import BuildReport, BuildTally
from indexer.engines import Serial
from indexer.errors import FormatVersionError, IndexerError, SourceError, TokenizerError
from indexer.format.names import SEGMENTS_FOLDER, TEXTS_FILE, TOKENIZER_FILE, token_dtype
from indexer.format.output import check_output, new_index_folder, write_file
from indexer.format.records import (
    NOT_SCREENED,
    Contents,
    FileRecord,
    PhrasesRecord,
    ScreeningRecord,
)
from indexer.format.same_folder import from_same_folder
from indexer.format.snapshots import HeldSnapshot, hold_latest, publish
from indexer.stages.build_options import DEFAULTS, BuildOptions
from indexer.stages.gathering import (
    READING,
    Block,
    Building,
    GivenTexts,
    KeptTexts,
    OnProgress,
    gather_part,
    no_document,
    no_progress,
    planned,
    scratch_folder,
)
from indexer.stages.parts import Part, TokenisedDocument
from indexer.stages.screening import record_of, screened_as
from indexer.stages.segments import gather
from indexer.stages.tokenise import EMPTY, stored_form
from indexer.tokenizer import (
    DEFAULT_MODEL,
    CoreTokenizer,
    Vocabulary,
    loaded_tokenizer,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BuildOptions",
    "build_from_index",
    "build_from_texts",
    "build_from_tokens",
    "build_index",
]

_log = getLogger(__name__)

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

_Find = Callable[[Path, BuildTally], Sequence[Block]]
"""Returns the blocks of documents to read, given a folder for temporary files and the counts."""


def build_index(
    sources: Sequence[Path | str],
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Index folders, repositories, text files, JSON lines and tables.

    Args:
        sources: files and folders; `-` is standard input.
        output: directory of the index. It appears only once the index is complete.
        tokenizer: tokenizer of the target model: a loaded tokenizer, or a name that `locate_model`
            understands. None means the tokenizer of the replaced index, or `DEFAULT_MODEL` if no
            index is replaced.
        options: build options.
        on_progress: called with the current counts while sources are read.

    Raises:
        SourceError: a source does not exist, no document could be read, or more records were
            dropped than the options allow.
        TokenizerError: the tokenizer cannot be loaded or used.
        IndexExistsError: the output path exists and may not be replaced.
        IndexerError: the index cannot be written.
    """
    tell = on_progress or no_progress

    def find(scratch: Path, tally: BuildTally) -> Sequence[Block]:
        return planned(sources, options, tally, tell, scratch)

    return _build(output, tokenizer, options, tell, find)


def build_from_texts(
    documents: Iterable[tuple[str, str]],
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index (name, text) pairs in this process; see `build_index`. It cannot be resumed."""
    here = replace(options, engine=Serial(options.engine.memory_bytes), resume=False)
    return _build(output, tokenizer, here, no_progress, lambda *_: [GivenTexts(documents)])


def build_from_index(
    source: Path | str,
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Rebuild an index from the texts, names and licences that another index stores.

    Args:
        source: directory of an index that stores its texts.
        output: as for `build_index`; may be the same directory.
        tokenizer: as for `build_index`.
        options: as for `build_index`, with three differences. Documents may have any length,
            duplicates in the old index are kept, and the build cannot be resumed.
        on_progress: as for `build_index`.

    Raises:
        SourceError: the index does not store its texts.
        IndexerError: the index at `source` cannot be read; otherwise as for `build_index`.
    """
    source = Path(source)
    check_output(Path(output), overwrite=options.overwrite)
    with closing(from_same_folder(source, lambda: hold_latest(source), HeldSnapshot.close)) as held:
        contents = held.contents
        if not contents.keeps_texts:
            raise SourceError(
                f"{source} does not keep its texts: build it with --keep-texts, "
                "or name the sources again"
            )
        folder = source.resolve() / SEGMENTS_FOLDER

        def find(_: Path, tally: BuildTally) -> Sequence[Block]:
            blocks = [
                KeptTexts(Part.of_segment(folder / each.name, each), each.files[TEXTS_FILE])
                for each in contents.segments
            ]
            tally.num_bytes_found = sum(block.file.num_bytes for block in blocks)
            return blocks

        every = replace(options, keep_duplicates=True, resume=False)
        tell = on_progress or no_progress
        return _build(output, tokenizer, every, tell, find, contents.screening)


def build_from_tokens(
    documents: Iterable[tuple[str, TokenIds]],
    output: Path | str,
    vocabulary: Vocabulary,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index (name, token ids) pairs; the ids belong to the tokenizer of `vocabulary`.

    Raises:
        SourceError: no document has a token.
        TokenizerError: a token id is outside the vocabulary.
        IndexExistsError: the output path exists and may not be replaced.
        IndexerError: the index cannot be written.
    """
    tally = BuildTally()
    started = time.perf_counter()
    with (
        new_index_folder(Path(output), overwrite=options.overwrite) as folder,
        scratch_folder(folder, READING) as scratch,
    ):
        building = Building(folder, vocabulary, options, tally)
        checked = _checked(documents, vocabulary, tally)
        part = gather_part(checked, scratch / "part", vocabulary.size, keep_texts=False)
        contents = _write(building, [part])
    return _report(output, contents, tally, started)


def _build(  # noqa: PLR0913, PLR0917
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None",
    options: BuildOptions,
    tell: OnProgress,
    find: _Find,
    before: ScreeningRecord = NOT_SCREENED,
) -> BuildReport:
    """Build an index from blocks of documents.

    Args:
        output: as for `build_index`.
        tokenizer: as for `build_index`.
        options: as for `build_index`.
        tell: progress callback.
        find: finds the blocks.
        before: screening that was already applied to the documents.
    """
    check_output(Path(output), overwrite=options.overwrite)
    named, options = as_replaced(Path(output), tokenizer, options)
    resume, tally = options.resume, BuildTally()
    with (
        new_index_folder(Path(output), overwrite=options.overwrite, resume=resume) as folder,
        scratch_folder(folder, READING, kept=resume) as scratch,
    ):
        blocks = find(scratch, tally)
        tell(tally.now("loading the tokenizer"))
        loaded = loaded_tokenizer(named)
        options = options.for_blocks(len(blocks)).with_template_of(loaded)
        started = time.perf_counter()
        content = stored_form(loaded)
        write_file(folder / TOKENIZER_FILE, content)
        stored = FileRecord.of(content)
        kept_as = stored.checksum if resume else ""
        building = Building(folder, vocabulary_of(loaded), options, tally, tell, kept_as)
        now = record_of(options.screen)
        screening = ScreeningRecord(
            before.redacted or now.redacted, now.excluded or before.excluded
        )
        contents = _write(building, building.read(blocks, scratch), stored, screening)
    return _report(output, contents, tally, started)


def _write(
    building: Building,
    parts: Sequence[Part],
    tokenizer: FileRecord | None = None,
    screening: ScreeningRecord = NOT_SCREENED,
) -> Contents:
    """Write segments and phrase tables, then publish them as a snapshot.

    Args:
        building: the build in progress.
        parts: tokenised documents.
        tokenizer: record of the stored tokenizer.
        screening: screening of the documents.
    """
    vocabulary = building.vocabulary
    most = building.options.most_tokens(vocabulary.size)
    segments = building.segments(gather(building.chosen(parts), most), 0)
    if not segments:
        raise no_document(building.tally)
    nothing = PhrasesRecord("", (), {})
    contents = Contents(
        vocabulary,
        tuple(segments),
        nothing,
        len(segments),
        tokenizer,
        screening,
        building.options.sources.licence,
    )
    contents = replace(contents, phrases=building.phrases(0, contents))
    publish(building.folder, 0, contents)
    return contents


def as_replaced(
    output: Path,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None",
    options: BuildOptions,
) -> "tuple[str | CoreTokenizer | PreTrainedTokenizerBase, BuildOptions]":
    """Return the tokenizer and options, completed from the replaced index if there is one.

    Args:
        output: directory of the index.
        tokenizer: requested tokenizer. None means the tokenizer of the replaced index, or
            `DEFAULT_MODEL` if there is none.
        options: requested options. New documents are screened at least as strictly as the old ones.

    Raises:
        TokenizerError: the index does not say which tokenizer it was built with.
        IndexerError: the index was screened with a list of phrases, but no list is given now.
    """
    try:
        before = _replaced(output)
    except FormatVersionError as error:
        if tokenizer is not None:
            return tokenizer, options
        raise TokenizerError(
            f"{output} is an index of another format, from which this version cannot read the "
            "tokenizer: name the tokenizer (--tokenizer)"
        ) from error
    if before is None:
        return tokenizer or DEFAULT_MODEL, options
    screen = screened_as(before.screening, options.screen, output)
    options = replace(options, screen=screen).with_licence(before.licence, output)
    return tokenizer or _tokenizer_of(before, output), options


def _tokenizer_of(before: Contents, output: Path) -> str:
    """Return the name of an index's tokenizer, or the default if it was built from token ids."""
    name = before.vocabulary.name
    if before.tokenizer is None:
        return DEFAULT_MODEL
    if not name:
        raise TokenizerError(
            f"the index at {output} was built with a tokenizer that has no name: name the "
            "tokenizer (--tokenizer)"
        )
    if name != DEFAULT_MODEL:
        _log.info("the tokenizer is %s, as in the index that is replaced", name)
    return name


def _replaced(output: Path) -> Contents | None:
    """Return the contents of an index, or `None` if no readable index exists."""
    try:
        held = hold_latest(output)
    except FormatVersionError:
        raise
    except IndexerError:
        return None
    with closing(held):
        return held.contents


def _report(
    output: Path | str, contents: Contents, tally: BuildTally, started: float
) -> BuildReport:
    return BuildReport(
        output=str(output),
        num_documents=sum(record.num_documents for record in contents.segments),
        num_tokens=contents.num_tokens,
        num_segments=len(contents.segments),
        seconds=time.perf_counter() - started,
        tally=tally,
    )


def _checked(
    documents: Iterable[tuple[str, TokenIds]], vocabulary: Vocabulary, tally: BuildTally
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
        yield TokenisedDocument(name, "", ids.astype(dtype))
