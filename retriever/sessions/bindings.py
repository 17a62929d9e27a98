"""What each tenant drafts from: what is shared with all, and what is bound to it alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from indexer.reader import Index, Vocabulary
from retriever.errors import InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.predict.databases import Corpus
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.refreshed_corpora import RefreshedCorpora
from retriever.sessions.session_table import Sessions

NO_PHRASES: Final = ListedPhrases(())


@dataclass(frozen=True, slots=True)
class Bound:
    """What a tenant drafts from in the place of what is shared.

    Attributes:
        indexes: open, those that are shared included; opened for this tenant alone.
        phrases: those that are listed for all included; None: what is shared.
    """

    indexes: Sequence[Index] | None = None
    phrases: ListedPhrases | None = None


@dataclass(frozen=True, slots=True)
class BoundPaths:
    """Indexes that are bound to tenants, by path; the others' drafts never hold anything of them.

    Attributes:
        indexes: of each tenant, beside those that are shared.
        phrases: of each tenant, those that are listed for all included.
    """

    indexes: Mapping[str, Sequence[Path | str]] = field(default_factory=dict)
    phrases: Mapping[str, ListedPhrases] = field(default_factory=dict)

    def opened(
        self,
        shared: Iterable[Path | str],
        vocabulary: Vocabulary | None,
        opened: list[Index],
    ) -> dict[str, Bound]:
        """Open what is bound.

        Args:
            shared: paths of the indexes that everybody drafts from.
            vocabulary: that all must be of; None: of that of the first.
            opened: takes every index as soon as it is open, for whoever closes them on an error.

        Raises:
            IndexerError: an index is missing, damaged or of another tokenizer.
            InvalidRequestError: a name cannot be a tenant's.
        """
        paths = list(shared)
        bound: dict[str, Bound] = {}
        for tenant in {**self.indexes, **self.phrases}:
            check_tenant_name(tenant)
            indexes = None
            if tenant in self.indexes:
                indexes = [
                    Index.open(path, vocabulary=vocabulary)
                    for path in (*paths, *self.indexes[tenant])
                ]
                opened.extend(indexes)
            bound[tenant] = Bound(indexes, self.phrases.get(tenant))
        return bound


class Bindings:
    """Corpora and listed phrases by tenant.

    Args:
        indexes: open; drafted from by each tenant that has none of its own.
        phrases: likewise.
        bound: what tenants have of their own.
        sessions: what drafts from them.
        lock: held while the sessions are used.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
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
        """Return the corpus that a tenant drafts from now."""
        return self.corpora(tenant).current.corpus

    def has_corpus(self, tenant: str) -> bool:
        """Tell whether a tenant drafts from any index."""
        return bool(self.corpora(tenant).current.indexes)

    def phrases(self, tenant: str) -> ListedPhrases:
        """Return the phrases that are listed for a tenant."""
        return self._bound_phrases.get(tenant, self._phrases)

    @property
    def failures(self) -> int:
        """How often an index had changed, or was gone, and could not be opened again."""
        return sum(each.failures for each in self._all())

    def watch(self, refresh_s: float) -> None:
        """Refresh every so many seconds from now on."""
        for each in self._all():
            each.watch(refresh_s)

    def refresh(self) -> bool:
        """Move on to what the indexes are now; tell whether any has changed."""
        changed = [each.refresh() for each in self._all()]
        return any(changed)

    def warm(self) -> None:
        """Make the first draft wait for nothing."""
        for phrases in (self._phrases, *self._bound_phrases.values()):
            phrases.warm()

    def shut_down(self) -> None:
        """Close all indexes."""
        for each in self._all():
            each.shut_down()

    def _all(self) -> list[RefreshedCorpora]:
        return [self._shared, *self._bound.values()]


def shared_vocabulary(indexes: Sequence[Index], vocabulary: Vocabulary | None) -> Vocabulary | None:
    """Return the one vocabulary of indexes, and of what is given.

    Raises:
        InvalidRequestError: there are several.
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
    indexes: Sequence[Index],
    phrases: ListedPhrases,
    bound: Mapping[str, Bound],
    vocabulary: Vocabulary | None,
) -> Vocabulary | None:
    """Return the one vocabulary of all that is drafted from; None where it is not known.

    Args:
        indexes: open, those that are shared.
        phrases: likewise.
        bound: what tenants have of their own.
        vocabulary: that all must be of; None: of that of the first index.

    Raises:
        InvalidRequestError: there are several, or a phrase has a token that it does not have.
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
        InvalidRequestError: one has another form, or its name cannot be a tenant's.
    """
    found: dict[str, list[Path]] = {}
    for option in options:
        tenant, equals, path = option.partition("=")
        if not (equals and path):
            raise InvalidRequestError(f"{what} takes TENANT=PATH, not {option!r}")
        check_tenant_name(tenant)
        found.setdefault(tenant, []).append(Path(path))
    return found
