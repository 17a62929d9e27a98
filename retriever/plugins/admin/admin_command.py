"""The commands that administer a running service, through its admin plane."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from google.protobuf.message import Message
from pydantic import Field

from indexer.flags import AsJson, CommandLine, Metavar, with_flags
from retriever.commands.options import clear_errors
from retriever.errors import InvalidRequestError
from retriever.operations.settings import CredentialSettings
from retriever.plugins.admin.administrator import administering, messages as pb

_SMALL: Final = 100_000  # bytes; below, MB would show 0.0
ADDRESS_VARIABLE: Final = "FOREDRAFT_ADMIN_ADDRESS"

app = CommandLine(
    "Inspect and change a running service: sessions, tenants, indexes, settings. "
    "The service needs --admin-address.",
    epilog="Where: --address or FOREDRAFT_ADMIN_ADDRESS, the --admin-address of the service. "
    "Who: on a unix socket, the user that the service runs as; if the service has --access, "
    "a token of the scope admin (`foredraft access token --scope admin`), from --credentials or "
    "FOREDRAFT_REMOTE_TOKEN_FILE.",
)


class PlaneSettings(CredentialSettings):
    """The address on which a service answers its operators."""

    address: Annotated[
        str | None,
        Metavar("ADDRESS"),
        Field(
            description="The --admin-address of the service: unix:PATH or HOST:PORT. "
            f"Default: {ADDRESS_VARIABLE}."
        ),
    ] = None
    timeout_s: Annotated[
        float,
        Metavar("SECONDS"),
        Field(gt=0, allow_inf_nan=False, description="Longest wait for an answer."),
    ] = 60.0


Tenant = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel="Filter",
        help='Only of this tenant; "" for callers without one. Default: of all.',
    ),
]
Name = Annotated[str, typer.Option(metavar="NAME", rich_help_panel="Filter", help="Of this name.")]
Idle = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", rich_help_panel="Filter", help="Idle for at least this long."
    ),
]
Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="An absolute path on the service's machine.")
]


@app.command("sessions")
@clear_errors()
@with_flags
def list_sessions(
    tenant: Tenant = None,
    name: Name = "",
    idle: Idle = 0.0,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """List open sessions, the longest idle first, with their idle time, size and tenant.

    All given options must match.
    """
    request = pb.ListSessionsRequest(filter=_filter(tenant, name, idle))
    with _calling(plane) as (calls, timeout_s):
        answers = calls.ListSessions(request, timeout=timeout_s)
        found = [session for answer in answers for session in answer.sessions]
    columns: _Columns = {
        "TENANT": lambda each: each.tenant,
        "SESSION": lambda each: each.session_id,
        "TOKENS": lambda each: each.num_tokens,
        "PROMPT": lambda each: each.num_prompt_tokens,
        "MEMORY": lambda each: _size(each.num_bytes),
        "IDLE": lambda each: _duration(each.idle_s),
        "OUTPUT": lambda each: "kept" if each.is_kept else "forgotten",
    }
    _show_all(found, columns, "no session is open", as_json=as_json)


@app.command("end")
@clear_errors()
@with_flags
def end_sessions(
    tenant: Tenant = None,
    name: Name = "",
    idle: Idle = 0.0,
    everything: Annotated[
        bool, typer.Option("--all", rich_help_panel="Filter", help="End all open sessions.")
    ] = False,
    forget: Annotated[
        bool, typer.Option(rich_help_panel="Filter", help="Keep nothing of their outputs.")
    ] = False,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """End the sessions that match all given options; their outputs so far are kept.

    The next step of an ended session is refused, and the engine opens the session again.

    Example: `foredraft admin end --tenant acme --idle 30`
    """
    request = pb.EndSessionsRequest(
        filter=_filter(tenant, name, idle), forget=forget, all=everything
    )
    with _calling(plane) as (calls, timeout_s):
        ended = calls.EndSessions(request, timeout=timeout_s)
    said = f"sessions ended: {ended.num_ended}, outputs kept: {ended.num_kept}"
    if ended.num_not_on_disk:
        said += f", only in memory because the disk refused: {ended.num_not_on_disk}"
    _show(ended, said, as_json=as_json)


@app.command("tenants")
@clear_errors()
@with_flags
def list_tenants(*, plane: PlaneSettings, as_json: AsJson = False) -> None:
    """List what each tenant has in memory: sessions, generations and recycled logits."""
    with _calling(plane) as (calls, timeout_s):
        answers = calls.ListTenants(pb.ListTenantsRequest(), timeout=timeout_s)
        found = [tenant for answer in answers for tenant in answer.tenants]
    columns: _Columns = {
        "TENANT": lambda each: each.tenant,
        "SESSIONS": lambda each: each.num_sessions,
        "TOKENS": lambda each: each.session_tokens,
        "MEMORY": lambda each: _size(each.session_bytes),
        "GENERATIONS": lambda each: each.generations_tokens if each.is_in_memory else "not loaded",
        "OF MEMORY": lambda each: _size(each.generations_bytes),
        "RECYCLED": lambda each: _size(each.recycled_bytes),
        "OWN INDEXES": lambda each: each.num_own_indexes,
    }
    _show_all(found, columns, "no tenant is in memory", as_json=as_json)


@app.command("evict")
@clear_errors()
@with_flags
def evict(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose generations.")],
    lose: Annotated[
        bool, typer.Option(help="Evict even if the service keeps no state, so that they are lost.")
    ] = False,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """Evict a tenant's generations from memory; those on disk stay, and are loaded when needed."""
    request = pb.EvictTenantRequest(tenant=tenant, lose=lose)
    with _calling(plane) as (calls, timeout_s):
        evicted = calls.EvictTenant(request, timeout=timeout_s)
    if not evicted.was_in_memory:
        said = "it was not in memory"
    elif evicted.num_sessions:
        said = f"it leaves memory once its open sessions have ended: {evicted.num_sessions}"
    else:
        said = "it has left memory"
    _show(evicted, said, as_json=as_json)


@app.command("indexes")
@clear_errors()
@with_flags
def list_indexes(tenant: Tenant = None, *, plane: PlaneSettings, as_json: AsJson = False) -> None:
    """List the indexes that are drafted from, and their tenants."""
    request = pb.ListAttachedIndexesRequest(tenant=tenant)
    with _calling(plane) as (calls, timeout_s):
        found = calls.ListAttachedIndexes(request, timeout=timeout_s).indexes
    columns: _Columns = {
        "FOR": lambda each: each.tenant if each.HasField("tenant") else "all",
        "PATH": lambda each: each.path,
        "SNAPSHOT": lambda each: each.snapshot,
        "DOCUMENTS": lambda each: each.num_documents,
        "TOKENS": lambda each: each.num_tokens,
        "SIZE": lambda each: _size(each.num_bytes),
        "WHERE": _place_of,
    }
    _show_all(found, columns, "no index is attached", as_json=as_json)


@app.command("attach")
@clear_errors()
@with_flags
def attach(
    path: Folder,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only tenant that drafts from it. Default: all."),
    ] = None,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """Draft from one more index until the service ends.

    To keep it, also add it to `index` or `tenant_index` in the service's settings.
    """
    request = pb.AttachIndexRequest(path=path, tenant=tenant)
    with _calling(plane) as (calls, timeout_s):
        attached = calls.AttachIndex(request, timeout=timeout_s)
    told = attached.index
    said = f"{told.path} is drafted from: {told.num_documents} documents, {told.num_tokens} tokens"
    _show(told, said, as_json=as_json)


@app.command("detach")
@clear_errors()
@with_flags
def detach(
    path: Folder,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only tenant that drafts from it. Default: all do."),
    ] = None,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """Stop drafting from an index; its files stay.

    Also remove it from the service's settings, or it is drafted from again after a restart.
    """
    request = pb.DetachIndexRequest(path=path, tenant=tenant)
    with _calling(plane) as (calls, timeout_s):
        detached = calls.DetachIndex(request, timeout=timeout_s)
    _show(detached.index, f"{detached.index.path} is no longer drafted from", as_json=as_json)


@app.command("use")
@clear_errors()
@with_flags
def show_use(tenant: Tenant = None, *, plane: PlaneSettings, as_json: AsJson = False) -> None:
    """Show the usage of tenants since the service started."""
    with _calling(plane) as (calls, timeout_s):
        answers = list(calls.GetUse(pb.GetUseRequest(tenant=tenant), timeout=timeout_s))
    found = [use for answer in answers for use in answer.tenants]
    others = [answer.others for answer in answers if answer.HasField("others")]
    if as_json:
        rest = as_object(others[0]) if others else None
        print(json.dumps({"tenants": list(map(as_object, found)), "others": rest}, indent=2))
        return
    columns: _Columns = {
        "TENANT": lambda each: "(those of long ago)" if each in others else each.tenant,
        "DRAFTS": lambda each: each.num_drafts,
        "NODES": lambda each: each.num_nodes,
        "TOKENS": lambda each: each.num_tokens,
        "WORK": lambda each: _duration(each.work_s),
        "REFUSED": lambda each: each.num_refused,
        "MEMORY NOW": lambda each: _size(each.num_bytes),
    }
    _show_all([*found, *others], columns, "no tenant has used anything", as_json=False)


@app.command("settings")
@clear_errors()
@with_flags
def show_settings(*, plane: PlaneSettings, as_json: AsJson = False) -> None:
    """Show the settings in force, where each comes from, and which a reload can change."""
    with _calling(plane) as (calls, timeout_s):
        found = calls.GetSettings(pb.GetSettingsRequest(), timeout=timeout_s).settings
    columns: _Columns = {
        "SETTING": lambda each: each.name,
        "VALUE": lambda each: each.value_json,
        "FROM": lambda each: each.origin,
        "CHANGES BY": _changes_by,
    }
    _show_all(found, columns, "no settings", as_json=as_json)


@app.command("reload")
@clear_errors()
@with_flags
def reload(
    check: Annotated[bool, typer.Option("--check", help="Only show what would change.")] = False,
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """Reread the service's settings file, and apply what can change while it runs.

    Most limits, refresh and logging can. If anything else has changed, it is named and nothing is
    applied.
    """
    request = pb.ReloadSettingsRequest(check_only=check)
    with _calling(plane) as (calls, timeout_s):
        found = calls.ReloadSettings(request, timeout=timeout_s).changes
    columns: _Columns = {
        "SETTING": lambda each: each.name,
        "BEFORE": lambda each: each.before_json,
        "NOW": lambda each: each.after_json,
        "FROM": lambda each: each.origin,
    }
    _show_all(found, columns, "nothing has changed", as_json=as_json)


@app.command("snapshot")
@clear_errors()
@with_flags
def snapshot(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of the copy. Default: from the time.")
    ] = "",
    *,
    plane: PlaneSettings,
    as_json: AsJson = False,
) -> None:
    """Copy the state directory to the --snapshots folder while the service runs.

    A service that starts with the copy as --state drafts as this one would after a restart.
    """
    request = pb.SnapshotStateRequest(name=name)
    with _calling(plane) as (calls, timeout_s):
        copy = calls.SnapshotState(request, timeout=timeout_s)
    said = f"{copy.path}: {_size(copy.num_bytes)} in {copy.seconds:.2f} s"
    _show(copy, said, as_json=as_json)


@app.command("drain")
@clear_errors()
@with_flags
def drain(*, plane: PlaneSettings, as_json: AsJson = False) -> None:
    """Have the service drain and end, as SIGTERM does; a later signal ends it immediately."""
    with _calling(plane) as (calls, timeout_s):
        drained = calls.Drain(pb.DrainRequest(), timeout=timeout_s)
    begun = "it drains already" if drained.was_draining else "it drains"
    _show(drained, f"{begun}; open sessions: {drained.num_sessions}", as_json=as_json)


def _place_of(index: pb.AttachedIndex) -> str:
    if index.is_missing:
        return "missing"
    return "memory" if index.is_held else "files"


def _changes_by(setting: pb.Setting) -> str:
    if setting.name in {"index", "tenant_index"}:
        return "attach, detach"
    return "reload" if setting.can_change else "restart"


@contextmanager
def _calling(plane: PlaneSettings) -> Iterator[tuple[Any, float]]:
    """Yield the calls of the service, and their timeout in seconds."""
    address = plane.address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise InvalidRequestError(
            "which service? give --address, the --admin-address of the service, or set "
            f"{ADDRESS_VARIABLE}"
        )
    with administering(address, plane.shown_credentials()) as calls:
        yield calls, plane.timeout_s


def _filter(tenant: str | None, name: str, idle_s: float) -> pb.SessionFilter:
    return pb.SessionFilter(tenant=tenant, session_id=name, min_idle_s=idle_s)


_Columns = Mapping[str, Callable[[Any], str | int]]


def _show(message: Message, said: str, *, as_json: bool) -> None:
    print(json.dumps(as_object(message), indent=2) if as_json else printable(said))


def _show_all(messages: Iterable[Any], columns: _Columns, none: str, *, as_json: bool) -> None:
    found = list(messages)
    if as_json:
        print(json.dumps([as_object(each) for each in found], indent=2))
    elif found:
        rows = [[_cell(column(each)) for column in columns.values()] for each in found]
        is_number = [isinstance(column(found[0]), int) for column in columns.values()]
        for line in table([list(columns), *rows], is_number):
            print(line)
    else:
        print(none)


def as_object(message: Message) -> dict[str, Any]:
    """Return the fields of a message by name, for JSON; unset ones are null."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        is_set = not field.has_presence or message.HasField(field.name)
        found[field.name] = getattr(message, field.name) if is_set else None
    return found


def table(rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a table in columns; numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """Return a text without terminal escapes, since names come from callers."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def _cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(value) or "-"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= _SMALL else f"{num_bytes / 1e3:,.1f} kB"


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s"
