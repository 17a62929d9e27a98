"""Answers prompts with streamed text, and figures at the end."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from decoder.loop import Decoder, Generation, Request
from decoder.model.pretrained import LanguageModel
from decoder.observation import Observer, Statistics
from decoder.stopping import StoppableText, StopStrings
from indexer.errors import reason_of
from indexer.launch import INTERRUPTED, TERMINATED
from retriever.drafter import DEFAULT, SequenceOptions

_HANDLED: Final = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Defers the first Ctrl-C or SIGTERM until the end of the current decoding step.

    So the shown text, the figures and the drafter's session agree, and a requested page is still
    written. A second signal raises KeyboardInterrupt at once.

    Attributes:
        is_requested: whether a signal requested a stop.
        is_deferred: whether signals are currently deferred instead of raised.
        is_terminated: whether the signal was SIGTERM; if so, no further work starts.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_deferred = False
        self.is_terminated = False

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return TERMINATED if self.is_terminated else INTERRUPTED

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle both signals during the block; call this only in the main thread.

        Raises:
            SystemExit: SIGTERM arrived while signals were not deferred.
        """
        previous = {each: signal.signal(each, self._handle) for each in _HANDLED}
        try:
            yield
        except KeyboardInterrupt:
            if self.is_terminated:
                raise SystemExit(TERMINATED) from None
            raise
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Stop deferring signals at the end of the block."""
        try:
            yield
        finally:
            self.is_deferred = False

    def _handle(self, number: int, _: object) -> None:
        self.is_terminated = self.is_terminated or number == signal.SIGTERM
        if not self.is_deferred or self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Answer:
    """The output for a prompt: complete, or up to an error.

    Attributes:
        text: the output's text without special tokens, up to the stop string.
        token_ids: the output's tokens, including the stop token; the last token may contain the end
            of the stop string.
        statistics: counts and times of the answer.
        finish_reason: the reason why the answer ended.
        stop_string: the stop string that ended the answer.
        error: the error that ended the answer.
    """

    text: str
    token_ids: list[int]
    statistics: Statistics
    finish_reason: FinishReason
    stop_string: str | None = None
    error: Exception | None = None

    def report(self) -> dict[str, Any]:
        """Return the answer and its figures as plain values."""
        found = {} if self.stop_string is None else {"stop_string": self.stop_string}
        failed = {} if self.error is None else {"error": reason_of(self.error)}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value,
            **found,
            **failed,
            **self.statistics.report(),
        }


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How long an answer may get, and how it is drafted.

    Attributes:
        max_new_tokens: most tokens to generate.
        stop_strings: strings that end the text.
        include_stop: whether the text includes the stop string that ends it.
        drafting: options for the drafter: whether later answers may be drafted from this answer,
            what it is expected to contain, and which other answers it resembles.
    """

    max_new_tokens: int
    stop_strings: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    drafting: SequenceOptions = DEFAULT


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A prompt to answer.

    Attributes:
        tokens: tokens of the prompt.
        on_text: called with each piece of text as soon as it can no longer change.
        observer: called with every pass of the answer.
    """

    tokens: Sequence[int]
    on_text: Callable[[str], object] = lambda _: None
    observer: Observer | None = None


def answer(
    decoder: Decoder,
    language_model: LanguageModel,
    task: Task,
    options: AnswerOptions,
    interruption: Interruption,
) -> Answer:
    """Generate an answer to one prompt; see `answer_many`."""
    ((_, result),) = answer_many(decoder, language_model, [task], options, 1, interruption)
    return result


def answer_many(
    decoder: Decoder,
    language_model: LanguageModel,
    tasks: Iterable[Task],
    options: AnswerOptions,
    parallel: int,
    interruption: Interruption,
) -> Iterator[tuple[int, Answer]]:
    """Generate answers to prompts, several at a time; yield each with its number, from 0.

    Answers are yielded when they are done. If an error ends an answer early, the answer has that
    error and the text so far. After an interruption, between two passes or in the first pass, the
    started answers are yielded with their text so far. An error that ends decoding becomes the
    error of all remaining answers.

    Args:
        decoder: decoder built for this model.
        language_model: the model, whose tokenizer decodes the answers.
        tasks: the prompts to answer.
        options: options of every answer.
        parallel: number of answers at a time.
        interruption: request to end the answers, for example by Ctrl-C.

    Raises:
        BrokenPipeError: the reader of the output has closed it.
    """
    begun: dict[int, _Answering] = {}
    error: Exception | KeyboardInterrupt | None = None
    requests = _requests(language_model, tasks, options, begun)
    many: Any = decoder.generate_many(requests, parallel)
    over: int | None = None
    try:
        with closing(many), interruption.between_steps():
            for generation, tokens in many:
                interruption.is_deferred = True  # the pass over a prompt may take long
                if over is not None and over != generation.number:  # the last pass was observed
                    yield over, begun.pop(over).result(decoder)
                begun[generation.number].take(generation, tokens)
                over = generation.number if generation.is_over else None
                if interruption.is_requested:
                    break
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001  reported with the text
        error = failure
        if isinstance(error, Exception):
            deque(requests, maxlen=0)
    is_interrupted = interruption.is_requested or isinstance(error, KeyboardInterrupt)
    for number, answering in begun.items():
        yield number, answering.result(decoder, error, is_interrupted=is_interrupted)


def _requests(
    language_model: LanguageModel,
    tasks: Iterable[Task],
    options: AnswerOptions,
    begun: dict[int, "_Answering"],
) -> Iterator[Request]:
    for number, task in enumerate(tasks):
        text = StoppableText(
            language_model.tokenizer, options.stop_strings, include=options.include_stop
        )
        begun[number] = _Answering(text, task.on_text)
        yield Request(
            task.tokens,
            options.max_new_tokens,
            options.drafting,
            text,
            observer=task.observer,
        )


class _Answering:
    """Turns the tokens of a generation into text."""

    def __init__(self, text: StoppableText, on_text: Callable[[str], object]) -> None:
        self._text = text
        self._on_text = on_text
        self._generation: Generation | None = None
        self._token_ids: list[int] = []
        self._pieces: list[str] = []

    def take(self, generation: Generation, tokens: Sequence[int]) -> None:
        """Add the next tokens, and show the text that can no longer change."""
        self._generation = generation
        self._token_ids.extend(tokens)
        self._emit(self._text.take())

    def result(
        self,
        decoder: Decoder,
        failure: BaseException | None = None,
        *,
        is_interrupted: bool = False,
    ) -> Answer:
        """Show the rest of the text; return the answer, complete or not.

        Args:
            decoder: the decoder, whose stop tokens end the answer.
            failure: the error that ended all answers.
            is_interrupted: whether an interruption may have ended the answer.
        """
        self._emit(self._text.finish())
        generation = self._generation
        is_whole = generation is not None and not generation.is_wanted
        error = None if generation is None else generation.error
        if error is None and isinstance(failure, Exception):
            error = failure
        reason = FinishReason.LENGTH
        if error is not None:
            reason = FinishReason.ERROR
        elif is_interrupted and not is_whole:
            reason = FinishReason.INTERRUPTED
        elif self._text.found is not None or decoder.stop_ids.intersection(self._token_ids[-1:]):
            reason = FinishReason.STOP
        return Answer(
            "".join(self._pieces),
            self._token_ids,
            Statistics() if generation is None else generation.statistics,
            reason,
            self._text.found,
            error,
        )

    def _emit(self, piece: str) -> None:
        self._pieces.append(piece)
        self._on_text(piece)
