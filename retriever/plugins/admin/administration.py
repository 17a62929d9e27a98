"""Operations on a running drafter: inspect, end, evict, attach, change limits, copy the state.

All operations may run in any thread. They copy or change the drafter's data in slices under its
lock, with drafts in between.
"""

import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from indexer.reader import Index
from retriever.errors import InvalidRequestError, NotPossibleError, StateError
from retriever.limits import CHANGEABLE_LIMITS, check_session_name, check_tenant_name
from retriever.log.log_files import sync_path
from retriever.sequences import SessionKey
from retriever.sessions.bindings import Attached
from retriever.sessions.draft_counts import TenantUse
from retriever.sessions.drafter_state import PAUSE_S, DrafterState, finish
from retriever.sessions.session_table import Session
from retriever.v1 import admin_pb2 as pb

SLICE: Final = 64
"""Sessions or tenants per report. A report takes 0.2 ms, less than a slice of a long step."""

_ENDED_AT_ONCE: Final = 16  # with 1,000 tokens each, the lock is held for about 0.5 ms
_COPY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Selects the sessions that match all given fields.

    Attributes:
        tenant: tenant of the session; None for any tenant.
        session: name of the session; empty for any name.
        min_idle_s: least idle time, in seconds.

    Raises:
        InvalidRequestError: a name or the time is invalid.
    """

    tenant: str | None = None
    session: str = ""
    min_idle_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_idle_s < math.inf:
            raise InvalidRequestError(f"an idle time is 0 or more seconds, not {self.min_idle_s}")
        check_tenant_name(self.tenant or "")
        if self.session:
            check_session_name(self.session)

    @property
    def is_empty(self) -> bool:
        """Whether the filter matches all sessions."""
        return self == SessionFilter()

    def fits(self, key: SessionKey, session: Session, idle_s: float) -> bool:
        """Return whether a session matches."""
        return (
            self.tenant in {None, session.tenant}
            and self.session in {"", key.name}
            and idle_s >= self.min_idle_s
        )


class Administration:
    """Operations on one drafter.

    Args:
        state: state of the drafter.
    """

    def __init__(self, state: DrafterState) -> None:
        self._state = state

    def sessions(self, wanted: SessionFilter) -> Iterator[list[pb.SessionInfo]]:
        """Yield the matching sessions, the longest idle first, in slices of `SLICE`.

        They are selected before the first slice, so some may have ended when they are reported.
        """
        for part in _sliced(self._held()):
            yield [
                _report(key, session, idle_s)
                for key, session in part
                if wanted.fits(key, session, idle_s := self._state.sessions.idle_s(session))
            ]

    def end(self, wanted: SessionFilter, *, forget: bool) -> pb.EndSessionsResponse:
        """End the matching sessions; a newer session of the same name stays.

        Blocks until the outputs are written, unless `forget` is set.

        Args:
            wanted: selects the sessions.
            forget: remember nothing of their outputs.
        """
        failures = self._state.pools.log_failures
        num_ended = num_kept = 0
        for begin in range(0, len(held := self._held()), _ENDED_AT_ONCE):
            for key, session in held[begin : begin + _ENDED_AT_ONCE]:
                is_ended, is_kept = self._end(key, session, wanted, keep=not forget)
                num_ended += is_ended
                num_kept += is_kept
            time.sleep(PAUSE_S)
        self._state.flush()
        return pb.EndSessionsResponse(
            num_ended=num_ended,
            num_kept=num_kept,
            num_not_on_disk=self._state.pools.log_failures - failures,
        )

    def tenants(self) -> list[pb.TenantInfo]:
        """Return what each tenant holds, by name; blocks for a few pauses."""
        found = _Reports()
        for part in _sliced(self._held()):
            for _, session in part:
                report = found[session.tenant]
                report.num_sessions += 1
                report.session_tokens += len(session.databases.context)
                report.session_bytes += session.databases.num_bytes
            time.sleep(PAUSE_S)
        for pool in self._state.pools.all():
            report = found[pool.tenant]
            report.is_in_memory = True
            report.generations_bytes = pool.num_bytes
            with self._state.lock:
                report.generations_tokens = pool.generations.num_tokens
        for name, num_bytes in self._state.findings.bytes_by_tenant().items():
            found[name].recycled_bytes = num_bytes
        own = Counter(each.tenant for each in self._state.bindings.attached())
        for tenant, num_own in own.items():
            if tenant is not None:
                found[tenant].num_own_indexes = num_own
        return [found[tenant] for tenant in sorted(found)]

    def uses(self, tenant: str | None = None) -> list[pb.UseInfo]:
        """Return the usage of tenants, by name; blocks as `tenants` does.

        Args:
            tenant: tenant to report on; None for all.
        """
        if tenant is not None:
            check_tenant_name(tenant)
        held = {each.tenant: each for each in self.tenants()}
        uses = self._state.uses.copy()
        named = sorted({*held, *uses}) if tenant is None else [tenant]
        return [
            _use(name, uses.get(name, TenantUse()), _bytes_of(held[name]) if name in held else 0)
            for name in named
        ]

    @property
    def other_use(self) -> pb.UseInfo:
        """The usage of tenants that are no longer counted separately."""
        return _use("", self._state.uses.others, 0)

    def evict(self, tenant: str, *, lose: bool) -> tuple[bool, int]:
        """Evict a tenant's generations and findings from memory; those on disk stay.

        Args:
            tenant: tenant to evict.
            lose: whether to evict even if none are on disk.

        Returns:
            Whether they were in memory, and the number of open sessions that keep them in memory
            until they end.

        Raises:
            NotPossibleError: they would be lost.
        """
        check_tenant_name(tenant)
        pools, findings = self._state.pools, self._state.findings
        would_be_lost = tenant in pools or tenant in findings.bytes_by_tenant()
        if would_be_lost and not (pools.is_logged or lose):
            raise NotPossibleError(
                "this service keeps no state, so the tenant's outputs would be lost: start it "
                "with --state, or allow it (lose)"
            )
        was_there = tenant in pools
        pools.evict(tenant)
        findings.evict(tenant)
        self._state.flush()  # writes its weights
        return was_there, sum(session.tenant == tenant for _, session in self._held())

    def indexes(self, tenant: str | None = None) -> list[Attached]:
        """Return the indexes, or those that a tenant drafts from."""
        if tenant is not None:
            check_tenant_name(tenant)
        attached = self._state.bindings.attached()
        return [each for each in attached if tenant is None or each.tenant in {None, tenant}]

    def attach(self, path: str, tenant: str | None = None) -> Attached:
        """Draft from one more index; blocks until it is open and warm.

        Args:
            path: absolute path of the index.
            tenant: only tenant that drafts from it; None for all.

        Raises:
            InvalidRequestError: the path or tenant is invalid.
            NotPossibleError: the index is attached already, or the vocabulary of the tokens is
                unknown.
            indexer.errors.IndexerError: it cannot be opened, or has another tokenizer.
        """
        checked = _checked_path(path, tenant)
        vocabulary = self._state.vocabulary
        if vocabulary is None:
            # Tokens of open sessions were never checked: a search could read beyond the tables.
            raise NotPossibleError(
                "this service started without an index and without --tokenizer, so it is unknown "
                "which tokens it was sent: start it with one of them"
            )
        opened = partial(Index.open, vocabulary=vocabulary, hold=self._state.hold)
        return self._state.bindings.attach(checked, tenant, opened)

    def detach(self, path: str, tenant: str | None = None) -> Attached:
        """Stop drafting from an index; its files stay.

        Raises:
            InvalidRequestError: the path or tenant is invalid.
            UnknownIndexError: the index is not attached to this tenant, or to all.
        """
        return self._state.bindings.detach(_checked_path(path, tenant), tenant)

    def change_limits(self, changes: Mapping[str, float]) -> None:
        """Change limits; what is already open stays, even beyond the new limits.

        Args:
            changes: new values by name.

        Raises:
            NotPossibleError: a limit cannot change while the drafter runs; nothing is changed.
        """
        fixed = sorted(changes.keys() - CHANGEABLE_LIMITS)
        if fixed:
            raise NotPossibleError(f"{', '.join(fixed)} cannot change while this runs: restart")
        with self._state.lock:
            before: Any = self._state.limits
            self._state.take_limits(replace(before, **changes))

    def refresh_every(self, refresh_s: float) -> None:
        """Set the period of the check for changed indexes, in seconds; 0 for never."""
        self._state.bindings.watch(refresh_s)

    def snapshot(self, folder: Path, name: str = "") -> pb.SnapshotStateResponse:
        """Copy the state directory as it is now to a new folder; blocks until it is on disk.

        Args:
            folder: folder of all copies.
            name: name of the new folder in it; derived from the time if empty.

        Raises:
            InvalidRequestError: the name is invalid.
            NotPossibleError: there is no state, such a copy exists, or a copy is being made.
            StateError: the disk refuses.
        """
        name = name or f"state-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        if _COPY_NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                "a copy's name has 1 to 128 letters, digits, `.`, `_` and `-`, and begins with a "
                "letter or a digit"
            )
        if not self._state.copying.acquire(blocking=False):
            raise NotPossibleError("a copy is being made: ask again when it is done")
        try:
            began_s = time.monotonic()
            num_bytes = self._copy(folder, name)
            seconds = time.monotonic() - began_s
            path = str(folder / name)
            return pb.SnapshotStateResponse(path=path, num_bytes=num_bytes, seconds=seconds)
        finally:
            self._state.copying.release()

    def _copy(self, folder: Path, name: str) -> int:
        """Copy to a hidden folder, which is renamed once it is complete."""
        whole, partial = folder / name, folder / f".{name}.partial"
        if whole.exists():
            raise NotPossibleError(f"there is a copy {whole} already: choose another name")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if partial.exists():  # left by a killed process
                shutil.rmtree(partial)
            try:
                num_bytes = self._state.pools.snapshot(partial, self._state.lock)
                partial.rename(whole)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_path(folder)
        except OSError as error:
            raise StateError(
                f"the state cannot be copied to {whole}: {error.strerror or error}; free space and "
                "permissions, and ask again"
            ) from error
        return num_bytes

    def _held(self) -> list[tuple[SessionKey, Session]]:
        with self._state.lock:
            return self._state.sessions.items()

    def _end(
        self, key: SessionKey, session: Session, wanted: SessionFilter, *, keep: bool
    ) -> tuple[bool, bool]:
        """End a session if it is open and matches; return whether it ended, and is remembered.

        A session with a long commit in progress is not remembered, because its tokens are still
        being written.
        """
        sessions = self._state.sessions
        with self._state.lock:
            if not wanted.fits(key, session, sessions.idle_s(session)):
                return False, False
            is_whole = not session.is_committing
            if not sessions.discard([(key, session)]):
                return False, False
            num_output = len(session.databases.context) - session.prompt_length
            if not (keep and session.remember and is_whole and num_output):
                return True, False
            _, pieces = self._state.remembering(key, session)
        finish(self._state.locked(pieces))
        return True, True


def _sliced(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    for begin in range(0, len(items), SLICE):
        yield list(items[begin : begin + SLICE])


class _Reports(dict[str, pb.TenantInfo]):
    """Reports by tenant, created on first access."""

    def __missing__(self, tenant: str) -> pb.TenantInfo:
        report = self[tenant] = pb.TenantInfo(tenant=tenant)
        return report


def _report(key: SessionKey, session: Session, idle_s: float) -> pb.SessionInfo:
    context = session.databases.context
    return pb.SessionInfo(
        tenant=session.tenant,
        session_id=key.name,
        num_tokens=len(context),
        num_prompt_tokens=session.prompt_length,
        num_bytes=session.databases.num_bytes,
        idle_s=max(0.0, idle_s),
        is_kept=session.remember,
    )


def _bytes_of(tenant: pb.TenantInfo) -> int:
    """Return the memory of a tenant's sessions, generations and findings, in bytes."""
    return int(tenant.session_bytes + tenant.generations_bytes + tenant.recycled_bytes)


def _use(tenant: str, use: TenantUse, num_bytes: int) -> pb.UseInfo:
    return pb.UseInfo(
        tenant=tenant,
        num_drafts=use.drafts,
        num_nodes=use.nodes,
        num_tokens=use.tokens,
        work_s=use.seconds,
        num_refused=use.refused,
        num_bytes=num_bytes,
    )


def _checked_path(path: str, tenant: str | None) -> Path:
    if tenant is not None:
        check_tenant_name(tenant)
    if "\0" in path or not Path(path).is_absolute():
        raise InvalidRequestError(
            f"name an index by its absolute path on the service's machine, not {path[:80]!r}"
        )
    return Path(path)
