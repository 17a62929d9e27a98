"""Drafts for llama-cpp-python: a draft model for `llama_cpp.Llama`.

    llm = Llama("model.gguf", n_ctx=4096, logits_all=True)
    draft_model = attach(llm, drafter)
    with draft_model.request(tenant="a", predictions=[text]) as request:
        llm.create_completion(prompt)

Before each pass the engine shows all tokens of its sequence, as a view of its own memory. It
verifies the draft in that pass and samples at each position until a choice differs: one chain,
exact under sampling, grammars and penalties, too. It tells neither when a sequence begins nor when
one ends. With any draft model it shows a caller's logits processors all tokens of the pass, later
drafted ones included: a processor that reads them sees tokens that were not chosen.

The engine keeps the logits of all tokens of a pass, as verifying drafts demands. What they found
likely is drafted again where the same last tokens come (`RecycledLogits`), in one tree with what is
retrieved (`FusedDrafter`), of which the best chain is proposed.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from time import perf_counter
from types import FrameType
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
from decoder.drafters.following import FollowingDrafter, SequenceDrafter, Verified, follow
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import DEFAULT_CAPACITY, RecycledLogits
from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_options import chain_for, check_version, checked_vocabulary_size
from decoder.engines.request_fields import PLAIN, FieldReader, RequestFields
from decoder.errors import UncroppableCacheError, UnsupportedModelError
from decoder.observation import Statistics
from indexer.reader import Vocabulary
from retriever.drafter import Drafter, TokenIds
from retriever.errors import InvalidRequestError
from retriever.follower import DraftLimits, Followers
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
class _Running:
    """The sequence that the engine decodes.

    Attributes:
        request: whose it is.
        sequence: its tokens.
        drafting: drafts for it; `None` where none are wanted or the drafter refuses it.
        chain: that was proposed last.
    """

    request: DraftedRequest
    sequence: TokenSequence
    drafting: SequenceDrafter | None
    chain: DraftTree = field(default_factory=DraftTree.empty)

    def is_continued_by(self, tokens: TokenIds) -> bool:
        """Return whether tokens are the last call's, followed by what a pass could accept."""
        known = len(self.sequence)
        accepted = len(tokens) - known - 1
        return (
            0 <= accepted <= len(self.chain)
            and self.sequence.begins(tokens)
            and np.array_equal(tokens[known:-1], self.chain.token_ids[:accepted])
        )


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
        llm: whose logits are recycled; `None` to draft from the drafter alone.
        reader: of what requests state; see `request`.

    Attributes:
        num_passes: calls, each of which comes before a pass of the model.
        num_drafted: tokens that were drafted.
        num_accepted: those of them that are known to have been accepted.
        num_failures: calls that failed.
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
    ) -> None:
        self.num_passes = self.num_drafted = self.num_accepted = self.num_failures = 0
        self.statistics = Statistics()
        limits = DraftLimits(drafter_vocabulary=drafter_vocabulary)
        self._drafters = _TenantDrafters(drafter, limits, recycles=llm is not None)
        self._llm = llm
        self._model_vocabulary = model_vocabulary
        self._num_pred_tokens = num_pred_tokens
        self._max_length = max_length
        self._budget = budget or FixedBudget(num_pred_tokens)
        self._budget_nodes = budget_nodes
        self._reader = reader or FieldReader(most_tokens=num_pred_tokens)
        self._request = DraftedRequest(PLAIN)
        self._awaits_pass = False
        self._running: _Running | None = None
        self._returned_s = 0.0

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
        began_s = perf_counter()
        self._awaits_pass = True
        self.num_passes += 1
        chain = DraftTree.empty()
        try:
            chain = self._draft(np.asarray(input_ids, np.int32), began_s)
        except Exception as error:  # noqa: BLE001  the engine must not end because of a draft
            self._fail(error)
        self.num_drafted += len(chain)
        self._charge(began_s)
        return chain.token_ids.astype(np.intc)

    def takes_pass(self) -> bool:
        """Return whether the engine's next pass is one that it was called for, once."""
        awaits, self._awaits_pass = self._awaits_pass, False
        return awaits

    def end(self) -> None:
        """End the sequence and remember its output, as the next sequence would.

        The tokens of the last pass are left out, as the engine does not show them.
        """
        running, self._running = self._running, None
        if running is not None and running.drafting is not None:
            running.drafting.close()

    def close(self) -> None:
        """End the sequence; never raises. The drafter stays open."""
        try:
            self.end()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    def _draft(self, tokens: TokenIds, began_s: float) -> DraftTree:
        running = self._running
        if running is not None and running.is_continued_by(tokens):
            self._go_on(running, tokens, began_s)
        else:
            self.end()
            running = self._running = self._begin(tokens)
        if running.drafting is None:
            return running.chain
        load = Load.of(len(tokens))
        most = min(self._budget.ask(load), self._room(running))
        if most <= 0:
            return running.chain
        tree = running.drafting.draft(self._budget_nodes)
        chain = chain_for(tree, most, self._model_vocabulary)
        draft_s = perf_counter() - began_s
        running.chain = self._budget.share([chain], load, draft_s)[0]
        return running.chain

    def _room(self, running: _Running) -> int:
        rooms = [self._num_pred_tokens]
        if self._max_length is not None:
            rooms.append(self._max_length - len(running.sequence))
        if running.request.fields.budget is not None:
            rooms.append(running.request.fields.budget)
        return min(rooms)

    def _begin(self, tokens: TokenIds) -> _Running:
        """Return a sequence whose last token is the first of its output."""
        request, end = self._request, max(len(tokens) - 1, 0)
        fields = request.fields
        sequence = TokenSequence(
            tokens[:end],
            remember=fields.remember,
            predictions=fields.predictions,
            kin=fields.kin,
            tenant=fields.tenant,
        )
        running = _Running(request, sequence, self._following(fields, sequence))
        self._learn(running, tokens[end:])
        return running

    def _following(self, fields: RequestFields, sequence: TokenSequence) -> SequenceDrafter | None:
        """Return what drafts for a sequence; `None` where nothing does."""
        if not fields.drafts:
            return None
        try:
            return follow(self._drafters.of(fields.tenant), sequence)
        except InvalidRequestError as error:
            self._count(error)
            return None

    def _go_on(self, running: _Running, tokens: TokenIds, began_s: float) -> None:
        """Take in what the last pass brought, and how long it took."""
        context = len(running.sequence)
        seconds = began_s - self._returned_s
        chain, path = running.chain, np.arange(len(tokens) - context - 1)
        self.num_accepted += len(path)
        self._learn(running, tokens[context:])
        for statistics in (running.request.statistics, self.statistics):
            statistics.target_s += seconds
            statistics.total_s += seconds
        if running.drafting is not None:
            outcome = PassOutcome(chain, path, int(tokens[-1]))
            self._budget.learn([outcome], Load.of(context), seconds)

    def _learn(self, running: _Running, new: TokenIds) -> None:
        """Commit the tokens of a pass, after the drafter has learned from its logits."""
        sequence, chain = running.sequence, running.chain
        running.chain = DraftTree.empty()
        path = np.arange(max(len(new) - 1, 0))
        for statistics in (running.request.statistics, self.statistics):
            statistics.record(chain, path, len(new))
        if self._llm is not None and running.drafting is not None and len(new) and len(sequence):
            tree, logits = _verified(self._llm, sequence, chain, len(path))
            last_token = int(sequence.tokens[-1])
            running.drafting.learn(Verified(last_token, tree, logits, path, int(new[-1])))
        sequence.extend(new)

    def _charge(self, began_s: float) -> None:
        """Note the time since a call began as the drafter's."""
        self._returned_s = perf_counter()
        of_request = [] if self._running is None else [self._running.request.statistics]
        for statistics in (*of_request, self.statistics):
            statistics.draft_s += self._returned_s - began_s
            statistics.total_s += self._returned_s - began_s

    def _fail(self, error: Exception) -> None:
        self._count(error)
        running, self._running = self._running, None
        if running is not None and running.drafting is not None:
            with suppress(Exception):  # its state is unknown
                running.drafting.close()

    def _count(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning("llama.cpp goes on without drafts for now: %s", error)


class _PromptReader:
    """`Llama.eval` of a model with drafts: it computes no logits of a prompt but the last token's.

    With `logits_all` the engine computes those of every token that it reads: a fifth of the time of
    a prompt where the vocabulary is large. Only drafts need them, and completions that show the
    prompt with its log-probabilities (`echo` and `logprobs`); calls of a user's own are left alone.

    Args:
        llm: whose method it stands for.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._lacks_some = False

    def __call__(self, tokens: Sequence[int]) -> None:
        """Read tokens; see `Llama.eval`."""
        draft_model = self._llm.draft_model
        is_drafted = not isinstance(draft_model, DrafterDraftModel) or draft_model.takes_pass()
        if is_drafted or not _is_for_generate(caller := sys._getframe(1)):  # noqa: SLF001
            Llama.eval(self._llm, tokens)
        elif _shows_logits(caller):
            self._read_with_logits(tokens)
        elif len(tokens):
            self._read(tokens)
        else:
            Llama.eval(self._llm, tokens)

    def _read_with_logits(self, tokens: Sequence[int]) -> None:
        """Read a prompt for its logits; what was read of it without them is read again."""
        llm = self._llm
        if self._lacks_some:
            tokens, llm.n_tokens = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens], 0
        Llama.eval(llm, tokens)
        self._lacks_some = False

    def _read(self, tokens: Sequence[int]) -> None:
        """Read a prompt for the logits of its last token."""
        llm, self._lacks_some = self._llm, True
        llm._logits_all = False  # noqa: SLF001  no public name
        try:
            Llama.eval(llm, tokens)
        finally:
            llm._logits_all = True  # noqa: SLF001  as above
        last = np.ctypeslib.as_array(llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
        llm.scores[llm.n_tokens - 1] = last


def _is_for_generate(caller: FrameType) -> bool:
    """Return whether the engine's own loop is what reads, and no one who wants the logits."""
    return caller.f_code is Llama.generate.__code__


def _shows_logits(caller: FrameType | None) -> bool:
    """Return whether a completion for which a prompt is read shows the prompt's logits."""
    while caller is not None and caller.f_code is not Llama._create_completion.__code__:  # noqa: SLF001
        caller = caller.f_back
    stated = {} if caller is None else caller.f_locals
    return bool(stated.get("echo")) and stated.get("logprobs") is not None


def _verified(
    llm: Llama, sequence: TokenSequence, chain: DraftTree, num_accepted: int
) -> tuple[DraftTree, NDArray[np.float32]]:
    """Return what the last pass verified behind a sequence, and its logits, float32[1 + N, V].

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

    Args:
        drafter: gives retrieved drafts.
        limits: vocabularies.
        recycles: whether drafts come from recycled logits, too. A fused drafter has its own.
    """

    def __init__(self, drafter: Drafter, limits: DraftLimits, *, recycles: bool) -> None:
        self._drafter = drafter
        self._limits = limits
        self._recycles = recycles and not isinstance(drafter, FollowingDrafter)
        self._followers = OrderedDict[str, Followers]()

    def of(self, tenant: str) -> Followers:
        """Return the followers of a tenant's drafter."""
        key = tenant if self._recycles else ""
        if key not in self._followers:
            self._followers[key] = Followers(self._new(key), self._limits)
        self._followers.move_to_end(key)
        if len(self._followers) > _MOST_TENANTS:
            self._followers.popitem(last=False)
        return self._followers[key]

    def _new(self, tenant: str) -> Drafter:
        if not self._recycles:
            return self._drafter
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
) -> DrafterDraftModel:
    """Let a model decode with drafts from now on, and return its draft model.

    From then on the engine computes no logits of a prompt but its last token's, unless a completion
    shows them (`echo` with `logprobs`).

    Args:
        llm: made with `logits_all=True`.
        drafter: gives the drafts.
        num_pred_tokens: most tokens of a draft.
        measure: whether to measure the cost of passes first, which takes some seconds and clears
            the model's cache, and to draft only what pays; otherwise all drafts are verified.
        vocabulary: of the model's tokenizer: a drafter for another one is refused.
        budget_nodes: most nodes of the tree that a draft is chosen from.
        recycle: whether what the model found likely is drafted again, in a tree with what the
            drafter says. A `FusedDrafter` does so where it was made for it.
        tenants: that requests may name; `*` among them for any. See `DrafterDraftModel.request`.

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
    )
    llm.draft_model = draft_model
    llm.eval = _PromptReader(seen)
    return draft_model


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
