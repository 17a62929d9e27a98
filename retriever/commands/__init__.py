"""The commands: serve drafts, show settings, replay outputs, explain a draft, export an index."""

from indexer.flags import command_line

app = command_line(
    "Serve draft trees from indexes, replay recorded outputs through a drafter, explain a "
    "draft, or export an index.",
    {
        "serve": "retriever.commands.serve_command:serve",
        "config": "retriever.commands.config_command:show_settings",
        "replay": "retriever.commands.replay_command:replay_traces",
        "explain": "retriever.commands.explain_command:explain",
        "health": "retriever.commands.health_command:health",
        "info": "retriever.commands.info_command:info",
        "export": "retriever.commands.export_command:export",
        "access": "retriever.commands.access_command:app",
        "admin": "retriever.commands.admin_command:app",
    },
)


def main() -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    app(prog_name="foredraft")
