"""Building the documents of an index for another tokenizer, from the texts that it keeps."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.build import as_replaced, report_of, store_tokenizer, tokenizer_for, write_index
from indexer.build_report import BuildReport, BuildTally
from indexer.errors import SourceError
from indexer.format.names import SEGMENTS_FOLDER, TEXTS_FILE, TOKENIZER_FILE, token_dtype
from indexer.format.opening import check_file
from indexer.format.output import check_output, new_index_folder
from indexer.format.records import FileRecord, ScreeningRecord
from indexer.format.same_folder import from_same_folder
from indexer.format.snapshots import HeldSnapshot, hold_latest
from indexer.screening.screen import ScreenOptions
from indexer.sources import DEFAULT_MAX_DOCUMENT_BYTES, SourceDocument
from indexer.stages.build_options import DEFAULTS, BuildOptions
from indexer.stages.gathering import (
    READING,
    OnProgress,
    gather_part,
    no_progress,
    read_parts,
    scratch_folder,
)
from indexer.stages.parts import Part
from indexer.stages.tokenise import stored_encoder, tokenise, tokenising_bytes, usable_texts
from indexer.tokenizer import CoreTokenizer, loaded_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_from_index(
    source: Path | str,
    output: Path | str,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase | None" = None,
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Build all documents of an index again, with their names and licences.

    Args:
        source: the directory of an index that keeps its texts.
        output: as for `build_index`; may be the same.
        tokenizer: as for `build_index`.
        options: as for `build_index`. Documents of any length are taken, and repeated ones as
            often as the index has them.
        on_progress: as for `build_index`.

    Raises:
        SourceError: the index does not keep its texts.
        IndexerError: the index at `source` cannot be read; otherwise as `build_index`.
    """
    source = Path(source)
    check_output(Path(output), overwrite=options.overwrite)
    tokenizer = tokenizer or tokenizer_for(Path(output))
    options = as_replaced(Path(output), options)
    held = from_same_folder(source, lambda: hold_latest(source), HeldSnapshot.close)
    try:
        if not held.contents.keeps_texts:
            raise SourceError(
                f"{source} does not keep its texts: build it with --keep-texts, "
                "or name the sources again"
            )
        return _build(source, held, Path(output), tokenizer, options, on_progress)
    finally:
        held.close()


@dataclass(frozen=True, slots=True)
class RetokeniseTask:
    """All that `retokenise` needs to know.

    Attributes:
        folder: of the part, to be made.
        part: the segment whose texts are read.
        texts: the record of their file.
        tokenizer: the stored tokenizer.
        vocabulary_size: largest token id plus one.
        screening: phrases and secrets to remove.
        keep_texts: whether texts are stored again.
    """

    folder: Path
    part: Part
    texts: FileRecord
    tokenizer: Path
    vocabulary_size: int
    screening: ScreenOptions
    keep_texts: bool

    @property
    def memory_bytes(self) -> int:
        """How much memory `retokenise` takes for documents of the usual limit."""
        return tokenising_bytes(DEFAULT_MAX_DOCUMENT_BYTES)


def retokenise(task: RetokeniseTask) -> tuple[Part, BuildTally]:
    """Read and tokenise the texts of a segment; return the part and its counts.

    Raises:
        DamagedIndexError: the file of texts is damaged.
        IndexerError: the disk is full or refuses.
    """
    tally = BuildTally()
    check_file(task.part.folder / TEXTS_FILE, task.texts)
    kept = (SourceDocument(*document) for document in task.part.texts())
    usable = usable_texts(kept, sys.maxsize, tally, task.screening)
    encoder = stored_encoder(task.tokenizer)
    documents = tokenise(usable, encoder, token_dtype(task.vocabulary_size), tally)
    part = gather_part(documents, task.folder, task.vocabulary_size, keep_texts=task.keep_texts)
    tally.num_bytes_read = task.texts.num_bytes
    return part, tally


def _build(  # noqa: PLR0913, PLR0917
    source: Path,
    held: HeldSnapshot,
    output: Path,
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase",
    options: BuildOptions,
    on_progress: OnProgress | None,
) -> BuildReport:
    tally = BuildTally()
    records = held.contents.segments
    tally.num_bytes_found = sum(record.files[TEXTS_FILE].num_bytes for record in records)
    folder_of_texts = Path(source).resolve() / SEGMENTS_FOLDER
    with new_index_folder(output, overwrite=options.overwrite) as folder:
        tell = on_progress or no_progress
        tell(tally.now("loading the tokenizer"))
        loaded = loaded_tokenizer(tokenizer)
        started = time.perf_counter()
        vocabulary, stored = store_tokenizer(loaded, folder)
        with scratch_folder(folder, READING) as scratch:
            tasks = [
                RetokeniseTask(
                    scratch / record.name,
                    Part.of_segment(folder_of_texts / record.name, record),
                    record.files[TEXTS_FILE],
                    folder / TOKENIZER_FILE,
                    vocabulary.size,
                    options.screen,
                    options.keep_texts,
                )
                for record in records
            ]
            parts = read_parts(options.engine, tasks, tally, on_progress, retokenise)
            kept = replace(options, deduplicate=False)
            before, now = held.contents.screening, options.screen.record
            screening = ScreeningRecord(
                before.redacted or now.redacted, now.excluded or before.excluded
            )
            contents = write_index(
                folder, parts, vocabulary, stored, kept, tally, "", screening, tell
            )
    return report_of(output, contents, tally, started)
