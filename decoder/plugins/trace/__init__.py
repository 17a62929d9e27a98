"""Traces: a line for every pass that `generate` writes, and the command that reads them."""

from indexer.launch import Command

COMMAND = Command(
    "trace",
    "look",
    "decoder.plugins.trace.trace_cli",
    "decoder",
    "Read what `generate --trace` wrote of every pass.",
)
