"""Flags follow from schemata: names, types, bounds, groups, and what a command is given."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from typer.testing import CliRunner

from indexer.flags import AsJson, CommandLine, Given, Metavar, with_flags
from indexer.launch import errors_in_one_line


class Base(BaseModel):
    model_config = ConfigDict(title="Files")

    files: Annotated[tuple[Path, ...], Metavar("FILE"), Field(description="To read.")] = ()
    most: Annotated[int, Field(ge=1, le=9, description="Of them.")] = 5


class Derived(Base):
    model_config = ConfigDict(title="More")

    share: Annotated[float | None, Field(gt=0, description="Above 0.")] = None
    quick: Annotated[bool, Field(description="Leave out checks.")] = False
    careful: Annotated[bool, Field(description="Check twice.")] = True
    key: Annotated[SecretStr | None, Field(description="To show.")] = None


def run(schema: Any, *arguments: str) -> Any:
    app, taken = CommandLine(), []

    @app.command()
    @with_flags
    def command(name: str, *, settings: schema, as_json: AsJson = False) -> None:
        taken.append((name, settings, as_json))

    result = CliRunner().invoke(app, ["name", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return taken[0] if taken else result


def test_a_command_gets_the_schema_with_its_defaults_and_what_was_given() -> None:
    assert run(Derived) == ("name", Derived(), False)
    name, settings, as_json = run(
        Derived, "--files", "a", "--files", "b", "--quick", "--no-careful", "--key", "k", "--json"
    )
    assert (name, as_json) == ("name", True)
    assert settings == Derived(
        files=(Path("a"), Path("b")), quick=True, careful=False, key=SecretStr("k")
    )


def test_only_given_flags_are_taken_where_other_sources_are_weaker() -> None:
    assert run(Given[Derived])[1] == {}
    found = run(Given[Derived], "--most", "5", "--no-quick")[1]
    assert found == {"most": 5, "quick": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--most", "10"), "Invalid value for '--most'"),
        (("--most", "x"), "Invalid value for '--most'"),
        (("--share", "0"), "Invalid value for '--share': it should be greater than 0."),
        (("--no-quick",), "No such option: --no-quick"),
    ],
)
def test_what_the_schema_refuses_is_named_by_its_flag(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run(Derived, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_help_shows_flags_under_the_schema_that_states_them() -> None:
    text = run(Derived, "--help").stdout
    files, more = text.index("\nFiles:"), text.index("\nMore:")
    assert files < text.index("--files") < text.index("FILE") < text.index("[default: 5;") < more
    assert more < text.index("Above 0.")
    assert "[default: careful]" in text


def test_foreseen_errors_end_in_one_line_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    @errors_in_one_line(KeyError, ValueError)
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        fail(ValueError("no\n  such thing"))
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: no such thing\n")
    with pytest.raises(TypeError):
        fail(TypeError("a mistake of ours"))
