"""Derives command-line flags from schemas of settings.

A schema is a pydantic model, or a dataclass that validates itself. In a dataclass, only fields with
a description are flags. A command annotates a parameter with a schema, and each field of the schema
becomes a flag: a field `name` becomes `--name`. The field's description is the help text, and its
type and bounds are checked. With `Given[Schema]`, the command gets only the flags that the user
gave; other settings may come from a file or the environment. Validators are built at first use
(`defer_build`), so that `--help` stays fast.

If a command has many flags, fields marked `RARE` are listed only by `--help-all`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, get_annotations
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic import BaseModel, Field, SecretStr, ValidationError, create_model
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperGroup

from indexer.launch import Flag

AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the report as JSON, on standard output.", rich_help_panel="Output"
    ),
]

_WHOLE: Final = 1000
"""Most characters of a command's first sentence in a list of commands; enough for all of it."""

Schema = TypeVar("Schema")
Command = Callable[..., None]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Metavar:
    """The placeholder for a setting's value in the help.

    Attributes:
        name: placeholder in capitals.
    """

    name: str


class _Rare:
    """Marks a setting that few users need."""


RARE: Final = _Rare()
"""In a setting's annotation: list its flag only in `--help-all`."""

_MOST_LISTED: Final = 25
"""A command with at most this many flags lists all of them, even rare ones."""

_ALL: Final = "indexer.flags.all"
"""Key in a command's context that requests the list of all flags."""


@dataclass(frozen=True, slots=True)
class Only:
    """In a parameter's annotation: only these settings of the schema become flags.

    Attributes:
        names: names of the settings.
    """

    names: tuple[str, ...]


class Given(dict[str, object], Generic[Schema]):
    """The flags of a schema that the user gave, by name."""


def with_flags(command: Command) -> Command:
    """Add flags to a command, from the schemas that annotate its parameters.

    The help groups flags under the title of the schema that defines them, if it has one. If the
    schema rejects a value, the command ends with the usual error that names the flag.
    """
    parameters = Signature.from_callable(command).parameters.values()
    taken = {each.name: found for each in parameters if (found := _schema_in(each.annotation))}

    @wraps(command)
    def run(**values: object) -> None:
        made = dict[str, object]()
        values.pop(_HELP_ALL, None)
        for name, each in taken.items():
            flags = {field: values.pop(field) for field in each.settings}
            given = {key: value for key, value in flags.items() if value is not None}
            made[name] = Given(given) if each.is_partial else _checked(each.schema, given)
        command(**values, **made)

    shown = [flag for each in parameters for flag in _shown(each, taken.get(each.name))]
    rare = frozenset(
        name
        for each in taken.values()
        for name, field in each.settings.items()
        if RARE in field.metadata
    )
    decorated: Any = run
    if rare and len(shown) > _MOST_LISTED:
        decorated.rare = rare
        shown.append(_help_all(len(rare)))
    decorated.__signature__ = Signature(shown)
    decorated.__annotations__ = {each.name: each.annotation for each in shown}
    return run


_HELP_ALL: Final = "help_all"


def _help_all(num_rare: int) -> Parameter:
    """Return the flag that lists the options omitted from the help."""

    def show(context: typer.Context, value: bool) -> None:  # noqa: FBT001  (typer calls it so)
        if value:
            context.meta[_ALL] = True
            typer.echo(context.get_help())
            raise typer.Exit

    said = f"List every option: {num_rare} more."
    option: Any = typer.Option("--help-all", is_eager=True, callback=show, help=said)
    kind: Any = Annotated[bool, option]
    return Parameter(_HELP_ALL, Parameter.KEYWORD_ONLY, default=False, annotation=kind)


def settings_of(schema: type) -> Mapping[str, FieldInfo]:
    """Return the fields of a schema that are flags, by name: all fields with a description."""
    stated: Mapping[str, FieldInfo]
    if issubclass(schema, BaseModel):
        stated = schema.model_fields
    else:
        hints = get_type_hints(schema, include_extras=True)
        stated = {
            each.name: FieldInfo.from_annotated_attribute(_stated(hints[each.name]), each.default)
            for each in fields(cast(Any, schema))
        }
    return {name: field for name, field in stated.items() if field.description}


def _stated(hint: Any) -> Any:
    """Return an annotation whose `Flag`, if any, is converted to pydantic's form."""
    flag = next(
        (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Flag)), None
    )
    if flag is None:
        return hint
    further = () if flag.metavar is None else (Metavar(flag.metavar),)
    field = Field(description=flag.help, ge=flag.least, le=flag.most)
    return Annotated[(hint, field, *further)]


def flag_of(name: str) -> str:
    """Return the flag of a setting. A trailing underscore, which avoids a keyword, is dropped."""
    return "--" + name.rstrip("_").replace("_", "-")


def is_secret(field: FieldInfo) -> bool:
    """Return whether a setting is secret and must not be shown."""
    kinds = (field.annotation, *get_args(field.annotation))
    return any(isinstance(kind, type) and issubclass(kind, SecretStr) for kind in kinds)


def expected_by(error: ValidationError) -> str:
    """Return what value was expected, worded to end a sentence."""
    said = error.errors(include_url=False)[0]["msg"]
    return said.removeprefix("Value error, ").replace("Input ", "it ", 1)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The schema that annotates a parameter, its flags, and whether it was `Given[...]`."""

    schema: type
    settings: Mapping[str, FieldInfo]
    is_partial: bool


def _schema_in(annotation: Any) -> _Taken | None:
    """Return the schema in a parameter's annotation, if there is one."""
    only = next(
        (each for each in getattr(annotation, "__metadata__", ()) if type(each) is Only), None
    )
    schema = annotation if only is None else get_args(annotation)[0]
    is_partial = get_origin(schema) is Given
    schema = get_args(schema)[0] if is_partial else schema
    if not isinstance(schema, type) or not (issubclass(schema, BaseModel) or is_dataclass(schema)):
        return None
    settings = settings_of(schema)
    if only is not None:
        settings = {name: settings[name] for name in only.names}
    return _Taken(schema, settings, is_partial)


def _shown(parameter: Parameter, taken: _Taken | None) -> Iterator[Parameter]:
    if taken is None:
        yield parameter
        return
    is_partial = taken.is_partial
    for name, field in taken.settings.items():
        default = None if is_partial or _is_list(field) else field.default
        yield Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.is_required() and not is_partial else default,
            annotation=_option(name, field, _panel_of(name, taken.schema), is_partial=is_partial),
        )


def _panel_of(name: str, schema: type) -> str | None:
    if not issubclass(schema, BaseModel):
        title: str | None = getattr(schema, "flags_title", None)
        return title
    stated = (each for each in schema.__mro__ if name in get_annotations(each))
    return next(each.model_config.get("title") for each in stated if issubclass(each, BaseModel))


def _option(name: str, field: FieldInfo, panel: str | None, *, is_partial: bool) -> Any:
    flag, default = flag_of(name), field.default
    if field.annotation in (bool, bool | None) and (is_partial or default is True):
        flag += f"/--no-{flag.removeprefix('--')}"  # so that a flag can override a setting file
    kind: Any = str if is_secret(field) else field.annotation
    if _is_list(field):
        kind = list[get_args(field.annotation)[0]]  # type: ignore[misc]  # known when it runs
    has_default = not (default is None or field.is_required() or _is_list(field))
    option = typer.Option(
        flag,
        metavar=next((each.name for each in field.metadata if isinstance(each, Metavar)), None),
        min=_bound(field, "ge"),
        max=_bound(field, "le"),
        parser=_path if _is_path(kind) else None,
        help=_described(field, _told(name, default) if has_default and is_partial else None),
        show_default=has_default and not is_partial,
        rich_help_panel=panel,
    )
    return Annotated[kind | None, option]


def _described(field: FieldInfo, default: str | None) -> str:
    """Return a flag's help text, with the default appended if the parser does not know it."""
    described = field.description or ""
    return described if default is None else f"{described}  [default: {default}]"


def _told(name: str, default: object) -> str:
    """Return a default value as the parser shows it; for an on/off pair, the flag that applies."""
    flag = flag_of(name if default else f"no_{name}").removeprefix("--")
    return flag if isinstance(default, bool) else str(default)


def _is_path(kind: Any) -> bool:
    return any(each is Path for each in (kind, *get_args(kind)))


def _path(text: str | Path) -> Path:
    """Return a path. An empty text is rejected, because it would mean the current directory.

    Raises:
        typer.BadParameter: the path is empty.
    """
    if text == "":
        raise typer.BadParameter("it is empty: name a path, or leave the flag out.")
    return Path(text)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (list, tuple)


def _bound(field: FieldInfo, name: str) -> Any:
    return next((getattr(each, name) for each in field.metadata if hasattr(each, name)), None)


def _checked(schema: type[Any], given: Mapping[str, object]) -> Any:
    model = schema if issubclass(schema, BaseModel) else _model_of(schema)
    try:
        checked = model.model_validate(given)
    except ValidationError as error:
        where: Sequence[int | str] = error.errors()[0]["loc"]
        hint = f"'{flag_of(str(where[0]))}'"
        raise typer.BadParameter(f"{expected_by(error)}.", param_hint=hint) from error
    if model is schema:
        return checked
    try:
        return schema(**{name: getattr(checked, name) for name in given})
    except Exception as error:
        name, _, rest = str(error).partition(" ")
        if name not in settings_of(schema):
            raise
        raise type(error)(f"{flag_of(name)} {rest}") from error  # the message starts with a setting


def _model_of(schema: type) -> type[BaseModel]:
    """Return a pydantic model that checks each setting of a dataclass separately."""
    stated = settings_of(schema)
    settings: Any = {name: (field.annotation, field) for name, field in stated.items()}
    return create_model(schema.__name__, **settings)


def _show_in_groups(command: TyperCommand | TyperGroup, context: Any, formatter: Any) -> None:
    """Write parameters under the titles of their groups.

    Names are never cut. If a help text does not fit next to its name, it starts on the next line.
    """
    shown: dict[str, list[Any]] = {}
    rare = () if context.meta.get(_ALL) else getattr(command.callback, "rare", ())
    for parameter in command.get_params(context):
        if parameter.name in rare:
            continue
        default = "Arguments" if parameter.param_type_name == "argument" else "Options"
        title = getattr(parameter, "rich_help_panel", None) or default
        if record := parameter.get_help_record(context):
            shown.setdefault(title, []).append(record)
    for title, records in shown.items():
        with formatter.section(title):
            formatter.write_dl(records)


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups, with full names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options."""
        _show_in_groups(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help shows options in groups, with full names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        _show_in_groups(self, ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(_WHOLE))
                    for name in self.list_commands(ctx)
                    if (command := self.get_command(ctx, name)) is not None
                ]
            )


class CommandLine(typer.Typer):
    """One or several commands, with help that fits a terminal of 80 columns.

    Args:
        help_: help for several commands; `None` for a single command, which has its own help.
        cls: class of the command group.
        epilog: text at the end of the help.
    """

    def __init__(
        self,
        help_: str | None = None,
        *,
        cls: type[Group] = Group,
        epilog: str | None = "--version, instead of a command, prints the version.",
    ) -> None:
        about: dict[str, Any] = {}
        if help_ is not None:
            about = {"cls": cls, "help": help_, "no_args_is_help": True, "epilog": epilog}
        super().__init__(
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            **about,
        )

    def command(  # type: ignore[override]  # accepts only the option that this project uses
        self, name: str | None = None
    ) -> Callable[[Decorated], Decorated]:
        """Add a command, as `typer.Typer.command` does."""
        return super().command(name, cls=GroupedCommand)


def command_line(help_: str, commands: Mapping[str, str | Command]) -> typer.Typer:
    """Return a command line that imports a command only when it is named or listed.

    Args:
        help_: help for the commands.
        commands: maps each name to a function, to its location `module:function`, or to the
            location `module:app` of a command group.
    """

    class Commands(Group):
        def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  (signature of the base class)
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  (signature of the base class)
            return _imported(cmd_name, commands[cmd_name]) if cmd_name in commands else None

    app = CommandLine(help_, cls=Commands)
    app.callback()(lambda: None)
    return app


def _imported(name: str, found: Any) -> Any:
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = CommandLine()
        alone.command(name)(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return command
