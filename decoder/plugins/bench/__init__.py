"""The command `bench`: it measures decoding with drafts against decoding without them."""

from indexer.launch import Command

COMMAND = Command(
    "bench",
    "decode",
    "decoder.plugins.bench.bench_cli",
    "decoder",
    "Measure how much faster drafts make decoding.",
    plugins=("decoder.plugins.contenders",),
)
