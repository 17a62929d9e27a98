"""The commands of the core: serve drafts, show settings, explain a draft.

Larger commands import their code when they run, so that their help appears immediately.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from indexer.flags import AsJson, Given, command_line, with_flags
from retriever.commands.config_command import ConfigFile
from retriever.commands.options import clear_errors
from retriever.limits import DEFAULT_DOCUMENTS, MAX_DOCUMENTS, Limits
from retriever.operations.settings import DraftSettings, Settings, TokenizerSettings

_MAX_BUDGET: Final = Limits().max_budget_nodes


@clear_errors()
@with_flags
def serve(config: ConfigFile = None, *, flags: Given[Settings]) -> None:
    """Serve drafts over gRPC until interrupted.

    Prints `serving on ADDRESS` once the service is ready. If other machines can reach the address,
    the service needs --certificate and --key, and --access or --client-ca. Each flag can also be
    set in the --config file and in the environment (FOREDRAFT_ADDRESS for --address); `config`
    shows the settings in force.
    """
    from retriever.commands.serve_command import serve_drafts  # noqa: PLC0415  (loads numba)

    serve_drafts(config, flags)


@clear_errors()
@with_flags
def explain(
    *,
    source: DraftSettings,
    texts: TokenizerSettings,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The context to draft for, as text.", rich_help_panel="Context"
        ),
    ] = None,
    context_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The context in a UTF-8 file.", rich_help_panel="Context"
        ),
    ] = None,
    context_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="The context as token ids: 12,7,401.", rich_help_panel="Context"
        ),
    ] = None,
    prediction: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 text that is expected to follow, to draft from as well. Repeatable.",
            rich_help_panel="Context",
        ),
    ] = None,
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MAX_BUDGET,
            help="Most nodes in the tree.",
            rich_help_panel="Context",
        ),
    ] = 32,
    documents: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_DOCUMENTS,
            help="Most documents to name per node.",
            rich_help_panel="Output",
        ),
    ] = DEFAULT_DOCUMENTS,
    full: Annotated[
        bool,
        typer.Option("--full", help="Show the whole tree, node by node.", rich_help_panel="Output"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the draft for a context, and the sources of its tokens.

    The paths with the most expected tokens come first, as text, with their databases and the
    documents that contain them, licences included. --full shows each token: its database, the
    length of the match before it, how often and where it was found.
    """
    from retriever.commands.explain_command import explain_draft  # noqa: PLC0415  (loads numba)

    explain_draft(
        source,
        texts,
        context,
        context_file,
        context_ids,
        prediction or [],
        budget,
        documents,
        full=full,
        as_json=as_json,
    )


app = command_line(
    "Serve draft trees from indexes, and explain a draft.",
    {
        "serve": serve,
        "config": "retriever.commands.config_command:show_settings",
        "explain": explain,
        "health": "retriever.commands.health_command:health",
        "info": "retriever.commands.info_command:info",
        "proto": "retriever.commands.proto_command:proto",
        "access": "retriever.commands.access_command:app",
    },
)


def main() -> None:
    """Run the command line; our own errors print one line on stderr and exit with status 1."""
    app(prog_name="foredraft")
