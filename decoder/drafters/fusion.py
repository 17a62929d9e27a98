"""One draft tree from several drafters, and from what the target found likely before.

Trees are merged by longest prefix, as in RASD (arXiv:2503.03434): paths that two of them share are
one path, and what one has beyond that is grafted there. At every node, all sources that know it say
how probable its children are, and a logistic model, which learns from every token that comes, makes
one probability of that; so shared nodes gain, those that a sure source lacks lose, and the tree is
cut to the budget as one.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.resources import files
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.following import Backoff, DraftLimits, DraftSession, Verified
from decoder.drafters.kernels.forest import Forest, plant
from decoder.drafters.kernels.fused_growth import Growth, grow
from decoder.drafters.kernels.fused_learning import learn
from decoder.drafters.kernels.recycled import NUM_ORDERS, Table
from decoder.drafters.kernels.siblings import NUM_SETS, NUM_TABLE_SOURCES, NUM_WEIGHTS, Siblings
from decoder.drafters.recycling import NO_HINTS, NUM_LIKELY, RecycledLogits
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import OutOfSequenceError, SessionExistsError, UnknownSessionError
from retriever.tree import DraftTree, Source

RATE: Final = 0.2
"""Size of a step of learning, before it is divided by the root of the squared gradients."""

_PRIOR: Final = "fusion_prior.npy"
_PRIOR_STRENGTH: Final = 200.0
"""Sum of squared gradients that the prior counts for: it was fitted to thousands of tokens."""


class SourceWeights:
    """The weights of a logistic model over sources: trees, recycled logits and hints.

    They begin as a prior that `benchmarks.decoding.fit_fusion` fitted to passes with one tree;
    what several trees say overlaps, so at first each of n counts for 1/√n.

    Args:
        num_trees: trees that are fused.

    Attributes:
        values: float64[NUM_SETS, S + 1, NUM_WEIGHTS], S sources and what all share.
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
_FADING: Final = 0.05
_TRIALS: Final = 6
_PROBE_EVERY: Final = 32


class Worth:
    """Learns what a slow drafter adds to the tree of quick ones, by how sure that tree is.

    The slow drafter is asked where the tokens that it has lately added there, at the pace of
    decoding, save more time than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand.
    Each kind of tree is tried a few times first, and again now and then.

    Attributes:
        seconds: what asking takes, of late.
    """

    def __init__(self) -> None:
        self._gains = np.zeros(_NUM_BINS)
        self._trials = np.zeros(_NUM_BINS, np.int64)
        self._skipped = np.zeros(_NUM_BINS, np.int64)
        self.seconds = 0.0

    def pays(self, sureness: float, token_s: float) -> bool:
        """Return whether to ask the slow drafter now.

        Args:
            sureness: probability of the quick tree's first node, 0 where it is empty.
            token_s: seconds that a token takes at the present pace.
        """
        at = _bin(sureness)
        pays = self._gains[at] * token_s > self.seconds or self._trials[at] < _TRIALS
        self._skipped[at] = 0 if pays else self._skipped[at] + 1
        return bool(pays) or self._skipped[at] % _PROBE_EVERY == 0

    def learn(self, sureness: float, gain: float, seconds: float) -> None:
        """Take in what asking brought.

        Args:
            sureness: as it was then.
            gain: tokens that were accepted beyond those of the quick tree alone.
            seconds: what asking took.
        """
        at = _bin(sureness)
        self._trials[at] += 1
        fading = max(_FADING, 1 / self._trials[at])
        self._gains[at] += fading * (gain - self._gains[at])
        self.seconds += max(_FADING, 1 / self._trials.sum()) * (seconds - self.seconds)


def _bin(sureness: float) -> int:
    return min(int(sureness * _NUM_BINS), _NUM_BINS - 1)


_PATIENCE: Final = 0.05
"""Share of the models' time that the quick drafters are waited for before the models are asked."""


class Parts:
    """The drafters that are fused, and what is known of them beyond one sequence.

    Args:
        drafters: the quick ones.
        models: the slow ones.
        limits: which tokens target and drafters know.

    Attributes:
        worth: of asking the slow ones.
    """

    def __init__(
        self, drafters: Sequence[Drafter], models: Sequence[Drafter], limits: DraftLimits
    ) -> None:
        self.worth = Worth()
        self._drafters = [(drafter, Backoff()) for drafter in drafters]
        self._models = [(model, Backoff()) for model in models]
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "quick-drafters") if models else None

    def open(
        self, prompt: TokenIds, *, remember: bool
    ) -> tuple[list[DraftSession], list[DraftSession]]:
        """Return sessions with the quick and with the slow drafters."""

        def begin(drafter: Drafter, backoff: Backoff) -> DraftSession:
            return DraftSession(drafter, prompt, self._limits, backoff, remember=remember)

        quick = [begin(*part) for part in self._drafters]
        return quick, [begin(*part) for part in self._models]

    def shut_down(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()

    def meanwhile(self, quick: list[DraftSession], budget_nodes: int) -> Future[list[DraftTree]]:
        """Ask the quick drafters in a thread of their own."""
        if self._thread is None:
            raise RuntimeError("without models there is nothing to do meanwhile")
        return self._thread.submit(_ask, quick, budget_nodes)


class FusedSequence:
    """One sequence of a fused drafter.

    Args:
        parts: the drafters.
        prompt: int32[n], the sequence so far.
        remember: whether drafters may use its output for later sequences.

    Attributes:
        trees: of the last draft, quick drafters first.
        has_drafted: whether there was one.
        hints: what else the target found likely where it chose the last token.
    """

    def __init__(self, parts: Parts, prompt: TokenIds, *, remember: bool) -> None:
        self._parts = parts
        self._quick, self._slow = parts.open(prompt, remember=remember)
        self._length = len(prompt)
        self._tail = prompt[-NUM_ORDERS:].tolist()
        self._asked_at = time.perf_counter()
        self._asking_s = 0.0
        self._token_s = 0.0
        self.trees: list[DraftTree] = []
        self.has_drafted = False
        self.hints = NO_HINTS

    @property
    def num_failures(self) -> int:
        """Drafts of parts that could not be had."""
        return sum(part.num_failures for part in (*self._quick, *self._slow))

    def context(self) -> TokenIds:
        """Return int32[NUM_ORDERS], the last tokens, the latest first; -1 where there is none."""
        context = np.full(NUM_ORDERS, -1, np.int32)
        context[: len(self._tail)] = self._tail[::-1]
        return context

    def extend(self, request: DraftRequest) -> None:
        """Take in the tokens that a request brings.

        Raises:
            OutOfSequenceError: the stated length does not fit.
        """
        new = request.new_tokens.tolist()
        if self._length + len(new) != request.length:
            raise OutOfSequenceError(
                f"session {request.session!r} has {self._length} tokens and the request brings "
                f"{len(new)}, but states a length of {request.length}"
            )
        self._note_pace(len(new))
        self._commit(new)

    def ask(self, budget_nodes: int) -> None:
        """Set `trees` to what the parts draft; the slow ones only where that pays."""
        start = time.perf_counter()
        self._asking_s = 0.0
        self.has_drafted = True
        if not self._slow:
            self.trees = _ask(self._quick, budget_nodes)
            return
        pending = self._parts.meanwhile(self._quick, budget_nodes)
        wait([pending], self._parts.worth.seconds * _PATIENCE)
        if pending.done() and not self._pays(pending.result()):
            self.trees = [*pending.result(), *(DraftTree.empty() for _ in self._slow)]
            return
        slow = _ask(self._slow, budget_nodes)
        self.trees = [*pending.result(), *slow]
        self._asking_s = time.perf_counter() - start

    def learn(self, verified: Verified) -> None:
        """Show the parts a pass, and learn what the slow ones brought to it."""
        for part in (*self._quick, *self._slow):
            part.learn(verified)
        if self._asking_s == 0.0:
            return
        came = np.append(verified.tree.token_ids[verified.path], verified.next_token)
        quick = self.trees[: len(self._quick)]
        alone = max((len(t.prefix(len(verified.tree)).follow(came)) for t in quick), default=0)
        gain = len(verified.path) - min(alone, len(verified.path))
        self._parts.worth.learn(_sureness(quick), gain, self._asking_s)

    def close(self, new_tokens: Sequence[int]) -> None:
        """End the sessions of all parts."""
        for part in (*self._quick, *self._slow):
            part.extend(new_tokens)
            part.close()

    def _pays(self, quick: list[DraftTree]) -> bool:
        return self._parts.worth.pays(_sureness(quick), self._token_s)

    def _note_pace(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if num_tokens:
            self._token_s = (now - self._asked_at) / num_tokens
        self._asked_at = now

    def _commit(self, tokens: list[int]) -> None:
        for part in (*self._quick, *self._slow):
            part.extend(tokens)
        self._length += len(tokens)
        self._tail = [*self._tail, *tokens][-NUM_ORDERS:]


def _ask(parts: list[DraftSession], budget_nodes: int) -> list[DraftTree]:
    return [part.draft(budget_nodes) for part in parts]


def _sureness(trees: list[DraftTree]) -> float:
    """Return the probability of the likeliest node."""
    return max((float(tree.probabilities[0]) for tree in trees if len(tree)), default=0.0)


MAX_NODES: Final = 256
"""Most nodes of a fused tree, and of each tree that goes into it."""

_LEAST_PROBABILITY: Final = 1e-4
_NO_TABLE: Final = Table.of(4, NUM_LIKELY)


class FusedDrafter:
    """Merges the trees of other drafters into one; a `Drafter` that learns from logits.

    A drafter that fails costs its own part of the tree. Not safe to call from several threads.

    Args:
        drafters: those that answer in microseconds, such as retrieval.
        models: those that take passes of a model: asked while the others answer, and not at all
            where they would bring less than they take.
        recycled: what the target found likely before; `None` to do without.
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
        self._parts = Parts(tuple(drafters), tuple(models), limits)
        self._recycled = recycled
        self._sequences: dict[str, FusedSequence] = {}
        num_trees = len(drafters) + len(models)
        self._weights = SourceWeights(num_trees)
        self._forest = Forest.of(num_trees, MAX_NODES)
        self._siblings = Siblings.of(num_trees)
        self._growth = Growth.of(num_trees, MAX_NODES)
        self._planted: Sequence[DraftTree] = ()

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        if session in self._sequences:
            raise SessionExistsError(f"session {session!r} is open already")
        self._sequences[session] = FusedSequence(self._parts, prompt, remember=remember)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Ask all drafters and fuse what they say; see `Drafter.draft`."""
        return [self._draft(self._get(request.session), request) for request in requests]

    def learn(self, session: str, verified: Verified) -> None:
        """Learn from a pass over the session's last draft what each source is worth."""
        sequence = self._get(session)
        came = [*verified.tree.token_ids[verified.path].tolist(), verified.next_token]
        sequence.learn(verified)
        self._learn_weights(sequence, np.array(came, np.int32))
        if self._recycled is not None:
            sequence.hints = self._recycled.learn(verified, sequence.context())

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        sequence = self._get(session)
        del self._sequences[session]
        sequence.close(() if new_tokens is None else new_tokens.tolist())

    def shut_down(self) -> None:
        """End the thread that asks the quick drafters while models run. They go on living."""
        self._parts.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def num_failures(self, session: str) -> int:
        """Return how many drafts of its parts a session could not have."""
        return self._get(session).num_failures

    def _get(self, session: str) -> FusedSequence:
        try:
            return self._sequences[session]
        except KeyError:
            raise UnknownSessionError(f"no session {session!r} is open: open it first") from None

    def _table(self) -> Table:
        return _NO_TABLE if self._recycled is None else self._recycled.table

    def _draft(self, sequence: FusedSequence, request: DraftRequest) -> DraftTree:
        budget = min(request.budget_nodes, MAX_NODES)
        sequence.extend(request)
        sequence.ask(budget)
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
            budget,
            max(request.min_probability, _LEAST_PROBABILITY),
            int(Source.MODEL),
        )
        return DraftTree(
            growth.tokens[:size].copy(),
            growth.parents[:size].copy(),
            growth.probabilities[:size].copy(),
            growth.sources[:size].copy(),
        )

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
