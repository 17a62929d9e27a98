"""What plugins of a drafter are told of.

A plugin keeps more than the drafter itself does: what decoders found likely, or outputs of other
drafters. Core imports none: options name one, or it is found by its name where it is installed.
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
    """A plugin of one drafter. What it does not override does nothing.

    Attributes:
        name: in reports.
        counts: what it has counted, for `DrafterStats.plugins`; None: nothing.
        num_bytes: of what it holds in memory.
    """

    name = ""
    counts: Any = None
    num_bytes = 0

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """Note the tokenizer, once it is known."""

    def on_remembered(self, entry: Entry) -> None:
        """Note an output that joins the generations; takes a microsecond."""

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Note that the block writes what was remembered before it to the state directory."""
        yield

    def on_deleting(self, scope: Scope) -> None:
        """Note that a caller deletes a scope, which is still there; the drafter's lock is held."""

    def on_deleted(self, scope: Scope) -> None:
        """Delete a scope, without the lock: the drafter's own memory has gone."""

    def settle(self) -> None:
        """Write what the next process needs to know of a caller's deletion."""

    def bytes_by_tenant(self) -> Mapping[str, int]:
        """Return the memory that is held of each tenant."""
        return {}

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        """Let what is held of one tenant leave memory, without waiting; return False if none may.

        Args:
            may_go: whether that of a tenant may.
        """
        del may_go
        return False

    def evict(self, tenant: str) -> None:
        """Let what is held of a tenant leave memory; what is on disk stays."""

    def metrics(self) -> Iterable[Any]:
        """Return what it has counted, as families of `prometheus_client`."""
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
    """Keeps what decoders found likely, by tenant and model; here, where none does, refuses it."""

    name = "recycled"

    def share(
        self, tenant: str, model: str, findings: Findings, vocabulary_size: int | None
    ) -> None:
        """Keep findings of a model; see `FindingsStore.share_findings`.

        Args:
            tenant: whose decoder found them.
            model: fingerprint of the model.
            findings: of at most `MAX_FINDINGS` contexts.
            vocabulary_size: ids are below it; None if it is not known.

        Raises:
            NotPossibleError: none are kept here.
        """
        del tenant, model, findings, vocabulary_size
        raise self._refusal()

    def fetch(self, tenant: str, model: str, before: int = 0) -> FoundPage:
        """Return a page of a tenant's findings of a model; see `FindingsStore.fetch_findings`.

        Raises:
            NotPossibleError: none are kept here.
        """
        del tenant, model, before
        raise self._refusal()

    @staticmethod
    def _refusal() -> NotPossibleError:
        return NotPossibleError(
            f"recycled logits are not kept here: they need {_FINDINGS}, which is not part of this "
            "installation; start the decoder with --recycled-bytes 0"
        )


def findings_of(state: Any) -> FindingsKeeper:
    """Return what keeps findings of a `DrafterState`, or what refuses them where it is absent."""
    if not is_installed(_FINDINGS):
        return FindingsKeeper()
    keeper: FindingsKeeper = import_module(f"{_FINDINGS}.kept_findings").attach(state)
    return keeper


class Plugins(list[DrafterPlugin]):
    """All plugins of a drafter, told one after the other."""

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """See `DrafterPlugin.on_vocabulary`."""
        for each in self:
            each.on_vocabulary(fingerprint, vocabulary)

    def on_remembered(self, entry: Entry | None) -> None:
        """See `DrafterPlugin.on_remembered`; nothing was remembered without an entry."""
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
        """See `DrafterPlugin.evict_idle`; return the name of the plugin that had something."""
        return next((each.name for each in self if each.evict_idle(may_go)), "")

    def shut_down(self) -> None:
        """See `DrafterPlugin.shut_down`."""
        for each in self:
            each.shut_down()
