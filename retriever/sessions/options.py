"""What an embedded drafter is made with."""

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


def _print_to_standard_error(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  (for whoever runs a command)


def load_phrases(  # noqa: PLR0913  (the last three are options)
    paths: Sequence[Path],
    encode: Encode,
    vocabulary: Vocabulary | None,
    *,
    indexes: Sequence[Path | str] = (),
    say: Callable[[str], object] = _print_to_standard_error,
    track: Track = lambda items, _: items,
) -> ListedPhrases | None:
    """Load listed phrases and say what was loaded and what was not; None where no file is named.

    Args:
        paths: files of listed phrases.
        encode: the tokenizer of the model that is drafted for, without special tokens.
        vocabulary: token ids must be of it; None for that of the first index, if there is one.
        indexes: that will be drafted from.
        say: takes a line; standard error, if nothing else is said.
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
    """What a drafter is made with, whoever opens its indexes.

    Attributes:
        vocabulary: of the tokenizer whose tokens will come; an index of another is refused.
        limits: what is accepted at most.
        state: a directory that keeps outputs, so that a drafter that is opened on it later starts
            as warm as this one was; None to keep them in memory alone. One drafter at a time.
        durability: with "process", outputs survive the end of this process, however it comes;
            with "disk" that of the machine too, at the price of waiting for it in every `close`.
        phrases: what is listed to be written verbatim.
        refresh_s: look every so many seconds whether an index has changed, in a thread of our own,
            and draft from what it has become; 0 for never. `refresh` does so at once.
        predictor: what grows the trees, with room for `limits`; made where there is none.
        replication: through which server outputs are replicated to other drafters of the same
            vocabulary, and theirs to this one; None for none.
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
    """What a drafter is made with.

    Attributes:
        bound: what tenants draft from in the place of the indexes and phrases that are shared;
            their indexes are closed with the drafter, too.
    """

    bound: Mapping[str, Bound] | None


@contextmanager
def opened_indexes(
    paths: Iterable[Path | str], bound: BoundPaths | None, vocabulary: Vocabulary | None
) -> Iterator[tuple[list[Index], dict[str, Bound]]]:
    """Open indexes, shared and bound; they are closed again where the block fails.

    Raises:
        indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
        InvalidRequestError: a name cannot be a tenant's.
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
