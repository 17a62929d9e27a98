"""Building an index: sources to parts, parts to segments, segments to a published snapshot."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from indexer.build_report import BuildReport, BuildTally
from indexer.errors import FormatVersionError, IndexerError, TokenizerError
from indexer.format.names import TOKENIZER_FILE, token_dtype
from indexer.format.output import check_output, new_index_folder, write_file
from indexer.format.records import (
    NOT_SCREENED,
    Contents,
    FileRecord,
    PhrasesRecord,
    ScreeningRecord,
)
from indexer.format.snapshots import hold_latest, publish
from indexer.screening.screen import screened_as
from indexer.sources import SourceDocument
from indexer.stages.build_options import DEFAULTS, BuildOptions
from indexer.stages.gathering import (
    COUNTING,
    READING,
    SORTING,
    OnProgress,
    chosen_pieces,
    gather_part,
    no_document,
    no_progress,
    part_tasks,
    planned,
    read_parts,
    renewed_phrases,
    scratch_folder,
    write_part,
    write_segments,
)
from indexer.stages.parts import Part, TokenisedDocument
from indexer.stages.segments import gather
from indexer.stages.tokenise import EMPTY, stored_encoder, stored_form, tokenise, usable_texts
from indexer.tokenizer import (
    DEFAULT_MODEL,
    CoreTokenizer,
    Vocabulary,
    loaded_tokenizer,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BuildOptions", "build_from_texts", "build_from_tokens", "build_index"]

_log = getLogger(__name__)

TokenIds = Sequence[int] | NDArray[np.integer[Any]]


def build_index(
    sources: Sequence[Path | str],
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Index folders, repositories, files of text, JSON lines and tables.

    Args:
        sources: files and folders; `-` is standard input.
        output: the index's directory; it appears when it is whole, or not at all.
        tokenizer: of the model whose output is to be drafted: loaded, or a name that
            `locate_model` understands. None: that of the index that is replaced, else
            `DEFAULT_MODEL`.
        options: how to build.
        on_progress: called as sources are read, with the counts so far.

    Raises:
        SourceError: a source does not exist, no document could be read, or more records were
            dropped than the options allow.
        TokenizerError: the tokenizer cannot be loaded or used.
        IndexExistsError: the output path is taken.
        IndexerError: the index cannot be written.
    """
    check_output(Path(output), overwrite=options.overwrite)
    tokenizer = tokenizer or tokenizer_for(Path(output))
    options = as_replaced(Path(output), options)
    tally = BuildTally()
    with (
        new_index_folder(
            Path(output), overwrite=options.overwrite, resume=options.resume
        ) as folder,
        scratch_folder(folder, READING, kept=options.resume) as scratch,
    ):
        tell = on_progress or no_progress
        tell(tally.now("finding sources"))
        blocks = planned(sources, options, tally, scratch)
        options = options.for_blocks(len(blocks))
        tell(tally.now("loading the tokenizer"))
        loaded = loaded_tokenizer(tokenizer)
        options = options.with_template_of(loaded)
        started = time.perf_counter()
        vocabulary, stored = store_tokenizer(loaded, folder)
        kept_as = stored.checksum if options.resume else ""
        tasks = part_tasks(blocks, scratch, folder / TOKENIZER_FILE, vocabulary, options, kept_as)
        parts = read_parts(options.engine, tasks, tally, on_progress, write_part)
        options.check_dropped(tally)
        screening = options.screen.record
        contents = write_index(
            folder, parts, vocabulary, stored, options, tally, kept_as, screening, tell
        )
    return report_of(output, contents, tally, started)


def build_from_texts(
    documents: Iterable[tuple[str, str]],
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index pairs of name and text; see `build_index`. Such a build is not resumed."""
    tokenizer = tokenizer or tokenizer_for(Path(output))
    options = as_replaced(Path(output), options)
    tally = BuildTally()
    with new_index_folder(Path(output), overwrite=options.overwrite) as folder:
        loaded = loaded_tokenizer(tokenizer)
        started = time.perf_counter()
        vocabulary, stored = store_tokenizer(loaded, folder)
        named = (SourceDocument(name, "", text) for name, text in documents)
        usable = usable_texts(named, options.sources.max_document_bytes, tally, options.screen)
        encoder = stored_encoder(folder / TOKENIZER_FILE)
        tokenised = tokenise(usable, encoder, token_dtype(vocabulary.size), tally)
        with scratch_folder(folder, READING) as scratch:
            size, keep = vocabulary.size, options.keep_texts
            parts = [gather_part(tokenised, scratch / "part", size, keep_texts=keep)]
            screening = options.screen.record
            contents = write_index(
                folder, parts, vocabulary, stored, options, tally, screening=screening
            )
    return report_of(output, contents, tally, started)


def build_from_tokens(
    documents: Iterable[tuple[str, TokenIds]],
    output: Path | str,
    vocabulary: Vocabulary,
    options: BuildOptions = DEFAULTS,
) -> BuildReport:
    """Index pairs of name and token ids, made by the tokenizer of `vocabulary`.

    Raises:
        SourceError: there is no document with a token.
        TokenizerError: a token id is outside the vocabulary.
        IndexExistsError: the output path is taken.
        IndexerError: the index cannot be written.
    """
    tally = BuildTally()
    started = time.perf_counter()
    with (
        new_index_folder(Path(output), overwrite=options.overwrite) as folder,
        scratch_folder(folder, READING) as scratch,
    ):
        checked = _checked(documents, vocabulary, tally)
        parts = [gather_part(checked, scratch / "part", vocabulary.size, keep_texts=False)]
        contents = write_index(folder, parts, vocabulary, None, options, tally)
    return report_of(output, contents, tally, started)


def tokenizer_for(output: Path) -> str:
    """Return the name of the tokenizer of the index at a path, the default where there is none.

    Raises:
        TokenizerError: there is an index that does not say which tokenizer it has.
    """
    try:
        before = _replaced(output)
    except FormatVersionError as error:
        raise TokenizerError(
            f"{output} is an index of another format, which cannot say here which tokenizer it "
            "has: name the tokenizer (--tokenizer)"
        ) from error
    if before is None or before.tokenizer is None:
        return DEFAULT_MODEL
    name = before.vocabulary.name
    if not name:
        raise TokenizerError(
            f"the index at {output} was built with a tokenizer that has no name: name the "
            "tokenizer (--tokenizer)"
        )
    if name != DEFAULT_MODEL:
        _log.info("the tokenizer is %s, as that of the index that is replaced", name)
    return name


def as_replaced(output: Path, options: BuildOptions) -> BuildOptions:
    """Return the options, with what the index that is replaced was screened for.

    Raises:
        IndexerError: a list of phrases was left out of it, and is not named.
    """
    with suppress(FormatVersionError):
        before = _replaced(output)
        if before is not None:
            return replace(options, screen=screened_as(before.screening, options.screen, output))
    return options


def _replaced(output: Path) -> Contents | None:
    """Return what an index holds; `None` where there is none that can be read."""
    try:
        held = hold_latest(output)
    except FormatVersionError:
        raise
    except IndexerError:
        return None
    with closing(held):
        return held.contents


def report_of(
    output: Path | str, contents: Contents, tally: BuildTally, started: float
) -> BuildReport:
    """Return the report of a build."""
    return BuildReport(
        output=str(output),
        num_documents=sum(record.num_documents for record in contents.segments),
        num_tokens=contents.num_tokens,
        num_segments=len(contents.segments),
        num_bytes=tally.num_bytes,
        seconds=time.perf_counter() - started,
        skipped=dict(sorted(tally.skipped.items())),
        skipped_places=dict(sorted(tally.skipped_places.items())),
        screened=tally.screened,
        stage_seconds=dict(tally.stage_seconds),
        remedies=dict(tally.remedies),
        num_dropped=tally.num_dropped,
        conversations=dict(tally.conversations),
    )


def store_tokenizer(
    tokenizer: "CoreTokenizer | PreTrainedTokenizerBase", folder: Path
) -> tuple[Vocabulary, FileRecord]:
    """Write the tokenizer into an index."""
    content = stored_form(tokenizer)
    write_file(folder / TOKENIZER_FILE, content)
    return vocabulary_of(tokenizer), FileRecord.of(content)


def write_index(  # noqa: PLR0913, PLR0917
    folder: Path,
    parts: Sequence[Part],
    vocabulary: Vocabulary,
    tokenizer: FileRecord | None,
    options: BuildOptions,
    tally: BuildTally,
    kept_as: str = "",
    screening: ScreeningRecord = NOT_SCREENED,
    tell: OnProgress = no_progress,
) -> Contents:
    """Write segments and phrases, then the snapshot that makes them an index.

    Args:
        folder: the index's directory.
        parts: documents, tokenised.
        vocabulary: of the tokenizer.
        tokenizer: the stored one.
        options: how to build.
        tally: counts.
        kept_as: as for `write_segments`.
        screening: of the documents.
        tell: is told what is done.
    """
    most = options.segment_tokens(vocabulary.size)
    groups = gather(chosen_pieces(parts, [], options, tally), most)
    tell(tally.now(SORTING))
    with tally.stage(SORTING):
        segments = write_segments(options.engine, folder, groups, 0, vocabulary.size, kept_as)
    if not segments:
        raise no_document(tally)
    nothing = PhrasesRecord("", (), {})
    contents = Contents(vocabulary, tuple(segments), nothing, len(segments), tokenizer, screening)
    tell(tally.now(COUNTING))
    with tally.stage(COUNTING):
        phrases = renewed_phrases(options.engine, folder, 0, contents)
    contents = replace(contents, phrases=phrases)
    publish(folder, 0, contents)
    return contents


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
