"""Traces: `generate` writes one line for every pass, and the command `trace` reads them."""

from indexer.launch import Command

COMMAND = Command(
    "trace",
    "look",
    "decoder.plugins.trace.trace_cli",
    "decoder",
    "Show the passes in a trace of `generate --trace`.",
)
