"""Drafts on recorded outputs, without a model: the command `replay`."""

from indexer.launch import Command

COMMAND = Command(
    "replay",
    "look",
    "retriever.plugins.replay.replay_cli",
    "server",
    "Try drafts on recorded outputs, without a model.",
)
