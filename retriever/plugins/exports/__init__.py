"""Export of an index as a corpus that an engine drafts from on its own: the command `export`."""

from indexer.launch import Command

COMMAND = Command(
    "export",
    "index",
    "retriever.plugins.exports.export_cli",
    "server",
    "Write an index for an engine's own drafting.",
)
