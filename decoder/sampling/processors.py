"""Applies sampling settings as transformers' logits processors, along the path to each row."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decoder.sampling.constraint import Constraint, ConstraintMemory, masked
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import PassContext, is_waited_for
from retriever.tree import ROOT, DraftTree

_SLACK: Final = 0.01
"""Margin in logits, larger than any rounding error."""


class CountPenalty(LogitsProcessor):
    """Penalizes the logits of tokens that occur in the output, once and for each occurrence.

    These are OpenAI's presence and frequency penalties, for which transformers has no processor.

    Args:
        presence: penalty for a token that occurs at all.
        frequency: penalty for each occurrence of a token.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary], the logits minus the penalties.

        Args:
            input_ids: int64[rows, n], the tokens to count, that is, the output.
            scores: [rows, vocabulary], the logits.
        """
        each = torch.full_like(input_ids, -self._frequency, dtype=scores.dtype)
        scores = scores.scatter_add(1, input_ids, each)
        return scores.scatter(1, input_ids, scores.gather(1, input_ids) - self._presence)


class NucleusWarper(TopPLogitsWarper):
    """Transformers' top-p, but without sorting tokens that are certain to be removed.

    All tokens with a probability below (1 - top_p) / vocabulary together have less than 1 - top_p,
    so they are removed in any order. A row of 49,152 logits on a CPU takes 0.1 to 0.4 ms instead of
    2.5 ms.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary], the logits with -inf for all tokens outside the nucleus."""
        if len(scores) != 1 or is_waited_for(scores):
            kept: torch.Tensor = super().__call__(input_ids, scores)
            return kept
        probabilities = torch.softmax(scores[0], dim=-1).numpy()
        tail = 1 - self.top_p
        tokens = np.flatnonzero(probabilities >= tail / len(probabilities))
        order = np.argsort(probabilities[tokens])
        ascending = probabilities[tokens[order]].astype(np.float64)
        mass_up_to = 1 - ascending.sum() + ascending.cumsum()
        first = min(int((mass_up_to <= tail).sum()), len(tokens) - 1)
        nucleus = torch.from_numpy(tokens[order[first:]])
        return torch.full_like(scores, self.filter_value).index_copy_(
            1, nucleus, scores[:, nucleus]
        )


_BLIND: Final = frozenset(
    {
        EpsilonLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        NucleusWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
"""Processors whose result for a row depends only on that row; a derived class may depend on more.
Transformers' processors that check rows and raise errors (eta, top-h) are not included, because
they would raise errors for rows off the path."""


def penalties_of(settings: SamplingSettings) -> list[LogitsProcessor]:
    """Return the processors that use prompt and output; they run before all others."""
    processors: list[LogitsProcessor] = []
    penalty = settings.repetition_penalty
    if penalty is not None and penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
    return processors


def count_penalties_of(settings: SamplingSettings) -> list[LogitsProcessor]:
    """Return the processors that use only the output; they run right after `penalties_of`."""
    presence = settings.presence_penalty or 0.0
    frequency = settings.frequency_penalty or 0.0
    is_needed = presence != 0 or frequency != 0
    return [CountPenalty(presence, frequency)] if is_needed else []


class Warping:
    """The processors of sampling, which run after all others and use no tokens.

    On a CPU, a single row is first reduced to the tokens that may remain.

    Args:
        settings: the settings that determine the processors.

    Attributes:
        processors: all processors, in transformers' order; empty if no setting applies.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._scaling: list[LogitsProcessor] = []
        if settings.temperature not in {0, 1}:
            self._scaling.append(TemperatureLogitsWarper(float(settings.temperature)))
        self._truncating = [] if settings.is_greedy else _truncating(settings)
        self.processors = [*self._scaling, *self._truncating]

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, vocabulary], the logits after all processors."""
        scores = applied(self._scaling, None, scores)
        if not self._truncating or len(scores) != 1 or is_waited_for(scores):
            return applied(self._truncating, None, scores)
        tokens = self._candidates(scores[0])
        if tokens is None or len(tokens) == 0:  # empty: the row is NaN
            return applied(self._truncating, None, scores)
        kept = applied(self._truncating, None, scores[:, tokens])
        return torch.full_like(scores, -math.inf).index_copy_(1, tokens, kept)

    def _candidates(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Return int64[n], the tokens that may remain; `None` if a search would not pay off."""
        settings = self._settings
        if settings.top_k:
            least = torch.topk(scores, min(settings.top_k, len(scores))).values[-1]
        elif settings.min_p and not settings.top_p:
            least = scores.max() + math.log(settings.min_p) - _SLACK
        else:
            return None
        return torch.from_numpy(np.flatnonzero(scores.numpy() >= least.numpy()))


def _truncating(settings: SamplingSettings) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1:
        warpers.append(NucleusWarper(float(settings.top_p)))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(float(settings.min_p)))
    return warpers


def applied(
    processors: Sequence[LogitsProcessor], tokens: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    """Return [rows, vocabulary], the logits after all processors in order.

    `LogitsProcessorList` does the same, but inspects every signature in every call.

    Args:
        processors: the processors to apply.
        tokens: int64[rows, n], the tokens before each row; `None` for processors that do not use
            them.
        scores: float32[rows, vocabulary], the logits; they may be overwritten.
    """
    processed: Any = scores
    preceding: Any = tokens
    for processor in processors:
        processed = processor(preceding, processed)
    result: torch.Tensor = processed
    return result


class Processing:
    """Processes the target's logits before a token is chosen.

    The order is that of transformers: repetition penalty, frequency and presence penalty, the
    caller's processors, the constraint, then temperature, top-k, top-p and min-p.

    Args:
        settings: the settings that determine the penalties and the processors of sampling.
        processors: the caller's processors; each may use tokens and keep state, unless its class is
            known to do neither.
        constraint: which tokens may be chosen.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        processors: Sequence[LogitsProcessor],
        constraint: Constraint[Any] | None,
    ) -> None:
        self._penalties = penalties_of(settings)
        self._count_penalties = count_penalties_of(settings)
        self._processors = processors
        self.after_constraint = Warping(settings)
        self.memory = None if constraint is None else ConstraintMemory(constraint)
        self.looks_at_tokens = bool(self._penalties or self._count_penalties) or not all(
            type(processor) in _BLIND for processor in processors
        )

    @property
    def is_blind(self) -> bool:
        """Whether a processed row depends only on that row, not on the tokens before it."""
        return self.memory is None and not self.looks_at_tokens

    @property
    def is_empty(self) -> bool:
        """Whether logits are left unchanged."""
        return self.memory is None and not self.all_processors

    @property
    def is_of_settings(self) -> bool:
        """Whether only sampling settings apply, which use no tokens."""
        return self.is_blind and not self._processors

    @property
    def callers(self) -> Sequence[LogitsProcessor]:
        """The caller's processors."""
        return self._processors

    @property
    def all_processors(self) -> list[LogitsProcessor]:
        """All processors, in order, without the constraint."""
        return [
            *self._penalties,
            *self._count_penalties,
            *self._processors,
            *self.after_constraint.processors,
        ]

    def before_constraint(
        self, tokens: torch.Tensor | None, scores: torch.Tensor, num_prompt_tokens: int
    ) -> torch.Tensor:
        """Apply the processors that may use tokens.

        Args:
            tokens: int64[rows, n], the tokens before each row; `None` if no processor uses tokens.
            scores: float32[rows, vocabulary], the logits; they may be overwritten.
            num_prompt_tokens: number of prompt tokens at the start of `tokens`.
        """
        scores = applied(self._penalties, tokens, scores)
        if tokens is not None and self._count_penalties:
            scores = applied(self._count_penalties, tokens[:, num_prompt_tokens:], scores)
        return applied(self._processors, tokens, scores)


class PathScores:
    """The processed logits of one pass, computed on demand.

    Args:
        processing: the processing of the logits.
        tree: the verified tree, N nodes.
        logits: [1 + N, vocabulary], the target's logits; they are not overwritten.
        context: the sequence that the tree continues.
    """

    def __init__(
        self, processing: Processing, tree: DraftTree, logits: torch.Tensor, context: PassContext
    ) -> None:
        self._processing = processing
        self._tree = tree
        self._logits = logits
        self._context = context
        self._drafted: torch.Tensor | None = None
        self._tokens: dict[int, torch.Tensor] = {}
        self._states: dict[int, Any] = {}

    def of(self, rows: slice) -> torch.Tensor:
        """Return float32[rows, vocabulary]: row 0 is after the last token, row n + 1 after node n.

        Args:
            rows: any rows if the processing is blind; otherwise one row, whose parent's row was
                processed before.
        """
        processing = self._processing
        scores = self._logits[rows].to(torch.float32, copy=True)
        tokens = self._before(rows.start) if processing.looks_at_tokens else None
        scores = processing.before_constraint(tokens, scores, self._context.num_prompt_tokens)
        if processing.memory is not None:
            scores = masked(scores, processing.memory.constraint.allowed(self._state(rows.start)))
        return processing.after_constraint(scores)

    def _before(self, row: int) -> torch.Tensor:
        """Return int64[1, n], all tokens before a row."""
        if self._drafted is None:
            known = len(self._context.tokens)
            tokens = np.concatenate([self._context.tokens, self._tree.token_ids], dtype=np.int64)
            sent = torch.from_numpy(tokens)[None].to(self._logits.device)
            self._tokens[ROOT + 1], self._drafted = sent[:, :known], sent[:, known:]
        if row > ROOT + 1:
            node = row - 1
            before = self._tokens[int(self._tree.parents[node]) + 1]
            self._tokens[row] = torch.cat([before, self._drafted[:, node : node + 1]], dim=1)
        return self._tokens[row]

    def _state(self, row: int) -> Any:
        """Return the constraint's state after the tokens before a row."""
        memory = self._processing.memory
        if memory is None:
            return None
        if row == ROOT + 1:
            state = memory.state(self._context)
        else:
            node = row - 1
            before = self._states[int(self._tree.parents[node]) + 1]
            state = memory.constraint.advance(before, int(self._tree.token_ids[node]))
        self._states[row] = state
        return state
