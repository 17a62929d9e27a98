"""The target as a teacher: it answers many prompts at a time, and its states are recorded.

The decoding loop for many sequences writes the answers, without drafts. In place of a drafter, it
gets a recorder of the states that it passes to drafters.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter, Verified
from decoder.errors import TrainingError, UnsupportedModelError
from decoder.loop import Decoder, Generation, Request
from decoder.model.compatibility import Capability
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.plugins.training.lessons import Lesson
from decoder.plugins.training.taught_store import Example
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule, accept_greedy
from retriever.drafter import FORGOTTEN, TokenIds
from retriever.follower import DraftLimits
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

BATCH: Final = 64
"""Sequences that are answered or read together: a pass reads the weights once for all of them."""

_LEAST_BUSY: Final = 0.35
"""Share of unfinished answers in a batch below which all of them are cut. A pass over few sequences
takes as long as a pass over many, and cut answers are equally good for training."""


class Teacher:
    """A target that answers prompts and reads texts, many at a time.

    Args:
        language_model: the target.
        states: numbers of the states to record; see `decoder.model.states`.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or it cannot verify trees.
    """

    def __init__(self, language_model: LanguageModel, states: Sequence[int]) -> None:
        target = Target(language_model.model, states=states, prefix_bytes=0)
        if target.capability is not Capability.TREES:
            raise UnsupportedModelError(
                f"{language_model.name} cannot be trained for: {target.reason}"
            )
        self._target, self._recorder = target, _Recorder(states)
        self._name, self._stop_ids = language_model.name, language_model.stop_ids

    def read(self, lessons: Sequence[Lesson]) -> list[Example]:
        """Read prompts with their recorded outputs; together they must have two tokens or more.

        Raises:
            TrainingError: the target's states are not finite.
        """
        texts = [np.concatenate([each.prompt, each.output]).astype(np.int32) for each in lessons]
        read = self._decoded([Request(text[:-1], 1, FORGOTTEN) for text in texts])
        return [
            Example(text, len(each.prompt), self._states(one), each.is_own)
            for text, each, one in zip(texts, lessons, read, strict=True)
        ]

    def answer(
        self,
        prompts: Sequence[TokenIds],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[Example]:
        """Answer prompts together; when only a few answers are unfinished, these are cut.

        Args:
            prompts: int32[n] each, shorter than the model's limit.
            max_new_tokens: most tokens of each answer, unless the model's limit is reached first.
            temperature: temperature of sampling; 0 answers greedily.
            seed: seed of the random numbers.

        Raises:
            TrainingError: the target's states are not finite.
        """
        rule = accept_rule(SamplingSettings(temperature, seed=seed))
        requests = [Request(prompt, max_new_tokens, FORGOTTEN) for prompt in prompts]
        answered = self._decoded(requests, rule, _LEAST_BUSY * len(prompts))
        return [
            Example(one.tokens, len(prompt), self._states(one), is_own=True, was_asked=True)
            for prompt, one in zip(prompts, answered, strict=True)
        ]

    def _decoded(
        self,
        requests: Sequence[Request],
        rule: AcceptRule = accept_greedy,
        least_busy: float = 0.0,
    ) -> list[Generation]:
        """Decode until fewer than `least_busy` sequences are unfinished; return all in order."""
        decoder = Decoder(  # a new one numbers its sequences from 0; samples depend on the number
            self._target, self._recorder, FixedBudget(0), rule, self._stop_ids
        )
        begun: dict[int, Generation] = {}
        num_left = len(requests)
        for generation, _ in decoder.generate_many(requests, BATCH):
            if generation.error is not None:
                raise generation.error
            begun[generation.number] = generation
            num_left -= generation.is_over
            if num_left < least_busy:
                for each in begun.values():
                    each.stop()
        return [begun[number] for number in range(len(requests))]

    def _states(self, generation: Generation) -> torch.Tensor:
        """Return bfloat16[n - 1, F], the states at all tokens except the last, on the CPU.

        Raises:
            TrainingError: some states are not finite.
        """
        drafter: Any = generation.drafter
        states: torch.Tensor = drafter.taken()
        if not bool(torch.isfinite(states).all()):
            raise TrainingError(
                f"{self._name} computes states that are not finite, which no head can be trained "
                "on: load it with another --precision, or check its weights"
            )
        return states


class _Recorder(NoDrafter):
    """A recorder of states that takes the place of a drafter; see `FollowingDrafter`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self.states = frozenset(numbers)

    def follow(self, _: TokenSequence, limits: DraftLimits | None = None) -> "_Recording":  # noqa: ARG002  as others
        return _Recording(self._numbers)

    def draft_together(self, asked: Sequence[Any]) -> list[DraftTree]:
        return [DraftTree.empty() for _ in asked]

    def ask_ahead(self, asked: Sequence[Any], busy_s: float) -> None:
        """Do nothing: it has no drafts to prepare."""


class _Recording:
    """The recorded states of one sequence; see `SequenceDrafter`."""

    num_failures = 0

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._rows: list[torch.Tensor] = []

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:  # noqa: ARG002  as others
        return DraftTree.empty()

    def learn(self, verified: Verified) -> None:
        self._rows.append(torch.cat([verified.states[each] for each in self._numbers], -1))

    def close(self) -> None:
        pass

    def taken(self) -> torch.Tensor:
        """Return bfloat16[n, F], the states, concatenated in the order of their numbers."""
        return torch.cat(self._rows).to("cpu", torch.bfloat16)
