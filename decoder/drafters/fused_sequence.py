"""What a fused drafter keeps of one sequence, and how it asks its parts."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from decoder.drafters.kernels.recycled import NUM_ORDERS
from decoder.drafters.learning import Verified
from decoder.drafters.recycling import NO_HINTS
from decoder.drafters.session import Backoff, DraftLimits, DraftSession
from decoder.drafters.worth import Worth
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import OutOfSequenceError
from retriever.tree import DraftTree

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
