"""The draft model for a `llama_cpp.Llama`, and the function that attaches it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from time import perf_counter
from typing import Any, Final, Self
from weakref import proxy

import numpy as np
from llama_cpp import (
    Llama,
    llama_get_logits_ith,
    llama_model_is_hybrid,
    llama_model_is_recurrent,
    llama_model_n_swa,
)
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from decoder.budget.budget import Budget, FixedBudget, Load, MeasuredBudget, PassOutcome
from decoder.budget.costs import CostSurface
from decoder.drafters.following import FollowingDrafter, SequenceDrafter, Verified, following
from decoder.drafters.fusion import KERNELS, FusedDrafter
from decoder.drafters.recycling import DEFAULT_CAPACITY, RecycledLogits
from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_options import (
    chain_for,
    check_version,
    checked_vocabulary_size,
    within_vocabulary,
)
from decoder.engines.late_drafter import LateDrafter, without_waiting
from decoder.engines.request_fields import PLAIN, FieldReader, RequestFields
from decoder.errors import UncroppableCacheError, UnsupportedModelError
from decoder.observation import Statistics
from decoder.plugins.llama_cpp.tree_passes import (
    TreePasses,
    are_driven,
    most_sequences,
    share_memory,
    tree_differences,
    verifies_trees,
    within_paths,
)
from indexer.reader import Vocabulary
from retriever.drafter import Drafter, TokenIds
from retriever.errors import InvalidRequestError
from retriever.follower import DraftLimits, Followers
from retriever.sequences import TokenSequence
from retriever.sessions import cold_start
from retriever.tree import DraftTree

TESTED_VERSIONS: Final = ">=0.3.36,<0.4"
DEFAULT_NUM_PRED_TOKENS: Final = 16
"""Most tokens of a draft. The measured budget cuts drafts to as many tokens as pay off. A larger
number would mean more widths to measure at the start."""

DEFAULT_BUDGET_NODES: Final = 64
"""Number of nodes in the tree that a path is chosen from: 16 tokens and their main alternatives."""

_CONTEXT: Final = 32
"""Tokens in the cache while passes are timed; reading more would make every start longer."""

_ROUNDS: Final = 5
"""Timed passes of each width; the shortest counts, because a pause rarely hits all of them."""

_MOST_TENANTS: Final = 16
"""Most tenants whose recycled logits are stored: those with the latest requests."""

_TENANT_CAPACITY: Final = 1 << 16
"""Contexts of recycled logits that are stored for each tenant, in 5 MB."""

_DISTRIBUTION: Final = "llama-cpp-python"

_log = getLogger(__name__)


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """The fields that `DrafterDraftModel.request` sets for the calls in its block.

    Attributes:
        fields: the fields.
        statistics: counts of these calls' passes. The tokens of a call's last pass are not counted,
            because the engine does not show them.
    """

    fields: RequestFields
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(slots=True, eq=False)
class _LlamaSequence:
    """The sequence that the engine decodes.

    Attributes:
        request: the request that the sequence belongs to.
        sequence: tokens of the sequence.
        drafting: drafter of the sequence; `None` if no drafts are wanted or the drafter refuses it.
        tree: the last draft, which a pass verifies; a chain if the engine's loop verifies it.
    """

    request: DraftedRequest
    sequence: TokenSequence
    drafting: SequenceDrafter | None
    tree: DraftTree = field(default_factory=DraftTree.empty)

    def is_continued_by(self, tokens: TokenIds) -> bool:
        """Return whether the tokens are the last call's, followed by tokens that a pass accepts."""
        known = len(self.sequence)
        accepted = len(tokens) - known - 1
        return (
            0 <= accepted <= len(self.tree)
            and self.sequence.begins(tokens)
            and len(self.tree.follow(tokens[known:-1])) == accepted
        )


class DrafterDraftModel(LlamaDraftModel):  # type: ignore[misc]  # the engine is not typed here
    """Drafts for one `Llama`, which decodes one sequence at a time.

    With `trees`, it drafts trees, which `passes` verify, and returns no tokens to the engine. Else
    the engine's own loop verifies the most probable path. Then a caller's logits processors see all
    tokens of a pass, including later drafted ones, as with any draft model.

    A call continues the session if its tokens are those of the last call, then a part of its draft,
    then one more token. Only the new tokens go to the drafter. Any other call starts a new
    sequence, and the output of the last sequence is stored. A call never raises: without drafts,
    the engine decodes plainly.

    Args:
        drafter: the drafter.
        model_vocabulary: size of the model's vocabulary. Drafted tokens are below it, because the
            engine aborts at a token that its model does not have.
        num_pred_tokens: most tokens of a draft.
        max_length: most tokens of a sequence, drafted ones included. The engine aborts if a pass
            exceeds the `n_ctx` that it was made with, which may be less than `Llama.n_ctx()`.
        budget: how much of each draft to verify; by default all of it.
        budget_nodes: most nodes of the tree that a path is chosen from.
        drafter_vocabulary: size of the drafter's vocabulary. A token beyond it ends the drafts for
            its sequence. None if the drafter accepts all tokens.
        llm: the model whose logits are recycled; `None` to use only the drafter.
        reader: reader of the fields of requests; see `request`.
        passes: the passes of `llm`.
        trees: whether to draft trees, which `passes` verify.

    Attributes:
        passes: the passes of `llm`.
        num_passes: number of passes for which drafts were requested.
        num_drafted: number of drafted tokens.
        num_accepted: number of drafted tokens that are known to be accepted.
        statistics: counts of all requests; see `DraftedRequest`.

    Raises:
        UnsupportedEngineError: the engine differs from the tested versions.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102  (as `__init__` states)
        check_engine()  # before Python refuses a class that lacks a new abstract method
        made: Self = super().__new__(cls)
        return made

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
        llm: Llama | None = None,
        reader: FieldReader | None = None,
        passes: TreePasses | None = None,
        trees: bool = False,
    ) -> None:
        self.passes = passes
        self.num_passes = self.num_drafted = self.num_accepted = 0
        self.statistics = Statistics()
        limits = DraftLimits(drafter_vocabulary=drafter_vocabulary)
        late = without_waiting(drafter)
        self._drafters = _TenantDrafters(late, limits, recycles=llm is not None)
        self._llm = llm
        self._model_vocabulary = model_vocabulary
        self._num_pred_tokens = num_pred_tokens
        self._max_length = max_length
        self._budget = budget or FixedBudget(num_pred_tokens)
        self._budget_nodes = budget_nodes
        self._reader = reader or FieldReader(most_tokens=num_pred_tokens)
        self._request = DraftedRequest(PLAIN)
        self._trees = passes if trees else None
        self._running: _LlamaSequence | None = None
        self._guard = EngineGuard("llama.cpp", _log, self.end)
        self._returned_s = 0.0

    @property
    def num_failures(self) -> int:
        """Number of calls that failed."""
        return self._guard.num_failures

    @contextmanager
    def request(self, **stated: Any) -> Iterator[DraftedRequest]:
        """Set how to draft for the engine's calls within the block.

        A stream must be read to its end within the block.

        Args:
            stated: fields of a request: `drafts` (whether to draft), `budget` (most tokens of a
                draft, up to `num_pred_tokens`), `remember`, `tenant`, `group`, `policy_version`,
                `oldest_version`, and `predictions`. Predictions are texts, or token ids with the
                `vocabulary` fingerprint of these ids. Fields that cannot be applied are logged.

        Raises:
            InvalidRequestError: a field is unknown or has an invalid value, or `attach` was not
                given the tenant.
        """
        fields, left_out = self._reader.read({"foredraft": stated})
        if left_out:
            _log.warning("fields of a request are ignored: %s", left_out)
        self.close()
        before, self._request = self._request, DraftedRequest(fields)
        try:
            yield self._request
        finally:
            self._request = before

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Return intc[k], drafted tokens after the tokens of the sequence, intc[n]."""
        if self._trees is not None and self._trees.goes_on_within(input_ids):
            return np.empty(0, np.intc)
        began_s = perf_counter()
        self.num_passes += 1
        tree = DraftTree.empty()
        with self._guard:
            tree = self._draft(np.asarray(input_ids, np.int32), began_s)
        self.num_drafted += len(tree)
        drafted = self._proposed(tree, len(input_ids))
        self._charge(began_s)
        return drafted

    def _proposed(self, tree: DraftTree, num_tokens: int) -> NDArray[np.intc]:
        """Plan the verification of a draft; return the tokens that the engine's loop verifies."""
        if self.passes is not None:
            self.passes.announce()
        if self._trees is None:
            return tree.token_ids.astype(np.intc)
        self._trees.plan(tree, num_tokens)
        return np.empty(0, np.intc)

    def end(self) -> None:
        """End the sequence and store its output, as the start of the next sequence would.

        The tokens of the last pass are left out, because the engine does not show them.
        """
        running, self._running = self._running, None
        if running is not None and running.drafting is not None:
            running.drafting.close()

    def close(self) -> None:
        """End the sequence; never raises. The drafter stays open."""
        with self._guard:
            self.end()

    def _draft(self, tokens: TokenIds, began_s: float) -> DraftTree:
        running = self._running
        if running is not None and running.is_continued_by(tokens):
            self._go_on(running, tokens, began_s)
        else:
            self.end()
            running = self._running = self._begin(tokens)
        if running.drafting is None:
            return running.tree
        load = Load.of(len(tokens))
        most = min(self._budget.ask(load), self._room(running))
        if most <= 0:
            return running.tree
        tree = self._asked(running.drafting, most)
        draft_s = perf_counter() - began_s
        running.tree = self._budget.share([tree], load, draft_s)[0]
        return running.tree

    def _asked(self, drafting: SequenceDrafter, most: int) -> DraftTree:
        """Return a draft of at most `most` tokens that the engine or `passes` can verify."""
        if self._trees is None:
            return chain_for(drafting.draft(self._budget_nodes), most, self._model_vocabulary)
        tree = within_vocabulary(drafting.draft(most).prefix(most), self._model_vocabulary)
        return within_paths(tree, self._trees.max_sequences)

    def _room(self, running: _LlamaSequence) -> int:
        rooms = [self._num_pred_tokens]
        if self._max_length is not None:
            rooms.append(self._max_length - len(running.sequence))
        if self.passes is not None:
            rooms.append(self.passes.max_nodes)
        return running.request.fields.most(min(rooms))

    def _begin(self, tokens: TokenIds) -> _LlamaSequence:
        """Return a new sequence, whose last token is the first token of its output."""
        request, end = self._request, max(len(tokens) - 1, 0)
        sequence = request.fields.begin(tokens[:end], end)
        running = _LlamaSequence(request, sequence, self._following(request.fields, sequence))
        self._learn(running, tokens[end:])
        return running

    def _following(self, fields: RequestFields, sequence: TokenSequence) -> SequenceDrafter | None:
        """Return the drafter of a sequence; `None` if nothing is drafted for it."""
        if not fields.drafts:
            return None
        try:
            followers = self._drafters.of(fields.options.tenant)
            return following(followers).follow(sequence, followers.limits)
        except InvalidRequestError as error:
            self._guard.count(error)
            return None

    def _go_on(self, running: _LlamaSequence, tokens: TokenIds, began_s: float) -> None:
        """Take in the tokens of the last pass, and its duration."""
        context = len(running.sequence)
        seconds = began_s - self._returned_s
        if self._trees is not None and self._trees.refusal is not None:
            self._refuse(running, self._trees.refusal)
        tree, new = running.tree, tokens[context:]
        path = tree.follow(new[:-1])
        self.num_accepted += len(path)
        self._learn(running, new)
        pass_s = seconds if self._trees is None else self._trees.seconds
        for statistics in (running.request.statistics, self.statistics):
            statistics.target_s += pass_s
            statistics.total_s += seconds
        if running.drafting is not None:
            outcome = PassOutcome(tree, path, int(tokens[-1]))
            self._budget.learn([outcome], Load.of(context), pass_s, seconds - pass_s)

    def _refuse(self, running: _LlamaSequence, error: Exception) -> None:
        """Drop a draft that the engine failed to verify, and halve the budget."""
        self._guard.count(error)
        self._budget.halve()
        running.tree = DraftTree.empty()

    def _learn(self, running: _LlamaSequence, new: TokenIds) -> None:
        """Commit the tokens of a pass, after the drafter has learned from its logits."""
        sequence, tree = running.sequence, running.tree
        running.tree = DraftTree.empty()
        path = tree.follow(new[:-1])
        for statistics in (running.request.statistics, self.statistics):
            statistics.record(tree, path, len(new))
        if self._llm is not None and running.drafting is not None and len(new) and len(sequence):
            running.drafting.learn(self._verified(sequence, tree, path, int(new[-1])))
        sequence.extend(new)

    def _verified(
        self, sequence: TokenSequence, tree: DraftTree, path: NDArray[np.int64], next_token: int
    ) -> Verified:
        last_token = int(sequence.tokens[-1])
        logits = None if self._trees is None else self._trees.logits_of(tree)
        if logits is None:
            if self._trees is not None:  # another pass came after the tree's pass
                tree = tree.among(np.isin(np.arange(len(tree)), path))
            path = np.arange(len(path))
            tree, logits = _rows(self._llm, sequence, tree, len(path))
        return Verified(last_token, tree, logits, path, next_token)

    def _charge(self, began_s: float) -> None:
        """Count the time since `began_s` as drafting time."""
        self._returned_s = perf_counter()
        of_request = [] if self._running is None else [self._running.request.statistics]
        for statistics in (*of_request, self.statistics):
            statistics.draft_s += self._returned_s - began_s
            statistics.total_s += self._returned_s - began_s


def _rows(
    llm: Llama, sequence: TokenSequence, chain: DraftTree, num_accepted: int
) -> tuple[DraftTree, NDArray[np.float32]]:
    """Return the chain that was verified after a sequence, and its logits, float32[1 + N, V].

    The engine keeps a row of logits for each token that it read, even for tokens that it then
    rejected. If the engine's memory no longer shows the chain's tokens, only the rows of accepted
    tokens are used. The first rejected token is not compared: the engine's own choice has taken its
    place.
    """
    known = len(sequence)
    behind = slice(known + num_accepted + 1, known + len(chain))
    if not np.array_equal(llm.input_ids[behind], chain.token_ids[num_accepted + 1 :]):
        chain = chain.prefix(num_accepted)
    return chain, llm.scores[known - 1 : known + len(chain)]


class _TenantDrafters:
    """The drafters of tenants, which keep the recycled logits of tenants separate.

    Sequences that start before the kernels of fused drafts are compiled get only retrieved drafts.

    Args:
        drafter: the drafter for retrieved drafts.
        limits: limits of the drafts, with the vocabulary sizes.
        recycles: whether to draft from recycled logits too. A fused drafter has its own.
    """

    def __init__(self, drafter: Drafter, limits: DraftLimits, *, recycles: bool) -> None:
        self._drafter = drafter
        self._limits = limits
        self._recycles = recycles and not isinstance(drafter, FollowingDrafter)
        self._retrieval = Followers(drafter, limits)
        self._followers = OrderedDict[str, Followers]()
        if self._recycles:
            cold_start.defer(KERNELS)

    def of(self, tenant: str) -> Followers:
        """Return the followers of a tenant's drafter."""
        if not self._recycles or self._is_coming() or not KERNELS.are_wanted():
            return self._retrieval
        if tenant not in self._followers:
            self._followers[tenant] = Followers(self._new(tenant), self._limits)
        self._followers.move_to_end(tenant)
        if len(self._followers) > _MOST_TENANTS:
            self._followers.popitem(last=False)
        return self._followers[tenant]

    def _is_coming(self) -> bool:
        """Return whether the kernels of retrieval, which come first, are still being compiled."""
        return isinstance(self._drafter, LateDrafter) and not self._drafter.is_ready

    def _new(self, tenant: str) -> Drafter:
        recycled = RecycledLogits(_TENANT_CAPACITY if tenant else DEFAULT_CAPACITY)
        return FusedDrafter([self._drafter], self._limits, recycled=recycled)


def attach(  # noqa: PLR0913  (all but the first two are given by name)
    llm: Llama,
    drafter: Drafter,
    *,
    num_pred_tokens: int = DEFAULT_NUM_PRED_TOKENS,
    measure: bool = True,
    vocabulary: Vocabulary | None = None,
    budget_nodes: int = DEFAULT_BUDGET_NODES,
    recycle: bool = True,
    tenants: Sequence[str] = (),
    trees: bool = True,
) -> DrafterDraftModel:
    """Attach a drafter to a model, which then decodes with drafts, and return its draft model.

    The tokens that the model has read are lost. From now on, the engine computes only the logits of
    a prompt's last token, unless a completion shows all of them (`echo` with `logprobs`).

    Args:
        llm: a model that was made with `logits_all=True`.
        drafter: the drafter.
        num_pred_tokens: most tokens of a draft.
        measure: whether to measure the cost of passes first, which takes a few seconds, and to
            draft only as many tokens as pay off; otherwise all drafts are verified.
        vocabulary: vocabulary of the model's tokenizer; a drafter for another one is refused.
        budget_nodes: most nodes of the tree that a chain is chosen from.
        recycle: whether to draft the model's most probable tokens again, in a tree with the
            drafter's tokens. A `FusedDrafter` has its own setting for this.
        tenants: tenants that requests may name; `*` allows any. See `DrafterDraftModel.request`.
        trees: whether to verify a whole tree in a pass, of at most `num_pred_tokens` nodes. This
            needs a context for several sequences, which replaces the model's own. Settings of the
            old context that did not come from arguments of `Llama` are lost: make them again.
            Chains are drafted instead, and a warning is logged, in three cases: the engine cannot
            create such a context, its loop does not use such passes, or the model's logits for a
            tree differ from those for its paths.

    Raises:
        UnsupportedEngineError: the engine differs from the tested versions.
        UnsupportedModelError: `llm` keeps only the logits of one token, or its cache cannot drop
            rejected tokens.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    check_engine(llm)
    _check(llm)
    known = checked_vocabulary_size(drafter, llm.n_vocab(), vocabulary)
    seen = proxy(llm)  # in a reference cycle, a model could be freed before its contexts
    passes = llm.eval if isinstance(llm.eval, TreePasses) else TreePasses(seen)
    can_trees = trees and _prepare_trees(llm, passes, num_pred_tokens)
    budget = MeasuredBudget(measure_costs(llm, num_pred_tokens + 1)) if measure else None
    draft_model = DrafterDraftModel(
        drafter,
        llm.n_vocab(),
        num_pred_tokens=num_pred_tokens,
        max_length=len(llm.input_ids),
        budget=budget,
        budget_nodes=budget_nodes,
        drafter_vocabulary=known,
        llm=seen if recycle or isinstance(drafter, FollowingDrafter) else None,
        reader=FieldReader(tenants, num_pred_tokens, lambda text: _encoded(seen, text), vocabulary),
        passes=passes,
        trees=can_trees,
    )
    llm.draft_model = draft_model
    llm.eval = passes
    return draft_model


def _prepare_trees(llm: Llama, passes: TreePasses, num_pred_tokens: int) -> bool:
    """Prepare a model to verify trees; return whether it does so correctly."""
    found = tree_differences(llm)
    if found:
        _log.warning("llama.cpp verifies chains, not trees: %s", "; ".join(found))
        return False
    wanted = max(most_sequences(llm, num_pred_tokens), passes.max_sequences)
    passes.forget()  # its sequences belong to a context that is closed
    if wanted == 1 or not share_memory(llm, wanted):
        return False
    passes.max_sequences = wanted
    passes.forget()
    llm.eval, llm.sample, llm.save_state = passes, passes.sample, passes.save_state
    if not verifies_trees(passes, llm):
        _log.warning("llama.cpp verifies chains, not trees: this model's logits differ in trees")
        return False
    if not are_driven(passes, llm):
        _log.warning("llama.cpp verifies chains, not trees: its loop does not call Llama.sample")
        return False
    return True


def _encoded(llm: Llama, text: str) -> list[int]:
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False)
    return tokens


def check_engine(llm: Llama | None = None) -> None:
    """Refuse an engine that differs from what the adapter needs; warn of an untested version.

    Args:
        llm: a model of the engine, if there is one; some attributes exist only on instances.

    Raises:
        UnsupportedEngineError: the engine differs; the message says how.
    """
    check_version(TESTED_VERSIONS, _DISTRIBUTION)
    found = _class_differences()
    if llm is not None:
        found = found + differences(llm, attributes=_ATTRIBUTES, called="Llama")
    check_contract((_DISTRIBUTION,), TESTED_VERSIONS, found)


_ATTRIBUTES: Final = (
    "_logits_all",
    "context_params",
    "ctx",
    "draft_model",
    "input_ids",
    "model",
    "n_batch",
    "n_tokens",
    "scores",
)


_CALLS: Final[dict[str, tuple[int, Sequence[str]]]] = {
    "eval": (1, ()),
    "n_vocab": (0, ()),
    "reset": (0, ()),
    "token_bos": (0, ()),
    "tokenize": (1, ("add_bos",)),
}
"""Methods that the adapter calls, with their positional and named arguments."""


@cache
def _class_differences() -> list[str]:
    return [
        *differences(
            LlamaDraftModel,
            attributes=["__call__"],
            implemented_by=DrafterDraftModel,
            called="LlamaDraftModel",
        ),
        *differences(Llama.__init__, parameters=["logits_all"]),
        *differences(Llama, attributes=["generate"]),
        *differences(
            getattr(Llama, "_create_completion", None),
            parameters=["echo", "logprobs"],
            called="Llama._create_completion",
        ),
        *differences(llama_get_logits_ith, passed=2),
        *(
            sentence
            for name, (passed, named) in _CALLS.items()
            for sentence in differences(
                getattr(Llama, name, None), passed=passed, named=named, called=f"Llama.{name}"
            )
        ),
        *differences(llama_model_is_recurrent, passed=1),
        *differences(llama_model_is_hybrid, passed=1),
        *differences(llama_model_n_swa, passed=1),
    ]


def _check(llm: Llama) -> None:
    """Refuse models for which the engine would verify wrongly, or abort, without an error."""
    if not llm._logits_all or len(llm.scores) < len(llm.input_ids):  # noqa: SLF001  no public name
        raise UnsupportedModelError(
            "drafts need the logits of several tokens: use Llama(..., logits_all=True)"
        )
    if llama_model_is_recurrent(llm.model) or llama_model_is_hybrid(llm.model):
        raise UncroppableCacheError(
            "this model's recurrent state cannot drop rejected tokens: decode without drafts"
        )
    if llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full:
        raise UncroppableCacheError(
            "this cache drops tokens outside its window: use Llama(..., swa_full=True)"
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
