"""The gRPC servicer of the admin plane: translates messages and calls the drafter's administration.

Calls that only read run on the event loop in slices. Calls that change something or wait run in
separate threads, which also record them in the audit log. They complete even if the caller leaves.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from indexer.errors import IndexerError, IndexNotFoundError
from indexer.reader import Index
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    NotPossibleError,
    RetrieverError,
    SettingsError,
    StateError,
    UnknownIndexError,
)
from retriever.operations.lifecycle import Phase
from retriever.operations.resolving import shown
from retriever.operations.service_report import Service
from retriever.plugins.admin.administration import (
    SLICE,
    Administration,
    SessionFilter,
)
from retriever.plugins.admin.audit import AuditLog
from retriever.plugins.admin.live_settings import CHANGEABLE, LiveSettings, as_json
from retriever.service.gate import Call
from retriever.sessions.bindings import Attached
from retriever.v1 import admin_pb2 as pb

_THREADS: Final = 4  # attaching an index may take seconds, and sessions can be ended meanwhile
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Administered:
    """The objects that an operator's calls work on.

    Attributes:
        service: the service; its drafter may not exist yet.
        settings: settings in force.
        audit: records changes.
        snapshots: absolute path of the folder for copies of the state; None if copies are disabled.
    """

    service: Service
    settings: LiveSettings
    audit: AuditLog
    snapshots: Path | None = None


class AdminServicer:
    """The calls of the admin contract, on one event loop.

    Method names are those of the contract; the gate turns their errors into statuses.

    Args:
        administered: the objects that the calls work on.
    """

    def __init__(self, administered: Administered) -> None:
        self._on = administered
        self._is_ended = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="foredraft-admin")

    async def ListSessions(
        self, request: pb.ListSessionsRequest, _call: Call
    ) -> AsyncIterator[pb.ListSessionsResponse]:
        with _in_the_contract():
            for part in self._administration().sessions(_filter_of(request.filter)):
                if part:
                    yield pb.ListSessionsResponse(sessions=part)
                await asyncio.sleep(0)

    async def EndSessions(
        self, request: pb.EndSessionsRequest, call: Call
    ) -> pb.EndSessionsResponse:
        with _in_the_contract():
            wanted = _filter_of(request.filter)
            if wanted.is_empty and not request.all:
                raise InvalidRequestError(
                    "which sessions? set something in the filter (--tenant, --name, --idle), or "
                    "`all` (--all)"
                )
            return await self._change(
                *("EndSessions", request, call),
                lambda administration: administration.end(wanted, forget=request.forget),
                lambda ended: {
                    "num_ended": ended.num_ended,
                    "num_kept": ended.num_kept,
                    "num_not_on_disk": ended.num_not_on_disk,
                },
            )

    async def ListTenants(
        self, request: pb.ListTenantsRequest, _call: Call
    ) -> AsyncIterator[pb.ListTenantsResponse]:
        del request
        with _in_the_contract():
            for part in _sliced(await self._look(Administration.tenants)):
                yield pb.ListTenantsResponse(tenants=part)

    async def EvictTenant(
        self, request: pb.EvictTenantRequest, call: Call
    ) -> pb.EvictTenantResponse:
        with _in_the_contract():
            was_in_memory, num_sessions = await self._change(
                *("EvictTenant", request, call),
                lambda administration: administration.evict(request.tenant, lose=request.lose),
                lambda found: {"was_in_memory": found[0], "num_sessions": found[1]},
            )
            return pb.EvictTenantResponse(was_in_memory=was_in_memory, num_sessions=num_sessions)

    async def GetUse(
        self, request: pb.GetUseRequest, _call: Call
    ) -> AsyncIterator[pb.GetUseResponse]:
        with _in_the_contract():
            tenant = _tenant_in(request)
            found = await self._look(lambda administration: administration.uses(tenant))
            since_s = self._on.service.began_s
            if tenant is None:
                others = self._administration().other_use
                yield pb.GetUseResponse(since_s=since_s, others=others)
            for part in _sliced(found):
                yield pb.GetUseResponse(tenants=part, since_s=since_s)

    async def ListAttachedIndexes(
        self, request: pb.ListAttachedIndexesRequest, _call: Call
    ) -> pb.ListAttachedIndexesResponse:
        with _in_the_contract():
            found = self._administration().indexes(_tenant_in(request))
            return pb.ListAttachedIndexesResponse(indexes=map(_index_info, found))

    async def AttachIndex(
        self, request: pb.AttachIndexRequest, call: Call
    ) -> pb.AttachIndexResponse:
        with _in_the_contract():
            attached = await self._change(
                *("AttachIndex", request, call),
                lambda administration: administration.attach(request.path, _tenant_in(request)),
                _index_told,
            )
            return pb.AttachIndexResponse(index=_index_info(attached))

    async def DetachIndex(
        self, request: pb.DetachIndexRequest, call: Call
    ) -> pb.DetachIndexResponse:
        with _in_the_contract():
            detached = await self._change(
                *("DetachIndex", request, call),
                lambda administration: administration.detach(request.path, _tenant_in(request)),
                _index_told,
            )
            return pb.DetachIndexResponse(index=_index_info(detached))

    async def GetSettings(
        self, request: pb.GetSettingsRequest, _call: Call
    ) -> pb.GetSettingsResponse:
        del request
        with _in_the_contract():
            live = self._on.settings
            return pb.GetSettingsResponse(
                settings=[
                    pb.Setting(
                        name=name,
                        value_json=as_json(shown(getattr(live.settings, name))),
                        origin=origin,
                        can_change=name in CHANGEABLE,
                    )
                    for name, origin in live.origins.items()
                ]
            )

    async def ReloadSettings(
        self, request: pb.ReloadSettingsRequest, call: Call
    ) -> pb.ReloadSettingsResponse:
        with _in_the_contract():
            reload = self._on.settings.reload
            if request.check_only:
                changes = await self._look(lambda each: reload(each, check_only=True))
            else:
                changes = await self._change(
                    *("ReloadSettings", request, call),
                    reload,
                    lambda found: {each.name: [each.before, each.after] for each in found},
                )
            return pb.ReloadSettingsResponse(
                changes=[
                    pb.SettingChange(
                        name=each.name,
                        before_json=as_json(each.before),
                        after_json=as_json(each.after),
                        origin=each.origin,
                    )
                    for each in changes
                ]
            )

    async def SnapshotState(
        self, request: pb.SnapshotStateRequest, call: Call
    ) -> pb.SnapshotStateResponse:
        with _in_the_contract():
            folder = self._on.snapshots
            if folder is None:
                raise NotPossibleError(
                    "there is no folder for copies of the state: start the service with --snapshots"
                )
            return await self._change(
                *("SnapshotState", request, call),
                lambda administration: administration.snapshot(folder, request.name),
                lambda made: {"path": made.path, "num_bytes": made.num_bytes},
            )

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        with _in_the_contract():
            was_draining, num_sessions = await self._change(
                *("Drain", request, call),
                lambda _: self._drain(),
                lambda found: {"was_draining": found[0], "num_sessions": found[1]},
            )
            return pb.DrainResponse(was_draining=was_draining, num_sessions=num_sessions)

    def shut_down(self) -> None:
        """Wait for changes in progress."""
        self._threads.shutdown()

    def _administration(self) -> Administration:
        service = self._on.service
        if service.drafter is None or service.observer.lifecycle.phase is Phase.STARTING:
            raise DrafterUnavailableError(
                "the service is starting: its health check tells when it is ready"
            )
        return Administration(service.drafter.state)

    def _drain(self) -> tuple[bool, int]:
        """Start to drain; return whether it had started before, and how many sessions are open."""
        service = self._on.service
        was_draining = self._is_ended or service.observer.lifecycle.phase is Phase.DRAINING
        self._is_ended = True
        if not was_draining:
            os.kill(os.getpid(), signal.SIGTERM)
        return was_draining, 0 if service.drafter is None else len(service.drafter.state.sessions)

    async def _look(self, look: Callable[[Administration], _Result]) -> _Result:
        """Run a query that may take some time in a thread; return its result."""
        administration = self._administration()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, look, administration)

    async def _change(
        self,
        name: str,
        request: Message,
        call: Call,
        act: Callable[[Administration], _Result],
        told: Callable[[_Result], dict[str, Any]],
    ) -> _Result:
        """Change something, and record it."""
        administration = self._administration()
        who = who_of(call)
        what = MessageToDict(request, preserving_proto_field_name=True)

        def change() -> _Result:
            with self._on.audit.change(who, name, what) as recorded:
                result = act(administration)
                recorded.outcome |= told(result)
                return result

        return await asyncio.get_running_loop().run_in_executor(self._threads, change)


def who_of(call: Call) -> str:
    """Return the name of the caller for the audit log."""
    return "unix socket" if call.caller is None else f"credential {call.caller.name}"


@contextmanager
def _in_the_contract() -> Iterator[None]:
    """Raise errors as the contract defines them; an operator sees the reason."""
    try:
        yield
    except (RetrieverError, IndexerError) as error:
        raise _as_in_the_contract(error) from error


def _as_in_the_contract(error: RetrieverError | IndexerError) -> RetrieverError:
    if isinstance(error, IndexNotFoundError):
        return UnknownIndexError(str(error))
    if isinstance(error, IndexerError | SettingsError | StateError):
        return NotPossibleError(str(error))
    return error


def _filter_of(message: pb.SessionFilter) -> SessionFilter:
    """Return the session filter of a message."""
    return SessionFilter(_tenant_in(message), message.session_id, message.min_idle_s)


def _tenant_in(message: Any) -> str | None:
    return message.tenant if message.HasField("tenant") else None


def _index_info(attached: Attached) -> pb.AttachedIndex:
    index = attached.index
    info = pb.AttachedIndex(
        path=str(index.path),
        tenant=attached.tenant,
        vocabulary_size=index.vocabulary.size,
        vocabulary_fingerprint=index.vocabulary.fingerprint,
    )
    if not isinstance(index, Index):
        info.is_missing = True
        return info
    info.snapshot, info.published_s, info.is_held = index.number, index.published_s, index.is_held
    info.num_tokens, info.num_documents = index.num_tokens, index.num_documents
    info.num_bytes = index.num_bytes
    return info


def _index_told(attached: Attached) -> dict[str, Any]:
    info = _index_info(attached)
    return {"snapshot": info.snapshot, "num_tokens": info.num_tokens}


def _sliced(items: Sequence[_Item]) -> Sequence[Sequence[_Item]]:
    return [items[begin : begin + SLICE] for begin in range(0, len(items), SLICE)]
