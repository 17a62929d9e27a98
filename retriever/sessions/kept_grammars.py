"""Compiled grammars of constrained outputs, by tenant."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final, NamedTuple

from retriever.drafter import OutputConstraint
from retriever.errors import NotServedError
from retriever.predict.generations import Scope
from retriever.predict.grammar.grammars import CompiledGrammar, grammar_of
from retriever.predict.ledger import Charge, Ledger
from retriever.sessions.drafter_plugins import DrafterPlugin

_MOST_KEPT: Final = 32
"""Grammars of a tenant; those that were not used for longest are compiled again."""

_LEAST_BYTES: Final = 2 << 20
_BYTES_PER_BYTE: Final = 300
"""Memory of a compiled grammar, and for each byte of its source: 2 to 15 MB were measured for
schemas of 0.6 to 30 KB, 43 MB for 92 KB."""


class _Kept(NamedTuple):
    grammar: CompiledGrammar
    charge: Charge


class KeptGrammars(DrafterPlugin):
    """Compiles constraints, and keeps what was compiled, with what outputs taught about it.

    Args:
        ledger: that the memory is taken from.
        tokenizer: returns that of the sequences; None if it is not known.
    """

    name = "grammars"

    def __init__(self, ledger: Ledger, tokenizer: Callable[[], Any] | None) -> None:
        self._ledger, self._tokenizer = ledger, tokenizer
        self._kept: OrderedDict[tuple[str, OutputConstraint], _Kept] = OrderedDict()
        self._lock = Lock()

    def compiled(self, tenant: str, constraint: OutputConstraint) -> CompiledGrammar:
        """Return the grammar of a tenant's constraint; takes milliseconds, or a second if large.

        Raises:
            NotServedError: the tokenizer is not known.
            InvalidConstraintError: it cannot be read or followed.
            LimitExceededError: there is no room for it.
        """
        if self._tokenizer is None:
            raise NotServedError(
                "constraints need the text of tokens: start the service with --tokenizer, or an "
                "EmbeddedDrafter with tokenizer=, or open the session without a constraint"
            )
        key = tenant, constraint
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept.grammar
        needed = _LEAST_BYTES + _BYTES_PER_BYTE * constraint.num_bytes
        charge = self._ledger.take(tenant, needed)
        grammar = CompiledGrammar.of(grammar_of(constraint), self._tokenizer())
        with self._lock:
            kept = self._kept.setdefault(key, _Kept(grammar, charge))
            of_tenant = [each for each in self._kept if each[0] == tenant]
            for each in of_tenant[: -_MOST_KEPT or None]:
                del self._kept[each]
        return kept.grammar

    def on_deleted(self, scope: Scope) -> None:
        """Forget a tenant's grammars: what its outputs taught is part of them."""
        self.evict(scope.tenant)

    def bytes_by_tenant(self) -> Mapping[str, int]:
        """Return the memory that is held of each tenant."""
        held: Counter[str] = Counter()
        with self._lock:
            for (tenant, _), kept in self._kept.items():
                held[tenant] += kept.charge.num_bytes
        return held

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        """Forget the grammars of one tenant, if those of one may go."""
        with self._lock:
            tenants = [tenant for tenant, _ in self._kept]
        found = next(filter(may_go, tenants), None)
        if found is not None:
            self.evict(found)
        return found is not None

    def evict(self, tenant: str) -> None:
        """Forget a tenant's grammars."""
        with self._lock:
            for key in [each for each in self._kept if each[0] == tenant]:
                del self._kept[key]
