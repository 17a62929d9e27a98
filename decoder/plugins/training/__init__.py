"""Training a head: with the command `train`, or online while a model decodes."""

from indexer.launch import Command

COMMAND = Command(
    "train",
    "decode",
    "decoder.plugins.training.train_cli",
    "decoder",
    "Train a speculator that drafts for a model.",
    plugins=("decoder.plugins.speculators", "decoder.plugins.contenders"),
)
