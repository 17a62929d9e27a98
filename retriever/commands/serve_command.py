"""The command that serves drafts."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from indexer.flags import Given
from indexer.launch import plugged
from retriever.commands.options import progress
from retriever.operations.logs import log_event, log_to_standard_error
from retriever.operations.observer import ServiceObserver, Tracing
from retriever.operations.resolving import resolve
from retriever.operations.service_report import Service
from retriever.operations.settings import Settings
from retriever.operations.web import Web, WebAddress
from retriever.security.protection import Protection, ProtectionFiles
from retriever.service.addresses import SocketAccess, check_address
from retriever.service.serving import serve as serve_forever
from retriever.sessions.bindings import BoundPaths, parsed_bindings
from retriever.sessions.drafter_plugins import PluginOptions
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import check_files, indexed_tokenizer, load_phrases
from retriever.traces.traces import ChatEncoder

_logger = logging.getLogger(__name__)


def serve_drafts(config: Path | None, flags: Given[Settings]) -> None:
    """Serve drafts over gRPC until interrupted; see `foredraft serve --help`."""
    resolve_again = partial(resolve, Settings, flags, os.environ, config)
    resolved = resolve_again()
    settings = resolved.settings
    log_to_standard_error(settings.log_format, settings.log_level)
    observer = ServiceObserver(reflection=settings.reflection, tracing=_tracing(settings))
    protection = _protection(settings)
    socket_access = SocketAccess.of(settings.socket_mode, settings.socket_group)
    service = Service(None, observer, time.time())
    plane = nullcontext()
    if settings.admin_address is not None:
        admin = plugged("retriever.plugins.admin.admin_serving", "--admin-address")
        plane = admin.AdminPlane.of(resolved, resolve_again, service, protection).serving()
    serve_until_told = partial(
        serve_forever,
        partial(_open_for, service, settings),
        settings.limits.max_message_bytes,
        settings.address,
        observer,
        protection,
        socket_access=socket_access,
        pad_replies=settings.pad_replies,
        drain_s=settings.drain_s,
        models=settings.model,
    )
    try:
        with _shown(settings, service):
            asyncio.run(_administered(plane, serve_until_told))
    finally:
        if service.drafter is not None:
            service.drafter.shut_down()
        observer.shut_down()


def _tracing(settings: Settings) -> Tracing | None:
    """Return the tracer, which traces a share of calls; None if tracing is off."""
    if settings.trace_ratio <= 0:
        return None
    endpoint = settings.trace_endpoint
    make = plugged("retriever.plugins.tracing.tracing", "--trace-ratio").tracing_of
    tracing: Tracing = make(settings.trace_ratio, endpoint.shown() if endpoint else None)
    return tracing


async def _administered(
    plane: AbstractAsyncContextManager[object],
    serve_drafts: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Run the admin service while drafts are served."""
    async with plane:
        await serve_drafts()


@contextmanager
def _shown(settings: Settings, service: Service) -> Iterator[None]:
    """Serve metrics and the status page during the block, if enabled."""
    if settings.metrics_address is None:
        yield
        return
    address = WebAddress.parsed(settings.metrics_address)
    web = Web(service, address, status_page=settings.status_page)
    log_event(_logger, logging.INFO, "metrics", "metrics are served", address=str(web.address))
    try:
        yield
    finally:
        web.close()


def _protection(settings: Settings) -> Protection:
    """Return the protection of the service, after checking that it may listen on its address."""
    protection = Protection.of(
        ProtectionFiles(
            settings.certificate,
            settings.key,
            settings.client_ca,
            settings.access,
            settings.insecure,
            settings.credentials_grace_s,
        )
    )
    check_address(settings.address)
    protection.check(settings.address)
    return protection


def _open_for(service: Service, settings: Settings) -> EmbeddedDrafter:
    """Open the drafter of a service, and include it in reports from then on."""
    service.drafter = _open(settings)
    return service.drafter


def _open(settings: Settings) -> EmbeddedDrafter:
    indexes = parsed_bindings(settings.tenant_index, "--tenant-index")
    lists = parsed_bindings(settings.tenant_phrases, "--tenant-phrases")
    check_files(
        [*settings.index, *chain.from_iterable(indexes.values())],
        [*settings.phrases, *chain.from_iterable(lists.values())],
        skip_missing=settings.missing_indexes == "skip",
    )
    skips = settings.missing_indexes == "skip"
    named = None if skips else indexed_tokenizer(settings.index)
    encoder = ChatEncoder(settings.tokenizer, named)
    load = partial(
        load_phrases, encode=encoder.encode_output, indexes=settings.index, track=progress
    )
    listed = {
        tenant: load([*settings.phrases, *own], vocabulary=encoder.vocabulary)
        for tenant, own in lists.items()
    }
    return EmbeddedDrafter.open_indexes(
        settings.index,
        vocabulary=encoder.vocabulary,
        limits=settings.limits,
        state=settings.state,
        durability=settings.durability,
        phrases=load(settings.phrases, vocabulary=encoder.vocabulary),
        hold_indexes=settings.hold_indexes,
        skip_missing=settings.missing_indexes == "skip",
        refresh_s=settings.refresh,
        tokenizer=(lambda: encoder.tokenizer) if settings.tokenizer or named else None,
        bound=BoundPaths(indexes, {tenant: own for tenant, own in listed.items() if own}),
        plugins=_plugins(settings),
    )


def _plugins(settings: Settings) -> list[PluginOptions]:
    """Return the options of plugins that store the drafter's data."""
    if settings.redis is None:
        return []
    options = plugged("retriever.plugins.replication.options", "--redis").ReplicationOptions
    return [options(settings.redis.get_secret_value())]
