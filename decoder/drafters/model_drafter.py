"""A smaller language model as a drafter."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import BranchCache, DraftModel
from decoder.drafters.drawn_trees import DrawnTrees, Draws
from decoder.drafters.model_trees import (
    Bounds,
    JudgedDraft,
    ModelDraft,
    MostProbableTrees,
    StoppingRule,
    TreeGrower,
)
from retriever.drafter import DraftRequest, OfOneProcess, TokenIds
from retriever.errors import DrafterUnavailableError, LimitExceededError
from retriever.limits import (
    Limits,
    check_draft,
    check_length,
    check_session_name,
    checked_tokens,
)
from retriever.sequences import OpenSessions, TokenSequence, check_batch, check_step
from retriever.tree import DraftTree

_REMEMBERED_REFUSALS: Final = 1024
"""Sequences that outgrew the model and are remembered, so that each is refused once: many more than
are decoded at a time. Each takes 4 bytes for every token of the model's limit."""


@dataclass(slots=True, eq=False)
class ModelSession:
    """One sequence of a draft model.

    Attributes:
        sequence: its tokens.
        cache: the model's keys and values; `None` once evicted for another sequence.
        last_draft: the draft to learn from when the next tokens come.
    """

    sequence: TokenSequence
    cache: BranchCache | None = None
    last_draft: ModelDraft | None = None

    @property
    def tokens(self) -> TokenIds:
        """int32[n], the committed tokens."""
        return self.sequence.tokens


class ModelSessions:
    """Sessions by name, a few of which have a cache.

    Args:
        model: whose caches these are.
        limits: how many sessions there may be.
        max_caches: sequences with a cache at once, at least one.
    """

    def __init__(self, model: DraftModel, limits: Limits, max_caches: int) -> None:
        self._model = model
        self._limits = limits
        self._max_caches = max(max_caches, 1)
        self._open: OpenSessions[str, ModelSession] = OpenSessions()
        self._cached: OrderedDict[str, None] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: str, tokens: TokenIds) -> None:
        """Begin a session.

        Raises:
            SessionExistsError: the name is taken.
            LimitExceededError: there are as many as there may be.
        """
        self._open.check_free(name)
        if len(self._open) >= self._limits.max_sessions:
            raise LimitExceededError(
                f"{len(self._open)} sessions are open, which is the limit (max_sessions)",
                limit="max_sessions",
            )
        self._open.add(name, ModelSession(TokenSequence(tokens)))

    def get(self, name: str) -> ModelSession:
        """Return a session.

        Raises:
            UnknownSessionError: there is none of this name.
        """
        return self._open.get(name)

    def remove(self, name: str) -> None:
        """End a session and forget its cache."""
        self._open.remove(name)
        self._cached.pop(name, None)

    def cache(self, name: str) -> BranchCache:
        """Return a sequence's cache; evicts the least recently used one where all are taken."""
        session = self._open.get(name)
        self._cached.pop(name, None)
        while len(self._cached) >= self._max_caches:
            idle, _ = self._cached.popitem(last=False)
            self._open.get(idle).cache = None
        self._cached[name] = None
        if session.cache is None:
            session.cache = BranchCache(self._model)
        return session.cache

    def forget_caches(self) -> None:
        """Drop all caches."""
        for name in self._cached:
            self._open.get(name).cache = None
        self._cached.clear()

    def is_first_refusal(self, request: DraftRequest) -> bool:
        """Note that a sequence is too long for the model; return whether that is new.

        A refused caller opens the sequence again under another name, so it is known by its tokens.
        """
        tokens = np.append(self.get(request.session).tokens, request.new_tokens)
        beginning = tokens[: self._model.max_length].astype(np.int32).tobytes()
        is_new = beginning not in self._refused
        self._refused[beginning] = None
        if len(self._refused) > _REMEMBERED_REFUSALS:
            self._refused.popitem(last=False)
        return is_new


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """How a draft model drafts.

    Attributes:
        width: most nodes in one of its passes.
        max_passes: most passes for one draft, besides the one that reads the sequence.
        max_caches: sequences whose keys and values are kept at once; the least recently used one
            is evicted, and read again when it is drafted for.
        draws: how drafts are drawn at random; the most probable tokens if not given. Drawn drafts
            are for sampling, which then verifies them by their distributions.
        costs: what passes cost; measured while drafting if not given.
    """

    width: int = 8
    max_passes: int = 8
    max_caches: int = 4
    draws: Draws | None = None
    costs: StepCosts | None = None


@dataclass(slots=True)
class _Clock:
    """When the last draft ended, and for which sessions: the target's time counts from then."""

    names: tuple[str, ...] = ()
    since_s: float = field(default_factory=time.perf_counter)


class ModelDrafter(OfOneProcess):
    """Drafts with a causal language model of the target's vocabulary; see `Drafter`.

    Sequences are drafted one after the other, each with a cache of its own. Not to be called by
    two threads at once.

    Args:
        model: a decoder-only model of transformers with sdpa or eager attention.
        options: how it drafts.
        vocabulary_size: token ids below it mean the same to both models; as many as the model has
            embeddings if not given.
        target_vocabulary: columns of the target's logits, which the proposals of drawn drafts
            have as well; `vocabulary_size` if not given.
        kept: int32[n], the only tokens to draft; see `DraftModel`.

    Raises:
        UncroppableCacheError: rejected tokens cannot be taken out of the model's state.
        UnsupportedModelError: the model cannot expand trees for another reason.
        VocabularyMismatchError: the model has fewer embeddings than the vocabulary has tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: DraftingOptions | None = None,
        *,
        vocabulary_size: int | None = None,
        target_vocabulary: int | None = None,
        kept: TokenIds | None = None,
    ) -> None:
        self.model = DraftModel(model, vocabulary_size=vocabulary_size, kept=kept)
        self.options = options or DraftingOptions()
        self.limits = Limits()
        self.rule = StoppingRule(self.options.costs)
        self._grower = self._make_grower(target_vocabulary or self.model.vocabulary_size)
        self._sessions = ModelSessions(self.model, self.limits, self.options.max_caches)
        self._clock = _Clock()

    def open(self, session: str, prompt: ArrayLike, *, remember: bool = True) -> None:  # noqa: ARG002  keeps nothing
        """Begin a sequence; see `Drafter.open`. It is read when it is drafted for."""
        check_session_name(session)
        tokens = checked_tokens(prompt, self.model.vocabulary_size)
        check_length(len(tokens), self.limits)
        self._sessions.add(session, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is checked as a whole first: where any request is refused, nothing is kept of any.
        A sequence that outgrew the model is refused once, and gets empty trees from then on.

        Raises:
            DrafterUnavailableError: a sequence outgrew the model, or memory did not suffice.
        """
        names = self._begin_step(requests)
        new_tokens = [self._checked(request) for request in requests]
        self._refuse_outgrown(requests)
        for request, tokens in zip(requests, new_tokens, strict=True):
            self._commit(self._sessions.get(request.session), tokens)
        try:
            return [self._draft(request) for request in requests]
        except torch.OutOfMemoryError as error:
            self._sessions.forget_caches()
            raise DrafterUnavailableError(
                f"memory did not suffice for a draft of {self.model.name}"
            ) from error
        finally:
            self._clock = _Clock(names)

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        tokens = checked_tokens(
            [] if new_tokens is None else new_tokens, self.model.vocabulary_size
        )
        self._commit(self._sessions.get(session), tokens)
        self._sessions.remove(session)

    def _make_grower(self, target_vocabulary: int) -> TreeGrower:
        if self.options.draws is None:
            return MostProbableTrees(self.model, self.rule)
        return DrawnTrees(self.model, self.rule, self.options.draws, target_vocabulary)

    def _begin_step(self, requests: Sequence[DraftRequest]) -> tuple[str, ...]:
        """Note how long the target took, if the same sessions were drafted for last."""
        check_batch(requests, self.limits)
        names = tuple(request.session for request in requests)
        if names and names == self._clock.names:
            self.rule.measured.record_step(time.perf_counter() - self._clock.since_s)
        return names

    def _checked(self, request: DraftRequest) -> TokenIds:
        known = len(self._sessions.get(request.session).tokens)
        check_draft(request.budget_nodes, request.min_probability, self.limits)
        tokens = checked_tokens(request.new_tokens, self.model.vocabulary_size)
        check_length(known + len(tokens), self.limits)
        check_step(request, known, len(tokens))
        return tokens

    def _refuse_outgrown(self, requests: Sequence[DraftRequest]) -> None:
        """Refuse a sequence beyond the model's limit, unless that was done before."""
        for request in requests:
            if self._is_outgrown(request.length) and self._sessions.is_first_refusal(request):
                raise DrafterUnavailableError(
                    f"{self.model.name} drafts for sequences of at most {self.model.max_length} "
                    f"tokens: one of {request.length} goes on without its drafts"
                )

    def _is_outgrown(self, length: int) -> bool:
        return self.model.max_length is not None and length > self.model.max_length

    def _commit(self, session: ModelSession, tokens: TokenIds) -> None:
        """Append new tokens, and learn which nodes of the last draft came true."""
        draft = session.last_draft
        session.sequence.extend(tokens)
        if draft is None or len(tokens) == 0:
            return
        session.last_draft = None
        outcome = JudgedDraft.of(draft.tree, tokens)
        self._grower.learn(draft, outcome)
        self.rule.learn(outcome, draft.num_passes)

    def _draft(self, request: DraftRequest) -> DraftTree:
        session = self._sessions.get(request.session)
        tokens = session.tokens
        if request.budget_nodes == 0 or len(tokens) == 0 or self._is_outgrown(len(tokens)):
            return DraftTree.empty()
        if not self.rule.is_due():
            return DraftTree.empty()
        cache = self._sessions.cache(request.session)
        session.last_draft = self._grower.draft(cache, tokens, self._bounds(request))
        return session.last_draft.tree

    def _bounds(self, request: DraftRequest) -> Bounds:
        limit = self.model.max_length
        return Bounds(
            request.budget_nodes,
            request.min_probability,
            self.options.width,
            self.options.max_passes,
            None if limit is None else limit - request.length + 1,
        )
