"""Compiled grammars of constrained outputs, for each tenant."""

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
"""Most grammars cached per tenant; those that were unused for longest are dropped."""

_LEAST_BYTES: Final = 2 << 20
_BYTES_PER_BYTE: Final = 300
"""Memory of a compiled grammar: a fixed part, and a part per byte of its source. We measured 2 to
15 MB for schemas of 0.6 to 30 KB, and 43 MB for a schema of 92 KB."""


class _Kept(NamedTuple):
    grammar: CompiledGrammar
    charge: Charge


class KeptGrammars(DrafterPlugin):
    """Compiles constraints, and caches the grammars with what they learned from outputs.

    Args:
        ledger: accounts for the memory of the grammars.
        tokenizer: returns the tokenizer of the sequences; None if it is unknown.
    """

    name = "grammars"

    def __init__(self, ledger: Ledger, tokenizer: Callable[[], Any] | None) -> None:
        self._ledger, self._tokenizer = ledger, tokenizer
        self._kept: OrderedDict[tuple[str, OutputConstraint], _Kept] = OrderedDict()
        self._lock = Lock()

    def compiled(self, tenant: str, constraint: OutputConstraint) -> CompiledGrammar:
        """Return the grammar of a tenant's constraint; this takes milliseconds, at most a second.

        Raises:
            NotServedError: the tokenizer is unknown.
            InvalidConstraintError: the constraint is malformed or unsupported.
            LimitExceededError: there is no memory left for it.
        """
        if self._tokenizer is None:
            raise NotServedError(
                "constraints need the text of tokens: start the service with --tokenizer, give "
                "EmbeddedDrafter a tokenizer=, or open the session without a constraint"
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
        """Drop a tenant's grammars, because they contain what they learned from its outputs."""
        self.evict(scope.tenant)

    def bytes_by_tenant(self) -> Mapping[str, int]:
        """Return the memory that the grammars of each tenant hold."""
        held: Counter[str] = Counter()
        with self._lock:
            for (tenant, _), kept in self._kept.items():
                held[tenant] += kept.charge.num_bytes
        return held

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        """Drop the grammars of one tenant that `may_go` accepts; return whether there was one."""
        with self._lock:
            tenants = [tenant for tenant, _ in self._kept]
        found = next(filter(may_go, tenants), None)
        if found is not None:
            self.evict(found)
        return found is not None

    def evict(self, tenant: str) -> None:
        """Drop a tenant's grammars."""
        with self._lock:
            for key in [each for each in self._kept if each[0] == tenant]:
                del self._kept[key]
