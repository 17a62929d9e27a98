"""Drafts for llama-cpp-python: a draft model for `llama_cpp.Llama`.

    llm = Llama("model.gguf", n_ctx=4096, logits_all=True)
    attach(llm, drafter)

Before each pass the engine shows all tokens of its sequence, as a view of its own memory. It
verifies the draft in that pass and samples at each position until a choice differs: one chain,
exact under sampling, grammars and penalties, too. It tells neither when a sequence begins nor when
one ends. With any draft model it shows a caller's logits processors all tokens of the pass, later
drafted ones included: a processor that reads them sees tokens that were not chosen.
"""

from logging import getLogger
from time import perf_counter
from typing import Any, Final

import numpy as np
from llama_cpp import (
    Llama,
    llama_model_is_hybrid,
    llama_model_is_recurrent,
    llama_model_n_swa,
)
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from decoder.budget.budget import Budget, FixedBudget, Load, MeasuredBudget, PassOutcome
from decoder.budget.costs import CostSurface
from decoder.engines.engine_options import chain_for, check_version, checked_vocabulary_size
from decoder.engines.engine_sessions import DrafterSessions
from decoder.errors import UncroppableCacheError, UnsupportedModelError
from indexer.reader import Vocabulary
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Follower
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

TESTED_VERSIONS: Final = ">=0.3.36,<0.4"
DEFAULT_NUM_PRED_TOKENS: Final = 16
"""Most tokens of a path. The measured budget cuts paths that do not pay; more tokens would mean
more widths to measure at the start."""

DEFAULT_BUDGET_NODES: Final = 64
"""Nodes of the tree that a path is taken from: a path of 16 tokens and its main alternatives."""

_CONTEXT: Final = 32
"""Tokens in the cache while passes are timed: reading more would make every start longer."""

_ROUNDS: Final = 5
"""Passes of each width, the shortest of which counts: a pause of the machine seldom hits all."""

_log = getLogger(__name__)


class DrafterDraftModel(LlamaDraftModel):  # type: ignore[misc]  # the engine is not typed here
    """Drafts the most probable path, for one `Llama`, which decodes one sequence at a time.

    A call whose tokens are those of the last call, a part of its draft and one more token
    continues the session, and only the new tokens reach the drafter. Any other call begins
    another sequence, and the output of the last one is remembered. It never raises: without
    drafts the engine decodes plainly.

    Args:
        drafter: gives the drafts.
        model_vocabulary: a drafted token must be below it, since the engine ends at one that its
            model does not have.
        num_pred_tokens: most tokens of a path.
        max_length: most tokens of a sequence, drafted ones included: the engine ends where a pass
            goes beyond the `n_ctx` that it was made with, which may be less than `Llama.n_ctx()`.
        budget: how much of a path is worth verifying; all of it if not given.
        budget_nodes: most nodes of the tree that a path is chosen from.
        drafter_vocabulary: a token beyond it ends the drafts for its sequence; None where the
            drafter takes all tokens.

    Attributes:
        num_passes: calls, each of which comes before a pass of the model.
        num_drafted: tokens that were drafted.
        num_accepted: those of them that are known to have been accepted.
        num_failures: calls that failed.
    """

    def __init__(  # noqa: PLR0913  (all but the first two are given by name)
        self,
        drafter: Drafter,
        model_vocabulary: int,
        *,
        num_pred_tokens: int = DEFAULT_NUM_PRED_TOKENS,
        max_length: int | None = None,
        budget: Budget | None = None,
        budget_nodes: int = DEFAULT_BUDGET_NODES,
        drafter_vocabulary: int | None = None,
    ) -> None:
        check_version(TESTED_VERSIONS, "llama-cpp-python")
        self.num_passes = self.num_drafted = self.num_accepted = self.num_failures = 0
        limits = DraftLimits(drafter_vocabulary=drafter_vocabulary)
        self._sessions = DrafterSessions(drafter, limits=limits)
        self._model_vocabulary = model_vocabulary
        self._num_pred_tokens = num_pred_tokens
        self._max_length = max_length
        self._budget = budget or FixedBudget(num_pred_tokens)
        self._budget_nodes = budget_nodes
        self._follower: Follower | None = None
        self._chain = DraftTree.empty()
        self._returned_s = 0.0

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Return intc[k], tokens that may come after those of the sequence, intc[n]."""
        began_s = perf_counter()
        self.num_passes += 1
        try:
            self._chain = self._draft(np.asarray(input_ids, np.int32), began_s)
        except Exception as error:  # noqa: BLE001  the engine must not end because of a draft
            self._fail(error)
        self.num_drafted += len(self._chain)
        self._returned_s = perf_counter()
        return self._chain.token_ids.astype(np.intc)

    def end(self) -> None:
        """End the sequence and remember its output, as the next sequence would.

        The tokens of the last pass are left out, as the engine does not show them.
        """
        follower, self._follower = self._follower, None
        self._chain = DraftTree.empty()
        if follower is not None:
            follower.close()

    def close(self) -> None:
        """End the sequence; never raises. The drafter stays open."""
        try:
            self.end()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    def _draft(self, tokens: TokenIds, began_s: float) -> DraftTree:
        follower = self._followed(tokens, began_s)
        most = min(self._budget.ask(Load.of(len(tokens))), self._room(len(tokens)))
        if most <= 0:
            return DraftTree.empty()
        tree = self._sessions.draft([(follower, self._budget_nodes)])[0]
        chain = chain_for(tree, most, self._model_vocabulary)
        load, draft_s = Load.of(len(tokens)), perf_counter() - began_s
        return self._budget.share([chain], load, draft_s)[0]

    def _room(self, length: int) -> int:
        if self._max_length is None:
            return self._num_pred_tokens
        return min(self._num_pred_tokens, self._max_length - length)

    def _followed(self, tokens: TokenIds, began_s: float) -> Follower:
        """Return the follower of the sequence with these tokens, up to date."""
        follower = self._follower
        if follower is None or not self._goes_on(follower.sequence, tokens):
            self.end()
            follower = self._follower = self._sessions.follow(tokens, max(len(tokens) - 1, 0))
            return follower
        sequence = follower.sequence
        new = tokens[len(sequence) :]
        self._learn(new, len(sequence), began_s)
        sequence.extend(new)
        return follower

    def _goes_on(self, sequence: TokenSequence, tokens: TokenIds) -> bool:
        """Return whether the tokens are the last call's, followed by what a pass could accept."""
        accepted = len(tokens) - len(sequence) - 1
        return (
            0 <= accepted <= len(self._chain)
            and sequence.begins(tokens)
            and np.array_equal(tokens[len(sequence) : -1], self._chain.token_ids[:accepted])
        )

    def _learn(self, new: TokenIds, context: int, began_s: float) -> None:
        """Learn from the tokens of the last pass, and from the time that it took."""
        path = np.arange(len(new) - 1)
        self.num_accepted += len(path)
        outcome = PassOutcome(self._chain, path, int(new[-1]))
        self._budget.learn([outcome], Load.of(context), began_s - self._returned_s)

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning("llama.cpp goes on without drafts for now: %s", error)
        if self._follower is not None:
            self._sessions.abandon([self._follower])
        self._follower, self._chain = None, DraftTree.empty()


def attach(  # noqa: PLR0913  (all but the first two are given by name)
    llm: Llama,
    drafter: Drafter,
    *,
    num_pred_tokens: int = DEFAULT_NUM_PRED_TOKENS,
    measure: bool = True,
    vocabulary: Vocabulary | None = None,
    budget_nodes: int = DEFAULT_BUDGET_NODES,
) -> DrafterDraftModel:
    """Let a model decode with drafts from now on, and return its draft model.

    Args:
        llm: made with `logits_all=True`.
        drafter: gives the drafts.
        num_pred_tokens: most tokens of a draft.
        measure: whether to measure the cost of passes first, which takes some seconds and clears
            the model's cache, and to draft only what pays; otherwise all drafts are verified.
        vocabulary: of the model's tokenizer: a drafter for another one is refused.
        budget_nodes: most nodes of the tree that a draft is chosen from.

    Raises:
        UnsupportedModelError: `llm` keeps the logits of one token alone, or its cache cannot give
            up rejected tokens.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    _check(llm)
    known = checked_vocabulary_size(drafter, llm.n_vocab(), vocabulary)
    budget = MeasuredBudget(measure_costs(llm, num_pred_tokens + 1)) if measure else None
    draft_model = DrafterDraftModel(
        drafter,
        llm.n_vocab(),
        num_pred_tokens=num_pred_tokens,
        max_length=len(llm.input_ids),
        budget=budget,
        budget_nodes=budget_nodes,
        drafter_vocabulary=known,
    )
    llm.draft_model = draft_model
    return draft_model


def _check(llm: Llama) -> None:
    """Refuse models that the engine would verify wrongly, or stop at, without an error."""
    if not llm._logits_all or len(llm.scores) < len(llm.input_ids):  # noqa: SLF001  no public name
        raise UnsupportedModelError(
            "drafts are verified by the logits of several tokens: Llama(..., logits_all=True)"
        )
    if llama_model_is_recurrent(llm.model) or llama_model_is_hybrid(llm.model):
        raise UncroppableCacheError(
            "this model's recurrent state cannot give up rejected tokens: decode without drafts"
        )
    if llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full:
        raise UncroppableCacheError(
            "this cache forgets what lies behind its window: Llama(..., swa_full=True)"
        )


def measure_costs(llm: Llama, max_width: int = DEFAULT_NUM_PRED_TOKENS + 1) -> CostSurface:
    """Return the costs of passes of 1 to `max_width` tokens; clears the model's cache."""
    max_width = min(max_width, len(llm.input_ids) // 2)
    widths = [width for width in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if width < max_width]
    widths.append(max_width)
    context = min(_CONTEXT, len(llm.input_ids) - max_width)
    tokens = [llm.token_bos()] * (context + max_width)
    llm.reset()
    llm.eval(tokens[:context])
    seconds = [min(_pass_s(llm, tokens[:width]) for _ in range(_ROUNDS)) for width in widths]
    llm.reset()
    return CostSurface.flat(widths, seconds)


def _pass_s(llm: Llama, tokens: list[int]) -> float:
    context, start_s = llm.n_tokens, perf_counter()
    llm.eval(tokens)
    seconds = perf_counter() - start_s
    llm.n_tokens = context
    return seconds
