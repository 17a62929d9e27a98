"""The command that shows with which settings `serve` would start."""

import os
from pathlib import Path
from typing import Annotated

import typer

from indexer.flags import AsJson, Given, with_flags
from retriever.commands.options import clear_errors
from retriever.operations.resolving import FILE_VARIABLE, as_toml, resolve, to_json
from retriever.operations.settings import Settings

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel="Settings",
        help="Settings in TOML, `name = value`; the environment and flags override them. Default: "
        f"the file that {FILE_VARIABLE} names, if set.",
    ),
]


@clear_errors()
@with_flags
def show_settings(
    config: ConfigFile = None, *, as_json: AsJson = False, flags: Given[Settings]
) -> None:
    """Show the settings that `serve` would have, and where each comes from.

    The output is TOML for `serve --config`. Nothing is opened.
    """
    resolved = resolve(Settings, flags, os.environ, config)
    print(to_json(resolved) if as_json else as_toml(resolved))
