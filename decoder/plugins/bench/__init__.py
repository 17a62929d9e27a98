"""Measuring against decoding without drafts: the command `bench`."""

from indexer.launch import Command

COMMAND = Command(
    "bench",
    "decode",
    "decoder.plugins.bench.bench_cli",
    "decoder",
    "Measure against decoding without drafts.",
    plugins=("decoder.plugins.contenders",),
)
