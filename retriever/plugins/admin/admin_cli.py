"""The command `admin`; its subcommands are imported when it is invoked."""

from indexer.flags import command_line

app = command_line(
    "The command `admin` and its subcommands.",
    {"admin": "retriever.plugins.admin.admin_command:app"},
)


def main() -> None:
    """Run the command line; errors are printed on one line."""
    app(prog_name="foredraft")
