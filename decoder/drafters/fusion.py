"""One draft tree from several drafters, and from what the target found likely before.

Trees are merged by longest prefix, as in RASD (arXiv:2503.03434): a path that two trees share is
one path, and the rest of each tree is grafted onto it. At every node, each source that knows it
gives probabilities for its children. A logistic model, which learns from every token that comes,
turns them into one probability: nodes that sources share gain, nodes that a sure source lacks lose,
and the merged tree is cut to the budget.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from importlib.resources import files
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from decoder.budget.payoff import FadingRatio, Payoff
from decoder.drafters.following import SequenceDrafter, Verified, follow
from decoder.drafters.kernels.forest import Forest, plant
from decoder.drafters.kernels.fused_growth import Growth, grow
from decoder.drafters.kernels.fused_learning import learn
from decoder.drafters.kernels.recycled import NUM_ORDERS, Table
from decoder.drafters.kernels.siblings import (
    NUM_SETS,
    NUM_TABLE_SOURCES,
    NUM_WEIGHTS,
    Hints,
    Siblings,
)
from decoder.drafters.recycling import NO_HINTS, NUM_LIKELY, RecycledLogits
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.follower import DraftLimits, Followers
from retriever.sequences import OpenSessions, TokenSequence, check_named_once, check_step
from retriever.tree import DraftTree, Source

RATE: Final = 0.2
"""Size of a step of learning, before it is divided by the root of the squared gradients."""

_PRIOR: Final = "fusion_prior.npy"
_PRIOR_STRENGTH: Final = 200.0
"""Sum of squared gradients that the prior counts for: it was fitted to thousands of tokens."""


class SourceWeights:
    """The weights of a logistic model over sources: trees, recycled logits and hints.

    They begin as a prior that `benchmarks.decoding.fit_fusion` fitted to passes with one tree.
    Several trees overlap, so at first each of n counts for 1/√n.

    Args:
        num_trees: trees that are fused.

    Attributes:
        values: float64[NUM_SETS, S + 1, NUM_WEIGHTS], S sources and a row that all share.
        curvature: the same shape, sums of squared gradients.
    """

    def __init__(self, num_trees: int) -> None:
        prior = _prior()
        self.values = np.empty((NUM_SETS, num_trees + NUM_TABLE_SOURCES + 1, NUM_WEIGHTS))
        self.values[:, :num_trees] = prior[:, :1] / np.sqrt(max(num_trees, 1))
        self.values[:, num_trees:] = prior[:, 1:]
        self.curvature = np.full_like(self.values, _PRIOR_STRENGTH)


def _prior() -> NDArray[np.float64]:
    """Return float64[NUM_SETS, 1 + NUM_TABLE_SOURCES + 1, NUM_WEIGHTS]."""
    with (files(__package__) / _PRIOR).open("rb") as stream:
        prior: NDArray[np.float64] = np.load(stream, allow_pickle=False)
    return prior


_NUM_BINS: Final = 8
"""Levels of sureness of the quick tree. Fewer are learned sooner, more tell apart what pays; 4 and
16 obtain 3% more and 1% less of what could be gained in simulation, where gains fall evenly, but
more where they turn."""

_DECAY: Final = 0.95
"""Gains are those of some twenty drafts of a level. In simulation 0.98 obtains 3% more of what
could be gained while gains stay as they are, and 6% less where they turn every 1,500 steps; 0.9
loses 3% and gains 1%."""

_TRIALS: Final = 6
"""Drafts of a level before it is judged: accepted tokens vary as much as their mean, so six give it
to within 40%. 2 and 20 obtain the same to 1% while gains stay as they are."""

_PAUSE: Final = 31
"""Steps of a level between two trials once it does not pay: every 32nd takes 3% of the draft
model's time. In simulation 127 obtains 2% less of what could be gained, and 17% less where gains
turn."""


class GainEstimate:
    """Learns what a slow drafter adds to the tree of quick ones, by how sure that tree is.

    The slow drafter is asked where the tokens that it has lately added there, at the pace of
    decoding, save more time than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand.
    Each kind of tree is tried a few times first, and again now and then.
    """

    def __init__(self) -> None:
        self._by_sureness = [
            Payoff(_DECAY, trials=_TRIALS, first_pause=_PAUSE) for _ in range(_NUM_BINS)
        ]
        self._seconds = FadingRatio(_DECAY)

    @property
    def seconds(self) -> float:
        """Mean seconds that a recent draft of the slow drafters took."""
        return self._seconds.value()

    def pays(self, sureness: float, token_s: float) -> bool:
        """Return whether to ask the slow drafter now.

        Args:
            sureness: probability of the quick tree's first node, 0 where it is empty.
            token_s: seconds that a token takes at the present pace.
        """
        return self._at(sureness).is_due(token_s, self.seconds, _PAUSE)

    def learn(self, sureness: float, gain: float, seconds: float) -> None:
        """Take in a draft of the slow drafters.

        Args:
            sureness: of the quick tree of that draft.
            gain: tokens that were accepted beyond those of the quick tree alone.
            seconds: that drafting took.
        """
        self._at(sureness).learn(gain)
        self._seconds.add(seconds)

    def _at(self, sureness: float) -> Payoff:
        return self._by_sureness[min(int(sureness * _NUM_BINS), _NUM_BINS - 1)]


_PATIENCE: Final = 0.05
"""Share of the models' time that the quick drafters are waited for before the models are asked."""


class Ensemble:
    """The drafters that are fused, and the gain estimate that all sequences share.

    Args:
        drafters: the quick ones.
        models: the slow ones.
        limits: which tokens target and drafters know.

    Attributes:
        gain: estimate of what asking the slow drafters adds.
    """

    def __init__(
        self, drafters: Sequence[Drafter], models: Sequence[Drafter], limits: DraftLimits
    ) -> None:
        self.gain = GainEstimate()
        self._quick = [Followers(drafter, limits) for drafter in drafters]
        self._slow = [Followers(model, limits) for model in models]
        self._thread = ThreadPoolExecutor(1, "quick-drafters") if models else None

    def follow(
        self, sequence: TokenSequence, limits: DraftLimits | None
    ) -> tuple[list[SequenceDrafter], list[SequenceDrafter]]:
        """Return the quick and the slow drafters' followers of a sequence.

        Raises:
            InvalidRequestError: a drafter refuses the prompt.
        """
        with ExitStack() as opened:

            def begin(followers: Followers) -> SequenceDrafter:
                member = follow(followers, sequence, limits)
                opened.callback(member.close)
                return member

            quick = [begin(each) for each in self._quick]
            slow = [begin(each) for each in self._slow]
            opened.pop_all()
        return quick, slow

    def shut_down(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()

    def start_quick(
        self, quick: list[SequenceDrafter], budget_nodes: int
    ) -> Future[list[DraftTree]]:
        """Ask the quick drafters in another thread, while this one runs the models."""
        if self._thread is None:
            raise RuntimeError("only an ensemble with models has a thread for quick drafters")
        return self._thread.submit(_ask, quick, budget_nodes)


class FusedSequence:
    """One sequence of a fused drafter: the decoding loop uses it as it uses a `Follower`.

    Its members follow the sequence that the loop commits to. Made by `FusedDrafter.follow`.

    Args:
        drafter: fuses the trees, and learns.
        ensemble: the drafters that are fused.
        sequence: the committed tokens; its owner extends it.
        limits: which tokens the model and the drafters know.

    Attributes:
        sequence: as given.
        trees: of the last draft, quick drafters first.
        hints: the other tokens that the target found likely where it chose the last one.

    Raises:
        InvalidRequestError: a drafter refuses the prompt.
    """

    def __init__(
        self,
        drafter: "FusedDrafter",
        ensemble: Ensemble,
        sequence: TokenSequence,
        limits: DraftLimits | None = None,
    ) -> None:
        self._drafter = drafter
        self._ensemble = ensemble
        self._quick, self._slow = ensemble.follow(sequence, limits)
        self._all = [*self._quick, *self._slow]
        self._num_paced = len(sequence)
        self._asked_at = time.perf_counter()
        self._asking_s = 0.0
        self._token_s = 0.0
        self._drafted_length = -1
        self.sequence = sequence
        self.trees: list[DraftTree] = []
        self.hints = NO_HINTS

    @property
    def num_failures(self) -> int:
        """Drafts of members that failed or were refused."""
        return sum(member.num_failures for member in self._all)

    @property
    def has_drafted(self) -> bool:
        """Whether `trees` are drafts for the sequence at its present length."""
        return self._drafted_length == len(self.sequence)

    def context(self) -> TokenIds:
        """Return int32[NUM_ORDERS], the last tokens, the latest first; -1 where there is none."""
        context = np.full(NUM_ORDERS, -1, np.int32)
        last = self.sequence.tokens[-NUM_ORDERS:]
        context[: len(last)] = last[::-1]
        return context

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Ask the members and fuse their trees."""
        self._note_pace()
        budget_nodes = min(budget_nodes, MAX_NODES)
        self._ask(budget_nodes)
        self._drafted_length = len(self.sequence)
        return self._drafter.fuse(self, budget_nodes, min_probability)

    def learn(self, verified: Verified) -> None:
        """Learn from a pass which tokens the target found likely, and how to weigh each source."""
        for member in self._all:
            member.learn(verified)
        if self.has_drafted and self._asking_s > 0.0:
            self._learn_gain(verified)
        self.hints = self._drafter.take_in(self, verified)

    def close(self) -> None:
        """End the sessions of all members."""
        with ExitStack() as members:
            for member in reversed(self._all):
                members.callback(member.close)

    def _ask(self, budget_nodes: int) -> None:
        """Set `trees` to the members' drafts; ask slow members only where that pays."""
        start = time.perf_counter()
        self._asking_s = 0.0
        if not self._slow:
            self.trees = _ask(self._quick, budget_nodes)
            return
        pending = self._ensemble.start_quick(self._quick, budget_nodes)
        wait([pending], self._ensemble.gain.seconds * _PATIENCE)
        if pending.done() and not self._pays(pending.result()):
            self.trees = [*pending.result(), *(DraftTree.empty() for _ in self._slow)]
            return
        slow = _ask(self._slow, budget_nodes)
        self.trees = [*pending.result(), *slow]
        self._asking_s = time.perf_counter() - start

    def _learn_gain(self, verified: Verified) -> None:
        """Learn how many tokens the slow members added to a pass."""
        came = np.append(verified.tree.token_ids[verified.path], verified.next_token)
        quick = self.trees[: len(self._quick)]
        alone = max((len(t.prefix(len(verified.tree)).follow(came)) for t in quick), default=0)
        gain = len(verified.path) - min(alone, len(verified.path))
        self._ensemble.gain.learn(_sureness(quick), gain, self._asking_s)

    def _pays(self, quick: list[DraftTree]) -> bool:
        return self._ensemble.gain.pays(_sureness(quick), self._token_s)

    def _note_pace(self) -> None:
        now, num_tokens = time.perf_counter(), len(self.sequence) - self._num_paced
        if num_tokens:
            self._token_s = (now - self._asked_at) / num_tokens
        self._asked_at, self._num_paced = now, len(self.sequence)


def _ask(members: list[SequenceDrafter], budget_nodes: int) -> list[DraftTree]:
    return [member.draft(budget_nodes) for member in members]


def _sureness(trees: list[DraftTree]) -> float:
    """Return the probability of the likeliest node."""
    return max((float(tree.probabilities[0]) for tree in trees if len(tree)), default=0.0)


MAX_NODES: Final = 256
"""Most nodes of a fused tree, and of each tree that goes into it."""

_LEAST_PROBABILITY: Final = 1e-4
"""Less probable nodes are not considered: 256 of them together bring at most 0.026 tokens, and each
candidate of a node must be scored."""

_NO_TABLE: Final = Table.of(4, NUM_LIKELY)


class FusedDrafter:
    """Merges the trees of other drafters into one; a `Drafter` that learns from passes.

    A decoding loop has it `follow` the sequence that it commits to, and names no sessions; to
    others it is a drafter like any. A drafter that fails costs its share of the tree. Not safe
    to call from several threads.

    Args:
        drafters: those that answer in microseconds, such as retrieval.
        models: those that take passes of a model: asked while the others answer, and not at all
            where they would bring less than they take.
        recycled: likely tokens of earlier passes; `None` to do without.
        limits: which tokens target and drafters know.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        limits: DraftLimits,
        *,
        models: Sequence[Drafter] = (),
        recycled: RecycledLogits | None = None,
    ) -> None:
        self._ensemble = Ensemble(drafters, models, limits)
        self._recycled = recycled
        self._sessions: OpenSessions[str, FusedSequence] = OpenSessions()
        num_trees = len(drafters) + len(models)
        self._weights = SourceWeights(num_trees)
        self._forest = Forest.of(num_trees, MAX_NODES)
        self._siblings = Siblings.of(num_trees)
        self._growth = Growth.of(num_trees, MAX_NODES)
        self._planted: Sequence[DraftTree] = ()

    @property
    def states(self) -> frozenset[int]:
        """Numbers of the target's states that it learns from; see `FollowingDrafter`."""
        return frozenset()

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> FusedSequence:
        """Return the drafter of one sequence; see `FollowingDrafter.follow`."""
        return FusedSequence(self, self._ensemble, sequence, limits)

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        self._sessions.check_free(session)
        self._sessions.add(session, self.follow(TokenSequence(prompt, remember=remember)))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Ask all drafters and fuse their trees; see `Drafter.draft`."""
        check_named_once(requests)
        fused = [self._sessions.get(request.session) for request in requests]
        for request, each in zip(requests, fused, strict=True):
            check_step(request, len(each.sequence), len(request.new_tokens))
        for request, each in zip(requests, fused, strict=True):
            each.sequence.extend(request.new_tokens)
        return [
            each.draft(request.budget_nodes, request.min_probability)
            for request, each in zip(requests, fused, strict=True)
        ]

    def learn(self, session: str, verified: Verified) -> None:
        """Learn from a pass over the session's last draft how to weigh each source."""
        self._sessions.get(session).learn(verified)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        fused = self._sessions.remove(session)
        if new_tokens is not None:
            fused.sequence.extend(new_tokens)
        fused.close()

    def shut_down(self) -> None:
        """End the thread that asks the quick drafters while models run; drafters stay open."""
        self._ensemble.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def num_failures(self, session: str) -> int:
        """Return how many drafts of a session failed or were refused, over all drafters."""
        return self._sessions.get(session).num_failures

    def fuse(self, sequence: FusedSequence, budget_nodes: int, min_probability: float) -> DraftTree:
        """Return one tree made of the members' trees and the recycled logits."""
        self._plant(sequence.trees)
        growth = self._growth
        growth.places[0] = np.arange(len(sequence.trees))
        growth.contexts[0] = sequence.context()
        size = grow(
            growth,
            self._siblings,
            self._forest,
            self._table(),
            self._weights.values,
            sequence.hints,
            budget_nodes,
            max(min_probability, _LEAST_PROBABILITY),
            int(Source.MODEL),
        )
        return DraftTree(
            growth.tokens[:size].copy(),
            growth.parents[:size].copy(),
            growth.probabilities[:size].copy(),
            growth.sources[:size].copy(),
        )

    def take_in(self, sequence: FusedSequence, verified: Verified) -> Hints:
        """Learn from a pass; return the other likely tokens where the target chose its own."""
        came = [*verified.tree.token_ids[verified.path].tolist(), verified.next_token]
        self._learn_weights(sequence, np.array(came, np.int32))
        if self._recycled is None:
            return NO_HINTS
        keep = sequence.sequence.remember
        return self._recycled.learn(verified, sequence.context(), keep=keep)

    def _table(self) -> Table:
        return _NO_TABLE if self._recycled is None else self._recycled.table

    def _plant(self, trees: Sequence[DraftTree]) -> None:
        """Enter trees into the forest, unless it holds these already."""
        if trees is self._planted:
            return
        self._planted, start = trees, len(trees)
        for number, tree in enumerate(trees):
            start = plant(
                self._forest,
                number,
                start,
                tree.token_ids,
                tree.parents,
                tree.probabilities,
                tree.sources,
            )

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn from the tokens that came after a draft."""
        if not sequence.has_drafted:
            return
        self._plant(sequence.trees)
        num_trees = len(sequence.trees)
        places = np.zeros((2, num_trees), np.int32)
        places[0] = np.arange(num_trees)
        learn(
            self._siblings,
            self._forest,
            self._table(),
            self._weights.values,
            self._weights.curvature,
            places,
            sequence.context(),
            sequence.hints,
            came,
            RATE,
        )
