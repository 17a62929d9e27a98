"""The settings as flags of a command."""

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from retriever.operations.resolving import FILE_VARIABLE, flag_of, is_secret
from retriever.operations.settings import Metavar, Settings

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings in TOML, `name = value`, weaker than the environment and flags. Default: "
        f"the file that {FILE_VARIABLE} names, if it does.",
    ),
]

Command = Callable[..., None]


def with_settings(command: Command) -> Command:
    """Give a command a flag for each setting, None where it is not given, beside its own."""
    own = [
        parameter
        for parameter in Signature.from_callable(command).parameters.values()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    flags = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field))
        for name, field in Settings.model_fields.items()
    ]
    decorated: Any = command
    decorated.__signature__ = Signature([*own, *flags])
    decorated.__annotations__ = {each.name: each.annotation for each in [*own, *flags]}
    return command


def _option(name: str, field: FieldInfo) -> Any:
    flag = flag_of(name)
    is_switch = field.annotation in (bool, bool | None)
    kind: Any = str if is_secret(field) else field.annotation
    default = field.default
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        metavar=next((each.name for each in field.metadata if isinstance(each, Metavar)), None),
        min=_bound(field, "ge"),
        max=_bound(field, "le"),
        help=field.description,
        show_default=False if default is None or default == [] else str(default).lower(),
    )
    return Annotated[kind | None, option]


def _bound(field: FieldInfo, name: str) -> Any:
    return next((getattr(each, name) for each in field.metadata if hasattr(each, name)), None)
