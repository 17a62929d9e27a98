"""Findings of decoders, stored by tenant and model: in memory, or in the state directory.

Ouroboros (Zhao et al., 2024, arXiv:2402.13720) drafts from phrases that verification discarded.
Here we store the results of passes, the likely next tokens of contexts, for later runs and for
other decoders of the same model. Findings come in pieces of some thousand contexts. For a context,
a later piece replaces the findings of an earlier one. Pieces are merged when the tenant's limit is
reached, not with every piece.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

import numpy as np

from retriever.drafter import FINDING_BYTES, Findings, FoundPage
from retriever.errors import NotPossibleError, StorageError
from retriever.limits import MAX_FINDINGS, Limits, check_findings, check_model
from retriever.log.log_store import FoundRecord
from retriever.log.pools import Pools
from retriever.predict.generations import Scope, steady_time
from retriever.predict.ledger import Charge, Ledger
from retriever.sessions.drafter_plugins import FindingsKeeper
from retriever.sessions.drafter_state import DrafterState

_MOST_PIECES: Final = 256
"""Most pieces of a tenant before they are merged: short runs add small pieces and long lists."""

_KEPT_SHARE: Final = 0.75
"""Share of the limit that remains after the limit is reached. Merging 20 MB takes about 0.1 s, and
this way it happens once for many pieces."""

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Piece:
    """A piece of findings of one model.

    Attributes:
        number: number of the piece, increasing within a tenant.
        time_s: arrival time of the oldest findings, in seconds since 1970.
        model: fingerprint of the model.
        num_contexts: number of contexts.
        findings: the findings; None if they are only in the log.
    """

    number: int
    time_s: float
    model: str
    num_contexts: int
    findings: Findings | None


@dataclass(slots=True)
class _Shelf:
    """The pieces of one tenant, oldest first."""

    pieces: list[_Piece] = field(default_factory=list)
    charge: Charge | None = None
    next_number: int = 1

    @property
    def num_bytes(self) -> int:
        return FINDING_BYTES * sum(piece.num_contexts for piece in self.pieces)


class KeptFindings(FindingsKeeper):
    """Findings of decoders, by tenant and model. Thread-safe; calls may wait for a disk.

    With a log, findings are only in the log. Without a log, the findings of the most recent tenants
    are in memory.

    Args:
        pools: pools of the tenants; they have the log, and know which tenants' data is being
            deleted.
        ledger: the memory ledger.
        limits: returns the limits in force.
        clock: returns seconds since 1970.

    Attributes:
        num_bytes: memory of findings.
    """

    def __init__(
        self,
        pools: Pools,
        ledger: Ledger,
        limits: Callable[[], Limits],
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._pools = pools
        self._ledger = ledger
        self._limits = limits
        self._clock = clock
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._lock = Lock()  # never waited for while the drafter's lock is held
        self.num_bytes = 0

    def share(
        self, tenant: str, model: str, findings: Findings, vocabulary_size: int | None
    ) -> None:
        """Store findings; drop the tenant's oldest findings if its limit is reached.

        Args:
            tenant: tenant of the decoder.
            model: fingerprint of the model.
            findings: findings of at most `MAX_FINDINGS` contexts.
            vocabulary_size: bound on token ids; None if unknown.

        Raises:
            InvalidRequestError: the findings are invalid or too many.
            NotPossibleError: this service stores no findings.
            LimitExceededError: there is no room, or the tenant's data is being deleted.
            StorageError: the disk refuses.
        """
        self._check(model)
        check_findings(findings.contexts, findings.tokens, findings.log_odds, vocabulary_size)
        if not len(findings):
            return
        with self._lock:
            shelf = self._shelf(tenant)
            piece = _Piece(shelf.next_number, self._clock(), model, len(findings), findings)
            shelf.next_number += 1
            self._take_room(tenant, shelf, findings.num_bytes)
            self._change(tenant, shelf, [*shelf.pieces, piece], [piece])
            if shelf.num_bytes > self._bound or len(shelf.pieces) > _MOST_PIECES:
                self._shrink(tenant, shelf)

    def fetch(self, tenant: str, model: str, before: int = 0) -> FoundPage:
        """Return a page of a tenant's findings for a model, newest first.

        Args:
            tenant: tenant whose findings are read.
            model: fingerprint of the model.
            before: `before` of the last page; 0 for the first page.

        Raises:
            InvalidRequestError: the fingerprint is invalid.
            NotPossibleError: this service stores no findings.
            LimitExceededError: the tenant's data is being deleted.
        """
        self._check(model)
        with self._lock:
            pieces = [
                piece
                for piece in self._shelf(tenant).pieces
                if piece.model == model and (not before or piece.number < before)
            ]
            page: list[_Piece] = []
            while pieces and (
                not page or pieces[-1].num_contexts + _contexts_of(page) <= MAX_FINDINGS
            ):
                page.append(pieces.pop())
            found = [self._read(tenant, piece) for piece in reversed(page)]
        return FoundPage(Findings.joined(found), page[-1].number if pieces else 0)

    def bytes_by_tenant(self) -> dict[str, int]:
        """Return the memory of each tenant's findings."""
        with self._lock:
            held = [(name, shelf) for name, shelf in self._shelves.items() if shelf.charge]
            return {name: shelf.num_bytes for name, shelf in held if shelf.pieces}

    def on_deleted(self, scope: Scope) -> None:
        """Drop all findings of the tenant, because findings of different sessions are merged.

        The log deletes its copies itself.
        """
        self.evict(scope.tenant)

    def evict(self, tenant: str) -> None:
        """Drop a tenant's findings from memory."""
        with self._lock:
            shelf = self._shelves.pop(tenant, None)
            if shelf is not None:
                self._account(shelf, [])

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        """Evict the findings of the least recently used tenant from memory, if there is one.

        Never waits: while the findings are locked, nothing is evicted.

        Args:
            may_go: returns whether the findings of a tenant may be evicted.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            held = (name for name, shelf in self._shelves.items() if shelf.charge and shelf.pieces)
            tenant = next(filter(may_go, held), None)
            if tenant is not None:
                self._account(self._shelves.pop(tenant), [])
            return tenant is not None
        finally:
            self._lock.release()

    @property
    def _bound(self) -> int:
        return self._limits().recycled_bytes

    def _check(self, model: str) -> None:
        check_model(model)
        if not self._bound:
            raise NotPossibleError(
                "recycled logits are not stored here (recycled_bytes is 0): start the service with "
                "--recycled-bytes, or the decoder with --recycled-bytes 0"
            )

    # Called with the lock held.

    def _shelf(self, tenant: str) -> _Shelf:
        """Return a tenant's shelf, without expired pieces."""
        self._pools.check_kept(tenant)
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = self._loaded(tenant)
            if len(self._shelves) > self._limits().max_tenants:
                self._account(self._shelves.pop(next(iter(self._shelves))), [])
        self._shelves.move_to_end(tenant)
        oldest_s = self._clock() - self._limits().generations_age_s
        if any(piece.time_s < oldest_s for piece in shelf.pieces):
            self._account(shelf, [piece for piece in shelf.pieces if piece.time_s >= oldest_s])
        return shelf

    def _loaded(self, tenant: str) -> _Shelf:
        log, now_s = self._pools.log, self._clock()
        records = [] if log is None else log.findings(tenant)
        pieces = []
        for each in records:
            findings = _decoded(each)
            if findings is not None:
                time_s = min(each.time_s, now_s)
                pieces.append(_Piece(each.number, time_s, each.model, len(findings), None))
        return _Shelf(pieces, next_number=1 + max((each.number for each in records), default=0))

    def _read(self, tenant: str, piece: _Piece) -> Findings:
        if piece.findings is not None:
            return piece.findings
        log = self._pools.log
        record = None if log is None else log.found(tenant, piece.number)
        return (None if record is None else _decoded(record)) or Findings.none()

    def _take_room(self, tenant: str, shelf: _Shelf, num_bytes: int) -> None:
        """Charge memory for findings, unless they go to the log.

        Raises:
            LimitExceededError: there is no room for them.
        """
        if self._pools.log is None:
            if shelf.charge is None:
                shelf.charge = self._ledger.take(tenant, 0)
            shelf.charge.ensure(shelf.num_bytes + num_bytes)

    def _change(
        self, tenant: str, shelf: _Shelf, pieces: list[_Piece], added: list[_Piece]
    ) -> None:
        """Replace a shelf's pieces, in the log first.

        Raises:
            StorageError: the disk refuses; the shelf is unchanged.
        """
        log = self._pools.log
        if log is not None:
            records = [_encoded(piece) for piece in added]
            kept = {piece.number for piece in pieces}
            removed = [each.number for each in shelf.pieces if each.number not in kept]
            log.put_findings(tenant, records, removed)
            for piece in added:
                piece.findings = None
        self._account(shelf, pieces)

    def _account(self, shelf: _Shelf, pieces: list[_Piece]) -> None:
        """Replace a shelf's pieces, and account for their memory."""
        before, shelf.pieces = shelf.pieces, pieces
        if shelf.charge is not None:
            num_bytes = shelf.num_bytes
            shelf.charge.settle(num_bytes)
            self.num_bytes += num_bytes - FINDING_BYTES * sum(each.num_contexts for each in before)

    def _shrink(self, tenant: str, shelf: _Shelf) -> None:
        """Merge pieces: the latest findings of each context stay, and the oldest are dropped."""
        began = time.perf_counter()
        joined = [
            piece
            for model in dict.fromkeys(piece.model for piece in shelf.pieces)
            for piece in self._joined(tenant, shelf, model)
        ]
        joined.sort(key=lambda piece: piece.number)  # by the piece of their newest context
        while joined and FINDING_BYTES * _contexts_of(joined) > _KEPT_SHARE * self._bound:
            joined.pop(0)
        for piece in joined:
            piece.number = shelf.next_number
            shelf.next_number += 1
        with suppress(StorageError):  # logged there; retried with the next piece
            self._change(tenant, shelf, joined, joined)
        _LOGGER.debug("joined findings in %.0f ms", 1e3 * (time.perf_counter() - began))

    def _joined(self, tenant: str, shelf: _Shelf, model: str) -> list[_Piece]:
        """Return a model's findings as pieces of `MAX_FINDINGS` contexts, each context once."""
        pieces = [piece for piece in shelf.pieces if piece.model == model]
        read = [self._read(tenant, piece) for piece in pieces]
        findings = Findings.joined(read)
        origins = np.repeat(np.arange(len(pieces)), [len(each) for each in read])
        places = findings.latest()
        joined = []
        for end in range(len(places), 0, -MAX_FINDINGS):
            part = places[max(0, end - MAX_FINDINGS) : end]
            oldest, newest = pieces[origins[part[0]]], pieces[origins[part[-1]]]
            joined.append(
                _Piece(newest.number, oldest.time_s, model, len(part), findings.part(part))
            )
        return joined[::-1]


def attach(state: DrafterState) -> KeptFindings:
    """Return the store for a drafter's findings."""
    return KeptFindings(state.pools, state.ledger, lambda: state.limits)


def _contexts_of(pieces: list[_Piece]) -> int:
    return sum(piece.num_contexts for piece in pieces)


def _encoded(piece: _Piece) -> FoundRecord:
    """Return the record of a piece whose findings are in memory."""
    findings = piece.findings or Findings.none()
    content = b"".join(findings.to_bytes())
    return FoundRecord(piece.number, piece.time_s, piece.model, content)


def _decoded(record: FoundRecord) -> Findings | None:
    """Return the findings of a record; None if it is invalid."""
    count, rest = divmod(len(record.content), FINDING_BYTES)
    if rest:
        return None
    contexts = 8 * count
    tokens = contexts + (len(record.content) - contexts) // 2
    content = record.content
    return Findings.from_bytes(content[:contexts], content[contexts:tokens], content[tokens:])
