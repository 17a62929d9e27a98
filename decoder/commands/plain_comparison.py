"""Decodes answers again without drafts, to measure the speedup and find the first difference."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from decoder.budget.budget import FixedBudget
from decoder.commands.generate import Answer, AnswerOptions, Interruption, Task, answer
from decoder.drafters.following import NoDrafter
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.speedup import Speedup
from retriever.drafter import FORGOTTEN


class PlainAnswers:
    """Decodes prompts without drafts, with the same accept rule as a decoder with drafts.

    Args:
        decoder: the decoder of the compared answers. Call `speedup` or `skip` for every prompt that
            it has answered, in order, so that random numbers are the same.
        language_model: the model that answers.
        options: options of every answer.
    """

    def __init__(
        self, decoder: Decoder, language_model: LanguageModel, options: AnswerOptions
    ) -> None:
        target, accept, stop_ids = decoder.target, decoder.accept, decoder.stop_ids
        self._plain = Decoder(target, NoDrafter(), FixedBudget(0), accept, stop_ids)
        self._language_model = language_model
        self._options = replace(options, drafting=FORGOTTEN)

    def speedup(
        self, tokens: Sequence[int], result: Answer, interruption: Interruption
    ) -> Speedup | None:
        """Return the measured speedup of an answer; `None` if Ctrl-C ends the comparison."""
        self._plain.target.forget()  # else the prompt would already be in the cache
        plain = answer(self._plain, self._language_model, Task(tokens), self._options, interruption)
        self._plain.target.forget()
        if plain.error is not None:
            raise plain.error
        if interruption.is_requested or not plain.token_ids:
            return None
        different = first_difference(result.token_ids, plain.token_ids)
        return Speedup(
            result.statistics.total_s,
            plain.statistics.total_s,
            result.statistics.num_passes - 1,
            num_compared=1,
            num_different=int(different is not None),
            first_difference=different,
        )

    def skip(self) -> None:
        """Skip an incomplete answer."""
        self._plain.generate([0])


def first_difference(tokens: list[int], others: list[int]) -> int | None:
    """Return the position, from 1, of the first differing token; `None` if all are equal."""
    pairs = enumerate(zip_longest(tokens, others), 1)
    return next((at for at, (token, other) in pairs if token != other), None)
