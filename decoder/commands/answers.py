"""Answers prompts in order, and prints answers, figures and errors."""

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
    """Counts all answers, and the answers that ended at a limit.

    Attributes:
        max_new_tokens: the requested limit of tokens.
        pattern: grammar that complete answers match, if any.
        num_answers: number of answers.
        num_limited: number of answers that reached the requested limit.
        num_full: number of answers that reached the model's limit for prompt and output.
        num_unmatched: number of answers that reached a limit before the pattern was complete.
    """

    max_new_tokens: int
    pattern: Grammar | None = None
    num_answers: int = 0
    num_limited: int = 0
    num_full: int = 0
    num_unmatched: int = 0

    def count(self, result: Answer) -> None:
        """Count an answer."""
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
        """Return the sentence to print after the figures; empty if no limit was reached."""
        limit = counted(self.max_new_tokens, "token")
        parts = [
            self._told(self.num_limited, f"ended at the limit of {limit}"),
            self._told(self.num_full, "ended at the model's limit for prompt and output"),
            self._told(self.num_unmatched, "ended before the pattern was complete"),
        ]
        return "".join(f"; {part}" for part in parts if part)

    def _told(self, count: int, what: str) -> str:
        share = "" if self.num_answers == 1 else f"{count} of {self.num_answers} answers "
        return f"{share}{what}" if count else ""


FORESEEN = (*errors.FORESEEN, torch.OutOfMemoryError)
"""Errors that tell a user what to do; all other errors are bugs and show a traceback."""

_HEADING_CHARACTERS = 72
"""Most characters of a prompt in the heading of its answer, which then fits in 80 columns."""


class PassWriter(Protocol):
    """Writes the passes of answers, for example to a trace."""

    def observer(self, prompt: int, text: str = "", context: Sequence[int] = ()) -> Observer:
        """Return an observer of the passes of a prompt, given its number, text and tokens."""
        ...


_INDEXED: Final = (Source.CORPUS, Source.PHRASES)
"""Sources of tokens that were drafted from an index: its texts and its phrase tables."""


class Printer:
    """Shows answers on standard output, and figures and errors on standard error.

    Args:
        as_json: whether to print one JSON object per line instead of texts.
        is_single: whether there is only one prompt, not a file of prompts.
        num_prompts: number of prompts.
        palette: colours of texts; `None` for no colours.
        indexes: the indexes to draft from.
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
        """Show a part of an answer's text immediately, if answers stream."""
        if self.is_single and not self._as_json:
            self._echo(text, nl=False)

    def end_of_text(self) -> None:
        """End the last line of a streamed text."""
        if self.is_single and not self._as_json:
            typer.echo()

    def answer(
        self, number: int, prompt: Prompt, result: Answer, speedup: Speedup, painted: str
    ) -> None:
        """Show an answer that has ended, complete or not.

        Args:
            number: number of the prompt, from 1.
            prompt: the prompt.
            result: the answer.
            speedup: the answer's speedup from drafts.
            painted: the answer's text in colours.
        """
        if self._as_json:
            self._print_json(prompt, result.report() | {"speedup": speedup.report()})
        elif not self.is_single:
            self._print_block(number, prompt, painted)

    def failure(self, number: int, prompt: Prompt, error: Exception) -> None:
        """Show that a prompt has no answer, or only a partial answer."""
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
        """Show the figures of all answers, the number that ended at a limit, and the speedup."""
        if self.palette is not None:
            legend = self.palette.legend(total.accepted, total.num_tokens)
            typer.echo(f"tokens by colour: {legend}", err=True, color=True)
        typer.echo(total.summary() + endings.summary(), err=True)
        typer.echo(speedup.summary(), err=True)
        is_unused = not any(total.accepted[source] for source in _INDEXED)
        if self._indexes and total.num_tokens and is_unused:
            self._tell_unused()

    def _tell_unused(self) -> None:
        """Report that no token came from an index, and say what to do."""
        if self._as_json:
            return
        named = ", ".join(map(str, self._indexes))
        flags = [part for path in self._indexes for part in ("--index", str(path))]
        typer.echo(
            f"no token came from {named}: an index helps if the model repeats text from it; "
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
    """Answers prompts; if one fails, the error is shown, and the other prompts continue.

    Args:
        decoder: decoder built for the model.
        language_model: the model that answers.
        options: options of every answer.
        printer: shows the answers.
        writer: writes every pass to a trace or page, if requested.
        interruption: request to end the answers, for example by Ctrl-C.
        pattern: grammar that complete answers match, if any.
        comparison: decodes again without drafts, if requested; only with one answer at a time.
        parallel: number of answers at a time; if more than 1, each answer is shown when all answers
            before it are done.

    Attributes:
        num_failed: number of prompts without a complete answer.
        is_interrupted: whether Ctrl-C ended the answers.
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
        """Answer all prompts and print the figures.

        Raises:
            DecoderError, RetrieverError, IndexerError: the only prompt failed, or the trace cannot
                be written.
        """
        numbered = list(enumerate(prompts, 1))
        # With one answer at a time, the next prompt waits for what follows an answer, such as its
        # comparison.
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
        """Answer several prompts at a time and show the answers in order."""
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
        for number in sorted(done):  # answers that waited for an interrupted or failed answer
            self._show(*done[number])

    def _tasks(
        self,
        numbered: Sequence[tuple[int, Prompt]],
        begun: list["_Begun"],
        done: dict[int, tuple["_Begun", Answer]],
    ) -> Iterator[Task]:
        """Yield the prompts as tasks; a prompt that cannot be encoded fails at once."""
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
        """Show an answer, complete or not; report an error that affects only this prompt."""
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
        """Return the measured speedup; `None` if it was not measured."""
        if self._comparison is None:
            return None
        if result.finish_reason not in {FinishReason.INTERRUPTED, FinishReason.ERROR}:
            return self._comparison.speedup(begun.tokens, result, self._interruption)
        if begun.tokens and not isinstance(result.error, InvalidPromptError):
            self._comparison.skip()  # a refused prompt uses no random numbers
        return None


@dataclass(slots=True, eq=False)
class _Begun:
    """A prompt with its number (from 1), its tokens, its painter and its speedup."""

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
    """Return a task that paints the answer and counts its speedup.

    Args:
        decoder: the decoder that answers the prompt.
        tokens: tokens of the prompt.
        painter: writes the text; call its `finish` after the answer.
        speedup: the sums to which every pass is added, if costs of passes are measured.
        observers: further observers, called with every pass after the painter and the speedup.
    """
    counted = speedup.observer(decoder.budget, len(tokens))
    return Task(tokens, painter.text, together([painter.observe, counted, *observers]))


def together(observers: Sequence[Observer]) -> Callable[[ObservedPass], None]:
    """Return an observer that calls several observers for each pass, in order."""

    def observe(step: ObservedPass) -> None:
        for observer in observers:
            observer(step)

    return observe


def _bar(num_prompts: int) -> Progress:
    """Return a progress bar on standard error, shown only on a terminal."""
    console = Console(stderr=True)
    return Progress(
        console=console,
        disable=num_prompts == 1 or not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
