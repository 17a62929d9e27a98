"""The command `estimate`: it computes from recorded traffic how much drafts would save."""

from indexer.launch import Command

COMMAND = Command(
    "estimate",
    "look",
    "decoder.plugins.estimate.estimate_cli",
    "decoder",
    "Say from recorded outputs whether drafts would help.",
    plugins=("decoder.plugins.contenders",),
)
