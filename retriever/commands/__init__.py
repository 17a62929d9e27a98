"""The commands: serve drafts, show settings, replay outputs, explain a draft, export an index."""

import typer

from retriever.commands.access_command import app as access_app
from retriever.commands.explain_command import explain
from retriever.commands.export_command import export
from retriever.commands.health_command import health
from retriever.commands.replay_command import replay_traces
from retriever.commands.serve_command import serve, show_settings

app = typer.Typer(
    help="Serve draft trees from indexes, replay recorded outputs through a drafter, explain a "
    "draft, or export an index.",
    no_args_is_help=True,
    epilog="--version, in place of a command, prints the version.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(serve)
app.command("config")(show_settings)
app.command("replay")(replay_traces)
app.command()(explain)
app.command()(health)
app.command()(export)
app.add_typer(access_app, name="access")


def main() -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    app(prog_name="foredraft")
