"""A running service under its operator's hand: the admin plane, and the command `admin`."""

from indexer.launch import Command

COMMAND = Command(
    "admin",
    "serve",
    "retriever.plugins.admin.admin_cli",
    "server",
    "Look into a running service, and change it.",
)
