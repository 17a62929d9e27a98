"""Keeps a drafter up to date with a sequence; while the drafter fails, drafts are empty."""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from logging import getLogger
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from retriever.backoff import Backoff, drafter_backoff
from retriever.drafter import (
    AheadDrafter,
    Drafter,
    DraftRequest,
    Prediction,
    TokenIds,
    keeps_tenants,
)
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    InvalidTreeError,
    LimitExceededError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.sequences import TokenSequence, refused_tenant
from retriever.tree import DraftTree

NO_DRAFT: Final = (
    DrafterUnavailableError,
    InvalidTreeError,
    LimitExceededError,
    UnknownSessionError,
)
"""Errors after which decoding continues without a draft; neither side is at fault."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The vocabularies of the model and the drafter.

    Attributes:
        model_vocabulary: size of the model's vocabulary; drafted token ids must be below it. `None`
            if the caller checks that.
        drafter_vocabulary: size of the drafter's vocabulary; token ids sent to the drafter must be
            below it. `None` if the drafter accepts all of the model's tokens. Embeddings are often
            padded beyond the tokenizer's size.
    """

    model_vocabulary: int | None = None
    drafter_vocabulary: int | None = None

    def within(self, other: "DraftLimits | None") -> "DraftLimits":
        """Return the intersection of two limits."""
        if other is None or other == self:
            return self
        return DraftLimits(
            _lower(self.model_vocabulary, other.model_vocabulary),
            _lower(self.drafter_vocabulary, other.drafter_vocabulary),
        )


def _lower(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


@runtime_checkable
class Learner(Protocol):
    """A drafter that also learns from forward passes of the target model."""

    def learn(self, session: str, verified: Any) -> None:
        """Learn from a pass over the session's last draft or a part of it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Drafts that a drafter made ahead for one sequence.

    Attributes:
        length: length of the sequence before the outcomes.
        min_probability: as in the request.
        trees: trees, keyed by the tokens of their outcome as bytes.
    """

    length: int
    min_probability: float
    trees: dict[bytes, DraftTree]

    @classmethod
    def of(cls, request: DraftRequest, trees: Sequence[DraftTree]) -> "_Answers":
        """Return the trees for a request's first outcomes."""
        keys = (outcome.tobytes() for outcome in request.outcomes)
        answered = dict(zip(keys, trees, strict=False))
        return cls(request.length, request.min_probability, answered)


class Follower:
    """Keeps a drafter up to date with one sequence, whose tokens it shares and never copies.

    It also sends the predictions of the sequence, if the drafter accepts any.

    Tokens that the drafter does not have yet are sent with the next request. After a failure the
    session is given up, because its state is unknown; the next request opens another with all
    tokens. A token outside the drafter's vocabulary ends drafting for the sequence. Followers are
    made by `Followers.follow`.

    A decoding loop calls `draft`, `learn` and `close`. Callers that handle failures themselves use
    their parts `open`, `request`, `told` and `forget`, which raise all errors.

    Args:
        followers: all followers of the same drafter.
        sequence: the committed tokens; the owner of the sequence extends it.
        limits: vocabularies of the model and the drafter.
        name: name of the drafter's session; a new name for each session if not given.

    Attributes:
        sequence: as passed to the constructor.
        limits: as passed to the constructor.
        name: name of the open session; `None` while there is none.
        num_sent: number of tokens sent to the session.
        has_ended: whether the sequence has a token outside the drafter's vocabulary.
        is_refused: whether the drafter refused the sequence as invalid. Then no further drafts are
            requested.
        num_failures: number of failed drafts. The end of drafting by an unknown token counts once.
    """

    __slots__ = (
        "_answers",
        "_followers",
        "_given_name",
        "_known_predictions",
        "_num_known",
        "has_ended",
        "is_refused",
        "limits",
        "name",
        "num_failures",
        "num_sent",
        "sequence",
    )

    def __init__(
        self,
        followers: "Followers",
        sequence: TokenSequence,
        limits: DraftLimits,
        name: str | None = None,
    ) -> None:
        self.sequence = sequence
        self.limits = limits
        self.name: str | None = None
        self.num_sent = 0
        self.has_ended = False
        self.is_refused = False
        self.num_failures = 0
        self._followers = followers
        self._given_name = name
        self._num_known = 0  # tokens inside the drafter's vocabulary
        self._known_predictions: list[Prediction] = []  # those sent to the session or refused
        self._answers: _Answers | None = None

    @property
    def is_open(self) -> bool:
        """Whether the drafter has a session for the sequence."""
        return self.name is not None

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Request a tree of at most `budget_nodes` nodes; empty if there is none.

        Raises:
            InvalidRequestError: the drafter refuses the request, if `raises_refusals`.
        """
        return self._followers.draft([(self, budget_nodes)], min_probability)[0]

    def learn(self, verified: object) -> None:
        """Pass the outcome of the last draft to a drafter that learns."""
        learner = self._followers.learner
        if learner is not None and self.name is not None:
            learner.learn(self.name, verified)

    def close(self) -> None:
        """Close the session, if there is one, with the tokens not sent yet."""
        self._followers.close(self)

    def open(self) -> None:
        """Open a session with the prompt; generated tokens are sent with the first request.

        Raises:
            RetrieverError: the drafter refuses the session, or does not answer.
        """
        name = self._followers.new_name() if self._given_name is None else self._given_name
        sequence, drafter = self.sequence, self._followers.drafter
        options = sequence.options
        if options.tenant and not keeps_tenants(drafter):
            raise refused_tenant(options.tenant)
        if not sequence.predictions or not self._open_predicted(name):
            drafter.open(name, sequence.prompt, options)
        self._known_predictions = sequence.predictions
        self.name, self.num_sent = name, sequence.num_prompt

    def _open_predicted(self, name: str) -> bool:
        """Open a session with predictions; return whether there was room for them."""
        sequence = self.sequence
        predictions = tuple(self._known_of(sequence.predictions))
        options = replace(sequence.options, predictions=predictions)
        try:
            self._followers.drafter.open(name, sequence.prompt, options)
        except LimitExceededError as error:
            _log.warning("drafting continues without predictions, which were refused: %s", error)
            return False
        return True

    def _known_of(self, predictions: Iterable[Prediction]) -> list[Prediction]:
        """Return the predictions whose tokens are in the drafter's vocabulary."""
        end = self.limits.drafter_vocabulary
        return [each for each in predictions if end is None or _are_below(each.tokens, end)]

    def tell_predictions(self) -> None:
        """Send predictions that were added later to the session; if refused, only they are lost.

        Raises:
            RetrieverError: the session is not open, or the drafter does not answer.
        """
        name, predictions = self.name, self.sequence.predictions
        if self._known_predictions is predictions or name is None:
            return
        added = self._known_of(predictions[len(self._known_predictions) :])
        self._known_predictions = predictions
        add = self._followers.add_predictions
        if added and add is not None:
            try:
                add(name, added)
            except LimitExceededError as error:
                _log.warning("drafting continues without the added predictions: %s", error)

    def request(
        self, budget_nodes: int, min_probability: float = 0.0, length: int | None = None
    ) -> DraftRequest:
        """Return a request for an open session.

        Args:
            budget_nodes: most nodes of the tree.
            min_probability: see `DraftRequest`.
            length: number of tokens of the sequence after which to draft; all if not given.
        """
        if length is None:
            length = len(self.sequence)
        new_tokens = self.sequence.tokens[self.num_sent : length].copy()
        return DraftRequest(self.name or "", new_tokens, length, budget_nodes, min_probability)

    def catching_up(self, request: DraftRequest) -> DraftRequest:
        """Return the request with all tokens that were not sent to this session yet.

        Args:
            request: a request of the sequence's owner, whose new tokens are already in the
                sequence.
        """
        name = self.name or ""
        if name == request.session and self.num_sent == request.length - len(request.new_tokens):
            return request
        new_tokens = self.sequence.tokens[self.num_sent : request.length].copy()
        return request._replace(session=name, new_tokens=new_tokens)

    def told(self, length: int) -> None:
        """Note that the session has the first `length` tokens of the sequence."""
        self.num_sent = length
        self._answers = None

    def take_answers(self, answers: _Answers) -> None:
        """Store drafts made ahead for the session, and note that it has the tokens before them."""
        self.num_sent = answers.length
        self._answers = answers

    def answered(self, budget_nodes: int, min_probability: float) -> DraftTree | None:
        """Return the tree that was drafted ahead for the tokens that came, `None` if there is none.

        These tokens are sent to the session with the next request.
        """
        answers = self._answers
        if answers is None or answers.min_probability != min_probability:
            return None
        tree = answers.trees.get(self.sequence.tokens[answers.length :].tobytes())
        return None if tree is None else tree.prefix(budget_nodes)

    def unsent(self) -> TokenIds:
        """Return int32[m], a copy of the known tokens that were not sent to the drafter yet."""
        end = self._num_known if self.has_ended else len(self.sequence)
        return self.sequence.tokens[self.num_sent : end].copy()

    def forget(self) -> str | None:
        """Drop the session without closing it; return its name. The next request opens another."""
        name, self.name = self.name, None
        self.num_sent = 0
        self._answers = None
        return name

    def is_over(self) -> bool:
        """Return whether drafting has ended for the sequence; checks its new tokens."""
        if self.has_ended or self.is_refused:
            return True
        known, self._num_known = self._num_known, len(self.sequence)
        end = self.limits.drafter_vocabulary
        if end is None or known >= self._num_known:
            return False
        new_tokens = self.sequence.tokens[known:]
        if _are_below(new_tokens, end):
            return False
        unknown = np.flatnonzero(new_tokens >= end)
        if len(unknown) == 0:  # the drafter refuses negative ids
            return False
        self._num_known = known + int(unknown[0])
        self.has_ended = True
        self.num_failures += 1
        self.close()
        return True


FIRST_PATIENCE_S: Final = 0.02
"""Assumed duration of a request until one is measured, in seconds: the longest wait of clients."""

_FIRST_PAUSE_S: Final = 0.02
"""Longest pause in drafting ahead after a first late answer, in seconds: a few steps. Pauses grow
to seconds, so that a drafter that is always late gets few useless requests."""

_LEAST_PATIENCE_S: Final = 0.001
"""Shortest wait for drafts ahead, in seconds: the operating system may resume a thread this
late."""

_FEWER: Final = 0.75
"""Factor by which the number of outcomes shrinks after a step that waited for drafts ahead. After a
step that did not wait, the number grows by one. So drafts are requested for as many outcomes as a
pass leaves time for, the likeliest first."""

_RECENT: Final = 0.2
"""Weight of the last draft in the moving average of request times, which covers about five
drafts."""


Outcomes = Callable[[], Sequence[TokenIds]]
"""Function that returns outcomes: int32[k] each, k at least 1, the likeliest first."""


class Prefetch:
    """A request for drafts ahead that runs in another thread, and its answers.

    It takes little of the caller's time: the thread computes the outcomes and sorts the answers.

    Args:
        drafter: the drafter.
        asked: distinct followers with open sessions, each with its request and its outcomes.
        most: most outcomes per sequence.
        timeout_s: time after which no further trees are made, in seconds.
        began_s: start time by the followers' clock.

    Attributes:
        began_s: as passed to the constructor.
        num_outcomes: largest number of outcomes of a sequence; 0 until they are computed.
        is_late: whether a step went without a draft because the answers had not come.
    """

    def __init__(
        self,
        drafter: AheadDrafter,
        asked: Sequence[tuple[Follower, DraftRequest, Outcomes]],
        most: float,
        timeout_s: float,
        began_s: float,
    ) -> None:
        self.began_s = began_s
        self.num_outcomes = 0
        self.is_late = False
        self._drafter = drafter
        self._asked = asked
        self._most, self._timeout_s = most, timeout_s
        self._answers: Future[list[_Answers]] = Future()
        self._is_answered = False

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Send the request in another thread."""
        self._answers = threads.submit(self._answered)

    @property
    def followers(self) -> list[Follower]:
        """The followers of the requested sequences."""
        return [follower for follower, _, _ in self._asked]

    def is_done(self, wait_s: float | None) -> bool:
        """Wait for at most `wait_s` seconds, forever if `None`; return whether all is done."""
        return self._answers.done() or bool(wait((self._answers,), wait_s).done)

    def taken(self) -> bool:
        """Give each follower its answers; return false if outcomes were sent but no answer came.

        Raises:
            RetrieverError: the drafter raised this error.
        """
        for (follower, _, _), answers in zip(self._asked, self._answers.result(), strict=True):
            follower.take_answers(answers)
        return self._is_answered

    def _answered(self) -> list[_Answers]:
        requests = [
            request._replace(outcomes=self._outcomes(follower, outcomes))
            for follower, request, outcomes in self._asked
        ]
        self.num_outcomes = max(len(request.outcomes) for request in requests)
        answers = self._drafter.draft_ahead(requests, self._timeout_s)
        if len(answers) != len(requests):
            raise DrafterUnavailableError(
                f"the drafter sent drafts ahead for {len(answers)} of {len(requests)} sequences"
            )
        self._is_answered = any(answers) or not any(each.outcomes for each in requests)
        return [_Answers.of(each, trees) for each, trees in zip(requests, answers, strict=True)]

    def _outcomes(self, follower: Follower, outcomes: Outcomes) -> tuple[TokenIds, ...]:
        """Return the likeliest outcomes whose tokens are in the drafter's vocabulary."""
        end = follower.limits.drafter_vocabulary
        known = [each for each in outcomes() if end is None or _are_below(each, end)]
        return tuple(known if len(known) <= self._most else known[: int(self._most)])


_FEW: Final = 64
"""Up to this many tokens are checked as a list in 2 us, which is about the cost of the numpy calls
(1 to 2 us each)."""


def _are_below(tokens: TokenIds, end: int) -> bool:
    """Return whether int32[n] are all token ids below a bound; n at least 1."""
    if len(tokens) <= _FEW:
        ids: list[int] = tokens.tolist()
        return min(ids) >= 0 and max(ids) < end
    return bool(0 <= tokens.min() <= tokens.max() < end)


class Followers:
    """All followers of a drafter: they batch requests and share one back-off.

    If the drafter fails, only drafts are lost, never a sequence.

    Args:
        drafter: the drafter.
        limits: vocabularies of the model and the drafter.
        raises_refusals: whether an `InvalidRequestError`, which is a bug in a decoding loop, is
            raised. Otherwise no error of the drafter is raised: a refused sequence gets no drafts,
            and other sequences are not affected.
        clock: a monotonic clock in seconds.
        patience_s: assumed duration of a request until one is measured, in seconds.

    Attributes:
        drafter: as passed to the constructor; may be replaced once all sessions are closed or
            dropped.
        limits: as passed to the constructor.
        add_predictions: the drafter's method for later predictions, if it has one.
        learner: the drafter, if it learns from passes.
        backoff: pauses after failures of the drafter.
        num_failures: calls that failed or were refused.
        num_asked: drafts that a caller waited for, counted per sequence.
        num_ahead: drafts that were made ahead and used, counted per sequence.
    """

    def __init__(  # noqa: PLR0913  (the last four are options)
        self,
        drafter: Drafter,
        limits: DraftLimits | None = None,
        *,
        raises_refusals: bool = True,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = FIRST_PATIENCE_S,
    ) -> None:
        self.drafter = drafter
        self.limits = limits or DraftLimits()
        self.learner = drafter if isinstance(drafter, Learner) else None
        self.add_predictions: Callable[[str, list[Prediction]], None] | None = getattr(
            drafter, "add_predictions", None
        )
        self.backoff = backoff or drafter_backoff(clock)
        self.num_failures = self.num_asked = self.num_ahead = 0
        self._raises_refusals = raises_refusals
        self._caught = NO_DRAFT if raises_refusals else (RetrieverError,)
        self._clock = clock
        self._prefix = uuid.uuid4().hex
        self._numbers = count()
        self._ahead = drafter if isinstance(drafter, AheadDrafter) else None
        self._ahead_backoff = Backoff(_FIRST_PAUSE_S, clock=clock)
        self._asks_ahead = False
        self._num_fitting = math.inf
        self._under_way: Prefetch | None = None
        self._asking_s = patience_s

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """The thread that requests drafts ahead."""
        return ThreadPoolExecutor(1, "foredraft-ahead")

    def follow(
        self, sequence: TokenSequence, name: str | None = None, limits: DraftLimits | None = None
    ) -> Follower:
        """Return a follower of a sequence; its session opens with the first request.

        Args:
            sequence: the committed tokens; the owner of the sequence extends it.
            name: name of the drafter's session; a new name for each session if not given.
            limits: further limits for this sequence.
        """
        return Follower(self, sequence, self.limits.within(limits), name)

    def new_name(self) -> str:
        """Return an unused session name."""
        return f"{self._prefix}-{next(self._numbers)}"

    def open(self, followers: Iterable[Follower], until_s: float = math.inf) -> None:
        """Open missing sessions ahead of their first requests.

        Stops at a failure. During a back-off nothing is opened.

        Args:
            followers: followers of the sequences.
            until_s: time of the clock; after it, only the first missing session is opened.

        Raises:
            InvalidRequestError: the drafter refuses a prompt, if `raises_refusals`.
        """
        self._settle()
        num_opened = 0
        for follower in followers:
            if follower.is_open or follower.is_over():
                continue
            if not self.backoff.is_over() or (num_opened and self._clock() > until_s):
                return
            num_opened += 1
            if not self._open(follower) and not follower.is_refused:
                return

    def draft(
        self, asked: Sequence[tuple[Follower, int]], min_probability: float = 0.0
    ) -> list[DraftTree]:
        """Return a tree for each sequence, in order; an empty one if there is no draft.

        All are requested with one call of the drafter.

        Args:
            asked: distinct followers, each with the most nodes that its tree may have.
            min_probability: nodes less probable than this are left out.

        Raises:
            InvalidRequestError: the drafter refuses the step, if `raises_refusals`.
        """
        if self._asks_ahead:
            return self._draft_or_pick(asked, min_probability)
        ready = [self._is_ready(follower) for follower, _ in asked]
        if all(ready):
            return self._ask(asked, min_probability) if asked else []
        awaited = [each for each, is_ready in zip(asked, ready, strict=True) if is_ready]
        drafted = iter(self._ask(awaited, min_probability) if awaited else ())
        return [next(drafted) if is_ready else DraftTree.empty() for is_ready in ready]

    def ask_ahead(
        self,
        asked: Sequence[tuple[Follower, int, Outcomes]],
        busy_s: float,
        min_probability: float = 0.0,
    ) -> None:
        """Request drafts for tokens that may come next, in another thread.

        The next `draft` uses the answer for the tokens that came, and sends no request. If the
        answer is not there yet, `draft` waits for as long as recent requests took, and then returns
        no draft. Requests are answered in order, so a new one would take even longer. If the tokens
        that came were not among the outcomes, a draft is requested. If steps have to wait, fewer
        outcomes are sent, the likeliest ones. If a drafter is late, fails or sends no drafts,
        drafting ahead pauses. A drafter that cannot draft ahead gets no such request.

        Args:
            asked: distinct followers, the most nodes of each tree, and a function that returns the
                outcomes, which is called in the other thread. Outcomes beyond the drafter's
                vocabulary are left out.
            busy_s: about how long the caller will do other work, in seconds.
            min_probability: nodes less probable than this are left out.
        """
        if self._ahead is None or (self._under_way and not self._under_way.is_done(0.0)):
            return
        self._settle()
        if not (self.backoff.is_over() and self._ahead_backoff.is_over()):
            return
        for follower, _, _ in asked:
            self._tell_predictions(follower)
        following = [
            (follower, follower.request(most, min_probability), outcomes)
            for follower, most, outcomes in asked
            if most and not follower.is_over() and follower.is_open
        ]
        if following:
            self._asks_ahead = True
            timeout_s = busy_s + max(self._asking_s, _LEAST_PATIENCE_S)
            self._under_way = Prefetch(
                self._ahead, following, self._num_fitting, timeout_s, self._clock()
            )
            self._under_way.begin(self._thread)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a running request for drafts ahead; return whether none is running any more.

        Args:
            timeout_s: longest wait, in seconds; forever if `None`.
        """
        return self._under_way is None or self._under_way.is_done(timeout_s)

    def close(self, follower: Follower) -> None:
        """Close a session, if there is one; see `Follower.close`.

        Raises:
            InvalidRequestError: the drafter refuses the tokens, if `raises_refusals`.
        """
        self._settle()
        follower.is_over()
        if follower.name is None:
            return
        start_s = self._clock()
        try:
            self.drafter.close(follower.name, follower.unsent())
            follower.forget()
        except self._caught as error:
            self._fail(error, start_s, [follower])
        finally:
            self.give_up(follower)

    def give_up(self, follower: Follower) -> None:
        """Close a session that may be gone; the next request opens another."""
        self._settle()
        name = follower.forget()
        if name is not None:
            with suppress(RetrieverError):
                self.drafter.close(name)

    def abandon(self, followers: Iterable[Follower]) -> None:
        """Give up sessions after an error elsewhere; errors of closing are suppressed."""
        for follower in followers:
            with suppress(Exception):
                self.give_up(follower)

    def _tell_predictions(self, follower: Follower) -> None:
        """Send predictions that were added later to an open session, before a request."""
        start_s = self._clock()
        try:
            follower.tell_predictions()
        except self._caught as error:
            self._fail(error, start_s, [follower])

    def _draft_or_pick(
        self, asked: Sequence[tuple[Follower, int]], min_probability: float
    ) -> list[DraftTree]:
        """Draft while drafting ahead is in use: request only drafts that were not made ahead."""
        if self._under_way is not None:
            self._note_fit(self._under_way)
        if not self._settle(max(self._asking_s, _LEAST_PATIENCE_S)):
            return [DraftTree.empty() for _ in asked]
        trees = [self._answered(follower, most, min_probability) for follower, most in asked]
        awaited = [
            each
            for each, tree in zip(asked, trees, strict=True)
            if tree is None and self._is_ready(each[0])
        ]
        drafted = self._ask(awaited, min_probability) if awaited else []
        of_awaited = {follower: tree for (follower, _), tree in zip(awaited, drafted, strict=True)}
        return [
            of_awaited.get(follower, DraftTree.empty()) if tree is None else tree
            for (follower, _), tree in zip(asked, trees, strict=True)
        ]

    def _settle(self, wait_s: float | None = None) -> bool:
        """Take the answers of a running request for drafts ahead; return false if it is late.

        Args:
            wait_s: longest wait, in seconds; forever if `None`.
        """
        asked = self._under_way
        if asked is None:
            return True
        if not asked.is_done(wait_s):
            self._note_late(asked)
            return False
        self._under_way = None
        try:
            is_answered = asked.taken()
        except self._caught as error:
            self._ahead_backoff.fail()
            self._fail(error, asked.began_s, asked.followers)
            return True
        if not is_answered:
            self._ahead_backoff.fail()
        elif not asked.is_late:
            self._ahead_backoff.succeed()
        return True

    def _note_fit(self, asked: Prefetch) -> None:
        """Note whether the drafter answered within a pass, and adapt the number of outcomes."""
        if asked.is_done(0.0):
            self._num_fitting += 1
        elif asked.num_outcomes:
            self._num_fitting = max(_FEWER * min(self._num_fitting, asked.num_outcomes), 1.0)

    def _note_late(self, asked: Prefetch) -> None:
        for follower in asked.followers:
            follower.num_failures += 1
        if not asked.is_late:
            asked.is_late = True
            self._ahead_backoff.fail()

    def _answered(
        self, follower: Follower, budget_nodes: int, min_probability: float
    ) -> DraftTree | None:
        """Return a tree that was drafted ahead; `None` if a draft must be requested."""
        if follower.is_over():
            return None
        tree = follower.answered(budget_nodes, min_probability)
        if tree is None:
            return None
        self.num_ahead += 1
        return self._checked(follower, tree, self._clock())

    def _is_ready(self, follower: Follower) -> bool:
        """Return whether a draft can be requested; opens a session if there is none."""
        if follower.is_over():
            return False
        if not self.backoff.is_over():
            follower.num_failures += 1
            return False
        return follower.name is not None or self._open(follower, is_again=True)

    def _open(self, follower: Follower, *, is_again: bool = False) -> bool:
        """Open a session; return whether that worked.

        Args:
            follower: a follower without a session.
            is_again: whether the drafter was reached before. If so, it may have restarted with
                another tokenizer, which is not the caller's fault.
        """
        start_s = self._clock()
        try:
            follower.open()
        except self._caught as error:
            if isinstance(error, InvalidRequestError) and not self._raises_refusals:
                follower.is_refused = True
                self._count(error)
            else:
                self._fail(error, start_s, [follower])
        except VocabularyMismatchError as error:
            if not is_again:
                raise
            self._fail(error, start_s, [follower])
        return follower.name is not None

    def _ask(
        self, asked: Sequence[tuple[Follower, int]], min_probability: float
    ) -> list[DraftTree]:
        """Request drafts for open sessions with one call."""
        start_s = self._clock()
        try:
            for follower, _ in asked:
                follower.tell_predictions()
            requests = [follower.request(budget, min_probability) for follower, budget in asked]
            trees = self.drafter.draft(requests)
            if len(trees) != len(asked):
                raise DrafterUnavailableError(
                    f"the drafter sent {len(trees)} trees for {len(asked)} sequences"
                )
        except self._caught as error:
            self._fail(error, start_s, [follower for follower, _ in asked])
            return [DraftTree.empty() for _ in asked]
        self.num_asked += len(asked)
        if self._ahead is not None:  # measured for drafts ahead, even before the first one
            self._asking_s += _RECENT * (self._clock() - start_s - self._asking_s)
        return [
            self._taken(follower, request, tree, start_s)
            for (follower, _), request, tree in zip(asked, requests, trees, strict=True)
        ]

    def _taken(
        self, follower: Follower, request: DraftRequest, tree: DraftTree, start_s: float
    ) -> DraftTree:
        """Note that a session has the tokens of a request, and return its checked tree."""
        follower.told(request.length)
        return self._checked(follower, tree, start_s)

    def _checked(self, follower: Follower, tree: DraftTree, start_s: float) -> DraftTree:
        """Return a tree, or an empty one if the model's embedding has no row for a token."""
        end, tokens = follower.limits.model_vocabulary, tree.token_ids
        if end is None or len(tokens) == 0 or _are_below(tokens, end):
            return tree
        error = InvalidTreeError(
            f"the drafter proposes token {tokens.max()}, but the model's vocabulary ends at "
            f"{end}: it was built for another tokenizer"
        )
        self._fail(error, start_s, [follower])
        return DraftTree.empty()

    def _fail(self, error: RetrieverError, start_s: float, followers: Sequence[Follower]) -> None:
        """Give up the sessions of a failed call, and begin a back-off.

        The sessions' state in the drafter is unknown.
        """
        for follower in followers:
            self.give_up(follower)
            follower.num_failures += 1
        self.backoff.fail(self._clock() - start_s)
        self._count(error)

    def _count(self, error: RetrieverError) -> None:
        """Count a failure; log the first."""
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning("decoding continues without drafts from this drafter for now: %s", error)
