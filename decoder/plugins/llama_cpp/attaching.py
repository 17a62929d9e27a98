"""The draft model that a `llama_cpp.Llama` asks, and how one is attached."""

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
"""Most tokens of a draft. The measured budget cuts drafts that do not pay; more tokens would mean
more widths to measure at the start."""

DEFAULT_BUDGET_NODES: Final = 64
"""Nodes of the tree that a path is taken from: a path of 16 tokens and its main alternatives."""

_CONTEXT: Final = 32
"""Tokens in the cache while passes are timed: reading more would make every start longer."""

_ROUNDS: Final = 5
"""Passes of each width, the shortest of which counts: a pause of the machine seldom hits all."""

_MOST_TENANTS: Final = 16
"""Tenants whose recycled logits are kept, the last ones that had a request."""

_TENANT_CAPACITY: Final = 1 << 16
"""Contexts that are kept for each of them, in 5 MB."""

_DISTRIBUTION: Final = "llama-cpp-python"

_log = getLogger(__name__)


@dataclass(slots=True, eq=False)
class DraftedRequest:
    """What `DrafterDraftModel.request` states of the calls within it.

    Attributes:
        fields: what they state.
        statistics: of their passes. The tokens of a call's last pass are not counted, as the engine
            does not show them.
    """

    fields: RequestFields
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(slots=True, eq=False)
class _LlamaSequence:
    """The sequence that the engine decodes.

    Attributes:
        request: whose it is.
        sequence: its tokens.
        drafting: drafts for it; `None` where none are wanted or the drafter refuses it.
        tree: that is verified behind it, or was last: a chain where the engine's loop does it.
    """

    request: DraftedRequest
    sequence: TokenSequence
    drafting: SequenceDrafter | None
    tree: DraftTree = field(default_factory=DraftTree.empty)

    def is_continued_by(self, tokens: TokenIds) -> bool:
        """Return whether tokens are the last call's, followed by what a pass could accept."""
        known = len(self.sequence)
        accepted = len(tokens) - known - 1
        return (
            0 <= accepted <= len(self.tree)
            and self.sequence.begins(tokens)
            and len(self.tree.follow(tokens[known:-1])) == accepted
        )


class DrafterDraftModel(LlamaDraftModel):  # type: ignore[misc]  # the engine is not typed here
    """Drafts for one `Llama`, which decodes one sequence at a time.

    With `passes` it drafts trees, which these verify, and gives the engine no tokens. Without, the
    engine's own loop verifies the most probable path: then a caller's logits processors see all
    tokens of a pass, as with any draft model, later drafted ones included.

    A call whose tokens are those of the last call, a part of its draft and one more token
    continues the session, and only the new tokens reach the drafter. Any other call begins
    another sequence, and the output of the last one is remembered. It never raises: without
    drafts the engine decodes plainly.

    Args:
        drafter: gives the drafts.
        model_vocabulary: a drafted token must be below it, since the engine ends at one that its
            model does not have.
        num_pred_tokens: most tokens of a draft.
        max_length: most tokens of a sequence, drafted ones included: the engine ends where a pass
            goes beyond the `n_ctx` that it was made with, which may be less than `Llama.n_ctx()`.
        budget: how much of a draft is worth verifying; all of it if not given.
        budget_nodes: most nodes of the tree that a path is chosen from.
        drafter_vocabulary: a token beyond it ends the drafts for its sequence; None where the
            drafter takes all tokens.
        llm: whose logits are recycled; `None` to draft from the drafter alone.
        reader: of what requests state; see `request`.
        passes: of `llm`.
        trees: whether trees are drafted, which `passes` verify.

    Attributes:
        passes: as given.
        num_passes: of the model that drafts were asked for.
        num_drafted: tokens that were drafted.
        num_accepted: those of them that are known to have been accepted.
        statistics: of all requests, as of `DraftedRequest`.

    Raises:
        UnsupportedEngineError: the engine is not the one that this is written for.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102  (as `__init__` states)
        check_engine()  # before Python refuses a class that lacks what has become abstract
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
        """Calls that failed."""
        return self._guard.num_failures

    @contextmanager
    def request(self, **stated: Any) -> Iterator[DraftedRequest]:
        """State how the calls of the engine within the block are drafted for.

        A stream must be read to its end within the block.

        Args:
            stated: fields of a request: `drafts` (whether there are any), `budget` (most tokens of
                a draft, within `num_pred_tokens`), `remember`, `tenant`, `group`,
                `policy_version`, `oldest_version`, and `predictions`, texts or token ids, with the
                `vocabulary` fingerprint of the latter. What cannot be followed is logged.

        Raises:
            InvalidRequestError: a field is unknown or has no possible value, or the tenant is not
                one of those that `attach` was given.
        """
        fields, left_out = self._reader.read({"foredraft": stated})
        if left_out:
            _log.warning("a request is not drafted for as it states: %s", left_out)
        self.close()
        before, self._request = self._request, DraftedRequest(fields)
        try:
            yield self._request
        finally:
            self._request = before

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Return intc[k], tokens that may come after those of the sequence, intc[n]."""
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
        """Have a draft verified; return what the engine's loop is to verify of it."""
        if self.passes is not None:
            self.passes.announce()
        if self._trees is None:
            return tree.token_ids.astype(np.intc)
        self._trees.plan(tree, num_tokens)
        return np.empty(0, np.intc)

    def end(self) -> None:
        """End the sequence and remember its output, as the next sequence would.

        The tokens of the last pass are left out, as the engine does not show them.
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
        """Return a draft of at most so many tokens that can be verified."""
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
        """Return a sequence whose last token is the first of its output."""
        request, end = self._request, max(len(tokens) - 1, 0)
        sequence = request.fields.begin(tokens[:end], end)
        running = _LlamaSequence(request, sequence, self._following(request.fields, sequence))
        self._learn(running, tokens[end:])
        return running

    def _following(self, fields: RequestFields, sequence: TokenSequence) -> SequenceDrafter | None:
        """Return what drafts for a sequence; `None` where nothing does."""
        if not fields.drafts:
            return None
        try:
            followers = self._drafters.of(fields.options.tenant)
            return following(followers).follow(sequence, followers.limits)
        except InvalidRequestError as error:
            self._guard.count(error)
            return None

    def _go_on(self, running: _LlamaSequence, tokens: TokenIds, began_s: float) -> None:
        """Take in what the last pass brought, and how long it took."""
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
        """Take back a draft that the engine had no memory for."""
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
            if self._trees is not None:  # another pass came after that over the tree
                tree = tree.among(np.isin(np.arange(len(tree)), path))
            path = np.arange(len(path))
            tree, logits = _rows(self._llm, sequence, tree, len(path))
        return Verified(last_token, tree, logits, path, next_token)

    def _charge(self, began_s: float) -> None:
        """Note the time since a call began as the drafter's."""
        self._returned_s = perf_counter()
        of_request = [] if self._running is None else [self._running.request.statistics]
        for statistics in (*of_request, self.statistics):
            statistics.draft_s += self._returned_s - began_s
            statistics.total_s += self._returned_s - began_s


def _rows(
    llm: Llama, sequence: TokenSequence, chain: DraftTree, num_accepted: int
) -> tuple[DraftTree, NDArray[np.float32]]:
    """Return the chain that was verified behind a sequence and its logits, float32[1 + N, V].

    The engine keeps a row for each token that it read, also for those that it then gave up. These
    are of the chain's own tokens, as long as it read the whole chain: where its memory shows other
    tokens, only rows of the accepted ones are taken. The place of the first rejected token holds
    the engine's choice by now.
    """
    known = len(sequence)
    behind = slice(known + num_accepted + 1, known + len(chain))
    if not np.array_equal(llm.input_ids[behind], chain.token_ids[num_accepted + 1 :]):
        chain = chain.prefix(num_accepted)
    return chain, llm.scores[known - 1 : known + len(chain)]


class _TenantDrafters:
    """The drafters of tenants: what a model found likely for one is drafted for no other.

    Sequences that begin before kernels of fused drafts are compiled have retrieved ones alone.

    Args:
        drafter: gives retrieved drafts.
        limits: vocabularies.
        recycles: whether drafts come from recycled logits, too. A fused drafter has its own.
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
        """Return whether kernels of retrieval are compiled still, before those of fused drafts."""
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
    """Let a model decode with drafts from now on, and return its draft model.

    What the model has read before is gone. From then on the engine computes no logits of a prompt
    but its last token's, unless a completion shows them (`echo` with `logprobs`).

    Args:
        llm: made with `logits_all=True`.
        drafter: gives the drafts.
        num_pred_tokens: most tokens of a draft.
        measure: whether to measure the cost of passes first, which takes some seconds, and to draft
            only what pays; otherwise all drafts are verified.
        vocabulary: of the model's tokenizer: a drafter for another one is refused.
        budget_nodes: most nodes of the tree that a chain is chosen from.
        recycle: whether what the model found likely is drafted again, in a tree with what the
            drafter says. A `FusedDrafter` does so where it was made for it.
        tenants: that requests may name; `*` among them for any. See `DrafterDraftModel.request`.
        trees: whether a whole tree is verified in a pass, of `num_pred_tokens` nodes at most. That
            takes a context of several sequences, which is made in the place of the model's own:
            what was set on that one by other ways than `Llama`'s arguments is to be set again.
            Where the engine makes none or its loop does not read by such passes, or the model's
            logits for a tree are not those for its paths, chains are drafted, as with `False`, and
            the log says so.

    Raises:
        UnsupportedEngineError: the engine is not the one that this is written for.
        UnsupportedModelError: `llm` keeps the logits of one token alone, or its cache cannot give
            up rejected tokens.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    check_engine(llm)
    _check(llm)
    known = checked_vocabulary_size(drafter, llm.n_vocab(), vocabulary)
    seen = proxy(llm)  # a model in a circle would be freed in any order, contexts behind models
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
    """Have a model verify trees; return whether it does, and does it rightly."""
    found = tree_differences(llm)
    if found:
        _log.warning("llama.cpp verifies chains, no trees: %s", "; ".join(found))
        return False
    wanted = max(most_sequences(llm, num_pred_tokens), passes.max_sequences)
    passes.forget()  # what it has of a context that is closed
    if wanted == 1 or not share_memory(llm, wanted):
        return False
    passes.max_sequences = wanted
    passes.forget()
    llm.eval, llm.sample, llm.save_state = passes, passes.sample, passes.save_state
    if not verifies_trees(passes, llm):
        _log.warning("llama.cpp verifies chains, no trees: this model's logits differ in trees")
        return False
    if not are_driven(passes, llm):
        _log.warning("llama.cpp verifies chains, no trees: its loop does not draw by Llama.sample")
        return False
    return True


def _encoded(llm: Llama, text: str) -> list[int]:
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False)
    return tokens


def check_engine(llm: Llama | None = None) -> None:
    """Refuse an engine that works otherwise than its adapter needs; warn of an untested version.

    Args:
        llm: of the engine, where there is one: some of its attributes are no part of its class.

    Raises:
        UnsupportedEngineError: something differs; the message says what.
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
"""Methods that are called, with the arguments by position and by name."""


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
