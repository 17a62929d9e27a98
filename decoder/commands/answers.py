"""Answering prompts in order, and printing answers, figures and errors."""

import json
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from decoder import errors
from decoder.commands.generate import (
    Answer,
    AnswerOptions,
    FinishReason,
    Interruption,
    Task,
    answer_many,
)
from decoder.commands.plain_comparison import PlainAnswers
from decoder.commands.prompts import Prompt
from decoder.commands.terminal import Painter, Palette
from decoder.errors import InvalidPromptError, TraceFileError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.observation import ObservedPass, Observer, Statistics, counted
from decoder.sampling.constraint import Grammar
from decoder.speedup import Speedup
from indexer.errors import reason_of
from retriever.tree import Source


@dataclass(slots=True)
class Endings:
    """Counts answers, and those that ended because a limit was reached.

    Attributes:
        max_new_tokens: the limit that was asked for.
        pattern: what answers match once they are whole, if anything.
        num_answers: all of them.
        num_limited: those with so many tokens as were asked for.
        num_full: those that filled the room that the model has for prompt and output.
        num_unmatched: those of both whose pattern was not complete.
    """

    max_new_tokens: int
    pattern: Grammar | None = None
    num_answers: int = 0
    num_limited: int = 0
    num_full: int = 0
    num_unmatched: int = 0

    def count(self, result: Answer) -> None:
        """Count an answer in."""
        self.num_answers += 1
        if result.finish_reason is not FinishReason.LENGTH:
            return
        if len(result.token_ids) < self.max_new_tokens:
            self.num_full += 1
        else:
            self.num_limited += 1
        if self.pattern is not None and not self.pattern.is_match(result.token_ids):
            self.num_unmatched += 1

    def summary(self) -> str:
        """Return the line that follows the figures; empty where no limit was reached."""
        limit = counted(self.max_new_tokens, "token")
        parts = [
            self._told(self.num_limited, f"ended at the limit of {limit}"),
            self._told(self.num_full, "ended at the model's limit for prompt and output"),
            self._told(self.num_unmatched, "broke off before the pattern was complete"),
        ]
        return "".join(f"; {part}" for part in parts if part)

    def _told(self, count: int, what: str) -> str:
        share = "" if self.num_answers == 1 else f"{count} of {self.num_answers} answers "
        return f"{share}{what}" if count else ""


FORESEEN = (*errors.FORESEEN, torch.OutOfMemoryError)
"""Errors that tell a user what to do; others are bugs, and are shown with a traceback."""

_HEADING_CHARACTERS = 72
"""Of a prompt, so that its heading fits a line of 80."""


class PassWriter(Protocol):
    """Writes the passes of answers, as a trace does."""

    def observer(self, prompt: int, text: str = "", context: Sequence[int] = ()) -> Observer:
        """Return what is shown each pass of a prompt, by the prompt's number, text and tokens."""
        ...


_INDEXED: Final = (Source.CORPUS, Source.PHRASES)
"""What a token of an index is drafted from: its texts, or its phrase tables."""


class Printer:
    """Shows answers on standard output, and figures and errors on standard error.

    Args:
        as_json: print an object a line instead of texts.
        is_single: there is one prompt, which was not read from a file.
        num_prompts: how many there are.
        palette: colours of texts; `None` for none.
        indexes: that are drafted from.
    """

    def __init__(
        self,
        *,
        as_json: bool,
        is_single: bool,
        num_prompts: int,
        palette: Palette | None = None,
        indexes: Sequence[Path] = (),
    ) -> None:
        self._as_json = as_json
        self.is_single = is_single
        self._num_prompts = num_prompts
        self.palette = palette
        self._indexes = indexes

    def piece(self, text: str) -> None:
        """Show a part of an answer's text at once, where it streams."""
        if self.is_single and not self._as_json:
            self._echo(text, nl=False)

    def end_of_text(self) -> None:
        """End the line of a text that streamed."""
        if self.is_single and not self._as_json:
            typer.echo()

    def answer(
        self, number: int, prompt: Prompt, result: Answer, speedup: Speedup, painted: str
    ) -> None:
        """Show an answer that has ended, whole or not.

        Args:
            number: of the prompt, from 1.
            prompt: what was answered.
            result: the answer.
            speedup: what drafts were worth for it.
            painted: its text in colours.
        """
        if self._as_json:
            self._print_json(prompt, result.report() | {"speedup": speedup.report()})
        elif not self.is_single:
            self._print_block(number, prompt, painted)

    def failure(self, number: int, prompt: Prompt, error: Exception) -> None:
        """Show that a prompt has no answer, or only a part of one."""
        if self._as_json:
            reason = {"finish_reason": FinishReason.ERROR.value, "error": reason_of(error)}
            self._print_json(prompt, {"text": "", "token_ids": [], **reason})
        else:
            self._print_block(number, prompt, "")
        self.error(number, prompt, error)

    def error(self, number: int, prompt: Prompt, error: Exception) -> None:
        """Print a prompt's error on standard error."""
        place = "" if self.is_single else f"prompt {number} (line {prompt.line}): "
        typer.echo(f"error: {place}{reason_of(error)}", err=True)

    def statistics(self, total: Statistics, endings: Endings, speedup: Speedup) -> None:
        """Show the figures of all answers, which ended at a limit, and what drafts were worth."""
        if self.palette is not None:
            legend = self.palette.legend(total.accepted, total.num_tokens)
            typer.echo(f"tokens by colour: {legend}", err=True, color=True)
        typer.echo(total.summary() + endings.summary(), err=True)
        typer.echo(speedup.summary(), err=True)
        is_unused = not any(total.accepted[source] for source in _INDEXED)
        if self._indexes and total.num_tokens and is_unused:
            self._tell_unused()

    def _tell_unused(self) -> None:
        """Say that no token came from an index, and what to do."""
        if self._as_json:
            return
        named = ", ".join(map(str, self._indexes))
        flags = [part for path in self._indexes for part in ("--index", str(path))]
        typer.echo(
            f"no token came from {named}: an index helps a model that writes what stands in it; "
            f"`{shlex.join(['foredraft', 'explain', *flags])} --context TEXT` shows what it would "
            "draft",
            err=True,
        )

    def _echo(self, text: str, *, nl: bool = True) -> None:
        typer.echo(text, nl=nl, color=None if self.palette is None else True)

    def _print_json(self, prompt: Prompt, report: dict[str, Any]) -> None:
        about = {"line": prompt.line, "category": prompt.category, "prompt": prompt.text}
        typer.echo(json.dumps(report if self.is_single else {**about, **report}))

    def _print_block(self, number: int, prompt: Prompt, text: str) -> None:
        heading = " ".join(prompt.text.split())
        if len(heading) > _HEADING_CHARACTERS:
            heading = heading[:_HEADING_CHARACTERS] + "…"
        self._echo(f"[{number}/{self._num_prompts}] {heading}\n{text}\n")


class Answerer:
    """Answers prompts; one that fails is reported, and the others go on.

    Args:
        decoder: made for the model.
        language_model: whose answers these are.
        options: of every answer.
        printer: shows them.
        writer: writes every pass, if wanted.
        interruption: ends the answers.
        pattern: what whole answers match, if anything.
        comparison: decodes plainly, too, if wanted; one answer at a time.
        parallel: answers at a time; of several, each is shown when those before it are done.

    Attributes:
        num_failed: prompts without a whole answer.
        is_interrupted: whether Ctrl-C ended it.
    """

    def __init__(
        self,
        decoder: Decoder,
        language_model: LanguageModel,
        options: AnswerOptions,
        printer: Printer,
        *,
        writer: PassWriter | None,
        interruption: Interruption,
        pattern: Grammar | None = None,
        comparison: PlainAnswers | None = None,
        parallel: int = 1,
    ) -> None:
        self._decoder = decoder
        self._parallel = parallel
        self._language_model = language_model
        self._options = options
        self._printer = printer
        self._writer = writer
        self._interruption = interruption
        self._endings = Endings(options.max_new_tokens, pattern)
        self._comparison = comparison
        self._total, self._speedup = Statistics(), Speedup()
        self.num_failed = 0
        self.is_interrupted = False

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Answer all of them, and print the figures.

        Raises:
            DecoderError, RetrieverError, IndexerError: the only prompt failed, or the trace did.
        """
        numbered = list(enumerate(prompts, 1))
        # One at a time, the next one waits for what comes after an answer, such as its comparison.
        batches = [numbered] if self._parallel > 1 else [[each] for each in numbered]
        try:
            with _bar(len(prompts)) as bar:
                task = bar.add_task("prompts", total=len(prompts))
                for batch in batches:
                    self._answer(batch, lambda: bar.advance(task))
                    if self.is_interrupted:
                        break
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            if self._total.num_passes or self.is_interrupted:
                self._printer.statistics(self._total, self._endings, self._speedup)

    def _answer(
        self, numbered: Sequence[tuple[int, Prompt]], advance: Callable[[], object]
    ) -> None:
        """Answer some at a time, and show them in order."""
        begun: list[_Begun] = []
        done: dict[int, tuple[_Begun, Answer]] = {}
        unseen = deque(number for number, _ in numbered)
        answers = answer_many(
            self._decoder,
            self._language_model,
            self._tasks(numbered, begun, done),
            self._options,
            self._parallel,
            self._interruption,
        )
        for place, result in answers:
            done[begun[place].number] = begun[place], result
            advance()
            while unseen and unseen[0] in done:
                self._show(*done.pop(unseen.popleft()))
        for number in sorted(done):  # what waited for one that was interrupted, or failed
            self._show(*done[number])

    def _tasks(
        self,
        numbered: Sequence[tuple[int, Prompt]],
        begun: list["_Begun"],
        done: dict[int, tuple["_Begun", Answer]],
    ) -> Iterator[Task]:
        """Give prompts to be answered; one that cannot be read is done."""
        for number, prompt in numbered:
            painter = Painter(
                self._language_model.tokenizer, self._printer.piece, self._printer.palette
            )
            each = _Begun(number, prompt, painter)
            try:
                each.tokens = prompt.encoded(self._language_model)
                observers: list[Observer] = []
                if self._writer is not None:
                    observers.append(self._writer.observer(number, prompt.text, each.tokens))
            except FORESEEN as error:
                done[number] = each, Answer("", [], Statistics(), FinishReason.ERROR, error=error)
                continue
            begun.append(each)
            yield painted(self._decoder, each.tokens, painter, each.speedup, observers)

    def _show(self, begun: "_Begun", result: Answer) -> None:
        """Show an answer, whole or not; an error of its prompt alone is reported."""
        number, prompt, error = begun.number, begun.prompt, result.error
        has_text = error is None or bool(result.token_ids)
        if has_text:
            begun.painter.finish()
            self._printer.end_of_text()
        speedup = self._compared(begun, result) or begun.speedup
        if has_text:
            self._total.add(result.statistics)
            self._endings.count(result)
            self._speedup.add(speedup)
            self.is_interrupted |= result.finish_reason is FinishReason.INTERRUPTED
            self._printer.answer(number, prompt, result, speedup, begun.painter.painted)
        if error is None:
            return
        concerns_all = isinstance(error, TraceFileError) or not isinstance(error, FORESEEN)
        if concerns_all or self._printer.is_single:
            raise error
        tell = self._printer.error if has_text else self._printer.failure
        tell(number, prompt, error)
        self.num_failed += 1

    def _compared(self, begun: "_Begun", result: Answer) -> Speedup | None:
        """Return what drafts were worth as measured; `None` where that was not done."""
        if self._comparison is None:
            return None
        if result.finish_reason not in {FinishReason.INTERRUPTED, FinishReason.ERROR}:
            return self._comparison.speedup(begun.tokens, result, self._interruption)
        if begun.tokens and not isinstance(result.error, InvalidPromptError):
            self._comparison.skip()  # a prompt that is refused takes no random numbers
        return None


@dataclass(slots=True, eq=False)
class _Begun:
    """A prompt, its number from 1 and its tokens, and what watches its answer."""

    number: int
    prompt: Prompt
    painter: Painter
    tokens: Sequence[int] = ()
    speedup: Speedup = field(default_factory=Speedup)


def painted(
    decoder: Decoder,
    tokens: Sequence[int],
    painter: Painter,
    speedup: Speedup,
    observers: Sequence[Observer] = (),
) -> Task:
    """Return a prompt to answer, whose text is painted and whose drafts' worth is counted.

    Args:
        decoder: that answers it.
        tokens: the prompt's.
        painter: gets the text, and writes it; it is to be finished behind the answer.
        speedup: is told of every pass, where passes have a measured cost.
        observers: are shown every pass after that.
    """
    counted = speedup.observer(decoder.budget, len(tokens))
    return Task(tokens, painter.text, together([painter.observe, counted, *observers]))


def together(observers: Sequence[Observer]) -> Callable[[ObservedPass], None]:
    """Return an observer that shows each pass to several, in order."""

    def observe(step: ObservedPass) -> None:
        for observer in observers:
            observer(step)

    return observe


def _bar(num_prompts: int) -> Progress:
    """Return a bar for standard error, which shows itself where that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        console=console,
        disable=num_prompts == 1 or not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
