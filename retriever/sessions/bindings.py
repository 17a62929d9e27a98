"""What each tenant drafts from: what is shared with all, and what is bound to it alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from indexer.reader import Index, Vocabulary
from retriever.errors import InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.live_corpora import LiveCorpora

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
        shared: what is drafted from for whoever has nothing of its own.
        phrases: likewise.
        bound: of those who have.
        open_corpora: makes corpora of open indexes.
    """

    def __init__(
        self,
        shared: LiveCorpora,
        phrases: ListedPhrases,
        bound: Mapping[str, Bound],
        open_corpora: Callable[[Sequence[Index]], LiveCorpora],
    ) -> None:
        self._shared = shared
        self._phrases = phrases
        self._bound = {
            tenant: open_corpora(each.indexes)
            for tenant, each in bound.items()
            if each.indexes is not None
        }
        self._bound_phrases = {
            tenant: each.phrases for tenant, each in bound.items() if each.phrases is not None
        }

    def corpora(self, tenant: str) -> LiveCorpora:
        """Return the indexes that a tenant drafts from."""
        return self._bound.get(tenant, self._shared)

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

    def _all(self) -> list[LiveCorpora]:
        return [self._shared, *self._bound.values()]


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
