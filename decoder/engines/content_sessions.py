"""Sessions for engines that name none: rows of tokens go on from what they begin with.

Such engines show, at every step, the tokens of the sequences that are running now, in slots that
sequences move between. They tell neither that a sequence began nor that it ended, was aborted, or
waits for memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoder.engines.engine_sessions import DrafterSessions, HeldSequence, SequenceIndex
from retriever.drafter import Drafter, TokenIds
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence, as an engine shows it.

    Attributes:
        slot: where the engine keeps it; a hint only.
        tokens: int32[n], all of its tokens; a view that the engine may write to afterwards.
        num_new: how many of the last were generated in this very step. None where the engine does
            not tell: then the row goes on from the longest sequence that it begins with, and all
            that is behind that counts as generated.
        budget_nodes: most nodes of its draft.
    """

    slot: int
    tokens: TokenIds
    num_new: int | None
    budget_nodes: int


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What is held at most, and for how long.

    Attributes:
        max_sessions: sequences held at once; the one unseen for longest makes room.
        max_tokens: tokens of all of them, 4 to 8 bytes each beside what the drafter holds.
        idle_calls: a sequence that was not among the rows of so many calls in a row has ended.
            Engines may show only a part of their sequences in each step.
        idle_s: so has one that was not seen for so many seconds, however few calls there were.
        vocabulary_size: a sequence with a token id beyond it is not drafted for; None where ids
            have no limit.
        deadline_s: a call asks for no more drafts, and opens no more sessions, than take so many
            seconds, at least one of each; None where the drafter keeps a deadline by itself.
        min_probability: tokens less likely to be accepted are not drafted.
    """

    max_sessions: int = 2048
    max_tokens: int = 1 << 24
    idle_calls: int = 8
    idle_s: float = 10.0
    vocabulary_size: int | None = None
    deadline_s: float | None = None
    min_probability: float = 0.0


@dataclass(slots=True)
class SessionCounts:
    """What became of the rows that were shown.

    Attributes:
        begun: rows that nothing known goes on to.
        moved: rows that go on from a sequence seen before, in another slot.
        ended: sequences that were no longer shown, or made room.
        turned_away: rows without room, or with a token beyond the vocabulary.
    """

    begun: int = 0
    moved: int = 0
    ended: int = 0
    turned_away: int = 0


class ContentSessions:
    """Keeps a drafter's sessions for sequences that are known by their tokens alone.

    A row goes on as an old session only if it begins with all of the session's tokens, compared
    one by one; then only what is new reaches the drafter. In one call no two rows share a session.
    Where rows hold the same tokens, whichever goes on as which comes to the same.

    What a session generated is remembered when it ends, an aborted one's too: the model wrote it.
    Not safe for use from several threads.

    Args:
        drafter: whom to ask. One that fails costs drafts; its sessions are then opened anew.
        limits: what is held at most.
        clock: seconds, monotonic.

    Attributes:
        counts: what became of rows.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = SessionCounts()
        self._limits = limits or SessionLimits()
        self._drafting = DrafterSessions(
            drafter, self._limits.deadline_s, self._limits.min_probability, clock=clock
        )
        self._clock = clock
        self._sequences = SequenceIndex()
        self._num_tokens = 0
        self._call = 0

    def __len__(self) -> int:
        """Count the sequences that are held."""
        return len(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that are held."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of their tokens, in bytes, without what the drafter holds."""
        return sum(held.sequence.num_bytes for held in self._sequences)

    @property
    def num_failures(self) -> int:
        """Calls that the drafter refused or did not answer."""
        return self._drafting.num_failures

    def draft(self, rows: Sequence[Row]) -> list[DraftTree]:
        """Return a tree for each row, in order; empty where there is none to be had."""
        self._call += 1
        now_s = self._clock()
        followed = [self._follow(row, now_s) for row in rows]
        self._expire(now_s)
        places = [at for at, held in enumerate(followed) if held is not None]
        trees = [DraftTree.empty()] * len(rows)
        asked = [
            (held.follower, row.budget_nodes)
            for held, row in zip(followed, rows, strict=True)
            if held is not None
        ]
        for at, tree in zip(places, self._drafting.draft(asked), strict=True):
            trees[at] = tree
        return trees

    def rows_seen(self) -> dict[int, TokenIds]:
        """Return the sequences of the last call, int32[n] each, by slot: for whoever checks."""
        return {
            held.slot: held.sequence.since(0) for held in self._sequences if held.call == self._call
        }

    def close(self) -> None:
        """End all sessions; what they generated is remembered."""
        for held in list(self._sequences):
            self._end(held)

    def abandon(self) -> None:
        """Let go of all sessions, whatever state they are in."""
        self._drafting.abandon(held.follower for held in self._sequences)
        for held in list(self._sequences):
            self._remove(held)

    def _follow(self, row: Row, now_s: float) -> HeldSequence | None:
        """Return the sequence of a row, up to date; None where it cannot be held."""
        held = self._known(row)
        if held is not None:
            held.call = self._call  # nobody else's now, and not to be ended to make room
        new = row.tokens[0 if held is None else len(held.sequence) :]
        if not (self._is_known_to_vocabulary(new) and self._has_room(new, held)):
            self.counts.turned_away += 1
            return None
        if held is None:
            held = self._begin(row)
        else:
            self._continue(held, row, new)
        self._num_tokens += len(new)
        held.slot, held.call, held.seen_s = row.slot, self._call, now_s
        return held

    def _known(self, row: Row) -> HeldSequence | None:
        """Return the sequence that a row goes on from, which is no other row's in this call."""
        if row.num_new is None:
            return self._sequences.longest(row.tokens, row.slot, self._call)
        before = row.tokens[: max(len(row.tokens) - row.num_new, 0)]
        return self._sequences.exact(before, row.slot, self._call)

    def _begin(self, row: Row) -> HeldSequence:
        num_prompt = len(row.tokens) - min(row.num_new or 0, len(row.tokens))
        held = HeldSequence(self._drafting.follow(row.tokens, num_prompt), row.slot)
        self._sequences.add(held)
        self.counts.begun += 1
        return held

    def _continue(self, held: HeldSequence, row: Row, new: TokenIds) -> None:
        self._sequences.extend(held, new)
        self.counts.moved += held.slot != row.slot

    def _is_known_to_vocabulary(self, tokens: TokenIds) -> bool:
        if len(tokens) == 0:
            return True
        size = self._limits.vocabulary_size
        return bool(tokens.min() >= 0 and (size is None or tokens.max() < size))

    def _has_room(self, new: TokenIds, held: HeldSequence | None) -> bool:
        """Make room by ending what was unseen for longest; tell whether there is enough."""
        num_more = int(held is None)
        while (
            len(self._sequences) + num_more > self._limits.max_sessions
            or self._num_tokens + len(new) > self._limits.max_tokens
        ):
            unseen = [each for each in self._sequences if each.call < self._call]
            if not unseen:
                return False
            self._end(min(unseen, key=lambda each: each.call))
        return True

    def _expire(self, now_s: float) -> None:
        """End what has not been seen for long enough."""
        last_call = self._call - self._limits.idle_calls
        last_s = now_s - self._limits.idle_s
        for held in list(self._sequences):
            if held.call < self._call and (held.call <= last_call or held.seen_s < last_s):
                self._end(held)

    def _end(self, held: HeldSequence) -> None:
        held.follower.close()
        self._remove(held)
        self.counts.ended += 1

    def _remove(self, held: HeldSequence) -> None:
        self._sequences.remove(held)
        self._num_tokens -= len(held.sequence)
