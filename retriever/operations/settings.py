"""Settings of drafters and services: one schema for flags, environment, files and their help.

A field `name` is the flag `--name`, the key `name` of a file and the environment variable
`FOREDRAFT_NAME`. Its description is the flag's help; its default is defined only here, or in
`Limits`. Sets shared by several commands or engines are base classes.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, create_model

from indexer.flags import RARE, Metavar
from indexer.launch import FIELD_HELP
from indexer.tokenizer import DEFAULT_MODEL
from retriever.client.credentials import VARIABLES, Credentials, without_credentials
from retriever.errors import InvalidRequestError, SettingsError
from retriever.limits import DEFAULT_DURABILITY, Durability, Limits
from retriever.security.private_files import DEFAULT_GRACE_S

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_DEFAULTS: Final = Limits()
_LIMITS: Final = {each.name: each for each in fields(Limits)}


def _said_of(limit: str) -> dict[str, Any]:
    """Return the field arguments for the setting of a limit."""
    stated = _LIMITS[limit].metadata
    return {"description": stated["said"], **stated["bounds"]}


class ServerUrl(SecretStr):
    """A URL whose name and password are never shown."""

    def shown(self) -> str:
        """Return the URL without name and password."""
        return without_credentials(self.get_secret_value())


_ENDPOINT: Final = re.compile(
    r"(?P<scheme>(?:[a-z][a-z0-9+.-]*://)?)(?:[^/?#]*@)?(?P<host>[^/?#@]*)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)


class EndpointUrl(ServerUrl):
    """A URL or HOST:PORT whose name, password, query and fragment are never shown or used."""

    def shown(self) -> str:
        """Return the URL without name, password, query and fragment."""
        found = _ENDPOINT.fullmatch(self.get_secret_value())
        if found is None or "@" in found["rest"]:  # a password that is not percent-encoded
            return "a URL that cannot be read"
        return found["scheme"] + found["host"] + re.split("[?#]", found["rest"], maxsplit=1)[0]


class TokenizerSettings(BaseModel):
    """Settings of the tokenizer."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True, defer_build=True)

    tokenizer: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The tokenizer of texts: a hub id, a folder or a .gguf file. "
            f"Default: that of the index, if it has one, else {DEFAULT_MODEL}."
        ),
    ] = None


class RecordSettings(BaseModel):
    """Settings of reading recorded conversations."""

    model_config = ConfigDict(title="Log", extra="forbid", frozen=True, defer_build=True)

    field: Annotated[str, Metavar("KEY"), Field(description=FIELD_HELP)] = ""
    dry_run: Annotated[
        bool,
        Field(
            description="Show what is taken as input and what as output in the first records, and "
            "do nothing else."
        ),
    ] = False


class DatabaseSettings(BaseModel):
    """Settings of databases in this process, in addition to the sequence itself."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True, defer_build=True)

    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(description="An index to draft from, as `foredraft build` made it. Repeatable."),
    ] = []
    phrases: Annotated[
        list[Path],
        Metavar("FILE"),
        Field(
            description="Phrases to draft once they have begun, one a line: as text, or (.jsonl) "
            'as {"text": "..."} or {"ids": [...]}. Repeatable.'
        ),
    ] = []


class EmbeddedSettings(DatabaseSettings):
    """Settings of what a drafter in this process stores, and how it refreshes indexes."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True, defer_build=True)

    generations_tokens: Annotated[int, Field(**_said_of("generations_tokens"))] = (
        _DEFAULTS.generations_tokens
    )
    state: Annotated[
        Path | None,
        Metavar("DIR"),
        Field(
            description="A folder for generations, so that a restarted service drafts "
            "as well as before. For one service and one tokenizer. Default: memory only."
        ),
    ] = None
    durability: Annotated[
        Durability,
        RARE,
        Field(
            description="What outputs in --state survive: the end of this process, even by kill -9 "
            "(process), or a power failure too, at the cost of a disk write for each (disk)."
        ),
    ] = DEFAULT_DURABILITY
    hold_indexes: Annotated[
        bool,
        RARE,
        Field(
            description="Copy indexes to memory at the start instead of mapping their files: "
            "then the files can be truncated, overwritten or removed while in use."
        ),
    ] = False
    refresh: Annotated[
        float,
        Metavar("SECONDS"),
        Field(
            ge=0,
            allow_inf_nan=False,
            description="How often to check whether an index has changed, and to draft from its "
            "new state; 0: never.",
        ),
    ] = 5.0


class CredentialSettings(BaseModel):
    """Credentials for services."""

    model_config = ConfigDict(title="Service", extra="forbid", frozen=True, defer_build=True)

    credentials: Annotated[
        Path | None,
        RARE,
        Metavar("FILE"),
        Field(
            description="For a service: a TOML file with what to send and whom to trust: ca, "
            "certificate, key, token or token_file, server_name, tls, proxy. Default: the "
            f"environment ({', '.join(VARIABLES)})."
        ),
    ] = None

    def shown_credentials(self, environment: Mapping[str, str] = os.environ) -> Credentials | None:
        """Return the credentials from the file, else from the environment; None if neither has any.

        Raises:
            CredentialsError: a file cannot be used.
        """
        if self.credentials is None:
            return Credentials.from_environment(environment)
        return Credentials.from_file(self.credentials)


class ClientSettings(CredentialSettings):
    """The services that draft."""

    model_config = ConfigDict(title="Service", extra="forbid", frozen=True, defer_build=True)

    server: Annotated[
        list[str],
        Metavar("ADDRESS"),
        Field(
            description="A draft service, HOST:PORT or unix:PATH, which drafts from its own "
            "indexes and phrases. Repeatable: services that each hold a part of a corpus draft "
            "together. A,B,C: replicas, each sequence at one of them."
        ),
    ] = []


class DraftSettings(ClientSettings, DatabaseSettings):
    """The sources of drafts: services, or databases in this process.

    Raises:
        InvalidRequestError: both are given.
    """

    def model_post_init(self, context: object, /) -> None:
        """Refuse local databases together with a service."""
        del context
        if self.server and (self.index or self.phrases):
            name = "index" if self.index else "phrases"
            raise InvalidRequestError(
                f"--{name} and --server exclude each other: leave out --{name}, since a server "
                "drafts from its own indexes and phrases"
            )


class NetworkSettings(BaseModel):
    """Where a service listens, and which callers it admits."""

    model_config = ConfigDict(title="Network", extra="forbid", frozen=True, defer_build=True)

    address: Annotated[
        str,
        Metavar("ADDRESS"),
        Field(description="Where to listen: HOST:PORT (port 0: any free one) or unix:PATH."),
    ] = "127.0.0.1:50051"
    socket_mode: Annotated[
        str,
        RARE,
        Metavar("OCTAL"),
        Field(
            pattern="^0?[0-7]{3}$",
            description="Mode of the socket of a unix: address; who may write to it may connect.",
        ),
    ] = "0600"
    socket_group: Annotated[
        str | None,
        RARE,
        Metavar("GROUP"),
        Field(
            description="Group of that socket, by name or number; with --socket-mode 0660 its "
            "members may connect. Default: the group of the process."
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="The server's certificate, PEM: connections are encrypted. Reloaded when "
            "it changes, like all of these files."
        ),
    ] = None
    key: Annotated[
        Path | None, Metavar("FILE"), Field(description="The certificate's key, PEM, mode 0600.")
    ] = None
    client_ca: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Admit only clients with certificates that these authorities have signed, "
            "PEM."
        ),
    ] = None
    access: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Tokens and certificates with their tenants; `foredraft access` writes it. "
            "Other callers are refused."
        ),
    ] = None
    credentials_grace_s: Annotated[
        float,
        RARE,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="How long the last content of --access or --client-ca admits callers "
            "once the file cannot be read or is invalid, in seconds; after that, none is. 0: none.",
        ),
    ] = DEFAULT_GRACE_S
    insecure: Annotated[
        bool,
        Field(
            description="Listen on an address that others can reach without encryption or without "
            "authentication."
        ),
    ] = False
    pad_replies: Annotated[
        bool,
        RARE,
        Field(
            description="Pad all drafts of a budget to equal size on the wire, so that an observer "
            "of the network does not learn how much was found."
        ),
    ] = False
    reflection: Annotated[
        bool,
        RARE,
        Field(description="Answer gRPC reflection, which lists services and their types."),
    ] = False
    drain_s: Annotated[
        float,
        RARE,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="After SIGTERM: how long streams may continue before they are cut, in "
            "seconds. A second signal cuts them immediately.",
        ),
    ] = 10.0


_OFTEN_SET: Final = frozenset({"max_bytes", "max_sessions"})


def _rank_of(limit: str) -> object:
    """Return the marker of a limit that is rarely set; None for other limits."""
    return None if limit in _OFTEN_SET else RARE


class _OfLimits(BaseModel):
    model_config = ConfigDict(title="Limits", extra="forbid", frozen=True, defer_build=True)


if TYPE_CHECKING:

    class LimitSettings(_OfLimits):
        """Upper limits of a service: a setting for each of `Limits`."""

        def __getattr__(self, name: str) -> float: ...

else:
    LimitSettings = create_model(
        "LimitSettings",
        __base__=_OfLimits,
        __module__=__name__,
        **{
            name: (Annotated[stated.type, _rank_of(name), Field(**_said_of(name))], stated.default)
            for name, stated in _LIMITS.items()
            if name not in EmbeddedSettings.model_fields
        },
    )


class ReportSettings(BaseModel):
    """Logs, metrics and traces of a service."""

    model_config = ConfigDict(title="Reports", extra="forbid", frozen=True, defer_build=True)

    model: Annotated[
        list[str],
        Metavar("NAME"),
        Field(
            description="A model that this service drafts for, by the name that clients see. "
            "Repeatable."
        ),
    ] = []
    log_format: Annotated[
        LogFormat, Field(description="One line of text per event, or one JSON object.")
    ] = "text"
    log_level: Annotated[LogLevel, Field(description="Lowest level that is logged.")] = "info"
    metrics_address: Annotated[
        str | None,
        Metavar("ADDRESS"),
        Field(
            description="Where to serve Prometheus metrics over HTTP: HOST:PORT, or a port on "
            "loopback. Default: nowhere."
        ),
    ] = None
    status_page: Annotated[
        bool | None,
        RARE,
        Field(
            description="Serve a page about the service's state next to the metrics. Default: only "
            "if they are on loopback."
        ),
    ] = None
    trace_ratio: Annotated[
        float,
        RARE,
        Field(ge=0, le=1, description="Share of calls and steps that are traced; 0: none."),
    ] = 0.0
    trace_endpoint: Annotated[
        EndpointUrl | None,
        RARE,
        Metavar("URL"),
        Field(
            description="Where to send traces by OTLP over gRPC: http://HOST:PORT, or https:// for "
            "TLS. Credentials go into OTEL_EXPORTER_OTLP_HEADERS. Default: OpenTelemetry's own "
            "environment variables."
        ),
    ] = None


class AdminSettings(BaseModel):
    """Where operators administer a running service, and where that is recorded."""

    model_config = ConfigDict(title="Administration", extra="forbid", frozen=True, defer_build=True)

    admin_address: Annotated[
        str | None,
        Metavar("ADDRESS"),
        Field(
            description="Where to answer `foredraft admin`: unix:PATH, only for this user unless "
            "--access grants the scope admin, or HOST:PORT with --access. Default: nowhere."
        ),
    ] = None
    audit_log: Annotated[
        Path | None,
        RARE,
        Metavar("FILE"),
        Field(
            description="Where to record operators' changes, as lines of JSON, in addition to "
            "the log. While it cannot be written, nothing can be changed."
        ),
    ] = None
    snapshots: Annotated[
        Path | None,
        RARE,
        Metavar("DIR"),
        Field(
            description="Where `foredraft admin snapshot` puts copies of --state. Default: no "
            "copies."
        ),
    ] = None

    def model_post_init(self, context: object, /) -> None:
        """Refuse settings of the admin service without an address for it."""
        del context
        for name in ("audit_log", "snapshots"):
            if self.admin_address is None and getattr(self, name) is not None:
                raise SettingsError(
                    f"--{name.replace('_', '-')} is for `foredraft admin`: give --admin-address too"
                )


class Settings(
    AdminSettings,
    ReportSettings,
    LimitSettings,
    NetworkSettings,
    EmbeddedSettings,
    TokenizerSettings,
):
    """All settings of a service."""

    model_config = ConfigDict(title="Tenants and other services")

    missing_indexes: Annotated[
        Literal["refuse", "skip"],
        RARE,
        Field(
            description="If an index cannot be opened: do not start (refuse), or do without its "
            "drafts (skip) until a refresh can open it."
        ),
    ] = "refuse"
    tenant_index: Annotated[
        list[str],
        Metavar("TENANT=DIR"),
        Field(
            description="An index that only this tenant drafts from, in addition to --index. "
            "Repeatable."
        ),
    ] = []
    tenant_phrases: Annotated[
        list[str],
        RARE,
        Metavar("TENANT=FILE"),
        Field(description="Phrases for only this tenant, in addition to --phrases. Repeatable."),
    ] = []
    redis: Annotated[
        ServerUrl | None,
        Metavar("URL"),
        Field(
            description="Share outputs with other services of the same tokenizer through this "
            "Redis server: redis://HOST:PORT/DATABASE, or rediss:// for TLS. Give a password "
            "preferably in FOREDRAFT_REDIS_PASSWORD. Default: share nothing."
        ),
    ] = None

    @property
    def limits(self) -> Limits:
        """The settings that are limits."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})
