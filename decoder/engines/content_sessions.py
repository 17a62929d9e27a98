"""Sessions for engines that show rows of tokens: a row's is that of its request, or of its tokens.

At every step, such engines show the tokens of the running sequences, in slots that sequences move
between. Where they name the request of a row, its session goes by the name, and ends with the
request. Where they do not, they do not tell when a sequence begins, ends, is aborted, or waits for
memory either: then a row belongs to the session it begins with.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from decoder.engines.engine_sessions import (
    DrafterSessions,
    HeldSequence,
    NamedRequest,
    SequenceIndex,
)
from decoder.engines.request_fields import PLAIN
from retriever.drafter import Drafter, TokenIds
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence, as an engine shows it.

    Attributes:
        slot: where the engine keeps it; a hint only.
        tokens: int32[n], all of its tokens; a view that the engine may write to afterwards.
        num_new: how many of the last tokens were generated in this step. None where the engine
            does not tell: then the row continues the longest session that it begins with, and
            all tokens behind that count as generated.
        budget_nodes: most nodes of its draft.
        request: whose row it is, where the engine names requests; `num_new` is given then.
    """

    slot: int
    tokens: TokenIds
    num_new: int | None
    budget_nodes: int
    request: NamedRequest | None = None


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the sessions that are held, and of the time that drafts take.

    Attributes:
        max_sessions: sequences held at once; the least recently seen one is evicted.
        max_tokens: tokens of all of them, 4 to 8 bytes each besides the drafter's own memory.
        idle_calls: a sequence counts as ended after so many calls in a row without it, if it has
            no name. Engines may show only a part of their sequences in each step.
        idle_s: such a sequence counts as ended after so many seconds without it.
        vocabulary_size: a sequence with a token id at or beyond it is not drafted for; None where
            ids have no limit.
        deadline_s: a call asks for as many drafts, and opens as many sessions, as fit into so
            many seconds, at least one of each; None where the drafter keeps a deadline itself.
        min_probability: less probable nodes are not drafted.
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
    """Counts of the rows that were shown, by what they were taken for.

    Attributes:
        begun: rows that began a new session.
        moved: rows that continued a session in another slot than before.
        ended: sessions that were no longer shown, or were evicted.
        turned_away: rows without room, or with a token beyond the vocabulary.
    """

    begun: int = 0
    moved: int = 0
    ended: int = 0
    turned_away: int = 0


class ContentSessions:
    """Keeps a drafter's sessions for sequences that an engine shows as rows.

    A row of a named request continues that request's session. One without a name continues a
    session only if it begins with all of the session's tokens, compared one by one. Then only the
    new tokens reach the drafter. In one call no two rows share a session; rows without names that
    have equal tokens may take each other's.

    The output of a session is remembered when it ends, also when it was aborted: it is the
    model's own text.
    Not safe for use from several threads.

    Args:
        drafter: gives the drafts. A failure costs drafts; sessions are then opened again.
        limits: of the sessions and of time.
        clock: seconds, monotonic.

    Attributes:
        counts: of rows.
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

    def keep_up(self, rows: Sequence[Row]) -> list[HeldSequence | None]:
        """Note a step without drafts; return the sequence of each row, `None` without room.

        The drafter is told of it with the next draft, or at the end.
        """
        self._call += 1
        now_s = self._clock()
        followed = [self._follow(row, now_s) for row in rows]
        self._expire(now_s)
        return followed

    def draft(self, rows: Sequence[Row]) -> list[DraftTree]:
        """Return a tree for each row, in order; empty where the drafter gives none."""
        followed = self.keep_up(rows)
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

    def end_others(self, running: Container[str]) -> None:
        """End the sessions of named requests that no longer run; a request may run unseen."""
        over = [
            each
            for each in self._sequences
            if each.request is not None and each.request.name not in running
        ]
        for held in over:
            self._end(held)

    def rows_seen(self) -> dict[int, TokenIds]:
        """Return the sequences of the last call, int32[n] each, by slot, to be checked."""
        return {
            held.slot: held.sequence.since(0) for held in self._sequences if held.call == self._call
        }

    def close(self) -> None:
        """End all sessions; their outputs are remembered."""
        for held in list(self._sequences):
            self._end(held)

    def abandon(self) -> None:
        """Drop all sessions, in any state, without ending them in order."""
        self._drafting.abandon(held.follower for held in self._sequences)
        for held in list(self._sequences):
            self._remove(held)

    def _follow(self, row: Row, now_s: float) -> HeldSequence | None:
        """Return the sequence of a row, up to date; None where it cannot be held."""
        held = self._known(row)
        if held is not None:
            held.call = self._call  # taken in this call: no other row's, and not to be evicted
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
        """Return the sequence that a row continues and that no other row has in this call."""
        if row.request is not None:
            return self._named(row, row.request)
        if row.num_new is None:
            return self._sequences.longest(row.tokens, row.slot, self._call)
        before = row.tokens[: max(len(row.tokens) - row.num_new, 0)]
        return self._sequences.exact(before, row.slot, self._call)

    def _named(self, row: Row, request: NamedRequest) -> HeldSequence | None:
        """Return the sequence of a request; one that the row does not go on with is ended.

        Steps without drafts are not shown, so a row may have more tokens than were generated in
        this one.
        """
        held = self._sequences.named(request.name)
        if held is None:
            return None
        is_same = held.request is not None and held.request.state is request.state
        if is_same and held.sequence.begins(row.tokens):
            return held
        self._end(held)
        return None

    def _begin(self, row: Row) -> HeldSequence:
        num_prompt = len(row.tokens) - min(row.num_new or 0, len(row.tokens))
        fields = PLAIN if row.request is None else row.request.fields
        follower = self._drafting.follow(row.tokens, num_prompt, fields)
        held = HeldSequence(follower, row.slot, request=row.request)
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
        """Make room by evicting the least recently seen sequences; return whether that suffices."""
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
        """End sequences that have not been seen for too long."""
        last_call = self._call - self._limits.idle_calls
        last_s = now_s - self._limits.idle_s
        for held in list(self._sequences):
            if held.request is not None:
                continue
            if held.call < self._call and (held.call <= last_call or held.seen_s < last_s):
                self._end(held)

    def _end(self, held: HeldSequence) -> None:
        held.follower.close()
        self._remove(held)
        self.counts.ended += 1

    def _remove(self, held: HeldSequence) -> None:
        self._sequences.remove(held)
        self._num_tokens -= len(held.sequence)
