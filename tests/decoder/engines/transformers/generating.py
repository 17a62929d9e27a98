"""Calls of `model.generate` that these tests share."""

from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from decoder.budget.budget import FixedBudget
from decoder.engines.transformers.custom_generate import Foredraft
from retriever.drafter import Drafter
from tests.decoder.decoding import VOCABULARY, Guess, plainly, tree_of
from tests.retriever.warm_interpreter import WarmProcess

NEW_TOKENS = 20


def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> Any:
    generate: Any = model.generate
    tokens = torch.tensor([prompt])
    length = {} if "max_length" in options else {"max_new_tokens": NEW_TOKENS}
    return generate(tokens, **{"pad_token_id": 0, **length, **options})


def cache_in(output: Any) -> Any:
    """Return the cache of an output of `generate`, or of a model."""
    (cache,) = (each for each in output.values() if isinstance(each, Cache))
    return cache


def late_stop(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return stop tokens one of which comes late in the greedy output."""
    truth = plainly(model, prompt, NEW_TOKENS)
    return [VOCABULARY - 1, max(set(truth), key=truth.index)]


def perfect(truth: list[int]) -> Guess:
    """Draft the next true tokens as a chain."""
    return lambda tokens, _: tree_of(
        [(at - 1, token) for at, token in enumerate(truth[len(tokens) :][:8])]
    )


def foredraft(model: PreTrainedModel, drafter: Drafter) -> Foredraft:
    return Foredraft(model, drafter, budget=FixedBudget(64))


class EndsAfter(StoppingCriteria):
    """Ends a sequence behind a token, and counts how often it is asked."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
        self.num_calls += 1
        return input_ids[:, -1] == self.token


class Killing(BaseStreamer):
    """Kills a process after so many tellings, as a streamer or as `on_tokens`."""

    def __init__(self, process: WarmProcess, after: int) -> None:
        self._process = process
        self._left = after
        self.has_killed = False

    def __call__(self, _tokens: list[int]) -> None:
        self._left -= 1
        if self._left == 0:
            self._process.kill()
            self._process.communicate()
            self.has_killed = True

    def put(self, _value: torch.Tensor) -> None:
        self([])

    def end(self) -> None:
        """Nothing is left to do."""
