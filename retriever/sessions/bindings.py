"""The indexes and listed phrases of each tenant: shared ones, and ones bound only to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from indexer.errors import IndexerError
from indexer.reader import Index, Vocabulary
from retriever.errors import InvalidRequestError, NotPossibleError, UnknownIndexError
from retriever.limits import check_tenant_name
from retriever.predict.phrases import ListedPhrases
from retriever.predict.searched_corpus import Corpus
from retriever.sessions.refreshed_corpora import IndexState, RefreshedCorpora
from retriever.sessions.session_table import Sessions

_Open = Callable[[Path], Index]

NO_PHRASES: Final = ListedPhrases(())


@dataclass(frozen=True, slots=True)
class Bound:
    """Indexes and phrases of one tenant, which replace the shared ones.

    Attributes:
        indexes: the tenant's indexes, open or missing. They include the shared indexes, which are
            opened separately for this tenant.
        phrases: the tenant's phrases, which include the shared phrases; None for only these.
    """

    indexes: Sequence[IndexState] | None = None
    phrases: ListedPhrases | None = None


@dataclass(frozen=True, slots=True)
class BoundPaths:
    """Paths of indexes and phrases bound to tenants; other tenants never draft from them.

    Attributes:
        indexes: indexes of each tenant, in addition to the shared indexes.
        phrases: phrases of each tenant, including the shared phrases.
    """

    indexes: Mapping[str, Sequence[Path | str]] = field(default_factory=dict)
    phrases: Mapping[str, ListedPhrases] = field(default_factory=dict)

    def opened(
        self,
        shared: Iterable[Path | str],
        open_index: Callable[[Path | str], IndexState],
    ) -> dict[str, Bound]:
        """Open the bound indexes.

        Args:
            shared: paths of the shared indexes.
            open_index: opens the index at a path; on an error, the caller closes all.

        Raises:
            IndexerError: an index is missing, damaged or of another tokenizer.
            InvalidRequestError: a tenant's name is invalid.
        """
        paths = list(shared)
        bound: dict[str, Bound] = {}
        for tenant in {**self.indexes, **self.phrases}:
            check_tenant_name(tenant)
            indexes = None
            if tenant in self.indexes:
                indexes = [open_index(path) for path in (*paths, *self.indexes[tenant])]
            bound[tenant] = Bound(indexes, self.phrases.get(tenant))
        return bound


@dataclass(frozen=True, slots=True)
class Attached:
    """An index that is drafted from.

    Attributes:
        index: the index in its current snapshot, or missing.
        tenant: the only tenant that drafts from it; None if all do.
    """

    index: IndexState
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class IndexOutcome:
    """The outcome of the nodes that a set of indexes proposed.

    Attributes:
        indexes: the indexes that were drafted from as one corpus.
        tenant: the only tenant that drafts from them; None for all tenants without bound indexes.
        num_drafted: number of nodes from them.
        num_accepted: number of accepted nodes from them.
    """

    indexes: tuple[Path, ...]
    tenant: str | None
    num_drafted: int
    num_accepted: int


class Bindings:
    """The corpora and listed phrases of each tenant.

    Args:
        indexes: open or missing; shared by the tenants without bound indexes.
        phrases: phrases, shared in the same way.
        bound: bound indexes and phrases of each tenant.
        sessions: sessions that draft from them.
        lock: held while the sessions are used.
    """

    def __init__(
        self,
        indexes: Sequence[IndexState],
        phrases: ListedPhrases,
        bound: Mapping[str, Bound],
        sessions: Sessions,
        lock: Lock,
    ) -> None:
        self._sessions = sessions
        self._lock = lock
        self._changing = Lock()  # taken before any refresh lock
        self._refresh_s = 0.0
        self._shared = RefreshedCorpora(indexes, sessions, lock)
        self._phrases = phrases
        self._bound = {
            tenant: RefreshedCorpora(each.indexes, sessions, lock)
            for tenant, each in bound.items()
            if each.indexes is not None
        }
        self._bound_phrases = {
            tenant: each.phrases for tenant, each in bound.items() if each.phrases is not None
        }

    def corpora(self, tenant: str) -> RefreshedCorpora:
        """Return the indexes that a tenant drafts from."""
        return self._bound.get(tenant, self._shared)

    def corpus(self, tenant: str) -> Corpus:
        """Return the current corpus of a tenant."""
        return self.corpora(tenant).current.corpus

    def has_corpus(self, tenant: str) -> bool:
        """Return whether a tenant drafts from any index."""
        return bool(self.corpora(tenant).current.indexes)

    def phrases(self, tenant: str) -> ListedPhrases:
        """Return the listed phrases of a tenant."""
        return self._bound_phrases.get(tenant, self._phrases)

    @property
    def failures(self) -> int:
        """Number of failed attempts to open a changed or missing index."""
        return sum(each.failures for each in self._all())

    @property
    def missing(self) -> list[Path]:
        """Indexes that a tenant should draft from but that cannot be opened."""
        return sorted({path for each in self._all() for path in each.missing})

    @property
    def outcomes(self) -> list[IndexOutcome]:
        """Outcomes of drafts from each set of indexes, shared indexes first; no empty sets."""
        named: list[tuple[str | None, RefreshedCorpora]] = [(None, self._shared)]
        named.extend(sorted(self._bound.items()))
        return [
            IndexOutcome(tuple(index.path for index in each.indexes), tenant, *each.outcome)
            for tenant, each in named
            if each.indexes
        ]

    def watch(self, refresh_s: float) -> None:
        """Refresh periodically from now on; with 0, stop doing so."""
        with self._changing:
            self._refresh_s = refresh_s
            for each in self._all():
                each.watch(refresh_s)

    def refresh(self) -> bool:
        """Switch to the latest snapshots; return whether any index has changed."""
        changed = [each.refresh() for each in self._all()]
        return any(changed)

    def attached(self) -> list[Attached]:
        """Return all indexes: the shared indexes first, then the tenants' indexes."""
        shared = self._shared.indexes
        own = [
            Attached(index, tenant)
            for tenant, corpora in sorted(self._bound.items())
            for index in _own(corpora.indexes, shared)
        ]
        return [*map(Attached, shared), *own]

    def attach(self, path: Path, tenant: str | None, opened: _Open) -> Attached:
        """Draft from one more index; sessions do so with their next draft.

        Blocks until the index is open and warm, which takes as long as summing phrase tables.

        Args:
            path: path of the index.
            tenant: the only tenant that drafts from it; None for all.
            opened: opens an index after checking its vocabulary.

        Raises:
            NotPossibleError: it is attached already.
            indexer.errors.IndexerError: it cannot be opened, or is of another tokenizer.
        """
        with self._changing:
            for other in self.attached():
                if tenant in {other.tenant, None} or other.tenant is None:
                    _check_differs(other, path)
            if tenant is None:
                self._attach_to_all(path, opened)
            elif tenant in self._bound:
                self._bound[tenant].change(lambda now: [*now, opened(path)])
            else:
                self._bind(tenant, path, opened)
            return self._find(path, tenant)

    def detach(self, path: Path, tenant: str | None) -> Attached:
        """Stop drafting from an index; sessions draft without it from their next draft on.

        Raises:
            UnknownIndexError: no such index is attached to this tenant, or to all.
            indexer.errors.IndexerError: phrase tables of the others cannot be summed.
        """
        with self._changing:
            found = self._find(path, tenant)
            if tenant is None:
                for each in reversed(self._all()):  # after a failure, it is still a shared index
                    each.change(lambda now: _without(now, path))
            else:
                corpora = self._bound[tenant]
                if len(_own(corpora.indexes, self._shared.indexes)) > 1:
                    corpora.change(lambda now: _without(now, path))
                else:
                    self._bound = {
                        name: each for name, each in self._bound.items() if name != tenant
                    }
                    corpora.retire(self._shared.current)
            return found

    def _attach_to_all(self, path: Path, opened: _Open) -> None:
        """Attach an index to all corpora, or to none if one fails."""
        done: list[RefreshedCorpora] = []
        try:
            for each in self._all():
                num_shared = len(self._shared.indexes) - bool(done)  # `_shared` is done first
                each.change(partial(_with, path, opened, num_shared))
                done.append(each)
        except BaseException:
            for each in done:
                with suppress(IndexerError):
                    each.change(lambda now: _without(now, path))
            raise

    def _bind(self, tenant: str, path: Path, opened: _Open) -> None:
        """Bind the first index to a tenant that has drafted only from the shared indexes so far."""
        shared = self._shared.indexes
        bound = RefreshedCorpora([], self._sessions, self._lock)
        bound.change(lambda _: _opened_anew(shared, path, opened))
        self._bound = {**self._bound, tenant: bound}  # new: others iterate over the old dict
        with self._lock:
            self._sessions.set_corpus(bound.current.corpus, self._shared.current.corpus, tenant)
        bound.watch(self._refresh_s)

    def _find(self, path: Path, tenant: str | None) -> Attached:
        for each in self.attached():
            if each.tenant == tenant and _is_same(each.index.path, path):
                return each
        whose = "all tenants" if tenant is None else f"the tenant {tenant!r} alone"
        raise UnknownIndexError(f"no index {path} is attached to {whose}: list what is attached")

    def warm(self) -> None:
        """Map resident pages of the indexes, so that no draft waits for them."""
        for each in self._all():
            each.current.warm()

    def corpora_of_all(self) -> list[Corpus]:
        """Return the corpora that any tenant drafts from."""
        return [each.current.corpus for each in self._all()]

    def shut_down(self) -> None:
        """Close all indexes."""
        for each in self._all():
            each.shut_down()

    def _all(self) -> list[RefreshedCorpora]:
        return [self._shared, *self._bound.values()]


def _opened_anew(shared: Iterable[IndexState], path: Path, opened: _Open) -> list[IndexState]:
    """Open the shared indexes and one more for a tenant; a missing index stays missing."""
    found: list[IndexState] = []
    try:
        for each in (*shared, path):
            to_open = each.path if isinstance(each, Index) else each
            found.append(opened(to_open) if isinstance(to_open, Path) else to_open)
    except BaseException:
        for each in found:
            if isinstance(each, Index):
                each.close()
        raise
    return found


def _own(indexes: Iterable[IndexState], shared: Iterable[IndexState]) -> list[IndexState]:
    """Return a tenant's indexes that are not shared."""
    left = [index.path for index in shared]
    own = []
    for index in indexes:
        if index.path in left:
            left.remove(index.path)
        else:
            own.append(index)
    return own


def _with(path: Path, opened: _Open, place: int, indexes: Sequence[IndexState]) -> list[IndexState]:
    """Open an index; return the indexes with it inserted at a position."""
    return [*indexes[:place], opened(path), *indexes[place:]]


def _without(indexes: Iterable[IndexState], path: Path) -> list[IndexState]:
    """Return indexes without the first one at a path."""
    rest = list(indexes)
    at = next((at for at, index in enumerate(rest) if _is_same(index.path, path)), None)
    if at is not None:
        del rest[at]
    return rest


def _check_differs(attached: Attached, path: Path) -> None:
    if not _is_same(attached.index.path, path):
        return
    if attached.tenant is None:
        raise NotPossibleError(f"all tenants draft from {path} already")
    raise NotPossibleError(
        f"the tenant {attached.tenant!r} drafts from {path} already: detach it there first"
    )


def _is_same(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()


def shared_vocabulary(
    indexes: Sequence[IndexState], vocabulary: Vocabulary | None
) -> Vocabulary | None:
    """Return the common vocabulary of the indexes and the given vocabulary.

    Raises:
        InvalidRequestError: they differ.
    """
    for index in indexes:
        vocabulary = vocabulary or index.vocabulary
        if index.vocabulary.fingerprint != vocabulary.fingerprint:
            raise InvalidRequestError(
                f"index {index.path} is of another tokenizer than {indexes[0].path}: "
                "build both with the same --tokenizer"
            )
    return vocabulary


def common_vocabulary(
    indexes: Sequence[IndexState],
    phrases: ListedPhrases,
    bound: Mapping[str, Bound],
    vocabulary: Vocabulary | None,
) -> Vocabulary | None:
    """Return the common vocabulary of all indexes and phrases; None if unknown.

    Args:
        indexes: the shared indexes, open or missing.
        phrases: the shared phrases.
        bound: bound indexes and phrases of each tenant.
        vocabulary: the vocabulary that all must have; None to use that of the first index.

    Raises:
        InvalidRequestError: they differ, or a phrase has a token outside it.
    """
    vocabulary = shared_vocabulary(indexes, vocabulary)
    for each in bound.values():
        vocabulary = shared_vocabulary(each.indexes or (), vocabulary)
        _check_phrases(each.phrases or NO_PHRASES, vocabulary)
    _check_phrases(phrases, vocabulary)
    return vocabulary


def _check_phrases(phrases: ListedPhrases, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None and phrases.highest_token >= vocabulary.size:
        raise InvalidRequestError(
            f"a listed phrase has the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )


def parsed_bindings(options: Iterable[str], what: str) -> dict[str, list[Path]]:
    """Parse options of the form TENANT=PATH; return the paths of each tenant.

    Raises:
        InvalidRequestError: one has a different form, or its tenant's name is invalid.
    """
    found: dict[str, list[Path]] = {}
    for option in options:
        tenant, equals, path = option.partition("=")
        if not (equals and path):
            raise InvalidRequestError(f"{what} takes TENANT=PATH, not {option!r}")
        check_tenant_name(tenant)
        found.setdefault(tenant, []).append(Path(path))
    return found
