"""Drafts for mlx-lm: an object with the interface of a draft model.

    drafts = DraftsForMlx(drafter, model.args.vocab_size)
    stream_generate(model, tokenizer, prompt, draft_model=drafts, num_draft_tokens=4)

The speculative loop of mlx-lm calls a draft model with tokens and a cache, and trims rejected
tokens from the cache. So the draft model knows each sequence exactly, and each cache stands for one
sequence. The draft model's logits give all probability to the drafted token, so the loop's sampler
picks that token. The token is accepted if the target's own choice, greedy or sampled, is the same.
So the output is that of plain decoding.

The loop verifies the same number of tokens in every pass. A shorter draft is padded.
"""

from collections.abc import Sequence
from itertools import count
from logging import getLogger
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as prompt_caches

from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_options import chain_for, check_version, checked_vocabulary_size
from decoder.engines.engine_sequences import (
    EngineRow,
    EngineSequences,
    NamedRequest,
    SequenceLimits,
)
from decoder.engines.late_drafter import without_waiting
from decoder.observation import Statistics
from indexer.reader import Vocabulary
from retriever.drafter import Drafter, TokenIds
from retriever.tree import DraftTree

TESTED_VERSIONS: Final = ">=0.32,<0.33"
DEFAULT_BUDGET_NODES: Final = 32
"""Number of nodes in the tree that a path is chosen from; mlx-lm verifies only a few tokens in a
pass."""

MAX_CHAIN: Final = 16
"""Most tokens of a path; the loop does not say in advance how many it will request."""

_MOST_OF_A_STEP: Final = 2
"""Most tokens that a step reads: the last accepted token and the target's own. A prompt is read in
larger parts, and nothing is drafted for them."""

_IMPOSSIBLE: Final = -1e9
"""Logit of all other tokens; it is finite, so that logits processors can multiply it."""

_NAMES: Final = count()
"""Names of sequences; each is used only once."""

_log = getLogger(__name__)


class DraftedSequence:
    """One sequence of mlx-lm, in the form of the draft model's cache.

    Args:
        drafts: the draft model.
        tokens: initial tokens of the sequence.

    Attributes:
        offset: number of tokens that the loop has read into the cache.
        state: arrays to evaluate; always empty.
    """

    def __init__(self, drafts: "DraftsForMlx", tokens: Sequence[int] = ()) -> None:
        self._drafts = drafts
        self._tokens = list(tokens)
        self._request = NamedRequest(next(_NAMES))
        self._num_prompt = 0  # unknown before the first draft
        self._chain = DraftTree.empty()
        self._num_given = 0
        self._last_given: int | None = None
        self._was_verified = False
        self._num_before = 0

    @property
    def offset(self) -> int:
        """Number of tokens that were read."""
        return len(self._tokens)

    @property
    def state(self) -> list[Any]:
        """Arrays to evaluate: none."""
        return []

    def is_trimmable(self) -> bool:
        """Return true: tokens can be removed."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Remove the last tokens; the loop calls this once after each pass."""
        num_tokens = min(num_tokens, len(self._tokens))
        del self._tokens[len(self._tokens) - num_tokens :]
        self._last_given, self._was_verified = None, True
        return num_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftedSequence":
        """Return a new sequence with the same tokens; servers that cache prompts need this."""
        return DraftedSequence(self._drafts, self._tokens)

    def next_token(self, tokens: list[int]) -> int:
        """Add tokens, and return the token to propose after them."""
        self._tokens += tokens
        if len(tokens) > _MOST_OF_A_STEP:
            self._num_prompt = 0
            return self._drafts.filler
        if tokens != [self._last_given]:
            self._begin_draft()
        token = self._drafts.filler
        if self._num_given < len(self._chain):
            token = int(self._chain.token_ids[self._num_given])
        self._num_given += 1
        self._last_given = token
        return token

    def close(self) -> None:
        """End the sequence; the drafter stores its output."""
        self._drafts.sessions.end(self._request.name)

    def _begin_draft(self) -> None:
        """Draft after the tokens so far, which are the prompt's or were chosen by the target."""
        tokens = np.array(self._tokens, np.int32)
        was_verified, self._was_verified = self._was_verified, False
        if was_verified:
            self._count(tokens)
        else:  # a short piece of the prompt may have looked like a step
            self.close()
            self._num_prompt = 0
        self._num_prompt = self._num_prompt or len(tokens)
        self._num_given, self._num_before = 0, len(tokens)
        self._chain = self._drafts.chain(tokens, self._num_prompt, self._request)

    def _count(self, tokens: TokenIds) -> None:
        """Count the outcome of the last draft."""
        new = tokens[self._num_before :]
        if len(new):
            drafted = self._chain.prefix(self._num_given)
            self._drafts.statistics.record(drafted, drafted.follow(new[:-1]), len(new))


class DraftsForMlx:
    """A draft model that gives all probability to a drafter's tokens; use it from one thread.

    If the drafter fails, there are no drafts, but no token is lost.

    Args:
        drafter: the drafter.
        model_vocabulary: number of the model's logits; a draft ends before a token beyond them.
        budget_nodes: largest number of nodes in the tree that a path is chosen from.
        vocabulary: vocabulary of the model's tokenizer; a drafter for another one is refused.
        filler: token to propose if there is no draft.

    Attributes:
        statistics: counts of all sequences.
        sessions: the sequences and their drafts.
        filler: token to propose if there is no draft.

    Raises:
        UnsupportedEngineError: mlx-lm differs from the tested versions.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """

    def __init__(
        self,
        drafter: Drafter,
        model_vocabulary: int,
        *,
        budget_nodes: int = DEFAULT_BUDGET_NODES,
        vocabulary: Vocabulary | None = None,
        filler: int = 0,
    ) -> None:
        check_engine()
        known = checked_vocabulary_size(drafter, model_vocabulary, vocabulary)
        self.statistics = Statistics()
        self.sessions = EngineSequences(
            without_waiting(drafter), SequenceLimits(vocabulary_size=known)
        )
        self.filler = filler
        self.layers: list[Any] = []  # a model without layers
        self._model_vocabulary = model_vocabulary
        self._budget_nodes = budget_nodes
        self._sequence: DraftedSequence | None = None
        self._guard = EngineGuard("mlx-lm", _log, self.sessions.abandon)

    def make_cache(self) -> list[DraftedSequence]:
        """Return the cache of a new sequence, and end the last sequence."""
        self.close()
        self._sequence = DraftedSequence(self)
        return [self._sequence]

    def __call__(self, tokens: mx.array, cache: list[DraftedSequence], **_: Any) -> mx.array:
        """Read tokens, int[1, n], into a cache, and return the logits after them, [1, 1, V].

        The loop ignores the logits of a prompt's parts, so nothing is drafted for these.
        """
        [sequence] = cache
        ids: list[int] = tokens[0].tolist()
        token = self.filler
        with self._guard:
            token = sequence.next_token(ids)
        places = mx.arange(self._model_vocabulary)
        return mx.where(places == token, 0.0, _IMPOSSIBLE)[None, None]

    def close(self) -> None:
        """End the last sequence; the drafter stores its output."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            with self._guard:
                sequence.close()

    def chain(self, tokens: TokenIds, num_prompt: int, request: NamedRequest) -> DraftTree:
        """Return the most probable path after the sequence of a request.

        Args:
            tokens: int32[n], the sequence.
            num_prompt: number of prompt tokens.
            request: the request.
        """
        [tree] = self.sessions.step([EngineRow(tokens, num_prompt, self._budget_nodes, request)])
        return chain_for(tree, MAX_CHAIN, self._model_vocabulary)


def check_engine() -> None:
    """Refuse an mlx-lm with another interface to draft models; warn of an untested version.

    Raises:
        UnsupportedEngineError: the interface differs; the message says how.
    """
    check_version(TESTED_VERSIONS, "mlx-lm")
    found = [
        *differences(
            speculative_generate_step,
            parameters=["draft_model", "num_draft_tokens", "prompt_cache"],
        ),
        *differences(
            prompt_caches,
            attributes=["make_prompt_cache", "trim_prompt_cache"],
            called="mlx_lm.models.cache",
        ),
        *differences(prompt_caches.KVCache, attributes=_OF_CACHES),
    ]
    check_contract(("mlx-lm",), TESTED_VERSIONS, found)


_OF_CACHES: Final = ("is_trimmable", "state", "trim")
