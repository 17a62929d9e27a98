"""What a drafter inside an engine can be told: by the engine, its environment, or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retriever.errors import SettingsError
from retriever.generations_log.store import Durability
from retriever.operations.resolving import resolve, variable_of
from retriever.operations.settings import Settings


class EngineSettings(BaseModel):
    """Where drafts come from inside an engine, and what they may cost.

    A field `name` is the key `name` of a TOML file, which `FOREDRAFT_CONFIG` names, and the
    environment variable `FOREDRAFT_NAME`; lists are written as `PATH` is. A name that a service's
    settings have means the same here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: Annotated[list[Path], Field(description="Indexes to draft from.")] = []
    phrases: Annotated[
        list[Path], Field(description="Phrases to draft once they have begun; see `serve`.")
    ] = []
    state: Annotated[
        Path | None,
        Field(description="A folder that keeps recent outputs, for one engine at a time."),
    ] = None
    durability: Annotated[
        Durability, Field(description='What outputs in `state` survive: "process" or "disk".')
    ] = "process"
    refresh: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="Seconds between looks for changed indexes."),
    ] = 5.0
    generations_tokens: Annotated[
        int, Field(ge=1024, le=1 << 30, description="Recent outputs to keep, in tokens.")
    ] = 1 << 20
    server: Annotated[
        list[str],
        Field(
            description="Draft services, HOST:PORT or unix:PATH. With one, everything above is "
            "for the drafter that stands in while it is away; several each hold a part of a corpus."
        ),
    ] = []
    credentials: Annotated[
        Path | None,
        Field(
            description="A TOML file with what to show to services and whom to trust. Default: "
            "what the environment says."
        ),
    ] = None
    deadline_s: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Longest wait for the drafts of a step, in seconds. Default: 0.02 in "
            "process, and for a service a quarter of the engine's own part, up to that.",
        ),
    ] = None
    budget_nodes: Annotated[
        int, Field(ge=1, le=256, description="Most nodes of the tree that a chain is taken from.")
    ] = 64
    min_probability: Annotated[
        float, Field(ge=0, le=1, description="Tokens less likely to be accepted are not proposed.")
    ] = 0.0
    idle_session_s: Annotated[
        float, Field(gt=0, description="A sequence not seen for longer has ended, in seconds.")
    ] = 10.0


_SERVICE_ALONE: Final = {
    variable_of(name) for name in Settings.model_fields if name not in EngineSettings.model_fields
}


def resolve_settings(
    given: Mapping[str, object], environment: Mapping[str, str], where: str
) -> EngineSettings:
    """Return what is set, each weaker than the next: by a file, the environment, the engine.

    Args:
        given: by name, as an engine's own configuration has them.
        environment: variables. Those of a service's other settings are passed over, for it may
            run in the same environment.
        where: what to call the engine's own configuration.

    Raises:
        SettingsError: a name is no setting, or a value cannot be one.
    """
    ours = {name: value for name, value in environment.items() if name not in _SERVICE_ALONE}
    settings = resolve(EngineSettings, {}, ours).settings
    try:
        return EngineSettings.model_validate(settings.model_dump() | dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = "it is no setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"{where}: {name}: {reason}") from error
