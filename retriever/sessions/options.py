"""Constructor options of the embedded drafter."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypedDict

from indexer.errors import IndexerError
from indexer.reader import Index, Vocabulary
from retriever.limits import Durability, Limits
from retriever.predict.draft import Predictor
from retriever.predict.phrases import Encode, ListedPhrases, Track, read_lines
from retriever.sessions.bindings import Bound, BoundPaths
from retriever.sessions.drafter_plugins import PluginOptions
from retriever.sessions.refreshed_corpora import IndexState, MissingIndex

_logger = getLogger(__name__)


def check_files(
    indexes: Sequence[Path],
    phrases: Sequence[Path],
    vocabulary: Vocabulary | None = None,
    *,
    skip_missing: bool = False,
) -> None:
    """Open and close files, so that a wrong path fails before a tokenizer or a model is loaded.

    Args:
        indexes: directories of indexes.
        phrases: files of listed phrases.
        vocabulary: vocabulary of the caller's tokenizer, if known.
        skip_missing: whether indexes that cannot be opened will be skipped; then none is opened
            here.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
        PhrasesError: a file of phrases cannot be read.
    """
    for path in phrases:
        read_lines(path)
    for path in () if skip_missing else indexes:
        Index.open(path, vocabulary=vocabulary).close()


def indexed_tokenizer(indexes: Sequence[Path]) -> str | None:
    """Return the tokenizer's name from the first index that has one; None if none has.

    Raises:
        IndexerError: an index cannot be opened.
    """
    for path in indexes:
        with Index.open(path) as index:
            if index.vocabulary.name:
                return index.vocabulary.name
    return None


def _print_to_standard_error(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  (for the user of a command)


def load_phrases(  # noqa: PLR0913  (the last three are options)
    paths: Sequence[Path],
    encode: Encode,
    vocabulary: Vocabulary | None,
    *,
    indexes: Sequence[Path | str] = (),
    say: Callable[[str], object] = _print_to_standard_error,
    track: Track = lambda items, _: items,
) -> ListedPhrases | None:
    """Load listed phrases and report what was loaded and skipped; None if no file is given.

    Args:
        paths: files of listed phrases.
        encode: the target model's tokenizer, without special tokens.
        vocabulary: vocabulary of the token ids; None for that of the first index that can be
            opened.
        indexes: paths of the drafter's indexes.
        say: prints a line of the report; to standard error by default.
        track: shows progress.

    Raises:
        PhrasesError: a file cannot be read.
        IndexerError: no index can be opened.
    """
    if not paths:
        return None
    if vocabulary is None and indexes:
        vocabulary = _first_vocabulary(indexes)
    size = None if vocabulary is None else vocabulary.size
    listed = ListedPhrases.load(paths, encode, size, track=track)
    for line in listed.summary():
        say(line)
    return listed


DEFAULT_LIMITS: Final = Limits()


class OpeningOptions(TypedDict, total=False):
    """Options of a drafter that are independent of bound indexes.

    Attributes:
        vocabulary: vocabulary of the sequences' tokenizer; an index with another one is refused.
        limits: upper limits for requests and memory.
        state: a directory for outputs and learned weights, so that a restarted drafter drafts as
            well as before; None to store them only in memory. For one drafter at a time.
        durability: with "process", outputs survive the end of this process, even by a kill. With
            "disk" they also survive a power failure, but every `close` writes to the disk.
        phrases: listed phrases.
        hold_indexes: whether to copy the indexes' files to memory instead of mapping them, so that
            files can be truncated or overwritten.
        skip_missing: whether an index that cannot be opened is logged as an error and retried by
            every refresh, instead of raising the error.
        refresh_s: how often to check for changed indexes in a separate thread, in seconds; 0 for
            never. `refresh` checks immediately.
        threads: most threads that share a step of several sequences; 1 by default. A helper thread
            that waits for a processor delays the step, so give only as many as there are free
            processors.
        predictor: grows the trees, with room for `limits`; created if not given.
        plugins: options of plugins to attach, such as `ReplicationOptions`.
        tokenizer: returns the sequences' tokenizer; called at the first sequence with a constraint.
            With None, such sequences are refused.
        clock: a monotonic clock in seconds, for idle sessions; `time.monotonic` by default.
    """

    vocabulary: Vocabulary | None
    limits: Limits
    state: Path | None
    durability: Durability
    phrases: ListedPhrases | None
    hold_indexes: bool
    skip_missing: bool
    refresh_s: float
    threads: int
    predictor: Predictor | None
    plugins: Sequence[PluginOptions]
    tokenizer: Callable[[], Any] | None
    clock: Callable[[], float]


class DrafterOptions(OpeningOptions, total=False):
    """All options of a drafter.

    Attributes:
        bound: indexes and phrases of tenants, which replace the shared ones; the indexes are closed
            with the drafter.
    """

    bound: Mapping[str, Bound] | None


@contextmanager
def opened_indexes(
    paths: Iterable[Path | str],
    bound: BoundPaths | None,
    vocabulary: Vocabulary | None,
    *,
    hold: bool = False,
    skip_missing: bool = False,
) -> Iterator[tuple[list[IndexState], dict[str, Bound]]]:
    """Open indexes, shared and bound; they are closed if the block fails.

    Args:
        paths: paths of the shared indexes.
        bound: paths of indexes and phrases of tenants.
        vocabulary: the vocabulary that all must have; None for that of the first index.
        hold: see `OpeningOptions.hold_indexes`.
        skip_missing: see `OpeningOptions.skip_missing`.

    Raises:
        indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer. If such
            indexes are skipped, the error means that none can be opened to get the vocabulary.
        InvalidRequestError: a tenant's name is invalid.
    """
    shared, bound = list(paths), bound or BoundPaths()
    if skip_missing and vocabulary is None:
        vocabulary = _first_vocabulary([*shared, *chain.from_iterable(bound.indexes.values())])
    opening = _Opening(vocabulary, hold=hold, skip_missing=skip_missing)
    try:
        indexes = [opening.open(path) for path in shared]
        yield indexes, bound.opened(shared, opening.open)
    except BaseException:
        opening.close()
        raise


def _first_vocabulary(paths: Sequence[Path | str]) -> Vocabulary | None:
    """Return the vocabulary of the first index that can be opened; None without paths."""
    for path in paths[:-1]:
        with suppress(IndexerError), Index.open(path) as index:
            return index.vocabulary
    if not paths:
        return None
    with Index.open(paths[-1]) as index:
        return index.vocabulary


class _Opening:
    """Opens indexes; logs which are missing and which are held in memory."""

    def __init__(self, vocabulary: Vocabulary | None, *, hold: bool, skip_missing: bool) -> None:
        self._vocabulary = vocabulary
        self._hold = hold
        self._skip_missing = skip_missing
        self._opened: list[Index] = []
        self._logged: set[Path] = set()

    def open(self, path: Path | str) -> IndexState:
        path = Path(path)
        if self._hold and path not in self._logged:
            _logger.info("reading %s into memory", path)
        began = perf_counter()
        try:
            index = Index.open(path, vocabulary=self._vocabulary, hold=self._hold)
        except IndexerError as error:
            if not self._skip_missing or self._vocabulary is None:
                raise
            self._log_missing(path, error)
            return MissingIndex(path, self._vocabulary, self._hold)
        self._opened.append(index)
        if self._hold and path not in self._logged:
            took, mebibytes = perf_counter() - began, index.num_bytes / (1 << 20)
            _logger.info("%s is held in memory: %.1f MiB, read in %.1f s", path, mebibytes, took)
        self._logged.add(path)
        return index

    def close(self) -> None:
        for index in self._opened:
            index.close()

    def _log_missing(self, path: Path, error: Exception) -> None:
        if path not in self._logged:
            _logger.error(
                "drafts go without %s, until a refresh can open it: %s",
                *(path, error),
                extra={"event": "index_missing"},
            )
        self._logged.add(path)
