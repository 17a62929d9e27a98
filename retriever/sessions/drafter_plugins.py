"""The interface of a drafter's plugins.

A plugin stores further data: findings of decoders, or outputs of other drafters. The core imports
no plugin: options name a plugin, or an installed plugin is found by its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final, Protocol

from indexer.launch import is_installed
from indexer.reader import Vocabulary
from retriever.drafter import Findings, FoundPage
from retriever.errors import NotPossibleError
from retriever.predict.generations import Scope
from retriever.predict.pool import Entry

_FINDINGS: Final = "retriever.plugins.findings"


class DrafterPlugin:
    """A plugin of one drafter. Methods that it does not override do nothing.

    Attributes:
        name: name of the plugin in reports.
        counts: the plugin's counts, for `DrafterStats.plugins`; None if it has none.
        num_bytes: memory of its data.
    """

    name = ""
    counts: Any = None
    num_bytes = 0

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """Handle the tokenizer, once it is known."""

    def on_remembered(self, entry: Entry) -> None:
        """Handle an output that joins the generations; may take at most a microsecond."""

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Enclose the block that writes previously remembered outputs to the state directory."""
        yield

    def on_deleting(self, scope: Scope) -> None:
        """Prepare for a caller's deletion of a scope; called with the drafter's lock held."""

    def on_deleted(self, scope: Scope) -> None:
        """Delete a scope, without the lock; the drafter has already deleted its own data."""

    def settle(self) -> None:
        """Write what the next process needs to know about a caller's deletion."""

    def bytes_by_tenant(self) -> Mapping[str, int]:
        """Return the memory held for each tenant, in bytes."""
        return {}

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        """Evict one tenant's data from memory, without waiting; return False if none may go.

        Args:
            may_go: returns whether a tenant's data may be evicted.
        """
        del may_go
        return False

    def evict(self, tenant: str) -> None:
        """Evict a tenant's data from memory; data on disk stays."""

    def metrics(self) -> Iterable[Any]:
        """Return its counts, as metric families of `prometheus_client`."""
        return ()

    def shut_down(self) -> None:
        """Stop, within a second or so."""


class PluginOptions(Protocol):
    """Options that attach a plugin to a drafter."""

    def check(self) -> None:
        """Check what can be checked before anything is opened.

        Raises:
            RetrieverError: the plugin cannot be attached.
        """
        ...

    def attach(self, state: Any) -> DrafterPlugin:
        """Return the plugin, attached to a drafter whose databases are open, a `DrafterState`."""
        ...


class FindingsKeeper(DrafterPlugin):
    """Stores findings of decoders by tenant and model; this base class refuses them."""

    name = "recycled"

    def share(
        self, tenant: str, model: str, findings: Findings, vocabulary_size: int | None
    ) -> None:
        """Store findings of a model; see `FindingsStore.share_findings`.

        Args:
            tenant: the tenant whose decoder found them.
            model: fingerprint of the model.
            findings: findings of at most `MAX_FINDINGS` contexts.
            vocabulary_size: token ids are below it; None if unknown.

        Raises:
            NotPossibleError: this drafter stores no findings.
        """
        del tenant, model, findings, vocabulary_size
        raise self._refusal()

    def fetch(self, tenant: str, model: str, before: int = 0) -> FoundPage:
        """Return a page of a tenant's findings of a model; see `FindingsStore.fetch_findings`.

        Raises:
            NotPossibleError: this drafter stores no findings.
        """
        del tenant, model, before
        raise self._refusal()

    @staticmethod
    def _refusal() -> NotPossibleError:
        return NotPossibleError(
            f"recycled logits are not stored here: they need {_FINDINGS}, which is not installed; "
            "start the decoder with --recycled-bytes 0"
        )


def findings_of(state: Any) -> FindingsKeeper:
    """Return the store of a `DrafterState`'s findings, or one that refuses if not installed."""
    if not is_installed(_FINDINGS):
        return FindingsKeeper()
    keeper: FindingsKeeper = import_module(f"{_FINDINGS}.kept_findings").attach(state)
    return keeper


class Plugins(list[DrafterPlugin]):
    """All plugins of a drafter, called one after the other."""

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """See `DrafterPlugin.on_vocabulary`."""
        for each in self:
            each.on_vocabulary(fingerprint, vocabulary)

    def on_remembered(self, entry: Entry | None) -> None:
        """See `DrafterPlugin.on_remembered`; without an entry, nothing was remembered."""
        if entry is not None:
            for each in self:
                each.on_remembered(entry)

    def storing(self) -> AbstractContextManager[object]:
        """See `DrafterPlugin.storing`."""
        block = ExitStack()
        for each in self:
            block.enter_context(each.storing())
        return block

    def on_deleting(self, scope: Scope) -> None:
        """See `DrafterPlugin.on_deleting`."""
        for each in self:
            each.on_deleting(scope)

    def on_deleted(self, scope: Scope) -> None:
        """See `DrafterPlugin.on_deleted`."""
        for each in self:
            each.on_deleted(scope)

    def settle(self) -> None:
        """See `DrafterPlugin.settle`."""
        for each in self:
            each.settle()

    def evict_idle(self, may_go: Callable[[str], bool]) -> str:
        """See `DrafterPlugin.evict_idle`; return the name of the plugin that evicted, or ""."""
        return next((each.name for each in self if each.evict_idle(may_go)), "")

    def shut_down(self) -> None:
        """See `DrafterPlugin.shut_down`."""
        for each in self:
            each.shut_down()
