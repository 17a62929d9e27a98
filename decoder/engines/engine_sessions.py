"""A drafter's sessions for sequences that an engine goes on with whatever the drafter does."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from logging import getLogger
from typing import Final

import numpy as np

from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import DrafterUnavailableError, InvalidRequestError, RetrieverError
from retriever.tree import DraftTree

_TAIL: Final = 8
"""Last tokens that a sequence is looked up by, before all of it is compared."""

_Key = tuple[int, bytes]


class TokenSequence:
    """A copy of the tokens of one sequence, and how far a drafter knows them.

    Args:
        tokens: int32[n], all of it so far; copied.
        num_prompt: how many of them are the prompt.
        slot: where the engine keeps it.

    Attributes:
        num_prompt: as given.
        slot: where the engine kept it when it was last seen.
        name: of the drafter's session; None while it has none.
        num_sent: tokens that the drafter knows.
        is_refused: whether the drafter finds the sequence at fault, so that it is not asked again.
        call: the number of the call that it was last seen in.
        seen_s: when that was, in seconds of a clock of the caller's.
    """

    __slots__ = (
        "_buffer",
        "_length",
        "call",
        "is_refused",
        "name",
        "num_prompt",
        "num_sent",
        "seen_s",
        "slot",
    )

    def __init__(self, tokens: TokenIds, num_prompt: int, slot: int) -> None:
        self._buffer = np.empty(len(tokens) + len(tokens) // 4 + 64, np.int32)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)
        self.num_prompt = num_prompt
        self.slot = slot
        self.name: str | None = None
        self.num_sent = 0
        self.is_refused = False
        self.call = 0
        self.seen_s = 0.0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenIds:
        """int32[n], a view."""
        return self._buffer[: self._length]

    @property
    def unsent(self) -> TokenIds:
        """int32[m], a copy of what the drafter does not know."""
        return self._buffer[self.num_sent : self._length].copy()

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens, in bytes."""
        return self._buffer.nbytes

    def is_sendable(self, drafter_vocabulary: int | None) -> bool:
        """Tell whether a drafter has all tokens that it does not know yet; None: it takes all."""
        return drafter_vocabulary is None or bool((self.unsent < drafter_vocabulary).all())

    def begins(self, tokens: TokenIds) -> bool:
        """Tell whether int32[n] begins with this sequence: all tokens are compared."""
        return len(tokens) >= self._length and bool((self.tokens == tokens[: self._length]).all())

    def extend(self, tokens: TokenIds) -> None:
        """Append int32[m]."""
        length = self._length + len(tokens)
        if length > len(self._buffer):
            grown = np.empty(length + length // 2, np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : length] = tokens
        self._length = length


class SequenceIndex:
    """Finds the sequence that a row of tokens goes on from.

    Sequences are filed by their length and last tokens. Whatever is found there is compared from
    its first token to its last, so that a sequence never goes on as another one. Comparing reads
    4 bytes a token: some microseconds for 32k tokens.
    """

    def __init__(self) -> None:
        self._filed: dict[_Key, list[TokenSequence]] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[TokenSequence]:
        for filed in self._filed.values():
            yield from filed

    def add(self, sequence: TokenSequence) -> None:
        """File a sequence."""
        self._filed.setdefault(_key(sequence.tokens), []).append(sequence)
        self._num_sequences += 1

    def remove(self, sequence: TokenSequence) -> None:
        """Take a sequence out; it must not have changed since it was filed."""
        key = _key(sequence.tokens)
        filed = [each for each in self._filed[key] if each is not sequence]
        if filed:
            self._filed[key] = filed
        else:
            del self._filed[key]
        self._num_sequences -= 1

    def extend(self, sequence: TokenSequence, tokens: TokenIds) -> None:
        """Append int32[m] to a sequence that is filed."""
        self.remove(sequence)
        sequence.extend(tokens)
        self.add(sequence)

    def exact(self, tokens: TokenIds, slot: int, call: int) -> TokenSequence | None:
        """Return a sequence that equals int32[n]; the slot's own where several do.

        Args:
            tokens: what it must hold.
            slot: where the engine keeps the row.
            call: sequences that were seen in this call belong to other rows.
        """
        found: TokenSequence | None = None
        for each in self._filed.get(_key(tokens), ()):
            if each.call != call and each.begins(tokens):
                if each.slot == slot:
                    return each
                if found is None:
                    found = each
        return found

    def longest(self, tokens: TokenIds, slot: int, call: int) -> TokenSequence | None:
        """Return the longest sequence that int32[n] begins with; else as `exact`."""
        free = [each for each in self if each.call != call and len(each) <= len(tokens)]
        free.sort(key=lambda each: (len(each), each.slot == slot), reverse=True)
        return next((each for each in free if each.begins(tokens)), None)


def _key(tokens: TokenIds) -> _Key:
    return len(tokens), tokens[-_TAIL:].tobytes()


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
