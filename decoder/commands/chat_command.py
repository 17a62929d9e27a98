"""The command that holds a conversation in the terminal."""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import BinaryIO, Final, TextIO

import typer

from decoder.assembly import assemble, check_drafts, connect_drafter, own_rule
from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN, painted
from decoder.commands.generate import Answer, AnswerOptions, FinishReason, Interruption, answer
from decoder.commands.options import ChatSettings, ModelSettings, PromptSettings, is_dumb
from decoder.commands.prompts import checked_text
from decoder.commands.terminal import Painter, Palette
from decoder.drafters.options import DraftOptions
from decoder.errors import InvalidPromptError, PromptFileError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, prepare_model
from decoder.observation import ObservedPass, Statistics
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.speedup import Speedup
from indexer.errors import TokenizerError, reason_of
from indexer.launch import errors_in_one_line

_LEAST_ROOM: Final = 64
"""Least number of tokens left for an answer: a few sentences. Old turns are dropped to leave that
many."""

_PROMPT: Final = "> "

_COMMAND: Final = re.compile(r"/\w+(\s|$)")
_COMMANDS: Final = (
    "/clear starts a new conversation, /exit and /quit end the chat, /help shows this; a text that "
    "begins with a slash is sent with a space before it"
)


@errors_in_one_line(*FORESEEN)
def hold_conversation(
    chosen: ModelSettings, drafts: DraftOptions, output: ChatSettings, sampling: SamplingSettings
) -> None:
    """Talk with a model; see `foredraft chat --help`."""
    check_drafts(drafts)
    settings = drafts.sampling(sampling)
    prepared = prepare_model(chosen.options(PromptSettings(), drafts.index))
    if not prepared.tokenizer.chat_template:
        raise TokenizerError(
            f"{prepared.options.name} has no chat template, so it cannot chat: name a "
            "model that was made for chats, or use `foredraft generate`"
        )
    check_drafts(drafts, prepared.vocabulary)
    palette = Palette() if output.colour.applies_to(sys.stdout) else None
    with ExitStack() as stack:
        language_model = prepared.load()
        drafter = stack.enter_context(connect_drafter(drafts, language_model, settings))
        rule = own_rule(language_model, settings)
        decoder = assemble(
            language_model,
            drafter,
            rule,
            costs=store_at(chosen.cost_cache),
            num_ahead=drafts.draft_ahead,
        )
        messages = Messages(language_model, decoder, output.system)
        chat = Chat(messages, AnswerOptions(output.max_new_tokens), palette)
        chat.run()


@dataclass(slots=True)
class Messages:
    """The turns of a conversation; if they do not all fit into the model, the oldest are dropped.

    Attributes:
        language_model: the model, whose chat template formats the turns.
        decoder: the decoder, whose target limits the length.
        system: the system message, if any.
        turns: pairs of a user message and the answer, in order.
    """

    language_model: LanguageModel
    decoder: Decoder
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, message: str, max_new_tokens: int) -> tuple[list[int], int]:
        """Return the conversation's tokens with a new message, and the number of dropped turns.

        Raises:
            InvalidPromptError: even the message alone does not fit.
            TokenizerError: the chat template does not accept the conversation.
        """
        least = min(_LEAST_ROOM, max_new_tokens)
        num_dropped = 0
        while True:
            tokens = self.language_model.encode_chat(self._listed(message))
            if not self.turns or self.decoder.target.room(len(tokens), least) >= least:
                return self.decoder.target.checked_prompt(tokens).tolist(), num_dropped
            del self.turns[0]
            num_dropped += 1

    def _listed(self, message: str) -> list[dict[str, str]]:
        listed = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in self.turns:
            listed += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        return [*listed, {"role": "user", "content": message}]


class Chat:
    """Holds a conversation: reads messages, streams answers and prints the figures of each answer.

    Args:
        messages: the turns of the conversation.
        options: options of every answer.
        palette: colours of answers; `None` for no colours.
    """

    def __init__(self, messages: Messages, options: AnswerOptions, palette: Palette | None) -> None:
        self._messages = messages
        self._options = options
        self._palette = palette
        self._total, self._speedup = Statistics(), Speedup()
        self._interruption = Interruption()

    def run(self) -> None:
        """Answer messages until there are no more, then print the figures of all answers."""
        is_live = sys.stdin.isatty() and sys.stdout.isatty()
        is_interrupted = False
        for message in self._obeyed(_typed()) if is_live else _lines(sys.stdin.buffer):
            reason = self._answer(message)
            ends_all = self._interruption.is_terminated or not is_live
            is_interrupted = reason is FinishReason.INTERRUPTED and ends_all
            if is_interrupted:
                break
        if self._total.num_passes:
            typer.echo(f"{self._total.summary()}\n{self._speedup.summary()}", err=True)
        if is_interrupted:
            raise typer.Exit(self._interruption.status)

    def _obeyed(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the messages among the typed lines; run the commands, until one ends the chat."""
        for line in lines:
            command = line.rstrip()
            if not _COMMAND.match(line):
                yield line.removeprefix(" ") if line.startswith(" /") else line
            elif command in {"/exit", "/quit"}:
                return
            elif command == "/clear":
                self._messages.turns.clear()
                typer.echo("a new conversation begins", err=True)
            elif command == "/help":
                typer.echo(_COMMANDS, err=True)
            else:
                typer.echo(f"there is no command {command.split()[0]}: {_COMMANDS}", err=True)

    def _answer(self, message: str) -> FinishReason:
        """Answer a message; if that fails, the message is left out of the conversation."""
        try:
            limit = self._options.max_new_tokens
            tokens, num_dropped = self._messages.prompt(checked_text(message), limit)
        except (InvalidPromptError, TokenizerError) as error:
            typer.echo(f"error: {reason_of(error)}", err=True)
            return FinishReason.ERROR
        if num_dropped:
            typer.echo(f"oldest turns left out, for lack of room: {num_dropped}", err=True)
        speedup = Speedup()
        with StatusLine.shown() as status:
            result = self._decoded(tokens, speedup, status)
        typer.echo()
        self._total.add(result.statistics)
        self._speedup.add(speedup)
        if result.error is not None:
            raise result.error
        if result.token_ids:
            self._messages.turns.append((message, result.text))
        if sys.stdout.isatty():
            self._say(result, speedup)
        return result.finish_reason

    def _decoded(self, tokens: list[int], speedup: Speedup, status: "StatusLine | None") -> Answer:
        messages = self._messages
        painter = Painter(messages.language_model.tokenizer, self._write, self._palette)
        observers = [] if status is None else [ShownPace(speedup, status).observe]
        task = painted(messages.decoder, tokens, painter, speedup, observers)
        self._interruption = Interruption()
        with self._interruption.handled():
            model = messages.language_model
            result = answer(messages.decoder, model, task, self._options, self._interruption)
            painter.finish()
        return result

    def _write(self, text: str) -> None:
        typer.echo(text, nl=False, color=None if self._palette is None else True)

    def _say(self, result: Answer, speedup: Speedup) -> None:
        """Print the figures of an answer in lines that fit the terminal."""
        statistics = result.statistics
        parts = [
            f"{statistics.tokens_per_pass:.2f} tokens per pass",
            f"{statistics.tokens_per_second:.1f} tokens/s",
        ]
        if speedup.times_plain is not None:
            parts.append(f"{speedup.times_plain:.1f}x plain decoding (estimated)")
        if result.finish_reason is FinishReason.INTERRUPTED:
            parts.append("stopped")
        elif result.finish_reason is FinishReason.LENGTH:
            parts.append("cut at the limit of tokens")
        for line in folded(parts, shutil.get_terminal_size().columns):
            typer.echo(line, err=True)
        if self._palette is not None:
            legend = self._palette.legend(statistics.accepted, statistics.num_tokens)
            typer.echo(legend, err=True, color=True)


class ShownPace:
    """Counts the tokens of an answer, and shows tokens per pass while the answer streams.

    Args:
        speedup: speedup of the answer so far; each pass is added to it first.
        status: the status line that shows the figures.
    """

    def __init__(self, speedup: Speedup, status: "StatusLine") -> None:
        self._speedup = speedup
        self._status = status
        self._num_tokens = self._num_passes = 0

    def observe(self, step: ObservedPass) -> None:
        """Count a pass, and show the figures so far."""
        self._num_tokens += len(step.tokens)
        self._num_passes += 1
        parts = [f"{self._num_tokens / self._num_passes:.2f} tokens per pass"]
        parts.append(f"this one {len(step.tokens)}")
        if self._speedup.times_plain is not None:
            parts.append(f"{self._speedup.times_plain:.1f}x plain")
        self._status.show(folded(parts, self._status.columns - 1)[0])


class StatusLine:
    """A status line at the bottom of a terminal; everything else scrolls above it.

    Args:
        stream: output stream of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size = (0, 0)

    @classmethod
    @contextmanager
    def shown(cls) -> Iterator["StatusLine | None"]:
        """Show a status line on standard output during the block; `None` without a terminal."""
        is_able = sys.stdout.isatty() and not is_dumb()
        status = cls(sys.stdout) if is_able else None
        try:
            yield status
        finally:
            if status is not None:
                status.close()

    @property
    def columns(self) -> int:
        """The terminal's current number of columns."""
        return shutil.get_terminal_size().columns

    def show(self, text: str) -> None:
        """Replace the text of the status line; the cursor stays where it is."""
        columns, rows = size = tuple(shutil.get_terminal_size())
        if size != self._size:
            # A line feed and a step up free the last line; setting the region moves the cursor.
            self._stream.write(f"\n\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8")
            self._size = (columns, rows)
        self._stream.write(f"\x1b7\x1b[{rows};1H\x1b[2K{text}\x1b8")
        self._stream.flush()

    def close(self) -> None:
        """Clear the status line, and let the whole terminal scroll again."""
        if self._size != (0, 0):
            self._stream.write(f"\x1b7\x1b[r\x1b[{self._size[1]};1H\x1b[2K\x1b8")
            self._stream.flush()


def folded(parts: list[str], columns: int) -> list[str]:
    """Join parts by commas into lines of at most `columns` characters; no part is split."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}, {part}" if lines else part
        if lines and len(longer) <= columns:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the messages of standard input, one per line; empty lines are skipped.

    Raises:
        PromptFileError: a line is not UTF-8.
    """
    for number, line in enumerate(stream, 1):
        try:
            message = line.decode("utf-8").strip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptFileError(f"line {number} of standard input is not UTF-8") from error
        if message.strip():
            yield message


def _typed() -> Iterator[str]:
    """Yield the lines typed at a terminal, until Ctrl-D; Ctrl-C discards a line."""
    with suppress(ImportError):
        import_module("readline")  # for cursor keys and history
    typer.echo("Ctrl-C ends an answer, Ctrl-D the conversation; /help shows commands.", err=True)
    while True:
        try:
            message = input(_PROMPT)
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            typer.echo()
            return
        if message.strip():
            yield message
