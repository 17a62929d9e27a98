"""The commands of the core: `generate` answers prompts, and `chat` talks with a model.

Each command imports its implementation only when it runs, so that help appears immediately.
"""

import typer

from decoder.commands.options import AnsweredPrompts, ChatSettings, ModelSettings, ShownSettings
from decoder.drafters.options import DraftOptions
from decoder.errors import DecoderError
from decoder.sampling.sampling_settings import SamplingSettings
from indexer.errors import IndexerError
from indexer.flags import AsJson, CommandLine, with_flags
from indexer.launch import errors_in_one_line
from retriever.errors import RetrieverError

app = CommandLine("Decode with a model and drafts.")


@app.command("generate")
@with_flags
def run_generate(
    *,
    chosen: ModelSettings,
    drafts: DraftOptions,
    given: AnsweredPrompts,
    output: ShownSettings,
    sampling: SamplingSettings,
    as_json: AsJson = False,
) -> None:
    """Answer one or more prompts; text goes to standard output, figures to standard error.

    The answer to a single prompt streams. Answers to a file of prompts are printed when they are
    done, as blocks or, with --json, as one object per line. If a prompt fails, the error is shown,
    the other prompts continue, and the exit status is 1.
    """
    from decoder.commands.generate_command import answer_prompts  # noqa: PLC0415  (loads torch)

    answer_prompts(chosen, drafts, given, output, sampling, as_json=as_json)


@app.command("chat")
@with_flags
def run_chat(
    *,
    chosen: ModelSettings,
    drafts: DraftOptions,
    output: ChatSettings,
    sampling: SamplingSettings,
) -> None:
    """Talk with a model; each token has the colour of the source that drafted it.

    Later answers are also drafted from earlier ones. Ctrl-C ends an answer, Ctrl-D or /exit ends
    the conversation, and /clear starts a new conversation. Without a terminal, each line of
    standard input is a message, and each answer goes to standard output.
    """
    from decoder.commands.chat_command import hold_conversation  # noqa: PLC0415  (loads torch)

    hold_conversation(chosen, drafts, output, sampling)


def run(commands: typer.Typer) -> None:
    """Run a command line; expected errors are printed in one line."""
    with errors_in_one_line(DecoderError, RetrieverError, IndexerError, MemoryError):
        commands(prog_name="foredraft")


def main() -> None:
    """Run the commands of the core."""
    run(app)
