"""Teaching a head: by the command `train`, and while a model decodes."""

from indexer.launch import Command

COMMAND = Command(
    "train",
    "decode",
    "decoder.plugins.training.train_cli",
    "decoder",
    "Have a model teach a speculator that drafts for it.",
    plugins=("decoder.plugins.speculators", "decoder.plugins.contenders"),
)
