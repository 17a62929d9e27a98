"""Checking the files that drafts come from, before anything slow is loaded for them."""

from collections.abc import Sequence
from pathlib import Path

from indexer.reader import Index, Vocabulary
from retriever.phrase_files import read_lines


def check_files(
    indexes: Sequence[Path], phrases: Sequence[Path], vocabulary: Vocabulary | None = None
) -> None:
    """Open files for a moment: a wrong path need not wait for a tokenizer or a model to load.

    Args:
        indexes: directories of indexes.
        phrases: files of listed phrases.
        vocabulary: of the tokenizer at hand, once that is known.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
        PhrasesError: a file of phrases cannot be read.
    """
    for path in phrases:
        read_lines(path)
    for path in indexes:
        Index.open(path, vocabulary=vocabulary).close()
