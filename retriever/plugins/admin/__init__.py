"""Administration of a running service: the admin plane and the command `admin`."""

from indexer.launch import Command

COMMAND = Command(
    "admin",
    "serve",
    "retriever.plugins.admin.admin_cli",
    "server",
    "Inspect and change a running service.",
)
