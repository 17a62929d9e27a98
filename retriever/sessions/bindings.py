"""The indexes and listed phrases of each tenant: shared ones, and ones bound to it alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from indexer.reader import Vocabulary
from retriever.errors import InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.predict.databases import Corpus
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.refreshed_corpora import IndexState, RefreshedCorpora
from retriever.sessions.session_table import Sessions

NO_PHRASES: Final = ListedPhrases(())


@dataclass(frozen=True, slots=True)
class Bound:
    """Indexes and phrases of one tenant, which replace the shared ones.

    Attributes:
        indexes: open or missing, shared ones included; opened for this tenant alone.
        phrases: shared ones included; None: the shared ones only.
    """

    indexes: Sequence[IndexState] | None = None
    phrases: ListedPhrases | None = None


@dataclass(frozen=True, slots=True)
class BoundPaths:
    """Paths of indexes and phrases bound to tenants; other tenants never draft from them.

    Attributes:
        indexes: of each tenant, in addition to the shared ones.
        phrases: of each tenant, shared ones included.
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
            open_index: opens the index at a path; the caller closes all on an error.

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


class Bindings:
    """Corpora and listed phrases by tenant.

    Args:
        indexes: open or missing; shared by the tenants without bound ones.
        phrases: the same.
        bound: bound indexes and phrases by tenant.
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
        """Failed attempts to open a changed or missing index."""
        return sum(each.failures for each in self._all())

    @property
    def missing(self) -> list[Path]:
        """Indexes that some tenant is to draft from and that cannot be opened."""
        return sorted({path for each in self._all() for path in each.missing})

    def watch(self, refresh_s: float) -> None:
        """Refresh periodically from now on."""
        for each in self._all():
            each.watch(refresh_s)

    def refresh(self) -> bool:
        """Switch to the latest snapshots; return whether any index has changed."""
        changed = [each.refresh() for each in self._all()]
        return any(changed)

    def warm(self) -> None:
        """Load everything that the first draft needs."""
        for phrases in (self._phrases, *self._bound_phrases.values()):
            phrases.warm()

    def shut_down(self) -> None:
        """Close all indexes."""
        for each in self._all():
            each.shut_down()

    def _all(self) -> list[RefreshedCorpora]:
        return [self._shared, *self._bound.values()]


def shared_vocabulary(
    indexes: Sequence[IndexState], vocabulary: Vocabulary | None
) -> Vocabulary | None:
    """Return the common vocabulary of indexes and of the given one.

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
        indexes: open or missing, the shared ones.
        phrases: the same.
        bound: bound indexes and phrases by tenant.
        vocabulary: that all must have; None: that of the first index.

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
            f"a listed phrase holds the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )


def parsed_bindings(options: Iterable[str], what: str) -> dict[str, list[Path]]:
    """Return the paths of each tenant from options of the form TENANT=PATH.

    Raises:
        InvalidRequestError: one has another form, or its tenant's name is invalid.
    """
    found: dict[str, list[Path]] = {}
    for option in options:
        tenant, equals, path = option.partition("=")
        if not (equals and path):
            raise InvalidRequestError(f"{what} takes TENANT=PATH, not {option!r}")
        check_tenant_name(tenant)
        found.setdefault(tenant, []).append(Path(path))
    return found
