"""What `serve` can be told: one schema for flags, environment, files and their documentation."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from indexer.tokenizer import DEFAULT_MODEL
from retriever.limits import Limits
from retriever.log.log_store import Durability
from retriever.replication.options import without_credentials

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_DEFAULTS = Limits()


@dataclass(frozen=True, slots=True)
class Metavar:
    """What stands for a setting's value in the help.

    Attributes:
        name: in capitals.
    """

    name: str


class ServerUrl(SecretStr):
    """A URL that may hold a name and a password, which are never shown."""

    def shown(self) -> str:
        """Return the URL without them."""
        return without_credentials(self.get_secret_value())


class Settings(BaseModel):
    """Everything that a service can be told.

    A field `name` is the flag `--name`, the key `name` of a file and the environment variable
    `FOREDRAFT_NAME`; its description is the flag's help.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(description="An index to draft from, as `foredraft build` made it. Repeatable."),
    ] = []
    phrases: Annotated[
        list[Path],
        Metavar("FILE"),
        Field(
            description="Phrases to draft once they have begun: one a line, or (.jsonl) each line "
            '{"text": "..."} or {"ids": [...]}. Repeatable.'
        ),
    ] = []
    tokenizer: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The tokenizer of phrases in text: a hub id, a folder or a .gguf file. "
            f"Default: {DEFAULT_MODEL}."
        ),
    ] = None
    address: Annotated[
        str,
        Metavar("ADDRESS"),
        Field(description="Where to listen: HOST:PORT (port 0: a free one) or unix:PATH."),
    ] = "127.0.0.1:50051"
    certificate: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="The server's certificate, PEM: connections are encrypted. Read again when "
            "it changes, as is every file of these."
        ),
    ] = None
    key: Annotated[
        Path | None, Metavar("FILE"), Field(description="The certificate's key, PEM, mode 0600.")
    ] = None
    client_ca: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Let in clients alone whose certificates these authorities have signed, "
            "PEM."
        ),
    ] = None
    access: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Whose tokens and certificates act for which tenant; `access` writes it. "
            "Nobody else is let in."
        ),
    ] = None
    insecure: Annotated[
        bool,
        Field(
            description="Listen where others reach the address without encryption, or without "
            "asking them who they are."
        ),
    ] = False
    pad_replies: Annotated[
        bool,
        Field(
            description="Make all drafts of a budget equal in size on the wire, so that whoever "
            "watches the network does not learn from it how much was found."
        ),
    ] = False
    tenant_index: Annotated[
        list[str],
        Metavar("TENANT=DIR"),
        Field(
            description="An index that this tenant alone drafts from, beside those of --index. "
            "Repeatable."
        ),
    ] = []
    tenant_phrases: Annotated[
        list[str],
        Metavar("TENANT=FILE"),
        Field(description="Phrases for this tenant alone, beside those of --phrases. Repeatable."),
    ] = []
    generations_tokens: Annotated[
        int,
        Field(
            ge=1024,
            le=1 << 30,
            description="Recent outputs to keep, in tokens of 24 bytes (36 without an index); "
            "rounded up to a power of two.",
        ),
    ] = _DEFAULTS.generations_tokens
    generations_age_s: Annotated[
        float, Field(ge=1, description="Forget outputs that are older than this, in seconds.")
    ] = _DEFAULTS.generations_age_s
    state: Annotated[
        Path | None,
        Metavar("DIR"),
        Field(
            description="A folder that keeps recent outputs, so that a restarted service drafts "
            "as well as before. For one service and one tokenizer. Default: memory only."
        ),
    ] = None
    durability: Annotated[
        Durability,
        Field(
            description="What outputs in --state survive: the end of this process, even by kill -9 "
            "(process), or a power failure too, at the cost of a disk write for each (disk)."
        ),
    ] = "process"
    refresh: Annotated[
        float,
        Metavar("SECONDS"),
        Field(
            ge=0,
            allow_inf_nan=False,
            description="How often to look whether an index has changed, and to draft from what it "
            "has become; 0: never.",
        ),
    ] = 5.0
    redis: Annotated[
        ServerUrl | None,
        Metavar("URL"),
        Field(
            description="Share outputs with the other services of the same tokenizer through this "
            "Redis server: redis://HOST:PORT/DATABASE, or rediss:// for TLS. A password is better "
            "given in FOREDRAFT_REDIS_PASSWORD. Default: share nothing."
        ),
    ] = None
    max_sessions: Annotated[int, Field(ge=1, description="Most sessions open at once.")] = (
        _DEFAULTS.max_sessions
    )
    max_tenant_sessions: Annotated[int, Field(ge=1, description="Most sessions of one tenant.")] = (
        _DEFAULTS.max_tenant_sessions
    )
    idle_session_s: Annotated[
        float, Field(ge=0, description="A session idle for longer than this ends, in seconds.")
    ] = _DEFAULTS.idle_session_s
    max_sequence_tokens: Annotated[
        int, Field(ge=1, description="Most tokens in one sequence, prompt included.")
    ] = _DEFAULTS.max_sequence_tokens
    max_total_tokens: Annotated[
        int, Field(ge=1, description="Most tokens in the sequences of all open sessions.")
    ] = _DEFAULTS.max_total_tokens
    max_tenant_tokens: Annotated[
        int, Field(ge=1, description="Most tokens in the sequences of one tenant.")
    ] = _DEFAULTS.max_tenant_tokens
    max_budget_nodes: Annotated[
        int, Field(ge=1, le=4096, description="Most nodes in one draft tree.")
    ] = _DEFAULTS.max_budget_nodes
    max_batch: Annotated[int, Field(ge=1, description="Most sequences in one decoding step.")] = (
        _DEFAULTS.max_batch
    )
    max_step_nodes: Annotated[
        int, Field(ge=1, description="Most nodes that one step may ask for.")
    ] = _DEFAULTS.max_step_nodes
    max_message_bytes: Annotated[
        int, Field(ge=1024, le=(1 << 31) - 1, description="Longest message that is read, in bytes.")
    ] = _DEFAULTS.max_message_bytes
    max_tenants: Annotated[
        int, Field(ge=1, description="Most tenants whose outputs are in memory at once.")
    ] = _DEFAULTS.max_tenants
    max_tenant_deletions: Annotated[
        int, Field(ge=1, description="Most calls of one tenant that delete data, in a minute.")
    ] = _DEFAULTS.max_tenant_deletions
    drain_s: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="After SIGTERM: how long streams may go on before they are ended, in "
            "seconds. A second signal ends them at once.",
        ),
    ] = 10.0
    reflection: Annotated[
        bool,
        Field(description="Answer gRPC reflection: which services there are, and their types."),
    ] = False
    log_format: Annotated[
        LogFormat, Field(description="A line of text for each event, or a JSON object.")
    ] = "text"
    log_level: Annotated[LogLevel, Field(description="The least that is logged.")] = "info"
    metrics_address: Annotated[
        str | None,
        Metavar("ADDRESS"),
        Field(
            description="Where to serve Prometheus metrics over HTTP: HOST:PORT, or a port of "
            "loopback. Default: nowhere."
        ),
    ] = None
    status_page: Annotated[
        bool | None,
        Field(
            description="Serve a page about the service's state beside the metrics. Default: only "
            "where they are on loopback."
        ),
    ] = None
    trace_ratio: Annotated[
        float, Field(ge=0, le=1, description="Share of calls and steps that are traced; 0: none.")
    ] = 0.0
    trace_endpoint: Annotated[
        str | None,
        Metavar("URL"),
        Field(
            description="Where traces go, by OTLP over gRPC. Default: as OpenTelemetry's own "
            "environment variables say."
        ),
    ] = None

    @property
    def limits(self) -> Limits:
        """The limits among the settings."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})
