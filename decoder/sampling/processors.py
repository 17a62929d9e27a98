"""Sampling settings as transformers' logits processors, applied along the path to each row."""

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
"""Margin in units of a logit, larger than any rounding error."""


class CountPenalty(LogitsProcessor):
    """Subtracts a penalty from the logits of tokens that occur, and one for each occurrence.

    These are OpenAI's presence and frequency penalties, which transformers has no processor for.

    Args:
        presence: penalty of a token that occurs.
        frequency: penalty for each occurrence.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary], the logits less the penalties.

        Args:
            input_ids: int64[rows, n], the tokens that count: the output's.
            scores: [rows, vocabulary].
        """
        each = torch.full_like(input_ids, -self._frequency, dtype=scores.dtype)
        scores = scores.scatter_add(1, input_ids, each)
        return scores.scatter(1, input_ids, scores.gather(1, input_ids) - self._presence)


class NucleusWarper(TopPLogitsWarper):
    """Transformers' top-p, without sorting tokens that are too improbable to stay.

    Tokens of less than (1 - top_p) / vocabulary hold less than 1 - top_p together, so they go
    whatever their order is. One row of 49,152 logits on a processor takes 0.1 to 0.4 ms instead
    of 2.5.
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
"""Processors that make of a row what depends on that row alone; a class derived from one may look
at more. Those of transformers that check rows and raise (eta, top-h) are not among them: they would
raise for rows off the path."""


def penalties_of(settings: SamplingSettings) -> list[LogitsProcessor]:
    """Return the processors that look at prompt and output, before any others."""
    processors: list[LogitsProcessor] = []
    penalty = settings.repetition_penalty
    if penalty is not None and penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
    return processors


def count_penalties_of(settings: SamplingSettings) -> list[LogitsProcessor]:
    """Return the processors that look at the output only, right after those of `penalties_of`."""
    presence = settings.presence_penalty or 0.0
    frequency = settings.frequency_penalty or 0.0
    is_needed = presence != 0 or frequency != 0
    return [CountPenalty(presence, frequency)] if is_needed else []


class Warping:
    """The processors of sampling, which come after all others and look at no token.

    A single row on a CPU is narrowed to the tokens that may stay before the rest is applied.

    Args:
        settings: which processors there are.

    Attributes:
        processors: all of them, in transformers' order; none if tokens are not drawn.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._scaling: list[LogitsProcessor] = []
        if settings.temperature not in {0, 1}:
            self._scaling.append(TemperatureLogitsWarper(float(settings.temperature)))
        self._truncating = [] if settings.is_greedy else _truncating(settings)
        self.processors = [*self._scaling, *self._truncating]

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, vocabulary], the logits after all of them."""
        scores = applied(self._scaling, None, scores)
        if not self._truncating or len(scores) != 1 or is_waited_for(scores):
            return applied(self._truncating, None, scores)
        tokens = self._candidates(scores[0])
        if tokens is None or len(tokens) == 0:  # none: the row holds no numbers
            return applied(self._truncating, None, scores)
        kept = applied(self._truncating, None, scores[:, tokens])
        return torch.full_like(scores, -math.inf).index_copy_(1, tokens, kept)

    def _candidates(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Return int64[n], tokens that may stay; `None` where finding them does not pay."""
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
    """Return [rows, vocabulary], the logits after all processors in turn.

    `LogitsProcessorList` does so, too, but inspects every signature on every call.

    Args:
        processors: to apply.
        tokens: int64[rows, n], what precedes each row; `None` for those that do not look.
        scores: float32[rows, vocabulary]; may be written to.
    """
    processed: Any = scores
    preceding: Any = tokens
    for processor in processors:
        processed = processor(preceding, processed)
    result: torch.Tensor = processed
    return result


class Processing:
    """The processing of the target's logits before a token is chosen.

    The order is transformers': repetition penalty, frequency and presence penalty, the caller's
    processors, the constraint, then temperature, top-k, top-p and min-p.

    Args:
        settings: which penalties and which of sampling's processors there are.
        processors: more of them; any may look at tokens and remember its calls, unless its class
            is known to do neither.
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
        """Whether a row after processing depends on that row alone, not on how it was reached."""
        return self.memory is None and not self.looks_at_tokens

    @property
    def is_empty(self) -> bool:
        """Whether logits stay as they are."""
        return self.memory is None and not self.all_processors

    @property
    def is_of_settings(self) -> bool:
        """Whether nothing but the settings of sampling, which look at no token, is applied."""
        return self.is_blind and not self._processors

    @property
    def callers(self) -> Sequence[LogitsProcessor]:
        """The caller's processors."""
        return self._processors

    @property
    def all_processors(self) -> list[LogitsProcessor]:
        """All processors, in order; the constraint is none of them."""
        return [
            *self._penalties,
            *self._count_penalties,
            *self._processors,
            *self.after_constraint.processors,
        ]

    def before_constraint(
        self, tokens: torch.Tensor | None, scores: torch.Tensor, num_prompt_tokens: int
    ) -> torch.Tensor:
        """Apply the processors that may look at tokens.

        Args:
            tokens: int64[rows, n], what precedes each row; `None` where none of them looks.
            scores: float32[rows, vocabulary]; may be written to.
            num_prompt_tokens: how many of the tokens are the prompt's.
        """
        scores = applied(self._penalties, tokens, scores)
        if tokens is not None and self._count_penalties:
            scores = applied(self._count_penalties, tokens[:, num_prompt_tokens:], scores)
        return applied(self._processors, tokens, scores)


class PathScores:
    """One pass's processed logits, computed on demand.

    Args:
        processing: of the logits.
        tree: N nodes.
        logits: [1 + N, vocabulary], the target's; they stay as they are.
        context: the sequence that the tree goes on from.
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
        """Return float32[rows, vocabulary], the logits after the last token (0) or node row - 1.

        Args:
            rows: any where the processing is blind; otherwise one, after its node's parent's.
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
        """Return the constraint's state before a row."""
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
