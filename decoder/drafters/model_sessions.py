"""The sequences that a draft model drafts for, and the caches of some of them."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.drafters.branch_cache import BranchCache
from decoder.drafters.draft_model import DraftModel
from decoder.drafters.model_trees import ModelDraft
from decoder.sequence import Sequence
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import LimitExceededError, SessionExistsError, UnknownSessionError
from retriever.limits import Limits

_REMEMBERED_REFUSALS: Final = 1024


@dataclass(slots=True, eq=False)
class ModelSession:
    """One sequence.

    Attributes:
        sequence: its tokens.
        cache: what the model has read of it, unless another sequence took its place.
        last_draft: what nobody has learned from yet.
    """

    sequence: Sequence
    cache: BranchCache | None = None
    last_draft: ModelDraft | None = None

    @property
    def tokens(self) -> TokenIds:
        """int32[n], what is committed."""
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
        self._by_name: dict[str, ModelSession] = {}
        self._cached: OrderedDict[str, None] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: str, tokens: TokenIds) -> None:
        """Begin a session.

        Raises:
            SessionExistsError: the name is taken.
            LimitExceededError: there are as many as there may be.
        """
        if name in self._by_name:
            raise SessionExistsError(f"session {name!r} is open already")
        if len(self._by_name) >= self._limits.max_sessions:
            raise LimitExceededError(
                f"{len(self._by_name)} sessions are open, which is the limit (max_sessions)"
            )
        self._by_name[name] = ModelSession(Sequence(tokens))

    def get(self, name: str) -> ModelSession:
        """Return a session.

        Raises:
            UnknownSessionError: there is none of this name.
        """
        session = self._by_name.get(name)
        if session is None:
            raise UnknownSessionError(f"no session {name!r} is open: open it first")
        return session

    def remove(self, name: str) -> None:
        """End a session and forget its cache."""
        del self._by_name[name]
        self._cached.pop(name, None)

    def cache(self, name: str) -> BranchCache:
        """Return a sequence's cache, if need be instead of the one that was idle longest."""
        session = self._by_name[name]
        self._cached.pop(name, None)
        while len(self._cached) >= self._max_caches:
            idle, _ = self._cached.popitem(last=False)
            self._by_name[idle].cache = None
        self._cached[name] = None
        if session.cache is None:
            session.cache = BranchCache(self._model)
        return session.cache

    def forget_caches(self) -> None:
        """Give all caches back."""
        for name in self._cached:
            self._by_name[name].cache = None
        self._cached.clear()

    def is_first_refusal(self, request: DraftRequest) -> bool:
        """Note that a sequence is too long for the model; return whether that is new.

        Who is refused opens the sequence anew, so it is known by its tokens, not by its name.
        """
        tokens = np.append(self.get(request.session).tokens, request.new_tokens)
        beginning = tokens[: self._model.max_length].astype(np.int32).tobytes()
        is_new = beginning not in self._refused
        self._refused[beginning] = None
        if len(self._refused) > _REMEMBERED_REFUSALS:
            self._refused.popitem(last=False)
        return is_new
