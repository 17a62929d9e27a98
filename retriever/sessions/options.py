"""Constructor options of the embedded drafter."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypedDict

from indexer.reader import Index, Vocabulary
from retriever.limits import Limits
from retriever.log.options import Durability
from retriever.predict.phrases import Encode, ListedPhrases, Track, read_lines
from retriever.predict.predictor import Predictor
from retriever.replication.options import ReplicationOptions
from retriever.sessions.bindings import Bound, BoundPaths


def check_files(
    indexes: Sequence[Path], phrases: Sequence[Path], vocabulary: Vocabulary | None = None
) -> None:
    """Open files for a moment: a wrong path fails before a tokenizer or a model is loaded.

    Args:
        indexes: directories of indexes.
        phrases: files of listed phrases.
        vocabulary: of the caller's tokenizer, if known.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
        PhrasesError: a file of phrases cannot be read.
    """
    for path in phrases:
        read_lines(path)
    for path in indexes:
        Index.open(path, vocabulary=vocabulary).close()


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
    """Load listed phrases and report what was loaded and left out; None where no file is named.

    Args:
        paths: files of listed phrases.
        encode: the target model's tokenizer, without special tokens.
        vocabulary: of the token ids; None for that of the first index, if there is one.
        indexes: paths of the drafter's indexes.
        say: takes a line of the report; standard error by default.
        track: shows progress.

    Raises:
        PhrasesError: a file cannot be read.
        IndexerError: the index cannot be opened.
    """
    if not paths:
        return None
    if vocabulary is None and indexes:
        with closing(Index.open(indexes[0])) as opened:
            vocabulary = opened.vocabulary
    size = None if vocabulary is None else vocabulary.size
    listed = ListedPhrases.load(paths, encode, size, track=track)
    for line in listed.summary():
        say(line)
    return listed


DEFAULT_LIMITS: Final = Limits()


class OpeningOptions(TypedDict, total=False):
    """Options of a drafter that are independent of bound indexes.

    Attributes:
        vocabulary: of the sequences' tokenizer; an index of another is refused.
        limits: upper limits of what is accepted.
        state: a directory that keeps outputs and learned weights, so that a restarted drafter
            drafts as well as before; None to keep them in memory alone. One drafter at a time.
        durability: with "process", outputs survive the end of this process, even by a kill; with
            "disk" also a power failure, at the cost of a disk write in every `close`.
        phrases: listed phrases.
        refresh_s: period of looking for changed indexes in a separate thread, in seconds; 0 for
            never. `refresh` looks at once.
        predictor: grows the trees, with room for `limits`; made if not given.
        replication: the server through which drafters of the same vocabulary share outputs; None
            for none.
    """

    vocabulary: Vocabulary | None
    limits: Limits
    state: Path | None
    durability: Durability
    phrases: ListedPhrases | None
    refresh_s: float
    predictor: Predictor | None
    replication: ReplicationOptions | None


class DrafterOptions(OpeningOptions, total=False):
    """All options of a drafter.

    Attributes:
        bound: indexes and phrases of tenants, in place of the shared ones; their indexes are closed
            with the drafter.
    """

    bound: Mapping[str, Bound] | None


@contextmanager
def opened_indexes(
    paths: Iterable[Path | str], bound: BoundPaths | None, vocabulary: Vocabulary | None
) -> Iterator[tuple[list[Index], dict[str, Bound]]]:
    """Open indexes, shared and bound; they are closed if the block fails.

    Raises:
        indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
        InvalidRequestError: a tenant's name is invalid.
    """
    shared, opened = list(paths), list[Index]()
    try:
        for path in shared:
            opened.append(Index.open(path, vocabulary=vocabulary))
        indexes = list(opened)
        yield indexes, (bound or BoundPaths()).opened(shared, vocabulary, opened)
    except BaseException:
        for index in opened:
            index.close()
        raise
