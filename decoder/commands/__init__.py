"""The commands: generate answers, read traces, measure, or estimate from recorded outputs."""

from decoder.errors import DecoderError
from indexer.errors import IndexerError
from indexer.flags import command_line
from indexer.launch import errors_in_one_line
from retriever.errors import RetrieverError

app = command_line(
    "Decode with a model and drafts, or measure against transformers' own decoding.",
    {
        "generate": "decoder.commands.generate_command:run_generate",
        "chat": "decoder.commands.chat_command:run_chat",
        "bench": "decoder.commands.bench_command:run_bench",
        "train": "decoder.commands.train_command:run_train",
        "estimate": "decoder.commands.estimate_command:run_estimate",
        "trace": "decoder.commands.trace_command:run_trace",
    },
)


def main() -> None:
    """Run the command line; errors are printed in one line."""
    with errors_in_one_line(DecoderError, RetrieverError, IndexerError, MemoryError):
        app(prog_name="foredraft")
