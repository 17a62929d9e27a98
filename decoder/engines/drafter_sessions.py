"""A drafter's sessions for sequences that an engine goes on with whatever the drafter does."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from logging import getLogger
from typing import Final

from decoder.engines.sequences import TokenSequence
from retriever.drafter import Drafter, DraftRequest
from retriever.errors import DrafterUnavailableError, InvalidRequestError, RetrieverError
from retriever.tree import DraftTree

_log = getLogger(__name__)

_RETRY_AFTER: Final = 19
"""A failing drafter is left alone for so many times as long as its failure took."""

_INERTIA: Final = 0.9


class DrafterSessions:
    """Tells a drafter of sequences, within a deadline, and lives without it when it fails.

    After a failure nobody knows what the drafter has noted: the sessions concerned are given up
    and later opened anew. A sequence that it finds at fault is not drafted for, and costs the
    others nothing.

    Args:
        drafter: whom to ask.
        deadline_s: a step opens no more sessions, and asks for no more drafts, than it has lately
            taken so many seconds for, at least one of each; None where the drafter keeps a
            deadline by itself.
        min_probability: of the nodes that are asked for.
        clock: seconds, monotonic.

    Attributes:
        num_failures: steps and closes that the drafter refused or did not answer.
    """

    def __init__(
        self,
        drafter: Drafter,
        deadline_s: float | None = None,
        min_probability: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_failures = 0
        self._drafter = drafter
        self._deadline_s = deadline_s
        self._min_probability = min_probability
        self._clock = clock
        self._prefix = uuid.uuid4().hex
        self._numbers = count()
        self._turn = 0
        self._draft_s = 0.0
        self._silent_until_s = float("-inf")

    def draft(self, asked: Sequence[tuple[TokenSequence, int]]) -> list[DraftTree]:
        """Return a tree for each sequence, in order; empty where there is none to be had.

        Args:
            asked: sequences, each once, with the most nodes of their trees.
        """
        trees = [DraftTree.empty()] * len(asked)
        start_s = self._clock()
        if not asked or start_s < self._silent_until_s:
            return trees
        chosen: list[int] = []
        try:
            for at in self._order(len(asked)):
                chosen.append(at)
                if not self._make_ready(asked[at][0], start_s, is_first=len(chosen) == 1):
                    chosen.pop()
            drafts = self._step([asked[at] for at in chosen]) if chosen else []
            for at, tree in zip(chosen, drafts, strict=True):
                trees[at] = tree
        except RetrieverError as error:
            self._fail(error, start_s)
            for at in chosen:
                self.give_up(asked[at][0])
        return trees

    def end(self, sequence: TokenSequence) -> None:
        """Close a sequence's session, if it has one, with the tokens that the drafter lacks."""
        if sequence.name is None:
            return
        start_s = self._clock()
        try:
            self._drafter.close(sequence.name, sequence.unsent)
            sequence.name = None
        except RetrieverError as error:
            self._fail(error, start_s)
            self.give_up(sequence)

    def give_up(self, sequence: TokenSequence) -> None:
        """Close a session that may be gone already; the sequence's next step opens another."""
        name, sequence.name = sequence.name, None
        if name is not None:
            with suppress(RetrieverError):
                self._drafter.close(name)
        sequence.num_sent = 0

    def abandon(self, sequences: Iterable[TokenSequence]) -> None:
        """Give up sessions after an error that nobody expected, whatever closing them raises."""
        for sequence in sequences:
            with suppress(Exception):
                self.give_up(sequence)

    def _order(self, num_asked: int) -> list[int]:
        """Return which to ask for: as many as are made in time, in turns where not all are."""
        order = [(self._turn + at) % num_asked for at in range(num_asked)]
        if self._deadline_s is not None and self._draft_s > 0:
            order = order[: max(1, int(self._deadline_s / self._draft_s))]
        self._turn = 0 if len(order) == num_asked else self._turn + len(order)
        return order

    def _make_ready(self, sequence: TokenSequence, start_s: float, *, is_first: bool) -> bool:
        """Open a session where there is none; tell whether there is one."""
        if sequence.name is not None or sequence.is_refused:
            return not sequence.is_refused
        if (
            self._deadline_s is not None
            and not is_first
            and self._clock() - start_s > self._deadline_s
        ):
            return False
        name = f"{self._prefix}-{next(self._numbers)}"
        try:
            self._drafter.open(name, sequence.tokens[: sequence.num_prompt].copy())
        except InvalidRequestError as error:
            sequence.is_refused = True
            self._count(error)
            return False
        sequence.name, sequence.num_sent = name, sequence.num_prompt
        return True

    def _step(self, asked: Sequence[tuple[TokenSequence, int]]) -> list[DraftTree]:
        start_s = self._clock()
        requests = [
            DraftRequest(
                sequence.name or "",
                sequence.unsent,
                len(sequence),
                budget_nodes,
                self._min_probability,
            )
            for sequence, budget_nodes in asked
        ]
        trees = self._drafter.draft(requests)
        if len(trees) != len(asked):
            raise DrafterUnavailableError(
                f"the drafter sent {len(trees)} trees for {len(asked)} sequences"
            )
        for sequence, _ in asked:
            sequence.num_sent = len(sequence)
        draft_s = (self._clock() - start_s) / len(asked)
        self._draft_s += (1 - _INERTIA) * (draft_s - self._draft_s)
        return trees

    def _fail(self, error: RetrieverError, start_s: float) -> None:
        """Leave the drafter alone for a while."""
        now_s = self._clock()
        self._silent_until_s = now_s + _RETRY_AFTER * (now_s - start_s)
        self._count(error)

    def _count(self, error: RetrieverError) -> None:
        """Count a failure; log the first."""
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning("the engine goes on without drafts for now: %s", error)
