"""Drafts for mlx-lm: an object in the form of a draft model.

    drafts = DraftsForMlx(drafter, model.args.vocab_size)
    stream_generate(model, tokenizer, prompt, draft_model=drafts, num_draft_tokens=4)

mlx-lm's speculative loop calls a draft model with tokens and a cache, and trims the cache by what
the target rejected: so it is told each sequence exactly, and a cache is a sequence. Logits that are
certain of a drafted token make its sampler draw that token. It is kept where the target's own
choice is the same, greedy or sampled: the output is that of plain decoding.

The loop verifies as many tokens in every pass, whatever is known: where a draft is shorter, it is
filled up.
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
"""Nodes of the tree that a path is taken from: mlx-lm verifies a few tokens in a pass."""

MAX_CHAIN: Final = 16
"""Most tokens of a path: the loop does not tell how many it will ask for."""

_MOST_OF_A_STEP: Final = 2
"""Tokens that a step reads at most: the last accepted one and the target's own. A prompt is read in
larger parts, for which nothing is drafted."""

_IMPOSSIBLE: Final = -1e9
"""The logit of any other token: finite, so that processors can multiply it."""

_NAMES: Final = count()
"""Names of sequences, each used once."""

_log = getLogger(__name__)


class DraftedSequence:
    """One sequence of mlx-lm, as its loop shows it: the draft model's cache.

    Args:
        drafts: whose sequence.
        tokens: that it begins with.

    Attributes:
        offset: how many tokens the loop has read into it.
        state: nothing that would have to be computed.
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
        """Tokens that were read."""
        return len(self._tokens)

    @property
    def state(self) -> list[Any]:
        """What is to be evaluated: nothing."""
        return []

    def is_trimmable(self) -> bool:
        """Return that tokens can be taken back."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Take back the last tokens; the loop does so once behind each pass."""
        num_tokens = min(num_tokens, len(self._tokens))
        del self._tokens[len(self._tokens) - num_tokens :]
        self._last_given, self._was_verified = None, True
        return num_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftedSequence":
        """Return a sequence of its own with the same tokens, as servers that keep prompts need."""
        return DraftedSequence(self._drafts, self._tokens)

    def next_token(self, tokens: list[int]) -> int:
        """Take in tokens, and return the one to propose behind them."""
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
        """End the sequence; the output is remembered."""
        self._drafts.sessions.end(self._request.name)

    def _begin_draft(self) -> None:
        """Draft behind the tokens so far, which are the prompt's or those that the target chose."""
        tokens = np.array(self._tokens, np.int32)
        was_verified, self._was_verified = self._was_verified, False
        if was_verified:
            self._count(tokens)
        else:  # a short piece of the prompt may have been taken for a step
            self.close()
            self._num_prompt = 0
        self._num_prompt = self._num_prompt or len(tokens)
        self._num_given, self._num_before = 0, len(tokens)
        self._chain = self._drafts.chain(tokens, self._num_prompt, self._request)

    def _count(self, tokens: TokenIds) -> None:
        """Count what became of the last draft."""
        new = tokens[self._num_before :]
        if len(new):
            drafted = self._chain.prefix(self._num_given)
            self._drafts.statistics.record(drafted, drafted.follow(new[:-1]), len(new))


class DraftsForMlx:
    """A draft model whose logits are certain of what a drafter proposes; for one thread.

    A failing drafter costs drafts, never a token.

    Args:
        drafter: gives the drafts.
        model_vocabulary: how many logits the model has: drafts end before any other token.
        budget_nodes: most nodes of the tree that a path is chosen from.
        vocabulary: of the model's tokenizer: a drafter for another one is refused.
        filler: what is proposed where nothing is known.

    Attributes:
        statistics: of all sequences.
        sessions: the sequences, and what is drafted for them.
        filler: as given.

    Raises:
        UnsupportedEngineError: mlx-lm is not as this is written for.
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
        self.layers: list[Any] = []  # of a model without any
        self._model_vocabulary = model_vocabulary
        self._budget_nodes = budget_nodes
        self._sequence: DraftedSequence | None = None
        self._guard = EngineGuard("mlx-lm", _log, self.sessions.abandon)

    def make_cache(self) -> list[DraftedSequence]:
        """Return the cache of a new sequence; the last one has ended."""
        self.close()
        self._sequence = DraftedSequence(self)
        return [self._sequence]

    def __call__(self, tokens: mx.array, cache: list[DraftedSequence], **_: Any) -> mx.array:
        """Return [1, 1, V], logits behind int[1, n] tokens that are read into a cache.

        Of a prompt, which is read without drafting, logits are never looked at.
        """
        [sequence] = cache
        ids: list[int] = tokens[0].tolist()
        token = self.filler
        with self._guard:
            token = sequence.next_token(ids)
        places = mx.arange(self._model_vocabulary)
        return mx.where(places == token, 0.0, _IMPOSSIBLE)[None, None]

    def close(self) -> None:
        """End the last sequence; its output is remembered."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            with self._guard:
                sequence.close()

    def chain(self, tokens: TokenIds, num_prompt: int, request: NamedRequest) -> DraftTree:
        """Return the most probable path behind the sequence of a request, int32[n]."""
        [tree] = self.sessions.step([EngineRow(tokens, num_prompt, self._budget_nodes, request)])
        return chain_for(tree, MAX_CHAIN, self._model_vocabulary)


def check_engine() -> None:
    """Refuse an mlx-lm that calls draft models otherwise; warn of an untested version.

    Raises:
        UnsupportedEngineError: something differs; the message says what.
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
