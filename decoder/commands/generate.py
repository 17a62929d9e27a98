"""Answering one prompt: text as it comes, and figures at the end."""

import signal
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
from retriever.drafter import ALONE, Kin, Prediction

_HANDLED: Final = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns the first Ctrl-C during a step, or a request to terminate, into one to stop after it.

    So the text shown, the figures and the drafter's session agree, and a page is written. A second
    one raises KeyboardInterrupt at once.

    Attributes:
        is_requested: whether to stop.
        is_deferred: whether a signal is a request now, and no exception.
        is_terminated: whether it was a request to terminate, after which nothing else begins.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_deferred = False
        self.is_terminated = False

    @property
    def status(self) -> int:
        """The status to end with."""
        return TERMINATED if self.is_terminated else INTERRUPTED

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle both signals during the block; in the main thread only.

        Raises:
            SystemExit: the process is to terminate, and the block did not wait for a step's end.
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
        """End the deferring with the block."""
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
    """Why there is no more of an answer."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Answer:
    """The output for a prompt, whole or up to an error.

    Attributes:
        text: the output without special tokens, up to the stop string.
        token_ids: the same as tokens, the stop token included; the last one may hold (the end
            of) the stop string.
        statistics: its counts and times.
        finish_reason: why it ended.
        stop_string: the one that ended it.
        error: what ended it.
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
    """How long an answer gets, and who may use it.

    Attributes:
        max_new_tokens: most tokens to generate.
        stop_strings: what ends the text.
        include_stop: whether the text ends behind a stop string instead of before it.
        remember: whether the drafter may use the answer for later ones.
        predictions: what the answer is expected to contain.
        kin: which sequences the answer is like.
    """

    max_new_tokens: int
    stop_strings: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    remember: bool = True
    predictions: tuple[Prediction, ...] = ()
    kin: Kin = ALONE


def answer(
    decoder: Decoder,
    language_model: LanguageModel,
    prompt: str | Sequence[int],
    options: AnswerOptions,
    *,
    on_text: Callable[[str], object] = lambda _: None,
    observer: Observer | None = None,
    interruption: Interruption | None = None,
) -> Answer:
    """Generate an answer to a prompt; what ends it early leaves the text so far.

    Args:
        decoder: made for this model.
        language_model: whose tokenizer reads the prompt and writes the answer.
        prompt: a user's message, or the beginning of a text where there is no chat template; or
            its tokens.
        options: when to stop.
        on_text: is called with each piece of text as soon as it is certain.
        observer: is shown every pass.
        interruption: ends the answer between two passes.

    Raises:
        InvalidPromptError: the prompt is empty or too long for the model.
    """
    text = StoppableText(
        language_model.tokenizer, options.stop_strings, include=options.include_stop
    )
    generation = decoder.generate(
        language_model.encode(prompt) if isinstance(prompt, str) else prompt,
        options.max_new_tokens,
        remember=options.remember,
        stop_rule=text,
        observer=observer,
        predictions=options.predictions,
        kin=options.kin,
    )
    answering = _Answering(decoder, text, on_text, interruption or Interruption())
    error = answering.run(generation)
    return answering.result(generation, error)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One of many prompts to answer.

    Attributes:
        tokens: the prompt's.
        on_text: is called with each piece of text as soon as it is certain.
        observer: is shown every pass.
    """

    tokens: Sequence[int]
    on_text: Callable[[str], object] = lambda _: None
    observer: Observer | None = None


def answer_many(
    decoder: Decoder,
    language_model: LanguageModel,
    tasks: Iterable[Task],
    options: AnswerOptions,
    parallel: int,
    interruption: Interruption,
) -> Iterator[tuple[int, Answer]]:
    """Generate answers to many prompts, some at a time; yield each with its number, from 0.

    They come as they are done. Once interrupted, those that had begun come with what they have.
    """
    begun: dict[int, tuple[_Answering, Generation | None]] = {}

    def requests() -> Iterator[Request]:
        for number, task in enumerate(tasks):
            text = StoppableText(
                language_model.tokenizer, options.stop_strings, include=options.include_stop
            )
            begun[number] = _Answering(decoder, text, task.on_text, interruption), None
            yield Request(
                task.tokens,
                options.max_new_tokens,
                options.remember,
                text,
                observer=task.observer,
                predictions=options.predictions,
                kin=options.kin,
            )

    many: Any = decoder.generate_many(requests(), parallel)
    with closing(many), interruption.between_steps():
        for generation, tokens in many:
            interruption.is_deferred = True
            answering, _ = begun[generation.number]
            begun[generation.number] = answering, generation
            answering.take(tokens)
            if generation.is_over:
                del begun[generation.number]
                answering.finish()
                yield generation.number, answering.result(generation, generation.error)
            if interruption.is_requested:
                break
    for number, (answering, generation) in begun.items():
        if generation is not None:
            answering.finish()
            yield number, answering.result(generation, None)


class _Answering:
    """A generation on its way to text."""

    def __init__(
        self,
        decoder: Decoder,
        text: StoppableText,
        on_text: Callable[[str], object],
        interruption: Interruption,
    ) -> None:
        self._decoder = decoder
        self._on_text = on_text
        self.text = text
        self.interruption = interruption
        self.token_ids: list[int] = []
        self.pieces: list[str] = []

    def run(self, generation: Generation) -> Exception | KeyboardInterrupt | None:
        """Go on to the end, and return what brought it about if it came too early."""
        error: Exception | KeyboardInterrupt | None = None
        try:
            self._decode(generation)
        except BrokenPipeError:
            raise  # the reader is gone
        except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001  is told with the text
            error = failure
        self.finish()
        return error

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens, and show the text that is certain."""
        self.token_ids.extend(tokens)
        self._emit(self.text.take())

    def finish(self) -> None:
        """Show the rest of the text."""
        self._emit(self.text.finish())

    def result(self, generation: Generation, error: BaseException | None) -> Answer:
        """Return the answer, whole or as far as it came."""
        return Answer(
            "".join(self.pieces),
            self.token_ids,
            generation.statistics,
            _reason(self, self._decoder, error, is_whole=not generation.is_wanted),
            self.text.found,
            error if isinstance(error, Exception) else None,
        )

    def _decode(self, generation: Generation) -> None:
        steps: Any = iter(generation)
        with closing(steps), self.interruption.between_steps():
            for tokens in steps:
                self.interruption.is_deferred = True  # the prompt's pass may take long
                self.take(tokens)
                if self.interruption.is_requested:
                    break

    def _emit(self, piece: str) -> None:
        self.pieces.append(piece)
        self._on_text(piece)


def _reason(
    answering: _Answering, decoder: Decoder, error: BaseException | None, *, is_whole: bool
) -> FinishReason:
    if isinstance(error, Exception):
        return FinishReason.ERROR
    if error is not None or (answering.interruption.is_requested and not is_whole):
        return FinishReason.INTERRUPTED
    if answering.text.found is not None or decoder.stop_ids.intersection(answering.token_ids[-1:]):
        return FinishReason.STOP
    return FinishReason.LENGTH
