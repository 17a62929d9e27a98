"""The command `admin`, whose own commands are imported when it is named."""

from indexer.flags import command_line

app = command_line(
    "The command `admin`, and what it has.",
    {"admin": "retriever.plugins.admin.admin_command:app"},
)


def main() -> None:
    """Run the command line; errors are printed in one line."""
    app(prog_name="foredraft")
